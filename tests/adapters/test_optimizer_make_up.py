"""The state of each parameter follows it when optimizers have changed their make-up; the rest is reported by name."""

import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

import aiockpt
from aiockpt.adapters.native import StateWalker
from tests.adapters.conftest import Saved, Through
from tests.example_counts import examples

FAMILIES: dict[str, Any] = {
    "AdamW": lambda groups: AdamW(groups, lr=0.1),
    "Adam": lambda groups: Adam(groups, lr=0.1),
    "SGD": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "Muon": lambda groups: Muon(groups, lr=0.1),
}
FITS = {"AdamW": "Adam", "Adam": "Adam", "SGD": "SGD", "Muon": "Muon"}


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Linear(2, 2))


def train(model: Any, *optimizers: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


class MakeUp:
    """Random optimizers over the parameters of a model: which has which, in which groups, with which rates.

    Attributes:
        kinds: of each parameter that has an optimizer, by name: which family steps it.
        groups: of each such parameter: the names in its group, and the values that the group was given.
    """

    def __init__(self, model: Any, dice: random.Random) -> None:
        self.kinds: dict[str, str] = {}
        self.groups: dict[str, tuple[frozenset[str], dict[str, Any]]] = {}
        parts: dict[str, list[tuple[str, Any]]] = {}
        chosen = dice.sample(sorted(FAMILIES), dice.randrange(1, 4))
        for name, parameter in dice.sample(list(model.named_parameters()), len(list(model.parameters()))):
            kind = dice.choice(chosen)
            if dice.random() < 0.9 and (parameter.dim() == 2 or kind != "Muon"):
                parts.setdefault(kind, []).append((f"model.{name}", parameter))
        self.optimizers = {}
        for kind, some in parts.items():
            cut = dice.randrange(len(some) + 1)
            groups: list[dict[str, Any]] = []
            for part in filter(None, (some[:cut], some[cut:])):
                given = {"weight_decay": dice.choice([0.2, 0.3])} if dice.random() < 0.3 else {}
                groups.append({"params": [one for _, one in part], **given})
                for name, _ in part:
                    self.kinds[name], self.groups[name] = kind, (frozenset(name for name, _ in part), given)
            self.optimizers[dice.choice(["optimizer", kind]) if len(parts) == 1 else kind] = FAMILIES[kind](groups)

    def state_of(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return what each parameter has learnt, by name."""
        names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
        return {names[id(one)]: state for each in self.optimizers.values() for one, state in each.state.items()}

    def group_of(self, name: str, model: Any) -> dict[str, Any]:
        """Return the group of a parameter."""
        parameter = model.get_parameter(name.removeprefix("model."))
        groups = [group for each in self.optimizers.values() for group in each.param_groups]
        return next(group for group in groups if any(one is parameter for one in group["params"]))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@examples(150)
@given(st.integers(0, 2**32))
def test_what_was_learnt_follows_its_parameter(seed: int) -> None:
    dice, model, found = random.Random(seed), net(), net()
    before = MakeUp(model, dice)
    train(model, *before.optimizers.values())
    for number, each in enumerate(before.optimizers.values()):
        each.param_groups[0]["lr"] = 0.01 * (number + 1)  # as a schedule leaves it
    saved = Saved(StateWalker().walk({"model": model, "optimizers": before.optimizers}))
    after = before if dice.random() < 0.1 else MakeUp(found, dice)
    if after is before:
        found = model
    assume(before.optimizers and after.optimizers)  # without one there is no state to follow a parameter
    learnt = {name: {key: one.clone() for key, one in part.items()} for name, part in before.state_of(model).items()}
    if after is not before and dice.random() < 0.3:  # what is there is no part of what comes back
        train(found, *after.optimizers.values(), seed=2)
    target = saved.load({"model": found, "optimizers": after.optimizers}, optimizer_state="by_parameter")
    told = target.notes
    assert (target.missing, target.unexpected) == ((), ())
    for name, kind in after.kinds.items():
        follows = name in before.kinds and FITS[before.kinds[name]] == FITS[kind]
        assert same(after.state_of(found).get(name, {}), learnt[name] if follows else {}), name
        assert follows is not any(f"{name}: begins anew" in line for line in told), (name, told)
        (members, given), group = after.groups[name], after.group_of(name, found)
        if follows and before.groups[name][0] == members:
            assert group["weight_decay"] == before.group_of(name, model)["weight_decay"]
            assert group["lr"] == before.group_of(name, model)["lr"]
        elif given:
            assert group["weight_decay"] == given["weight_decay"]
    for name in before.kinds.keys() - after.kinds.keys():
        assert any(f"state.{name}: left in the checkpoint" in line for line in told), (name, told)
    if after is before:
        assert told == []
    train(found, *after.optimizers.values(), seed=1)


def split(model: Any) -> tuple[list[Any], list[Any]]:
    matrices = [one for one in model.parameters() if one.dim() == 2]
    return matrices, [one for one in model.parameters() if one.dim() != 2]


def test_one_adamw_becomes_muon_for_matrices_and_adamw_for_the_rest(through: Through) -> None:
    model, found = net(), net()
    before = AdamW(model.parameters(), lr=0.1)
    train(model, before)
    before.param_groups[0]["lr"] = 0.05
    matrices, rest = split(found)
    muon, adamw = Muon(matrices, lr=0.3), AdamW(rest, lr=0.1)
    state = {"model": found, "muon": muon, "adamw": adamw}
    with pytest.raises(aiockpt.StateMismatchError, match=r'optimizer_state="by_parameter".*docs/guide/optimizers\.md'):
        through({"model": model, "optimizer": before}, state)
    result = through({"model": model, "optimizer": before}, state, optimizer_state="by_parameter")
    anew = [
        f"muon.state.model.{place}.weight: begins anew: Muon in the state, AdamW in the checkpoint"
        for place in (0, 2, 3)
    ]
    rate = "adamw.groups[0].lr: 0.1 here, 0.05 in the checkpoint; that of the checkpoint is taken"
    assert list(result.differences) == [*anew, rate]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.3, 0.05)
    moments = [before.state[one]["exp_avg"] for one in split(model)[1]]
    assert all(torch.equal(adamw.state[one]["exp_avg"], saved) for one, saved in zip(rest, moments, strict=True))


def test_a_split_group_keeps_values_and_schedule(through: Through) -> None:
    model, found = net(), net()
    before = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    schedule = CosineAnnealingLR(before, 10)
    for _ in range(3):
        train(model, before)
        schedule.step()
    matrices, rest = split(found)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    after = AdamW(groups, lr=0.1, weight_decay=0.2)
    here = CosineAnnealingLR(after, 10)
    state = {"model": found, "optimizer": after, "schedule": here}
    result = through({"model": model, "optimizer": before, "schedule": schedule}, state, optimizer_state="by_parameter")
    assert (
        "optimizer.groups[1].weight_decay: 0.0 here, 0.2 in the checkpoint; what is here is taken" in result.differences
    )
    goes_on = (
        "schedule: the groups of its optimizer have changed; it goes on at 3, with the rates that the schedule here"
    )
    assert any(line.startswith(goes_on) for line in result.differences)
    for one, other, optimizer in ((model, schedule, before), (found, here, after)):
        train(one, optimizer)
        other.step()
    assert [group["lr"] for group in after.param_groups] == [before.param_groups[0]["lr"]] * 2


@pytest.mark.parametrize("by_parameter", [False, True])
def test_a_schedule_has_a_rate_for_each_group(through: Through, by_parameter: bool) -> None:
    """Also inside another one, and when the groups say the same, so that an ordinary load takes them."""

    def warmed(optimizer: Any) -> Any:
        parts = [LambdaLR(optimizer, lambda step: (step + 1) / 4), CosineAnnealingLR(optimizer, 10)]
        return SequentialLR(optimizer, parts, milestones=[4])

    model, found = net(), net()
    before = AdamW(model.parameters(), lr=0.1)
    schedule = warmed(before)
    matrices, rest = split(found)
    after = AdamW([{"params": matrices}, {"params": rest}], lr=0.1)
    here = warmed(after)
    for _ in range(5):
        train(model, before)
        schedule.step()
    how: Any = {"optimizer_state": "by_parameter"} if by_parameter else {}
    saved = {"model": model, "optimizer": before, "schedule": schedule}
    through(saved, {"model": found, "optimizer": after, "schedule": here}, **how)
    for one, other, optimizer in ((model, schedule, before), (found, here, after)):
        train(one, optimizer)
        other.step()
    assert [group["lr"] for group in after.param_groups] == [before.param_groups[0]["lr"]] * 2


class Mixed(torch.optim.Optimizer):
    """One class that steps its groups in two ways, as Muon with an auxiliary Adam does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "use_muon": False})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one].setdefault("momentum_buffer" if group["use_muon"] else "exp_avg", one.detach() + 1)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, from the first one on or from the beginning."""

    def __init__(self, groups: Any, early: bool) -> None:
        super().__init__(groups, {"lr": 0.1})
        for group in self.param_groups if early else ():
            group["step"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                self.state[one]["exp_avg"] = one.detach() + group["step"]


@pytest.mark.parametrize("early", [False, True])
def test_steps_counted_in_a_group_follow_where_it_is_split(through: Through, early: bool) -> None:
    model, found = net(), net()
    before = Counting(model.parameters(), early)
    for _ in range(3):
        before.step()
    after = Counting([{"params": some} for some in split(found)], early)
    through({"m": model, "o": before}, {"m": found, "o": after}, optimizer_state="by_parameter")
    assert [group["step"] for group in after.param_groups] == [3, 3]


@pytest.mark.parametrize(
    ("was", "given", "why"),
    [
        ({}, {"use_muon": True}, "use_muon=True in the state, use_muon=False in the checkpoint"),
        ({"betas": 1}, {"use_muon": True, "ns": 5}, "ns in the state, with betas in the checkpoint"),
    ],
)
def test_a_group_stepped_in_another_way_begins_anew(
    through: Through, was: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    model, found = net(), net()
    before = Mixed([{"params": list(model.parameters()), **was}])
    before.step()
    matrices, rest = split(found)
    after = Mixed([{"params": matrices, **given}, {"params": rest, **was}])
    result = through({"m": model, "o": before}, {"m": found, "o": after}, optimizer_state="by_parameter")
    assert f"o.state.m.0.weight: begins anew: a group with {why}" in result.differences
    after.step()
    assert [sorted(after.state[one]) for one in (matrices[0], rest[0])] == [["momentum_buffer"], ["exp_avg"]]
    assert [group["use_muon"] for group in after.param_groups] == [True, False]


def test_two_optimizers_of_one_parameter_are_no_guess(through: Through) -> None:
    model, found = net(), net()
    first, second = AdamW(model.parameters()), AdamW(model.parameters())
    train(model, first, second)
    after = AdamW(found.parameters())
    result = through({"m": model, "a": first, "b": second}, {"m": found, "o": after}, optimizer_state="by_parameter")
    assert not after.state
    assert "a and b of the checkpoint have this parameter; map= says which is meant" in result.differences[0]
    how: Any = {"optimizer_state": "by_parameter", "map": {"o": "b"}}
    through({"m": model, "a": first, "b": second}, {"m": found, "o": after}, **how)
    assert len(after.state) == len(list(found.parameters()))


@pytest.mark.parametrize("hooks", [False, True])
def test_state_of_no_parameter_follows_all_the_parameters_or_is_told(through: Through, hooks: bool) -> None:
    model, found = net(), net()
    before, after = SGD(model.parameters()), SGD(found.parameters())
    before.state["count"], after.state["count"] = 3, 1  # type: ignore[index]
    if hooks:
        after.register_load_state_dict_post_hook(lambda _: None)
    how: Any = {"optimizer_state": "by_parameter"}
    assert not through({"m": model, "a": before}, {"m": found, "b": after}, **how).differences
    assert after.state == {"count": 3}
    first, second = (SGD(some) for some in split(model))
    first.state["count"] = 4  # type: ignore[index]
    result = through({"m": model, "a": first, "c": second}, {"m": found, "b": after}, **how)
    assert (
        "a.rest: left in the checkpoint: it belongs to no parameter, and several optimizers differ"
        in result.differences
    )
    assert after.state == {"count": 3}


@pytest.mark.parametrize("saved_as", ["named", "numbered"])
def test_the_dict_of_a_named_optimizer_is_a_store(through: Through, saved_as: str) -> None:
    model, found = net(), net()
    before = AdamW(model.parameters() if saved_as == "numbered" else list(model.named_parameters()))
    train(model, before)
    matrices, rest = split(found)
    state = {"model": found, "optimizer": Muon(matrices), "rest": AdamW(rest)}
    saved: Any = {"model": model, "optimizer": before.state_dict()}
    if saved_as == "numbered":
        with pytest.raises(aiockpt.StateMismatchError, match="by their numbers only"):
            through(saved, state, optimizer_state="by_parameter")
        other = AdamW(reversed(list(found.parameters())))
        result = through(saved, {"model": found, "other": other}, optimizer_state="by_parameter")
        assert not other.state
        assert len(result.differences) == 2 * len(list(found.parameters()))
        return
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    saved["optimizer"] = get_optimizer_state_dict(model, before)
    through(saved, state, optimizer_state="by_parameter")
    assert len(state["rest"].state) == len(rest)


def test_only_leaves_optimizers_as_they_are(through: Through) -> None:
    model, found = net(), net()
    before, after = AdamW(model.parameters(), lr=0.2), Adam(split(found)[0], lr=0.1)
    train(model, before)
    train(found, after)
    kept = {one: state["exp_avg"].clone() for one, state in after.state.items()}
    how: Any = {"only": ["model"], "optimizer_state": "by_parameter"}
    result = through({"model": model, "optimizer": before}, {"model": found, "optimizer": after}, **how)
    assert result.differences == ()
    assert all(torch.equal(after.state[one]["exp_avg"], buffer) for one, buffer in kept.items())


def test_another_word_is_refused_and_resume_takes_it_too() -> None:
    with aiockpt.Checkpointer("memory://make-up") as ckpt:
        model, found = net(), net()
        before = AdamW(model.parameters())
        train(model, before)
        ckpt.save(4, {"model": model, "optimizer": before}).result()
        after = AdamW(split(found)[1])
        with pytest.raises(aiockpt.UsageError, match='give "by_optimizer" or "by_parameter"'):
            ckpt.load({"model": found}, optimizer_state="by_name")  # type: ignore[arg-type]
        assert ckpt.resume({"model": found, "rest": after}, optimizer_state="by_parameter") == 5
        assert len(after.state) == len(split(found)[1])
