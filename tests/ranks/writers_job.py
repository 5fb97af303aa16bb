"""A job whose ranks are processes with a writer process each, for tests that kill some of them.

The ranks are forked by a server that has loaded torch, so that starting four costs what one does. Each does what it is told
over a pipe. What they save follows from the step, so that a test knows every bit of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import aiockpt
from tests.small_run import SMALL
from tests.worker.worker_child import before_window, die

DEADLINE_S = 250
DEADLINES = aiockpt.Deadlines(ranks_s=30, commit_s=30, takeover_s=2, close_s=60)
ROWS = 24


def whole(step: int, grown: bool = False) -> dict[str, Any]:
    """Return what a checkpoint of *step* holds; *grown* has one tensor more."""
    dice = torch.Generator().manual_seed(step)
    state = {f"w{index}": torch.randn(301, 33, generator=dice) for index in range(4 + grown)}
    return {**state, "sharded": torch.randn(ROWS, 700, generator=dice), "step": step}


def shares(step: int, grown: bool, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the same as one rank has it: some of it replicated, some sharded."""
    state = whole(step, grown)
    mine = state["sharded"].chunk(mesh.size())[mesh.get_rank()]
    return {**state, "sharded": DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)}


def run_rank(pipe: Connection, rank: int, world_size: int, places: list[Any], file: str | None, worker: Any) -> None:
    """Be one rank, until the pipe is closed or somebody kills this process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    patience = timedelta(seconds=DEADLINE_S)
    stores: Any = dist  # which exports them without saying so
    if file is not None:
        store: Any = stores.FileStore(file, world_size)
    elif rank == 0:
        store = stores.TCPStore("127.0.0.1", 0, world_size, True, patience, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = stores.TCPStore("127.0.0.1", pipe.recv(), world_size, False, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    mesh = DeviceMesh("cpu", list(range(world_size)))
    with aiockpt.Checkpointer(
        places, worker=worker, limits=aiockpt.Limits(io=SMALL, deadlines=DEADLINES), on_error="warn"
    ) as ckpt:
        pipe.send("ready")
        save: aiockpt.SaveFuture | None = None
        while True:
            try:
                order, *given = pipe.recv()
            except EOFError:
                break
            if order == "save":
                step, snapshot, grown = given
                save = ckpt.save(step, shares(step, grown, mesh), snapshot=snapshot)
            elif order == "die in the copy":
                before_window(1, die)
            elif order == "result":
                assert save is not None
                error = save.exception(DEADLINE_S)
                pipe.send(save.result(0).generation if error is None else (type(error).__name__, str(error)))
                continue
            elif order == "in":
                assert save is not None
                pipe.send(save.committed(given[0]).result(DEADLINE_S).generation)
                continue
            elif order == "writer":
                pipe.send(ckpt._destination._connection.process.pid)  # type: ignore[attr-defined]
                continue
            if save is not None and order == "save":
                save.snapshotted().result(DEADLINE_S)
            pipe.send("done")


class Job:
    """Ranks at work. Use as ``with Job(…) as job``; at the end nothing of it is left.

    Args:
        file: the store is there; None has rank 0 host it.
        workers: what writes, by rank.
    """

    def __init__(
        self, world_size: int, places: list[Any], *, file: str | None = None, workers: Sequence[str] = ("process",)
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipes: list[Any] = []
        self.ranks: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            given = (theirs, rank, world_size, places, file, workers[rank % len(workers)])
            process = context.Process(target=run_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)
        if file is None:
            port = self.hear(0)
            for pipe in self.pipes[1:]:
                pipe.send(port)

    def __enter__(self) -> Job:
        try:
            assert self.all_hear() == ["ready"] * len(self.ranks)
        except BaseException:
            self.kill(*range(len(self.ranks)))
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.ranks:
            process.join(DEADLINE_S)
            process.kill()
            process.join()

    def tell(self, *order: Any, ranks: Sequence[int] | None = None) -> None:
        """Have ranks do something."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.pipes[rank].send(order)

    def hear(self, rank: int) -> Any:
        """Return what a rank says next."""
        assert self.pipes[rank].poll(DEADLINE_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def all_hear(self) -> list[Any]:
        return [self.hear(rank) for rank in range(len(self.ranks))]

    def ask(self, *order: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Have ranks do something; return what each says to that."""
        ranks = range(len(self.ranks)) if ranks is None else ranks
        self.tell(*order, ranks=ranks)
        return [self.hear(rank) for rank in ranks]

    def kill(self, *ranks: int) -> None:
        """Kill trainers at once, as the out-of-memory killer does."""
        for rank in ranks:
            os.kill(self.ranks[rank].pid, signal.SIGKILL)
        for rank in ranks:
            self.ranks[rank].join(DEADLINE_S)
