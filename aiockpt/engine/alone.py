"""A process that saves and loads by itself, into one place: the plain implementations of its protocols.

`Alone`, `RoundAlone` and `OnePlace` stand for `aiockpt.ranks` and `aiockpt.places.tiers`, `NeverInterrupted` and `Unwatched`
for `aiockpt.session.preemption` and `aiockpt.prove`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.coordinator import LoadRound
from aiockpt.engine.find import ListedStep, ListEntries
from aiockpt.engine.job import Round, RoundName, SaveJob, SaveRequest
from aiockpt.engine.maintenance import clean_up, making_room
from aiockpt.engine.save import OneAtATime, save_alone
from aiockpt.errors import RankTimeoutError
from aiockpt.events import Observer
from aiockpt.futures import LoadResult, SaveFuture, SaveResult
from aiockpt.options import Tier
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.world import World
from aiockpt.state.shards import ShardedState
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine
    from aiockpt.engine.load import Filled, LoadRequest

F = TypeVar("F")
N = TypeVar("N")


class Alone:
    """A process that saves and loads by itself. What notifies or awaits other ranks does nothing."""

    rank, world_size, board_name = 0, 1, ""

    def begin(self, step: int) -> Round:
        return RoundAlone(RoundName(step))

    def begin_load(self) -> LoadRound:
        from aiockpt.engine.load import LoadAlone  # it loads torch, which a writer process (`aiockpt.worker`) need not

        return LoadAlone()

    def join(self, board_name: str, name: RoundName) -> Round:
        return RoundAlone(name)

    def known_share(self, state: ShardedState) -> ShardedState | None:
        return state

    def depart(self, reason: str, *, failed: bool) -> None: ...
    async def post(self, key: str, note: object, outdated: Sequence[str] = ()) -> None: ...

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
        """Return what *find* returns."""
        found = await find()
        if found is None:
            raise RankTimeoutError(f"{what}: not there, and there is no other rank to wait for", [])
        return found


class RoundAlone:
    """A save of a process by itself: all of the state is its own, and there are no others to notify."""

    save = staticmethod(save_alone)

    def __init__(self, name: RoundName) -> None:
        self.name = name

    def share(self, state: ShardedState) -> ShardedState:
        return state

    def name_attempt(self) -> str | None:
        return None

    def abort(self, error: BaseException) -> None: ...
    def release(self) -> None: ...
    async def announce(self) -> None: ...

    def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        return await choose()

    def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class OnePlace:
    """A single place, written to from here; see `Destination`. A save has no other stages, and is announced nowhere."""

    def __init__(self, place: Place, tier: Tier) -> None:
        self.engine = place.engine
        self.places = (place,)
        self._tier = tier
        self._expedited: int | None = None
        self._one_at_a_time = OneAtATime()

    def takes(self, step: int) -> bool:
        return self._tier.takes(step) or step == self._expedited

    def places_for(self, step: int) -> Sequence[Place]:
        return self.places

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        self._expedited = step

    def prepare(self, promise: SavePromise) -> None: ...

    def stages(self, promise: SavePromise) -> Sequence[Promise[SaveResult]]:
        return ()

    def announce(self, job: SaveJob) -> None: ...

    async def save(self, job: SaveJob) -> SaveResult:
        (place,) = self.places
        taking_part, alone = job.round.taking_part(job, self.places), self._one_at_a_time.saving(job.step)
        async with taking_part, alone, making_room(place):
            result = await job.round.save(place, job)
        return msgspec.structs.replace(result, url=place.backend.url, durable=place.backend.traits.survives_power_cuts)

    async def clean_up(self, result: SaveResult) -> None:
        await clean_up(self.places[0], result)

    def abandon(self, promise: SavePromise) -> None:
        promise.cancel()

    async def notify_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None: ...

    async def close(self, patience_s: float) -> None:
        await self.places[0].backend.close()

    async def list_steps(self, list_entries: ListEntries) -> Sequence[ListedStep]:
        (place,) = self.places
        return [ListedStep(place.backend, entry, place) for entry in await list_entries(place)]


class NeverInterrupted:
    """Does nothing: the run is never interrupted, and goes on until it is done, or killed."""

    listens = False
    observers: Sequence[Observer] = ()

    def reach(self, request: SaveRequest, start: Callable[[SaveRequest], SaveFuture], *, asked: bool) -> None: ...
    def on_exit(self, *, failing: bool) -> None: ...
    def watch(self, save: SaveFuture) -> None: ...
    def stop(self) -> None: ...
    def release(self) -> None: ...


class Unwatched:
    """The probe outside of a proof: it records nothing, and changes neither places nor loads."""

    observers: Sequence[Observer] = ()

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a backend for each."""
        return list(tiers), [open_backend(tier.url, world=world) for tier in tiers]

    def asked(self, request: LoadRequest) -> LoadRequest:
        return request

    def wrap_apply(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return the function that fills the objects; None where there is nothing to fill."""
        return None if filled is None else filled.apply

    def reached(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, *, saved: bool
    ) -> None: ...
    def saved(self, step: int) -> None: ...
    def closing(self) -> None: ...
