"""The result tables as data: the figure of each column, and its format."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.report import Metric, Report, Rows

RESAMPLES = 2000


class Cell(NamedTuple):
    """One figure in its table: of *row*, among all *rows* of the scenario."""

    report: Report
    rows: Rows
    row: str
    metric: Metric

    def quantile(self, fraction: float) -> float:
        """Return the sample below which *fraction* of them lie (nearest rank)."""
        samples = sorted(self.metric.samples)
        return samples[min(len(samples) - 1, int(fraction * len(samples)))]


Show = Callable[[Cell], str]


class Column(NamedTuple):
    """A heading, the figure below it, and its format."""

    heading: str
    scenario: str
    metric: str
    show: Show


class Table(NamedTuple):
    """A title, and the columns after the first, which names the rows."""

    title: str
    columns: tuple[Column, ...]


def duration(seconds: float) -> str:
    """Return seconds in a readable unit."""
    if 0 < abs(seconds) < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    """Return bytes in a readable unit."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= 1 << 20 or not count else f"{count / 1024:.1f} KiB"


def both(cell: Cell) -> str:
    """Return the median, the minimum, and the speed where the whole state is moved."""
    speed = f" ({cell.metric.bytes_per_s / 1e9:.2f} GB/s)" if cell.metric.bytes_per_s else ""
    return f"{duration(cell.metric.median)} · {duration(cell.metric.min)}{speed}"


def tail(cell: Cell) -> str:
    """Return the median, the least and the 95th percentile."""
    return f"{duration(cell.metric.median)} ({duration(cell.metric.min)}, {duration(cell.quantile(0.95))})"


def quartiles(cell: Cell) -> str:
    """Return the median and the quartiles."""
    if len(cell.metric.samples) < 2:
        return duration(cell.metric.median)
    low, middle, high = statistics.quantiles(cell.metric.samples, n=4)
    return f"{duration(middle)} ({duration(low)} … {duration(high)})"


SHOWS: dict[str, Show] = {
    "both": both,
    "tail": tail,
    "quartiles": quartiles,
    "median": lambda cell: duration(cell.metric.median),
    "most": lambda cell: (
        f"{duration(cell.metric.median)} (most {duration(cell.quantile(1))}, {len(cell.metric.samples)} times)"
    ),
    "bytes": lambda cell: size(cell.metric.median),
    "count": lambda cell: f"{cell.metric.median:,.0f}",
    "ratio": lambda cell: f"{cell.metric.median:.3f} ×",
    "percent": lambda cell: f"{cell.metric.median:.2%}",
    "signed": lambda cell: f"{cell.metric.median:+.1%} ({cell.quantile(0):+.1%} … {cell.quantile(1):+.1%})",
    "MB/s": lambda cell: f"{cell.report.state_bytes / cell.metric.median / 1e6:,.0f} MB/s",
    "s/GiB": lambda cell: f"{cell.metric.median / (cell.report.state_bytes / (1 << 30)):.2f}",
}
"""Formats of figures that need no other figure; a speed uses the bytes of the report."""


def of(row: str, metric: str) -> Show:
    """Return a format: a median relative to that of *row*'s *metric*."""

    def show(cell: Cell) -> str:
        below = cell.rows.get(row, {}).get(metric)
        return f"{cell.metric.median / below.median:.3f} ×" if below else "–"

    return show


def of_own(metric: str) -> Show:
    """Return a format: the change, sample by sample, relative to another metric of the same row."""

    def show(cell: Cell) -> str:
        pairs = zip(cell.metric.samples, cell.rows[cell.row][metric].samples, strict=True)
        return f"{statistics.median(above / below - 1 for above, below in pairs):+.1%}"

    return show


def share_of(metric: str) -> Show:
    """Return a format: the sum of all samples as a share of that of *metric*."""
    return lambda cell: f"{sum(cell.metric.samples) / sum(cell.rows[cell.row][metric].samples):.1%}"


def per(metric: str, unit: float, shown: str) -> Show:
    """Return a format: a median for each *unit* of another metric."""

    def show(cell: Cell) -> str:
        amount = cell.rows[cell.row][metric].median / unit
        return shown.format(cell.metric.median / amount) if amount else "–"

    return show


def by(metric: str, unit: float, shown: str) -> Show:
    """Return a format: the median speed in *unit*, sample by sample over the seconds of *metric*."""

    def show(cell: Cell) -> str:
        pairs = zip(cell.metric.samples, cell.rows[cell.row][metric].samples, strict=True)
        speed = statistics.median(amount / seconds for amount, seconds in pairs)
        return shown.format(speed / unit) if speed else "–"

    return show


def each(setting: str, unit: float, shown: str, *, inverse: bool = False) -> Show:
    """Return a format: a median divided by the number in *setting*; *inverse*: that number for each unit."""

    def show(cell: Cell) -> str:
        amount = next(found[setting] for found in cell.report.settings.values() if setting in found)
        one = cell.metric.median / amount
        return shown.format((1 / one if inverse else one) / unit)

    return show


def within(bound: float) -> Show:
    """Return a format: a median duration, marked when it is above *bound* seconds."""
    return lambda cell: duration(cell.metric.median) + (" (**missed**)" if cell.metric.median > bound else "")


def compared(row: str, samples_of: str) -> Show:
    """Return a format: the ratio to the medians of *row*, and its 90 % interval from resamples of the rounds."""

    def show(cell: Cell) -> str:
        below = cell.rows.get(row, {}).get(samples_of)
        if cell.row in (row, "none") or below is None:
            return "–"
        return ratio_interval(cell.metric.samples, below.samples)

    return show


def ratio_interval(above: list[float], below: list[float]) -> str:
    """Return the ratio of two medians, and its 90 % interval from resamples of pairs."""
    chance = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(range(len(below)), k=len(below))
        base = statistics.median(below[index] for index in drawn)
        ratios.append(statistics.median(above[index] for index in drawn) / base if base > 0 else float("inf"))
    ratios.sort()
    base = statistics.median(below)
    middle = f"{statistics.median(above) / base:.1f} ×" if base > 0 else "–"
    return f"{middle} ({ratios[RESAMPLES // 20]:.1f} … {ratios[-RESAMPLES // 20]:.1f})"


_Given = tuple[str, str, Show | str]
"""Heading, metric (of another scenario: ``scenario/metric``), and format."""


def _table(title: str, scenario: str, *given: _Given) -> Table:
    """Return a table about *scenario*."""
    columns = []
    for heading, figure, show in given:
        *other, metric = figure.split("/")
        made = SHOWS[show] if isinstance(show, str) else show
        columns.append(Column(heading, other[0] if other else scenario, metric, made))
    return Table(title, tuple(columns))


def _clients(scenario: str, server: str) -> Table:
    columns: list[_Given] = []
    for verb in ("put", "get"):
        columns += [(verb.upper(), f"{verb}_s", "MB/s"), ("CPU s/GiB", f"{verb}_cpu_s", "s/GiB")]
    for verb in ("put", "get"):
        columns += [
            (f"{verb.upper()} small", f"{verb}_small_s", each("small_count", 1, "{:,.0f} /s", inverse=True)),
            ("CPU ms", f"{verb}_small_cpu_s", each("small_count", 1e-3, "{:.2f}")),
        ]
    return _table(f"Storage clients, {server}", scenario, *columns)


TABLES = (
    _table(
        "Saving",
        "save",
        ("pause, first save", "pause_first_s", "both"),
        ("pause, first after `warm_up`", "warmed/pause_warmed_s", "both"),
        ("pause, later", "pause_s", "both"),
        ("to durable, first", "durable_first_s", "both"),
        ("to durable, later", "durable_s", "both"),
    ),
    _table(
        "Loading into the job's tensors",
        "load",
        ("cold", "cold_s", "both"),
        ("warm", "warm_s", "both"),
    ),
    _table(
        "Training while saving",
        "train",
        ("time lost per save", "lost_s", "both"),
        ("step p50, quiet", "quiet_p50_s", "both"),
        ("p50, saving", "saving_p50_s", "both"),
        ("p99, quiet", "quiet_p99_s", "both"),
        ("p99, saving", "saving_p99_s", "both"),
    ),
    _table(
        "Memory",
        "memory",
        ("peak beyond the state", "beyond_bytes", "bytes"),
        ("stated budget", "budget_bytes", "bytes"),
    ),
    _table(
        "Many ranks",
        "ranks",
        ("save on 1 rank", "save_1_s", "both"),
        ("save on 2 ranks", "save_2_s", "both"),
        ("training held", "held_s", "both"),
        ("load on 2 ranks", "load_2_s", "both"),
        ("read ÷ needed on 2", "read_2_ratio", "ratio"),
        ("load on 4 ranks", "load_4_s", "both"),
        ("read ÷ needed on 4", "read_4_ratio", "ratio"),
    ),
    _table(
        "Loading replicas",
        "replicas",
        ("from the disk", "disk_s", "both"),
        ("bytes read ÷ unique", "read_ratio", "ratio"),
        ("from the page cache", "cache_s", "both"),
        ("from a storage of 0.4 GB/s", "slow_s", "both"),
    ),
    _table(
        "A save of every step",
        "every",
        ("time, of that without saves", "block_s", of("none", "block_s")),
        ("held by the call", "call_s", "most"),
        ("held at the optimizer", "waited_s", "most"),
        ("loop thread, of the time", "loop_s", share_of("block_s")),
        ("a block of steps", "block_s", "both"),
    ),
    _table(
        "Beside forward and backward",
        "beside",
        ("time lost: median (quartiles)", "lost_s", "quartiles"),
        ("of the raw writer's (90 %)", "lost_s", compared("raw writer", "lost_s")),
        ("step p50, of quiet", "slowed_ratio", "ratio"),
        ("p99", "beside_p99_s", "median"),
        ("durable after", "durable_s", "median"),
    ),
    _table(
        "The call of a lazy save",
        "calls",
        ("first call", "first_call_s", "median"),
        ("call: median (least, p95)", "call_s", "tail"),
        ("within it: the walk", "walk_s", "median"),
        ("loop thread", "loop_s", "median"),
    ),
    _table(
        "Seeing changes",
        "watching",
        ("call, not watched", "call_s", "both"),
        ("call, watched", "call_watched_s", "both"),
        ("within it: the note", "note_s", "both"),
        ("at the next hook", "hook_s", "both"),
        ("again, from the caches", "hook_again_s", "both"),
    ),
    _table(
        "Watching a run",
        "observing",
        ("call: added (quartiles)", "call_added_s", "quartiles"),
        ("processors: added (quartiles)", "cpu_added_s", "quartiles"),
        ("durable after", "durable_s", "median"),
        ("of that", "added_fraction", "percent"),
        ("page built", "build_s", "median"),
        ("page", "page_bytes", "bytes"),
        ("drawn", "drawn_s", "median"),
        ("of a core", "core_fraction", "percent"),
        ("pictures apart", "apart_s", "median"),
    ),
    _table(
        "Memory of hosts",
        "peers",
        ("held", "held_s", "both"),
        ("in memory", "in_memory_s", "both"),
        ("replicated", "replicated_s", "both"),
    ),
    _table(
        "Restarts",
        "recovery",
        ("start to first step", "start_s", "median"),
        ("last progress to first new step", "restarted_s", "both"),
        ("beyond a start", "beyond_s", "both"),
        ("noticed, beyond 10 steps", "beyond_steps_s", "both"),
        ("steps lost", "lost_count", "count"),
        ("ETTR", "ettr_fraction", "percent"),
    ),
    _table(
        "Effective time",
        "effective_time",
        ("launch to end", "wall_s", "median"),
        ("steps trained again", "lost_count", "count"),
        ("ETTR", "ettr_fraction", "percent"),
    ),
    _table(
        "Publishing",
        "publishing",
        ("published in", "publish_s", "both"),
        ("applied in", "apply_s", "both"),
        ("of the weights", "delta_fraction", "percent"),
        ("peak, publisher", "publish_peak_bytes", "bytes"),
        ("peak, receiver", "apply_peak_bytes", "bytes"),
    ),
    _table(
        "Publishing by several ranks",
        "publishing_ranks",
        ("a full version", "full_s", "both"),
        ("a delta", "delta_s", "both"),
    ),
    _table(
        "Memory of a publication",
        "publishing_peaks",
        ("publisher, full", "publish_full_bytes", "bytes"),
        ("publisher, delta", "publish_delta_bytes", "bytes"),
        ("receiver, full", "apply_full_bytes", "bytes"),
        ("receiver, delta", "apply_delta_bytes", "bytes"),
    ),
    _table(
        "Bytes of a published step",
        "deltas",
        ("elements that change", "changed_fraction", "percent"),
        ("of the weights", "delta_fraction", "percent"),
        ("with headers", "delta_bytes", "bytes"),
        ("beside by hand", "by_hand_ratio", "ratio"),
    ),
    _table(
        "Publishing beside a training",
        "publishing_steps",
        ("a block of steps", "block_s", "both"),
        ("published meanwhile", "published_count", "count"),
        ("lost for each", "lost_s", "quartiles"),
    ),
    _table(
        "Copies to farther tiers",
        "promotion",
        ("mean step slowed: median (all)", "slowed_fraction", "signed"),
        ("median step", "busy_p50_s", of_own("quiet_p50_s")),
        ("at", "copied_bytes", by("copy_s", 1e6, "{:.0f} MB/s")),
        ("own CPU s/GiB", "own_cpu_s", per("copied_bytes", 1 << 30, "{:.2f}")),
        ("the store's", "server_cpu_s", per("copied_bytes", 1 << 30, "{:.2f}")),
        ("p99, quiet", "quiet_p99_s", "median"),
        ("p99, beside", "busy_p99_s", "median"),
    ),
    _clients("clients", "a server that drains"),
    _clients("clients-tls", "the same over TLS"),
    _clients("clients-seaweed", "SeaweedFS"),
    _clients("clients-hdfs", "HDFS"),
    _table(
        "Streaming to S3",
        "streaming",
        ("state", "state_bytes", "bytes"),
        ("pool", "pool_bytes", "bytes"),
        ("memory beyond the state, save", "save_peak_bytes", "bytes"),
        ("load", "load_peak_bytes", "bytes"),
        ("first bytes in the store after", "first_part_s", "median"),
        ("training held", "snapshot_s", "median"),
        ("committed after", "committed_s", "median"),
        ("loaded, verified", "load_s", "median"),
        ("files written here", "files_written_count", "count"),
    ),
    _table(
        "Peak of memory",
        "peaks",
        ("state", "state_bytes", "bytes"),
        ("beyond it", "beyond_bytes", "bytes"),
        ("peak ÷ state", "peak_ratio", "ratio"),
        ("`estimate` said", "said_ratio", "ratio"),
        ("said ÷ measured", "said_of_peak_ratio", "ratio"),
    ),
    _table(
        "A device",
        "device",
        ("one pinned copy", "pinned_copy_s", "both"),
        ("eager pause", "eager_pause_s", "both"),
        ("eager pause ÷ pinned copy", "eager_of_pinned_ratio", "ratio"),
        ("lazy call", "lazy_call_s", "both"),
        ("lazy: lost beside one copy", "lost_s", "both"),
        ("lazy: steps slowed by", "slowed_fraction", "signed"),
        ("device call", "device_call_s", "both"),
        ("device: until its copy is made", "device_copy_s", "both"),
    ),
    _table(
        "Planning for many ranks",
        "planning",
        ("pieces", "pieces_count", "count"),
        ("who writes what", "plan_s", "median"),
        ("one rank's plan", "rank_plan_s", "median"),
        ("known plan", "known_plan_s", within(0.010)),
        ("receipt", "receipt_bytes", "bytes"),
        ("merge", "merge_s", within(10.0)),
        ("manifest", "manifest_bytes", "bytes"),
        ("encode", "encode_s", "median"),
        ("decode, check", "decode_s", "median"),
        ("load plan of a rank", "load_plan_s", within(1.0)),
    ),
    _table(
        "Replicas that are compared",
        "comparing",
        ("pause, 2 ranks", "pause_2_s", "both"),
        ("read for it", "read_2_s", "both"),
        ("pause, 8 ranks", "pause_8_s", "both"),
        ("read for it", "read_8_s", "both"),
        ("receipt, simulated", "receipt_bytes", "bytes"),
        ("merge", "merge_s", "median"),
    ),
    _table(
        "From the last vote to the commit",
        "gathering",
        ("last vote to commit", "commit_s", "median"),
        ("reads of the busiest", "read_count", "count"),
        ("bytes", "read_bytes", "bytes"),
        ("its store calls", "store_count", "count"),
        ("of all", "store_of_all_count", "count"),
    ),
    _table(
        "Planning the first save together",
        "exchanges",
        ("first save planned", "plan_s", "median"),
        ("store calls of the busiest", "store_count", "count"),
        ("of all", "store_of_all_count", "count"),
    ),
    _table(
        "When to save",
        "cadence",
        ("cadence: goodput", "cadence_goodput_fraction", "percent"),
        ("every … steps", "cadence_interval_steps", "count"),
        ("blocked", "cadence_blocked_fraction", "percent"),
        ("best fixed interval", "best_goodput_fraction", "percent"),
        ("every … steps", "best_interval_steps", "count"),
        ("the cadence loses", "regret_fraction", "percent"),
        *((f"every {steps}", f"every_{steps}_goodput_fraction", "percent") for steps in (1, 100, 1000)),
        ("one call of `due`", "due_s", "median"),
    ),
)
