"""Detection of other ranks' progress from what they left in storage, for when the store is unreachable.

Ranks exchange notes in a store (`aiockpt.ranks.rounds`). The death of a trainer can end its connection to the store, or the
store itself, while its writer process goes on (`aiockpt.worker`). Guarantees:

- Rank 0's receipt has all that its notes would have: the place, the generation, the lineage. Rank 0 needs no note at all.
- A failure record exists only when no rank can commit the attempt any more.
- The store is polled first, the storage only after a pause without news: a successful save costs it nothing. The more
  ranks there are, the more rarely each polls.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import anyio
import msgspec

from aiockpt.engine.context import Engine, Place
from aiockpt.errors import (
    BadStepError,
    CheckpointError,
    ManifestError,
    ObjectNotFoundError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from aiockpt.format.document import described
from aiockpt.format.manifest import Receipt, decode_receipt
from aiockpt.format.names import failure_key, parse_failure, receipt_folder, receipt_key, step_id
from aiockpt.format.validate import check_receipt
from aiockpt.pipeline.commit import Attempt
from aiockpt.ranks.membership import Waiting
from aiockpt.ranks.rounds import RoundNotes, Rounds
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.notes import StoreLostError, growing_pauses
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import read_record

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
POLL_S, POLL_OF_A_RANK_S = 2.0, 0.01
"""Between two polls of the storage, and the addition for each rank."""
FIRST_POLL_S = 0.1
"""The first pause once the store is lost; it grows to the usual one."""
_READ = 8
"""Failure records that are read, to find one whose cause is not the failure of yet another rank."""


class FailureRecord(msgspec.Struct, frozen=True):
    """The record of a rank whose part of an attempt will never be complete."""

    rank: int
    failure: str


class StorageFallback:
    """Access to what the ranks of one attempt left in one place.

    Args:
        nonce: of the attempt.
    """

    def __init__(self, place: Place, step: int, nonce: str) -> None:
        self._backend: Backend = place.backend
        self._id = step_id(step)
        self._nonce = nonce
        self._pause_s = poll_pause_s(place.engine)

    async def begun(self) -> Attempt | None:
        """Return the attempt as rank 0 began it; None before rank 0 has voted.

        Raises:
            RankFailedError: a rank has failed, and rank 0 need not vote.
        """
        receipt = await self._receipt_of(0)
        if receipt is None:
            failure = await self.failure()
            if failure is not None:
                raise failure
            return None
        fields = {name: getattr(receipt, name) for name in Attempt.__struct_fields__}
        return Attempt(**fields)

    async def _receipt_of(self, rank: int) -> Receipt | None:
        key = receipt_key(self._id, self._nonce, rank)
        try:
            receipt = decode_receipt(await read_record(self._backend, key), key)
            check_receipt(receipt, self._id, self._nonce, rank)
        except CheckpointError:  # not there, not whole, or the storage is away: it is polled again
            return None
        return receipt

    async def failure(self) -> RankFailedError | BadStepError | None:
        """Return why there will be no checkpoint of this attempt, if a rank has recorded it; else None."""
        try:
            listing = await self._backend.list(receipt_folder(self._id, self._nonce))
            ranks = [parse_failure(stat.key.rpartition("/")[2]) for stat in listing.objects]
            records = [await self._read_failure(rank) for rank in [rank for rank in ranks if rank is not None][:_READ]]
        except CheckpointError as error:  # the storage is away: what needs it raises that
            logger.info("%s: failure records could not be read: %s", self._id, error)
            return None
        causes = [record for record in records if not record.failure.startswith(RankFailedError.__name__)] or records
        if not causes:
            return None
        rank, why = causes[0].rank, causes[0].failure
        if why.startswith(BadStepError.__name__):
            return BadStepError(why)
        return RankFailedError(f"{self._id} was given up because rank {rank} failed: {why}", [rank])

    async def _read_failure(self, rank: int) -> FailureRecord:
        try:
            data = await read_record(self._backend, failure_key(self._id, self._nonce, rank))
            return msgspec.json.decode(data, type=described(FailureRecord))
        except (ManifestError, msgspec.DecodeError, UnicodeDecodeError):
            return FailureRecord(rank, "its record cannot be read")

    async def watch_failures(self) -> None:
        """Poll until a rank has failed.

        Raises:
            RankFailedError: a rank has failed.
            BadStepError: a rank has found the step bad.
        """
        while True:
            await anyio.sleep(self._pause_s)
            failure = await self.failure()
            if failure is not None:
                raise failure


@asynccontextmanager
async def watching_failures(notes: RoundNotes, fallback: StorageFallback) -> AsyncIterator[None]:
    """Stop the block, and raise, as soon as another rank reports a failure; on rank 0 also when it finds a failure record.

    Rank 0 polls for the records of ranks that lost the store, and notifies the others. If rank 0 has lost the store, too,
    the others find the record when they poll the storage for what rank 0 does not post.
    """
    async with notes.watching_failures(), open_tasks() as tasks:
        if notes.board.rank == 0:
            tasks.start_soon(fallback.watch_failures)
        yield
        tasks.cancel_scope.cancel()


async def receive_or_find(
    engine: Engine,
    rounds: Rounds,
    what: str,
    receive: Callable[[float], Awaitable[T]],
    find: Callable[[bool], Awaitable[T | None]],
    *,
    patience_s: float | None = None,
    deadline_s: float | None = None,
    waiting: Waiting | None = None,
) -> T:
    """Return what rank 0 posts, or what it has left in storage.

    Args:
        what: the object of the wait, for messages.
        receive: waits that many seconds for rank 0's note.
        find: reads the storage once; its argument: whether the store is lost.
        patience_s: before the storage is read while the store answers; None for the usual pause.
        deadline_s: for rank 0, while the store answers; None: that of ranks. Once it is lost: that of a commit.
        waiting: logs after a while that it waits for rank 0, and ends the wait when rank 0 will post nothing more.

    Raises:
        RankFailedError: rank 0 will not post it any more, and has left nothing.
        RankTimeoutError: neither came in time.
        StoreLostError: the store is lost, and saves of this process do not go on without it.
    """
    deadlines, begun_ns, pause_s = engine.options.deadlines, engine.now_ns(), poll_pause_s(engine)
    usual_s, pauses = deadlines.ranks_s if deadline_s is None else deadline_s, pauses_without_store(engine, pause_s)
    while True:
        lost, left_s = False, usual_s
        try:
            return await receive(min(patience_s or pause_s, usual_s))
        except RankTimeoutError:
            pass
        except StoreLostError:
            if not rounds.outlives_store:
                raise
            lost, left_s = True, deadlines.commit_s
            await anyio.sleep(min(next(pauses), left_s))
        # Before `find`: what rank 0 left before it had gone is found all the same.
        gone = None if waiting is None else await waiting.check_ranks([0], voting=True)
        found = await find(lost)
        if found is not None:
            return found
        if gone is not None:
            raise gone
        if engine.since_s(begun_ns) >= left_s:
            raise RankTimeoutError(f"{what}: nothing from rank 0 within {left_s:g} s", [0])


def pauses_without_store(engine: Engine, last_s: float) -> Iterator[float]:
    """Yield the pauses between polls of the storage once the store is lost."""
    return growing_pauses(FIRST_POLL_S + POLL_OF_A_RANK_S * engine.world_size, last_s)


def poll_pause_s(engine: Engine) -> float:
    """Return how long a rank waits before it reads the storage again."""
    return POLL_S + POLL_OF_A_RANK_S * engine.world_size


# Visibility: whether all ranks see the place where they are about to save. Checked once a tier, before its first save.
#
# Receipts in a place are the votes, so every rank must see what the others write there. A disk or a memory of one host is no
# such place for a job on several hosts, whatever its URL is: without this check the save would wait, until its deadline, for
# votes that cannot appear. Rank 0 writes an object and all others read it; that also finds what the name of a host would
# not show (two containers of one host, a folder that one of them did not mount).


PROBE_S = 10.0
"""A network file system may take a moment to show a new name."""
PAUSE_S = 0.05
_REASONS = {
    "process": "it is the memory of one process",
    "hosts": "the hosts of the job do not reach each other",
    "node": "it is the memory of one host",
    "shared": "it is a disk of one host, or is not mounted there",
}


class Probe(msgspec.Struct, frozen=True):
    """Rank 0's note: the object that it wrote, and its host, for messages."""

    key: str
    host: str


class Visibility:
    """Whether all ranks see one tier.

    Args:
        seen: whether that is known, so that no check is needed.
    """

    def __init__(self, place: Place, *, seen: bool) -> None:
        self._place = place
        self._note = f"place/{place.number}"
        self._asking = anyio.Lock()
        self.seen = seen

    async def check(self, notes: RoundNotes, fallback: StorageFallback | None) -> None:
        """Return when this rank sees what rank 0 wrote; at once after the first time.

        Args:
            fallback: of the current save: rank 0's vote answers the check, too. None while the attempt has no name.

        Raises:
            UsageError: this rank does not see it; names what to do.
            RankError: another rank failed, or rank 0 is silent.
        """
        async with self._asking:
            if not self.seen:
                async with notes.watching_failures():
                    self.seen = await self._run_probe(notes, fallback)

    async def _run_probe(self, notes: RoundNotes, fallback: StorageFallback | None) -> bool:
        """Run the check; return False if the store is lost first: then the votes, or their absence, give the answer."""
        board, backend = notes.board, self._place.backend
        with notes.rounds.surviving_store():
            probe = await (self._receive_probe(notes, fallback) if board.rank else self._write_probe(notes))
            if isinstance(probe, Probe):
                try:
                    await self._wait_visible(probe, board.rank)
                finally:
                    if await board.arrive(f"{self._note}/{probe.key}") == board.world_size:
                        with suppress(CheckpointError):  # an empty object that stays does no harm
                            await backend.delete([probe.key])
            return True
        return False

    async def _write_probe(self, notes: RoundNotes) -> Probe:
        probe = Probe(f".seen-{self._place.engine.token(6)}", platform.node())
        await self._place.backend.put(probe.key, b"")
        await notes.board.post(self._note, probe)
        return probe

    async def _receive_probe(self, notes: RoundNotes, fallback: StorageFallback | None) -> Probe | Attempt:
        """Wait for rank 0's note, or for its vote."""

        async def receive(seconds: float) -> Probe | Attempt:
            return await notes.board.wait(self._note, Probe, seconds, "the object")

        async def find(lost: bool) -> Probe | Attempt | None:
            if lost:
                raise StoreLostError("the store is lost", [0])
            return None if fallback is None else await fallback.begun()

        what, waiting = f"rank 0's object in {self._place.backend.url}", notes.waiting()
        return await receive_or_find(self._place.engine, notes.rounds, what, receive, find, waiting=waiting)

    async def _wait_visible(self, probe: Probe, rank: int) -> None:
        backend = self._place.backend
        with anyio.move_on_after(PROBE_S):
            while True:
                with suppress(ObjectNotFoundError):
                    await backend.stat(probe.key)
                    return
                await anyio.sleep(PAUSE_S)
        raise UsageError(
            f"{backend.url} is not one place for all ranks: rank {rank} on {platform.node()} does not see there what rank 0 "
            f"on {probe.host} wrote, because {_REASONS[backend.traits.scope]}. Ranks that save together vote there, so give "
            "a place that all of them share; a tier of one host is for jobs on one host"
        )
