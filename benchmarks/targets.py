"""What did we promise? The speed targets of the design, each as a ratio of two figures of one run."""

from __future__ import annotations

from typing import Literal

import msgspec

from benchmarks.report import Metric, Report


class Figure(msgspec.Struct, frozen=True):
    """Where a figure stands in a report; of several metrics the smallest median counts (the best way to do it)."""

    scenario: str
    participant: str
    metrics: tuple[str, ...]

    def find(self, report: Report) -> Metric | None:
        """Return the figure in *report*, or None when it was not measured."""
        measured = report.results.get(self.scenario, {}).get(self.participant, {})
        found = [measured[name] for name in self.metrics if name in measured]
        return min(found, key=lambda metric: metric.median) if found else None


class Target(msgspec.Struct, frozen=True):
    """*above* ÷ *below* shall be at most, or at least, *bound*."""

    question: str
    text: str
    above: Figure
    below: Figure
    sense: Literal["at most", "at least"]
    bound: float

    def ratios(self, report: Report) -> tuple[float, float] | None:
        """Return the ratio of the medians and of the minima, or None when one of the two was not measured."""
        above, below = self.above.find(report), self.below.find(report)
        if above is None or below is None or below.median <= 0 or below.min <= 0:
            return None
        return above.median / below.median, above.min / below.min

    def met(self, ratio: float) -> bool:
        """Return whether *ratio* keeps the promise."""
        return ratio <= self.bound if self.sense == "at most" else ratio >= self.bound


def _ours(scenario: str, metric: str) -> Figure:
    return Figure(scenario, "aiockpt", (metric,))


_MEMCPY = Figure("save", "floor: memcpy", ("memmove_s", "torch_copy_s"))
_WRITE = Figure("save", "floor: O_DIRECT write", ("direct_write_s",))
_READ = Figure("load", "floor: O_DIRECT read", ("direct_read_s",))
_PREADV = Figure("load", "floor: warm preadv", ("preadv_1_mib_s", "preadv_4_mib_s", "preadv_8_mib_s"))
_RAW = "floor: memcpy + raw writer"


def _theirs(scenario: str, participant: str, metric: str) -> Figure:
    return Figure(scenario, participant, (metric,))


def _beside(question: str, floor: str, text: str, ours: Figure, bound: float) -> Target:
    """Return the target that a save of ours holds training up hardly more than the bare *floor*, called *text*, does."""
    theirs = Figure(ours.scenario, floor, ours.metrics)
    return Target(question, f"≤ {bound} × {text}", ours, theirs, "at most", bound)


TARGETS = (
    Target("pause of a save", "≤ 1.15 × warm memcpy", _ours("save", "pause_s"), _MEMCPY, "at most", 1.15),
    Target(
        "pause of the first save after `warm_up`",
        "≤ 1.15 × warm memcpy",
        _ours("warmed", "pause_warmed_s"),
        _MEMCPY,
        "at most",
        1.15,
    ),
    Target(
        "time to committed", "≤ 1/0.85 of the O_DIRECT writer", _ours("save", "durable_s"), _WRITE, "at most", 1 / 0.85
    ),
    Target(
        "time to committed",
        "≥ 3 × faster than DCP `save`",
        _theirs("save", "dcp-save", "durable_s"),
        _ours("save", "durable_s"),
        "at least",
        3.0,
    ),
    *(
        Target(
            "time to committed",
            f"≥ 4 × faster than DCP `async_save` ({kind})",
            _theirs("save", f"dcp-async-{kind}", "durable_s"),
            _ours("save", "durable_s"),
            "at least",
            4.0,
        )
        for kind in ("thread", "process")
    ),
    Target("load, cold", "≤ 1/0.85 of the O_DIRECT read", _ours("load", "cold_s"), _READ, "at most", 1 / 0.85),
    Target("load, warm", "≤ 1.5 × the preadv floor", _ours("load", "warm_s"), _PREADV, "at most", 1.5),
    Target(
        "load, warm",
        "≥ 5 × faster than DCP",
        _theirs("load", "dcp-save", "warm_s"),
        _ours("load", "warm_s"),
        "at least",
        5.0,
    ),
    _beside("training time lost per save", _RAW, "(memcpy + raw writer)", _ours("train", "lost_s"), 1.15),
    _beside("step while saving, p50", _RAW, "that beside the raw writer", _ours("train", "saving_p50_s"), 1.03),
    _beside("step while saving, p99", _RAW, "that beside the raw writer", _ours("train", "saving_p99_s"), 1.15),
    Target(
        "memory beyond the state",
        "≤ the stated budget + 5 %",
        _ours("memory", "beyond_bytes"),
        _ours("memory", "budget_bytes"),
        "at most",
        1.05,
    ),
)
