"""Durations of the last saves of this run, remembered for estimates made while it runs."""

from __future__ import annotations

from collections import deque
from statistics import median

from aiockpt.events import Committed, Event, SnapshotTaken

REMEMBERED = 5
"""Saves; of so many the median is what a save takes."""


class LastSaves:
    """An observer of one checkpointer. On the loop."""

    def __init__(self) -> None:
        self._durable_s: deque[float] = deque(maxlen=REMEMBERED)
        self._pause_s: deque[float] = deque(maxlen=REMEMBERED)

    def on_event(self, event: Event) -> None:
        """Record what a save took."""
        if isinstance(event, Committed):
            self._durable_s.append(event.seconds)
        elif isinstance(event, SnapshotTaken) and event.snapshot == "eager":
            self._pause_s.append(event.pause_s)

    @property
    def durable_s(self) -> float | None:
        """From the call to the commit; None before the first save."""
        return median(self._durable_s) if self._durable_s else None

    @property
    def pause_s(self) -> float | None:
        """How long an eager save held its caller; None where none did."""
        return median(self._pause_s) if self._pause_s else None
