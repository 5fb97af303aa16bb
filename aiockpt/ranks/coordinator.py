"""One rank of a job as the core's `Coordinator`, composed of the parts of this folder.

`rounds` numbers and ends saves, `joint_plan` plans them; `save` and `load` are the joint operations; `storage_fallback`
detects other ranks' progress without notes, and checks that all ranks see a place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from aiockpt.engine.context import Engine, Place
from aiockpt.engine.job import RoundName, SaveJob
from aiockpt.futures import SaveResult
from aiockpt.options import Options
from aiockpt.ranks.membership import Waiting
from aiockpt.ranks.rounds import TELL_DEADLINE_S, RoundNotes, Rounds
from aiockpt.ranks.save import abort_attempt, save_with_ranks
from aiockpt.ranks.storage_fallback import StorageFallback, Visibility, receive_or_find
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.notes import Lookout, NoteBoard, StoreLostError
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.world import Loop
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:  # a writer process loads nothing, and need not load torch
    from aiockpt.ranks.agreement import LoadNotes
    from aiockpt.ranks.load import RankLoad
    from aiockpt.ranks.peers import Peers

F = TypeVar("F")
N = TypeVar("N")
PLAN_IN_CALL_S = 30.0
"""For the other ranks to reach the joint plan, where their errors must not fail a call (``on_error`` is not "raise")."""


class RankCoordinator:
    """One rank among those that save and load one state together; see `aiockpt.engine.coordinator.Coordinator`.

    Args:
        incarnation: of these ranks.
        loop: runs its coroutines.
        secret: random hex; the names of all attempts follow from that of rank 0.
        terms: options that all ranks must share, by name, in words.
        peers: the ranks that read each block once together with this one; None: this rank reads alone.
        seen: numbers of the places that all ranks are known to see.
        on_seen: called with the number of a place once all ranks are known to see it.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        loop: Loop,
        options: Options,
        secret: str,
        *,
        terms: Mapping[str, str] = {},
        peers: Peers | None = None,
        seen: Collection[int] = (),
        on_seen: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.rank, self.world_size = incarnation.rank, incarnation.world_size
        self.board = NoteBoard(incarnation, relayed=isinstance(incarnation.store, RelayedStore))
        self.rounds = Rounds(
            self.board,
            options.deadlines.ranks_s,
            secret,
            plan_s=None if options.on_error == "raise" else PLAN_IN_CALL_S,
            writes=options.worker == "thread",
            terms=terms,
        )
        self.loop = loop
        self.on_seen = on_seen
        self._peers = peers
        self._seen = seen
        self._visible: dict[int, Visibility] = {}
        self._cancels: list[Callable[[], object]] = []

    @property
    def board_name(self) -> str:
        """The name of the board of these ranks' notes."""
        return self.board.name

    def register(self) -> None:
        """Post the process of this rank, in the background: ranks on the same host can then detect its end."""
        self._cancels.append(self.loop.submit(self.rounds.register).cancel)
        if self.rank == 0:
            self._cancels.append(self.loop.submit(self.rounds.admit).cancel)

    def begin(self, step: int) -> RankRound:
        """Return the round of a save that begins now: the same on all ranks that make the same calls."""
        return RankRound(self, self.rounds.begin(step))

    def begin_load(self) -> RankLoad:
        """Return the load that is called now."""
        from aiockpt.ranks.load import RankLoad

        return RankLoad(self._load_notes, self.rounds.begin_load(), self._peers)

    def join(self, board_name: str, name: RoundName) -> RankRound:
        """Return a round that another process of this rank has begun; that process posts the plan for both."""
        self.board.join(board_name)
        return RankRound(self, RoundNotes(self.rounds, name, planned=True))

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* if all ranks have planned it before, else None."""
        return self.rounds.joint.known(state)

    def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the other ranks that this one makes no more calls; wait until that is posted, unless it has *failed*."""
        for cancel in self._cancels:  # they may wait for ranks that never come
            cancel()
        if self.loop.usable:
            telling = self.loop.submit(partial(self.rounds.depart, reason, failed=failed))
            if not failed:
                with suppress(TimeoutError):
                    telling.result(TELL_DEADLINE_S)

    def make_lookout(self, what: str, deadline_s: float) -> Lookout:
        """Return what ends a wait for *what* of other ranks once they have gone."""
        return Waiting(self.rounds.members, "", what, deadline_s).silent

    def visibility(self, place: Place) -> Visibility:
        """Return the check whether all ranks see *place*, the same object each time."""
        if place.number not in self._visible:
            self._visible[place.number] = Visibility(place, seen=place.number in self._seen)
        return self._visible[place.number]

    @cached_property
    def _load_notes(self) -> LoadNotes:
        from aiockpt.ranks.agreement import LoadNotes

        return LoadNotes(self.rounds)

    async def post(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Post a note for the other ranks, and remove *outdated* ones; does nothing once the store is lost."""
        with suppress(StoreLostError):
            await self.board.post(key, note)
            if outdated:
                await self.board.delete(outdated)

    async def receive(
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
        """Return rank 0's note, or what *find* returns while the note is missing."""

        async def wait(seconds: float) -> N | F:
            return await self.board.wait(key, kind, seconds, what)

        async def search(lost: bool) -> F | None:
            return await find()

        return await receive_or_find(engine, self.rounds, what, wait, search, patience_s=pause_s, deadline_s=deadline_s)


class RankRound:
    """One save or ``warm_up`` of this rank with the others; see `aiockpt.engine.job.Round`."""

    def __init__(self, coordinator: RankCoordinator, notes: RoundNotes) -> None:
        self.name = notes.name
        self._coordinator, self._loop = coordinator, coordinator.loop
        self._notes = notes

    def share(self, state: ShardedState) -> ShardedState:
        """Return this rank's share of *state*."""
        known = self._notes.known(state)
        return self._loop.submit(self._notes.plan, state).result() if known is None else known

    def name_attempt(self) -> str | None:
        """Return the nonce of the save, the same on all ranks."""
        return self._notes.known_nonce or self._loop.submit(self._notes.attempt_nonce).result()

    def abort(self, error: BaseException) -> None:
        """Report to the other ranks, in the background, why this one takes no part."""
        self._loop.submit(self._notes.abort, error)

    def release(self) -> None:
        """Notify the other ranks, in the background, that this one is done."""
        self._loop.submit(self._notes.release)

    @asynccontextmanager
    async def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AsyncIterator[None]:
        """Report an error in the block to the other ranks, unless the save has begun: then the save reports it."""
        notes = self._notes
        try:
            yield
        except BaseException as error:
            if not notes.begun:
                why = job.why(error)
                notes.rounds.joint.invalidate()
                if not await notes.post_failure(why) and job.nonce is not None:
                    await abort_attempt(places, job, job.nonce, why, unreported=notes)
                await notes.release()
            raise

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        """Return the place that rank 0 chooses: the one named in its note, else the one that has its vote."""
        notes, key = self._notes, self.name.key("entry")
        if notes.board.rank == 0:
            chosen = await choose()
            with notes.rounds.surviving_store():
                await notes.board.post(key, chosen.number)
            return chosen
        by_number = {place.number: place for place in places}

        async def receive(seconds: float) -> Place:
            return by_number[await notes.board.wait(key, int, seconds, "the choice")]

        async def find(lost: bool) -> Place | None:
            for place in places:
                fallback = _fallback(place, job)
                if fallback is not None and await fallback.begun() is not None:
                    return place
            return None

        async with notes.watching_failures():
            what, waiting = "rank 0's choice of a tier", notes.waiting()
            return await receive_or_find(places[0].engine, notes.rounds, what, receive, find, waiting=waiting)

    async def save(self, place: Place, job: SaveJob) -> SaveResult:
        """Save this rank's share to a place that all ranks see."""
        visibility = self._coordinator.visibility(place)
        if not visibility.seen:
            await visibility.check(self._notes, _fallback(place, job))
            self._coordinator.on_seen(place.number)
        self._notes.begun = True
        return await save_with_ranks(place, self._notes, job)

    async def announce(self) -> None:
        """Post that this rank knows what to write. A lost store is ignored: the writer does not need the note."""
        with suppress(StoreLostError):
            await self._notes.announce()

    @asynccontextmanager
    async def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AsyncIterator[None]:
        """Release the round of a save that a writer process makes, whatever the outcome.

        If the writer dies, its save is aborted before the others are notified: they neither commit it nor wait for it. If it
        had voted and the commit is decided, no failure is reported.
        """
        assert job.nonce is not None
        try:
            yield
        except BaseException:
            self._notes.rounds.joint.invalidate()
            if (death := died()) is not None:  # reaped: no process writes, votes or commits for this rank any more
                await abort_attempt(places, job, job.nonce, death, unreported=self._notes)
            raise
        finally:
            await self._notes.release()


def _fallback(place: Place, job: SaveJob) -> StorageFallback | None:
    return None if job.nonce is None else StorageFallback(place, job.step, job.nonce)
