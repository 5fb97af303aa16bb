"""The optimizers and schedules of pytorch_optimizer: each resumes as the same run, or the reason why not is here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from tests.real.small import Run, batch, mlp, plain_step, prove

made_there: Any = pytest.importorskip("pytorch_optimizer")

NAMES: list[str] = made_there.get_supported_optimizers()
SETTINGS: dict[str, dict[str, Any]] = {
    "bsam": {"num_data": 64},
    "ranger21": {"num_iterations": 8},
    "adammini": {"num_embeds": 8, "num_heads": 2},
}
ASKS_FOR_SECOND_DERIVATIVES = ("adahessian", "sophiah")
WANTS_ITS_CLOSURE = ("alig", "bsam", "lbfgs")
HAS_TWO_KINDS_OF_GROUPS = ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon")
TAKES_THE_MODEL = ("adammini",)
DOES_THE_BACKWARD = ("adalomo", "lomo")
NOT_ONE_PROCESS = {
    "demo": "exchanges its gradients among ranks, which the proof in one process does not have",
    "distributedmuon": "exchanges its updates among ranks, which the proof in one process does not have",
}


def by_attributes(place: str, name: str) -> None:
    """Let the instances of a class be saved by their attributes."""
    cls = getattr(importlib.import_module(f"pytorch_optimizer.optimizer.{place}"), name)

    def again(plain: dict[str, Any]) -> Any:
        made = cls.__new__(cls)
        vars(made).update(plain)
        return made

    aiockpt.register_codec(f"pytorch_optimizer.{name}", cls, lambda value: dict(vars(value)), again)


@pytest.fixture(autouse=True, scope="module")
def _classes_in_states() -> None:
    by_attributes("utils.galore", "GaLoreProjector")
    by_attributes("utils.preconditioner", "PreConditioner")
    by_attributes("utils.partition", "BlockPartitioner")
    by_attributes("utils.graft", "SGDGraft")
    for place, name in (("scion", "LMONorm"), ("utils.partition", "PreConditionerType")):
        cls = getattr(importlib.import_module(f"pytorch_optimizer.optimizer.{place}"), name)
        aiockpt.register_codec(f"pytorch_optimizer.{name}", cls)


def groups_of(name: str, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if name in TAKES_THE_MODEL or name in DOES_THE_BACKWARD:
        return model
    if name == "spectralsphere":
        return [one for one in parameters if one.ndim == 2]
    if name in HAS_TWO_KINDS_OF_GROUPS:
        kinds = [
            (True, [one for one in parameters if one.ndim == 2]),
            (False, [one for one in parameters if one.ndim < 2]),
        ]
        return [{"params": params, "use_muon": is_matrix} for is_matrix, params in kinds]
    return parameters


def step_of(name: str, model: nn.Module, optimizer: Any) -> Callable[[int], torch.Tensor]:
    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = nn.functional.mse_loss(model(inputs), targets)
            if name in DOES_THE_BACKWARD:
                optimizer.fused_backward(loss, lr=0.001)
            else:
                loss.backward(create_graph=name in ASKS_FOR_SECOND_DERIVATIVES)  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = closure()
        if name not in DOES_THE_BACKWARD:
            optimizer.step(closure if name in WANTS_ITS_CLOSURE else None)
        return loss

    return step


def with_optimizer(name: str) -> Run:
    model = mlp()
    optimizer = made_there.load_optimizer(name)(groups_of(name, model), **SETTINGS.get(name, {}))
    return Run({"model": model, "optimizer": optimizer}, step_of(name, model, optimizer))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:you need to install .transformers. to use:ImportWarning")
@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_is_certified(name: str) -> None:
    if name in NOT_ONE_PROCESS:
        pytest.xfail(NOT_ONE_PROCESS[name])
    prove(lambda: with_optimizer(name))


ITS_OWN_SCHEDULES: dict[str, dict[str, Any]] = {
    "chebyshev": {"num_epochs": 8},
    "cosine": {"t_max": 8, "max_lr": 0.1, "warmup_steps": 3},
    "cosine_annealing_with_warmup": {"first_cycle_steps": 4, "warmup_steps": 1, "max_lr": 0.1},
    "linear": {"t_max": 8, "max_lr": 0.1, "warmup_steps": 3},
    "poly": {"t_max": 8, "max_lr": 0.1, "warmup_steps": 3},
    "rex": {"total_steps": 9},
    "warmup_stable_decay": {"num_warmup_steps": 2, "num_stable_steps": 2, "num_decay_steps": 4},
}
"""The others are torch's, or, as `proportion`, no schedule of learning rates."""


def with_schedule(name: str) -> Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = made_there.load_lr_scheduler(name)(optimizer, **ITS_OWN_SCHEDULES[name])
    step = plain_step(model, optimizer, lambda loss: scheduler.step())
    return Run({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


WITHOUT_STATE_DICT = ("cosine", "linear", "poly")


@pytest.mark.parametrize("name", ITS_OWN_SCHEDULES)
def test_each_schedule_is_certified(name: str, request: pytest.FixtureRequest) -> None:
    if name in WITHOUT_STATE_DICT:
        reason = "is refused: the schedule has no state_dict(), and keeps its position in attributes"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=aiockpt.UsageError, strict=True))
    prove(lambda: with_schedule(name))
