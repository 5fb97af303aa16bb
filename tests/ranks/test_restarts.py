"""A job that is started again over the store of its last start, which holds everything of that."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import aiockpt
from aiockpt.runtime.world import World
from tests.campaigns.restarts import Start, run_all
from tests.ranks.crew import Crew


def worlds(start: int, world_size: int) -> list[World]:
    return [World(process=f"{1000 + start}-{start}-{rank}") for rank in range(world_size)]


@pytest.mark.parametrize("then", [2, 3])
def test_a_start_of_which_one_rank_came_leaves_nothing_behind(tmp_path: Path, then: int) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    quick = aiockpt.Deadlines(ranks_s=0.5, close_s=60)
    state = {"w": torch.ones(20)}
    with Crew(2, tmp_path, worlds=worlds(1, 2), store=store, deadlines=quick, on_error=lambda _: None) as crew:
        crew.errors(lambda rank, ckpt: None if rank else ckpt.save(1, state).result())
    with Crew(then, tmp_path, worlds=worlds(2, then), store=store) as crew:
        assert crew.on_all(lambda rank, ckpt: ckpt.resume(dict(state))) == [0] * then
        saved = crew.on_all(lambda rank, ckpt: ckpt.save(1, state).result().step)
    assert saved == [1] * then


def start(number: int, **settings: Any) -> Start:
    """Return a start of two ranks that come at once, and are killed half a second later if they are not clean."""
    made = object.__new__(Start)
    made.__dict__.update(number=number, world_size=2, fate="clean", odd=1, call=0, late_s=[0.0, 0.0], lives_s=0.5)
    made.__dict__.update(**{"overlap_s": 0.0} | settings)
    return made


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["TCPStore", "FileStore"])
def test_a_late_rank_is_no_dead_one(tmp_path: Path, kind: str) -> None:
    run_all(tmp_path, [start(0), start(1, late_s=[0.0, 1.5]), start(2, world_size=3, late_s=[0.5, 0.0, 0.0])], kind)
