"""What two ranks ask each other through the contract of integrations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.errors import RankFailedError, StepNotFoundError
from aiockpt.integrations.contract import ask_first_rank, rank_of, resume_newest, size_of, valid_steps


def ask(rank: int, world_size: int, store: str) -> None:
    """Answer on one of several ranks."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    group = dist.new_group([1])
    assert (rank_of(), size_of()) == (rank, world_size)
    assert (rank_of(group), size_of(group)) == ((0, 1) if rank else (-1, -1))
    assert ask_first_rank(lambda: rank) == 0
    with pytest.raises(StepNotFoundError, match="none on rank 0"):
        ask_first_rank(partial(_fail, StepNotFoundError(f"none on rank {rank}")))
    with pytest.raises(RankFailedError if rank else ValueError, match="wrong"):
        ask_first_rank(partial(_fail, ValueError("wrong")))
    place = f"{store}.place"
    with aiockpt.Checkpointer(place) as ckpt:
        for step in range(3):
            ckpt.save(step, {"weight": torch.full((4,), float(step))}).result()
        assert valid_steps(ckpt) == [2, 1, 0]
        if rank == 0:
            damage(Path(place), 2)
        dist.barrier()
        state = {"weight": torch.zeros(4)}
        assert resume_newest(ckpt, lambda step: ckpt.load(state, step).result()).step == 1  # type: ignore[union-attr]
    assert state["weight"].tolist() == [1.0] * 4
    dist.destroy_process_group()


def _fail(error: Exception) -> None:
    raise error


def damage(place: Path, step: int) -> None:
    """Change a byte of each data file of a step."""
    for path in place.glob(f"step-{step:08d}/**/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
