"""The probe of a ``Checkpointer``'s calls: absent unless the run is being proved (`aiockpt.prove.watched_calls`).

The checkpointer calls its probe at each call, before or after the engine; `aiockpt.engine.alone.Unwatched` changes nothing.
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

State = Mapping[str, Any]


class CallProbe(Protocol):
    """Sees the calls of one checkpointer, and may replace its places.

    Attributes:
        observers: receive events.
    """

    @property
    def observers(self) -> Sequence[Observer]: ...

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return the tiers that saves actually use, and a backend for each.

        Args:
            by_url: another process will open them, by their URLs.
        """
        ...

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return the request to load in place of *request*."""
        ...

    def wrap_apply(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return a function that completes a load on its waiter's thread; None where nothing is left to do."""
        ...

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Called when the program has reached *step*; *saved* says whether it saves it."""

    def saved(self, step: int) -> None:
        """Called when ``save(step)`` has returned."""

    def closing(self) -> None:
        """Called when the checkpointer is being closed. Idempotent."""
