"""How does a reader see it? Reports as Markdown, written into the README between two markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.report import Metric, Report
from benchmarks.targets import TARGETS

BEGIN = "<!-- results: written by `python -m benchmarks table` -->"
END = "<!-- end of results -->"

Show = Callable[[Metric], str]


def _seconds(metric: Metric) -> str:
    speed = f" ({metric.bytes_per_s / 1e9:.2f} GB/s)" if metric.bytes_per_s else ""
    return f"{_duration(metric.median)} · {_duration(metric.min)}{speed}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(metric: Metric) -> str:
    return _size(metric.median)


def _size(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


COLUMNS: dict[str, tuple[tuple[str, str, str, Show], ...]] = {
    "Saving": (
        ("save", "pause_first_s", "pause, first save", _seconds),
        ("warmed", "pause_warmed_s", "pause, first after `warm_up`", _seconds),
        ("save", "pause_s", "pause, later", _seconds),
        ("save", "durable_first_s", "to durable, first", _seconds),
        ("save", "durable_s", "to durable, later", _seconds),
    ),
    "Loading into the job's tensors": (
        ("load", "cold_s", "cold", _seconds),
        ("load", "warm_s", "warm", _seconds),
    ),
    "Training while saving": (
        ("train", "lost_s", "time lost per save", _seconds),
        ("train", "quiet_p50_s", "step p50, quiet", _seconds),
        ("train", "saving_p50_s", "p50, saving", _seconds),
        ("train", "quiet_p99_s", "p99, quiet", _seconds),
        ("train", "saving_p99_s", "p99, saving", _seconds),
    ),
    "Memory": (
        ("memory", "beyond_bytes", "peak beyond the state", _bytes),
        ("memory", "budget_bytes", "stated budget", _bytes),
    ),
}


def render(report: Report) -> str:
    """Return *report* as Markdown: the machine, one table for each group of questions, the floors, the targets."""
    parts = [f"### {_size(report.state_bytes)}", _machine(report)]
    for title, columns in COLUMNS.items():
        parts += _group(report, title, columns)
    parts += _floors(report)
    parts += ["**Targets**", _targets(report)]
    parts += [f"Not measured: {name} ({reason})." for name, reason in report.unavailable.items()]
    parts += [f"FAILED: {failure}." for failure in report.failures]
    return "\n\n".join(parts) + "\n"


def _machine(report: Report) -> str:
    seen = report.machine
    direct = "O_DIRECT" if seen.direct_io else "no O_DIRECT"
    return (
        f"{seen.date}: {seen.cpu}, {seen.cores} cores, {_size(seen.memory_bytes)} of memory, Linux {seen.kernel}, "
        f"{seen.filesystem} ({direct}), Python {seen.python}, torch {seen.torch}. {report.rounds} rounds × "
        f"{report.repetitions} repetitions; median · minimum (speed of the median)."
    )


def _group(report: Report, title: str, columns: Sequence[tuple[str, str, str, Show]]) -> list[str]:
    """Return the table of one group, or nothing when none of it was measured."""
    names = dict.fromkeys(name for scenario, *_ in columns for name in report.results.get(scenario, {}))
    rows = []
    for name in names:
        cells = [_cell(report, name, scenario, metric, show) for scenario, metric, _, show in columns]
        if any(cells):
            rows.append([name, *(cell or "–" for cell in cells)])
    if not rows:
        return []
    return [f"**{title}**", _markdown([title.lower(), *(heading for _, _, heading, _ in columns)], rows)]


def _cell(report: Report, name: str, scenario: str, metric: str, show: Show) -> str:
    found = report.results.get(scenario, {}).get(name, {}).get(metric)
    return show(found) if found else ""


def _floors(report: Report) -> list[str]:
    """Return the table of the floors that are no contenders."""
    shown = {metric for columns in COLUMNS.values() for _, metric, _, _ in columns}
    rows = [
        [name.removeprefix("floor: "), metric.removesuffix("_s").replace("_", " "), _seconds(found)]
        for per in report.results.values()
        for name, metrics in per.items()
        if name.startswith("floor") and not shown & set(metrics)
        for metric, found in metrics.items()
    ]
    return ["**Floors of the same run**", _markdown(["floor", "how", "figure"], rows)] if rows else []


def _targets(report: Report) -> str:
    rows = []
    for target in TARGETS:
        ratios = target.ratios(report)
        if ratios is None:
            rows.append([target.question, target.text, "not measured", "–"])
        else:
            verdict = "met" if target.met(ratios[0]) else "**missed**"
            rows.append([target.question, target.text, f"{ratios[0]:.2f} × (minima: {ratios[1]:.2f} ×)", verdict])
    return _markdown(["question", "target", "measured, medians", "verdict"], rows)


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(reports: Sequence[Report], readme: Path) -> None:
    """Put the tables of *reports* between the markers of *readme*, largest state last.

    Raises:
        ValueError: the markers are not there, once and in order.
    """
    text = readme.read_text()
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{readme.name} lacks the lines {BEGIN!r} and {END!r}")
    tables = "\n".join(render(report) for report in sorted(reports, key=lambda report: report.state_bytes))
    readme.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}")
