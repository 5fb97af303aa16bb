"""The events of a run as spans of time: whole operations, their stages, and groups of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from aiockpt.events import (
    BarrierWaited,
    BytesWritten,
    Committed,
    Event,
    Loaded,
    Opened,
    Operation,
    Promoted,
    Replicated,
    SaveFailed,
    SnapshotTaken,
    StageEnded,
)
from aiockpt.monitor.run_log import ProcessLog, RunLog

WHOLE = "whole"
"""The stage of a span that covers a whole operation."""
BLOCKS = "blocks"
"""The stage of a group of blocks, a part of "write"."""


# gc=False: a span holds no containers, so it is in no cycle, and the collector skips the spans of a long run.
class TimeSpan(msgspec.Struct, frozen=True, gc=False):
    """A span of time on one rank.

    Attributes:
        process: index in `RunLog.processes`.
        begin_s: seconds since 1970.
        stage: `WHOLE`, `BLOCKS`, "pause" (a call of save held its caller), "barrier" (an optimizer was held), or one of
            `aiockpt.events.StageEnded`.
        bytes: that it moved, or 0.
    """

    process: int
    rank: int
    host: str
    step: int
    operation: Operation
    stage: str
    begin_s: float
    seconds: float
    key: str = ""
    bytes: int = 0
    hash_s: float = 0.0
    failed: bool = False


def spans(run: RunLog) -> list[TimeSpan]:
    """Return the spans of a run in the order in which they began."""
    found = [span for number, process in enumerate(run.processes) for span in _of_process(number, process)]
    found.sort(key=attrgetter("begin_s"))
    return found


def spans_of(opened: Opened, event: Event) -> list[TimeSpan]:
    """Return the spans that *event* ends, on the wall clock of the process of *opened*."""
    return list(_of_process(0, ProcessLog(opened, [event])))


def _of_process(number: int, process: ProcessLog) -> Iterator[TimeSpan]:
    rank, host = process.opened.rank, process.opened.host
    wall_ns = process.wall_ns(0)
    for event in process.events:
        for operation, stage, seconds, ended_s, *moved in _of_event(event, (wall_ns + event.at_ns) / 1e9):
            yield TimeSpan(number, rank, host, event.step, operation, stage, ended_s - seconds, seconds, *moved)


def _of_event(event: Event, at_s: float) -> tuple[tuple[Any, ...], ...]:
    """Return of each span its operation, stage, seconds, when it ended, and the fields of `TimeSpan` from *key* on."""
    match event:
        case StageEnded():
            moved = event.key, event.bytes, event.hash_s, event.failed
            return ((event.operation, event.stage, event.seconds, at_s, *moved),)
        case BytesWritten(seconds=seconds) if seconds:
            return (("save", BLOCKS, seconds, at_s, event.key, event.bytes),)
        case SnapshotTaken():
            # Without *seconds* (traces of older versions) the longer of the two stands for the time since the call.
            called_s = at_s - (event.seconds or max(event.copy_s, event.pause_s))
            return (
                ("save", "snapshot", event.copy_s, at_s, event.snapshot, event.bytes),
                ("save", "pause", event.pause_s, called_s + event.pause_s),
            )
        case BarrierWaited():
            return (("save", "barrier", event.seconds, at_s),)
        case Committed():
            return (("save", WHOLE, event.seconds, at_s, "", event.bytes),)
        case SaveFailed():
            return (("save", WHOLE, event.seconds, at_s, event.error, 0, 0.0, True),)
        case Loaded():
            return (("load", WHOLE, event.seconds, at_s, "", event.read_bytes),)
        case Promoted():
            return (("copy", WHOLE, event.seconds, at_s, event.url, event.bytes),)
        case Replicated():
            return (("copy", WHOLE, event.seconds, at_s, event.url),)
        case _:
            return ()


# The trace of Chrome, which Perfetto opens: a host is a process, a rank has a row for each kind of operation. The format:
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.


_ROWS = ("save", "load", "copy", BLOCKS)


def chrome_trace(found: Iterable[TimeSpan]) -> bytes:
    """Return spans as a file for ui.perfetto.dev or chrome://tracing."""
    return msgspec.json.encode({"traceEvents": list(_events(list(found))), "displayTimeUnit": "ms"})


def _events(found: list[TimeSpan]) -> Iterator[dict[str, Any]]:
    hosts = {host: number for number, host in enumerate(sorted({span.host for span in found}), 1)}
    for host, number in hosts.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": host}}
    begun_s = min((span.begin_s for span in found), default=0.0)
    named: set[tuple[str, int]] = set()
    for span in found:
        kind = BLOCKS if span.stage == BLOCKS else span.operation
        row = span.rank * len(_ROWS) + _ROWS.index(kind)
        if (span.host, row) not in named:
            named.add((span.host, row))
            name = f"rank {span.rank}: {kind}"
            yield {"ph": "M", "name": "thread_name", "pid": hosts[span.host], "tid": row, "args": {"name": name}}
        yield {
            "ph": "X",
            "name": f"{span.operation} of step {span.step}" if span.stage == WHOLE else span.stage,
            "cat": span.operation,
            "pid": hosts[span.host],
            "tid": row,
            "ts": (span.begin_s - begun_s) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"step": span.step, "key": span.key, "bytes": span.bytes, "failed": span.failed},
        }
