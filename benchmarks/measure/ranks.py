"""Joint saves and loads of several ranks: each contender on several numbers of ranks, by torchrun and gloo.

Each saves on 2 ranks (and aiockpt on one, the same bytes, to see what sharing a disk costs), then loads on 2 ranks and on 4,
from the disk and not from the page cache. Four replicas of the state (DDP) load it too, each alone and with a ``load_group``
that reads once and sends: from the disk, from the page cache, and from a slow storage. The code of one rank is in
`benchmarks.measure.rank`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn

REPLICAS = 4


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The task of all ranks of one torchrun.

    Attributes:
        action: "save" or "load".
        repetitions: timed saves (or loads).
        step: the last one saved, or the one to load.
        replicated: every rank holds the whole state, as with DDP, instead of its shards.
        load_group: ranks read once and send to each other (aiockpt only).
        warm: the page cache is kept between the loads.
        storage_bytes_s: the rate at which all ranks together may read (aiockpt only); None: that of the disk.
    """

    turn: Turn
    contender: str
    folder: str
    answer: str
    action: str
    repetitions: int
    step: int
    replicated: bool = False
    load_group: bool = False
    warm: bool = False
    storage_bytes_s: float | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Samples: seconds of each operation, and of the pause of the caller; bytes read over bytes needed, all ranks.

    Attributes:
        read_once: for replicas, bytes read by all ranks over the bytes of the requested tensors, each counted once.
    """

    seconds: list[float] = []
    held_s: list[float] = []
    over_read: list[float] = []
    read_once: list[float] = []


def _torchrun(order: Order, ranks: int) -> Answer:
    """Carry out *order* on *ranks* processes and return rank 0's answer."""
    paper = Path(order.answer).with_suffix(".order")
    paper.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.measure.rank", str(paper)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{order.contender} ({order.action} on {ranks}): {done.stderr[-3000:]}")
    return msgspec.json.decode(Path(order.answer).read_bytes(), type=Answer)


def _order(turn: Turn, name: str, **more: Any) -> Order:
    work = Path(turn.folder)
    return Order(turn=turn, contender=name, folder=str(work / "saved"), answer=str(work / "answer"), **more)


def ranks(turn: Turn, outcome: Outcome) -> None:
    """Save and load the shards of one FSDP2 state."""
    for name in turn.contenders:
        samples: Samples = {}
        save = _order(turn, name, action="save", repetitions=turn.repetitions, step=turn.repetitions)
        if name == "aiockpt":
            samples["save_1_s"] = _torchrun(save, 1).seconds
            shutil.rmtree(save.folder)
        saved = _torchrun(save, 2)
        samples["save_2_s"] = saved.seconds
        if name != "floor":
            samples["held_s"] = saved.held_s
        for count in turn.settings["load_ranks"] if name != "dcp-async" else ():
            loaded = _torchrun(msgspec.structs.replace(save, action="load"), count)
            samples[f"load_{count}_s"] = loaded.seconds
            if name != "floor":
                samples[f"read_{count}_ratio"] = loaded.over_read
        shutil.rmtree(save.folder)
        outcome.add(turn, name, samples)


def replicas(turn: Turn, outcome: Outcome) -> None:
    """Load a whole state on each of four ranks, alone and with a group."""
    save = _order(turn, "aiockpt", action="save", repetitions=0, step=0, replicated=True)
    _torchrun(save, REPLICAS)
    load = msgspec.structs.replace(save, action="load", repetitions=turn.repetitions)
    warm = msgspec.structs.replace(load, warm=True)
    slow = msgspec.structs.replace(warm, storage_bytes_s=turn.settings["storage_bytes_s"])
    samples: dict[str, Samples] = {name: {"read_ratio": []} for name in turn.contenders}
    for metric, order in {"disk_s": load, "cache_s": warm, "slow_s": slow}.items():
        for name in turn.contenders:
            found = _torchrun(msgspec.structs.replace(order, load_group=name == "load_group"), REPLICAS)
            samples[name][metric] = found.seconds
            samples[name]["read_ratio"] += found.read_once
    for name, found_samples in samples.items():
        outcome.add(turn, name, found_samples)
