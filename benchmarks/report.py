"""How is a run written down? One JSON file: the machine, the state, and every sample of every metric."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from benchmarks.machine import Machine

Samples = dict[str, list[float]]
"""Metric name → one value for each repetition; the unit is the end of the name (``_s``, ``_bytes``)."""


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """All samples of one metric in the order taken; ``bytes_per_s`` is the state's size over the median seconds."""

    samples: list[float]
    min: float
    median: float
    bytes_per_s: float | None = None


class Report(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        results: scenario → participant → metric name (its end is the unit) → samples.
        unavailable: participant → why it did not take part.
        failures: one sentence for each visit that failed; a run with one is not to be believed.
    """

    machine: Machine
    state_bytes: int
    rounds: int
    repetitions: int
    results: dict[str, dict[str, dict[str, Metric]]]
    unavailable: dict[str, str]
    failures: list[str]


MOVES_THE_STATE = ("pause", "durable", "cold", "warm_s", "memmove", "torch_copy", "direct", "preadv")


def summarise(samples: Samples, state_bytes: int) -> dict[str, Metric]:
    """Return metric name → samples with their minimum, median and, for a move of the whole state, its speed."""
    return {name: _metric(name, values, state_bytes) for name, values in samples.items()}


def _metric(name: str, values: list[float], state_bytes: int) -> Metric:
    median = statistics.median(values)
    moves = name.endswith("_s") and name.startswith(MOVES_THE_STATE) and median > 0
    return Metric(values, min(values), median, state_bytes / median if moves else None)


def write(report: msgspec.Struct, path: Path) -> None:
    """Write *report*, of this or any other benchmark, to *path*, readable by a person."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read(path: Path) -> Report:
    """Return the report that was written to *path*."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
