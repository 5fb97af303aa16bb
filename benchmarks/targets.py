"""What was promised: each a figure, or a ratio of two figures, of one run, and its bound."""

from __future__ import annotations

import msgspec

from benchmarks.report import Metric, Report

OURS = ("aiockpt", "aiockpt, retrying")


class Target(msgspec.Struct, frozen=True):
    """*above* ÷ *below*, or *above* alone, shall be at most, or at least, *bound*; without one it is only shown.

    A figure is ``scenario/row/metric``. Of several metrics, joined by ``|``, the smallest median counts (the best way to do
    it); the row ``*`` is the best of all that are neither ours nor floors; ``GiB`` is as many as the state has.
    """

    question: str
    text: str
    above: str
    below: str = ""
    at_most: float | None = None
    at_least: float | None = None

    def ratios(self, report: Report) -> tuple[float, float] | None:
        """Return the ratio of the medians and of the minima, or None when one of the two was not measured."""
        above, below = find(report, self.above), find(report, self.below)
        if above is None or below is None or below.median <= 0 or below.min <= 0:
            return None
        return above.median / below.median, above.min / below.min

    def shown(self, ratio: float) -> str:
        """Return *ratio* in its unit."""
        if self.below == "GiB":
            return f"{ratio:.2f} s/GiB"
        if not self.below and self.above.endswith("_s"):
            return f"{ratio * 1e3:.2f} ms"
        return f"{ratio:.1%}" if not self.below and self.above.endswith("_fraction") else f"{ratio:.2f} ×"

    def verdict(self, ratio: float) -> str:
        """Return whether *ratio* keeps the promise."""
        if self.at_most is None and self.at_least is None:
            return "–"
        kept = ratio <= self.at_most if self.at_most is not None else ratio >= (self.at_least or 0.0)
        return "met" if kept else "**missed**"


def find(report: Report, figure: str) -> Metric | None:
    """Return *figure* in *report*, or None when it was not measured."""
    if figure in ("", "GiB"):
        amount = report.state_bytes / (1 << 30) if figure else 1.0
        return Metric([amount], amount, amount)
    scenario, row, metrics = figure.split("/")
    rows = report.results.get(scenario, {})
    chosen = [name for name in rows if name not in OURS and not name.startswith("floor")] if row == "*" else [row]
    found = [rows[name][metric] for name in chosen for metric in metrics.split("|") if metric in rows.get(name, {})]
    return min(found, key=lambda metric: metric.median) if found else None


_MEMCPY = "save/floor: memcpy/memmove_s|torch_copy_s"
_PREADV = "load/floor: warm preadv/preadv_1_mib_s|preadv_4_mib_s|preadv_8_mib_s"
_OURS, _RAW = "train/aiockpt", "train/floor: memcpy + raw writer"
_DURABLE, _WARM, _SAVE_2 = "save/aiockpt/durable_s", "load/aiockpt/warm_s", "ranks/aiockpt/save_2_s"

MAIN = (
    Target("pause of a save", "≤ 1.15 × warm memcpy", "save/aiockpt/pause_s", _MEMCPY, at_most=1.15),
    Target(
        "pause of the first save after `warm_up`",
        "≤ 1.15 × warm memcpy",
        "warmed/aiockpt/pause_warmed_s",
        _MEMCPY,
        at_most=1.15,
    ),
    Target(
        "time to committed",
        "≤ 1/0.85 of the O_DIRECT writer",
        _DURABLE,
        "save/floor: O_DIRECT write/direct_write_s",
        at_most=1 / 0.85,
    ),
    Target("time to committed", "≥ 3 × faster than DCP `save`", "save/dcp-save/durable_s", _DURABLE, at_least=3.0),
    *(
        Target(
            "time to committed",
            f"≥ 4 × faster than DCP `async_save` ({kind})",
            f"save/dcp-async-{kind}/durable_s",
            _DURABLE,
            at_least=4.0,
        )
        for kind in ("thread", "process")
    ),
    Target(
        "load, cold",
        "≤ 1/0.85 of the O_DIRECT read",
        "load/aiockpt/cold_s",
        "load/floor: O_DIRECT read/direct_read_s",
        at_most=1 / 0.85,
    ),
    Target("load, warm", "≤ 1.5 × the preadv floor", _WARM, _PREADV, at_most=1.5),
    Target("load, warm", "≥ 5 × faster than DCP", "load/dcp-save/warm_s", _WARM, at_least=5.0),
    Target(
        "training time lost per save",
        "≤ 1.15 × (memcpy + raw writer)",
        f"{_OURS}/lost_s",
        f"{_RAW}/lost_s",
        at_most=1.15,
    ),
    *(
        Target(
            f"step while saving, {which}",
            f"≤ {bound} × that beside the raw writer",
            f"{_OURS}/saving_{which}_s",
            f"{_RAW}/saving_{which}_s",
            at_most=bound,
        )
        for which, bound in (("p50", 1.03), ("p99", 1.15))
    ),
    Target(
        "memory beyond the state",
        "≤ the stated budget + 5 %",
        "memory/aiockpt/beyond_bytes",
        "memory/aiockpt/budget_bytes",
        at_most=1.05,
    ),
)
OTHERS = (
    Target("save: faster than DCP", "≥ 1.7 ×", "ranks/dcp/save_2_s", _SAVE_2, at_least=1.7),
    Target("to durable: faster than DCP `async_save`", "≥ 4 ×", "ranks/dcp-async/save_2_s", _SAVE_2, at_least=4.0),
    Target(
        "load on 4 ranks what 2 saved: faster than DCP",
        "≥ 2 ×",
        "ranks/dcp/load_4_s",
        "ranks/aiockpt/load_4_s",
        at_least=2.0,
    ),
    Target("bytes read ÷ needed, on 4 ranks", "≤ 1.1 ×", "ranks/aiockpt/read_4_ratio", at_most=1.1),
    Target(
        "2 ranks beside 1, the same bytes on one disk",
        "≤ 1.1 ×",
        _SAVE_2,
        "ranks/aiockpt/save_1_s",
        at_most=1.1,
    ),
    *(
        Target(f"{what} ranks: time beside the floor's", "–", f"ranks/aiockpt/{metric}", f"ranks/floor/{metric}")
        for what, metric in (("save on 2", "save_2_s"), ("load on 2", "load_2_s"), ("load on 4", "load_4_s"))
    ),
    Target(
        "a save of every step, lazily", "≤ 1.05 ×", "every/aiockpt lazy/block_s", "every/none/block_s", at_most=1.05
    ),
    Target(
        "time lost beside a lazy save",
        "≤ 1.15 × the raw writer's",
        "beside/aiockpt lazy/lost_s",
        "beside/raw writer/lost_s",
        at_most=1.15,
    ),
    Target("step p50 beside a lazy save", "≤ 1.03 × quiet", "beside/aiockpt lazy/slowed_ratio", at_most=1.03),
    Target("call of a lazy save, 1,000 tensors", "≤ 1 ms", "calls/1,000 tensors/call_s", at_most=1e-3),
    Target("the note, 1,000 tensors", "≤ 0.2 ms", "watching/1,000 tensors/note_s", at_most=0.2e-3),
    Target("at the next hook, 1,000 tensors", "≤ 0.1 ms", "watching/1,000 tensors/hook_s", at_most=0.1e-3),
    Target("mean step slowed, a folder", "≤ 3 %", "promotion/folder/slowed_fraction", at_most=0.03),
    Target("mean step slowed, a bucket", "≤ 3 %", "promotion/bucket/slowed_fraction", at_most=0.03),
    *(
        Target(
            f"{verb}: beside the fastest client",
            "≥ 0.9 ×",
            f"{name}/*/{verb}_s",
            f"{name}/aiockpt/{verb}_s",
            at_least=0.9,
        )
        for name in ("clients", "clients-tls", "clients-seaweed", "clients-hdfs")
        for verb in ("put", "get")
    ),
    *(
        Target(f"{verb}: processor time", "≤ 0.6 s/GiB", f"{name}/aiockpt/{verb}_cpu_s", "GiB", at_most=0.6)
        for name in ("clients", "clients-seaweed", "clients-hdfs")
        for verb in ("put", "get")
    ),
    *(
        Target(
            f"{verb}: beside aiobotocore's defaults",
            "≥ 3 ×",
            f"{name}/aiobotocore/{verb}_s",
            f"{name}/aiockpt/{verb}_s",
            at_least=3.0,
        )
        for name in ("clients", "clients-tls")
        for verb in ("put", "get")
    ),
)
