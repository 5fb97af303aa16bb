"""Values that each rank has of its own, where replicas are not compared: those of one rank are saved."""

from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.planning import spread
from tests.ranks.crew import Crew

_SEED = Lock()
"""Ranks are threads here, and have one random generator."""


def trained(rank: int) -> dict[str, Any]:
    """Return the state of a rank of DDP: parameters and optimizer alike, buffers of the batches that it has seen."""
    with _SEED:
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    ema = {name: torch.full_like(weight, rank + 1.0) for name, weight in model.named_parameters()}
    return {"model": model, "optimizer": optimizer, "ema": ema, "queue": torch.full((50,), rank + 1.0)}


def save(crew: Crew) -> list[int]:
    """Save on all ranks; return the bytes that each wrote."""
    return [result.bytes for result in crew.on_all(lambda rank, ckpt: ckpt.save(1, trained(rank)).result())]


def owners_of(place: Path) -> dict[str, set[int]]:
    """Return whose values came back, by the module or dict that they lie in."""
    state = trained(-1)
    with aiockpt.Checkpointer(place) as ckpt:
        assert ckpt.load(state).result() is not None
    found: dict[str, set[int]] = {}
    for name, buffer in state["model"].named_buffers():
        found.setdefault(name.rpartition(".")[0], set()).update({int(buffer.min()) - 1, int(buffer.max()) - 1})
    for name, tensor in state["ema"].items():
        found.setdefault(f"ema.{name.rpartition('.')[0]}", set()).update({int(tensor.min()) - 1, int(tensor.max()) - 1})
    assert int(state["queue"].min()) == int(state["queue"].max())
    return {**found, "queue": {int(state["queue"].min()) - 1}}


def test_all_of_it_is_that_of_the_lowest_rank(tmp_path: Path) -> None:
    with Crew(3, tmp_path, replicas="first") as crew:
        save(crew)
    assert set.union(*owners_of(tmp_path).values()) == {0}


def test_a_surplus_of_one_rank_is_spread_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "LOWEST_RANK_BYTES", 1000)
    with Crew(3, tmp_path, replicas="first") as crew:
        written = save(crew)
    owners = owners_of(tmp_path)
    assert all(len(ranks) == 1 for ranks in owners.values()), owners
    assert len(set.union(*owners.values())) > 1
    assert max(written) <= 1.1 * sum(written) / 3 + 2 * 4096  # headers and padding


def test_what_is_trained_is_spread_as_before(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {name: value for name, value in trained(0).items() if name in ("model", "optimizer")}

    with Crew(2, tmp_path) as crew:
        written = [result.bytes for result in crew.on_all(lambda rank, ckpt: ckpt.save(1, state()).result())]
    assert max(written) <= 1.1 * sum(written) / 2 + 2 * 4096
