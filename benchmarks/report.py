"""The report of a run: one JSON file with the machine, the settings, and every sample of every metric."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import Machine

Samples = dict[str, list[float]]
"""Metric name → one value for each repetition; the unit is the end of the name (``_s``, ``_bytes``, ``_fraction``)."""


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """All samples of one metric in the order taken; ``bytes_per_s`` is the state's size over the median seconds."""

    samples: list[float]
    min: float
    median: float
    bytes_per_s: float | None = None


Rows = dict[str, dict[str, Metric]]
"""Row (a contender, or a contender at one size) → metric name → samples."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run.

    Attributes:
        machine: None for a simulated run.
        results: scenario → row → metric.
        unavailable: contender → reason why it did not take part.
        failures: one sentence for each failed visit; a run with any is not valid.
        settings: scenario → its settings, besides the size and the repetitions.
        notes: scenario → its notes in words.
    """

    machine: Machine | None
    state_bytes: int
    rounds: int
    repetitions: int
    results: dict[str, Rows]
    unavailable: dict[str, str]
    failures: list[str]
    settings: dict[str, dict[str, Any]] = {}
    notes: dict[str, list[str]] = {}


_MOVES_THE_STATE = re.compile(
    r"(pause|durable|cold|memmove|torch_copy|direct_|preadv).*_s|(warm|put|get|pinned_copy)_s"
)


def summarise(samples: Samples, state_bytes: int) -> dict[str, Metric]:
    """Return metric name → samples with their minimum, median and, for a move of the whole state, its speed."""
    return {name: _metric(name, values, state_bytes) for name, values in samples.items() if values}


def _metric(name: str, values: list[float], state_bytes: int) -> Metric:
    median = statistics.median(values)
    moves = state_bytes and _MOVES_THE_STATE.fullmatch(name) and median > 0
    return Metric(values, min(values), median, state_bytes / median if moves else None)


def write(report: msgspec.Struct, path: Path) -> None:
    """Write *report* to *path*, indented."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read(path: Path) -> Report:
    """Return the report that was written to *path*."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
