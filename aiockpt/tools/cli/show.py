"""Output of results: one console for each stream, tables whose numbers are never cut, progress bars, JSON for programs.

A bar is drawn on a terminal, and nothing in a pipe.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import zip_longest
from typing import Literal, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from aiockpt.redaction import redact
from aiockpt.units import count, size, speed

__all__ = [
    "ago", "bytes_progress", "columns", "count", "err", "fitting", "freed", "gone", "json_or", "line", "mark", "moment",
    "named", "natural_order", "out", "pace", "parts_progress", "print_table", "problem", "say", "shape_text",
    "size", "span", "speed", "title",
]  # fmt: skip

T = TypeVar("T")
TABLE_LINES = 2
"""Lines around the rows of a live table: the column names, and the number of rows that are not shown."""
MOST_ROWS = 20
"""Limit of rows of a live table: drawing dominates the cost of a poll, and what matters most comes first."""
PIPE_COLUMNS = 160
"""Width without a terminal and COLUMNS: rows are never folded or cut, so that grep and awk read whole ones."""

BROKEN_PIPE = 128 + 13
"""Exit status that a shell reports for a process that SIGPIPE ended."""


class _PoliteConsole(Console):
    """Ends like other tools when `head` closes the pipe: status 1 would mean a damaged checkpoint."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE) from None


def _open_console(stderr: bool) -> Console:
    console = _PoliteConsole(stderr=stderr, highlight=False)
    if not _has_width(console):
        console.width = PIPE_COLUMNS
    elif not console.width:  # COLUMNS=0 at a terminal
        console.width = shutil.get_terminal_size().columns
    return console


def _has_width(console: Console) -> bool:
    """Return whether lines have a limited width: of a terminal, or from COLUMNS, where 0 means that it is not known."""
    columns = os.environ.get("COLUMNS", "")
    return console.is_terminal or (columns.isdigit() and int(columns) > 0)


out = _open_console(stderr=False)
err = _open_console(stderr=True)


def json_or(as_json: bool, value: object, people: Callable[[], None]) -> None:
    """Print *value* as JSON, or call *people* to print it as text."""
    if as_json:
        # Not through the console, which takes brackets for markup and wraps lines.
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    else:
        people()


def say(text: str) -> None:
    """Print a line with markup, without credentials; a terminal that is too narrow breaks it between words."""
    out.print(redact(text), soft_wrap=not _has_width(out))


def title(root: str, rest: str) -> None:
    """Print the title of an output: *root*, then *rest*."""
    say(f"[bold]{escape(root)}[/]   [dim]{escape(rest)}[/]")


def problem(message: str) -> None:
    """Print an error."""
    err.print(f"[bold red]error:[/] {escape(redact(message))}", soft_wrap=not _has_width(err))


def gone(step: int) -> None:
    """Print, on standard error, that a step was deleted after it was listed: by a running job, most likely."""
    err.print(f"[yellow]–[/] step {step}: deleted meanwhile")


def columns(*headings: str, right: tuple[str, ...] = (), folds: str) -> Table:
    """Return an empty table without lines.

    Args:
        right: headings of numbers.
        folds: the column that wraps where the terminal is too narrow; the others are never cut.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(escape(heading), justify=justify, no_wrap=heading != folds, overflow="fold")
    return table


def fitting(rows: Sequence[T], height: int) -> Sequence[T]:
    """Return the first *rows*, which fit as a table into *height* lines."""
    return rows[: max(1, min(MOST_ROWS, height - TABLE_LINES))]


def line(markup: str) -> Text:
    """Return one line, cut at the width of the terminal: further lines would push a table off the screen."""
    text = Text.from_markup(markup)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def span(seconds: float) -> str:
    """Return a time as operators read it: 4 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


Row = Sequence[str | Text]


def print_table(
    headings: Sequence[str], rows: Iterable[Row], *, right: tuple[str, ...] = (), folds: str, gap: bool = True
) -> None:
    """Print a table made by `columns`, with *gap* after an empty line; nothing without rows.

    Headings that are all blank are not shown. Where a terminal is narrower than the columns that do not wrap, it breaks the
    lines: a number without its unit, or half of one, would be another number.
    """
    rows = list(rows)
    table = columns(*headings, right=right, folds=folds)
    widths = [max(map(_cell_width, column)) for column in zip_longest(headings, *rows, fillvalue="")]
    if folds in headings:
        at = headings.index(folds)
        widths[at] = table.columns[at].min_width = min(widths[at], FOLDED_WIDTH)
    needed = sum(widths) + GAP * len(widths)
    table.show_header = any(heading.strip() for heading in headings)
    for row in rows:
        table.add_row(*row)
    if not table.row_count:
        return
    width = out.width
    out.width = max(needed, width)  # rich fits no table into more than its console has
    try:
        out.print(*[""] * gap, table, sep="\n")
    finally:
        out.width = width


def mark(passed: bool) -> str:
    """Return the sign in front of a result."""
    return "[green]✓[/]" if passed else "[red]✗[/]"


def pace(bytes_moved: int, seconds: float) -> str:
    """Return a duration and its speed in words."""
    return f"{seconds:.2f} s ({speed(bytes_moved / max(seconds, 1e-9))})"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as ``40×30``."""
    return "×".join(map(str, shape)) or "scalar"


def freed(size_bytes: int, deleted: bool) -> str:
    """Return the bytes that a deletion freed, or a dry run would free, in words."""
    return (
        f"freed {size(size_bytes)}"
        if deleted
        else f"[dim]dry run: nothing was changed; add --yes to free {size(size_bytes)}[/]"
    )


def named(step: int, step_id: str) -> str:
    """Return ``step 7``; the name of its folder where its number is not known, since nothing of it can be read."""
    return f"step {step}" if step >= 0 else escape(step_id)


def moment(time_ns: int) -> str:
    """Return a point in time in the local time zone."""
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S") if time_ns else "–"


def ago(time_ns: int) -> str:
    """Return how long ago a point in time was, in one unit."""
    seconds = max(0.0, time.time() - time_ns / 1e9)
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length_s:
            return f"{count(int(seconds // length_s), unit)} ago"
    return f"{count(int(seconds), 'second')} ago"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return the sort key of natural order: layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


GAP = 2
FOLDED_WIDTH = 16
"""Width reserved for the column that may wrap, where it would be wider."""


def _cell_width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else Text.from_markup(cell).cell_len


class SpeedColumn(ProgressColumn):
    """The speed so far, in the units of the other outputs; rich's own column uses powers of ten."""

    def render(self, task: Task) -> Text:
        """Return the speed of *task*; empty while it is unknown."""
        bytes_per_s = task.finished_speed or task.speed
        return Text("" if bytes_per_s is None else speed(bytes_per_s), style="progress.data.speed")


@contextmanager
def bytes_progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar for *total* bytes on standard error during the block; call the yielded function with each advance."""
    bars = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*bars, console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def parts_progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show the current one of *total* parts on standard error; call the yielded function with the name of each part."""
    bars = (TextColumn("{task.description:<28}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def begin(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, completed=begun)
            begun += 1

        yield begin
