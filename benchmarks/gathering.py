"""How long do ten thousand ranks take from the last vote to the commit? ``python -m benchmarks.gathering``; simulated.

The code that runs is the engine's own: votes are cast, counted and gathered, rank 0 waits for them and commits. Simulated
is what it waits for, a storage and a store a network away (`benchmarks.slow_places`), in time that jumps. Every rank ends
its data at a random instant of a few seconds.

- *flat*: rank 0 reads every receipt, 32 at once.
- *tree*: groups gather their receipts (`aiockpt.planning.groups`), rank 0 reads one object for each.
- *tree, 1 % of the gatherers die*: rank 0 loses patience and reads the receipts of their groups.

Before that, once for each structure, the ranks tell each other what they hold; the second table has the notes in the
store that this takes. One rank plans for all, so its calls grow with the ranks, and nobody else's do.

What is not shown: the processor's time for decoding and merging (`benchmarks.planning`), and a store or storage that
gets slower under load than its latency and one queue say.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest import mock

import anyio
import msgspec
import torch

from aiockpt.backends.memory import MemoryBackend
from aiockpt.engine.gathering import count_vote, wait_likely
from aiockpt.engine.sharing import Sharing
from aiockpt.engine.together import RELIST_S
from aiockpt.format.checksum import ALGORITHM, BLOCK_BYTES
from aiockpt.format.manifest import FileEntry, Piece, Receipt, TensorEntry
from aiockpt.format.names import data_key, data_path
from aiockpt.pipeline import votes
from aiockpt.pipeline.commit import Attempt, cast_vote, commit, wait_votes
from aiockpt.planning import groups
from aiockpt.planning.groups import group_of
from aiockpt.runtime.world import World
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.storage.backend import Backend
from aiockpt.testing.virtual_time import run_virtually
from benchmarks.report import write
from benchmarks.slow_places import CountingStore, DeadError, DyingStorage, SlowMeeting, SlowStorage

WAYS = ("flat", "tree", "tree, 1 % of the gatherers die")
WRITING_S = 5.0
DEADLINE_S = 600.0
COLUMNS = 64
EXCHANGED_TENSORS = 4
ATTEMPT = "0" * 12
STEP_ID = "step-00000001"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One world, one way.

    Attributes:
        latency_s: of a request of the storage.
        commit_s: from the last rank's vote to the durable manifest.
        read_count, read_bytes: requests to read, and their bytes, of the process that has most of them: what it asks for
            after the last vote, and before.
        store_count: calls of the store by the process that has most of them, and by all.
    """

    ranks: int
    way: str
    latency_s: float
    commit_s: float
    read_count: int
    read_bytes: int
    store_count: int
    store_count_of_all: int


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The first save of one world, as far as it is planned.

    Attributes:
        plan_s: until the last rank knows what to write.
        store_count: calls of the store by the process that has most of them, and by all.
    """

    ranks: int
    plan_s: float
    store_count: int
    store_count_of_all: int


class Gathering(msgspec.Struct, frozen=True):
    """One run."""

    rows: list[Row]
    exchanges: list[Exchange]


def receipt(rank: int, world_size: int) -> Receipt:
    """Return the vote of one rank: a row of a matrix, in a file of its own."""
    size = 4096 + 4 * COLUMNS
    path = data_path(ATTEMPT, rank, 0)
    return Receipt(
        id=STEP_ID,
        step=1,
        generation=1,
        sequence=1,
        run=ATTEMPT,
        parent=None,
        attempt=ATTEMPT,
        rank=rank,
        world_size=world_size,
        created_ns=0,
        plan_digest="",
        scalars_digest="",
        files=(FileEntry.of(path, size=size, rank=rank, algo=ALGORITHM, block=BLOCK_BYTES, sums=bytes(8)),),
        tensors={"w": TensorEntry("F32", (world_size, COLUMNS), (Piece(0, 4096, size, (rank, 0), (1, COLUMNS)),))},
        state={"step": 1, "notes": ["what all ranks say alike"] * 50},
    )


class Job:
    """All ranks of one simulated save."""

    def __init__(self, ranks: int, latency_s: float, dying: set[int]) -> None:
        self.ranks = ranks
        self.store = CountingStore()
        inner: Any = MemoryBackend()
        self.objects: Backend = inner
        self.storages: list[Any] = [
            (DyingStorage if rank in dying else SlowStorage)(inner, latency_s) for rank in range(ranks)
        ]
        self.meetings = [SlowMeeting(self.store, rank, ranks) for rank in range(ranks)]
        self.voted_s = self.committed_s = 0.0

    async def run(self) -> None:
        """Let every rank write, vote and count its vote, and rank 0 commit."""
        dice = random.Random(self.ranks)
        async with anyio.create_task_group() as tasks:
            for rank in range(self.ranks):
                tasks.start_soon(self._save, rank, dice.uniform(0, WRITING_S))

    async def _save(self, rank: int, writing_s: float) -> None:
        own, storage, meeting = receipt(rank, self.ranks), self.storages[rank], self.meetings[rank]
        await anyio.sleep(writing_s)
        upload = await self.objects.create(data_key(STEP_ID, ATTEMPT, rank, 0), own.files[0].size)
        await upload.write(0, [memoryview(bytes(own.files[0].size))])
        await upload.finish()
        await cast_vote(storage, own)
        self.voted_s = max(self.voted_s, anyio.current_time())
        with suppress(DeadError):
            await count_vote(meeting, "votes", storage, own)
        if rank == 0:
            await self._commit(own)

    async def _commit(self, own: Receipt) -> None:
        storage, meeting = self.storages[0], self.meetings[0]
        attempt = Attempt(STEP_ID, 1, ATTEMPT, 1, 1, ATTEMPT, None, 0, self.ranks)
        found = await wait_votes(storage, attempt, own, DEADLINE_S, lambda: wait_likely(meeting, "votes", RELIST_S))
        await commit(storage, found, World())
        self.committed_s = anyio.current_time()


def simulate(ranks: int, way: str, latency_s: float) -> Row:
    """Run one save of a world and tell what was waited for.

    Args:
        way: one of `WAYS`.
    """
    above = ranks if way == "flat" else groups.GATHER_ABOVE
    with mock.patch.object(groups, "GATHER_ABOVE", above), mock.patch.object(votes.logger, "disabled", True):
        job = Job(ranks, latency_s, _doomed(ranks) if way == WAYS[2] else set())
        run_virtually(job.run)
    busiest = max(job.storages, key=lambda storage: storage.read_count)
    return Row(
        ranks=ranks,
        way=way,
        latency_s=latency_s,
        commit_s=job.committed_s - job.voted_s,
        read_count=busiest.read_count,
        read_bytes=max(storage.read_bytes for storage in job.storages),
        store_count=max(meeting.call_count for meeting in job.meetings),
        store_count_of_all=sum(meeting.call_count for meeting in job.meetings),
    )


def _doomed(ranks: int) -> set[int]:
    """Return all ranks of one group in a hundred, at least of one, but not of rank 0's: whoever gathers it dies."""
    some = groups.groups_of(ranks)[1::100]
    return {rank for group in some for rank in group}


def exchange(ranks: int) -> Exchange:
    """Let all ranks of a world plan their first save: a row of each tensor a rank."""
    store = CountingStore()
    sharings = [Sharing(SlowMeeting(store, rank, ranks), DEADLINE_S, ATTEMPT) for rank in range(ranks)]

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
        await sharings[rank].plan(sharings[rank].next_turn(1), state)

    async def main() -> float:
        async with anyio.create_task_group() as tasks:
            for rank in range(ranks):
                tasks.start_soon(plan, rank)
        return anyio.current_time()

    seconds = run_virtually(main)
    counts = [cast(SlowMeeting, sharing.meeting).call_count for sharing in sharings]
    return Exchange(ranks=ranks, plan_s=seconds, store_count=max(counts), store_count_of_all=sum(counts))


def run(worlds: Sequence[int], latencies_s: Sequence[float], exchanging: Sequence[int]) -> Gathering:
    """Simulate every world every way; trees only where the engine gathers."""
    rows = [
        simulate(ranks, way, latency_s)
        for ranks in worlds
        for latency_s in latencies_s
        for way in (WAYS if group_of(0, ranks) else WAYS[:1])
    ]
    return Gathering(rows, [exchange(ranks) for ranks in exchanging])


def render(gathering: Gathering) -> str:
    """Return the tables, as Markdown."""
    headings = (
        "ranks",
        "latency",
        "way",
        "last vote to commit",
        "reads of the busiest",
        "bytes",
        "its store calls",
        "of all",
    )
    rows = [
        f"{row.ranks:,} | {row.latency_s * 1e3:g} ms | {row.way} | {row.commit_s:.2f} s | {row.read_count:,} | "
        f"{row.read_bytes / (1 << 20):.1f} MiB | {row.store_count:,} | {row.store_count_of_all:,}"
        for row in gathering.rows
    ]
    exchanges = [
        f"{one.ranks:,} | {one.plan_s:.2f} s | {one.store_count:,} | {one.store_count_of_all:,}"
        for one in gathering.exchanges
    ]
    return "\n\n".join(
        [
            _table(headings, rows),
            _table(("ranks", "first save planned", "store calls of the busiest", "of all"), exchanges),
        ]
    )


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}", *(f"| {row} |" for row in rows)])


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gathering", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000, 10_000], help="the worlds")
    parser.add_argument(
        "--latency-ms", type=float, nargs="+", default=[5, 20, 50], help="of the storage (default: 5 20 50)"
    )
    parser.add_argument(
        "--exchange", type=int, nargs="+", default=[10, 100, 1000], help="the worlds of the second table"
    )
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    parser.add_argument("--smoke", action="store_true", help="10 and 300 ranks, 20 ms: shows that it runs, no figures")
    arguments = parser.parse_args()
    worlds, latencies = ([10, 300], [20.0]) if arguments.smoke else (arguments.ranks, arguments.latency_ms)
    exchanging = [10, 50] if arguments.smoke else arguments.exchange
    gathering = run(worlds, [latency / 1e3 for latency in latencies], exchanging)
    print(render(gathering))
    if arguments.out:
        write(gathering, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
