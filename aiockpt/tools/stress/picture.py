"""Plot of a report: throughput and p99 over concurrency, a line for each operation, in one picture.

matplotlib is imported when a picture is drawn (extra ``[plot]``); no window is opened, no global state changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from aiockpt.errors import UsageError
from aiockpt.tools.stress.lab import size_text
from aiockpt.tools.stress.report import Point, StressReport

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {
    "write": "#0072b2",
    "read": "#d55e00",
    "put": "#0072b2",
    "get": "#d55e00",
    "put_new": "#cc79a7",
    "stat": "#009e73",
    "list": "#b38600",
    "delete": "#666666",
}
"""Okabe and Ito's colours, which colour-blind people can distinguish, with a darker yellow and a lighter black."""
_MARKERS = "osD^v"
_INK, _FAINT = "#222222", "#8a8a8a"
_TITLE_CHARACTERS = 90
_DATA_FILES = ("write", "read")
_SIZED = ("write", "read", "put", "get")
_SMALL = ("put", "get", "put_new", "stat", "list", "delete")


class _Panel(NamedTuple):
    title: str
    unit: str
    operations: tuple[str, ...]
    value: Callable[[Point], float | None]
    from_zero: bool = False


_PANELS = (
    _Panel("Data files: throughput", "MiB/s", _DATA_FILES, lambda point: point.mib_per_s, from_zero=True),
    _Panel("Small objects: requests", "requests/s", _SMALL, lambda point: point.requests_per_s or None),
    _Panel("Data files: p99 of one block", "ms", _DATA_FILES, lambda point: point.p99_ms),
    _Panel("Small objects: p99 of one request", "ms", _SMALL, lambda point: point.p99_ms),
)


def check_picture(path: Path) -> None:
    """Check that a picture can be written to *path*, before the measurements.

    Raises:
        UsageError: the suffix is not known, the folder is not there, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: name a file that ends with {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib: {error}; pip install matplotlib") from error


def draw(report: StressReport, path: Path) -> None:
    """Draw *report* into the file *path*, whose suffix names the format. Blocking; a second or two."""
    figure = import_module("matplotlib.figure").Figure(figsize=(13, 8.6), dpi=130, facecolor="white")
    figure.text(0.055, 0.955, _short(report.url), fontsize=17, fontweight="bold", color=_INK)
    figure.text(0.055, 0.925, _subtitle(report), fontsize=10.5, color=_FAINT)
    grid = figure.add_gridspec(2, 2, left=0.055, right=0.915, bottom=0.065, top=0.845, wspace=0.42, hspace=0.3)
    for place, panel in zip(grid, _PANELS, strict=True):
        _draw_panel(figure.add_subplot(place), panel, report.points)
    figure.savefig(path)


def _short(url: str) -> str:
    return (
        url if len(url) <= _TITLE_CHARACTERS else f"{url[: _TITLE_CHARACTERS // 2]} … {url[-_TITLE_CHARACTERS // 2 :]}"
    )


def _subtitle(report: StressReport) -> str:
    floors = [floor for floor in report.floors if "checksum" not in floor.name]
    said = [f"{floor.name.partition(' (')[0]} {floor.bytes_per_s / 2**20:,.0f} MiB/s" for floor in floors]
    said = ["over the requests under way at once", *said]
    if report.problems:
        said.append(f"{len(report.problems)} PROBLEMS")
    return "   ·   ".join(said)


def _draw_panel(axes: Any, panel: _Panel, points: Sequence[Point]) -> None:
    mine = [point for point in points if point.operation in panel.operations and panel.value(point)]
    _dress(axes, panel, sorted({point.concurrency for point in mine}))
    if not mine:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_FAINT)
        return
    for operation in panel.operations:
        sizes = sorted({point.size_bytes for point in mine if point.operation == operation})
        for index, size in enumerate(sizes):
            line = [point for point in mine if (point.operation, point.size_bytes) == (operation, size)]
            axes.plot(
                [point.concurrency for point in line],
                [panel.value(point) for point in line],
                label=operation + (f" {size_text(size)}" if operation in _SIZED else ""),
                color=_COLOURS[operation],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5.5,
                markeredgecolor="white",
                markeredgewidth=0.8,
                linewidth=2,
                linestyle="-" if index == 0 else (0, (5, 1.2 + index)),
                clip_on=False,
                zorder=3,
            )
    axes.margins(x=0.03, y=0.08)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9.5, labelcolor="linecolor")


def _dress(axes: Any, panel: _Panel, concurrencies: Sequence[int]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=12.5, color=_INK, pad=18)
    axes.text(0, 1.02, panel.unit, transform=axes.transAxes, fontsize=9.5, color=_FAINT)
    axes.set_xscale("log", base=2)
    if not panel.from_zero:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(base=10, subs=(1, 2, 5)))
    axes.set_xticks(concurrencies, [str(one) for one in concurrencies])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.tick_params(length=0, labelsize=9.5, colors=_FAINT, pad=6)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
