"""Output of `aiockpt ls`: a row for each step, newest first, with the lines that show its branches."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.markup import escape
from rich.text import Text

from aiockpt.format.names import parse_step
from aiockpt.pipeline.step_info import StepInfo
from aiockpt.tools.cli.show import Row, ago, count, moment, named, print_table, say, size, title
from aiockpt.tools.cli.survey import Survey, UnfinishedSave

METRICS_SHOWN = 3
CURRENT, ABANDONED, UNFINISHED = "●", "○", "◐"
_MEANINGS = {
    CURRENT: "the newest step and its ancestors",
    ABANDONED: "another branch",
    UNFINISHED: "not committed",
}


def show_survey(root: str, found: Survey, instead: Sequence[str] = ()) -> None:
    """Print the steps below *root*, then damaged and unfinished ones.

    Args:
        instead: likely alternatives, where *root* has no steps.
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
            say(f"[red]✗ {named(step.step, step.id)}:[/] {escape(step.problem)}")
        elif step.newest_generation != step.generation:
            say(
                f"[red]✗ step {step.step}:[/] generation {step.newest_generation} is damaged; "
                f"readers take generation {step.generation}"
            )
    show_unfinished(root, found.unfinished)
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
        facts.append(steps[0].describe_origin())
    title(root, " · ".join(facts))

    rows: list[Row] = [
        (
            Text(line, "green" if step.id in current else "dim"),
            Text(str(step.step) if step.step >= 0 else step.id, "bold" if step.id in current else ""),
            moment(step.created_ns),
            size(step.bytes) if step.bytes else "–",
            *(_metric(step.metrics, name) for name in shown),
            _state(step, lost_its_parent=predecessors[step.id] is None and step is not steps[-1]),
        )
        for step, line in zip(steps, lines, strict=True)
    ]
    headings = ("", "step", "saved", "size", *shown, "state")
    print_table(headings, rows, right=("step", "size", *shown), folds="state", gap=False)
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


def show_unfinished(root: str, attempts: Sequence[UnfinishedSave]) -> None:
    """Print the state of each attempt without a manifest, with advice."""
    for attempt in attempts:
        say(f"[yellow]{UNFINISHED} {named(attempt.step, attempt.id)}:[/] {_describe_unfinished(root, attempt)}")
    removable = [one for one in attempts if not (one.can_be_committed or one.manifest_is_damaged)]
    held_bytes = sum(attempt.bytes for attempt in removable)
    if held_bytes:
        now = f"[bold]aiockpt prune {escape(shlex.quote(root))} --grace-hours 0 --yes[/]"
        say(f"[dim]they hold {size(held_bytes)}; if no job writes here, this removes them now:[/] {now}")


def _describe_unfinished(root: str, attempt: UnfinishedSave) -> str:
    what = f"an attempt without a manifest (a-{attempt.attempt}, {size(attempt.bytes)}"
    what += f", last written {ago(attempt.changed_ns)})" if attempt.changed_ns else ")"
    removed = "`aiockpt prune` removes it after a day"
    if attempt.manifest_is_damaged:  # which may have named it
        removed = "`aiockpt prune` keeps it, for a manifest beside it cannot be read"
    if attempt.can_be_committed:
        return f"{what}: it was written completely; finish it with [bold]aiockpt commit {escape(root)}[/]"
    if attempt.missing_ranks:
        ranks = ", ".join(map(str, attempt.missing_ranks[:10])) + (", …" if len(attempt.missing_ranks) > 10 else "")
        return f"{what}: no receipt of rank {ranks}; it is running, or died. {removed}"
    if attempt.missing_ranks is None:  # without a receipt the number of ranks is unknown: one, or many
        return f"{what}: nothing of it was written completely; it is running, or died. {removed}"
    if attempt.manifest_is_damaged:
        advice = f"move the damaged manifest away, and [bold]aiockpt commit {escape(root)}[/] writes a new one"
        return f"{what} that can be read: it was written completely; {advice}"
    return f"{what}: another attempt was committed in its place; {removed}"


# ------------------------------------------------------------------ descent of steps, without I/O


class Saved(Protocol):
    """Origin of a step: the run that saved it, and what that run had loaded."""

    @property
    def id(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def parent(self) -> str | None: ...


def find_predecessors(steps: Sequence[Saved]) -> dict[str, str | None]:
    """Return for each step its predecessor: the step before it of its run, or the one that the run had loaded.

    A run that loads again continues from the loaded step. Where that was deleted or saved anew since, a substitute is the
    last step saved before it with a lower number: retention removes steps from a line, and the line continues. None
    where a step began without a load, or where there is no substitute.

    Args:
        steps: the newest first.
    """
    predecessors: dict[str, str | None] = {}
    newest_of_run: dict[str, Saved] = {}
    for step in reversed(steps):
        mate = newest_of_run.get(step.run)
        if mate is not None and mate.parent == step.parent:
            predecessors[step.id] = mate.id
        elif step.parent in predecessors:
            predecessors[step.id] = step.parent
        else:
            predecessors[step.id] = _find_stand_in(step.parent, predecessors)
        newest_of_run[step.run] = step
    return predecessors


def _find_stand_in(parent: str | None, older: Mapping[str, object]) -> str | None:
    """Return the last of the *older* steps, in the order of saving, with a lower number than *parent*."""
    limit = None if parent is None else parse_step(parent)
    if limit is None:
        return None
    numbers = {step_id: parse_step(step_id) for step_id in older}
    return next(
        (step_id for step_id in reversed(numbers) if (number := numbers[step_id]) is not None and number < limit), None
    )


def find_current(steps: Sequence[Saved], predecessors: Mapping[str, str | None]) -> set[str]:
    """Return the ids of the newest step and of its ancestors."""
    current: set[str] = set()
    at = steps[0].id if steps else None
    while at is not None:
        current.add(at)
        at = predecessors[at]
    return current


def draw_lines(steps: Sequence[Saved], predecessors: Mapping[str, str | None], current: set[str]) -> list[str]:
    """Return for each step, the newest first, its piece of the drawing: a dot, and the lines that pass by or join it."""
    lanes: list[str | None] = []  # the step that each line leads down to
    drawn = []
    for step in steps:
        joining = [index for index, awaited in enumerate(lanes) if awaited == step.id]
        if not joining:
            joining = [_free_lane(lanes)]
        drawn.append(_draw(lanes, joining, CURRENT if step.id in current else ABANDONED))
        for index in joining:
            lanes[index] = None
        lanes[joining[0]] = predecessors[step.id]
    return drawn


def _free_lane(lanes: list[str | None]) -> int:
    if None not in lanes:
        lanes.append(None)
    return lanes.index(None)


def _draw(lanes: Sequence[str | None], joining: Sequence[int], dot: str) -> str:
    first, last = joining[0], joining[-1]
    cells = []
    for index, awaited in enumerate(lanes):
        bar = "─" if first <= index < last else " "
        if index == first:
            cells.append(dot + bar)
        elif index in joining:
            cells.append(("╯" if index == last else "┴") + bar)
        elif awaited is not None:
            cells.append(("┼" if first < index < last else "│") + bar)
        else:
            cells.append(bar * 2)
    return "".join(cells).rstrip()
