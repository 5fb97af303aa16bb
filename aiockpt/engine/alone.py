"""A process that saves and loads by itself, into one place: the plain implementations of its protocols.

`Alone`, `RoundAlone` and `OnePlace` stand for `aiockpt.ranks`, and for the other destinations, `aiockpt.places.tiers` and
`aiockpt.worker.client`; what they do not define is in the bodies of the protocols. `Interruption` and `CallProbe` do
nothing by themselves: `aiockpt.session.preemption` and `aiockpt.prove` override them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.coordinator import Coordinator, LoadRound
from aiockpt.engine.find import ListEntries, StepPlaces
from aiockpt.engine.job import Round, RoundName, SaveJob, SaveRequest
from aiockpt.engine.maintenance import clean_up, making_room
from aiockpt.engine.save import OneAtATime, save_alone
from aiockpt.events import Observer
from aiockpt.futures import LoadResult, SaveFuture, SaveResult
from aiockpt.options import Tier
from aiockpt.pipeline.discover import StepAt
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

if TYPE_CHECKING:
    from aiockpt.engine.load import Filled, LoadRequest


class Alone(Coordinator):
    """A process that saves and loads by itself. What notifies or awaits other ranks does nothing."""

    def begin(self, step: int) -> Round:
        return RoundAlone(RoundName(step))

    def begin_load(self) -> LoadRound:
        from aiockpt.engine.load import LoadAlone  # it loads torch, which a writer process (`aiockpt.worker`) need not

        return LoadAlone()

    def join(self, board_name: str, name: RoundName) -> Round:
        return RoundAlone(name)


class RoundAlone(Round):
    """A save of a process by itself: all of the state is its own, and there are no others to notify."""

    save = staticmethod(save_alone)  # pyright: ignore[reportAssignmentType]  it takes a static method for an unbound one

    def __init__(self, name: RoundName) -> None:
        self.name = name


class Destination(StepPlaces, Protocol):
    """Where one checkpointer saves to, and where the steps that it loads lie.

    The bodies are those of places to which this process writes, each save to any of them.
    """

    def takes(self, step: int) -> bool:
        """Return whether *step* is saved at all."""
        ...

    def places_for(self, step: int) -> Sequence[Place]:
        """Return the places that a save of *step* may be written to, the nearest first."""
        return self.places

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        """Send *step*, which is saved next, to the durable place that finishes it soonest, whatever the rules of that place.

        Args:
            seconds: that saves took lately, by the URL of the place where they were committed.
        """

    def prepare(self, promise: SavePromise) -> None:
        """Add a stage for each place, where there are several, to *promise* when it is registered."""
        return

    def stages(self, promise: SavePromise) -> Sequence[Promise[SaveResult]]:
        """Return the stages that `prepare` added to *promise*, the nearest place's first."""
        return ()

    def announce(self, job: SaveJob) -> None:
        """Announce that *job* is planned, and copied next; on the thread that copies."""
        return

    async def save(self, job: SaveJob) -> SaveResult:
        """Save one state; when this returns it is committed.

        Saves of the same step are made one after the other: each is a generation of its own.

        Raises:
            CheckpointError: as `aiockpt.engine.save.save_alone`.
        """
        ...

    async def clean_up(self, result: SaveResult) -> None:
        """Clean up where a save was committed."""

    def abandon(self, promise: SavePromise) -> bool:
        """End a save that is not waited for any more; return False where another process goes on with it. Any thread."""
        return promise.cancel()

    async def notify_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Notify the other ranks that the copies of a save to the places of these numbers ended with its writer."""
        return

    async def close(self, patience_s: float) -> None:
        """Finish what is under way, for *patience_s* seconds, and close all places."""


class OnePlace(Destination):
    """A single place, written to from here. A save has no other stages, and is announced nowhere."""

    def __init__(self, place: Place, tier: Tier) -> None:
        self.engine = place.engine
        self.places = (place,)
        self._tier = tier
        self._expedited: int | None = None
        self._one_at_a_time = OneAtATime()

    def takes(self, step: int) -> bool:
        return self._tier.takes(step) or step == self._expedited

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        self._expedited = step

    def prepare(self, promise: SavePromise) -> None:
        self.places[0].follow(promise)

    async def save(self, job: SaveJob) -> SaveResult:
        (place,) = self.places
        taking_part, alone = job.round.taking_part(job, self.places), self._one_at_a_time.saving(job.step)
        async with taking_part, alone, making_room(place):
            result = await job.round.save(place, job)
        return msgspec.structs.replace(result, url=place.backend.url, durable=place.backend.traits.survives_power_cuts)

    async def clean_up(self, result: SaveResult) -> None:
        await clean_up(self.places[0], result)

    async def close(self, patience_s: float) -> None:
        await self.places[0].backend.close()

    async def list_steps(self, list_entries: ListEntries) -> Sequence[StepAt]:
        (place,) = self.places
        return [StepAt(place.backend, entry, place.number) for entry in await list_entries(place)]


StartSave = Callable[[SaveRequest], SaveFuture]
"""Checks the request for a save, and starts the save."""


class Interruption:
    """A source of requests to end a run before it is done; this one makes no request.

    Attributes:
        listens: whether there may be such a request.
        observers: to be notified of events.
    """

    listens: ClassVar[bool] = False
    observers: Sequence[Observer] = ()

    def reach(self, request: SaveRequest, start: StartSave, *, asked: bool) -> None:
        """Enter a call of ``step`` or ``save`` on the training thread.

        Args:
            asked: whether the program itself wants this save.

        Raises:
            Preempted: the run ends here; what is worth keeping was made durable, with a save of the state or without.
        """

    def on_exit(self, *, failing: bool) -> BaseException | None:
        """Save the state of the last call where the run must end after it and the program is leaving.

        Args:
            failing: whether it leaves by an exception; the signal behind it may come a moment later.

        Returns:
            The exception that says how the run ended; None where it need not end, or the state has changed since.
        """
        return None

    def watch(self, save: SaveFuture) -> None:
        """Record a save that was started."""

    def stop(self) -> None:
        """Stop listening, before the loop ends. Any thread; idempotent."""

    def release(self) -> None:
        """Restore the signal handlers, after everything is committed. Any thread; idempotent."""


class CallProbe:
    """Sees the calls of one checkpointer, and may replace its places.

    Attributes:
        observers: receive events.
    """

    observers: Sequence[Observer] = ()

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return the tiers that saves actually use, and a backend for each.

        Args:
            by_url: another process will open them, by their URLs.
        """
        return list(tiers), [open_backend(tier.url, world=world) for tier in tiers]

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return the request to load in place of *request*."""
        return request

    def wrap_apply(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return a function that completes a load on its waiter's thread; None where nothing is left to do."""
        return None if filled is None else filled.apply

    def reached(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Called when the program has reached *step*; *saved* says whether it saves it."""

    def saved(self, step: int) -> None:
        """Called when ``save(step)`` has returned."""

    def closing(self) -> None:
        """Called when the checkpointer is being closed. Idempotent."""
