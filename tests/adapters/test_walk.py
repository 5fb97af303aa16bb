"""Walks of a state: what they return and refuse; a warm one is never stale."""

import contextlib
import gc
import weakref
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import nn

from aiockpt.adapters import watch
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.rng import RNG, per_rank
from aiockpt.errors import UnsupportedStateError
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.shards import ShardedState
from tests.example_counts import examples

Job = dict[str, Any]
ONE = torch.ones(1)


class Counter:
    """An object with a state, one tensor in it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=torch.tensor(0.1), foreach=False
    )
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "counter": Counter(),
        "rng": RNG(),
        "ema": {"w": torch.ones(2, 2), "deep": OrderedDict(v=torch.ones(3), n=1)},
        "history": [0.5],
        "step": 0,
    }
    train(state)
    return state


def train(state: Job) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(5, 3)).square().sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["counter"].count += 1
    state["history"].append(state["step"])
    state["step"] += 1


def facts(walked: ShardedState) -> Any:
    """All that a walk says, and where the memory is."""
    tensors = [
        (s.name, s.dtype, s.shape, s.boxes, s.data.data_ptr(), s.data.stride(), s.data.dtype, s.data.tolist())
        for s in walked.tensors
    ]
    return tensors, dict(walked.alias), walked.values, walked.per_rank, walked.structure


def test_a_warm_walk_reads_values_and_memory_as_they_are_now() -> None:
    state, walker = job(), StateWalker()
    first = walker.walk(state)
    for _ in range(3):
        train(state)
        walked = walker.walk(state)
        assert facts(walked) == facts(StateWalker().walk(state))
        assert walked.structure == first.structure
        assert walked.values != first.values
    assert walker.cold_walks == 1


def test_another_dict_of_the_same_objects_is_still_a_warm_walk() -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    walker.walk({**state, "step": 7, "ema": dict(state["ema"])})
    assert walker.cold_walks == 1


CHANGES = {
    "swap parameter": "model[0].weight = nn.Parameter(torch.full((4, 3), 9.0))",
    "swap data": "model[0].weight.data = torch.full((4, 3), 9.0)",
    "swap data for another dtype": "ema['w'].data = ema['w'].data.view(torch.int32)",
    "transpose data": "model[2][0].weight.data = model[2][0].weight.data.t()",
    "resize": "ema['w'].resize_(2, 1)",
    "move storage": "move_storage(ema['w'])",
    "free storage": "ema['w'].untyped_storage().resize_(0)",
    "tie": "model[2].append(nn.Linear(4, 4, bias=False)); model[2][0].weight = nn.Parameter(torch.ones(4, 4)); "
    "model[2][1].weight = model[2][0].weight",
    "tie in place": "ema['deep']['v'] = model[1].bias[:3]",
    "swap buffer": "model[1].running_mean = torch.ones(4)",
    "drop bias": "model[0].bias = None",
    "rename parameter": "model[0]._parameters['other'] = model[0]._parameters.pop('bias')",
    "replace child": "model[2][0] = nn.Linear(4, 2)",
    "append child": "model.append(nn.Linear(4, 4))",
    "hide buffer": "model[1]._non_persistent_buffers_set.add('running_var')",
    "new parameter dict": "model[0]._parameters = {'weight': nn.Parameter(torch.ones(1))}",
    "hook": "model[2][0]._register_state_dict_hook(say_more)",
    "new hook dict": "model[2][0]._state_dict_hooks = OrderedDict({1: say_more})",
    "override saving": "model.state_dict = lambda: {'w': ONE}",
    "override loading": "model.load_state_dict = lambda found: None",
    "new attributes": "model[2][0].__dict__ = {**vars(model[2][0]), '_parameters': {'weight': nn.Parameter(ONE)}}",
    "change class": "model.__class__ = OwnSequential",
    "swap moment": "optimizer.state[model[0].weight]['exp_avg'] = torch.ones(4, 3)",
    "swap state of a parameter": "states = optimizer.state; weight = model[0].weight; "
    "states[weight] = dict(zip(states[weight], [value + 1 for value in states[weight].values()], strict=True))",
    "drop state": "del optimizer.state[model[0].weight]",
    "new state": "optimizer.state = type(optimizer.state)(dict)",
    "value in state": "optimizer.state[model[0].weight]['seen'] = 1",
    "add group": "optimizer.add_param_group({'params': list(model[1].parameters())})",
    "new groups": "optimizer.param_groups = optimizer.param_groups[:1]",
    "reorder group": "optimizer.param_groups[0]['params'].reverse()",
    "new group members": "optimizer.param_groups[0]['params'] = [model[0].weight]",
    "new group value": "optimizer.param_groups[0]['extra'] = 5",
    "hook optimizer": "optimizer.register_state_dict_post_hook(lambda _, found: found['param_groups'][0].update(more=1))",
    "override saving of the optimizer": "optimizer.state_dict = lambda: {'own': ONE}",
    "change optimizer class": "optimizer.__class__ = OwnAdamW",
    "swap optimizer": "state['optimizer'] = torch.optim.SGD(model.parameters())",
    "swap object": "state['counter'] = Counter()",
    "swap tensor": "ema['w'] = torch.ones(2, 2)",
    "tensor for value": "state['step'] = torch.ones(1)",
    "value for tensor": "ema['w'] = 1",
    "module for value": "state['history'] = nn.Linear(1, 1)",
    "module in value": "state['fresh'] = {}; StateWalker().walk(state); state['fresh']['m'] = nn.Linear(1, 1)",
    "add key": "state['more'] = torch.ones(1)",
    "remove key": "del ema['w']",
    "reorder keys": "state['model'] = state.pop('model')",
    "tensor in object": "state['counter'].mean = torch.ones(5)",
    "tie in object": "state['counter'].mean = ema['deep']['v']",
    "freeze": "model[0].weight.requires_grad_(False)",
    "evaluate": "model.eval()",
    "train": "train(state)",
}
"""What a program may do to its state, as source."""


def change(state: Job, name: str) -> None:
    """Do it."""
    exec(CHANGES[name], globals(), {**state, "state": state})


def say_more(module: nn.Module, found: Any, *_: Any) -> None:
    found.update(more=ONE)


class OwnSequential(nn.Sequential):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"own": ONE}


class OwnAdamW(torch.optim.AdamW):
    def state_dict(self) -> Any:
        return {"own": ONE}


def move_storage(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    held = [torch.ones(4096)]  # takes the freed memory, so that the new one is elsewhere
    storage.resize_(0)
    held.append(torch.ones(4))
    storage.resize_(16)
    tensor.fill_(3)


def walk_or_refuse(walker: StateWalker, state: Job) -> Any:
    try:
        return facts(walker.walk(state))
    except (UnsupportedStateError, KeyError) as error:  # torch's own state_dict() raises KeyError for a lost parameter
        return str(error)


@pytest.fixture(params=["guards", "twins"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are watched: the way of every torch that has guards, and that of one without."""
    if request.param == "twins":
        monkeypatch.setattr(watch, "_guards", lambda _: None)
    return str(request.param)


def test_this_torch_has_guards() -> None:
    check = watch._guards([torch.ones(2), torch.ones(3)[1:]])
    assert check is not None
    assert check()


@pytest.mark.usefixtures("way")
def test_a_state_that_did_not_change_is_not_walked_again() -> None:
    state, walker = job(), StateWalker()
    for _ in range(3):
        walker.walk(state)
    assert walker.cold_walks == 1


@pytest.mark.usefixtures("way")
def test_a_walk_is_right_in_inference_mode_too() -> None:
    state, walker = job(), StateWalker()
    expected = facts(walker.walk(state))
    with torch.inference_mode():
        assert facts(walker.walk(state)) == expected
    assert facts(walker.walk(state)) == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", CHANGES)
def test_a_cached_walk_is_never_served_over_a_changed_state(name: str) -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    change(state, name)
    expected = walk_or_refuse(StateWalker(), state)
    assert walk_or_refuse(walker, state) == expected
    assert walk_or_refuse(walker, state) == expected


@pytest.mark.parametrize("name", ["new parameter dict", "swap parameter", "append child", "swap optimizer"])
def test_names_of_a_hooked_module_are_not_overlooked(name: str) -> None:
    state, walker = job(), StateWalker()
    change(state, "hook")
    walker.walk(state)
    change(state, name)
    assert walk_or_refuse(walker, state) == walk_or_refuse(StateWalker(), state)


def test_what_is_added_at_the_very_end_is_not_overlooked() -> None:
    model, walker = nn.Linear(1, 1), StateWalker()
    walker.walk({"model": model})
    model.register_parameter("last", nn.Parameter(torch.ones(1)))
    assert [shard.name for shard in walker.walk({"model": model}).tensors][-1] == "model.last"


def test_a_value_of_optimizer_state_that_is_renamed_is_not_overlooked() -> None:
    state, walker = job(), StateWalker()
    entry = state["optimizer"].state[state["model"][0].weight]
    entry["seen"] = 1
    walker.walk(state)
    entry["saw"] = entry.pop("seen")
    assert facts(walker.walk(state)) == facts(StateWalker().walk(state))


@pytest.mark.usefixtures("way")
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(list(CHANGES)), min_size=2, max_size=6, unique=True))
@example(["new state", "hook optimizer", "new groups"])
@example(["add key", "hook"])
def test_no_sequence_of_changes_is_overlooked(names: list[str]) -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    for name in names:
        with contextlib.suppress(Exception):  # an earlier change may have taken away what this one needs
            change(state, name)
        assert walk_or_refuse(walker, state) == walk_or_refuse(StateWalker(), state)


def test_forgetting_lets_go_of_the_last_state() -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    alive = weakref.ref(state["model"])
    del state
    gc.collect()
    assert alive() is not None
    walker.release()
    gc.collect()
    assert alive() is None


def test_a_walk_leaves_the_state_as_it_is() -> None:
    state = job()
    before = facts(StateWalker().walk(state))
    state["optimizer"].state.default_factory = None  # a look at a missing key would raise
    assert facts(StateWalker().walk(state)) == before


def holding(inner: Any, depth: int) -> list[Any]:
    for _ in range(depth):
        inner = [inner]
    return [inner]


def cyclic() -> nn.Module:
    outer, inner = nn.Module(), nn.Module()
    outer.child, outer.other, inner.parent = inner, inner, outer
    return outer


def itself(value: dict[str, Any]) -> dict[str, Any]:
    value["self"], value["again"] = value, value
    return value


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [object()]}}, r"^a.b\[0\]: an object cannot be saved without pickle"),
        ({"act": torch.relu}, "^act: a function cannot be saved without pickle"),
        ({"act": lambda: None}, "^act: a function cannot be saved without pickle"),
        ({"act": int}, "^act: the class int cannot be saved without pickle"),
        ([], "^the state: a list; give a dict"),
        ({"a": deque([nn.Linear(1, 1)])}, r"^a\[0\]: .*a place in a dict, list or tuple"),
        ({"a": {(1,): nn.Linear(1, 1)}}, r"^a: the key \(1,\) cannot name the object"),
        (
            {"o": {key: torch.optim.SGD([key]) for key in [nn.Parameter(torch.zeros(3, 2))]}},
            r"^o: a tensor of shape \(3, 2\) is a key here.*give list\(….values\(\)\)",
        ),
        ({1: 2}, "the key 1 is not text"),
        ({"a": nn.Linear}, r"^a: .*cannot be saved"),
        ({"a": torch.Generator()}, r"^a: .*cannot be saved"),
        ([1], "give a dict"),
        (None, "give a dict"),
        ({"a": itself({})}, "nested deeper"),
        (itself({"t": torch.ones(1)}), "nested deeper"),
        ({"a": holding([], 5000)}, "nested deeper"),
        ({"a": {"b": holding(nn.ReLU(), 5000)}}, "nested deeper"),
        ({"m": cyclic()}, "nested deeper"),
        ({"m": [cyclic(), 1]}, "nested deeper"),
        ({"a": per_rank(torch.ones(1)), "a@rank0": torch.ones(1)}, "same name"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(state: Any, message: str) -> None:
    with pytest.raises(UnsupportedStateError, match=message):
        StateWalker().walk(state)


def test_keys_that_are_no_text_have_names_of_their_own() -> None:
    keys = {(0,): torch.ones(1), "#0": torch.ones(1), "##0": torch.ones(1), None: torch.ones(1), 1.5: torch.ones(1)}
    walked = StateWalker().walk({"a": {**keys, 1: torch.ones(1), "1": torch.ones(1)}})
    assert len({shard.name for shard in walked.tensors}) == 7


def test_values_that_no_reader_accepts_are_refused() -> None:
    walker, state = StateWalker(), {"text": "x"}
    walker.walk(state)
    state["text"] = "x" * (17 << 20)
    for each in (walker, StateWalker()):
        with pytest.raises(UnsupportedStateError, match="use tensors"):
            each.walk(state)


def test_names_that_no_reader_would_accept_are_refused_too() -> None:
    model = nn.ModuleDict({"x" * 950: nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(18_000)])})
    with pytest.raises(UnsupportedStateError, match="use tensors"):
        StateWalker().walk({"model": model, "optimizer": torch.optim.SGD(model.parameters())})


def test_codecs_of_the_user_are_used() -> None:
    class Own: ...

    codecs = CodecRegistry()
    codecs.register_codec("own", Own, lambda _: 5, lambda _: Own())
    assert StateWalker(codecs).walk({"a": Own()}).values == {"a": {"$": "codec", "name": "own", "value": 5}}


def test_a_key_named_like_the_tag_is_no_tag() -> None:
    walked = StateWalker().walk({"a": {"$": "tensor", "name": torch.ones(1)}})
    assert walked.values == {
        "a": {"$": "dict", "items": [["$", "tensor"], ["name", {"$": "tensor", "name": "a.name"}]]}
    }


def test_a_renamed_parameter_has_its_new_name() -> None:
    class Own(nn.Linear):
        def state_dict(self, *given: Any, **how: Any) -> Any:
            return {"all": torch.cat([one.detach().view(-1) for one in self.parameters()])}

    module = nn.Sequential(Own(2, 2))
    state = {"m": module, "o": torch.optim.SGD(module.parameters())}
    walker = StateWalker()
    for _ in range(2):
        walker.walk(state)
    assert walker.cold_walks == 1
    module[0].register_parameter("shift", module[0]._parameters.pop("bias"))
    assert "m.0.shift" in str(walker.walk(state).values)


def nest() -> Job:
    return {"layers": {name: {"w": torch.full((2,), float(n)), "b": torch.zeros(1)} for n, name in enumerate("abc")}}


REPLACEMENTS: dict[str, Any] = {
    "a tensor": lambda state: state["layers"]["b"].update(w=torch.full((2,), 7.0)),
    "a dict": lambda state: state["layers"].update(b={"w": torch.full((2,), 7.0), "b": torch.zeros(1)}),
    "all dicts": lambda state: state.update(nest()),
    "a key": lambda state: state["layers"]["b"].update(more=state["layers"]["b"].pop("w")),
    "a value instead of a tensor": lambda state: state["layers"]["b"].update(w=3),
    "one tensor less": lambda state: state["layers"]["b"].pop("w"),
    "one tensor more": lambda state: state["layers"]["b"].update(more=torch.ones(1)),
    "one dict less": lambda state: state["layers"].pop("b"),
    "another order": lambda state: state["layers"]["b"].update(w=state["layers"]["b"].pop("w")),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_a_change_in_nested_dicts_is_found(what: str) -> None:
    walker, state = StateWalker(), nest()
    walker.walk(state)
    walker.walk(state)
    assert walker.cold_walks == 1
    REPLACEMENTS[what](state)
    warm, cold = walker.walk(state), StateWalker().walk(state)
    assert walker.cold_walks == 2
    assert warm.values == cold.values
    assert list(warm.values["layers"]) == list(cold.values["layers"])
    assert [shard.name for shard in warm.tensors] == [shard.name for shard in cold.tensors]
    assert all(torch.equal(own.data, other.data) for own, other in zip(warm.tensors, cold.tensors, strict=True))


def test_dicts_made_anew_need_no_cold_walk() -> None:
    walker, state = StateWalker(), nest()
    first = walker.walk(state)
    again = {"layers": {name: dict(layer) for name, layer in state["layers"].items()}}
    second = walker.walk(again)
    assert walker.cold_walks == 1
    assert second.tensors is first.tensors
    assert second.values == first.values
