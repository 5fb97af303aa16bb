"""The scrubber, which rereads steps during a run, at a pace, and repairs them: unread data may decay unnoticed.

Guarantees:

- Training and saves come first: nothing is read while a save of this process is under way, nor faster than asked for.
- One rank does it for all. Failures are logged, never raised: the next pass tries again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import anyio
import msgspec

from aiockpt.engine.context import Engine, Place
from aiockpt.engine.destination import Destination
from aiockpt.errors import CheckpointError, ObjectNotFoundError, StepNotFoundError
from aiockpt.format.document import described
from aiockpt.format.names import damaged_key, verified_key
from aiockpt.options import Scrub
from aiockpt.pipeline.discover import StepEntry, scan
from aiockpt.places.scrub.repair import others_of, repair_in
from aiockpt.runtime.limits import Pace, open_tasks
from aiockpt.runtime.promise import Promise
from aiockpt.storage.transfer import read_record

logger = logging.getLogger("aiockpt")

LONGEST_POLL_S = 600.0
"""Between two polls for steps that are due."""
BUSY_S = 0.05
"""Between two polls whether the saves under way have ended."""


class PatientPace(Pace):
    """A pace that stops while saves are under way."""

    def __init__(self, bytes_per_s: float | None, engine: Engine) -> None:
        super().__init__(bytes_per_s, engine.world.clock)
        self._engine = engine

    async def throttle(self, size_bytes: int) -> None:
        while self._engine.busy_attempts:  # noqa: ASYNC110  saves have no event for their end
            await anyio.sleep(BUSY_S)
        await super().throttle(size_bytes)


class Scrubber:
    """Reads the steps of one checkpointer again and again, from `start` to `stop`."""

    def __init__(self, scrub: Scrub, engine: Engine, destination: Destination) -> None:
        self._every_s = scrub.every_h * 3600.0
        self._engine = engine
        self._destination = destination
        self._pace = PatientPace(scrub.bandwidth, engine)
        self._over = anyio.Event()
        self._read_ns: dict[tuple[str, str, int], int] = {}
        """When a generation of a step of a place was read last, by the clock of the reading process."""

    def start(self) -> None:
        """Begin, on the loop."""
        self._done: Promise[None] = Promise("end of the scrub")
        self._done.run(self._engine.loop, self._run)

    def stop(self) -> None:
        """End, and wait until nothing is read or written any more. Not on the loop."""
        self._engine.loop.call_soon(self._over.set)
        self._done.wait_anyway(None)

    async def _run(self) -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(self._scrub)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _scrub(self) -> None:
        while True:
            await anyio.sleep(min(self._every_s / 10, LONGEST_POLL_S))
            for place in self._destination.places:
                if place.backend.traits.durable:
                    await self._scrub_place(place)

    async def _scrub_place(self, place: Place) -> None:
        """Read, and repair, the steps of a place that are due, the newest first."""
        try:
            async for entry in self._due(place):
                try:
                    done = await repair_in(place, entry, others_of(self._destination, place), self._pace)
                    self._read_ns[place.backend.url, entry.id, done.generation] = self._engine.world.clock.time_ns()
                except StepNotFoundError:
                    continue  # retention had it
                except CheckpointError as error:
                    logger.warning("%s in %s cannot be read again now: %s", entry.id, place.backend.url, error)
        except CheckpointError as error:
            logger.warning("the steps in %s cannot be listed now: %s", place.backend.url, error)

    async def _due(self, place: Place) -> AsyncIterator[StepEntry]:
        entries = [entry for entry in await scan(place.backend) if entry.committed]
        for entry in sorted(entries, key=lambda entry: entry.age_order, reverse=True):
            read_ns = await self._last_read_ns(place, entry)
            if self._engine.world.clock.time_ns() - read_ns >= self._every_s * 1e9:
                yield entry

    async def _last_read_ns(self, place: Place, entry: StepEntry) -> int:
        """Return when the step was read last, by its mark or by this process; 0 where that is unknown."""
        generation = max(entry.generations, default=0)
        known = self._read_ns.get((place.backend.url, entry.id, generation), 0)
        for key, marked in ((verified_key, entry.verified), (damaged_key, entry.damaged)):
            if not known and generation in marked:
                try:
                    mark = msgspec.json.decode(
                        await read_record(place.backend, key(entry.id, generation)), type=described(_Mark)
                    )
                    known = mark.verified_ns
                except (ObjectNotFoundError, msgspec.MsgspecError):  # replaced at this moment, or nonsense
                    continue
        return known


class _Mark(msgspec.Struct, frozen=True):
    """The time in the mark of a verification."""

    verified_ns: int
