"""Every optimizer of torch, continued bit by bit, whichever way its state was saved and loaded. Through the public API."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt

State = dict[str, Any]

CLASSES: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "Muon": {"lr": 0.1},
    "NAdam": {"lr": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "weight decay": {"weight_decay": 0.1},
    "tensor lr": {"lr": torch.tensor(0.1), "foreach": False},
}
SHAPES = ("groups", "a group added after the load", "a group added before", "frozen", "bf16", "complex", "by name")
CANNOT: dict[str, set[str]] = {
    "ASGD": {"fused", "tensor lr"},
    "Adadelta": {"fused"},
    "Adafactor": {"fused", "complex"},
    "Adagrad": {"tensor lr"},
    "Adam": set(),
    "AdamW": set(),
    "Adamax": {"fused", "tensor lr"},
    "LBFGS": {*OPTIONS, "groups", "a group added after the load", "a group added before", "complex"} - {"as it is"},
    "Muon": {"foreach", "one by one", "fused", "maximize", "tensor lr", "complex"},
    "NAdam": {"fused", "tensor lr"},
    "RAdam": {"fused", "tensor lr"},
    "RMSprop": {"fused", "tensor lr"},
    "Rprop": {"fused", "weight decay", "tensor lr"},
    "SGD": set(),
    "SparseAdam": {"foreach", "one by one", "fused", "weight decay", "tensor lr", "complex", "bf16"},
}
"""What torch itself refuses, or does not have. (``capturable`` needs a GPU.)"""
HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable")
"""Not of the state; a load by torch adds some of them to new groups."""
CASES = [(name, shape) for name in CLASSES for shape in (*OPTIONS, *SHAPES) if shape not in CANNOT[name]]


class Net(nn.Module):
    """A matrix, another one, a vector and one number; Muon wants matrices, and SparseAdam what can be sparse."""

    def __init__(self, dtype: torch.dtype, only_matrices: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(3, 4, dtype=dtype)) for _ in range(2))
        if not only_matrices:
            self.bias = nn.Parameter(torch.randn(4, dtype=dtype))
            self.scale = nn.Parameter(torch.randn((), dtype=dtype))


def job(name: str, shape: str, seed: int, *, added: bool = False) -> State:
    torch.manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "complex": torch.complex64}.get(shape, torch.float32)
    model = Net(dtype, only_matrices=name in ("Muon", "SparseAdam"))
    if shape == "frozen":
        model.second.requires_grad_(False)
    options = {**CLASSES[name], **OPTIONS.get(shape, {})}
    parameters: Any = list(model.parameters())
    if shape == "by name":
        parameters = list(model.named_parameters())
    elif shape == "groups":
        parameters = [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}]
    elif shape.startswith("a group added"):
        parameters = parameters[:1]
    state = {"model": model, "optimizer": getattr(torch.optim, name)(parameters, **options)}
    if shape == "a group added before" or added:
        add_group(state)
    return state


def add_group(state: State) -> None:
    state["optimizer"].add_param_group({"params": list(state["model"].parameters())[1:], "lr": 0.02})


def train(state: State, steps: int) -> None:
    """Make steps whose gradients follow from the values, and change from step to step."""
    sparse = isinstance(state["optimizer"], torch.optim.SparseAdam)
    for _ in range(steps):

        def closure() -> float:
            loss = 0.0
            for parameter in state["model"].parameters():
                if parameter.requires_grad:
                    gradient = parameter.detach() * 2 + 0.5
                    parameter.grad = gradient.to_sparse() if sparse else gradient
                    loss += float((gradient.abs() ** 2).sum())
            return loss

        closure()
        state["optimizer"].step(closure if isinstance(state["optimizer"], torch.optim.LBFGS) else None)


def held(state: State) -> Iterator[Any]:
    """Everything that counts, types and order included."""
    yield from (parameter.detach() for parameter in state["model"].parameters())
    for parameter in state["model"].parameters():
        yield from _flat(dict(state["optimizer"].state.get(parameter, {})))
    for group in state["optimizer"].param_groups:
        yield from _flat({key: value for key, value in group.items() if key not in ("params", *HOW_TO_STEP)})


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield key
            yield from _flat(value[key])
    elif isinstance(value, list | tuple):
        yield type(value)
        for item in value:
            yield from _flat(item)
    else:
        yield value


def same(one: State, other: State) -> None:
    ours, theirs = list(held(one)), list(held(other))
    assert list(map(type, ours)) == list(map(type, theirs))
    for mine, its in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
            assert torch.equal(mine, its)
        else:
            assert mine == its


def as_it_is(state: State) -> State:
    return state


def as_dict(state: State) -> State:
    return {**state, "optimizer": state["optimizer"].state_dict()}


def nothing(found: State, loaded: State) -> None:
    pass


def load_dict(found: State, loaded: State) -> None:
    found["optimizer"].load_state_dict(loaded["optimizer"])


ROUTES: dict[str, tuple[Callable[[State], State], Callable[[State], State], Callable[[State, State], None]]] = {
    "object to object": (as_it_is, as_it_is, nothing),
    "dict to object": (as_dict, as_it_is, nothing),
    "object to dict": (as_it_is, as_dict, load_dict),
}


@pytest.fixture(scope="module")
def ckpt() -> Iterator[aiockpt.Checkpointer]:
    with aiockpt.Checkpointer("memory://every-optimizer", retention=aiockpt.Retention(last=2)) as checkpointer:
        yield checkpointer


WAYS = (("object to object", 0), ("object to dict", 2), ("object to object", 2), ("dict to object", 0))
"""Each with the count of steps that were made where it is loaded; a case takes two, and its neighbours the others."""
STEPS = count(1)


@pytest.mark.parametrize(("name", "shape"), CASES, ids=["-".join(case) for case in CASES])
def test_an_optimizer_goes_on_bit_by_bit(ckpt: aiockpt.Checkpointer, name: str, shape: str) -> None:
    mine = CASES.index((name, shape))
    for route, begun in (WAYS[mine % 4], WAYS[(mine + 1) % 4]):
        if (route, shape) == ("object to dict", "bf16") and name in ("ASGD", "NAdam"):
            continue  # torch's load_state_dict() rounds what was float32
        if (route, name) == ("object to dict", "LBFGS"):
            begun = 0  # a number in a dict of plain values stays one, and its step size may be either
        give, template, take = ROUTES[route]
        state, found = job(name, shape, 1), job(name, shape, 2)
        train(state, 2)
        train(found, begun)
        wanted, step = template(found), next(STEPS)
        ckpt.save(step, give(state)).result()
        loaded = ckpt.load(wanted, step).result()
        assert loaded is not None
        assert (loaded.missing, loaded.unexpected, loaded.differences) == ((), (), ()), route
        take(found, wanted)
        for one in (state, found) if shape == "a group added after the load" else ():
            add_group(one)
        same(state, found)
        train(state, 3)
        train(found, 3)
        same(state, found)
