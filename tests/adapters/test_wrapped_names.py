"""Models and their ``state_dict()``s find each other whatever was wrapped around them, and their optimizers with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import resume

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "data parallel": nn.DataParallel,
    "both": lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
}
FORMS = ("object", "dict")


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("optimizers", ["object", "numbers"])
@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("here", FORMS)
@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("now", WRAPPERS)
def test_what_was_wrapped_loads_into_another_wrapping(
    before: str, now: str, there: str, here: str, optimizers: str
) -> None:
    (source, saved_optimizer), (target, optimizer) = trained(0), trained(1)
    outer, found = WRAPPERS[before](source), WRAPPERS[now](target)
    result = resume(
        {
            "model": outer if there == "object" else outer.state_dict(),
            "optimizer": saved_optimizer if optimizers == "object" else saved_optimizer.state_dict(),
        },
        {"model": found if here == "object" else found.state_dict(), "optimizer": optimizer},
    )
    assert (result.missing, result.unexpected, result.differences) == ((), (), ())
    for key, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[key]), key
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        state = optimizer.state[other]
        assert {key: value.tolist() for key, value in saved_optimizer.state[one].items()} == {
            key: value.tolist() for key, value in state.items()
        }


def test_differences_have_the_names_of_their_own_dict() -> None:
    saved = {f"module.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()} | {
        "module.old": torch.ones(1)
    }
    found = nn.Linear(2, 2).state_dict() | {"new": torch.ones(1)}
    result = resume({"m": saved}, {"m": found}, strict=False)
    assert result.missing == (r"m.new",)
    assert result.unexpected == (r"m.module\.old",)
    assert torch.equal(found["weight"], saved["module.weight"])


def test_dicts_that_share_a_key_are_not_taken_for_wrapped_ones() -> None:
    found = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    result = resume({"m": {"a": torch.ones(1), "b": torch.ones(1)}}, {"m": found}, strict=False)
    assert result.missing == (r"m.module\.a",)
    assert found["module.a"].item() == 0
