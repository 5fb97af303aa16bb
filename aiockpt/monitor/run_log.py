"""The events of all processes of a run, on one clock (`aiockpt.monitor.read_run` reads them).

At its start a process records its host, its rank and its wall clock; its later events are on its own monotonic clock. Events
are aligned by the wall clock at that start, and by the saves where it proves wrong (`aiockpt.monitor.read_run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from aiockpt.events import Alive, Closed, Event, Opened
from aiockpt.storage.backend import local_path

E = TypeVar("E", bound=Event)


class ProcessLog(msgspec.Struct, frozen=True):
    """The events of one checkpointer, from its creation to its end, or to the kill.

    Attributes:
        opened: the first event, which identifies the process.
        events: in the order in which they were emitted, after *opened*.
        shift_ns: how far its wall clock is behind that of the first rank (`aiockpt.monitor.read_run`).
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
    def last_event_s(self) -> float:
        """The time of its last event; for comparing ranks, since only the first rank writes signs of life."""
        times_ns = [event.at_ns for event in self.events if type(event) is not Alive]
        return self.wall_s(max(times_ns, default=self.opened.at_ns))


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

    def events_of(self, kind: type[E]) -> Iterator[tuple[ProcessLog, E]]:
        """Yield the events of a kind, each with the process that emitted it."""
        for process in self.processes:
            for event in process.events:
                if isinstance(event, kind):
                    yield process, event

    def folders(self) -> list[Path]:
        """Return the places of the last process that are folders here, the nearest first."""
        urls = self.processes[-1].opened.urls if self.processes else ()
        return [path for path in map(local_path, urls) if path is not None and path.is_dir()]


# The starts of a run: processes that began together, within seconds of each other. A process belongs to the start of the
# lowest rank that is nearest in time, so that a start with fewer ranks, and a rank that comes back later, are distinguished.


_Process = tuple[str, int, str]


def first_starts(run: RunLog) -> list[ProcessLog]:
    """Return the first log of the lowest rank in each start; of several checkpointers in one process the first."""
    return [logs[0] for logs in leading_logs(run)]


def leading_logs(run: RunLog) -> list[list[ProcessLog]]:
    """Return the logs of the lowest rank in each start: of all checkpointers of its process, in their order."""
    lowest = min(process.opened.rank for process in run.processes)
    starts: dict[_Process, list[ProcessLog]] = {}
    for one in run.processes:
        if one.opened.rank == lowest:
            starts.setdefault(process_of(one), []).append(one)
    return list(starts.values())


def start_numbers(run: RunLog) -> list[int]:
    """Return for each of the processes of *run* the number of its start, from 0."""
    times = [log.wall_s(log.opened.at_ns) for log in first_starts(run)]
    began: dict[tuple[int, _Process], float] = {}
    numbers = []
    for process in run.processes:
        at_s = began.setdefault((process.opened.rank, process_of(process)), process.wall_s(process.opened.at_ns))
        numbers.append(_nearest(times, at_s))
    return numbers


def process_of(log: ProcessLog) -> _Process:
    """Return what distinguishes its process from all others."""
    return log.opened.host, log.opened.pid, log.opened.process


def _nearest(times: list[float], at_s: float) -> int:
    return min(range(len(times)), key=lambda number: abs(times[number] - at_s))
