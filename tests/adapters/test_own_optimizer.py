"""`aiockpt.per_rank(optimizer)`: what one rank holds, its parameters that are in no module among it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from tests.adapters.conftest import resume, same


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
def test_a_parameter_of_no_module_comes_with_its_optimizer(
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


def test_a_module_of_one_rank_comes_back_in_place() -> None:
    model, found = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    weight = found.get_parameter("0.weight")
    resume({"own": aiockpt.per_rank(model)}, {"own": aiockpt.per_rank(found)})
    assert found.get_parameter("0.weight") is weight
    assert same(model, found)
    kept = weight.clone()
    other = nn.Sequential(found[0], nn.BatchNorm1d(3))
    with pytest.raises(aiockpt.StateMismatchError, match="own"):
        resume(
            {"own": aiockpt.per_rank(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))},
            {"own": aiockpt.per_rank(other)},
        )
    assert torch.equal(weight, kept)


def test_an_optimizer_made_before_a_layer_was_replaced_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters())
    model[0] = nn.Linear(2, 3)
    with aiockpt.Checkpointer("memory://replaced") as ckpt:
        ckpt.save(1, {"model": model, "o": optimizer}).result()
        loose = torch.optim.SGD([nn.Parameter(torch.ones(7)), *model.parameters()])
        ckpt.save(2, {"model": model, "o": loose}).result()
    told = [record.getMessage() for record in caplog.records if "in no module of the state" in record.getMessage()]
    assert "Or model.0.weight, model.0.bias replaced them after it was made" in told[0]
    assert "replaced them" not in told[1]


def test_an_empty_parameter_has_its_name_beside_a_state_dict(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ParameterDict({"some": nn.Parameter(torch.ones(2)), "none": nn.Parameter(torch.ones(0))})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with aiockpt.Checkpointer("memory://empty") as ckpt:
        ckpt.save(1, {"model": model.state_dict(), "o": optimizer}).result()
        assert {one.name for one in ckpt.describe(1).result().tensors} == {"model.some", "model.none"}
    assert "in no module of the state" not in caplog.text
