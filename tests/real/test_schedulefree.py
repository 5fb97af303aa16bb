"""The optimizers of schedulefree: their two sets of weights, and the mode they are in, resume as the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.real.small import Run, batch, mlp, plain_step, prove

schedulefree: Any = pytest.importorskip("schedulefree")

STEPPED: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: schedulefree.AdamWScheduleFree(params, lr=0.01, warmup_steps=3),
    "AdamW, foreach": lambda params: schedulefree.AdamWScheduleFree(params, lr=0.01, foreach=True),
    "AdamW, one by one": lambda params: schedulefree.AdamWScheduleFree(params, lr=0.01, foreach=False, r=1.0),
    "SGD": lambda params: schedulefree.SGDScheduleFree(params, lr=0.1, warmup_steps=2, weight_decay=0.01),
    "RAdam": lambda params: schedulefree.RAdamScheduleFree(params, lr=0.01),
    "AdamW, reference": lambda params: schedulefree.AdamWScheduleFreeReference(params, lr=0.01),
    "SGD, reference": lambda params: schedulefree.SGDScheduleFreeReference(params, lr=0.1),
    "AdamW, paper": lambda params: schedulefree.AdamWScheduleFreePaper(params, lr=0.01),
}
BY_CLOSURE = ("AdamWScheduleFreeClosure", "SGDScheduleFreeClosure", "RAdamScheduleFreeClosure")


def with_optimizer(make: Callable[[Any], Any], *, evaluate: bool) -> Run:
    model = mlp()
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()

    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if evaluate and number % 3 == 1:
            optimizer.eval()
            loss = nn.functional.mse_loss(model(inputs), targets).detach()
            optimizer.train()
        return loss.detach()

    return Run({"model": model, "optimizer": optimizer}, step)


@pytest.mark.parametrize("name", STEPPED)
def test_each_optimizer_is_certified(name: str) -> None:
    prove(lambda: with_optimizer(STEPPED[name], evaluate=False))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RAdam"])
def test_with_evaluations_between_its_steps_it_is_certified(name: str) -> None:
    prove(lambda: with_optimizer(STEPPED[name], evaluate=True))


def by_closure(name: str) -> Run:
    model = mlp()
    optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.01)
    return Run({"model": model, "optimizer": optimizer}, plain_step(model, optimizer))


@pytest.mark.parametrize("name", BY_CLOSURE)
def test_each_one_that_takes_a_closure_is_certified(name: str) -> None:
    prove(lambda: by_closure(name))
