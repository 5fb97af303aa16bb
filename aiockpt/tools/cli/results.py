"""Output of `verify`, `cp`, `diff`, `prune`, `rm` and `commit`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.text import Text

from aiockpt.errors import UsageError
from aiockpt.format.names import list_names
from aiockpt.tools.cli.listing import show_unfinished
from aiockpt.tools.cli.show import (
    Row,
    count,
    err,
    freed,
    mark,
    named,
    natural_order,
    pace,
    print_table,
    say,
    size,
    title,
)

if TYPE_CHECKING:
    from aiockpt.engine.maintenance import Copied, Pruned
    from aiockpt.pipeline.collect import Removal
    from aiockpt.pipeline.step_info import StepInfo
    from aiockpt.tools.cli.diff import LeafChange
    from aiockpt.tools.cli.survey import UnfinishedSave

CHANGES_SHOWN = 60
KEPT_SHOWN = 20


class Check(msgspec.Struct, frozen=True):
    """The outcome of verifying one step; *generation*, *bytes* and *seconds* are 0 for a damaged step.

    *left_out* is the number of names excluded when it was saved, *repaired* the number of rewritten files, *id* its folder.
    """

    step: int
    valid: bool
    generation: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None
    left_out: int = 0
    repaired: int = 0
    id: str = ""


def note_left_out(number: int, step: int) -> None:
    """Print how many names were excluded when a step was saved; nothing for none."""
    if number:
        were = "was" if number == 1 else "were"
        say(f"[dim]  {count(number, 'name')} of step {step} {were} left out when saved: see `aiockpt inspect`[/]")


def show_check(result: Check) -> None:
    """Print the result of a verification."""
    if not result.valid:
        say(f"[red]✗ {named(result.step, result.id)}:[/] {escape(result.problem or '')}")
        return
    say(f"{mark(True)} step {result.step}: intact, {size(result.bytes)} in {pace(result.bytes, result.seconds)}")
    note_left_out(result.left_out, result.step)
    if result.repaired:
        say(f"[yellow]  was damaged: {count(result.repaired, 'file')} rewritten[/]")


def show_copied(copied: Copied, left_out: int) -> None:
    """Print one line about a copied step, and the number of names excluded from it."""
    where = escape(copied.url)
    if copied.existed:
        say(f"[dim]– step {copied.step}: already in {where}[/]")
        return
    took = pace(copied.bytes, copied.seconds)
    say(f"[green]✓ step {copied.step}:[/] copied to {where}, {size(copied.bytes)} in {took}, verified")
    note_left_out(left_out, copied.step)


def show_changes(root: str, one: int, two: int, found: Sequence[LeafChange], everything: bool) -> None:
    """Print which tensors and values differ between two steps: tensors, then values."""
    differing = [change for change in found if change.differs]
    unknown = [change.name for change in found if change.kind == "not compared"]
    leaves = count(len(found) - len(unknown), "leaf").replace("leafs", "leaves")
    title(f"{root} step {one} → {two}", f"{len(differing)} of {leaves} differ")
    if not differing:
        say("[green]equal, bit for bit[/]")
    tensors = [change for change in differing if change.what == "tensor"]
    tensors.sort(key=lambda change: natural_order(change.name))
    values = [change for change in differing if change.what == "value"]
    most = None if everything else CHANGES_SHOWN
    _show_tensors(tensors[:most])
    print_table(("value", ""), [(escape(value.name), Text(_value_text(value))) for value in values[:most]], folds="")
    if most is not None and max(len(tensors), len(values)) > most:
        say(f"[dim]the first {most} of {len(tensors)} tensors and {len(values)} values: --all shows everything[/]")
    if unknown:
        names = ", ".join(unknown) if everything else list_names(unknown)
        say(f"[yellow]not compared: {escape(names)}: left out when both were saved[/]")


def _show_tensors(found: Sequence[LeafChange]) -> None:
    numbers = ("changed", "max Δ", "mean Δ", "rel Δ")
    notes = [""] if any(change.difference is None or change.difference.not_finite for change in found) else []
    rows: list[Row] = []
    for change in found:
        by = change.difference
        if by is None:
            rows.append((escape(change.name), change.kind, "", "", "", change.detail))
            continue
        measured = [f"{by.changed / by.elements:.1%}", *map(_number, (by.largest, by.mean, by.relative))]
        note = [Text(f"{by.not_finite} NaN or infinite", "red")] if by.not_finite else []
        rows.append((escape(change.name), *measured, *note))
    print_table(("tensor", *numbers, *notes), rows, right=numbers, folds="tensor")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _value_text(change: LeafChange) -> str:
    return change.detail if change.kind == "changed" else f"{change.kind}: {change.detail}"


def show_pruned(
    root: str, found: Pruned, sizes: Mapping[str, int], left: Sequence[UnfinishedSave], deleted: bool, *, ruled: bool
) -> None:
    """Print the steps that retention removed, or would remove, and why the rest is kept.

    Args:
        sizes: bytes by folder, of steps and of attempts.
        left: the attempts without a manifest that stay, for the time being.
        ruled: whether the call has a rule by which steps are deleted.
    """

    def did(past: str, verb: str) -> str:
        return f"[red]{past}[/]" if deleted else f"[yellow]would {verb}[/]"

    rows: list[Row] = []
    gone_bytes = 0

    def add(what: str, name: str, size_bytes: int | None, why: str, *, counts: bool = True) -> None:
        nonlocal gone_bytes
        gone_bytes += size_bytes or 0 if counts else 0
        rows.append((what, name, "" if size_bytes is None else size(size_bytes), why))

    for step in found.kept[:KEPT_SHOWN]:
        add("[green]kept[/]", named(step.step, step.id), sizes.get(step.id, 0), step.reason, counts=False)
    for doomed in found.steps:
        add(did("deleted", "delete"), f"step {doomed.step}", sizes.get(doomed.id, 0), doomed.reason)
    for garbage in found.garbage:
        folder = f"{garbage.step_id}/a-{garbage.attempt}"
        why = "never committed" if garbage.generation is None else f"generation {garbage.generation} is replaced"
        add(did("deleted", "delete"), folder, sizes.get(folder, 0), why)
    for thin in found.thinned:
        add(did("thinned", "thin"), f"step {thin.step}", thin.bytes, "keeps only its weights")
    for key in found.uploads:
        add(did("aborted", "abort"), key, None, "unfinished upload")
    for step_id, reason in found.left:
        add("skipped", step_id, sizes.get(step_id, 0), reason, counts=False)
    print_table(("", "what", "size", "why"), rows, right=("size",), folds="why", gap=False)
    _sum_up(found, gone_bytes, deleted, ruled)
    show_unfinished(root, left)


def _sum_up(found: Pruned, gone_bytes: int, deleted: bool, ruled: bool) -> None:
    steps = [str(step.step) if step.step >= 0 else escape(step.id) for step in found.kept]
    shown = ", ".join(steps[:8]) + (", …" if len(steps) > 8 else "")
    more = len(steps) - KEPT_SHOWN
    hidden = f" [dim]· {more} of them not shown above: --json lists all[/]" if more > 0 else ""
    say(f"kept: {count(len(steps), 'step')}{f' ({shown})' if steps else ''}{hidden}")
    if found.note is not None:
        say(f"[yellow]![/] {escape(found.note)}")
    changes = found.steps or found.garbage or found.uploads or found.thinned
    say(freed(gone_bytes, deleted) if changes else "nothing to delete")
    if steps and not ruled:
        say("[dim]no rule given, so every step is kept: --last N keeps the newest N; see aiockpt prune --help[/]")


def ask_removal(found: Removal, everything: bool) -> bool:
    """Print what would be removed, and return whether the operator confirms it.

    Raises:
        UsageError: standard input is not a terminal, so a prompt is impossible.
    """
    if not found.steps and not found.marks and not found.uploads:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"rm asks before it removes {_removed(found)}, and standard input is no terminal: give --yes")
    if found.newest and not everything:
        say("[yellow]![/] this is the newest step: a resumed run will start from the one before")
    err.print(f"remove {escape(_removed(found))}? \\[y/N] ", end="")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("nothing was removed")
    return False


def show_removed(found: Removal) -> None:
    """Print the removed objects and the kept ones."""
    if found.steps or found.marks or found.uploads:
        say(f"removed {escape(_removed(found))}")
    else:
        say(f"{escape(found.url)} holds no checkpoints: nothing was removed")
    if found.others:
        say(f"[dim]kept, as no part of a step: {escape(list_names(found.others))}[/]")


def _removed(found: Removal) -> str:
    steps = found.steps[0] if len(found.steps) == 1 else count(len(found.steps), "step")
    uploads = f" and {count(len(found.uploads), 'unfinished upload')}" if found.uploads else ""
    return f"{steps} ({size(found.bytes)}){uploads} of {found.url}"


def show_finished(root: str, found: Sequence[StepInfo], left: Sequence[UnfinishedSave]) -> None:
    """Print the commits that were finished, and those that could not be."""
    for info in found:
        ranks = f" from the receipts of {info.world_size} ranks" if info.world_size > 1 else ""
        say(f"[green]✓ step {info.step}:[/] committed as generation {info.generation}{ranks}")
    show_unfinished(root, left)
    if not found:
        say("nothing to commit: no save lacks only its manifest")
