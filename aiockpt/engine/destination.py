"""The protocol of destinations: where saves go and steps lie.

`aiockpt.engine.alone` has a single root, written to from here, `aiockpt.places.tiers.tiers` several, and
`aiockpt.worker.client` another process that writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from aiockpt.engine.context import Place
from aiockpt.engine.find import StepPlaces
from aiockpt.engine.job import SaveJob
from aiockpt.futures import SaveResult
from aiockpt.runtime.promise import Promise, SavePromise


class Destination(StepPlaces, Protocol):
    """Where one checkpointer saves to, and where the steps that it loads lie."""

    def takes(self, step: int) -> bool:
        """Return whether *step* is saved at all."""
        ...

    def places_for(self, step: int) -> Sequence[Place]:
        """Return the places that a save of *step* may be written to, the nearest first."""
        ...

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        """Send *step*, which is saved next, to the durable place that finishes it soonest, whatever the rules of that place.

        Args:
            seconds: that saves took lately, by the URL of the place where they were committed.
        """

    def prepare(self, promise: SavePromise) -> None:
        """Add a stage for each place, where there are several, to *promise* when it is registered."""

    def stages(self, promise: SavePromise) -> Sequence[Promise[SaveResult]]:
        """Return the stages that `prepare` added to *promise*, the nearest place's first."""
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

    def abandon(self, promise: SavePromise) -> None:
        """End a save that is not waited for any more. Any thread."""

    async def notify_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Notify the other ranks that the copies of a save to the places of these numbers ended with its writer."""

    async def close(self, patience_s: float) -> None:
        """Finish what is under way, for *patience_s* seconds, and close all places."""
