"""Optimizers of bitsandbytes on the CPU, with 8-bit and 32-bit states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.real.small import BATCH, Run, prove

bnb: Any = pytest.importorskip("bitsandbytes")
WIDTH = 64
"""So that the weights have the 4,096 elements from which the states are of 8 bits."""
NAMES = [
    "Adam", "Adam8bit", "Adam32bit", "AdamW", "AdamW8bit", "AdEMAMix", "AdEMAMix8bit", "Adagrad", "Adagrad8bit", "LAMB",
    "LAMB8bit", "LARS", "LARS8bit", "Lion", "Lion8bit", "RMSprop", "RMSprop8bit", "SGD", "SGD8bit",
]  # fmt: skip


def with_optimizer(name: str) -> Run:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    settings = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    optimizer = getattr(bnb.optim, name)(model.parameters(), lr=0.01, **settings)

    def step(number: int) -> torch.Tensor:
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().mean(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Run({"model": model, "optimizer": optimizer}, step)


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_is_certified(name: str) -> None:
    prove(lambda: with_optimizer(name))
