"""Display of a proof, during and after its run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.markup import escape
from rich.status import Status

from aiockpt.prove.certificate import cut
from aiockpt.prove.compare import RESUME, TRAINING
from aiockpt.tools.cli.show import count, err, out, print_table, say, title

if TYPE_CHECKING:
    from aiockpt.prove.certificate import Certificate, RowResult, StartResult
    from aiockpt.prove.starts import Start

_LABEL = re.compile(rb'"label":(\d+)')
_TAIL_BYTES = 1 << 16
_STYLES = {"equal": "green", "close": "green", "differs": "bold red"}
_SIGNS = {"certified": "[bold green]✓", "differs": "[bold red]✗", "proves nothing": "[bold yellow]?"}


class ProofDisplay:
    """Shows the current start on standard error: a changing line on a terminal, else one line for each start."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = shlex.join(command)
        self._status = Status("", console=err)
        self._folder: Path | None = None
        self._at: int | None = None

    def __enter__(self) -> Self:
        err.print(f"[bold]aiockpt prove[/]   [dim]{escape(self._command)}[/]")
        if err.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def tick(self, name: str, seconds: float, folder: Path) -> None:
        """Show the progress of a start."""
        if not err.is_terminal:
            return
        if folder != self._folder:
            self._folder, self._at = folder, None
        step = _newest_step(folder)
        self._at = self._at if step is None else step
        where = "" if self._at is None else f" · step {self._at}"
        self._status.update(f"{name}{where} [dim]· {seconds:.0f} s[/]")

    def show_start(self, start: Start) -> None:
        came = f"from step {start.loaded}" if start.loaded is not None else "from the beginning"
        ended = "killed" if start.died is not None else "to its end"
        err.print(f"  {start.name:<11} {came}, {ended} [dim]· {start.seconds:.1f} s[/]")


def _newest_step(folder: Path) -> int | None:
    """Return the step that a start has reached, by the last lines of its output."""
    for path in sorted(folder.glob("rank*.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            found = _LABEL.findall(file.read())
        return int(found[-1]) if found else None
    return None


def show_certificate(found: Certificate) -> None:
    """Print the starts, the table and the verdict."""
    title(shlex.join(found.command), found.method)
    _show_starts(found.starts)
    _show_rows([row for row in found.rows if not row.row.startswith(TRAINING)], "the state, at each save and load")
    _show_rows([row for row in found.rows if row.row.startswith(TRAINING)], "the training, at each optimizer step")
    out.print()
    say(f"{_SIGNS[found.verdict]} {escape(found.verdict)}[/]: {escape(found.reason)}")
    _show_difference(found)
    fresh = sum(row.outcome == "as when fresh" for row in found.rows)
    if fresh and found.certified:
        say(
            f"[dim]{count(fresh, 'row')} {'is' if fresh == 1 else 'are'} the same in a fresh start: a load that forgot "
            f"{'it' if fresh == 1 else 'them'} would not be noticed.[/]"
        )


def _show_starts(starts: Sequence[StartResult]) -> None:
    rows = [
        (
            start.name,
            str(start.world_size),
            "–" if start.resumed_from is None else f"step {start.resumed_from}",
            str(start.steps),
            str(start.saves),
            f"{start.seconds:.1f}",
            escape(start.killed or ""),
        )
        for start in starts
    ]
    headings = ("start", "ranks", "from", "steps", "saves", "seconds", "killed")
    print_table(headings, rows, right=("ranks", "steps", "saves", "seconds"), folds="killed")


def _show_rows(found: Sequence[RowResult], heading: str) -> None:
    rows = []
    for row in found:
        if row.row == RESUME and row.outcome == "equal":
            continue
        style = _STYLES.get(row.outcome, "dim")
        control = "" if row.control is None or style == "dim" else "differs" if row.control else "[dim]the same[/]"
        name = escape(row.row.removeprefix(TRAINING))
        rows.append((name, f"{row.compared:,}", f"[{style}]{row.outcome}[/]", control))
    print_table((heading, "compared", "resumed", "without the load"), rows, right=("compared",), folds=heading)


def _show_difference(found: Certificate) -> None:
    first = found.first
    if first is None:
        return
    other = "resumed run" if found.verdict == "differs" else "run again"
    rank = f", rank {first.rank}" if first.rank else ""
    rows = [
        ("first", escape(f"{first.row.removeprefix(TRAINING)}: {first.what}")),
        ("where", escape(f"{first.at} ({first.start}{rank})")),
        ("straight run", escape(cut(first.expected))),
        (other, escape(cut(first.found))),
    ]
    if first.note:
        rows.append(("", escape(first.note)))
    if found.verdict == "differs" and first.row != "resume":
        rows += [("differ, too", escape(_join(found.also))), ("still equal", escape(_join(found.same)))]
    print_table(("", " "), rows, folds=" ", gap=False)
    if found.verdict == "differs":
        say(f"[dim]--seed {found.seed} kills at the same places again; --dir FOLDER keeps logs and records.[/]")


def _join(rows: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(row.removeprefix(TRAINING) for row in rows)) or "nothing"
