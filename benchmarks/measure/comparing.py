"""The cost of comparing replicas between ranks: the pause of real ranks, and the merge of many simulated ones.

Real ranks (torchrun, gloo) have equal lists of parameters, and save them eagerly by two checkpointers, one that compares
and one that does not, in turns. A pause is from a barrier to the return of ``save()`` on the slowest rank. The reading for
the comparison is also timed alone: pauses on few processors vary by more than its time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aiockpt.format.manifest import encode_receipt
from aiockpt.format.merge import merge_receipts, row_of
from aiockpt.format.validate import ROW
from aiockpt.planning.spread import LocalBoxes, spread
from aiockpt.state.geometry import Box
from benchmarks.measure.planning import plan_state, planned_receipt, take_share, timed
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn

CHECK, FIRST = "check", "first"
SHAPE = (1024, 64)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The task of all ranks of one torchrun: *repetitions* saves of each kind, of *tensors* of *size_bytes* together."""

    folder: str
    answer: str
    tensors: int
    size_bytes: int
    repetitions: int


def comparing(turn: Turn, outcome: Outcome) -> None:
    """Measure pauses on each number of real ranks, and the merge of a simulated world."""
    samples: dict[str, Samples] = {name: {} for name in turn.contenders}
    settings = turn.settings
    for ranks in settings["ranks"]:
        for name, values in _pauses(turn, ranks).items():
            row, _, metric = name.partition("/")
            if row in samples:
                samples[row][f"{metric}_{ranks}_s"] = values
    for name in turn.contenders:
        for metric, value in simulate(name, settings["simulated_ranks"], settings["simulated_tensors"]).items():
            samples[name][metric] = [value]
        outcome.add(turn, name, samples[name])
    outcome.note(turn, f"The load average was {os.getloadavg()[0]:.1f} when it ended.")


def _pauses(turn: Turn, ranks: int) -> dict[str, list[float]]:
    folder = Path(turn.folder) / f"{ranks}-ranks"
    answer, paper = folder.with_suffix(".answer"), folder.with_suffix(".order")
    size_bytes = turn.size_bytes * 2 // max(ranks, 2)  # each rank holds the whole
    order = Order(
        folder=str(folder),
        answer=str(answer),
        tensors=turn.settings["tensors"],
        size_bytes=size_bytes,
        repetitions=turn.repetitions,
    )
    paper.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", __name__, str(paper)], env=environment, check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(folder)
    return msgspec.json.decode(answer.read_bytes(), type=dict[str, list[float]])


def simulate(name: str, ranks: int, tensors: int) -> dict[str, float]:
    """Return the time to merge the receipts of *ranks* with equal *tensors*, and the bytes of one receipt."""
    held = [LocalBoxes(f"layers.{n}.weight", "F32", SHAPE, (Box.whole(SHAPE),)) for n in range(tensors)]
    parts = spread([held] * ranks)
    rows = np.array([row_of(one.name, one.boxes[0].offsets, one.boxes[0].sizes) for one in held], ROW)
    rows["digest"] = np.arange(tensors)
    table = {"replicas": rows.tobytes()} if name == CHECK else {}
    votes = [
        msgspec.structs.replace(planned_receipt(plan_state(take_share(held, parts[rank])), rank, ranks), **table)
        for rank in range(ranks)
    ]
    merges_s = [
        timed(lambda: merge_receipts(votes, writer="benchmark", write_id="w", created_ns=0))[1] for _ in range(2)
    ]
    # Later merges of a run reuse the tensors of the one before.
    return {"merge_s": merges_s[-1], "receipt_bytes": float(len(encode_receipt(votes[-1])))}


def run_rank(order: Order) -> None:
    """Carry out the task of one rank; rank 0 writes the answer."""
    import torch
    from torch import distributed, nn

    import aiockpt
    from aiockpt.pipeline.replica_samples import ReplicaSamples
    from benchmarks.measure.rank import slowest

    distributed.init_process_group("gloo")
    elements = order.size_bytes // 4 // order.tensors
    torch.manual_seed(0)
    state = {"model": nn.ParameterList([torch.randn(elements) for _ in range(order.tensors)])}
    answer: dict[str, list[float]] = {}
    io: dict[str, Any] = {"retention": aiockpt.Retention(last=1)}
    with (
        aiockpt.Checkpointer(f"{order.folder}/{CHECK}", **io) as check,
        aiockpt.Checkpointer(f"{order.folder}/{FIRST}", replicas="first", **io) as first,
    ):
        for step in range(order.repetitions + 2):  # the first two make plans and slabs
            turns = [(CHECK, check), (FIRST, first)]
            for name, ckpt in turns if step % 2 else reversed(turns):
                distributed.barrier()
                begun_s = time.perf_counter()
                save = ckpt.save(step, state)
                pause_s = slowest(time.perf_counter() - begun_s)
                save.result(600)
                if step >= 2:
                    answer.setdefault(f"{name}/pause", []).append(pause_s)
        known = check._coordinator.known_share(check._submitter.walk(state))
        assert known is not None
        samples = ReplicaSamples(known.replicas, check._engine.accelerator, whole=False)
        evict = torch.ones(64 << 20, dtype=torch.uint8)
        for _ in range(order.repetitions):
            evict.sum()  # after a training step the caches hold other tensors than these
            distributed.barrier()
            begun_s = time.perf_counter()
            samples.begin((), 1.0)
            answer.setdefault(f"{CHECK}/read", []).append(slowest(time.perf_counter() - begun_s))
    if distributed.get_rank() == 0:
        Path(order.answer).write_bytes(msgspec.json.encode(answer))
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order))
