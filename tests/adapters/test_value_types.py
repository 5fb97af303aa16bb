"""A plain value whose type changed is a difference, and nothing that is only a usual turn of events."""

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aiockpt.adapters.plain_values import in_words
from aiockpt.adapters.rng import per_rank
from aiockpt.adapters.stored import Stored
from aiockpt.errors import StateMismatchError
from aiockpt.state.tree import TAG
from tests.adapters.conftest import same
from tests.adapters.worlds import World


@pytest.mark.parametrize(
    ("stored", "here", "message"),
    [
        (5, "five", "v: a str in the state, an int in the checkpoint"),
        ("five", 5, "v: an int in the state, a str in the checkpoint"),
        ([1], {"a": 1}, "v: a dict in the state, a list in the checkpoint"),
        (b"x", "x", "v: a str in the state, bytes in the checkpoint"),
        (np.ones(2), [1.0], "v: a list in the state, a numpy.ndarray in the checkpoint"),
        (torch.ones(1), 1.0, "v: a float in the state, a tensor in the checkpoint"),
        (1.0, torch.ones(1), "v: a tensor in the state, a float in the checkpoint"),
        (b"1", torch.ones(1), "v: a tensor in the state, bytes in the checkpoint"),
        ([1.0], torch.ones(1), "v: a tensor in the state, a list in the checkpoint"),
        (
            0.5,
            torch.ones((), dtype=torch.int64),
            "v: a tensor of torch.int64 in the state, a float that it cannot hold",
        ),
        (300, torch.ones((), dtype=torch.uint8), "v: a tensor of torch.uint8 in the state, an int that it cannot hold"),
        (2, torch.ones((), dtype=torch.bool), "v: a tensor of torch.bool in the state, an int that it cannot hold"),
        (
            float("nan"),
            torch.ones((), dtype=torch.int8),
            "v: a tensor of torch.int8 in the state, a float that it cannot hold",
        ),
        (1j, torch.ones(()), "v: a tensor of torch.float32 in the state, a complex that it cannot hold"),
        (10**400, torch.ones(()), "v: a tensor of torch.float32 in the state, an int that it cannot hold"),
        (2**24 + 1, torch.ones(()), "v: a tensor of torch.float32 in the state, an int that it cannot hold"),
        (
            1e5,
            torch.ones((), dtype=torch.half),
            "v: a tensor of torch.float16 in the state, a float that it cannot hold",
        ),
        (1e99j, torch.tensor(1j), "v: a tensor of torch.complex64 in the state, a complex that it cannot hold"),
        (np.str_("x"), 5, "v: an int in the state, a numpy str_ in the checkpoint"),
        ({1}, frozenset({1}), "v: a frozenset in the state, a set in the checkpoint"),
        (bytearray(b"x"), b"x", "v: bytes in the state, a bytearray in the checkpoint"),
        (deque([1, 2]), deque(maxlen=1), "v: a deque of at most 1 in the state, one of 2 items in the checkpoint"),
        (torch.Size([1]), (1,), "v: a tuple in the state, a torch.Size in the checkpoint"),
        (np.ones(()), 1.0, "v: a float in the state, a numpy.ndarray in the checkpoint"),
        (PurePosixPath("/x"), "/x", "v: a str in the state, a path in the checkpoint"),
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
        (b"x" * 70_000, b""),
        (per_rank(2.5), per_rank(1)),
    ],
)
def test_numbers_fit_each_other_and_none_fits_all(save: Any, stored: Any, here: Any) -> None:
    saved = save({"v": stored})
    found = {"v": here}
    assert saved.load(found).problems == ()
    assert saved.equals(found) or isinstance(stored, torch.Tensor)


@pytest.mark.parametrize(
    ("stored", "here", "expected"),
    [
        (1e9, torch.tensor(0.5), torch.tensor(1e9)),
        (0.1, torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.bfloat16)),
        (1 << 30, torch.tensor(0.5), torch.tensor(2.0**30)),
        (65504, torch.tensor(0.5, dtype=torch.float16), torch.tensor(65504, dtype=torch.float16)),
        (3, torch.tensor(0.5), torch.tensor(3.0)),
        (3.0, torch.tensor(5), torch.tensor(3)),
        (2**63 + 1, torch.tensor(0, dtype=torch.uint64), torch.tensor(2**63 + 1, dtype=torch.uint64)),
        (True, torch.tensor(5), torch.tensor(1)),
        (1, torch.tensor(False), torch.tensor(True)),
        (np.float32(0.5), torch.tensor(5.0), torch.tensor(0.5)),
        (np.longdouble(0.5), torch.tensor(5.0), torch.tensor(0.5)),
        (2.0, torch.tensor(1j), torch.tensor(2 + 0j)),
        (float("inf"), torch.tensor(5.0), torch.tensor(float("inf"))),
        (torch.tensor(0.5), 1e9, 0.5),
        (torch.tensor(5), 0.5, 5),
        (torch.tensor(True), 0, True),
        (torch.tensor(0.5, dtype=torch.bfloat16), np.float32(0), 0.5),
        (torch.tensor(1j), 0, 1j),
        ((1, (2,)), [0], [1, (2,)]),
        ([1, [2]], (0, [3], 4), (1, [2])),
        (OrderedDict(b=1, a=2), {}, {"b": 1, "a": 2}),
        ({"b": 1, "a": 2}, OrderedDict(), OrderedDict(b=1, a=2)),
        ({"a": 1}, Counter("b"), Counter("a")),
        (Counter("aab"), {}, {"a": 2, "b": 1}),
        ({1: [2]}, defaultdict(list), defaultdict(list, {1: [2]})),
        (defaultdict(int, a=1), defaultdict(list), defaultdict(int, a=1)),
        (defaultdict(int, a=1), {}, {"a": 1}),
        ({"lr": 1, "betas": (0.5, 1)}, {"lr": torch.tensor(0.5), "betas": []}, {"lr": torch.tensor(1.0), "betas": [0.5, 1]}),
        (None, torch.ones(3), None),
        (None, [1], None),
    ],
)  # fmt: skip
def test_numbers_and_containers_become_the_kind_that_is_here(save: Any, stored: Any, here: Any, expected: Any) -> None:
    found = {"v": here}
    assert save({"v": stored}).load(found).problems == ()
    assert same(found["v"], expected)
    if not isinstance(here, tuple | int | float | np.generic) and expected is not None:
        assert found["v"] is here


def test_number_and_tensor_fit_beside_other_tensors_too(save: Any) -> None:
    best = torch.tensor(0.5)
    found: dict[str, Any] = {"run": {"best": best, "worst": 0.5, "w": torch.zeros(1)}}
    saved = save({"run": {"best": 1e9, "worst": torch.tensor(2.0), "w": torch.ones(1)}})
    target = saved.load(found)
    assert (target.problems, target.unexpected) == ((), ())
    assert found["run"]["best"] is best
    assert (best.item(), found["run"]["worst"]) == (1e9, 2.0)


def test_a_number_fills_an_inference_tensor_and_a_parameter(save: Any) -> None:
    with torch.inference_mode():
        found: dict[str, Any] = {"a": torch.tensor(0.5), "b": nn.Parameter(torch.tensor(0.5))}
    found["c"] = nn.Parameter(torch.tensor(0.5))
    save({"a": 1.5, "b": 2.5, "c": 3.5}).load(found)
    assert [found[key].item() for key in "abc"] == [1.5, 2.5, 3.5]


def test_of_many_differences_within_one_value_the_first_are_told(save: Any) -> None:
    saved = save({"v": {str(number): number for number in range(5)}})
    with pytest.raises(StateMismatchError, match=r"\['2'\]: a str .* \(and 2 more\)"):
        saved.open({"v": {str(number): "x" for number in range(5)}})


def test_a_new_rank_is_told_how_to_go_on() -> None:
    world = World([{"mine": per_rank(1)}, {"mine": per_rank(2)}])
    found: dict[str, Any] = {"mine": per_rank(0)}
    message = r"mine: .*\(saved by 2 ranks, and here are 3\); strict=False keeps what is here, only= leaves it out"
    with pytest.raises(StateMismatchError, match=message):
        world.load_one(found, 2, 3)
    world.load_one(found, 2, 3, strict=False)
    assert found["mine"].value == 0


def test_a_value_of_all_ranks_is_nobodys_own(save: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"v: one value for all ranks .* without aiockpt.per_rank"):
        save({"v": 1}).open({"v": per_rank(0)})


def test_the_names_of_a_checkpoint_are_those_of_tensors_and_values() -> None:
    values = {"a": {"n": 1, "w": {"$": "tensor", "name": "a.w"}}, "m": {"$": "module", "values": {}}}
    stored = Stored(tensors={"a.w": ("F32", ()), "m.w": ("F32", ())}, alias={"m.tied": "m.w"}, values=values)
    assert stored.names() == {"a", "a.n", "a.w", "m", "m.w", "m.tied"}


def test_a_stored_value_of_no_kind_is_spoken_of() -> None:
    """A manifest may say anything: this one was found by the campaign of hostile manifests."""
    assert in_words({TAG: ""}) == "a value without a kind"
