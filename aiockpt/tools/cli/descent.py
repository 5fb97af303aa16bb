"""Descent of steps: predecessors from what manifests say, and the lines that show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from aiockpt.format.names import parse_step


class Saved(Protocol):
    """Origin of a step: the run that saved it, and what that run had loaded."""

    @property
    def id(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def parent(self) -> str | None: ...


def find_predecessors(steps: Sequence[Saved]) -> dict[str, str | None]:
    """Return for each step the one it continues: the one before it of its run, or the one that the run had loaded.

    A run that loads again goes on from there. Where what it had loaded was deleted or saved anew since, the step that was
    saved last before it and has a lower number stands in for it: retention removes steps from a line, and the line
    continues. None where a step began from nothing, or where nothing can stand in.

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
    """Return the last of the *older* steps, in the order they were saved, with a lower number than *parent* had."""
    limit = None if parent is None else parse_step(parent)
    if limit is None:
        return None
    numbers = {step_id: parse_step(step_id) for step_id in older}
    return next(
        (step_id for step_id in reversed(numbers) if (number := numbers[step_id]) is not None and number < limit), None
    )


def find_current(steps: Sequence[Saved], predecessors: Mapping[str, str | None]) -> set[str]:
    """Return the ids of the newest step and of all it descends from."""
    current: set[str] = set()
    at = steps[0].id if steps else None
    while at is not None:
        current.add(at)
        at = predecessors[at]
    return current


CURRENT, ABANDONED = "●", "○"
"""The dot of a step that the newest one descends from, itself included, and of any other."""


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
