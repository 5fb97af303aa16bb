"""Reads what all processes of a run told: the files of `aiockpt.monitor.trace`, of all ranks and starts, as one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import msgspec

from aiockpt import events
from aiockpt.errors import UsageError
from aiockpt.events import Event, Opened
from aiockpt.monitor.clocks import align_clocks
from aiockpt.monitor.run_log import ProcessLog, RunLog
from aiockpt.monitor.trace import FOLDER

_kinds = [kind for kind in Event.__subclasses__() if kind.__module__ == events.__name__]
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(reduce(or_, _kinds))


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
    return align_clocks(RunLog(sorted(processes, key=lambda one: one.opened.time_ns), unread))


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
