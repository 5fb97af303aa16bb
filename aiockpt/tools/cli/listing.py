"""Output of `aiockpt ls`: a row a step, the newest first, with the lines that say what descends from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from aiockpt.pipeline.discover import StepInfo
from aiockpt.tools.cli.descent import ABANDONED, CURRENT, draw_lines, find_current, find_predecessors
from aiockpt.tools.cli.show import ago, columns, count, moment, out, say, size, title
from aiockpt.tools.cli.survey import Survey, UnfinishedSave

if TYPE_CHECKING:
    from aiockpt.tools.cli.dead_runs import RunBelow

METRICS_SHOWN = 3
UNFINISHED = "◐"
_MEANINGS = {
    CURRENT: "the newest step and its ancestors",
    ABANDONED: "another branch",
    UNFINISHED: "not committed",
}


def show_survey(root: str, found: Survey, instead: Sequence[str] = ()) -> None:
    """Print the steps below *root*, then what is wrong or unfinished there.

    Args:
        instead: what may have been meant, where it has none.
    """
    marks = {UNFINISHED} if found.unfinished else set()
    if found.steps:
        marks |= _show_steps(root, found.steps)
    else:
        say(f"{escape(root)} holds no checkpoint yet.")
        for hint in instead:
            say(f"{escape(hint)}.")
    for step in found.steps:
        if step.problem:
            say(f"[red]✗ step {step.step}:[/] {escape(step.problem)}")
        elif step.newest_generation != step.generation:
            say(
                f"[red]✗ step {step.step}:[/] generation {step.newest_generation} is damaged; "
                f"readers take generation {step.generation}"
            )
    for attempt in found.unfinished:
        say(f"[yellow]{UNFINISHED} step {attempt.step}:[/] {tell_unfinished(root, attempt)}")
    if marks - {CURRENT}:
        say(f"[dim]{' · '.join(f'{mark} {meaning}' for mark, meaning in _MEANINGS.items() if mark in marks)}[/]")


def _show_steps(root: str, steps: Sequence[StepInfo]) -> set[str]:
    """Print a row for each step and return the marks that occur."""
    predecessors = find_predecessors(steps)
    current = find_current(steps, predecessors)
    lines = draw_lines(steps, predecessors, current)
    metrics = list(dict.fromkeys(name for step in steps for name in step.metrics))
    shown = metrics[:METRICS_SHOWN]
    more = [f"{name} (--json)" for name in metrics[METRICS_SHOWN:]]

    tips = len(steps) - len(set(predecessors.values()) - {None})
    facts = [count(len(steps), "step"), size(sum(step.bytes for step in steps))]
    if tips > 1:
        facts.append(f"{tips} branches")
    if steps[0].created_ns:
        facts.append(f"newest {ago(steps[0].created_ns)}")
    if steps[0].forked_from:
        facts.append(steps[0].tell_origin())
    title(root, " · ".join(facts))

    table = columns("", "step", "saved", "size", *shown, "state", right=("step", "size", *shown), folds="state")
    for step, line in zip(steps, lines, strict=True):
        values = [_metric(step.metrics, name) for name in shown]
        label = Text(str(step.step), "bold" if step.id in current else "")
        state = _state(step, lost_its_parent=predecessors[step.id] is None and step is not steps[-1])
        table.add_row(
            Text(line, "green" if step.id in current else "dim"),
            label,
            moment(step.created_ns),
            size(step.bytes) if step.bytes else "–",
            *values,
            state,
        )
    out.print(table)
    if more:
        say(f"[dim]more metrics: {escape(', '.join(more))}[/]")
    return {CURRENT if step.id in current else ABANDONED for step in steps}


def _metric(metrics: Mapping[str, float | None], name: str) -> str:
    if name not in metrics:
        return ""
    value = metrics[name]
    return "nan" if value is None else f"{value:.5g}"


def _state(step: StepInfo, *, lost_its_parent: bool) -> Text:
    if step.problem:
        state = Text("damaged", "bold red")
    elif step.verified:
        state = Text("verified", "green")
    else:
        state = Text("committed")
    if step.weights_only:
        state.append(", weights only", "dim")
    if step.finite is False:
        state.append(", not finite", "bold red")
    if step.newest_generation > 1:
        state.append(f", generation {step.generation}", "dim")
    if step.parent is not None and lost_its_parent:
        state.append(f", went on from {step.parent}, deleted or saved anew since", "dim")
    return state


def show_dead_runs(folder: str, runs: Sequence[RunBelow], unread: Mapping[str, str], deleted: bool) -> None:
    """Print a row for each run below *folder*, what cannot be read, and what was freed or would be."""
    numbers = ("steps", "size", "freed" if deleted else "frees")
    table = columns("run", numbers[0], numbers[1], "last written", numbers[2], "", right=numbers, folds="")
    for run in runs:
        kept = f"keeps {count(len(run.kept), 'step')}" if run.kept else "no step stays"
        state = f"[dim]stays: {escape(run.stays)}[/]" if run.stays else kept
        state = f"[red]{escape(run.problem)}[/]" if run.problem else state
        written = ago(run.changed_ns) if run.changed_ns else "–"
        freed = "" if run.stays else size(run.freed_bytes)
        table.add_row(escape(run.run), str(run.steps), size(run.bytes), written, freed, state)
    if runs:
        out.print(table)
    for place, reason in unread.items():
        say(f"[red]✗ {escape(place)}:[/] {escape(reason)}")
    freed_bytes = sum(run.freed_bytes for run in runs)
    if not freed_bytes:
        say(f"{escape(folder)}: nothing to delete of {count(len(runs), 'run')}")
    elif deleted:
        say(f"freed {size(freed_bytes)}")
    else:
        say(f"[dim]a dry run: nothing was touched. Add --yes to free {size(freed_bytes)}[/]")


def tell_unfinished(root: str, attempt: UnfinishedSave) -> str:
    """Return what an attempt without a manifest is, and what to do about it; with markup."""
    what = f"an attempt without a manifest (a-{attempt.attempt}, {size(attempt.bytes)}"
    what += f", last written {ago(attempt.changed_ns)})" if attempt.changed_ns else ")"
    if attempt.can_be_committed:
        return f"{what}: all of it was written; finish it with [bold]aiockpt commit {escape(root)}[/]"
    if attempt.missing_ranks:
        ranks = ", ".join(map(str, attempt.missing_ranks[:10])) + (", …" if len(attempt.missing_ranks) > 10 else "")
        return f"{what}: no receipt of rank {ranks}; it is running, or died. `aiockpt prune` removes it after a day"
    if attempt.missing_ranks is None:  # nothing says how many ranks there are: of one, or of many
        written = "nothing of it was written completely"
        return f"{what}: {written}; it is running, or died. `aiockpt prune` removes it after a day"
    if attempt.manifest_is_damaged:
        advice = f"move the damaged one away, and [bold]aiockpt commit {escape(root)}[/] writes it anew"
        return f"{what} that can be read: all of it was written; {advice}"
    return f"{what}: another attempt was committed in its place; `aiockpt prune` removes it after a day"
