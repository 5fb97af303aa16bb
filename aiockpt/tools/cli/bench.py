"""The command `aiockpt bench`, a stress test of a place: progress, tables, and cleaning of the place.

The measurements are in `aiockpt.tools.stress`. Control-C and SIGTERM end the measuring, not the cleaning; a second one ends
both.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import anyio
import typer
from rich.markup import escape

from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend, local_path
from aiockpt.storage.open import open_backend
from aiockpt.tools.cli import show
from aiockpt.tools.cli.survey import check_folder
from aiockpt.tools.stress.measure import measure
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Point, Soak, StressReport

FAILED = 1
_BY_BYTES = ("write", "read")


def run_bench(url: str, plan: StressPlan, as_json: bool) -> int:
    """Measure the place *url*, print the report, and return the exit status."""
    backend = open_backend(url)
    if (path := local_path(backend.url)) is not None:
        check_folder(path, "name one on the file system to be measured", may_be_made=True)
    report = anyio.run(_measure, backend, plan)
    show.json_or(as_json, report, lambda: show_report(report))
    return FAILED if report.problems else 0


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


def show_report(report: StressReport) -> None:
    """Print the report: the rates of each operation by concurrency, then checks, the soak and problems."""
    durable = "durable" if report.durable else "not durable"
    show.title(
        report.url, f"{report.scope}, {durable}; throughput by number of concurrent requests, latency where it was best"
    )
    files = [point for point in report.points if point.operation in _BY_BYTES]
    calls = [point for point in report.points if point.operation not in _BY_BYTES]
    _show_sweep("data files, MiB/s", files, lambda point: point.mib_per_s)
    _show_sweep("small objects, requests/s", calls, lambda point: point.requests_per_s)
    show.out.print()
    for check in report.checks:
        show.say(f"{show.mark(check.passed)} {escape(check.name)} [dim]({escape(check.detail)})[/]")
    if report.soak is not None:
        _show_soak(report.soak)
    for skipped in report.skipped:
        show.say(f"[yellow]– {escape(skipped.what)}: not measured.[/] {escape(skipped.why)}")
    for problem in report.problems:
        show.say(f"{show.mark(False)} {escape(problem)}")


def _show_sweep(heading: str, points: Sequence[Point], rate: Callable[[Point], float | None]) -> None:
    """Print the rates of each operation and size, then the latencies at its best rate."""
    rates, latencies, concurrencies = [], [], sorted({point.concurrency for point in points})
    for operation, size in dict.fromkeys((point.operation, point.size_bytes) for point in points):
        row = {p.concurrency: p for p in points if (p.operation, p.size_bytes) == (operation, size)}
        best, name = max(row.values(), key=lambda point: rate(point) or 0), f"{operation} {show.size(size)}"
        rates.append([name, *(_number(rate(row[count])) if count in row else "–" for count in concurrencies)])
        figures = (best.p50_ms, best.p95_ms, best.p99_ms, best.cpu_s_per_gib)
        latencies.append([name, *map(_number, figures), _errors(row.values())])
    at = tuple(f"× {count}" for count in concurrencies)
    show.print_table((heading, *at), rates, right=at, folds="")
    headings = ("p50 ms", "p95 ms", "p99 ms", "CPU s/GiB")
    show.print_table(("at the best", *headings, "errors"), latencies, right=headings, folds="errors")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _errors(points: Iterable[Point]) -> str:
    """Return the errors at any of *points*, by class."""
    counts: Counter[str] = Counter()
    for point in points:
        counts.update(point.errors)
        counts.update({"retries": point.retries, "wrong bytes": point.wrong})
    return ", ".join(f"[{'yellow' if name == 'retries' else 'red'}]{n} {name}[/]" for name, n in counts.items() if n)


def _show_soak(soak: Soak) -> None:
    files, objects = show.count(soak.files, "file"), show.count(soak.objects, "object")
    show.say(
        f"{show.mark(not (soak.wrong or soak.errors))} soak of {soak.wall_s:.0f} s: {files}, {objects},"
        f" {show.size(soak.bytes_written)} written, {show.size(soak.bytes_read)} read and compared,"
        f" {len(soak.wrong)} wrong"
    )
    show.say(
        f"  {sum(soak.injected.values())} faults injected ({soak.fraction:.0%} of the calls, seed {soak.seed}):"
        f" {soak.retried} calls retried, {soak.recovered} of them recovered,"
        f" {show.count(soak.reread, 'damaged read')} repeated, {sum(soak.errors.values())} calls failed"
    )
    if soak.injected:
        show.say(f"  [dim]{', '.join(f'{number} × {what}' for what, number in soak.injected.items())}[/]")
