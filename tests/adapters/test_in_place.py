"""Containers and values that a program holds: filled where they are, whatever lies beside what, or a difference by name."""

import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.state.codecs import CodecRegistry
from tests.adapters.conftest import Saved, resume, same

TEXT = "u" if sys.version_info < (3, 13) else "w"
"""What arrays of text are of; the first is going away."""
FILLED: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2.5], [0]),
    "dict": ({"a": 1, 2: "b"}, {"a": 3}),
    "OrderedDict": (OrderedDict(b=1, a=2), OrderedDict(a=0)),
    "defaultdict": (defaultdict(list, {"a": [1]}), defaultdict(list)),
    "Counter": (Counter("aab"), Counter("abb")),
    "deque": (deque([1, 2], 5), deque([3], 5)),
    "set": ({1, "a", (2, 3)}, {9}),
    "bytearray": (bytearray(b"new"), bytearray(b"older")),
    "array": (array("d", [0.5, 1.5]), array("d")),
    "array of text": (array(TEXT, "aß"), array(TEXT)),
    "numpy array": (np.arange(3.0), np.zeros(3)),
    "numpy array of text": (np.array(["a", "b"]), np.array(["c", "d"])),
    "numpy array, reversed": (np.arange(3.0), np.zeros(3)[::-1]),
    "tensor": (torch.arange(3.0), torch.zeros(3)),
}


@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.parametrize(
    "place", ["top", "nested", "in a list", "in a tuple", "beside a tensor", "beside a module", "own"]
)
def test_what_the_program_holds_is_filled_wherever_it_is(kind: str, place: str) -> None:
    saved, here = deepcopy(FILLED[kind])

    def build(value: Any) -> dict[str, Any]:
        return {
            "top": {"v": value},
            "nested": {"v": {1: {"x": value}}},
            "in a list": {"v": [0, {"x": [value]}]},
            "in a tuple": {"v": (0, (value,))},
            "beside a tensor": {"v": {"x": value, "w": torch.ones(1)}},
            "beside a module": {"v": {"x": [value, nn.Linear(1, 1)], 3: (value, nn.Linear(1, 1))}},
            "own": {"v": aiockpt.per_rank({"x": value})},
        }[place]

    if kind == "tensor" and place == "beside a module":
        pytest.skip("one tensor at two places is tied by the saved one")
    result = resume(build(saved), build(here))
    assert same(np.array(here), np.array(saved)) if kind.startswith("numpy") else same(here, saved)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())


def test_the_program_still_holds_the_object_of_the_state() -> None:
    losses, seen, log = [1.0], {3}, deque([1], 4)
    found: dict[str, Any] = {"losses": losses, "run": {"seen": seen, "ema": torch.zeros(1), "deep": {"log": log}}}
    found["pair"] = (log, 1)
    saved: dict[str, Any] = {"losses": [2.0, 3.0], "run": {"seen": {4}, "ema": torch.ones(1)}}
    saved["pair"] = (deque([7], 4), 2)
    saved["run"]["deep"] = {"log": deque([7], 4)}
    resume(saved, found)
    losses.append(4.0)
    seen.add(5)
    log.append(8)
    assert found["losses"] == [2.0, 3.0, 4.0]
    assert found["run"]["seen"] == {4, 5}
    assert found["run"]["deep"]["log"] is found["pair"][0] is log
    assert found["pair"] == (deque([7, 8]), 2)


def w(value: float = 1) -> torch.Tensor:
    return torch.full((1,), float(value))


def odd(value: float) -> dict[str, Any]:
    keys: dict[Any, Any] = {(1,): w(value), "#0": w(value + 1), None: [value], 1.5: {}}
    beside = {"$": {"$": value}, "run": {"$": value, "w": torch.ones(1)}}
    return {**beside, "odd": {**keys, "$": value, 7: "x", "7": "y"}}


def fixed() -> Any:
    made = np.zeros(2)
    made.flags.writeable = False
    return made


BESIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a tensor": lambda: {"w": torch.ones(1)},
    "a module": lambda: {"w": nn.Linear(1, 1)},
}


def beside(make: Callable[[], dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"run": {**deepcopy(values), **make()}}


# fmt: off
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, ...]]] = {
    # what is saved, what is here, and what is told, or the place of it
    "the order of keys": (
        lambda: {"p": {"b": 1, "a": 2}, "o": OrderedDict(b=1, w=w(), a=2)},
        lambda: {"p": {"a": 0, "b": 0}, "o": OrderedDict(a=0, w=w(0), b=0)}, ()),
    "items of another kind": (
        lambda: {"v": [torch.ones(3), w(), (1,), "x", 7]},
        lambda: {"v": [torch.zeros(2), w(0), [9], 5]}, ("v[0]", "v[2]")),
    "arrays of another shape, of another type, and that cannot be written": (
        lambda: {"a": np.ones(3), "b": np.ones(2), "c": np.ones(2)},
        lambda: {"a": np.zeros(2), "b": np.zeros(2, np.float32), "c": fixed()}, ("a", "b", "c")),
    "an array of another type, in a list": (
        lambda: {"v": [array("d", [0.5]), [1]]}, lambda: {"v": [array("i", [1]), [0]]}, ("v[0]",)),
    "a deque of another limit": (
        lambda: {"v": deque([1, 2], 3)},
        lambda: {"v": deque([1], 10)}, ("v: maxlen=10 in the state, 3 in the checkpoint; kept",)),
    "a deque that is too short, in a list": (
        lambda: {"v": [deque([1, 2], 3)]}, lambda: {"v": [deque([1], 1)]}, ("v[0]",)),
    "tensors in a deque": (
        lambda: {"x": deque([torch.ones(2), torch.ones(3)])},
        lambda: {"x": deque([torch.zeros(2, dtype=torch.float64)])}, ("x[0]",)),
    "tensors under odd keys": (
        lambda: {"v": {(1, 2): {"a": w(), "new": w()}, 0: [{"b": w()}]}},
        lambda: {"v": {(1, 2): {"a": w(0)}, 0: [{"b": w(0)}], "gone": {"c": w(0)}}},
        ("v: only in the state, and removed: 'gone'",)),
    "the tag and numbers as keys": (lambda: odd(0.5), lambda: odd(0.25), ()),
    "dots, brackets and tags in keys": (
        lambda: {"a.b": {"$": 1, "t": w(), "x\\": {"[0]": 5, "u": w(2)}}, "": 7},
        lambda: {"a.b": {"$": 0, "t": w(0), "x\\": {"[0]": 0, "u": w(0)}}, "": 0}, ()),
    "None": (
        lambda: {"best": torch.arange(3), "a": None, "blob": b"x" * 70_000},
        lambda: {"best": None, "a": 1, "blob": None}, ()),
    "deep dicts beside a tensor": (
        lambda: {"meta": {"config": {"a": {"b": {"c": 0.5}}}, "ema": w(0.5)}, "blob": bytearray(b"x" * 70_000)},
        lambda: {"meta": {"config": {"a": {"b": {"c": 0.25}}}, "ema": w(0.25)}, "blob": bytearray()}, ()),
    **{f"only here, beside {name}": (
        partial(beside, make, {"epoch": 3}), partial(beside, make, {"epoch": 0, "old": [1], "older": {}}),
        ("run: only in the state, and removed: 'old', 'older'",))
       for name, make in BESIDE.items()},
    **{f"only there, beside {name}": (
        partial(beside, make, {"history": [torch.ones(2), {"lr": 1}], "note": "x", "epoch": 3}),
        partial(beside, make, {"epoch": 0}), ())
       for name, make in BESIDE.items()},
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_here_becomes_what_was_saved(name: str, strict: bool) -> None:
    saved, found, told = CASES[name][0](), CASES[name][1](), CASES[name][2]
    held = {key: value for key, value in found.items() if isinstance(value, list | dict | deque | bytearray)}
    result = resume(saved, found, strict=strict)
    assert same(found, saved)
    assert all(found[key] is value for key, value in held.items())
    assert (result.missing, result.unexpected) == ((), ())
    assert len(result.differences) == len(told)
    assert all(line == one or line.startswith(f"{one}:") for line, one in zip(result.differences, told, strict=True))


def optimizer_state(value: float) -> dict[str, Any]:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=value, momentum=0.9).state_dict()


def schedule(value: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=value)
    return torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()


NESTED: dict[str, Callable[[float], dict[str, Any]]] = {
    "a dict beside a tensor": lambda v: {"meta": {"config": {"lr": v}, "ema": torch.full((3,), v)}},
    "state dicts in a dict": lambda v: {"g": {"m": nn.Linear(2, 2).state_dict(), "o": optimizer_state(v)}},
    "a scheduler's beside an average": lambda v: {"g": {"s": schedule(v), "ema": torch.full((1,), v)}},
    "a dict beside a module": lambda v: {"run": {"net": nn.Linear(1, 1), "cfg": {"lr": v}}},
    "a dict beside random generators": lambda v: {"run": {"rng": aiockpt.RNG(), "cfg": {"lr": v}}},
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {"strict": strict}) for name in NESTED for strict in (True, False)),
        *(("a dict beside a tensor", {"only": only}) for only in (["meta"], ["meta.config"], ["meta.ema"])),
    ],
)
def test_what_is_loaded_is_neither_unexpected_nor_a_difference(name: str, how: dict[str, Any]) -> None:
    result = resume(NESTED[name](0.5), NESTED[name](0.25), **how)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())


@pytest.mark.parametrize(("saved", "found", "names", "expected"), [
    ({"meta": {"ema": w(), "config": {"lr": 0.5}}}, {"state": {"ema": w(0), "settings": {"lr": 0.0}}},
     {"state": "meta", "state.settings": "meta.config"}, {"state": {"ema": w(), "settings": {"lr": 0.5}}}),
    ({"run": {"$": 1, "w": w()}}, {"there": {"$": 0, "w": w(0)}},
     {"there.$": "run.$", "there.w": "run.w"}, {"there": {"$": 1, "w": w()}}),
    ({"run": {"w": w(), "n": 5}, "count": {"v": w()}}, {"run": {"w": w(0)}, "count": {"v": w(0), "n": 0}},
     {"count.n": "run.n"}, {"run": {"w": w()}, "count": {"v": w(), "n": 5}}),
])  # fmt: skip
def test_parts_of_dicts_can_be_renamed(saved: Any, found: Any, names: dict[str, str], expected: Any) -> None:
    found = deepcopy(found)
    result = resume(saved, found, map=names)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    assert same(found, expected)


def test_on_top_nothing_is_removed_and_nothing_added() -> None:
    found = {"epoch": 0, "mine": [1]}
    with pytest.raises(StateMismatchError, match="mine: in the state but not in the checkpoint"):
        resume({"epoch": 3, "theirs": 1}, found)
    result = resume({"epoch": 3, "theirs": 1}, found, strict=False)
    assert found == {"epoch": 3, "mine": [1]}
    assert (result.missing, result.unexpected) == (("mine",), ("theirs",))


HERE, THERE = "in the state but not in the checkpoint", "in the checkpoint but not in the state"


def nets(count: int) -> list[nn.Module]:
    return [nn.Linear(1, 1, bias=False) for _ in range(count)]


@pytest.mark.parametrize(("saved", "found", "problems"), [
    ({"run": {"a": w(), "deep": {"b": w()}}}, {"run": {"c": w(), "d": nn.Linear(1, 1)}},
     [f"run.a: {THERE}", f"run.c: {HERE}", f"run.d.bias: {HERE}", f"run.d.weight: {HERE}", f"run.deep: {THERE}"]),
    ({"config": {"lr": 1.0}}, {"config": 3}, ["config: an int in the state, a dict in the checkpoint"]),
    ({"run": {"$": 1, "w": w(), "extra": w()}}, {"run": {"$": 0, "w": w(0)}}, [f"run.extra: {THERE}"]),
    ({"model": nn.Linear(1, 1), "epoch": 3, "run": {"average": w(), "w": w()}},
     {"modle": nn.Linear(1, 1), "epohc": 0, "run": {"avreage": w(), "w": w()}},
     [f"epohc: {HERE} (near it: 'epoch')", f"modle.bias: {HERE} (near it: 'model')",
      f"modle.weight: {HERE} (near it: 'model')", f"run.average: {THERE}",
      f"run.avreage: {HERE} (near it: 'run.average')"]),
    ({"model1": 1, "other": 1}, {"model1": 0, "model2": 0}, [f"model2: {HERE}"]),  # what is in use is not near it
    ({"nets": nets(2)}, {"nets": nets(1)}, [f"nets[1]: {THERE}"]),
    ({"nets": nets(1)}, {"nets": nets(2)}, [f"nets[1].weight: {HERE}"]),
])  # fmt: skip
def test_every_difference_is_named_and_no_object_made(saved: Any, found: Any, problems: list[str]) -> None:
    with pytest.raises(StateMismatchError) as caught:
        resume(saved, found)
    assert list(caught.value.problems) == problems


def test_only_a_part_leaves_the_rest_of_its_dict_alone() -> None:
    run: dict[str, Any] = {"w": torch.zeros(1), "log": [0], "mine": 1}
    result = resume({"run": {"w": torch.ones(1), "log": [1], "theirs": 1}}, {"run": run}, only=["run.log"])
    assert run == {"w": torch.zeros(1), "log": [1], "mine": 1}
    assert result.differences == ()


def test_a_buffer_in_use_elsewhere_is_replaced_and_told() -> None:
    data, numbers = bytearray(b"abc"), array("i", [1])
    with memoryview(data), memoryview(numbers):
        result = resume({"v": bytearray(b"longer"), "n": array("i", [1, 2])}, found := {"v": data, "n": numbers})
    assert found == {"v": bytearray(b"longer"), "n": array("i", [1, 2])}
    assert data == bytearray(b"abc")
    assert [told.split(":")[0] for told in result.differences] == ["v", "n"]


@pytest.mark.parametrize(
    ("one", "first", "second"),
    [
        ([0], [1], [2]),
        ({"a": 0}, {"a": 1}, {"a": 2}),
        ({5}, {1}, {2}),
        (bytearray(b"x"), bytearray(b"y"), bytearray(b"z")),
    ],
)
def test_one_object_with_two_stored_contents_is_a_mismatch(one: Any, first: Any, second: Any) -> None:
    before = repr(one)
    with pytest.raises(StateMismatchError, match="the same object as a, but the checkpoint has two contents"):
        resume({"a": first, "b": {"c": {1: second}}}, {"a": one, "b": {"c": {1: one}}})
    assert repr(one) == before


def test_one_dict_of_tensors_with_two_contents_is_refused() -> None:
    one = {"n": 0, "w": torch.zeros(1)}
    tied = torch.ones(1)
    with pytest.raises(StateMismatchError, match="b: the same object as a, but the checkpoint has two contents"):
        resume({"a": {"n": 1, "w": tied}, "b": {"n": 2, "w": tied}}, {"a": one, "b": one})


def test_one_object_at_two_places_with_one_content_is_filled() -> None:
    shared: list[Any] = [torch.zeros(1), {"n": 0}, bytearray()]
    t = torch.ones(1)
    saved = [t, {"n": 1}, bytearray(70_000)]
    found: dict[str, Any] = {"a": shared, "b": {"x": shared, "w": shared[0]}}
    resume({"a": saved, "b": {"x": saved, "w": t}}, found)
    assert found["a"] is found["b"]["x"] is shared
    assert (shared[1], len(shared[2]), shared[0].item()) == ({"n": 1}, 70_000, 1.0)


def test_one_object_in_lists_becomes_two_for_two_contents() -> None:
    one: list[Any] = [0]
    result = resume({"a": [1], "v": [[2], {"x": [1]}]}, found := {"a": one, "v": [one, {"x": one}]})
    assert found == {"a": [1], "v": [[2], {"x": [1]}]}
    assert found["a"] is one
    assert result.differences == ()
    here: list[Any] = []
    here.append(here)
    resume({"v": [[1], 2]}, {"v": here})
    assert here == [[1], 2]


@dataclass
class Picky:
    """A registered class that does not take everything."""

    n: int
    log: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("negative")


def test_what_a_codec_refuses_changes_nothing(save: Any) -> None:
    codecs = CodecRegistry()
    codecs.register_codec("picky", Picky)
    saved = save_with(codecs, {"a": [1], "w": {"t": torch.ones(1), "n": 1}, "z": Picky(1)})
    saved.stored.values["z"]["value"]["n"] = -1
    t, a = torch.zeros(1), [0]
    found = {"a": a, "w": {"t": t, "n": 0, "old": 0}, "z": Picky(5)}
    with pytest.raises(UsageError, match="the codec 'picky' refused"):
        saved.load(found, codecs=codecs)
    assert (t.item(), a, found["z"], found["w"]["n"], "old" in found["w"]) == (0, [0], Picky(5), 0, True)  # type: ignore[index, operator]


def test_codecs_decode_before_the_first_object_changes() -> None:
    class Scale:
        def __init__(self, by: torch.Tensor) -> None:
            if by.item() == 13:
                raise ValueError("unlucky")
            self.by = by

    codecs = CodecRegistry()
    codecs.register_codec("scale", Scale, lambda scale: scale.by, Scale)
    unlucky = Scale(torch.tensor(12.0))
    unlucky.by.add_(1)
    saved = save_with(codecs, {"a": [1], "n": 1, "z": unlucky})
    a = [0]
    found = {"a": a, "n": 0, "z": Scale(torch.tensor(1.0))}
    with pytest.raises(UsageError, match="the codec 'scale' refused"):
        saved.load(found, codecs=codecs)
    assert (a, found["n"]) == ([0], 0)


def save_with(codecs: CodecRegistry, state: Any) -> Any:
    return Saved(StateWalker(codecs).walk(state))


class Box(dict[str, Any]):
    """A dict of the user's."""


class Sealed(Box):
    """One that cannot be emptied."""

    def clear(self) -> None:
        raise TypeError("sealed")


class Mute(Box):
    """One that takes nothing, and says nothing."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("cls", [Box, Sealed, Mute])
def test_a_registered_subclass_is_filled_or_else_replaced_and_told(cls: type[Box]) -> None:
    name = f"in-place.{cls.__name__}"
    aiockpt.register_codec(name, cls, lambda box: [dict(box), vars(box)], lambda parts: make(cls, *parts))
    here, inner = cls(), [0]
    dict.update(here, {"log": inner, "gone": 1})
    result = resume({"v": make(cls, {"log": [1]}, {"tag": "x"})}, found := {"v": here})
    assert dict(found["v"]) == {"log": [1]}
    assert vars(found["v"]) == {"tag": "x"}
    if cls is Box:
        assert found["v"] is here
        assert here["log"] is inner
        assert result.differences == ()
    else:
        assert found["v"] is not here
        assert "v: replaced by what was saved" in result.differences[0]


def make(cls: type[Box], items: dict[str, Any], attributes: dict[str, Any]) -> Box:
    box = cls()
    dict.update(box, items)
    vars(box).update(attributes)
    return box


def test_objects_load_in_lists_tuples_and_under_integer_keys() -> None:
    def build(value: float) -> dict[str, Any]:
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        for parameter in (*first.parameters(), *second.parameters()):
            nn.init.constant_(parameter, value)
        optimizers = [torch.optim.SGD(one.parameters(), lr=value) for one in (first, second)]
        return {"nets": (first, [second], value), "by": {0: optimizers[0], "x": {1: {"o": optimizers[1:], "n": value}}}}

    saved, found = build(0.5), build(0.25)
    nets, by = found["nets"], found["by"]
    result = resume(saved, found)
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    assert found["nets"][0] is nets[0]
    assert found["nets"][1] is nets[1]
    assert found["nets"][2] == 0.5
    assert nets[1][0].weight.item() == nets[0].bias.item() == 0.5
    assert by[0].param_groups[0]["lr"] == by["x"][1]["o"][0].param_groups[0]["lr"] == by["x"][1]["n"] == 0.5


def test_only_and_map_name_objects_in_lists() -> None:
    found = {"nets": [nn.Linear(1, 1), nn.Linear(1, 1)]}
    before = found["nets"][1].weight.item()
    saved = {"models": [nn.Linear(1, 1), nn.Linear(1, 1)]}
    resume(saved, found, only=["nets[0]"], map={"nets": "models"})
    assert found["nets"][0].weight.item() == saved["models"][0].weight.item()
    assert found["nets"][1].weight.item() == before


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


def test_tensors_under_odd_keys_find_theirs_whatever_the_order() -> None:
    first, second = torch.zeros(1), torch.zeros(1)
    resume({"v": {(1,): torch.ones(1), (2,): torch.full((1,), 2.0)}}, found := {"v": {(2,): second, (1,): first}})
    assert (first.item(), second.item(), list(found["v"])) == (1, 2, [(1,), (2,)])


def test_another_name_of_a_tensor_gives_that_tensor() -> None:
    weight = torch.ones(3)
    state: dict[str, Any] = {"of the state": torch.zeros(3), "made": None}
    resume({"of the state": weight, "made": weight}, state)
    assert state["made"] is state["of the state"]
    assert torch.equal(state["made"], weight)


def test_a_tied_tensor_made_elsewhere_is_not_unexpected() -> None:
    t = torch.ones(3)
    for found in ({"a": t.clone(), "v": {(0,): []}}, {"a": None, "v": {(0,): None}}):
        result = resume({"a": t, "v": {(0,): [0, t]}}, found)
        assert (result.unexpected, result.differences) == ((), ())


def test_two_names_in_a_self_loading_object_are_expected() -> None:
    class Twice:
        def __init__(self, value: float) -> None:
            self.held = {"one": (t := torch.full((2,), value)), "other": t}

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.held

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.held = state

    result = resume({"o": Twice(1)}, found := {"o": Twice(0)})
    assert (result.unexpected, result.differences) == ((), ())
    assert found["o"].held["one"] is found["o"].held["other"]
