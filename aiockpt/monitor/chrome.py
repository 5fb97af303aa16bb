"""Export of the spans of a run as a trace of Chrome, which Perfetto opens.

A host is a process there, and a rank has a row for each kind of operation; groups of blocks are rows below. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan

_ROWS = ("save", "load", "copy", BLOCKS)


def write_chrome_trace(found: Iterable[TimeSpan], path: str | os.PathLike[str]) -> None:
    """Write spans to *path*, for ui.perfetto.dev or chrome://tracing."""
    Path(path).write_bytes(msgspec.json.encode({"traceEvents": list(_events(list(found))), "displayTimeUnit": "ms"}))


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
