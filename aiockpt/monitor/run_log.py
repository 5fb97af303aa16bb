"""What did all processes of a run tell? The files of `aiockpt.monitor.trace`, read as one story on one clock.

A process that begins writes where and when it is; from then on its events are on its own monotonic clock. They are laid side
by side by the wall clock at that moment, so that two hosts are as far apart as their clocks are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from aiockpt import events
from aiockpt.errors import UsageError
from aiockpt.events import Event, Opened
from aiockpt.monitor.trace import FOLDER

E = TypeVar("E", bound=Event)
_kinds = [kind for kind in Event.__subclasses__() if kind.__module__ == events.__name__]
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(reduce(or_, _kinds))


class ProcessLog(msgspec.Struct, frozen=True):
    """What one checkpointer told, from its making to its end, or to the kill.

    Attributes:
        opened: which process it was.
        events: in the order in which they were told, after *opened*.
    """

    opened: Opened
    events: list[Event]

    def wall_s(self, at_ns: int) -> float:
        """Return the wall clock, in seconds since 1970, at a time of this process."""
        return (self.opened.time_ns + at_ns - self.opened.at_ns) / 1e9

    @property
    def last_s(self) -> float:
        """When it told something for the last time."""
        return self.wall_s(max((event.at_ns for event in self.events), default=self.opened.at_ns))


class RunLog(msgspec.Struct, frozen=True):
    """All processes of a run, in the order in which they began.

    Attributes:
        unread: lines that are no event: the half lines of killed processes, and those of a newer aiockpt.
    """

    processes: list[ProcessLog]
    unread: int = 0

    def told(self, kind: type[E]) -> Iterator[tuple[ProcessLog, E]]:
        """Yield the events of a kind, each with the process that told it."""
        for process in self.processes:
            for event in process.events:
                if isinstance(event, kind):
                    yield process, event

    def folders(self) -> list[Path]:
        """Return the places of the last process that are folders here, the nearest first."""
        urls = self.processes[-1].opened.urls if self.processes else ()
        paths = [Path(unquote(url.removeprefix("file://"))) for url in urls if url.startswith("file://")]
        return [path for path in paths if path.is_dir()]


def read_run(path: str | os.PathLike[str]) -> RunLog:
    """Return what is told in *path*: a file of a `TraceFile`, a folder with some, or the folder of a run.

    Raises:
        UsageError: there is none.
    """
    files = list(_files(Path(path)))
    if not files:
        raise UsageError(
            f"{os.fspath(path)}: no trace of a run here. Have it written: "
            "Checkpointer(…, observers=[aiockpt.monitor.TraceFile()])"
        )
    processes: list[ProcessLog] = []
    unread = 0
    for file in files:
        told, missed = _read(file)
        processes += told
        unread += missed
    return RunLog(sorted(processes, key=lambda one: one.opened.time_ns), unread)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    yield from sorted(folder.glob("*.jsonl"))


def _read(file: Path) -> tuple[list[ProcessLog], int]:
    processes: list[ProcessLog] = []
    unread = 0
    with file.open("rb") as lines:
        for line in lines:
            try:
                event = _decoder.decode(line)
            except msgspec.DecodeError:
                unread += 1
                continue
            if isinstance(event, Opened):
                processes.append(ProcessLog(event, []))
            elif processes:
                processes[-1].events.append(event)
    return processes, unread
