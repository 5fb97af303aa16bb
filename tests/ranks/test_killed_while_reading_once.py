"""A rank is killed while ranks read for each other: the rest learn it at once, and raise before their deadline."""

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.runtime.world import OsFiles, World
from tests.ranks.forked import run_forked
from tests.watch import until

WORLD_SIZE, KILLED = 3, 1
NAMING_S = 3.0
SMALL = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=1 << 16, block_bytes=1 << 16, read_bytes=1 << 16)


class DyingFiles(OsFiles):
    """The operating system of a rank that is killed at its *last*-th read."""

    def __init__(self, last: int) -> None:
        self._left = last

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.preadv(fd, buffers, offset, flags)


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Load with the others; write what happened to FOLDER/RANK."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    group: Any = dist.new_group(backend="gloo")
    world = World(files=DyingFiles(20)) if rank == KILLED else None
    limits = aiockpt.Limits(io=SMALL, deadlines=aiockpt.Deadlines(ranks_s=60, close_s=NAMING_S))
    ckpt = aiockpt.Checkpointer(folder / "run", ranks=aiockpt.Ranks(load_group=group), limits=limits, world=world)
    begun = time.monotonic()
    error = ckpt.load({"w": torch.zeros(4 << 20)}).exception()
    seconds = time.monotonic() - begun
    named = isinstance(error, aiockpt.RankTimeoutError) and list(error.ranks)
    (folder / f"outcome-{rank}").write_text(f"{type(error).__name__}\n{named}\n{seconds}\n{error}\n")
    outcomes = [folder / f"outcome-{other}" for other in range(world_size) if other != KILLED]
    until(lambda: all(map(Path.exists, outcomes)), "the others")  # the end of rank 0's store would be another error
    os._exit(0)


def test_the_others_raise_before_the_deadline_and_name_it(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(1, {"w": torch.arange(4 << 20).float()}).result()
    codes = run_forked("tests.ranks.test_killed_while_reading_once", WORLD_SIZE, tmp_path, 150)
    assert codes[KILLED] == -signal.SIGKILL
    for rank in set(range(WORLD_SIZE)) - {KILLED}:
        kind, named, seconds, message = (tmp_path / f"outcome-{rank}").read_text().split("\n", 3)
        assert kind in ("RankTimeoutError", "RankFailedError"), message
        assert f"rank {KILLED}" in message
        assert float(seconds) < 60 - NAMING_S, "the group's deadline was waited for"
        assert named in (f"[{KILLED}]", "False")
