"""A loop of accelerate, on one process: its prepared model, optimizer and scheduler go into the state as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.real.small import Run, batch, mlp, prove

accelerate: Any = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of each other proves nothing


def with_accelerator(settings: dict[str, Any], *, unwrapped: bool) -> Run:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    its_model, its_optimizer, its_scheduler = accelerator.prepare(model, optimizer, scheduler)

    batches = settings.get("gradient_accumulation_steps", 1)

    def step(number: int) -> torch.Tensor:
        # Between the batches of a step there are gradients, which are in no checkpoint: it is saved after the step.
        loss = torch.zeros(())
        for part in range(batches):
            inputs, targets = batch(number * batches + part)
            with accelerator.accumulate(its_model):
                loss = nn.functional.mse_loss(its_model(inputs).float(), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(its_model.parameters(), 1.0)
                its_optimizer.step()
                its_scheduler.step()
                its_optimizer.zero_grad()
        return loss.detach()

    if unwrapped:
        return Run({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)
    return Run({"model": its_model, "optimizer": its_optimizer, "scheduler": its_scheduler}, step)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "two batches a step": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("unwrapped", [True, False], ids=["what was given", "what was prepared"])
def test_its_loop_is_certified(name: str, unwrapped: bool) -> None:
    prove(lambda: with_accelerator(SETTINGS[name], unwrapped=unwrapped))
