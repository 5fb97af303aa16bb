"""Who sees the calls of a ``Checkpointer``? Nobody, unless the run is being proved (`aiockpt.prove.watched_calls`).

A probe is asked at each call, before or after the engine is; `Unwatched` leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aiockpt.engine.load import Filled, LoadRequest
from aiockpt.events import Observer
from aiockpt.futures import LoadResult
from aiockpt.options import Tier
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

State = Mapping[str, Any]


class CallProbe(Protocol):
    """Sees the calls of one checkpointer, and may give it other places.

    Attributes:
        observers: to be told of events.
    """

    @property
    def observers(self) -> Sequence[Observer]: ...

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return the tiers that are really saved to, and a backend for each.

        Args:
            by_url: another process is to open them, by their URLs.
        """
        ...

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return what is to be loaded, when *request* is asked for."""
        ...

    def watch_load(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return what completes a load on the thread of its waiter; None where there is nothing to do."""
        ...

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Hear that the program has come to *step*, and is about to save it or not."""

    def saved(self, step: int) -> None:
        """Hear that ``save(step)`` has returned."""

    def closing(self) -> None:
        """Hear that the checkpointer is being closed. More than once does no harm."""


class Unwatched:
    """Sees nothing, and leaves places and loads as they are."""

    observers: Sequence[Observer] = ()

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a backend for each."""
        return list(tiers), [open_backend(tier.url, world=world) for tier in tiers]

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return *request*."""
        return request

    def watch_load(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return what fills the objects; None where there is nothing to fill."""
        return None if filled is None else filled.apply

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Look away."""

    def saved(self, step: int) -> None:
        """Look away."""

    def closing(self) -> None:
        """Look away."""
