"""The rates of schedules under optimizers that have changed: those of the new program at the saved position, or refused."""

import copy
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.errors import StateMismatchError
from tests.adapters.conftest import Saved, same
from tests.adapters.test_schedulers import WarmUp, WithLambda

Program = dict[str, Optimizer]


class Holding(LRScheduler):
    """Holds what a copy must not have again: the groups, their parameters, a module."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.weights = [one for group in self.groups for one in group["params"]]
        self.model = nn.Linear(2, 2)
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {key: one for key, one in super().state_dict().items() if key not in ("groups", "weights", "model")}

    def get_lr(self) -> list[Any]:
        return [group["lr"] * 0.5 for group in self.groups]


class Other(LRScheduler):
    """Has no attributes that another one lacks."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Raising(lr_scheduler.LinearLR):
    """Ends before the saved position."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch > 1:
            raise ValueError
        return super().get_lr()


class Uncopied(lr_scheduler.LinearLR):
    """Holds what cannot be copied."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.numbers = (one for one in range(3))
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {key: one for key, one in super().state_dict().items() if key != "numbers"}


STEPS = 4
"""How far a schedule goes after the load."""


def by_lambda(step: int, *, warm: int) -> float:
    return min(1.0, (step + 1) / warm) * 0.9**step


def both(o: Optimizer) -> list[LRScheduler]:
    return [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9, eta_min=1e-5)]


SCHEDULES: dict[str, Callable[[Optimizer, float], Any]] = {
    "LambdaLR": lambda o, _: lr_scheduler.LambdaLR(o, functools.partial(by_lambda, warm=3)),
    "MultiplicativeLR": lambda o, _: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - 0.01 * step),
    "StepLR": lambda o, _: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o, _: lr_scheduler.MultiStepLR(o, [1, 3, 3, 6], gamma=0.5),
    "ConstantLR": lambda o, _: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o, _: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o, _: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o, _: lr_scheduler.PolynomialLR(o, 9, power=2.0),
    "CosineAnnealingLR": lambda o, lr: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=lr / 100),
    "ChainedScheduler": lambda o, _: lr_scheduler.ChainedScheduler(both(o), o),
    "SequentialLR": lambda o, _: lr_scheduler.SequentialLR(o, both(o), [3]),
    "CyclicLR": lambda o, lr: lr_scheduler.CyclicLR(o, lr / 10, lr, 3, mode="triangular2"),
    "OneCycleLR": lambda o, lr: lr_scheduler.OneCycleLR(o, lr, total_steps=16),
    "CosineAnnealingWarmRestarts": lambda o, lr: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, eta_min=lr / 50),
    "SWALR": lambda o, lr: swa_utils.SWALR(o, lr / 7, anneal_epochs=5),
    "of a user": lambda o, _: WithLambda(o, 0.7),
    "of a user, with groups": lambda o, _: Holding(o),
    "a warm-up around another": lambda o, _: WarmUp(o, lr_scheduler.ExponentialLR(o, 0.5), 2),
}


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def matrices(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.dim() == 2]


def rest(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.dim() != 2]


def groups(model: Any, *decays: float) -> list[dict[str, Any]]:
    return [
        {"params": some, "weight_decay": one} for some, one in zip((matrices(model), rest(model)), decays, strict=True)
    ]


def adamw(model: Any) -> Program:
    return {"adamw": AdamW(model.parameters(), lr=1e-3)}


def muon_and_adamw(model: Any) -> Program:
    return {"muon": Muon(matrices(model), lr=0.02), "adamw": AdamW(rest(model), lr=1e-3)}


CHANGES: dict[str, tuple[Callable[[Any], Program], Callable[[Any], Program]]] = {
    "split in two": (adamw, muon_and_adamw),
    "split, another rate": (adamw, lambda m: {"muon": Muon(matrices(m)), "adamw": AdamW(rest(m), lr=3e-4)}),
    "merged": (muon_and_adamw, adamw),
    "AdamW to SGD": (adamw, lambda m: {"adamw": SGD(m.parameters(), lr=0.5, momentum=0.9)}),
    "AdamW to Muon": (lambda m: {"adamw": AdamW(matrices(m))}, lambda m: {"adamw": Muon(matrices(m), lr=0.02)}),
    "SGD to AdamW": (lambda m: {"adamw": SGD(m.parameters(), lr=0.5, momentum=0.9)}, adamw),
    "group split": (adamw, lambda m: {"adamw": AdamW(groups(m, 0.1, 0.0), lr=1e-3)}),
    "group split, another rate": (adamw, lambda m: {"adamw": AdamW(groups(m, 0.1, 0.0), lr=1e-2)}),
    "groups merged": (lambda m: {"adamw": AdamW(groups(m, 0.1, 0.0), lr=1e-3)}, adamw),
    "groups in another order": (
        lambda m: {"adamw": AdamW([{**one, "lr": 0.1 + one["weight_decay"]} for one in groups(m, 0.1, 0.0)])},
        lambda m: {"adamw": AdamW([{**one, "lr": 0.1 + one["weight_decay"]} for one in groups(m, 0.1, 0.0)[::-1]])},
    ),
}


class Job(NamedTuple):
    """A program: a model, its optimizers and their schedulers."""

    model: Any
    program: Program
    schedule: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """What is saved of it."""
        return {"model": self.model, **self.program, **self.schedule}

    def run(self, steps: int) -> list[Any]:
        """Train; return after each step all that a schedule may have set."""
        seen = []
        for _ in range(steps):
            self.model(torch.ones(5, 3)).square().sum().backward()
            for one in (*self.program.values(), *self.schedule.values()):
                one.step()
            seen.append(rates(self.program))
        return seen


def begin(make: Callable[[Any], Program], name: str, steps: int) -> Job:
    """Return a program that was trained for some steps."""
    model = net()
    program = make(model)
    schedule = {f"{key}_schedule": SCHEDULES[name](one, float(one.defaults["lr"])) for key, one in program.items()}
    job = Job(model, program, schedule)
    job.run(steps)
    return job


def rates(program: Program) -> list[Any]:
    keys = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "swa_lr")
    return [{key: group.get(key) for key in keys} for one in program.values() for group in one.param_groups]


def follow(saved: Job, state: dict[str, Any], **how: Any) -> Any:
    """Load with each schedule from its own, or from the one that there was."""
    olds = list(saved.schedule)
    new = {key: olds[-1] for key in state if key.endswith("_schedule") and olds and key not in olds}
    stored = Saved(StateWalker().walk(saved.state))
    return stored.load(state, optimizer_state="by_parameter", rename=new or None, **how)


@pytest.mark.parametrize(("name", "change"), [*itertools.product(SCHEDULES, CHANGES)])
def test_rates_are_those_of_the_new_program_at_the_position(name: str, change: str) -> None:
    before, after = CHANGES[change]
    for position in (0, 1, 3, 8):
        here, fresh = begin(after, name, 0), begin(after, name, position)
        follow(begin(before, name, position), here.state)
        assert rates(here.program) == rates(fresh.program)
        last = [[one.get_last_lr() for one in job.schedule.values()] for job in (here, fresh)]
        assert last[0] == last[1]
        assert here.run(STEPS) == fresh.run(STEPS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_rate_alone_is_the_saved_one_and_told(name: str) -> None:
    before, here = begin(adamw, name, 3), begin(lambda model: {"adamw": AdamW(model.parameters(), lr=0.7)}, name, 0)
    assert any(one.startswith("adamw.groups[0].initial_lr: 0.") for one in follow(before, here.state).notes)
    assert here.run(STEPS) == before.run(STEPS)


@pytest.mark.parametrize("lr", ["numbers", "tensors"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_ordinary_load_of_a_split_group_keeps_rates_right(name: str, lr: str) -> None:
    """Also where the optimizer is not loaded, and where rates are tensors."""

    def rate() -> Any:
        return 1e-3 if lr == "numbers" else torch.tensor(1e-3)

    def split(model: Any) -> Program:
        return {"adamw": AdamW(groups(model, 0.01, 0.01), lr=rate())}

    def other(model: Any) -> Program:
        return {"adamw": SGD(model.parameters(), rate(), momentum=0.9)}

    saved = Saved(StateWalker().walk(begin(lambda m: {"adamw": AdamW(m.parameters(), lr=rate())}, name, 3).state))
    for make, strict in ((split, True), (other, False)):
        here, fresh = begin(make, name, 0), begin(make, name, 3)
        saved.load(here.state, strict={"adamw": strict})
        assert here.run(STEPS) == fresh.run(STEPS)


def plateau(make: Callable[[Any], Program], losses: int) -> Job:
    """Return a program after *losses* that grow, under a scheduler with a patience of 1."""
    model = net()
    program = make(model)
    schedule = {
        f"{key}_schedule": lr_scheduler.ReduceLROnPlateau(one, patience=1, factor=0.5, min_lr=one.defaults["lr"] / 9)
        for key, one in program.items()
    }
    job = Job(model, program, schedule)
    worse(job, losses)
    return job


def worse(job: Job, losses: int) -> None:
    for loss, one in itertools.product(range(losses), job.schedule.values()):
        one.step(float(loss))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("losses", [0, 1, 3, 7])
def test_a_plateau_goes_on_right_or_is_refused(change: str, losses: int) -> None:
    """It does not record the rates that it began with: saved rates go on, and rates that it cannot have reduced."""
    before, after = CHANGES[change]
    saved, here, fresh = plateau(before, losses), plateau(after, 0), plateau(after, losses)
    goes_on = ("group split", "groups merged", "groups in another order", "merged")
    if "rate" in change or (losses > 1 and change not in goes_on):
        untouched = copy.deepcopy([dict(here.model.state_dict()), rates(here.program)])
        refusal = r'does not record how far .* strict={"\w+_schedule": False}'
        with pytest.raises(StateMismatchError, match=refusal):
            follow(saved, here.state)
        assert same([dict(here.model.state_dict()), rates(here.program)], untouched)
        follow(saved, here.state, strict=dict.fromkeys(here.schedule, False))
        return
    follow(saved, here.state)
    for _ in range(4):
        assert rates(here.program) == rates(fresh.program)
        bad = [[one.num_bad_epochs for one in job.schedule.values()] for job in (here, fresh)]
        assert bad[0] == bad[1]
        worse(here, 1)
        worse(fresh, 1)


@pytest.mark.parametrize(
    ("why", "steps", "make"),
    [
        ("it is at 4, and the checkpoint at 3; load before it is stepped", 4, lr_scheduler.LinearLR),
        ("total_iters is 4 here, 6 in the checkpoint", 0, lambda o: lr_scheduler.LinearLR(o, total_iters=4)),
        ("Other in the state, torch.optim.lr_scheduler.LinearLR in the checkpoint", 0, Other),
        ("it cannot be stepped to 3 \\(ValueError", 0, Raising),
        ("it cannot be copied \\(TypeError", 0, Uncopied),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(why: str, steps: int, make: Callable[[Optimizer], Any]) -> None:
    saved, model = begin(adamw, "LinearLR", 3), net()
    optimizer = AdamW(groups(model, 0.1, 0.0), lr=0.5)
    here = Job(model, {"adamw": optimizer}, {"adamw_schedule": make(optimizer)})
    here.run(steps)
    kept = copy.deepcopy([dict(model.state_dict()), rates(here.program)])
    with pytest.raises(StateMismatchError, match=f"adamw_schedule: the groups of its optimizer have changed.*{why}"):
        follow(saved, here.state)
    assert same([dict(model.state_dict()), rates(here.program)], kept)
    loaded = follow(saved, here.state, strict={"adamw_schedule": False})
    assert re.search(why, loaded.problems[0])
    assert rates(here.program) == kept[1]


@pytest.mark.parametrize("second", ["LinearLR", "CosineAnnealingLR"])
def test_two_schedules_go_on_where_their_order_does_not_matter(second: str) -> None:
    def make(groups_of: Callable[[Any], Any], steps: int) -> Job:
        model = net()
        optimizer = AdamW(groups_of(model), lr=0.5)
        job = Job(
            model,
            {"adamw": optimizer},
            {f"{name}_schedule": SCHEDULES[name](optimizer, 0.5) for name in ("StepLR", second)},
        )
        job.run(steps)
        return job

    def split(model: Any) -> Any:
        return groups(model, 0.1, 0.0)

    saved, here, fresh = make(lambda model: model.parameters(), 3), make(split, 0), make(split, 3)
    if second == "CosineAnnealingLR":
        with pytest.raises(
            StateMismatchError, match="StepLR_schedule steps the same rates, and the order is not known"
        ):
            follow(saved, here.state)
        return
    follow(saved, here.state)
    lrs = [[one["lr"] for one in rates(job.program)] for job in (here, fresh)]
    assert lrs[0] == pytest.approx(lrs[1])


def test_a_schedule_that_was_made_with_its_last_epoch_goes_on() -> None:
    saved, here, fresh = (begin(adamw, "LambdaLR", 3), *(begin(muon_and_adamw, "LambdaLR", steps) for steps in (0, 3)))
    saved.schedule["adamw_schedule"]._step_count = 1
    follow(saved, here.state)
    assert here.run(STEPS) == fresh.run(STEPS)


@pytest.mark.parametrize(("position", "why"), [(10**12, "more than 3000000 steps away"), ("3", "it keeps no position")])
def test_a_position_that_cannot_be_reached_is_refused(position: Any, why: str) -> None:
    saved, here = begin(adamw, "LambdaLR", 3), begin(muon_and_adamw, "LambdaLR", 0)
    saved.schedule["adamw_schedule"].last_epoch = position
    with pytest.raises(StateMismatchError, match=why):
        follow(saved, here.state)


def test_a_schedule_that_begins_anew_has_the_rates_of_the_program() -> None:
    saved, (here, fresh) = (
        begin(adamw, "ExponentialLR", 3),
        (begin(CHANGES["group split"][1], "ExponentialLR", 0) for _ in "12"),
    )
    saved.schedule.clear()
    follow(saved, here.state, strict={"adamw_schedule": False})
    assert here.run(STEPS) == fresh.run(STEPS)


class OfNoKnownKind:
    """Sets rates with a state of its own, as those of timm and others."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.values = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        """Set the rates."""
        for group, value in zip(self.optimizer.param_groups, self.values, strict=True):
            group["lr"] = value = value / 2

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class AcceleratedScheduler:
    """Forwards to a scheduler, as that of accelerate does."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler, self.step = scheduler, scheduler.step
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict


def test_other_objects_that_set_rates_are_refused_or_unwrapped() -> None:
    def make(groups_of: Callable[[Any], Any], schedule: Callable[[Optimizer], Any], steps: int) -> Job:
        model = net()
        optimizer = AdamW(groups_of(model), lr=0.5)
        job = Job(model, {"adamw": optimizer}, {"adamw_schedule": schedule(optimizer)})
        job.run(steps)
        return job

    def split(model: Any) -> Any:
        return groups(model, 0.1, 0.0)

    def wrapped(optimizer: Optimizer) -> Any:
        return AcceleratedScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))

    saved = make(lambda model: model.parameters(), OfNoKnownKind, 3)
    refusal = r'how a OfNoKnownKind goes on with other rates is not known; strict={"adamw_schedule": False} keeps'
    with pytest.raises(StateMismatchError, match=refusal):
        follow(saved, make(split, OfNoKnownKind, 0).state)
    same_groups = make(lambda model: model.parameters(), OfNoKnownKind, 0)
    follow(saved, same_groups.state)
    assert same_groups.run(STEPS) == saved.run(STEPS)
    here, fresh = make(split, wrapped, 0), make(split, wrapped, 3)
    follow(make(lambda model: model.parameters(), wrapped, 3), here.state)
    assert here.run(STEPS) == fresh.run(STEPS)


def test_the_first_step_of_a_loaded_schedule_warns_of_nothing(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        optimizer = AdamW((model := net()).parameters(), lr=0.5)
        return {"model": model, "optimizer": optimizer, "schedule": lr_scheduler.ExponentialLR(optimizer, 0.5)}

    trained, resumed = make(), make()
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        trained["optimizer"].step()
        ckpt.save(1, trained).result()  # in the last batch of the first epoch, before the schedule steps
        ckpt.load(resumed).result()
    resumed["schedule"].step()
    assert resumed["schedule"].get_last_lr() == [0.25]
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):
        make()["schedule"].step()
