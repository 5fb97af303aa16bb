"""Outcomes and durations of the last saves: what can still be flushed, and whether another one fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from aiockpt.events import Event, Promoted
from aiockpt.futures import SaveFuture, promise_of
from aiockpt.runtime.promise import SavePromise

REMEMBERED = 5
"""Saves whose seconds are remembered; the longest counts, for too short an estimate loses the save."""


class RecentSave(msgspec.Struct, frozen=True, order=True):
    """One save: its number in the order of the calls, its step, and when it began (monotonic)."""

    number: int
    step: int
    begun_ns: int


class RecentSaves:
    """The saves of one checkpointer. An observer too: it records what promotions took. Any thread.

    Attributes:
        lasting: URLs of places where a step outlives its job, even if it may not survive a power cut.
    """

    def __init__(self) -> None:
        self.lasting: frozenset[str] = frozenset()
        self._count = 0
        self._running: dict[int, tuple[SavePromise, RecentSave]] = {}
        self._newest: RecentSave | None = None
        self._seconds: dict[str, deque[float]] = {}

    def on_event(self, event: Event) -> None:
        """Record the duration of a copy to another place."""
        if isinstance(event, Promoted):
            self._note_seconds(event.url, event.seconds)

    def watch(self, save: SaveFuture, now_ns: int) -> None:
        """Record a save that was started *now*."""
        promise = promise_of(save)
        self._count += 1
        number = self._count
        if not promise.has_failed:
            self._running[number] = promise, RecentSave(number, promise.step, now_ns)
            promise.when_settled(lambda: self._end(number))

    def _end(self, number: int) -> None:
        """Record the outcome of a save, once, on the thread that sees it first."""
        running = self._running.pop(number, None)
        if running is None:
            return
        promise, save = running
        if promise.error is not None or not (promise.value.durable or promise.value.url in self.lasting):
            return
        if self._newest is None or self._newest.number < number:
            self._newest = save
        if not promise.value.existed:
            self._note_seconds(promise.value.url, promise.value.seconds)

    def _note_seconds(self, url: str, seconds: float) -> None:
        self._seconds.setdefault(url, deque(maxlen=REMEMBERED)).append(seconds)

    @property
    def running(self) -> list[SavePromise]:
        """The saves that have not ended, the oldest first."""
        # A copy, made by C code under the GIL: an iteration would fail when another thread settles a save meanwhile.
        return [promise for promise, _ in list(self._running.values()) if not promise.is_settled]

    @property
    def newest_durable(self) -> RecentSave | None:
        """The newest save that is committed where it outlives this host."""
        for number, (promise, _) in list(self._running.items()):
            if promise.is_settled:  # its callback has not run yet
                self._end(number)
        return self._newest

    def newest(self) -> RecentSave | None:
        """Return the newest save that has not failed."""
        durable = self.newest_durable
        running = [save for _, save in list(self._running.values())]
        return max([*running, *([] if durable is None else [durable])], default=None)

    @property
    def seconds(self) -> Mapping[str, float]:
        """The longest recent duration of a save, from the call to the commit, by the URL of the place."""
        return {url: max(list(recent)) for url, recent in list(self._seconds.items()) if recent}

    @property
    def usual_s(self) -> float | None:
        """The duration in the fastest place; None where nothing was measured."""
        return min(self.seconds.values(), default=None)
