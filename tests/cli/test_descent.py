"""Descent of steps, and how it is drawn."""

import msgspec
import pytest

from aiockpt.format.names import step_id
from aiockpt.tools.cli.listing import draw_lines, find_current, find_predecessors


class Saved(msgspec.Struct, frozen=True):
    id: str
    run: str = "a"
    parent: str | None = None


def numbered(step: int, run: str = "a", parent: int | None = None) -> Saved:
    return Saved(step_id(step), run, None if parent is None else step_id(parent))


ONE_RUN = (Saved("3"), Saved("2"), Saved("1"))
RESUMED = (numbered(8, "c", 6), numbered(5, "b", 3), numbered(2), numbered(0))


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        pytest.param((), [], id="nothing"),
        pytest.param(ONE_RUN, ["●", "●", "●"], id="one run is one line"),
        pytest.param(
            (Saved("5", "b", "2"), Saved("4"), Saved("3"), Saved("2"), Saved("1")),
            ["●", "│ ○", "│ ○", "●─╯", "●"],
            id="a run goes on from what it had loaded",
        ),
        pytest.param(
            (Saved("4", "a", "1"), Saved("3"), Saved("2"), Saved("1")),
            ["●", "│ ○", "│ ○", "●─╯"],
            id="a run that loads again goes on from there",
        ),
        pytest.param(RESUMED, ["●", "●", "●", "●"], id="retention took what was loaded"),
        pytest.param(
            (numbered(7, "b", 4), numbered(6), numbered(3), numbered(1)),
            ["●", "│ ○", "●─╯", "●"],
            id="a lower number that was saved earlier stands in",
        ),
        pytest.param(
            (Saved("4", "d", "1"), Saved("3", "c", "1"), Saved("2", "b", "1"), Saved("1")),
            ["●", "│ ○", "│ │ ○", "●─┴─╯"],
            id="three branches of one step",
        ),
        pytest.param(
            (Saved("5", "d", "1"), Saved("4", "c", "2"), Saved("3", "b", "1"), Saved("2", "e"), Saved("1")),
            ["●", "│ ○", "│ │ ○", "│ ○ │", "●───╯"],
            id="a line that ended is passed by",
        ),
        pytest.param(
            (Saved("5", "d", "2"), Saved("4", "c", "1"), Saved("3", "b", "2"), Saved("2", "e"), Saved("1")),
            ["●", "│ ○", "│ │ ○", "●─┼─╯", "  ○"],
            id="a line that passes between is crossed",
        ),
        pytest.param(
            (Saved("3", "c", "1"), Saved("2", "b"), Saved("9", "d"), Saved("1")),
            ["●", "│ ○", "│ ○", "●"],
            id="a line that ended makes room",
        ),
    ],
)
def test_steps_are_drawn_by_their_descent(steps: tuple[Saved, ...], drawn: list[str]) -> None:
    predecessors = find_predecessors(steps)
    assert draw_lines(steps, predecessors, find_current(steps, predecessors)) == drawn


@pytest.mark.parametrize(
    ("steps", "predecessors"),
    [
        (ONE_RUN, {"1": None, "2": "1", "3": "2"}),
        ((Saved("4", "a", "1"), Saved("3"), Saved("2"), Saved("1")), {"1": None, "2": "1", "3": "2", "4": "1"}),
        ((Saved("2", "b", "gone"), Saved("1")), {"1": None, "2": None}),
        ((Saved("1", "c"), Saved("2", "b", "1")), {"1": None, "2": None}),  # newer than its child
        (RESUMED, {step_id(8): step_id(5), step_id(5): step_id(2), step_id(2): step_id(0), step_id(0): None}),
        ((numbered(7, "b", 4), numbered(6)), {step_id(7): None, step_id(6): None}),
    ],
)
def test_a_step_continues_what_its_run_loaded_or_what_stands_in(
    steps: tuple[Saved, ...], predecessors: dict[str, str | None]
) -> None:
    assert find_predecessors(steps) == predecessors
