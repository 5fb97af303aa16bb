"""Models, optimizers, schedules and averages of timm: pictures of 32 pixels, and every optimizer that its factory names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.real.small import Run, batch, mlp, plain_step, prove

ROI = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
DECLARED: list[torch.library.Library] = []
"""What is let go of is declared no longer."""


def import_torchvision() -> None:
    """Import torchvision, which timm needs; its wheel may hold no operators for this torch, and no model here calls one."""
    try:
        pytest.importorskip("torchvision")
    except RuntimeError:  # it describes operators that do not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms", *ROI, *(f"_{name}_backward" for name in ROI)):
            library.define(f"{operator}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
        DECLARED.append(library)


import_torchvision()
timm: Any = pytest.importorskip("timm")
timm_optim: Any = pytest.importorskip("timm.optim")
timm_scheduler: Any = pytest.importorskip("timm.scheduler")
timm_utils: Any = pytest.importorskip("timm.utils")

PIXELS, PICTURES, CLASSES = 32, 4, 5

MODELS: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnetv2_50": {"layers": (1, 1, 1, 1)},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "regnetx_002": {},
    "edgenext_xx_small": {},
    "ghostnet_050": {},
    "vit_tiny_patch16_224": {"img_size": PIXELS, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": PIXELS, "depth": 2},
    "beit_base_patch16_224": {"img_size": PIXELS, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": PIXELS, "window_size": 4, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2),
    },
}  # fmt: skip

NEEDS_WHAT_IS_NOT_HERE = ("bnb", "fused")
"""Beginnings of the names that need bitsandbytes (it has certificates of its own) or apex, which needs CUDA."""
OPTIMIZERS = [name for name in timm_optim.list_optimizers() if not name.startswith(NEEDS_WHAT_IS_NOT_HERE)]

SCHEDULES: dict[str, dict[str, Any]] = {
    "CosineLRScheduler": {"t_initial": 3, "cycle_limit": 3, "cycle_decay": 0.5, "warmup_t": 1},
    "MultiStepLRScheduler": {"decay_t": [2, 5], "decay_rate": 0.5, "warmup_t": 1},
    "PlateauLRScheduler": {"decay_rate": 0.5, "patience_t": 1, "mode": "max"},  # a bad epoch is counted at each save
    "PolyLRScheduler": {"t_initial": 8, "power": 2.0},
    "StepLRScheduler": {"decay_t": 2, "decay_rate": 0.5, "noise_range_t": (3, 8)},
    "TanhLRScheduler": {"t_initial": 8, "warmup_t": 2},
    "WSDLRScheduler": {"t_initial": 8, "decay_t": 3, "warmup_t": 2},
}

AVERAGES: dict[str, dict[str, Any]] = {
    "plain": {"decay": 0.9},
    "warm-up": {"decay": 0.99, "use_warmup": True, "update_after_step": 2, "warmup_gamma": 2.0},
    "parameter by parameter": {"decay": 0.9, "foreach": False, "exclude_buffers": True},
}

ANOTHER_RUN = {
    "adahessian": "draws from a generator of its own, which is in no state_dict()",
    "PlateauLRScheduler": "its state_dict() has no count of the bad epochs, as it says itself when it is made",
}


def expect_another_run(name: str, request: pytest.FixtureRequest) -> None:
    """Say of what is known to be another run after a resume that it is, and why."""
    if name in ANOTHER_RUN:
        request.applymarker(pytest.mark.xfail(reason=ANOTHER_RUN[name], raises=AssertionError, strict=True))


def pictures(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures (4, 3, 32, 32) of *step*, always the same ones, and a class for each."""
    source = torch.Generator().manual_seed(step)
    return torch.randn(PICTURES, 3, PIXELS, PIXELS, generator=source), torch.randint(
        CLASSES, (PICTURES,), generator=source
    )


def on_pictures(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object] = int) -> Any:
    """Return the step of a trainer of images; *after* comes at its end."""

    def step(number: int) -> torch.Tensor:
        inputs, labels = pictures(number)
        said = model(inputs)
        both = said if isinstance(said, tuple) else (said,)  # distilled: its two heads
        loss = torch.stack([nn.functional.cross_entropy(one, labels) for one in both]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
        optimizer.step()
        after()
        return loss

    return step


def model_named(name: str) -> nn.Module:
    """Return a model with dropped paths, always with the same weights."""
    torch.manual_seed(1)
    dropping = {} if name.startswith("ghostnet") else {"drop_path_rate": 0.1}
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **dropping, **MODELS[name])
    return model


@pytest.mark.parametrize("name", MODELS)
def test_each_family_of_models_is_certified(name: str) -> None:
    def make() -> Run:
        model = model_named(name)
        optimizer = timm_optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
        return Run({"model": model, "optimizer": optimizer}, on_pictures(model, optimizer))

    prove(make, steps=4)


def step_of(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if not timm_optim.get_optimizer_info(name).second_order:
        return plain_step(model, optimizer)

    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]  # so it is in torch
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_is_certified(name: str, request: pytest.FixtureRequest) -> None:
    expect_another_run(name, request)

    def make() -> Run:
        model = mlp()
        optimizer = timm_optim.create_optimizer_v2(model, opt=name, lr=1e-2, weight_decay=0.01)
        return Run({"model": model, "optimizer": optimizer}, step_of(name, model, optimizer))

    prove(make)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_is_certified(name: str, request: pytest.FixtureRequest) -> None:
    expect_another_run(name, request)

    def make() -> Run:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = getattr(timm_scheduler, name)(optimizer, **SCHEDULES[name])
        train = plain_step(model, optimizer)

        def step(number: int) -> torch.Tensor:
            loss: torch.Tensor = train(number)
            schedule.step(number + 1, loss.item())
            return loss

        return Run({"model": model, "optimizer": optimizer, "schedule": schedule}, step)

    prove(make)


@pytest.mark.parametrize("name", AVERAGES)
def test_each_kind_of_average_is_certified(name: str) -> None:
    def make() -> Run:
        model = model_named("resnet10t")
        average = timm_utils.ModelEmaV3(model, **AVERAGES[name])
        optimizer = timm_optim.create_optimizer_v2(model, opt="lamb", lr=1e-3)
        progress = {"updates": 0}

        def update() -> None:
            average.update(model, step=progress["updates"])
            progress["updates"] += 1

        state = {"model": model, "average": average, "optimizer": optimizer, "progress": progress}
        return Run(state, on_pictures(model, optimizer, update))

    found = prove(make, steps=4)
    assert {row.row: row.outcome for row in found.rows}["average"] == "equal"
