"""Publication by one rank and by three, into a place that takes so many bytes a second of each of them.

Each rank is a process. Weights are bfloat16; a delta has 0.8 % of them changed, as in `benchmarks.measure.publishing`. The
rate is that of a connection, which a host with a network card of its own has: here the ranks share processors and a disk.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.publish import step_weights
from aiockpt.runtime.limits import Pace
from aiockpt.runtime.world import World
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.storage.open import open_backend
from benchmarks.measure.processes import measure_in_processes
from benchmarks.measure.publishing import WAIT_S, change, make_model
from benchmarks.visit import Outcome, Turn

TENSORS = 48


class Rank(msgspec.Struct, frozen=True):
    """The task of one process."""

    number: int
    count: int
    turn: Turn


class Throttled(Forwarding):
    """A place that takes *bytes_per_s* of this process."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        super().__init__(open_backend(url))
        self._pace = Pace(bytes_per_s, World().clock)

    async def forward(self, call: BackendCall) -> Any:
        if call.verb == "upload.write":
            await self._pace.throttle(call.size)
        return await call()


def publishing_ranks(turn: Turn, outcome: Outcome) -> None:
    """Measure one number of ranks."""
    (contender,) = turn.contenders
    count = int(contender.split()[0])
    first, *_ = measure_in_processes("publishing_ranks", [Rank(number, count, turn) for number in range(count)], WAIT_S)
    outcome.add(turn, contender, first)


def be_rank(task: Rank) -> dict[str, list[float]]:
    """Save steps with the other ranks, and publish each from the first one: in full and as a delta in turns."""
    torch.set_num_threads(1)
    turn, folder = task.turn, Path(task.turn.folder)
    step_weights.SHARE_BYTES = min(step_weights.SHARE_BYTES, turn.size_bytes // task.count)
    store: Any = torch.distributed.FileStore(str(folder / "store"), task.count)  # type: ignore[attr-defined]
    wants = aiockpt.Publish(Throttled(str(folder / "pub"), turn.settings["bytes_per_s"]), every=1 << 40)
    generator = torch.Generator().manual_seed(1)
    model = make_model(turn.size_bytes, TENSORS, generator)
    samples: dict[str, list[float]] = {"full_s": [], "delta_s": []}
    with aiockpt.Checkpointer(
        folder / "run", ranks=aiockpt.Ranks(task.number, task.count, store), publish=wants
    ) as ckpt:
        for step in range(1, 2 * turn.repetitions + 1):
            ckpt.save(step, {"model": model}).result()
            if task.number == 0:
                done = ckpt.publish(step, wants, full=step % 2 == 1).result()
                samples[f"{done.kind}_s"].append(done.seconds)
                store.set(f"published {step}", b"")
            while not store.check([f"published {step}"]):  # they would wait in the next save
                time.sleep(0.05)
            for tensor in model.parameters():
                change(tensor, generator)
    return samples


if __name__ == "__main__":
    print(msgspec.json.encode(be_rank(msgspec.json.decode(sys.argv[1], type=Rank))).decode())
