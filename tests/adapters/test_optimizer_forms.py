"""Whichever way an optimizer was saved, it loads into the object, and into every other form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from aiockpt.errors import StateMismatchError
from tests.adapters.conftest import Thing
from tests.adapters.test_optimizers import State, build, train, two_groups

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Give = Callable[[State], Any]
GIVE: dict[str, Give] = {
    "object": lambda state: state["optimizer"],
    "state_dict": lambda state: state["optimizer"].state_dict(),
    "by name": lambda state: get_optimizer_state_dict(state["model"], state["optimizer"]),
    "flat": lambda state: get_optimizer_state_dict(state["model"], state["optimizer"], options=FLAT),
}
TAKE: dict[str, Callable[[State, Any], object]] = {
    "object": lambda state, value: None,
    "state_dict": lambda state, value: state["optimizer"].load_state_dict(value),
    "by name": lambda state, value: set_optimizer_state_dict(state["model"], state["optimizer"], value),
    "flat": lambda state, value: set_optimizer_state_dict(state["model"], state["optimizer"], value, options=FLAT),
}
MAKES = {
    "AdamW": two_groups(torch.optim.AdamW, lr=0.1),
    "SGD": two_groups(torch.optim.SGD, lr=0.1),
    "SGD momentum": two_groups(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def thawed(name: str) -> State:
    """DCP's dicts want a state for every parameter."""
    state = build(MAKES[name])
    for parameter in state["model"].parameters():
        parameter.requires_grad_(True)
    return state


@pytest.mark.parametrize("target", GIVE)
@pytest.mark.parametrize("source", GIVE)
@pytest.mark.parametrize("name", MAKES)
def test_each_form_loads_into_each_other(save: Any, name: str, source: str, target: str) -> None:
    state = thawed(name)
    state["optimizer"].param_groups[1]["lr"] = 0.3
    train(state, 3)
    saved = save({"model": state["model"], "optimizer": GIVE[source](state)})
    train(state, 2)
    found = thawed(name)
    value = GIVE[target](found)
    loaded = saved.load({"model": found["model"], "optimizer": value})
    assert (loaded.missing, loaded.unexpected, loaded.problems) == ((), (), ())
    if (name, target) == ("SGD", "flat"):  # torch itself loses the groups of a flat dict without state
        assert value["param_groups.b.weight.lr"] == 0.3
        return
    TAKE[target](found, value)
    train(found, 2)
    assert save(state).equals(found)


@pytest.mark.parametrize("give", [lambda model: model.state_dict(), get_model_state_dict, None])
def test_the_state_dict_of_the_model_gives_names_to_the_optimizer(save: Any, give: Any) -> None:
    state, found, other = thawed("AdamW"), thawed("AdamW"), thawed("AdamW")
    train(state, 2)
    optimizer = state["optimizer"]
    if give is None:
        model, optimizer = get_state_dict(state["model"], optimizer)
        loaded = save({"app": {"model": model, "optimizer": optimizer}}).load({"app": found})
    else:
        loaded = save({"model": give(state["model"]), "optimizer": optimizer}).load(found)
        save(state).load({"model": give(other["model"]), "optimizer": other["optimizer"]})
        assert save(state).equals(other)
    assert (loaded.missing, loaded.unexpected, loaded.problems) == ((), (), ())
    assert save(state).equals(found)


def test_numbers_want_the_groups_that_they_count(save: Any) -> None:
    state = thawed("AdamW")
    train(state, 1)
    saved = save({"model": state["model"], "optimizer": state["optimizer"].state_dict()})
    found = build(lambda model: torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        StateMismatchError, match=r"groups of \[4\] parameters in the state, of \[2, 2\] in the checkpoint"
    ):
        saved.load(found)
    saved = save(state)
    with pytest.raises(
        StateMismatchError, match=r"groups of \[4\] parameters in the state, of \[2, 2\] in the checkpoint"
    ):
        saved.load({"model": found["model"], "optimizer": found["optimizer"].state_dict()})


def test_a_part_of_the_parameters_is_told_by_name(save: Any) -> None:
    state = thawed("AdamW")
    train(state, 1)
    saved = save({"model": state["model"], "optimizer": GIVE["by name"](state)})
    part = build(lambda model: torch.optim.AdamW(model["a"].parameters()))
    with pytest.raises(StateMismatchError, match=r"b\\.weight: in the checkpoint but not in the state"):
        saved.load(part)
    more = save({"model": part["model"], "optimizer": part["optimizer"]})
    with pytest.raises(
        StateMismatchError, match=r"optimizer: the optimizer of the checkpoint has no parameter b.weight"
    ):
        more.load({"model": state["model"], "optimizer": GIVE["by name"](state)})


def test_a_dict_keeps_how_a_step_is_computed_here(save: Any) -> None:
    state = build(two_groups(torch.optim.AdamW, fused=True))
    train(state, 2)
    found = build(two_groups(torch.optim.AdamW, foreach=False))
    value = found["optimizer"].state_dict()
    save(state).load({"model": found["model"], "optimizer": value})
    assert [(group["fused"], group["foreach"]) for group in value["param_groups"]] == [(None, False)] * 2
    found["optimizer"].load_state_dict(value)
    train(found, 1)


def test_an_object_with_tensors_and_its_dict_load_into_each_other(save: Any) -> None:
    def average(value: float) -> dict[str, Any]:
        return {"mean": torch.full((2,), value), "count": int(value)}

    holder, template = Thing(average(1.0)), average(2.0)
    save({"average": average(5.0)}).load({"average": holder})
    save({"average": Thing(average(6.0))}).load({"average": template})
    for state, value in ((holder.state, 5), (template, 6)):
        assert (state["mean"].tolist(), state["count"]) == ([value, value], value)


@pytest.mark.parametrize("target", GIVE)
@pytest.mark.parametrize("source", GIVE)
@pytest.mark.parametrize(("before", "now"), [("SGD momentum", "AdamW"), ("AdamW", "SGD momentum")])
def test_a_form_of_another_class_is_a_mismatch(save: Any, source: str, target: str, before: str, now: str) -> None:
    state, found = thawed(before), thawed(now)
    train(state, 2)
    train(found, 1)
    saved = save({"model": state["model"], "optimizer": GIVE[source](state)})
    here = {"model": found["model"], "optimizer": GIVE[target](found)}
    kept = str(GIVE[target](found))
    with pytest.raises(StateMismatchError, match=r"optimizer: .*momentum_buffer") as refused:
        saved.load(here)
    assert "exp_avg" in str(refused.value)
    saved.load(here, strict=False)
    TAKE[target](found, here["optimizer"])
    assert str(GIVE[target](found)) == kept
    train(found, 1)


def one_within_the_other() -> nn.ModuleDict:
    """Return a module with parameters ``w`` and ``m.w``: below the key *m* of a state the first is ``m.w``, too."""
    return nn.ModuleDict({"w": nn.Linear(2, 2), "m": nn.ModuleDict({"w": nn.Linear(2, 2)})})


def stepped(parameters: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(parameters)
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"], 1):
            parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("source", ["optimizer", "names"])
@pytest.mark.parametrize("target", ["optimizer", "names"])
def test_state_never_goes_to_a_parameter_whose_name_ends_alike(save: Any, source: str, target: str) -> None:
    outer, inner = one_within_the_other(), one_within_the_other()
    of_outer, of_inner = stepped(outer["w"].parameters()), stepped(inner["m"].parameters())
    saved = of_outer if source == "optimizer" else get_optimizer_state_dict(outer, of_outer)
    found = of_inner if target == "optimizer" else get_optimizer_state_dict(inner, of_inner)
    with pytest.raises(StateMismatchError):
        save({"m": outer, "o": saved}).open({"m": inner, "o": found})


def test_by_parameter_a_new_optimizer_begins_anew(save: Any) -> None:
    model, found = one_within_the_other(), one_within_the_other()
    saved = save({"m": model, "o": stepped(model["w"].parameters())})
    state: dict[str, Any] = {
        "m": found,
        "o": torch.optim.Adam(found["w"].parameters()),
        "new": torch.optim.Adam(found["m"].parameters()),
    }
    saved.open(state, optimizer_state="by_parameter").apply()
    assert not state["new"].state
    assert len(state["o"].state) == 2


def test_names_that_differ_by_a_dot_in_a_key_are_two(save: Any) -> None:
    def job() -> dict[str, Any]:
        return {"a": {"b": nn.Linear(2, 2)}, "a.b": nn.Linear(2, 2)}

    nets, found = job(), job()
    optimizer = stepped([*nets["a.b"].parameters(), *nets["a"]["b"].parameters()])
    other = torch.optim.Adam([*found["a.b"].parameters(), *found["a"]["b"].parameters()])
    save({**nets, "o": optimizer}).open({**found, "o": other}).apply()
    for net, its in ((nets["a.b"], found["a.b"]), (nets["a"]["b"], found["a"]["b"])):
        assert torch.equal(optimizer.state[net.weight]["exp_avg"], other.state[its.weight]["exp_avg"])


def test_numbers_of_parameters_reordered_are_refused(save: Any) -> None:
    net, found = nn.Linear(3, 4), nn.Linear(3, 4)
    saved = save({"m": net, "o": stepped([net.weight, net.bias]).state_dict()})
    with pytest.raises(StateMismatchError, match="parameters in another order in the checkpoint"):
        saved.open({"m": found, "o": torch.optim.Adam([found.bias, found.weight])})
    named = stepped(list(net.named_parameters()))
    if "param_names" not in named.state_dict()["param_groups"][0]:
        pytest.skip("this torch keeps no names in optimizers")
    other = torch.optim.Adam(list(found.named_parameters())[::-1])
    save({"m": net, "o": named.state_dict()}).open({"m": found, "o": other}).apply()
    assert torch.equal(named.state[net.weight]["exp_avg"], other.state[found.weight]["exp_avg"])
