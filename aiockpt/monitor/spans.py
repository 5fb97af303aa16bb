"""What took from when to when? The events of a run as spans: whole operations, their stages, and groups of blocks."""

from __future__ import annotations

from collections.abc import Iterator
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
    SaveFailed,
    SnapshotTaken,
    StageEnded,
)
from aiockpt.monitor.run_log import ProcessLog, RunLog

WHOLE = "whole"
"""The stage of a span that is all of an operation."""
BLOCKS = "blocks"
"""The stage of a group of blocks, a part of "write"."""


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took a while on one rank.

    Attributes:
        process: its place in `RunLog.processes`.
        begin_s: seconds since 1970.
        stage: `WHOLE`, `BLOCKS`, "pause" (a call of save held its caller), "barrier" (an optimizer was held), or one of
            `aiockpt.events.StageEnded`.
        bytes: that it moved; 0 where it moves none.
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
    return sorted(found, key=lambda span: span.begin_s)


def spans_of(opened: Opened, event: Event) -> list[TimeSpan]:
    """Return the spans that *event* ends, of the process that is *opened*, by that one's wall clock."""
    return list(_of_process(0, ProcessLog(opened, [event])))


def _of_process(number: int, process: ProcessLog) -> Iterator[TimeSpan]:
    for event in process.events:
        for operation, stage, seconds, ended_s, facts in _of_event(event, process.wall_s(event.at_ns)):
            yield TimeSpan(
                process=number,
                rank=process.opened.rank,
                host=process.opened.host,
                step=event.step,
                operation=operation,
                stage=stage,
                begin_s=ended_s - seconds,
                seconds=seconds,
                **facts,
            )


_Found = tuple[Operation, str, float, float, dict[str, Any]]


def _of_event(event: Event, at_s: float) -> Iterator[_Found]:
    match event:
        case StageEnded():
            facts: dict[str, Any] = {"key": event.key, "bytes": event.bytes, "hash_s": event.hash_s}
            yield event.operation, event.stage, event.seconds, at_s, {**facts, "failed": event.failed}
        case BytesWritten(seconds=seconds) if seconds:
            yield "save", BLOCKS, seconds, at_s, {"key": event.key, "bytes": event.bytes}
        case SnapshotTaken():
            yield "save", "snapshot", event.copy_s, at_s, {"bytes": event.bytes, "key": event.snapshot}
            yield "save", "pause", event.pause_s, at_s - max(event.copy_s - event.pause_s, 0.0), {}
        case BarrierWaited():
            yield "save", "barrier", event.seconds, at_s, {}
        case Committed():
            yield "save", WHOLE, event.seconds, at_s, {"bytes": event.bytes}
        case SaveFailed():
            yield "save", WHOLE, event.seconds, at_s, {"failed": True, "key": event.error}
        case Loaded():
            yield "load", WHOLE, event.seconds, at_s, {"bytes": event.read_bytes}
        case Promoted():
            yield "copy", WHOLE, event.seconds, at_s, {"bytes": event.bytes, "key": event.url}
        case _:
            pass
