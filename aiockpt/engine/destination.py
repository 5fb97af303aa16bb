"""Destinations: where saves go and steps lie. One place, unless tiers or a writer process replace it.

`OnePlace` is a single root, written to from here. `aiockpt.places.tiers.tiers` has several, `aiockpt.worker.client`
another process that writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import msgspec

from aiockpt.engine.find import ListedStep, Look, StepPlaces
from aiockpt.engine.job import SaveJob
from aiockpt.engine.maintenance import clean_up, making_room
from aiockpt.engine.place import Place
from aiockpt.futures import SaveResult
from aiockpt.options import Tier
from aiockpt.runtime.promise import Promise, SavePromise


class Destination(StepPlaces, Protocol):
    """Where the saves of one checkpointer go, and where what it loads lies."""

    def takes(self, step: int) -> bool:
        """Return whether *step* is saved at all."""
        ...

    def places_for(self, step: int) -> Sequence[Place]:
        """Return the places that a save of *step* may be written to, the nearest first."""
        ...

    def hasten(self, step: int, seconds: Mapping[str, float]) -> None:
        """Send *step*, which is saved next, to the durable place that finishes it soonest, whatever the rules of that place.

        Args:
            seconds: that saves took lately, by the URL of the place where they were committed.
        """

    def prepare(self, promise: SavePromise) -> None:
        """Give *promise* a stage for each place, where there are several, when it is registered."""

    def stages(self, promise: SavePromise) -> Sequence[Promise[SaveResult]]:
        """Return those that `prepare` gave to *promise*, the nearest place's first."""
        ...

    def announce(self, job: SaveJob) -> None:
        """Announce that *job* is planned, and copied next; on the thread that copies."""

    async def save(self, job: SaveJob) -> SaveResult:
        """Save one state; when this returns it is committed.

        Saves of the same step are made one after the other: each is a generation of its own.

        Raises:
            CheckpointError: as `aiockpt.engine.save.save_alone`.
        """
        ...

    async def clean_up(self, result: SaveResult) -> None:
        """Clean up where a save was committed."""

    def give_up(self, promise: SavePromise) -> None:
        """End a save that is not waited for any more. Any thread."""

    async def tell_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Notify the other ranks that the copies of a save to the places of these numbers ended with its writer."""

    async def close(self, patience_s: float) -> None:
        """Finish what is under way, for *patience_s* seconds, and close all places."""


class OneAtATime:
    """Lets one save of a step in at a time, in the order in which they come."""

    def __init__(self) -> None:
        self._locks: dict[int, anyio.Lock] = {}

    @asynccontextmanager
    async def saving(self, step: int) -> AsyncIterator[None]:
        """Have no other save of *step* inside such a block."""
        lock = self._locks.setdefault(step, anyio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._locks.pop(step, None)


class OnePlace:
    """A single place, written to from here; see `Destination`. A save has no other stages, and is announced nowhere."""

    def __init__(self, place: Place, tier: Tier) -> None:
        self.engine = place.engine
        self.places = (place,)
        self._tier = tier
        self._hastened: int | None = None
        self._one_at_a_time = OneAtATime()

    def takes(self, step: int) -> bool:
        return self._tier.takes(step) or step == self._hastened

    def places_for(self, step: int) -> Sequence[Place]:
        return self.places

    def hasten(self, step: int, seconds: Mapping[str, float]) -> None:
        self._hastened = step

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

    def give_up(self, promise: SavePromise) -> None:
        promise.cancel()

    async def tell_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None: ...

    async def close(self, patience_s: float) -> None:
        await self.places[0].backend.close()

    async def list_steps(self, look: Look) -> Sequence[ListedStep]:
        (place,) = self.places
        return [ListedStep(place, entry) for entry in await look(place)]
