"""Does a nested dict load into the same structure, whatever lies beside what, and are both lists of names then empty?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aiockpt

Build = Callable[[float], dict[str, Any]]
_NUMBERS = count()


def resume(saved: dict[str, Any], into: dict[str, Any], **how: Any) -> aiockpt.LoadResult:
    """Save one state and load it into another, through the public API."""
    with aiockpt.Checkpointer(f"memory://nested-{next(_NUMBERS)}") as ckpt:
        ckpt.save(1, saved).result(30)
        result = ckpt.load(into, **how).result(30)
    assert result is not None
    return result


def optimizer_state(value: float) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    return torch.optim.SGD(model.parameters(), lr=value, momentum=0.9).state_dict()


def schedule(value: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=value)
    return torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()


BESIDE: dict[str, Build] = {
    "a dict beside a tensor": lambda v: {"meta": {"config": {"lr": v}, "ema": torch.full((3,), v)}},
    "deep dicts beside a tensor": lambda v: {"meta": {"config": {"a": {"b": {"c": v}}}, "ema": torch.full((1,), v)}},
    "state dicts in a dict": lambda v: {"g": {"m": nn.Linear(2, 2).state_dict(), "o": optimizer_state(v)}},
    "a scheduler's beside an average": lambda v: {"g": {"s": schedule(v), "ema": torch.full((1,), v)}},
    "a dict beside a module": lambda v: {"run": {"net": nn.Linear(1, 1), "cfg": {"lr": v}}},
    "a dict beside random generators": lambda v: {"run": {"rng": aiockpt.RNG(), "cfg": {"lr": v}}},
    "a dict on top": lambda v: {"config": {"lr": v}},
    "a dict with the tag as a key": lambda v: {"run": {"$": {"lr": v}, "w": torch.full((1,), v)}},
}


@pytest.mark.parametrize("build", BESIDE.values(), ids=BESIDE.keys())
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_loaded_is_neither_unexpected_nor_a_difference(build: Build, strict: bool) -> None:
    result = resume(build(0.5), build(0.25), strict=strict)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())


def test_the_values_in_nested_dicts_come_back() -> None:
    found = BESIDE["deep dicts beside a tensor"](0.25)
    resume(BESIDE["deep dicts beside a tensor"](0.5), found)
    assert found["meta"]["config"] == {"a": {"b": {"c": 0.5}}}
    assert found["meta"]["ema"].tolist() == [0.5]


def test_only_a_part_of_a_nested_dict_leaves_nothing_unexpected() -> None:
    build = BESIDE["a dict beside a tensor"]
    for only in (["meta"], ["meta.config"], ["meta.ema"]):
        result = resume(build(0.5), build(0.25), only=only)
        assert (result.missing, result.unexpected, result.differences) == ((), (), ())


def test_a_renamed_dict_leaves_nothing_unexpected() -> None:
    found = {"state": {"settings": {"lr": 0.0}, "ema": torch.zeros(3)}}
    saved = BESIDE["a dict beside a tensor"](0.5)
    result = resume(saved, found, map={"state": "meta", "state.settings": "meta.config"})
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    assert found["state"]["settings"] == {"lr": 0.5}


def test_a_value_that_does_not_fit_is_told_once_and_not_its_parts() -> None:
    result = resume({"config": {"lr": 1.0}}, {"config": 3}, strict=False)
    assert result.unexpected == ()
    assert result.differences == ("config: an int in the state, a dict in the checkpoint",)


def test_what_the_state_lacks_in_a_dict_with_the_tag_as_a_key_is_a_difference() -> None:
    saved = {"run": {"$": 1, "w": torch.ones(1), "extra": torch.ones(1)}}
    found = {"run": {"$": 0, "w": torch.zeros(1)}}
    with pytest.raises(aiockpt.StateMismatchError, match=r"run.extra: in the checkpoint but not in the state"):
        resume(saved, found)


def test_a_dict_with_the_tag_as_a_key_can_be_renamed() -> None:
    found: dict[str, dict[str, Any]] = {"there": {"$": 0, "w": torch.zeros(1)}}
    resume({"run": {"$": 1, "w": torch.ones(1)}}, found, map={"there.$": "run.$", "there.w": "run.w"})
    assert (found["there"]["$"], found["there"]["w"].tolist()) == (1, [1.0])


def test_a_key_that_is_a_slip_of_the_pen_is_answered_by_the_one_that_may_be_meant() -> None:
    saved = {"model": nn.Linear(1, 1), "epoch": 3, "run": {"average": torch.ones(1), "w": torch.ones(1)}}
    found = {"modle": nn.Linear(1, 1), "epohc": 0, "run": {"avreage": torch.ones(1), "w": torch.ones(1)}}
    with pytest.raises(aiockpt.StateMismatchError) as caught:
        resume(saved, found)
    assert [problem for problem in caught.value.problems if "near" in problem] == [
        "epohc: in the state but not in the checkpoint (near it: 'epoch')",
        "modle.bias: in the state but not in the checkpoint (near it: 'model')",
        "modle.weight: in the state but not in the checkpoint (near it: 'model')",
        "run.avreage: in the state but not in the checkpoint (near it: 'run.average')",
    ]


def test_a_name_that_is_in_use_is_no_answer_to_another() -> None:
    with pytest.raises(aiockpt.StateMismatchError, match="model2: in the state but not in the checkpoint\n"):
        resume({"model1": 1, "other": 1}, {"model1": 0, "model2": 0})


def test_a_none_in_its_place_takes_type_and_ties() -> None:
    t, array = torch.ones(2), np.ones(2)
    ordered = OrderedDict(b=t, a=OrderedDict(x=t))
    found: dict[str, Any] = {"v": None, "o": None, "w": torch.zeros(2), "n": [None]}
    resume({"v": [t, t, {"t": t}, t[:1], array, array], "o": ordered, "w": t, "n": [t]}, found)
    items = found["v"]
    assert (
        items[0] is items[1] is items[2]["t"] is found["w"] is found["o"]["b"] is found["o"]["a"]["x"] is found["n"][0]
    )
    assert items[3].untyped_storage().data_ptr() != items[0].untyped_storage().data_ptr()
    assert items[4] is items[5]
    assert (type(found["o"]), type(found["o"]["a"]), list(found["o"])) == (OrderedDict, OrderedDict, ["b", "a"])


def test_the_tag_and_numbers_of_keys_are_ordinary_keys() -> None:
    def build(value: float) -> dict[str, Any]:
        odd: dict[Any, Any] = {(1,): torch.full((1,), value), "#0": torch.full((1,), value + 1), None: [value], 1.5: {}}
        return {
            "$": {"$": value},
            "run": {"$": value, "w": torch.ones(1)},
            "odd": {**odd, "$": value, 7: "x", "7": "y"},
        }

    found = build(0.25)
    tuple_keyed = found["odd"][(1,)]
    result = resume(build(0.5), found)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    assert found["odd"][(1,)] is tuple_keyed
    assert (tuple_keyed.item(), found["odd"]["#0"].item(), found["odd"][None]) == (0.5, 1.5, [0.5])
    assert (found["$"], found["run"]["$"], found["odd"]["$"]) == ({"$": 0.5}, 0.5, 0.5)


def test_tensors_under_odd_keys_find_theirs_whatever_the_order() -> None:
    first, second = torch.zeros(1), torch.zeros(1)
    resume({"v": {(1,): torch.ones(1), (2,): torch.full((1,), 2.0)}}, found := {"v": {(2,): second, (1,): first}})
    assert (first.item(), second.item(), list(found["v"])) == (1, 2, [(1,), (2,)])


def test_tensors_in_a_dict_under_odd_keys_are_data() -> None:
    moments = torch.zeros(1)
    found: dict[str, Any] = {"v": {(1, 2): {"a": moments}, 0: [{"b": torch.zeros(1)}], "gone": {"c": torch.zeros(1)}}}
    result = resume({"v": {(1, 2): {"a": torch.ones(1), "new": torch.ones(1)}, 0: [{"b": torch.ones(1)}]}}, found)
    assert found["v"][1, 2]["a"] is moments
    assert (moments.item(), found["v"][1, 2]["new"].item()) == (1, 1)
    assert result.differences == ("v: only in the state, and removed: 'gone'",)


def test_a_tied_tensor_that_is_made_or_found_elsewhere_is_not_unexpected() -> None:
    t = torch.ones(3)
    for found in ({"a": t.clone(), "v": {(0,): []}}, {"a": None, "v": {(0,): None}}):
        result = resume({"a": t, "v": {(0,): [0, t]}}, found)
        assert (result.unexpected, result.differences) == ((), ())
