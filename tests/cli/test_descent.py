"""Who descends from whom, and how it is drawn."""

from __future__ import annotations

import msgspec

from aiockpt.format.names import step_id
from aiockpt.tools.cli.descent import draw_lines, find_current, find_predecessors


class Saved(msgspec.Struct, frozen=True):
    id: str
    run: str = "a"
    parent: str | None = None


def draw(*steps: Saved) -> list[str]:
    predecessors = find_predecessors(steps)
    return draw_lines(steps, predecessors, find_current(steps, predecessors))


def test_the_steps_of_one_run_are_one_line() -> None:
    steps = (Saved("3"), Saved("2"), Saved("1"))
    assert find_predecessors(steps) == {"1": None, "2": "1", "3": "2"}
    assert draw(*steps) == ["●", "●", "●"]


def test_a_run_goes_on_from_what_it_had_loaded() -> None:
    steps = (Saved("5", "b", "2"), Saved("4"), Saved("3"), Saved("2"), Saved("1"))
    assert find_predecessors(steps)["5"] == "2"
    assert draw(*steps) == ["●", "│ ○", "│ ○", "●─╯", "●"]


def test_a_run_that_loads_again_goes_on_from_there() -> None:
    steps = (Saved("4", "a", "1"), Saved("3"), Saved("2"), Saved("1"))
    assert find_predecessors(steps) == {"1": None, "2": "1", "3": "2", "4": "1"}
    assert draw(*steps) == ["●", "│ ○", "│ ○", "●─╯"]


def test_what_was_deleted_or_saved_anew_is_nobodys_predecessor() -> None:
    assert find_predecessors((Saved("2", "b", "gone"), Saved("1"))) == {"1": None, "2": None}
    newer_than_its_child = (Saved("1", "c"), Saved("2", "b", "1"))
    assert find_predecessors(newer_than_its_child) == {"1": None, "2": None}


def numbered(step: int, run: str = "a", parent: int | None = None) -> Saved:
    return Saved(step_id(step), run, None if parent is None else step_id(parent))


def test_a_run_that_was_resumed_is_one_line_also_when_retention_took_what_it_had_loaded() -> None:
    steps = (numbered(8, "c", 6), numbered(5, "b", 3), numbered(2), numbered(0))
    assert find_predecessors(steps) == {
        step_id(8): step_id(5),
        step_id(5): step_id(2),
        step_id(2): step_id(0),
        step_id(0): None,
    }
    assert draw(*steps) == ["●", "●", "●", "●"]


def test_only_a_step_of_a_lower_number_that_was_saved_earlier_stands_in_for_one_that_is_gone() -> None:
    steps = (numbered(7, "b", 4), numbered(6), numbered(3), numbered(1))
    assert find_predecessors(steps)[step_id(7)] == step_id(3)
    assert draw(*steps) == ["●", "│ ○", "●─╯", "●"]
    assert find_predecessors((numbered(7, "b", 4), numbered(6)))[step_id(7)] is None


def test_three_branches_of_one_step_meet_at_it() -> None:
    steps = (Saved("4", "d", "1"), Saved("3", "c", "1"), Saved("2", "b", "1"), Saved("1"))
    assert draw(*steps) == ["●", "│ ○", "│ │ ○", "●─┴─╯"]


def test_a_line_that_passes_between_is_crossed() -> None:
    steps = (Saved("5", "d", "1"), Saved("4", "c", "2"), Saved("3", "b", "1"), Saved("2", "e"), Saved("1"))
    assert draw(*steps)[-1] == "●───╯"
    steps = (Saved("5", "d", "2"), Saved("4", "c", "1"), Saved("3", "b", "2"), Saved("2", "e"), Saved("1"))
    assert draw(*steps)[-2:] == ["●─┼─╯", "  ○"]


def test_a_line_that_ended_makes_room() -> None:
    steps = (Saved("3", "c", "1"), Saved("2", "b"), Saved("9", "d"), Saved("1"))
    assert draw(*steps) == ["●", "│ ○", "│ ○", "●"]


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw() == []
