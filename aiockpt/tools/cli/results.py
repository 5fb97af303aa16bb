"""Output of `verify`, `cp`, `diff`, `prune`, `commit` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.text import Text

from aiockpt.errors import UsageError
from aiockpt.format.names import list_names
from aiockpt.tools.cli.doctor import COMMIT_FLUSHES
from aiockpt.tools.cli.listing import UNFINISHED, tell_unfinished
from aiockpt.tools.cli.show import columns, count, err, natural_order, out, say, size, speed, title

if TYPE_CHECKING:
    from aiockpt.engine.maintenance import Copied, Pruned
    from aiockpt.pipeline.collect import Removal
    from aiockpt.pipeline.discover import StepInfo
    from aiockpt.tools.cli.diff import LeafChange
    from aiockpt.tools.cli.doctor import Diagnosis
    from aiockpt.tools.cli.survey import UnfinishedSave

CHANGES_SHOWN = 60
KEPT_SHOWN = 20


class Check(msgspec.Struct, frozen=True):
    """The outcome of verifying one step; *generation*, *bytes* and *seconds* are 0 for one that is damaged.

    *left_out* is the number of names that were chosen not to be saved, *repaired* that of files that were written anew.
    """

    step: int
    valid: bool
    generation: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None
    left_out: int = 0
    repaired: int = 0


def note_left_out(number: int, of_what: str) -> None:
    """Print that something is not all there by choice; nothing where it is."""
    if number:
        say(
            f"[dim]  {count(number, 'name')} of {of_what} were left out when it was saved: `aiockpt inspect` lists them[/]"
        )


def show_check(result: Check) -> None:
    """Print what a verification found."""
    if result.valid:
        rate = f", {speed(result.bytes / result.seconds)}" if result.seconds else ""
        say(
            f"[green]✓[/] step {result.step}: {size(result.bytes)} are as they were saved ({result.seconds:.2f} s{rate})"
        )
        note_left_out(result.left_out, f"step {result.step}")
        if result.repaired:
            say(f"[yellow]  damaged, and written anew: {count(result.repaired, 'file')}[/]")
    else:
        say(f"[red]✗ step {result.step}:[/] {escape(result.problem or '')}")


def show_copied(copied: Copied, left_out: int) -> None:
    """Print one line about a step that is in another place now, and how many names it was saved without."""
    where = escape(copied.url)
    if copied.existed:
        say(f"[dim]– step {copied.step}: in {where} already[/]")
        return
    took = f"{copied.seconds:.2f} s ({speed(copied.bytes / max(copied.seconds, 1e-9))})"
    say(f"[green]✓ step {copied.step}:[/] in {where}, {size(copied.bytes)} in {took}, verified")
    note_left_out(left_out, f"step {copied.step}")


def show_changes(root: str, one: int, two: int, found: Sequence[LeafChange], everything: bool) -> None:
    """Print which tensors and values differ between two steps: tensors, then values."""
    differing = [change for change in found if change.kind != "same"]
    title(
        f"{root} step {one} → {two}",
        f"{len(differing)} of {count(len(found), 'leaf').replace('leafs', 'leaves')} differ",
    )
    if not differing:
        say("[green]equal, bit for bit[/]")
        return
    tensors = [change for change in differing if change.what == "tensor"]
    tensors.sort(key=lambda change: natural_order(change.name))
    values = [change for change in differing if change.what == "value"]
    if tensors:
        _show_tensors(tensors if everything else tensors[:CHANGES_SHOWN])
    if values:
        _show_values(values if everything else values[:CHANGES_SHOWN])
    if not everything and max(len(tensors), len(values)) > CHANGES_SHOWN:
        say(
            f"[dim]the first {CHANGES_SHOWN} of {len(tensors)} tensors and {len(values)} values: --all shows everything[/]"
        )


def _show_tensors(found: Sequence[LeafChange]) -> None:
    numbers = ("changed", "max Δ", "mean Δ", "rel Δ")
    notes = [""] if any(change.difference is None or change.difference.not_finite for change in found) else []
    table = columns("tensor", *numbers, *notes, right=numbers, folds="tensor")
    for change in found:
        by = change.difference
        if by is None:
            table.add_row(escape(change.name), change.kind, "", "", "", change.detail)
            continue
        measured = [f"{by.changed / by.elements:.1%}", *map(_number, (by.largest, by.mean, by.relative))]
        note = [Text(f"{by.not_finite} NaN or infinite", "red")] if by.not_finite else []
        table.add_row(escape(change.name), *measured, *note)
    out.print()
    out.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _show_values(found: Sequence[LeafChange]) -> None:
    table = columns("value", "", folds="")
    for change in found:
        kind = "" if change.kind == "changed" else f"{change.kind}: "
        table.add_row(escape(change.name), Text(kind + change.detail))
    out.print()
    out.print(table)


def show_pruned(found: Pruned, sizes: Mapping[str, int], deleted: bool, *, ruled: bool) -> None:
    """Print what retention removed, or would remove, and why the rest stays.

    Args:
        sizes: bytes by folder, of steps and of attempts.
        ruled: whether the call has a rule by which steps are deleted.
    """
    table = columns("", "what", "size", "why", right=("size",), folds="why")
    mark = "[red]deleted[/]" if deleted else "[yellow]would delete[/]"
    stays = "[green]kept[/]" if deleted else "[green]stays[/]"
    gone = []
    for step in found.kept[:KEPT_SHOWN]:
        table.add_row(stays, f"step {step.step}", size(sizes.get(step.id, 0)), step.reason)
    for doomed in found.steps:
        gone.append(sizes.get(doomed.id, 0))
        table.add_row(mark, f"step {doomed.step}", size(gone[-1]), doomed.reason)
    for garbage in found.garbage:
        folder = f"{garbage.step_id}/a-{garbage.attempt}"
        why = "nobody committed it" if garbage.generation is None else f"generation {garbage.generation} is replaced"
        gone.append(sizes.get(folder, 0))
        table.add_row(mark, folder, size(gone[-1]), why)
    for thin in found.thinned:
        gone.append(thin.bytes)
        thinned = "[red]thinned[/]" if deleted else "[yellow]would thin[/]"
        table.add_row(thinned, f"step {thin.step}", size(thin.bytes), "keeps its weights alone")
    for key in found.uploads:
        aborted = "[red]aborted[/]" if deleted else "[yellow]would abort[/]"
        table.add_row(aborted, key, "", "an upload that nobody finished")
    for step_id, reason in found.left:
        table.add_row("left", step_id, size(sizes.get(step_id, 0)), reason)
    if table.row_count:
        out.print(table)
    _sum_up(found, sum(gone), deleted, ruled)


def _sum_up(found: Pruned, gone_bytes: int, deleted: bool, ruled: bool) -> None:
    steps = [step.step for step in found.kept]
    shown = ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
    more = len(steps) - KEPT_SHOWN
    hidden = f" [dim]· {more} of them not shown above: --json lists all[/]" if more > 0 else ""
    say(f"{'kept' if deleted else 'stays'}: {count(len(steps), 'step')}{f' ({shown})' if steps else ''}{hidden}")
    if found.note is not None:
        say(f"[yellow]![/] {escape(found.note)}")
    if not (found.steps or found.garbage or found.uploads or found.thinned):
        say("nothing to delete")
    elif deleted:
        say(f"freed {size(gone_bytes)}")
    else:
        say(f"[dim]a dry run: nothing was touched. Add --yes to free {size(gone_bytes)}[/]")
    if steps and not ruled:
        say(
            "[dim]no rule was given, so every step stays: --last N keeps the newest N (more rules: aiockpt prune --help)[/]"
        )


def ask_removal(found: Removal, everything: bool) -> bool:
    """Print what would be removed, and return whether the operator confirms it.

    Raises:
        UsageError: standard input is not a terminal, so there is no answer to expect.
    """
    if not found.steps and not found.marks and not found.uploads:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"rm asks before it removes {_removed(found)}: nobody can answer here, so give --yes")
    if found.newest and not everything:
        say("[yellow]![/] it is the newest step: a run that is resumed goes back to the one before")
    err.print(f"remove {escape(_removed(found))}? \\[y/N] ", end="")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("nothing was removed")
    return False


def show_removed(found: Removal) -> None:
    """Print what was removed, and what was not."""
    if found.steps or found.marks or found.uploads:
        say(f"removed {escape(_removed(found))}")
    else:
        say(f"{escape(found.url)} holds nothing of ours: nothing was removed")
    if found.others:
        say(f"[dim]left, as it is not ours: {escape(list_names(found.others))}[/]")


def _removed(found: Removal) -> str:
    steps = found.steps[0] if len(found.steps) == 1 else count(len(found.steps), "step")
    uploads = f" and {count(len(found.uploads), 'unfinished upload')}" if found.uploads else ""
    return f"{steps} ({size(found.bytes)}){uploads} of {found.url}"


def show_finished(root: str, found: Sequence[StepInfo], left: Sequence[UnfinishedSave]) -> None:
    """Print which commits were finished, and what could not be."""
    for one in found:
        ranks = f" from the receipts of {one.world_size} ranks" if one.world_size > 1 else ""
        say(f"[green]✓ step {one.step}:[/] committed as generation {one.generation}{ranks}")
    for attempt in left:
        say(f"[yellow]{UNFINISHED} step {attempt.step}:[/] {tell_unfinished(root, attempt)}")
    if not found:
        say("nothing to finish: no save was written completely and lacks only its manifest")


def show_diagnosis(found: Diagnosis) -> None:
    """Print what a place can do."""
    commit_ms = COMMIT_FLUSHES * max(found.file_flush_ms, found.folder_flush_ms)
    cached = "" if found.direct else "through the page cache"
    free = f"{size(found.free_bytes)} of {size(found.total_bytes)}"
    rows = [
        ("free", free, f"{found.free_bytes / found.total_bytes:.0%}" if found.total_bytes else ""),
        ("O_DIRECT", _yes(found.direct), "data move past the page cache" if found.direct else ""),
        ("hard links", _yes(found.link), "commits are exclusive" if found.link else ""),
        ("exclusive create", _yes(found.exclusive_create), ""),
        ("flush of a file", f"{found.file_flush_ms:.2f} ms", f"the slowest flush took {found.slowest_flush_ms:.2f} ms"),
        ("flush of a folder", f"{found.folder_flush_ms:.2f} ms", f"so a commit costs about {commit_ms:.0f} ms"),
        ("write", speed(found.write_bytes_per_s), cached),
        ("read", speed(found.read_bytes_per_s), cached),
    ]
    title(found.root, found.file_system)
    table = columns("", " ", "  ", folds="  ")
    table.show_header = False
    for name, value, note in rows:
        table.add_row(name, value, f"[dim]{note}[/]")
    out.print(table)
    for line in found.warnings:
        say(f"[yellow]![/] {escape(line)}")
    for line in found.problems:
        say(f"[red]✗[/] {escape(line)}")
    if not found.problems:
        safe = "safe for checkpoints" if found.survives_reboot else "safe for checkpoints while the machine is up"
        say(f"[green]✓[/] {safe}: of rival commits exactly one wins, and what is flushed is seen by all")


def _yes(works: bool) -> str:
    return "[green]yes[/]" if works else "[red]no[/]"
