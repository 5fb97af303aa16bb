"""Targets: a figure, or a ratio of two figures, of one run, each with its bound."""

from __future__ import annotations

import msgspec

from benchmarks.report import Metric, Report

OURS = ("aiockpt", "aiockpt, retrying")


class Target(msgspec.Struct, frozen=True):
    """*above* ÷ *below*, or *above* alone, shall be at most, or at least, *bound*; without one it is only shown.

    A figure is ``scenario/row/metric``. Of several metrics, joined by ``|``, the smallest median counts (the best
    way); the row ``*`` is the best of all that are neither ours nor floors; ``GiB`` is as many as the state has.
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
        """Return whether *ratio* meets the target."""
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


_NAMES = {
    "MEMCPY": "save/floor: memcpy/memmove_s|torch_copy_s",
    "PREADV": "load/floor: warm preadv/preadv_1_mib_s|preadv_4_mib_s|preadv_8_mib_s",
    "WRITE": "save/floor: O_DIRECT write/direct_write_s",
    "RAW": "train/floor: memcpy + raw writer",
}
"""Abbreviations of figures, or of their beginnings, used below."""


_NOT_OF = {"≥ 3 ×": ("clients-seaweed", "clients-hdfs"), "≤ 0.6 s/GiB": ("clients-tls",)}
"""Where a real server is the limit, and where encryption is most of the work."""


def _targets(table: str) -> tuple[Target, ...]:
    """Return the targets of *table*: question; the target as displayed; its bound, if any; above; below, if any."""
    targets = []
    for line in table.strip().splitlines():
        question, text, bound, above, below = (part.strip() for part in line.split(";"))
        scenario, _, rest = below.partition("/")
        below = _NAMES.get(scenario, scenario) + (f"/{rest}" if rest else "")
        value = float(bound) if bound else None
        most, least = (None, value) if text.startswith("≥") else (value, None)
        targets.append(Target(question, text, above, below, at_most=most, at_least=least))
    return tuple(targets)


MAIN = _targets("""
pause of a save; ≤ 1.15 × warm memcpy; 1.15; save/aiockpt/pause_s; MEMCPY
pause of the first save after `warm_up`; ≤ 1.15 × warm memcpy; 1.15; warmed/aiockpt/pause_warmed_s; MEMCPY
time to committed; ≤ 1/0.85 of the O_DIRECT writer; 1.1764706; save/aiockpt/durable_s; WRITE
time to committed; ≥ 3 × faster than DCP `save`; 3; save/dcp-save/durable_s; save/aiockpt/durable_s
time to committed; ≥ 4 × faster than DCP `async_save` (thread); 4; save/dcp-async-thread/durable_s; save/aiockpt/durable_s
time to committed; ≥ 4 × faster than DCP `async_save` (process); 4; save/dcp-async-process/durable_s; save/aiockpt/durable_s
load, cold; ≤ 1/0.85 of the O_DIRECT read; 1.1764706; load/aiockpt/cold_s; load/floor: O_DIRECT read/direct_read_s
load, warm; ≤ 1.5 × the preadv floor; 1.5; load/aiockpt/warm_s; PREADV
load, warm: time beside preadv and hashes; –; ; load/aiockpt/warm_s; load/floor: warm preadv/preadv_and_hash_s
load, warm; ≥ 5 × faster than DCP; 5; load/dcp-save/warm_s; load/aiockpt/warm_s
training time lost per save; ≤ 1.15 × (memcpy + raw writer); 1.15; train/aiockpt/lost_s; RAW/lost_s
step while saving, p50; ≤ 1.03 × that beside the raw writer; 1.03; train/aiockpt/saving_p50_s; RAW/saving_p50_s
step while saving, p99; ≤ 1.15 × that beside the raw writer; 1.15; train/aiockpt/saving_p99_s; RAW/saving_p99_s
memory beyond the state; ≤ the stated budget + 5 %; 1.05; memory/aiockpt/beyond_bytes; memory/aiockpt/budget_bytes
""")
OTHERS = _targets("""
save: faster than DCP; ≥ 1.7 ×; 1.7; ranks/dcp/save_2_s; ranks/aiockpt/save_2_s
to durable: faster than DCP `async_save`; ≥ 4 ×; 4; ranks/dcp-async/save_2_s; ranks/aiockpt/save_2_s
load on 4 ranks what 2 saved: faster than DCP; ≥ 2 ×; 2; ranks/dcp/load_4_s; ranks/aiockpt/load_4_s
bytes read ÷ needed, on 4 ranks; ≤ 1.1 ×; 1.1; ranks/aiockpt/read_4_ratio;
2 ranks beside 1, the same bytes on one disk; ≤ 1.1 ×; 1.1; ranks/aiockpt/save_2_s; ranks/aiockpt/save_1_s
save on 2 ranks: time beside the floor's; –; ; ranks/aiockpt/save_2_s; ranks/floor/save_2_s
load on 2 ranks: time beside the floor's; –; ; ranks/aiockpt/load_2_s; ranks/floor/load_2_s
load on 4 ranks: time beside the floor's; –; ; ranks/aiockpt/load_4_s; ranks/floor/load_4_s
a save of every step, lazily; ≤ 1.05 ×; 1.05; every/aiockpt lazy/block_s; every/none/block_s
time lost beside a lazy save; ≤ 1.15 × the raw writer's; 1.15; beside/aiockpt lazy/lost_s; beside/raw writer/lost_s
step p50 beside a lazy save; ≤ 1.03 × quiet; 1.03; beside/aiockpt lazy/slowed_ratio;
call of a lazy save, 1,000 tensors; ≤ 1 ms; 1e-3; calls/1,000 tensors/call_s;
the note, 1,000 tensors; ≤ 0.2 ms; 0.2e-3; watching/1,000 tensors/note_s;
at the next hook, 1,000 tensors; ≤ 0.1 ms; 0.1e-3; watching/1,000 tensors/hook_s;
watching, of a save; ≤ 1 %; 0.01; observing/a save/added_fraction;
watching, on the training thread; ≤ 20 µs; 20e-6; observing/a save/call_added_s;
a report of 1,000 ranks × 100 saves, built; ≤ 20 s; 20; observing/a report/build_s;
the same, drawn; ≤ 3 s; 3; observing/a report/drawn_s;
`top` of 1,000 ranks, of a core; ≤ 2 %; 0.02; observing/top/core_fraction;
its pictures apart; ≤ 1.1 s; 1.1; observing/top/apart_s;
replicated; ≤ 1.3 × the bytes over loopback; 1.3; peers/aiockpt/replicated_s; peers/floor: loopback/replicated_s
killed to the first new step, beyond a start; ≤ 5 s; 5; recovery/kill/beyond_s;
a hang noticed, beyond 10 steps; ≤ 5 s; 5; recovery/hang/beyond_steps_s;
published; ≤ 1.25 × by hand, with the sums; 1.25; publishing/aiockpt/publish_s; publishing/floor: with sums/publish_s
published; ≤ 1.25 × the same from disk; 1.25; publishing/aiockpt/publish_s; publishing/floor: from disk/publish_s
applied; ≤ 1.25 × by hand, with the sum; 1.25; publishing/aiockpt/apply_s; publishing/floor: with sums/apply_s
mean step slowed, a folder; ≤ 3 %; 0.03; promotion/folder/slowed_fraction;
mean step slowed, a bucket; ≤ 3 %; 0.03; promotion/bucket/slowed_fraction;
""") + tuple(
    target
    for server in ("clients", "clients-tls", "clients-seaweed", "clients-hdfs")
    for verb in ("put", "get")
    for target in _targets(f"""
{server}, {verb}: beside the fastest client; ≥ 0.9 ×; 0.9; {server}/*/{verb}_s; {server}/aiockpt/{verb}_s
{server}, {verb}: beside aiobotocore's defaults; ≥ 3 ×; 3; {server}/aiobotocore/{verb}_s; {server}/aiockpt/{verb}_s
{server}, {verb}: processor time; ≤ 0.6 s/GiB; 0.6; {server}/aiockpt/{verb}_cpu_s; GiB
""")
    if server not in _NOT_OF.get(target.text, ())
)
