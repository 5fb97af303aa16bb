"""The short way of an optimizer that is as it was saved, and that nothing else takes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from aiockpt.adapters import target
from aiockpt.adapters.optimizer_exact import load_exactly
from aiockpt.errors import StateMismatchError
from tests.adapters.conftest import resume, same

State = dict[str, Any]
Change = Callable[[State], object]


def trained(seed: int, cls: Any = AdamW, **how: Any) -> State:
    """Return a model with a shared layout, and its optimizer of two groups, after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[0].parameters()), "lr": 0.1 * seed}, {"params": list(model[1].parameters())}]
    optimizer = cls(groups, lr=0.01 * seed, **how)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets whether each optimizer took the short way."""
    short: list[bool] = []

    def load(*args: Any) -> bool:
        short.append(load_exactly(*args))
        return short[-1]

    monkeypatch.setattr(target, "load_exactly", load)
    return short


@pytest.mark.parametrize(
    ("cls", "how"), [(AdamW, {}), (Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9}), (AdamW, {"betas": (0.5, 0.6)})]
)
def test_an_unchanged_optimizer_takes_the_exact_short_way(cls: Any, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short, saved, into = watched(monkeypatch), trained(1, cls, **how), trained(2, cls, **how)
    moments = {key: value for state in into["optimizer"].state.values() for key, value in state.items()}
    resume(saved, into)
    assert short == [True]
    assert same(into["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert into["step"] == 1
    kept = {key: value for state in into["optimizer"].state.values() for key, value in state.items()}
    assert all(kept[key] is moments[key] for key in moments)


def test_a_scheduler_goes_on_with_an_optimizer_of_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    short, saved, into = watched(monkeypatch), trained(1), trained(2)
    for state in (saved, into):
        state["schedule"] = StepLR(state["optimizer"], 3)
    saved["optimizer"].step()
    saved["schedule"].step()
    resume(saved, into)
    assert short == [True]
    assert into["schedule"].state_dict() == saved["schedule"].state_dict()


def in_each_entry(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Return a change of the state of every parameter."""

    def change(state: State) -> None:
        for entry in state["optimizer"].state.values():
            entry.update(changed(entry))

    return change


def first_parameter(state: State) -> torch.Tensor:
    found: torch.Tensor = state["optimizer"].param_groups[0]["params"][0]
    return found


CHANGES: dict[str, Change] = {
    "without state": lambda state: state["optimizer"].state.clear(),
    "one state less": lambda state: state["optimizer"].state.pop(first_parameter(state)),
    "a tensor as rate": lambda state: state["optimizer"].param_groups[0].update(lr=torch.tensor(3.0)),
    "a value of its own": in_each_entry(lambda entry: {"note": 3}),
    "state of no parameter": lambda state: state["optimizer"].state.update(shared={"count": 1}),
    "views": in_each_entry(lambda entry: {"exp_avg": torch.ones((*entry["exp_avg"].shape, 2))[..., 0]}),
    "one moment for two": in_each_entry(lambda entry: {"exp_avg": entry["exp_avg_sq"]}),
    "another dtype": in_each_entry(lambda entry: {"exp_avg": entry["exp_avg"].half()}),
    "a method of its own": lambda state: setattr(state["optimizer"], "state_dict", state["optimizer"].state_dict),
}


def outcome(change: Change, of: str, **how: Any) -> tuple[Any, str]:
    """Return what a load makes of the optimizer where one of two states was changed, and what it raised."""
    states = {"saved": trained(1), "here": trained(2)}
    change(states[of])
    try:
        resume(states["saved"], states["here"], **how)
    except StateMismatchError as error:
        return None, str(error)
    return states["here"]["optimizer"].state_dict(), ""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("of", ["saved", "here"])
@pytest.mark.parametrize("strict", [True, False])
def test_what_differs_is_loaded_as_by_the_long_way(
    change: Change, of: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, raised = outcome(change, of, strict=strict)
    monkeypatch.setattr(target, "load_exactly", lambda *_: False)
    expected, refusal = outcome(change, of, strict=strict)
    assert raised == refusal
    assert same(got, expected)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_only_what_is_as_saved_or_empty_takes_the_short_way(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    short = watched(monkeypatch)
    outcome(change, "here", strict=False)
    assert short == [change is CHANGES["without state"]]


@pytest.mark.parametrize("merged", [True, False])
def test_other_groups_take_the_long_way(merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    short, saved, into = watched(monkeypatch), trained(1), trained(2)
    layers = [into["model"]] if merged else reversed(into["model"])
    into["optimizer"] = AdamW([{"params": list(layer.parameters())} for layer in layers])
    resume(saved, into, strict=False)
    assert short == [False]
