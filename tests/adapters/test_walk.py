"""What does a walk give, what does it refuse, and is a warm one ever stale?"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import nn

from aiockpt.adapters import watch
from aiockpt.adapters.native import RNG, StateWalker, per_rank
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


def swap_parameter(state: Job) -> None:
    state["model"][0].weight = nn.Parameter(torch.full((4, 3), 9.0))


def swap_data(state: Job) -> None:
    state["model"][0].weight.data = torch.full((4, 3), 9.0)


def swap_data_for_another_dtype(state: Job) -> None:
    state["ema"]["w"].data = state["ema"]["w"].data.view(torch.int32)


def transpose_data(state: Job) -> None:
    weight = state["model"][2][0].weight
    weight.data = weight.data.t()


def resize(state: Job) -> None:
    state["ema"]["w"].resize_(2, 1)


def move_storage(state: Job) -> None:
    storage = state["ema"]["w"].untyped_storage()
    held = [torch.ones(4096)]  # takes the freed memory, so that the new one is elsewhere
    storage.resize_(0)
    held.append(torch.ones(4))
    storage.resize_(16)
    state["ema"]["w"].fill_(3)


def free_storage(state: Job) -> None:
    state["ema"]["w"].untyped_storage().resize_(0)


def tie(state: Job) -> None:
    state["model"][2][0].weight = nn.Parameter(torch.ones(4, 4))
    state["model"][2].append(nn.Linear(4, 4, bias=False))
    state["model"][2][1].weight = state["model"][2][0].weight


def tie_in_place(state: Job) -> None:
    state["ema"]["deep"]["v"] = state["model"][1].bias[:3]


def swap_buffer(state: Job) -> None:
    state["model"][1].running_mean = torch.ones(4)


def drop_bias(state: Job) -> None:
    state["model"][0].bias = None


def rename_parameter(state: Job) -> None:
    parameters = state["model"][0]._parameters
    parameters["other"] = parameters.pop("bias")


def replace_child(state: Job) -> None:
    state["model"][2][0] = nn.Linear(4, 2)


def append_child(state: Job) -> None:
    state["model"].append(nn.Linear(4, 4))


def hide_buffer(state: Job) -> None:
    state["model"][1]._non_persistent_buffers_set.add("running_var")


def new_parameter_dict(state: Job) -> None:
    state["model"][0]._parameters = {"weight": nn.Parameter(torch.ones(1))}


def hook(state: Job) -> None:
    state["model"][2][0]._register_state_dict_hook(lambda module, found, *_: found.update(more=ONE))


def new_hook_dict(state: Job) -> None:
    state["model"][2][0]._state_dict_hooks = OrderedDict({1: lambda module, found, *_: found.update(more=ONE)})


def override_saving(state: Job) -> None:
    state["model"].state_dict = lambda: {"w": ONE}


def override_loading(state: Job) -> None:
    state["model"].load_state_dict = lambda found: None


def new_attributes(state: Job) -> None:
    module = state["model"][2][0]
    module.__dict__ = {**vars(module), "_parameters": {"weight": nn.Parameter(torch.ones(1))}}


def change_class(state: Job) -> None:
    class Own(nn.Sequential):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"own": ONE}

    state["model"].__class__ = Own


def swap_moment(state: Job) -> None:
    state["optimizer"].state[state["model"][0].weight]["exp_avg"] = torch.ones(4, 3)


def swap_state_of_a_parameter(state: Job) -> None:
    states = state["optimizer"].state
    states[state["model"][0].weight] = {key: value + 1 for key, value in states[state["model"][0].weight].items()}


def forget_state(state: Job) -> None:
    del state["optimizer"].state[state["model"][0].weight]


def new_state(state: Job) -> None:
    state["optimizer"].state = type(state["optimizer"].state)(dict)


def value_in_state(state: Job) -> None:
    state["optimizer"].state[state["model"][0].weight]["seen"] = 1


def add_group(state: Job) -> None:
    state["optimizer"].add_param_group({"params": list(state["model"][1].parameters())})


def new_groups(state: Job) -> None:
    state["optimizer"].param_groups = state["optimizer"].param_groups[:1]


def reorder_group(state: Job) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def new_group_members(state: Job) -> None:
    state["optimizer"].param_groups[0]["params"] = [state["model"][0].weight]


def new_group_value(state: Job) -> None:
    state["optimizer"].param_groups[0]["extra"] = 5


def hook_optimizer(state: Job) -> None:
    state["optimizer"].register_state_dict_post_hook(lambda _, found: found["param_groups"][0].update(more=1))


def change_optimizer_class(state: Job) -> None:
    class Own(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return {"own": ONE}

    state["optimizer"].__class__ = Own


def swap_optimizer(state: Job) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())


def swap_object(state: Job) -> None:
    state["counter"] = Counter()


def swap_tensor(state: Job) -> None:
    state["ema"]["w"] = torch.ones(2, 2)


def tensor_for_value(state: Job) -> None:
    state["step"] = torch.ones(1)


def value_for_tensor(state: Job) -> None:
    state["ema"]["w"] = 1


def module_for_value(state: Job) -> None:
    state["history"] = nn.Linear(1, 1)


def module_in_value(state: Job) -> None:
    state["fresh"] = {}
    StateWalker().walk(state)
    state["fresh"]["m"] = nn.Linear(1, 1)


def add_key(state: Job) -> None:
    state["more"] = torch.ones(1)


def remove_key(state: Job) -> None:
    del state["ema"]["w"]


def reorder_keys(state: Job) -> None:
    state["model"] = state.pop("model")


def tensor_in_object(state: Job) -> None:
    state["counter"].mean = torch.ones(5)


def tie_in_object(state: Job) -> None:
    state["counter"].mean = state["ema"]["deep"]["v"]


def freeze(state: Job) -> None:
    state["model"][0].weight.requires_grad_(False)


def evaluate(state: Job) -> None:
    state["model"].eval()


CHANGES: list[Callable[[Job], None]] = [
    swap_parameter, swap_data, swap_data_for_another_dtype, transpose_data, resize, move_storage, free_storage,
    tie, tie_in_place, swap_buffer, drop_bias, rename_parameter, replace_child, append_child, hide_buffer,
    new_parameter_dict, hook, new_hook_dict, override_saving, override_loading, new_attributes, change_class,
    swap_moment, swap_state_of_a_parameter, forget_state, new_state, value_in_state, add_group, new_groups,
    reorder_group, new_group_members, new_group_value, hook_optimizer, change_optimizer_class, swap_optimizer,
    swap_object, swap_tensor, tensor_for_value, value_for_tensor, module_for_value, module_in_value, add_key,
    remove_key, reorder_keys, tensor_in_object, tie_in_object, freeze, evaluate, train,
]  # fmt: skip


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
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_a_cached_walk_is_never_served_over_a_changed_state(change: Callable[[Job], None]) -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    change(state)
    expected = walk_or_refuse(StateWalker(), state)
    assert walk_or_refuse(walker, state) == expected
    assert walk_or_refuse(walker, state) == expected


@pytest.mark.parametrize("change", [new_parameter_dict, swap_parameter, append_child, swap_optimizer])
def test_names_of_a_hooked_module_are_not_overlooked(change: Callable[[Job], None]) -> None:
    state, walker = job(), StateWalker()
    hook(state)
    walker.walk(state)
    change(state)
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
@given(st.lists(st.sampled_from(CHANGES), min_size=2, max_size=6, unique=True))
@example([new_state, hook_optimizer, new_groups])
def test_no_sequence_of_changes_is_overlooked(changes: list[Callable[[Job], None]]) -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    for change in changes:
        with contextlib.suppress(Exception):  # an earlier change may have taken away what this one needs
            change(state)
        assert walk_or_refuse(walker, state) == walk_or_refuse(StateWalker(), state)


def test_forgetting_lets_go_of_the_last_state() -> None:
    state, walker = job(), StateWalker()
    walker.walk(state)
    alive = weakref.ref(state["model"])
    del state
    gc.collect()
    assert alive() is not None
    walker.forget()
    gc.collect()
    assert alive() is None


def test_a_walk_leaves_the_state_as_it_is() -> None:
    state = job()
    before = facts(StateWalker().walk(state))
    state["optimizer"].state.default_factory = None  # a look at a missing key would raise
    assert facts(StateWalker().walk(state)) == before


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
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(state: Any, message: str) -> None:
    with pytest.raises(UnsupportedStateError, match=message):
        StateWalker().walk(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    plain: dict[str, Any] = {}
    plain["self"], plain["again"] = plain, plain
    holding: dict[str, Any] = {"t": torch.ones(1)}
    holding["self"], holding["again"] = holding, holding
    for state in ({"a": plain}, holding):
        with pytest.raises(UnsupportedStateError, match="nested deeper"):
            StateWalker().walk(state)


def test_what_is_nested_beyond_all_limits_is_refused() -> None:
    plain: list[Any] = []
    holding: Any = [torch.nn.ReLU()]
    for _ in range(5000):
        plain, holding = [plain], [holding]
    cyclic, leaf = torch.nn.Module(), torch.nn.Module()
    cyclic.child, cyclic.other, leaf.parent = leaf, leaf, cyclic
    for state in ({"a": plain}, {"a": {"b": holding}}, {"m": cyclic}, {"m": [cyclic, 1]}):
        with pytest.raises(UnsupportedStateError, match="nested deeper"):
            StateWalker().walk(state)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="same name"):
        StateWalker().walk({"a": per_rank(torch.ones(1)), "a@rank0": torch.ones(1)})


def test_keys_that_are_no_text_have_names_of_their_own() -> None:
    keys = {(0,): torch.ones(1), "#0": torch.ones(1), "##0": torch.ones(1), None: torch.ones(1), 1.5: torch.ones(1)}
    walked = StateWalker().walk({"a": {**keys, 1: torch.ones(1), "1": torch.ones(1)}})
    assert len({shard.name for shard in walked.tensors}) == 7


def test_values_that_no_reader_would_accept_are_refused_at_once_and_later() -> None:
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
