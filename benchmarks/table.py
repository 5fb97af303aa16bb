"""Rendering of reports as Markdown: printed, or written into the README between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import report as reports
from benchmarks import targets
from benchmarks.columns import TABLES, Cell, Table, both, size
from benchmarks.report import Report
from benchmarks.scenarios import MAIN

MARKED = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
"""Markers in the README, with the files whose tables stand between them."""


def render(report: Report) -> str:
    """Return *report* as Markdown: the machine, one table for each group of questions, the floors, the targets."""
    parts = [f"### {size(report.state_bytes)}"] if _is_main(report) else []
    parts.append(_conditions(report))
    for table in TABLES:
        parts += _table(report, table)
    parts += _floors(report)
    parts += _targets(report)
    parts += ["\n".join(f"- {note}" for note in notes) for notes in report.notes.values()]
    parts += [f"Not measured: {name} ({reason})." for name, reason in report.unavailable.items()]
    parts += [f"FAILED: {failure}." for failure in report.failures]
    return "\n\n".join(parts) + "\n"


def _is_main(report: Report) -> bool:
    return any(name in MAIN for name in report.results)


def _conditions(report: Report) -> str:
    often = f"{report.rounds} rounds × {report.repetitions} repetitions; median · minimum (speed of the median)."
    seen = report.machine
    if seen is None:
        return f"Simulated. {often}"
    direct = "O_DIRECT" if seen.direct_io else "no O_DIRECT"
    return (
        f"{seen.date}: {seen.cpu}, {seen.cores} cores, {size(seen.memory_bytes)} of memory, Linux {seen.kernel}, "
        f"{seen.filesystem} ({direct}), Python {seen.python}, torch {seen.torch}. {often}"
    )


def _table(report: Report, table: Table) -> list[str]:
    """Return one table; an empty list when none of it was measured."""
    names = dict.fromkeys(row for column in table.columns for row in report.results.get(column.scenario, {}))
    rows = []
    for name in names:
        cells = []
        for _, scenario, metric, show in table.columns:
            found = report.results.get(scenario, {}).get(name, {}).get(metric)
            cells.append(show(Cell(report, report.results[scenario], name, found)) if found else "")
        if any(cells):
            rows.append([name, *(cell or "–" for cell in cells)])
    if not rows:
        return []
    return [f"**{table.title}**", _markdown([table.title.lower(), *(column.heading for column in table.columns)], rows)]


def _floors(report: Report) -> list[str]:
    """Return the table of the floors that are no contenders."""
    shown = {column.metric for table in TABLES for column in table.columns}
    rows = [
        [
            name.removeprefix("floor: "),
            metric.removesuffix("_s").replace("_", " "),
            both(Cell(report, per, name, found)),
        ]
        for per in report.results.values()
        for name, metrics in per.items()
        if name.startswith("floor") and not shown & set(metrics)
        for metric, found in metrics.items()
    ]
    return ["**Floors of the same run**", _markdown(["floor", "how", "figure"], rows)] if rows else []


def _targets(report: Report) -> list[str]:
    rows = []
    for target in targets.MAIN if _is_main(report) else targets.OTHERS:
        ratios = target.ratios(report)
        if ratios is not None:
            shown = f"{target.shown(ratios[0])} (minima: {target.shown(ratios[1])})"
            rows.append([target.question, target.text, shown, target.verdict(ratios[0])])
        elif _is_main(report):
            rows.append([target.question, target.text, "not measured", "–"])
    return ["**Targets**", _markdown(["question", "target", "measured, medians", "verdict"], rows)] if rows else []


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def marked(text: str, results: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each marked part of *text*, and the tables of its files, the largest state last."""
    for match in MARKED.finditer(text):
        files = sorted(results.glob(match[2]))
        if not files:
            raise ValueError(f"no file is {results / match[2]}")
        found = sorted(map(reports.read, files), key=lambda report: report.state_bytes)
        yield match, f"{match[1]}\n" + "\n".join(render(report) for report in found) + f"\n{match[3]}"


def write(readme: Path, results: Path) -> None:
    """Put the tables of *results* between the markers of *readme*.

    Raises:
        ValueError: there are no markers, or a marker names no file.
    """
    text = readme.read_text()
    found = list(marked(text, results))
    if not found:
        raise ValueError(f"{readme.name} has no markers such as <!-- results/*.json -->, <!-- end of results -->")
    for match, tables in reversed(found):
        text = text[: match.start()] + tables + text[match.end() :]
    readme.write_text(text)
