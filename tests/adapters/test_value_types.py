"""Is a plain value whose type changed told as a difference, and nothing that is only a usual turn of events?"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aiockpt.adapters.native import Stored, per_rank
from aiockpt.errors import StateMismatchError
from tests.adapters.worlds import World


@pytest.mark.parametrize(
    ("stored", "here", "message"),
    [
        (5, "five", "v: a str in the state, an int in the checkpoint"),
        ("five", 5, "v: an int in the state, a str in the checkpoint"),
        ([1], {"a": 1}, "v: a dict in the state, a list in the checkpoint"),
        ((1, 2), [1, 2], "v: a list in the state, a tuple in the checkpoint"),
        (b"x", "x", "v: a str in the state, bytes in the checkpoint"),
        (torch.ones(()), 1.0, "v: a float in the state, a tensor in the checkpoint"),
        (1.0, torch.ones(()), "v: a tensor in the state, a float in the checkpoint"),
        (np.ones(2), [1.0], "v: a list in the state, a numpy.ndarray in the checkpoint"),
        (PurePosixPath("/x"), "/x", "v: a str in the state, a path in the checkpoint"),
        ({}, defaultdict(list), "v: a defaultdict in the state, a dict in the checkpoint"),
        ({"run": {"name": 3}, "lr": 1}, {"run": {"name": "a"}}, "v: ['run']['name']: a str in the state, an int in"),
        (nn.Linear(1, 1), None, "v: a plain value in the state, a module in the checkpoint"),
        ({"deep": nn.Linear(1, 1)}, None, "v: ['deep']: a plain value in the state, a module in the checkpoint"),
        (per_rank(1), 1, "v: a plain value in the state, a value of each rank (aiockpt.per_rank) in the checkpoint"),
        (per_rank(1), per_rank("one"), "v: a str in the state, an int in the checkpoint"),
    ],
)
def test_another_type_is_a_difference_and_changes_nothing(save: Any, stored: Any, here: Any, message: str) -> None:
    saved = save({"v": stored})
    found = {"v": here, "n": 1}
    with pytest.raises(StateMismatchError) as caught:
        saved.open(found)
    assert any(problem.startswith(message) for problem in caught.value.problems)
    target = saved.load(found, strict=False)
    assert any(problem.startswith(message) for problem in target.problems)
    assert found["v"] is here
    assert target.missing == ("n",)
    assert "v" not in target.written


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (0.5, 0),
        (3, 2.5),
        (True, 0),
        (np.float32(1), 1.0),
        (1 << 70, 1),
        (float("inf"), 0),
        (None, "x"),
        ("x", None),
        (torch.ones(2), None),
        ({"a": None}, {"a": 1}),
        ({"a": 1}, {"a": None}),
        ({"b": "x"}, {"a": 1}),
        ([1, "x"], ["x"]),
        (OrderedDict(a=1), {"a": 2}),
        (b"x" * 70_000, b""),
        (per_rank(2.5), per_rank(1)),
    ],
)
def test_numbers_fit_each_other_and_none_fits_all(save: Any, stored: Any, here: Any) -> None:
    saved = save({"v": stored})
    found = {"v": here}
    assert saved.load(found).problems == ()
    assert saved.equals(found) or isinstance(stored, torch.Tensor)


def test_of_many_differences_within_one_value_the_first_are_told(save: Any) -> None:
    saved = save({"v": {str(number): number for number in range(5)}})
    with pytest.raises(StateMismatchError, match=r"\['2'\]: a str .* \(and 2 more\)"):
        saved.open({"v": {str(number): "x" for number in range(5)}})


def test_a_rank_that_was_not_there_is_told_how_to_go_on_without_its_own_value() -> None:
    world = World([{"mine": per_rank(1)}, {"mine": per_rank(2)}])
    found: dict[str, Any] = {"mine": per_rank(0)}
    message = r"mine: .*\(saved by 2 ranks, and here are 3\); strict=False keeps what is here, only= leaves it out"
    with pytest.raises(StateMismatchError, match=message):
        world.load_one(found, 2, 3)
    world.load_one(found, 2, 3, strict=False)
    assert found["mine"].value == 0


def test_a_value_that_was_of_all_ranks_is_not_taken_for_one_of_this_rank(save: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"v: one value for all ranks .* without aiockpt.per_rank"):
        save({"v": 1}).open({"v": per_rank(0)})


def test_the_names_of_a_checkpoint_are_those_of_tensors_and_values() -> None:
    values = {"a": {"n": 1, "w": {"$": "tensor", "name": "a.w"}}, "m": {"$": "module", "values": {}}}
    stored = Stored(tensors={"a.w": ("F32", ()), "m.w": ("F32", ())}, alias={"m.tied": "m.w"}, values=values)
    assert stored.names() == {"a", "a.n", "a.w", "m", "m.w", "m.tied"}
