"""A loop of lightning's Fabric, on one process: what it set up goes into the state as it is, or what it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.real.small import Run, batch, mlp, prove

fabric_of: Any = pytest.importorskip("lightning_fabric")

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of each other proves nothing


def with_fabric(precision: str, *, unwrapped: bool) -> Run:
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    its_model, its_optimizer = fabric.setup(model, optimizer)

    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)
        its_optimizer.zero_grad()
        loss = nn.functional.mse_loss(its_model(inputs).float(), targets)
        fabric.backward(loss)
        fabric.clip_gradients(its_model, its_optimizer, max_norm=1.0)
        its_optimizer.step()
        return loss.detach()

    if unwrapped:
        return Run({"model": model, "optimizer": optimizer}, step)
    return Run({"model": its_model, "optimizer": its_optimizer}, step)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("unwrapped", [True, False], ids=["what was given", "what was set up"])
def test_its_loop_is_certified(precision: str, unwrapped: bool) -> None:
    prove(lambda: with_fabric(precision, unwrapped=unwrapped))
