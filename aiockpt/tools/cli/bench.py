"""The command `aiockpt bench`, a stress test of a place: progress, tables, and cleaning of the place.

The measurements are in `aiockpt.tools.stress`. Control-C and SIGTERM end the measuring, not the cleaning; a second one ends
both.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import typer
from rich.markup import escape

from aiockpt.errors import UsageError
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend, local_path
from aiockpt.storage.open import open_backend
from aiockpt.tools.cli import show
from aiockpt.tools.cli.survey import check_folder
from aiockpt.tools.stress.lab import size_text
from aiockpt.tools.stress.measure import measure
from aiockpt.tools.stress.picture import check_picture, draw
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Point, Soak, StressReport

FAILED = 1
_BY_BYTES = ("write", "read")
_BESIDE = ("create", "finish", "open")


class Outputs(msgspec.Struct, frozen=True):
    """Destinations of the report: a file, a picture's file, JSON instead of tables; *everything*: show every point."""

    report_to: Path | None = None
    plot_to: Path | None = None
    as_json: bool = False
    everything: bool = False


def run_bench(url: str, plan: StressPlan, outputs: Outputs) -> int:
    """Measure the place *url*, report to *outputs*, and return the exit status."""
    if outputs.plot_to is not None:
        check_picture(outputs.plot_to)
    if outputs.report_to is not None:
        _check_report(outputs.report_to)
    backend = open_backend(url)
    if (path := local_path(backend.url)) is not None:
        check_folder(path, "name one on the file system to be measured", may_be_made=True)
    report = anyio.run(_measure, backend, plan)
    if outputs.plot_to is not None:
        draw(report, outputs.plot_to)
    if outputs.report_to is not None:
        outputs.report_to.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    show.json_or(outputs.as_json, report, lambda: show_report(report, outputs.everything))
    return FAILED if report.problems else 0


def _check_report(path: Path) -> None:
    """Raise UsageError unless a file can be written there: before minutes of measuring, not after them."""
    if path.is_dir():
        raise UsageError(f"--report {path}: a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"--report {path}: there is no folder {path.parent}")


async def _measure(backend: Backend, plan: StressPlan) -> StressReport:
    caught: list[int] = []
    report: StressReport | None = None
    try:
        with show.parts_progress(plan.point_count) as watch:
            async with open_tasks() as tasks:
                tasks.start_soon(_cancel_on_signal, tasks.cancel_scope, caught)
                report = await measure(backend, plan, watch=watch, say=_say)
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()
    if report is None or caught:
        show.problem("stopped before all was measured")
        raise typer.Exit(128 + (caught or [signal.SIGINT])[0])
    return report


async def _cancel_on_signal(scope: anyio.CancelScope, caught: list[int]) -> None:
    """Cancel *scope* at the first signal; the next one finds the interpreter's own handler."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            caught.append(number)
            scope.cancel()
            return


def _say(text: str) -> None:
    show.err.print(f"[dim]{escape(text)}[/]", soft_wrap=True)


def show_report(report: StressReport, everything: bool) -> None:
    """Print the report."""
    durable = "durable" if report.durable else "not durable"
    show.title(
        report.url, f"{report.scope}, {durable}; throughput by number of concurrent requests, latency where it was best"
    )
    concurrencies = sorted({point.concurrency for point in report.points})
    files = [point for point in report.points if point.operation in _BY_BYTES]
    small = [point for point in report.points if point.operation not in (*_BY_BYTES, *_BESIDE)]
    for heading, points, rate in (
        ("data files, MiB/s", files, lambda point: point.mib_per_s),
        ("small objects, requests/s", small, lambda point: point.requests_per_s),
    ):
        if points:
            _show_sweep(heading, points, concurrencies, rate)
    if everything:
        _show_points(report.points)
    _show_findings(report)


def _show_sweep(
    heading: str, points: Sequence[Point], concurrencies: Sequence[int], rate: Callable[[Point], float | None]
) -> None:
    """Print a row for each operation and size: its rates, and the latencies at its best rate."""
    rows = []
    for operation, size in dict.fromkeys((point.operation, point.size_bytes) for point in points):
        row = {p.concurrency: p for p in points if (p.operation, p.size_bytes) == (operation, size)}
        best = max(row.values(), key=lambda point: rate(point) or 0)
        rates = [_rate(rate(row[one]), row[one] is best) if one in row else "–" for one in concurrencies]
        latencies = [_number(value) for value in (best.p50_ms, best.p95_ms, best.p99_ms)]
        cpu = _number(best.cpu_s_per_gib) if operation in _BY_BYTES else ""
        rows.append([operation, size_text(size), *rates, *latencies, cpu, _errors(list(row.values()))])
    at = [f"× {one}" for one in concurrencies]
    show.print_wide(
        [[heading, "size"], at, ["p50 ms", "p95 ms", "p99 ms", "CPU s/GiB", "errors"]], rows, folds="errors"
    )


def _rate(value: float | None, best: bool) -> str:
    text = "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    return f"[bold green]{text}[/]" if best else text


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _errors(points: Sequence[Point]) -> str:
    """Return the errors at any of *points*, by class."""
    found: dict[str, int] = {}
    for point in points:
        for name, number in (*point.errors.items(), ("retries", point.retries), ("wrong bytes", point.wrong)):
            found[name] = found.get(name, 0) + number
    return ", ".join(f"[{'yellow' if name == 'retries' else 'red'}]{n} {name}[/]" for name, n in found.items() if n)


def _show_points(points: Sequence[Point]) -> None:
    rows = [
        [
            *(point.operation, size_text(point.size_bytes), str(point.concurrency), str(point.requests)),
            *map(_number, (point.mib_per_s, point.requests_per_s)),
            *map(_number, (point.p50_ms, point.p95_ms, point.p99_ms, point.max_ms, point.cpu_s_per_gib)),
            _errors([point]),
        ]
        for point in points
    ]
    names, latencies = ["every point", "size", "at once"], ["p50 ms", "p95 ms", "p99 ms", "max ms"]
    groups = [names, ["requests", "MiB/s", "requests/s"], [*latencies, "CPU s/GiB", "errors"]]
    show.print_wide(groups, rows, folds="errors")


def _show_findings(report: StressReport) -> None:
    """Print floors, checks, the soak, skipped measurements and problems."""
    show.out.print()
    for floor in report.floors:
        show.say(f"[dim]floor: {escape(floor.name)} {show.speed(floor.bytes_per_s)}[/]")
    for check in report.checks:
        show.say(f"{show.mark(check.passed)} {escape(check.name)} [dim]({escape(check.detail)})[/]")
    if report.soak is not None:
        _show_soak(report.soak)
    for skipped in report.skipped:
        show.say(f"[yellow]– {escape(skipped.what)}: not measured.[/] {escape(skipped.why)}")
    for problem in report.problems:
        show.say(f"{show.mark(False)} {escape(problem)}")


def _show_soak(found: Soak) -> None:
    files, objects = show.count(found.files, "file"), show.count(found.objects, "object")
    show.say(
        f"{show.mark(not (found.wrong or found.errors))} soak of {found.wall_s:.0f} s: {files}, {objects},"
        f" {show.size(found.bytes_written)} written, {show.size(found.bytes_read)} read and compared,"
        f" {len(found.wrong)} wrong"
    )
    show.say(
        f"  {sum(found.injected.values())} faults injected ({found.fraction:.0%} of the calls, seed {found.seed}):"
        f" {found.retried} calls retried, {found.recovered} of them recovered,"
        f" {show.count(found.reread, 'damaged read')} repeated, {sum(found.errors.values())} calls failed"
    )
    if found.injected:
        show.say(f"  [dim]{', '.join(f'{number} × {what}' for what, number in found.injected.items())}[/]")
