"""What can a rank know of the others when nobody tells it? What they left in storage.

Ranks tell each other by notes in a store (`aiockpt.ranks.rounds`). A trainer that is killed takes its way to the store
along, or the store itself, while its writer process goes on (`aiockpt.worker`). Guarantees:

- Rank 0's receipt says all that its notes would have: the place, the generation, the lineage. Rank 0 needs no note at all.
- A record of a failure is there only when nobody can commit the attempt any more.
- The store is asked first, the storage only after a pause without news: a save that goes well costs it nothing. The more
  ranks there are, the more rarely each looks.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import anyio
import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.place import Place
from aiockpt.engine.round import SaveRound
from aiockpt.errors import (
    CheckpointError,
    ManifestError,
    ObjectNotFoundError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
)
from aiockpt.format.manifest import Receipt, decode_receipt
from aiockpt.format.names import failure_key, parse_failure, receipt_folder, receipt_key, step_id
from aiockpt.format.validate import check_receipt
from aiockpt.pipeline.commit import Attempt
from aiockpt.ranks.membership import Waiting
from aiockpt.ranks.rounds import Rounds
from aiockpt.runtime.notes import StoreLostError, growing_pauses
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import read_record

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
LOOK_S, LOOK_OF_A_RANK_S = 2.0, 0.01
"""Between two looks at the storage."""
FIRST_LOOK_S = 0.1
"""The first pause once the store is lost; it grows to the usual one."""
_READ = 8
"""Records of failures: those of ranks that gave up because another one failed say less than that one's."""


class FailureRecord(msgspec.Struct, frozen=True):
    """What a rank leaves whose part of an attempt will never be there."""

    rank: int
    failure: str


class StorageFallback:
    """What the ranks of one attempt left in one place.

    Args:
        nonce: of the attempt.
    """

    def __init__(self, place: Place, step: int, nonce: str) -> None:
        self._backend: Backend = place.backend
        self._id = step_id(step)
        self._nonce = nonce
        self._pause_s = look_pause_s(place.engine)

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
        except CheckpointError:  # not there, not whole, or the storage is away: it is looked for again
            return None
        return receipt

    async def failure(self) -> RankFailedError | None:
        """Return why there will be no checkpoint of this attempt, when a rank has left that."""
        try:
            listing = await self._backend.list(receipt_folder(self._id, self._nonce))
            ranks = [parse_failure(stat.key.rpartition("/")[2]) for stat in listing.objects]
            records = [await self._read_failure(rank) for rank in [rank for rank in ranks if rank is not None][:_READ]]
        except CheckpointError as error:  # the storage is away: what needs it says so
            logger.info("whether a rank has given up %s is not known: %s", self._id, error)
            return None
        causes = [record for record in records if not record.failure.startswith(RankFailedError.__name__)] or records
        if not causes:
            return None
        rank, why = causes[0].rank, causes[0].failure
        return RankFailedError(f"{self._id} was given up because rank {rank} failed: {why}", [rank])

    async def _read_failure(self, rank: int) -> FailureRecord:
        try:
            data = await read_record(self._backend, failure_key(self._id, self._nonce, rank))
            return msgspec.json.decode(data, type=FailureRecord)
        except (ManifestError, msgspec.DecodeError, UnicodeDecodeError):
            return FailureRecord(rank, "it did not say why")

    async def watch_failures(self) -> None:
        """Look until a rank has failed.

        Raises:
            RankFailedError: it has.
        """
        while True:
            await anyio.sleep(self._pause_s)
            failure = await self.failure()
            if failure is not None:
                raise failure


@asynccontextmanager
async def watching_failures(rounds: Rounds, save_round: SaveRound, fallback: StorageFallback) -> AsyncIterator[None]:
    """Stop the block, and raise, as soon as another rank says that it failed; on rank 0 also when it has left a record.

    So one rank looks for those whose way to the store is lost, and tells the others, unless its own is lost, too. Then
    they find the record where they look for what rank 0 does not say.
    """
    async with rounds.watching_failures(save_round), open_tasks() as tasks:
        if rounds.board.rank == 0:
            tasks.start_soon(fallback.watch_failures)
        yield
        tasks.cancel_scope.cancel()


async def hear_or_find(
    engine: Engine,
    rounds: Rounds,
    what: str,
    hear: Callable[[float], Awaitable[T]],
    find: Callable[[bool], Awaitable[T | None]],
    *,
    patience_s: float | None = None,
    deadline_s: float | None = None,
    waiting: Waiting | None = None,
) -> T:
    """Return what rank 0 says, or what it has left.

    Args:
        what: is waited for.
        hear: waits that many seconds for rank 0's note.
        find: looks at the storage once; told whether the store is lost.
        patience_s: before the storage is looked at while the store answers; None for the usual pause.
        deadline_s: for rank 0, while the store answers; None for that of ranks. Without it a commit's is what there is.
        waiting: says after a while that it waits for rank 0, and ends when that will say nothing more.

    Raises:
        RankFailedError: rank 0 will not say it any more, and has left nothing.
        RankTimeoutError: neither came in time.
        StoreLostError: the store is lost, and this process is one that ends with it.
    """
    deadlines, begun_ns, pause_s = engine.options.deadlines, engine.now_ns(), look_pause_s(engine)
    usual_s, pauses = deadlines.ranks_s if deadline_s is None else deadline_s, pauses_without_store(engine, pause_s)
    while True:
        lost, left_s = False, usual_s
        try:
            return await hear(min(patience_s or pause_s, usual_s))
        except RankTimeoutError:
            pass
        except StoreLostError:
            if not rounds.outlives_store:
                raise
            lost, left_s = True, deadlines.commit_s
            await anyio.sleep(min(next(pauses), left_s))
        gone = None if waiting is None else await waiting.look([0], voting=True)
        found = await find(lost)
        if found is not None:
            return found
        if gone is not None:
            raise gone
        if engine.since_s(begun_ns) >= left_s:
            raise RankTimeoutError(f"{what}: nothing from rank 0 within {left_s:g} s", [0])


def pauses_without_store(engine: Engine, last_s: float) -> Iterator[float]:
    """Yield the pauses between looks once the store is lost, and nothing else will tell."""
    return growing_pauses(FIRST_LOOK_S + LOOK_OF_A_RANK_S * engine.world_size, last_s)


def look_pause_s(engine: Engine) -> float:
    """Return how long a rank waits before it looks at the storage again."""
    return LOOK_S + LOOK_OF_A_RANK_S * engine.world_size


# Do all ranks see the place where they are about to save together? Asked once for each tier, before its first save.
#
# Receipts in a place are the votes, so every rank must see what the others write there. A disk or a memory of one host is no
# such place for a job on several hosts, whatever its URL looks like: without this question the save would wait for votes
# that nobody will ever see, until its deadline. Rank 0 leaves an object and all others look for it; that also finds what no
# name of a host would tell (two containers of one host, a folder that one of them did not mount).


LOOK_FOR_S = 10.0
"""A network file system may take a moment to show a new name."""
PAUSE_S = 0.05
_REASONS = {
    "process": "it is the memory of one process",
    "node": "it is the memory of one host",
    "shared": "it is a disk of one host, or is not mounted there",
}


class Probe(msgspec.Struct, frozen=True):
    """Rank 0's note: the object that it left, and its host, for people."""

    key: str
    host: str


class Visibility:
    """Whether all ranks see one tier.

    Args:
        seen: whether they are known to, so that nobody has to ask.
    """

    def __init__(self, place: Place, *, seen: bool) -> None:
        self._place = place
        self._note = f"place/{place.number}"
        self._asking = anyio.Lock()
        self._seen = seen

    @property
    def seen(self) -> bool:
        """Whether that is known, so that nobody has to ask again."""
        return self._seen

    async def check(self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None) -> None:
        """Return when this rank sees what rank 0 wrote; at once after the first time.

        Args:
            fallback: of the save that asks: rank 0's vote is an answer, too. None where its name is not known yet.

        Raises:
            UsageError: it does not; says what to do.
            RankError: another rank failed, or rank 0 is silent.
        """
        async with self._asking:
            if not self._seen:
                async with rounds.watching_failures(save_round):
                    self._seen = await self._look(rounds, save_round, fallback)

    async def _look(self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None) -> bool:
        """Look; return False when nobody can say what to look for: then the votes will show it, or their absence."""
        board, backend = rounds.board, self._place.backend
        with rounds.surviving_store():
            probe = await (
                self._hear_of_probe(rounds, save_round, fallback) if board.rank else self._leave_probe(rounds)
            )
            if isinstance(probe, Probe):
                try:
                    await self._look_for(probe, board.rank)
                finally:
                    if await board.arrive(f"{self._note}/{probe.key}") == board.world_size:
                        with suppress(CheckpointError):  # an empty object that stays harms nobody
                            await backend.delete([probe.key])
            return True
        return False

    async def _leave_probe(self, rounds: Rounds) -> Probe:
        probe = Probe(f".seen-{self._place.engine.token(6)}", platform.node())
        await self._place.backend.put(probe.key, b"")
        await rounds.board.post(self._note, probe)
        return probe

    async def _hear_of_probe(
        self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None
    ) -> Probe | Attempt:
        """Wait for rank 0's note, or for its vote."""

        async def hear(seconds: float) -> Probe | Attempt:
            return await rounds.board.wait(self._note, Probe, seconds, "the object")

        async def find(lost: bool) -> Probe | Attempt | None:
            if lost:
                raise StoreLostError("the store is lost", [0])
            return None if fallback is None else await fallback.begun()

        what = f"rank 0's object in {self._place.backend.url}"
        return await hear_or_find(self._place.engine, rounds, what, hear, find, waiting=rounds.waiting(save_round))

    async def _look_for(self, probe: Probe, rank: int) -> None:
        backend = self._place.backend
        with anyio.move_on_after(LOOK_FOR_S):
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
