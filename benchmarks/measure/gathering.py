"""Simulation of the time that ten thousand ranks take from the last vote to the commit.

The engine's own code runs: votes are cast, counted and gathered; rank 0 waits for them and commits. Only the storage and the
store behind a network (`benchmarks.measure.network`) are simulated, in virtual time. Every rank finishes its data at a
random instant within a few seconds. Before that, once for each structure, the ranks exchange their holdings (`exchanges`).
One rank plans for all, so its calls grow with the number of ranks, and those of other ranks do not.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any
from unittest import mock

import anyio
import torch

from aiockpt.backends.memory import MemoryBackend
from aiockpt.format.manifest import Piece, Receipt, TensorEntry
from aiockpt.format.names import data_path
from aiockpt.pipeline import receipts
from aiockpt.pipeline.commit import Attempt, cast_vote, commit, wait_votes
from aiockpt.planning import groups
from aiockpt.planning.groups import group_of
from aiockpt.ranks.gathering import count_vote, wait_likely
from aiockpt.ranks.rounds import Rounds
from aiockpt.ranks.save import RELIST_S
from aiockpt.runtime.world import World
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.storage.backend import Backend
from benchmarks.measure.network import CountingStore, DeadError, DyingStorage, SlowMeeting, SlowStorage
from benchmarks.measure.planning import ATTEMPT, STEP_ID, vote
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn
from tests.simulated.virtual_time import run_virtually

FLAT, TREE, DYING = "flat", "tree", "tree, 1 % of the gatherers die"
"""Rank 0 reads every receipt, 32 at once; groups gather their receipts (`aiockpt.planning.groups`), rank 0 reads one object
for each; rank 0 times out on groups whose gatherer died, and reads their receipts."""
WRITING_S = 5.0
DEADLINE_S = 600.0
COLUMNS = 64
EXCHANGED_TENSORS = 4


def receipt(rank: int, world_size: int) -> Receipt:
    """Return the vote of one rank: a row of a matrix, in a file of its own."""
    size = 4096 + 4 * COLUMNS
    tensors = {"w": TensorEntry("F32", (world_size, COLUMNS), (Piece(0, 4096, size, (rank, 0), (1, COLUMNS)),))}
    return vote(rank, world_size, [size], tensors, {"step": 1, "notes": ["what all ranks say alike"] * 50})


class _Job:
    """All ranks of one simulated save."""

    def __init__(self, ranks: int, latency_s: float, dying: set[int]) -> None:
        self.ranks = ranks
        inner: Any = MemoryBackend()
        self.objects: Backend = inner
        self.storages: list[Any] = [
            (DyingStorage if rank in dying else SlowStorage)(inner, latency_s) for rank in range(ranks)
        ]
        store = CountingStore()
        self.meetings = [SlowMeeting(store, rank, ranks) for rank in range(ranks)]
        self.voted_s = self.committed_s = 0.0

    async def run(self) -> None:
        """Simulate every rank's write and vote, and the commit of rank 0."""
        dice = random.Random(self.ranks)
        async with anyio.create_task_group() as tasks:
            for rank in range(self.ranks):
                tasks.start_soon(self._save, rank, dice.uniform(0, WRITING_S))

    async def _save(self, rank: int, writing_s: float) -> None:
        own, storage, board = receipt(rank, self.ranks), self.storages[rank], self.meetings[rank]
        await anyio.sleep(writing_s)
        upload = await self.objects.create(f"{STEP_ID}/{data_path(ATTEMPT, rank, 0)}", own.files[0].size)
        await upload.write(0, [memoryview(bytes(own.files[0].size))])
        await upload.finish()
        await cast_vote(storage, own)
        self.voted_s = max(self.voted_s, anyio.current_time())
        with suppress(DeadError):
            await count_vote(board, "votes", storage, own)
        if rank == 0:
            await self._commit(own)

    async def _commit(self, own: Receipt) -> None:
        storage, board = self.storages[0], self.meetings[0]
        attempt = Attempt(STEP_ID, 1, ATTEMPT, 1, 1, ATTEMPT, None, 0, self.ranks)
        found = await wait_votes(storage, attempt, own, DEADLINE_S, lambda: wait_likely(board, "votes", RELIST_S))
        manifest = await commit(storage, found, World())
        self.committed_s = anyio.current_time()
        if sum(len(entry.pieces) for entry in manifest.tensors.values()) != self.ranks:
            raise RuntimeError("what was committed is not what all ranks voted for")


def simulate(ranks: int, way: str, latency_s: float) -> dict[str, float]:
    """Run one save of a world; return its times, and the counts of the busiest rank: storage reads, store calls."""
    above = ranks if way == FLAT else groups.GATHER_ABOVE
    with mock.patch.object(groups, "GATHER_ABOVE", above), mock.patch.object(receipts.logger, "disabled", True):
        job = _Job(ranks, latency_s, _doomed(ranks) if way == DYING else set())
        run_virtually(job.run)
    return {
        "commit_s": job.committed_s - job.voted_s,
        "read_count": max(storage.read_count for storage in job.storages),
        "read_bytes": max(storage.read_bytes for storage in job.storages),
        "store_count": max(board.call_count for board in job.meetings),
        "store_of_all_count": sum(board.call_count for board in job.meetings),
    }


def _doomed(ranks: int) -> set[int]:
    """Return all ranks of one group in a hundred (at least one, not rank 0's): its gatherer dies."""
    return {rank for group in groups.groups_of(ranks)[1::100] for rank in group}


def gathering(turn: Turn, outcome: Outcome) -> None:
    """Simulate every world every way; trees only where the engine gathers."""
    for ranks in turn.settings["ranks"]:
        for latency_ms in turn.settings["latency_ms"]:
            for way in turn.contenders if group_of(0, ranks) else (FLAT,):
                found = simulate(ranks, way, latency_ms / 1e3)
                outcome.add(turn, f"{ranks:,} ranks, {latency_ms:g} ms, {way}", _once(found))


def exchanges(turn: Turn, outcome: Outcome) -> None:
    """Simulate the ranks of every world as they plan their first save."""
    for ranks in turn.settings["ranks"]:
        outcome.add(turn, f"{ranks:,} ranks", _once(exchange(ranks)))


def exchange(ranks: int) -> dict[str, float]:
    """Simulate a world that plans its first save, one row of each tensor a rank, until the last rank has its part."""
    store = CountingStore()
    meetings = [SlowMeeting(store, rank, ranks) for rank in range(ranks)]
    sharings = [Rounds(board, DEADLINE_S, ATTEMPT) for board in meetings]

    async def plan(rank: int) -> None:
        tensors = tuple(
            TensorShard(
                name=f"w{number}",
                dtype="F32",
                shape=(ranks, COLUMNS),
                boxes=(Box((rank, 0), (1, COLUMNS)),),
                data=torch.zeros(COLUMNS),
            )
            for number in range(EXCHANGED_TENSORS)
        )
        state = ShardedState(tensors=tensors, alias={}, values={}, per_rank=None, structure="")
        await sharings[rank].begin(1).plan(state)

    async def main() -> float:
        async with anyio.create_task_group() as tasks:
            for rank in range(ranks):
                tasks.start_soon(plan, rank)
        return anyio.current_time()

    seconds = run_virtually(main)
    counts = [board.call_count for board in meetings]
    return {"plan_s": seconds, "store_count": max(counts), "store_of_all_count": sum(counts)}


def _once(found: dict[str, float]) -> Samples:
    return {name: [value] for name, value in found.items()}
