"""Every optimizer and every scheduler of torch, resumed as the run that was never stopped. A certificate each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tests.real.small import Run, batch, mlp, plain_step, prove

Optimizer = torch.optim.Optimizer

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 3}],
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{"lr_decay": 0.1}],
    "Adam": [
        {},
        {"amsgrad": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.01)},
        {"capturable": False},
    ],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}],
    "LBFGS": [{"max_iter": 3}, {"max_iter": 4, "line_search_fn": "strong_wolfe", "history_size": 3}],
    "Muon": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RAdam": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    "SparseAdam": [{}],
}
"""Optimizer → keywords of each certificate."""


def _optimizer_names() -> set[str]:
    found = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    return {name for name, value in found.items() if issubclass(value, Optimizer) and value is not Optimizer}


def test_no_optimizer_of_torch_is_left_out() -> None:
    assert _optimizer_names() <= set(SETTINGS)


def _with_optimizer(name: str, settings: dict[str, Any]) -> Run:
    model: nn.Module = mlp()
    if name == "SparseAdam":
        torch.manual_seed(1)
        model = nn.EmbeddingBag(20, 1, sparse=True)
    elif name == "Muon":
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    step = plain_step(model, optimizer)
    if name == "SparseAdam":
        step = partial(_sparse_step, model, optimizer)
    return Run({"model": model, "optimizer": optimizer}, step)


def _sparse_step(model: nn.Module, optimizer: Optimizer, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    words = torch.randint(0, 20, (8, 3))
    loss: torch.Tensor = (model(words) - 1).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, id=f"{name}-{','.join(settings) or 'plain'}")
        for name in SETTINGS
        if hasattr(torch.optim, name)
        for settings in SETTINGS[name]
    ],
)
def test_each_optimizer_is_certified(name: str, settings: dict[str, Any]) -> None:
    found = prove(lambda: _with_optimizer(name, settings))
    rows = {row.row: row.outcome for row in found.rows}
    assert rows["model"] == rows["training: weights"] == "equal"
    assert name == "SGD" or any(row.startswith("optimizer ") and rows[row] == "equal" for row in rows), rows


SCHEDULERS: dict[str, list[Callable[[Optimizer], Any]]] = {
    "ChainedScheduler": [
        lambda it: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(it, 0.1, 3), lr_scheduler.ExponentialLR(it, 0.9)], it
        )
    ],
    "ConstantLR": [lambda it: lr_scheduler.ConstantLR(it, 0.5, 3)],
    "CosineAnnealingLR": [lambda it: lr_scheduler.CosineAnnealingLR(it, 6)],
    "CosineAnnealingWarmRestarts": [lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 2, 2)],
    "CyclicLR": [
        lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 3),
        lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 2, mode="exp_range", gamma=0.9, scale_mode="iterations"),
    ],
    "ExponentialLR": [lambda it: lr_scheduler.ExponentialLR(it, 0.9)],
    "LRScheduler": [],
    "LambdaLR": [
        lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.9**epoch),
        lambda it: lr_scheduler.LambdaLR(it, Warmup()),
    ],
    "LinearLR": [lambda it: lr_scheduler.LinearLR(it, 0.3, total_iters=5)],
    "MultiStepLR": [lambda it: lr_scheduler.MultiStepLR(it, [2, 5], 0.5)],
    "MultiplicativeLR": [lambda it: lr_scheduler.MultiplicativeLR(it, lambda epoch: 0.95)],
    "OneCycleLR": [
        lambda it: lr_scheduler.OneCycleLR(it, 0.1, 10),
        lambda it: lr_scheduler.OneCycleLR(it, 0.1, 9, three_phase=True),
    ],
    "PolynomialLR": [lambda it: lr_scheduler.PolynomialLR(it, 7, 2.0)],
    "ReduceLROnPlateau": [lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0, threshold=0.5, cooldown=1)],
    "SequentialLR": [
        lambda it: lr_scheduler.SequentialLR(
            it, [lr_scheduler.LinearLR(it, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(it, 5)], [3]
        )
    ],
    "StepLR": [lambda it: lr_scheduler.StepLR(it, 3, 0.5)],
    "SWALR": [lambda it: swa_utils.SWALR(it, 0.01, 4)],
}
"""Scheduler → what makes it, once for each certificate."""


class Warmup:
    """A rule with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(1.0, (epoch + 1) / 4) + self.calls / 1000


def test_no_scheduler_of_torch_is_left_out() -> None:
    named = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert named <= set(SCHEDULERS)


def _with_scheduler(make: Callable[[Optimizer], Any]) -> Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = make(optimizer)
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    step = plain_step(model, optimizer, lambda loss: scheduler.step(loss.item()) if is_plateau else scheduler.step())
    return Run({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


@pytest.mark.parametrize(
    "make", [pytest.param(one, id=f"{name}-{at}") for name, some in SCHEDULERS.items() for at, one in enumerate(some)]
)
def test_each_scheduler_is_certified(make: Callable[[Optimizer], Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*epoch parameter in `scheduler.step")  # SequentialLR's own
        found = prove(lambda: _with_scheduler(make))
    rows = {row.row: row.outcome for row in found.rows}
    assert rows["scheduler"] == "equal"
    assert rows["training: settings"] == "equal", "the learning rate moves"


def _with_average() -> Run:
    model = mlp()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, lambda loss: average.update_parameters(model))
    return Run({"model": model, "average": average, "optimizer": optimizer}, step)


def test_an_averaged_model_is_certified() -> None:
    prove(_with_average)


def _with_scaler() -> Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs), targets.bfloat16())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Run({"model": model, "optimizer": optimizer, "scaler": scaler}, step)


def test_a_gradient_scaler_is_certified() -> None:
    found = prove(_with_scaler)
    assert {row.row: row.outcome for row in found.rows}["scaler"] == "equal"


def _two_optimizers() -> Run:
    torch.manual_seed(1)
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU(), nn.Linear(4, 1))
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.RMSprop(critic.parameters(), lr=0.01)

    def step(number: int) -> torch.Tensor:
        inputs, _ = batch(number)
        noise = torch.randn(8, 4)
        second.zero_grad()
        told: torch.Tensor = critic(generator(noise).detach()).mean() - critic(inputs).mean()
        told.backward()  # type: ignore[no-untyped-call]
        second.step()
        if number % 2 == 0:
            first.zero_grad()
            loss: torch.Tensor = -critic(generator(noise)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            first.step()
        return told.detach()

    return Run({"generator": generator, "critic": critic, "first": first, "second": second}, step)


def test_two_models_that_train_each_other_are_certified() -> None:
    prove(_two_optimizers)
