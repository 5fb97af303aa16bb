"""How do results look? One console for each stream, tables whose numbers are never cut, and JSON for programs."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiockpt.redaction import redact
from aiockpt.units import size, speed

__all__ = [
    "ago", "columns", "count", "err", "json_or", "moment", "natural_order", "out", "problem", "say", "size", "speed",
    "title",
]  # fmt: skip

PIPE_COLUMNS = 160
"""Width where there is no terminal and no COLUMNS: nothing is folded or cut, so that grep and awk see whole rows."""

BROKEN_PIPE = 128 + 13
"""What a shell reports for a process that SIGPIPE ended."""


class _PoliteConsole(Console):
    """Ends as other tools do when `head` has seen enough: 1 would say that a checkpoint is damaged."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE) from None


def _open_console(stderr: bool) -> Console:
    console = _PoliteConsole(stderr=stderr, highlight=False)
    if not _has_width(console):
        console.width = PIPE_COLUMNS
    return console


def _has_width(console: Console) -> bool:
    """Return whether lines end somewhere: at the edge of a terminal, or where COLUMNS says."""
    return console.is_terminal or os.environ.get("COLUMNS", "").isdigit()


out = _open_console(stderr=False)
err = _open_console(stderr=True)


def json_or(as_json: bool, value: object, people: Callable[[], None]) -> None:
    """Print *value* as JSON, or let *people* print it."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    else:
        people()


def say(text: str) -> None:
    """Print a line with markup, without credentials; a terminal that is too narrow breaks it between words."""
    out.print(redact(text), soft_wrap=not _has_width(out))


def title(root: str, rest: str) -> None:
    """Print what is shown, and where it is."""
    say(f"[bold]{escape(root)}[/]   [dim]{escape(rest)}[/]")


def problem(message: str) -> None:
    """Print what went wrong."""
    err.print(f"[bold red]error:[/] {escape(redact(message))}", soft_wrap=not _has_width(err))


def columns(*headings: str, right: tuple[str, ...] = (), folds: str) -> Table:
    """Return an empty table without lines.

    Args:
        right: headings of numbers.
        folds: the column that is broken where the terminal is too narrow; the others are never cut.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != folds, overflow="fold")
    return table


def count(number: int, noun: str) -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def moment(time_ns: int) -> str:
    """Return a point in time as the wall clock here shows it."""
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S") if time_ns else "–"


def ago(time_ns: int) -> str:
    """Return how long ago a point in time was, in one unit."""
    seconds = max(0.0, time.time() - time_ns / 1e9)
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length_s:
            return f"{count(int(seconds // length_s), unit)} ago"
    return f"{count(int(seconds), 'second')} ago"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return the sort key by which people order names: layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
