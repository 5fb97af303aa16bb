"""The events of all processes of a run, on one clock (`aiockpt.monitor.read_run` reads them).

A process that begins records its host, its rank and its wall clock; from then on its events are on its own monotonic clock.
They are aligned by the wall clock at that moment, and where that proves wrong by the saves (`aiockpt.monitor.clocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import msgspec

from aiockpt.events import Alive, Closed, Event, Opened

E = TypeVar("E", bound=Event)


class ProcessLog(msgspec.Struct, frozen=True):
    """The events of one checkpointer, from its making to its end, or to the kill.

    Attributes:
        opened: which process it was.
        events: in the order in which they were emitted, after *opened*.
        shift_ns: what its wall clock is behind that of the first rank (`aiockpt.monitor.clocks`).
    """

    opened: Opened
    events: list[Event]
    shift_ns: int = 0

    def wall_ns(self, at_ns: int) -> int:
        """Return the wall clock, in nanoseconds since 1970, at a time of this process."""
        return self.opened.time_ns + at_ns - self.opened.at_ns + self.shift_ns

    def wall_s(self, at_ns: int) -> float:
        """Return the same in seconds."""
        return self.wall_ns(at_ns) / 1e9

    @property
    def closed(self) -> bool:
        """Whether it was closed, and not killed."""
        return any(isinstance(event, Closed) for event in self.events[-3:])

    @property
    def last_s(self) -> float:
        """Its last sign of life."""
        return self.wall_s(max([event.at_ns for event in self.events], default=self.opened.at_ns))

    @property
    def last_told_s(self) -> float:
        """The last time that something happened there: for comparing ranks, as the first alone writes signs of life."""
        told = [event.at_ns for event in self.events if type(event) is not Alive]
        return self.wall_s(max(told, default=self.opened.at_ns))


class UnreadFile(msgspec.Struct, frozen=True):
    """A trace that could not be read, and why."""

    name: str
    why: str


class RunLog(msgspec.Struct, frozen=True):
    """All processes of a run, in the order in which they began; one at least.

    Attributes:
        unread: lines that are no event: the half lines of killed processes, those of a newer aiockpt, and damage.
        missing: files that could not be read.
    """

    processes: list[ProcessLog]
    unread: int = 0
    missing: tuple[UnreadFile, ...] = ()

    def told(self, kind: type[E]) -> Iterator[tuple[ProcessLog, E]]:
        """Yield the events of a kind, each with the process that emitted it."""
        for process in self.processes:
            for event in process.events:
                if isinstance(event, kind):
                    yield process, event

    def folders(self) -> list[Path]:
        """Return the places of the last process that are folders here, the nearest first."""
        urls = self.processes[-1].opened.urls if self.processes else ()
        paths = [Path(unquote(url.removeprefix("file://"))) for url in urls if url.startswith("file://")]
        return [path for path in paths if path.is_dir()]
