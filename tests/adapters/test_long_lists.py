"""Long lists of numbers are stored as arrays, and a tree that grows too large is warned of in time, by name."""

import logging
import math
from collections import deque
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.adapters import native
from aiockpt.adapters.rng import per_rank
from aiockpt.errors import StateMismatchError, UnsupportedStateError
from tests.adapters.conftest import resume

LONG: dict[str, Any] = {
    "floats": [number / 7 for number in range(3000)] + [math.nan, math.inf, -0.0],
    "integers": [*range(3000), 2**63 - 1, -(2**63)],
    "booleans": [number % 3 == 0 for number in range(3000)],
    "a tuple": tuple(range(3000)),
    "a deque": deque([number / 7 for number in range(3000)], 5000),
    "a set": set(range(0, 9000, 3)),
    "a frozenset": frozenset(number / 7 for number in range(3000)),
    "numbers of several types": [*range(2000), 0.5, True],
    "large integers": [*range(2000), 2**64],
    "text": [str(number) for number in range(2000)],
    "lists": [list(range(2000)), [[*range(2000)]]],
}


@pytest.mark.parametrize("kind", LONG)
def test_they_come_back_as_what_they_were(kind: str) -> None:
    value = LONG[kind]
    empty = (
        value if isinstance(value, tuple | frozenset) else type(value)([], 5000) if kind == "a deque" else type(value)()
    )
    found: dict[str, Any] = {"v": empty, "none": None, "run": {"deep": [0], "w": torch.zeros(1)}, "own": per_rank(None)}
    state = {"v": value, "none": value, "run": {"deep": [value], "w": torch.ones(1)}, "own": per_rank(value)}
    result = resume(state, found)
    assert repr(found["v"]) == repr(found["none"]) == repr(value)
    assert repr(found["run"]["deep"]) == repr([value])
    assert repr(found["own"].value) == repr(value)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    if not isinstance(value, tuple | frozenset):
        assert found["v"] is empty
    assert [type(item) for item in found["v"]] == [type(item) for item in value]


def test_a_long_history_does_not_count_against_the_limits() -> None:
    history = [float(number) for number in range(1_050_000)]
    found: dict[str, list[float]] = {"history": []}
    resume({"history": history}, found)
    assert found["history"] == history


def test_a_list_that_grows_keeps_its_shape_most_of_the_time() -> None:
    walker, losses = native.StateWalker(), [0.0] * 100_000
    shapes = set()
    for _ in range(20):
        losses += [1.0] * 500
        shapes.add(walker.walk({"losses": losses}).tensors[0].shape)
    assert len(shapes) <= 3
    assert walker.cold_walks == 1


def test_two_ranks_that_say_different_things_are_told_apart() -> None:
    nodes = [native.StateWalker().walk({"losses": [float(number)] * 2000}).values["losses"] for number in (1, 2)]
    assert nodes[0] != nodes[1]


def test_one_list_at_two_places_is_compared_by_its_numbers() -> None:
    here: list[float] = []
    numbers = [0.5] * 2000
    resume({"a": numbers, "b": list(numbers)}, {"a": here, "b": here})
    assert here == numbers
    with pytest.raises(StateMismatchError, match="the checkpoint has two contents"):
        resume({"a": numbers, "b": [0.25] * 2000}, {"a": here, "b": here})


def test_the_biggest_leaves_are_named_when_there_is_too_much() -> None:
    state = {
        "model": torch.ones(1),
        "run": {"log": [{"loss": 0.5}] * 500_000, "w": torch.ones(1)},
        "notes": ["x" * 99] * 90_000,
    }
    with pytest.raises(
        UnsupportedStateError, match=r"The biggest: notes \(8\.8 MiB\), run\.log \(6\.2 MiB\)\. Keep"
    ) as caught:
        native.StateWalker().walk(state)
    assert "model" not in str(caught.value)


def test_too_much_text_names_the_text() -> None:
    with pytest.raises(UnsupportedStateError, match=r"The biggest: meta\.readme \(17\.0 MiB\)"):
        native.StateWalker().walk({"meta": {"readme": "x" * (17 << 20), "n": 1}})


def test_a_log_that_grows_is_warned_of_before_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    walker, log = native.StateWalker(), list[Any]()
    told = []
    for count in (160_000, 180_000, 200_000, 260_000, 280_000, 300_000, 320_000, 340_000):
        log += [[0.5, None]] * (count - len(log))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aiockpt"):
            try:
                walker.walk({"log": log})
            except UnsupportedStateError:
                break
        told += [(len(log), record.getMessage()) for record in caplog.records]
    assert [count for count, _ in told] == [180_000, 260_000, 300_000]
    assert all("The biggest: log (" in message for _, message in told)
    assert len(log) == 340_000


def test_a_state_far_from_the_limits_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with aiockpt.Checkpointer("memory://far-from-limits") as ckpt, caplog.at_level(logging.WARNING, "aiockpt"):
        ckpt.save(1, {"log": [[0.5, None]] * 1000}).result()
    assert not caplog.records
    assert native.WARN_AT[0] == 0.5
