"""Optimizers of torchao with 8-bit, 4-bit and fp8 states, and models of int8 weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.real.small import BATCH, Run, prove

pytest.importorskip("torchao")
optim: Any = pytest.importorskip("torchao.optim")
WIDTH = 64
"""So that the weights have the 4,096 elements from which torchao makes their states small."""


@pytest.fixture(autouse=True)
def _without_compiling() -> Iterator[None]:
    # Its steps are compiled, which needs a compiler of C++ and proves nothing more.
    with patch.object(torch, "compile", lambda function, **_: function):
        yield


def big() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


def step_of(model: nn.Module, optimizer: Any) -> Any:
    def step(number: int) -> torch.Tensor:
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sin())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def with_optimizer(name: str, settings: dict[str, Any]) -> Run:
    model = big()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01, **settings)
    return Run({"model": model, "optimizer": optimizer}, step_of(model, optimizer))


@pytest.mark.parametrize("settings", [{}, {"bf16_stochastic_round": True}], ids=["plain", "rounded at random"])
@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"])
def test_each_optimizer_is_certified(name: str, settings: dict[str, Any]) -> None:
    prove(lambda: with_optimizer(name, settings), steps=4, every=1)


def with_int8_weights() -> Run:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(big(), nn.Linear(WIDTH, WIDTH))
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    for one in model[0].parameters():
        one.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    return Run({"model": model, "optimizer": optimizer}, step_of(model, optimizer))


def test_layers_on_top_of_int8_weights_are_certified() -> None:
    prove(with_int8_weights)
