"""A checkpoint of several ranks in memory: each rank's walk, united as a commit would, and offered to another world."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target

State = Mapping[str, Any]


def unite(one: Any, other: Any) -> Any:
    """The union of two trees; what both have must be equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: unite(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
            for key in {**one, **other}
        }
    assert one == other, f"ranks disagree: {one} and {other}"
    return one


class World:
    """What all ranks of one world saved."""

    def __init__(self, states: Sequence[State], *, step: int = 1) -> None:
        walks = [StateWalker(rank=rank).walk(state) for rank, state in enumerate(states)]
        self.values: Any = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, tuple[str, tuple[int, ...]]] = {}
        for walk in walks:
            self.values = unite(self.values, msgspec.json.decode(msgspec.json.encode(walk.values)))
            for shard in walk.tensors:
                self.tensors[shard.name] = shard.data.clone()
                self.facts[shard.name] = (shard.dtype, shard.shape)
        self.per_rank = {
            str(rank): msgspec.json.decode(msgspec.json.encode(walk.per_rank)) for rank, walk in enumerate(walks)
        }
        self.step = step

    def load(self, states: Sequence[State]) -> None:
        """Load on every rank of another world."""
        for rank, state in enumerate(states):
            self.load_one(state, rank, len(states))

    def load_one(self, state: State, rank: int, world_size: int, **how: Any) -> None:
        """Load on one rank."""
        target = open_target(state, self.stored(rank, world_size), **how)
        for shard in target.wanted:
            shard.data.detach().copy_(self.tensors[shard.name])
        target.apply()

    def stored(self, rank: int, world_size: int) -> Stored:
        """Return what is offered to one rank."""
        return Stored(
            tensors=self.facts,
            alias={},
            values=self.values,
            per_rank=self.per_rank.get(str(rank)),
            step=self.step,
            rank=rank,
            world_size=world_size,
            every_rank=self.per_rank,
            saved_world_size=len(self.per_rank),
        )
