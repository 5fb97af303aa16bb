"""The part of its time that a run trains, as one process knows it from the events of its checkpointer alone.

Time runs from the save of the step that this process resumed from, or from the making of its checkpointer where it loaded
none. Lost of it is what lay between that save and this start: work that is done again, and the time down. Held is what
calls of save, waits of optimizers and loads took. The rest is trained (ETTR, effective training time ratio; also called
goodput). For a run that has restarted often, ``aiockpt report`` reads its trace.
"""

from __future__ import annotations

from aiockpt.events import BarrierWaited, Committed, Event, Loaded, Opened, SnapshotTaken


class RunTime:
    """The use of the time of one process. Updated on the loop thread, read on any, by the monotonic clock."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._held_s = self._lost_s = 0.0
        self._resumed = False
        self._durable_from_ns: int | None = None

    def hear(self, event: Event) -> None:
        """Record *event*."""
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
        """Treat the first load, where nothing was saved before it, as what this process resumes from."""
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
