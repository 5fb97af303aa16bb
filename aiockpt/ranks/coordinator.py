"""One rank of a job as the core's `Coordinator`, composed of the parts of this folder.

The rounds of saves are counted and ended in `rounds`, planned in `joint_plan`; `save` and `load` are what all do together;
`storage_fallback` detects other ranks' progress without notes, and whether all of them see a place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from aiockpt.engine.context import Engine
from aiockpt.engine.place import Place
from aiockpt.engine.round import SaveRound
from aiockpt.engine.save import SaveJob
from aiockpt.futures import SaveResult
from aiockpt.options import Options
from aiockpt.ranks.rounds import TELL_DEADLINE_S, Rounds
from aiockpt.ranks.save import abort_attempt, save_with_ranks
from aiockpt.ranks.storage_fallback import StorageFallback, Visibility, hear_or_find
from aiockpt.runtime.notes import NoteBoard, StoreLostError
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.world import Loop
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:  # a writer process loads nothing, and need not load torch
    from aiockpt.engine.find import StepPlaces
    from aiockpt.engine.load import Filled, LoadRequest
    from aiockpt.ranks.load import RankLoads
    from aiockpt.ranks.peers import Peers

F = TypeVar("F")
N = TypeVar("N")
PLAN_IN_CALL_S = 30.0
"""For the other ranks to come to a plan, where a call is not to fail for their sake."""


class RankCoordinator:
    """One rank among those that save and load one state together; see `aiockpt.engine.coordinator.Coordinator`.

    Args:
        place: what they save to, the same on all of them.
        place: what they save to, the same on all of them.
        loop: what its coroutines run on.
        secret: random hex; that of rank 0 names all attempts.
        terms: options that all ranks must share, by name, in words.
        peers: those with which this rank reads once; None reads alone.
        seen: numbers of the places that all ranks are known to see.
        on_seen: called with the number of a place once they are.
    """

    def __init__(
        self,
        ranks: Ranks,
        place: str,
        loop: Loop,
        options: Options,
        secret: str,
        *,
        terms: Mapping[str, str] = {},
        peers: Peers | None = None,
        seen: Collection[int] = (),
        on_seen: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        relayed = isinstance(ranks.store, RelayedStore)
        self.board = NoteBoard(ranks.store, place, ranks.rank, ranks.world_size, relayed=relayed)
        self.rounds = Rounds(
            self.board,
            options.deadlines.ranks_s,
            secret,
            plan_s=None if options.on_error == "raise" else PLAN_IN_CALL_S,
            writes=options.worker == "thread",
        )
        self.rounds.joint.terms = terms
        self._ranks_s = options.deadlines.ranks_s
        self._peers = peers
        self._loop = loop
        self._seen = seen
        self._on_seen = on_seen
        self._visible: dict[int, Visibility] = {}
        self._begun: set[SaveRound] = set()

    @property
    def board_name(self) -> str:
        """What distinguishes the notes of these ranks from those of others."""
        return self.board.name

    def register(self) -> None:
        """Post, in the background, in which process this rank is, so that others of its host see it end."""
        self._loop.submit(self.rounds.register)

    # ------------------------------------------------------------------ the calls

    def next_round(self, step: int) -> SaveRound:
        """Return the round of a save that begins now: the same on all ranks that call alike."""
        return self.rounds.next_round(step)

    def next_load(self) -> int:
        """Return the number of the load that is called now."""
        return self.rounds.next_load()

    def share(self, save_round: SaveRound, state: ShardedState) -> tuple[ShardedState, bool]:
        """Return this rank's share of *state*, and whether it had to be planned with others."""
        known = self.rounds.known(state)
        if known is not None:
            return known, False
        return self._loop.submit(self.rounds.plan, save_round, state).result()

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* where all have planned it before."""
        return self.rounds.known(state)

    def abort(self, save_round: SaveRound, error: BaseException) -> None:
        """Notify the other ranks, in the background, why this one takes no part in a round."""
        self._loop.submit(self._abort, save_round, error)

    async def _abort(self, save_round: SaveRound, error: BaseException) -> None:
        self.rounds.invalidate()
        await self.rounds.tell_failure(save_round, error)
        await self.rounds.leave(save_round)

    def leave(self, save_round: SaveRound) -> None:
        """Notify the other ranks, in the background, that this one is done with a round."""
        self._loop.submit(self.rounds.leave, save_round)

    def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the other ranks that this one makes no more calls; wait for that, unless it has *failed*."""
        if self._loop.usable:
            telling = self._loop.submit(partial(self.rounds.depart, reason, failed=failed))
            if not failed:
                with suppress(TimeoutError):
                    telling.result(TELL_DEADLINE_S)

    # ------------------------------------------------------------------ saves and loads

    @asynccontextmanager
    async def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AsyncIterator[None]:
        """Report to the other ranks what ends the block before the save has begun; afterwards the save reports it."""
        try:
            yield
        except BaseException as error:
            if job.save_round not in self._begun:
                why = job.why(error)
                self.rounds.invalidate()
                if not await self.rounds.tell_failure(job.save_round, why) and job.nonce is not None:
                    await abort_attempt(places, job, job.nonce, why, untold=self.rounds)
                await self.rounds.leave(job.save_round)
            raise
        finally:
            self._begun.discard(job.save_round)

    async def save(self, place: Place, job: SaveJob) -> SaveResult:
        """Save this rank's share to a place that all ranks see."""
        visibility = self._visibility(place)
        if not visibility.seen:
            await visibility.check(self.rounds, job.save_round, _fallback(place, job))
            self._on_seen(place.number)
        self._begun.add(job.save_round)
        return await save_with_ranks(place, self.rounds, job)

    def _visibility(self, place: Place) -> Visibility:
        if place.number not in self._visible:
            self._visible[place.number] = Visibility(place, seen=place.number in self._seen)
        return self._visible[place.number]

    @cached_property
    def loads(self) -> RankLoads:
        """The loads of this rank."""
        from aiockpt.ranks.load import RankLoads

        return RankLoads(self.rounds, self._ranks_s, self._peers)

    async def load(self, places: StepPlaces, request: LoadRequest, number: int) -> Filled | None:
        """Fill this rank's part of a state."""
        return await self.loads.load(places, request, number)

    async def agree_applied(self, number: int, error: Exception | None) -> None:
        """Report whether this rank's objects accepted what load *number* returned; receive the other ranks' reports."""
        await self.loads.agree_applied(number, error)

    # ------------------------------------------------------------------ several places, and a writer process

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        """Return the place that rank 0 chooses; it is in its note, or where its vote is."""
        key = job.save_round.key("entry")
        if self.rank == 0:
            chosen = await choose()
            with self.rounds.surviving_store():
                await self.board.post(key, chosen.number)
            return chosen
        by_number = {place.number: place for place in places}

        async def hear(seconds: float) -> Place:
            return by_number[await self.board.wait(key, int, seconds, "the choice")]

        async def find(lost: bool) -> Place | None:
            for place in places:
                fallback = _fallback(place, job)
                if fallback is not None and await fallback.begun() is not None:
                    return place
            return None

        async with self.rounds.watching_failures(job.save_round):
            waiting = self.rounds.waiting(job.save_round)
            return await hear_or_find(
                places[0].engine, self.rounds, "rank 0's choice of a tier", hear, find, waiting=waiting
            )

    async def tell(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Post a note for the other ranks, and remove *outdated* ones; does nothing once the store is lost."""
        with suppress(StoreLostError):
            await self.board.post(key, note)
            if outdated:
                await self.board.forget(outdated)

    async def hear(
        self,
        engine: Engine,
        key: str,
        kind: type[N],
        what: str,
        find: Callable[[], Awaitable[F | None]],
        *,
        pause_s: float,
        deadline_s: float,
    ) -> N | F:
        """Return rank 0's note, or what is found in its place."""

        async def listen(seconds: float) -> N | F:
            return await self.board.wait(key, kind, seconds, what)

        async def look(lost: bool) -> F | None:
            return await find()

        return await hear_or_find(engine, self.rounds, what, listen, look, patience_s=pause_s, deadline_s=deadline_s)

    def join(self, board_name: str) -> None:
        """Use the notes that another process of this rank has begun."""
        self.board.join(board_name)

    def name_attempt(self, save_round: SaveRound) -> str | None:
        """Return the nonce that a save has on all ranks."""
        known = self.rounds.known_nonce(save_round)
        return known or self._loop.submit(self.rounds.attempt_nonce, save_round).result()

    async def announce(self, job: SaveJob) -> None:
        """Post that this rank knows what to write, when it did not have to ask; its writer saves without the note, too."""
        if not job.agreed:
            with suppress(StoreLostError):
                await self.rounds.announce(job.save_round)

    @asynccontextmanager
    async def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AsyncIterator[None]:
        """Leave the round of a save that a writer process makes, however it ends.

        A writer that dies has its save aborted before the others are notified: they neither commit it nor wait for it. Where
        it had voted and the commit is decided, no failure is reported.
        """
        assert job.nonce is not None
        try:
            yield
        except BaseException:
            self.rounds.invalidate()
            if (death := died()) is not None:  # reaped: no process writes, votes or commits for this rank any more
                await abort_attempt(places, job, job.nonce, death, untold=self.rounds)
            raise
        finally:
            await self.rounds.leave(job.save_round)


def _fallback(place: Place, job: SaveJob) -> StorageFallback | None:
    return None if job.nonce is None else StorageFallback(place, job.step, job.nonce)
