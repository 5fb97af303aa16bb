"""Averages of ema-pytorch: warm-up, how far they are, and both models resume as the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.real.small import Run, mlp, plain_step, prove

ema_pytorch: Any = pytest.importorskip("ema_pytorch")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"update_after_step": 2, "update_every": 1},
    "every other step": {"update_after_step": 1, "update_every": 2, "beta": 0.9},
    "with a model of its own": {"include_online_model": True, "update_after_step": 1, "update_every": 1},
    "without the online model": {"include_online_model": False, "update_after_step": 1, "update_every": 1},
    "power": {"update_after_step": 0, "update_every": 1, "power": 3 / 4, "inv_gamma": 2.0},
    "switched": {"update_after_step": 0, "update_every": 1, "update_model_with_ema_every": 3},
}


def with_average(settings: dict[str, Any]) -> Run:
    model = mlp()
    average = ema_pytorch.EMA(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, lambda loss: average.update())
    return Run({"model": model, "average": average, "optimizer": optimizer}, step)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_kind_of_average_is_certified(name: str) -> None:
    found = prove(lambda: with_average(SETTINGS[name]))
    assert {row.row: row.outcome for row in found.rows}["average"] == "equal"


def with_karras() -> Run:
    model = mlp()
    average = ema_pytorch.KarrasEMA(model, sigma_rel=0.05, update_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = plain_step(model, optimizer, lambda loss: average.update())
    return Run({"model": model, "average": average, "optimizer": optimizer}, step)


def test_a_karras_average_is_certified() -> None:
    prove(with_karras)
