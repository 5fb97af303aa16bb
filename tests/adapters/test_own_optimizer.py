"""`aiockpt.per_rank(optimizer)`: what one rank holds, its parameters that are in no module among it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt


def trained(temperature: float) -> tuple[torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer]:
    """Return a module, the temperature of a loss, and their optimizer."""
    model, loose = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.full((1,), temperature))
    optimizer = torch.optim.Adam([*model.parameters(), loose], lr=0.1)
    (model(torch.ones(1, 2)).sum() * loose).sum().backward()
    optimizer.step()
    return model, loose, optimizer


def own(optimizer: torch.optim.Optimizer) -> Any:
    return aiockpt.per_rank(optimizer)


@pytest.mark.parametrize("held", [own, lambda optimizer: optimizer], ids=["of one rank", "of all"])
def test_a_parameter_that_is_in_no_module_comes_back_with_the_optimizer_of_its_rank(
    tmp_path: Path, held: Callable[[torch.optim.Optimizer], Any]
) -> None:
    model, loose, optimizer = trained(3.0)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": held(optimizer)}).result()
    other, into, second = trained(9.0)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"model": other, "optimizer": held(second)}).result()
    assert into.item() == loose.item()
    assert torch.equal(second.state[into]["exp_avg"], optimizer.state[loose]["exp_avg"])


def test_where_the_weights_are_kept_elsewhere_they_stay_as_they_are(tmp_path: Path) -> None:
    _, loose, optimizer = trained(3.0)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"optimizer": own(optimizer)}).result()
    _, into, second = trained(9.0)
    before = into.item()
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"optimizer": own(second)}).result()
    assert into.item() == before
    assert torch.equal(second.state[into]["exp_avg"], optimizer.state[loose]["exp_avg"])
