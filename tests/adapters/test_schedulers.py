"""Learning rate schedulers, torch's own and those that users write, go on; another one is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from aiockpt.adapters.native import StateWalker
from aiockpt.errors import StateMismatchError, UnsupportedStateError
from tests.adapters.test_optimizers import State, build, train, two_groups


class Power:
    """A callable object, of which torch saves the attributes."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: int) -> float:
        return self.base**step


class WithLambda(LRScheduler):
    """Keeps functions among its attributes, alone, in a list and in a dict, and the optimizer under another name."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.scale = lambda step: factor**step
        self.others = [self.scale, None]
        self.by_name = {"scale": self.scale, "bound": self.get_lr}
        self.same = optimizer
        self.seen: list[int] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen.append(self.last_epoch)
        return [base * self.scale(self.last_epoch) for base in self.base_lrs]  # type: ignore[no-untyped-call]


class WarmUp(LRScheduler):
    """A warm-up around another scheduler, as many have written it."""

    def __init__(self, optimizer: Optimizer, after: Any, steps: int) -> None:
        self.after, self.steps = after, steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch >= self.steps:
            self.after.step()
            return [group["lr"] for group in self.optimizer.param_groups]
        return [base * (self.last_epoch + 1) / self.steps for base in self.base_lrs]


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)], o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "LambdaLR, objects": lambda o: lr_scheduler.LambdaLR(o, [Power(0.5), Power(0.25)]),
    "LinearLR": lr_scheduler.LinearLR,
    "ConstantLR": lr_scheduler.ConstantLR,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CyclicLR, function": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 2, scale_fn=lambda x: 0.9**x),
    "OneCycleLR, linear": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=10, anneal_strategy="linear"),
    "SequentialLR of three": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LambdaLR(o, lambda step: 0.5),
            lr_scheduler.StepLR(o, 2),
            lr_scheduler.CosineAnnealingLR(o, 4),
        ],
        [1, 3],
    ),
    "with functions": lambda o: WithLambda(o, 0.5),
    "a warm-up": lambda o: WarmUp(o, lr_scheduler.ExponentialLR(o, 0.5), 2),
}
KINDS = {"numbers": 0.5, "tensors": torch.tensor(0.5)}


def job(name: str, lr: Any = 0.5) -> State:
    state = build(two_groups(torch.optim.SGD, lr=lr, momentum=0.9))
    return {**state, "scheduler": SCHEDULERS[name](state["optimizer"])}


OBJECTS = [(name, "object", "object", begun, lr) for name in SCHEDULERS for begun in (0, 1) for lr in KINDS]
FORMS: list[tuple[str, str]] = [("dict", "object"), ("object", "dict"), ("dict", "dict")]
DICTS = [
    (name, *forms, 0, lr)
    for name in SCHEDULERS
    for forms in FORMS
    for lr in KINDS
    if name not in ("with functions", "a warm-up")  # their dicts have what cannot be saved
    # A new one's dict has the rates of its first scheduler as its own: the same tensors at two names.
    if not (name.startswith("SequentialLR") and forms[1] == "dict" and lr == "tensors")
]


@pytest.mark.parametrize(("name", "saved_as", "loaded_as", "begun", "lr"), [*OBJECTS, *DICTS])
def test_schedulers_go_on_where_they_were(
    save: Any, name: str, saved_as: str, loaded_as: str, begun: int, lr: str
) -> None:
    state, found = (job(name, copy.deepcopy(KINDS[lr])) for _ in range(2))
    train(state, 2)
    saved = save(state if saved_as == "object" else {**state, "scheduler": state["scheduler"].state_dict()})
    train(found, begun)
    here = found if loaded_as == "object" else {**found, "scheduler": found["scheduler"].state_dict()}
    loaded = saved.load(here)
    assert (loaded.missing, loaded.unexpected, loaded.problems) == ((), (), ())
    if loaded_as == "dict":
        found["scheduler"].load_state_dict(here["scheduler"])
    for _ in range(3):
        assert save(state).equals(found)
        assert state["optimizer"].param_groups[0]["lr"] == found["optimizer"].param_groups[0]["lr"]
        train(state, 1)
        train(found, 1)


def test_one_tensor_is_refused_for_two_saved_ones(save: Any) -> None:
    state, found = (job("SequentialLR", torch.tensor(0.5)) for _ in range(2))
    train(state, 2)
    here = {**found, "scheduler": found["scheduler"].state_dict()}
    with pytest.raises(StateMismatchError, match=r"shares its memory with scheduler\._last_lr\[0\], but"):
        save(state).load(here)


def test_reduce_on_plateau_and_the_gradient_scaler_come_back(save: Any) -> None:
    def make() -> State:
        state = build(two_groups(torch.optim.SGD))
        plateau = lr_scheduler.ReduceLROnPlateau(state["optimizer"], patience=1)
        return {**state, "plateau": plateau, "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}

    state, found = make(), make()
    for loss in (1.0, 2.0, 3.0, 4.0):
        state["plateau"].step(loss)
    state["scaler"].scale(torch.ones(1))
    state["scaler"].update(512.0)
    saved = save(state)
    saved.load(found)
    assert saved.equals(found)
    assert found["scaler"].state_dict()["scale"] == 512.0


def test_functions_of_the_program_stay_and_lists_are_its_own(save: Any) -> None:
    state, found = job("with functions"), job("with functions")
    train(state, 2)
    kept = found["scheduler"].scale
    saved = save(state)
    assert set(saved.stored.values["scheduler"]["value"]) >= {"seen", "base_lrs"}
    assert not {"scale", "others", "by_name", "same"} & set(saved.stored.values["scheduler"]["value"])
    saved.load(found)
    assert found["scheduler"].scale is kept
    assert found["scheduler"].same is found["optimizer"]
    assert found["scheduler"].seen == state["scheduler"].seen


def test_the_scheduler_inside_stays_the_object(save: Any) -> None:
    state, found = job("a warm-up"), job("a warm-up")
    train(state, 4)
    inside = found["scheduler"].after
    save(state).load(found)
    assert found["scheduler"].after is inside
    assert inside.last_epoch == state["scheduler"].after.last_epoch > 0


def test_another_scheduler_is_a_mismatch_that_names_both(save: Any) -> None:
    saved = save(job("LinearLR"))
    message = r"PolynomialLR in the state \(with power\), LinearLR in the checkpoint \(with end_factor, start_factor\)"
    with pytest.raises(StateMismatchError, match=message):
        saved.load(job("PolynomialLR"))
    found = job("PolynomialLR")
    before = found["scheduler"].state_dict()
    assert saved.load(found, strict=False).problems
    assert found["scheduler"].state_dict() == before
    as_dict = job("LinearLR")
    saved = save({**as_dict, "scheduler": as_dict["scheduler"].state_dict()})
    with pytest.raises(StateMismatchError, match="a scheduler of another class"):
        saved.load(job("PolynomialLR"))


def test_a_subclass_and_an_older_torch_go_on(save: Any) -> None:
    class Mine(lr_scheduler.StepLR):
        mine = 1

    state = build(two_groups(torch.optim.SGD))
    saved = save({**state, "scheduler": lr_scheduler.StepLR(state["optimizer"], 2, gamma=0.5)})
    found = build(two_groups(torch.optim.SGD))
    scheduler = Mine(found["optimizer"], 3)
    scheduler.newer = True  # type: ignore[attr-defined]
    saved.load({**found, "scheduler": scheduler})
    assert scheduler.gamma == 0.5
    del saved.stored.values["scheduler"]["class"], saved.stored.values["scheduler"]["value"]["_is_initial"]
    scheduler = Mine(found["optimizer"], 3)
    saved.load({**found, "scheduler": scheduler})
    assert scheduler.gamma == 0.5


def test_an_attribute_that_cannot_be_saved_is_named() -> None:
    state = job("LinearLR")
    state["scheduler"].lock = object()
    with pytest.raises(UnsupportedStateError, match=r"scheduler\.lock"):
        StateWalker().walk(state)
