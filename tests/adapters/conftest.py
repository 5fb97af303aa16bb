"""A checkpoint in memory: what a walk gives, kept as bytes, and loaded as the engine would."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.adapters.matcher import LoadTarget
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target
from aiockpt.state.shards import ShardedState

Through = Callable[..., Any]
"""Called with what is saved and what is there to load into, and with options of `load`."""


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, row-major."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).clone()


_NUMBERS = count()


def resume(saved: Mapping[str, Any], into: Mapping[str, Any], **how: Any) -> aiockpt.LoadResult:
    """Save one state and load it into another, through the public API."""
    with aiockpt.Checkpointer(f"memory://resume-{next(_NUMBERS)}") as ckpt:
        ckpt.save(1, saved).result()
        result = ckpt.load(into, **how).result()
    assert result is not None
    return result


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal at every depth, types and the order of keys included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return same(dict(one.state_dict()), dict(other.state_dict()))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        factories = (getattr(each, "default_factory", None) for each in (one, other))
        return list(one) == list(other) and all(map(same, one.values(), other.values())) and len({*factories}) == 1
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Thing:
    """An object with a state of any form."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Saved:
    """A saved state; trees have been through JSON, tensors through bytes."""

    def __init__(self, walked: ShardedState) -> None:
        self.walked = walked
        self.bytes = {shard.name: raw(shard.data) for shard in walked.tensors}
        self.stored = Stored(
            tensors={shard.name: (shard.dtype, shard.shape) for shard in walked.tensors},
            alias=dict(walked.alias),
            values=msgspec.json.decode(msgspec.json.encode(walked.values)),
            per_rank=msgspec.json.decode(msgspec.json.encode(walked.per_rank)),
            where="step-00000001",
        )

    def open(self, state: Mapping[str, Any], **how: Any) -> LoadTarget:
        """Fill the tensors of *state*, without applying."""
        target = open_target(state, self.stored, **how)
        for shard in target.wanted:
            dense = shard.data if shard.data.is_contiguous() else torch.empty(shard.shape, dtype=shard.data.dtype)
            dense.view(-1).view(torch.uint8)[:] = self.bytes[shard.name]
            if dense is not shard.data:
                shard.data.detach().copy_(dense)
        return target

    def load(self, state: Mapping[str, Any], **how: Any) -> LoadTarget:
        """Load all of *state*."""
        target = self.open(state, **how)
        target.apply()
        return target

    def equals(self, state: Mapping[str, Any]) -> bool:
        """Whether *state* is, bit by bit, what was saved."""
        other = Saved(StateWalker().walk(state))
        return (
            other.bytes.keys() == self.bytes.keys()
            and all(torch.equal(self.bytes[name], other.bytes[name]) for name in self.bytes)
            and other.stored == self.stored
        )


@pytest.fixture
def save() -> Callable[[Mapping[str, Any]], Saved]:
    """Save a state by a cold walk."""
    return lambda state: Saved(StateWalker().walk(state))


@pytest.fixture
def through(tmp_path: Path) -> Through:
    """Save one state and load it into another one; return what `load` returned."""

    def run(saved: dict[str, Any], found: dict[str, Any], **how: Any) -> Any:
        with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(1, saved).result()
            return ckpt.load(found, **how).result()

    return run
