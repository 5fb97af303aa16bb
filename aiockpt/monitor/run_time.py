"""How much of its time does a run train? What one process can say of itself, from the events of its checkpointer alone.

Time runs from when the step was saved that this process went on from, or from when its checkpointer was made where it loaded
none. Lost of it is what lay between that save and this start: work that is done again, and the time down. Held is what calls
of save, waits of optimizers and loads took. The rest is trained (ETTR, effective training time ratio; others say goodput).
A run that has restarted often is told apart by its trace: ``aiockpt report``.
"""

from __future__ import annotations

from aiockpt.events import BarrierWaited, Committed, Event, Loaded, Opened, SnapshotTaken


class RunTime:
    """What became of the time of one process. Told on the loop thread, asked on any, by the monotonic clock."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._held_s = self._lost_s = 0.0
        self._resumed = False
        self._durable_from_ns: int | None = None

    def hear(self, event: Event) -> None:
        """Take note of *event*."""
        match event:
            case Opened():
                self._opened, self._durable_from_ns = event, event.at_ns
                self._held_s = self._lost_s = 0.0
                self._resumed = False
            case SnapshotTaken():
                self._held_s += event.pause_s
            case BarrierWaited():
                self._held_s += event.seconds
            case Committed():
                self._durable_from_ns = event.at_ns - round(event.seconds * 1e9)
                self._resumed = True
            case Loaded():
                self._held_s += event.seconds
                self._durable_from_ns = event.at_ns
                self._resume(event)

    def _resume(self, event: Loaded) -> None:
        """Take the first load, where nothing was saved before it, for what this process goes on from."""
        if not self._resumed and self._opened is not None and event.saved_ns:
            self._lost_s = max((self._opened.time_ns - event.saved_ns) / 1e9, 0.0)
        self._resumed = True

    def wall_s(self, at_ns: int) -> float:
        """Return the wall clock, in seconds since 1970, at a time of the monotonic one."""
        return 0.0 if self._opened is None else (self._opened.time_ns + at_ns - self._opened.at_ns) / 1e9

    def effective(self, now_ns: int) -> float:
        """Return the part of the time that was trained, from 0 to 1."""
        here_s = 0.0 if self._opened is None else (now_ns - self._opened.at_ns) / 1e9
        return max(here_s - self._held_s, 0.0) / (here_s + self._lost_s) if here_s > 0 else 1.0

    def lost_s(self, _: int) -> float:
        """Return the seconds from when what was loaded was saved to this start."""
        return self._lost_s

    def at_risk_s(self, now_ns: int) -> float:
        """Return the seconds of work that a crash would lose now."""
        return 0.0 if self._durable_from_ns is None else (now_ns - self._durable_from_ns) / 1e9
