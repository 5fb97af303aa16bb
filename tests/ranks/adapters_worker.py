"""What checks of many ranks are made of: their register, and the state of all ranks put together to compare it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aiockpt.adapters.matcher import LoadTarget
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target
from aiockpt.format.merge import unite
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard

CHECKS: dict[str, tuple[int, Callable[[], None]]] = {}
"""Name → (world size, check)."""
FOLDERS: list[Path] = []
"""Those of the check that runs, removed when all ranks have ended it."""
MODULES = (
    "adapters_checks",
    "composite_checks",
    "engine_checks",
    "fsdp1_checks",
    "layout_checks",
    "lazy_checks",
    "loader_checks",
    "mesh_checks",
    "odd_checks",
    "optimizer_checks",
    "ragged_checks",
    "read_once_checks",
    "replica_checks",
    "scenario_checks",
    "sizing_checks",
)
"""Where the checks are."""


def check(world: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check that all ranks of a world of this size run."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        CHECKS[run.__name__] = (world, run)
        return run

    return register


@cache
def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of all ranks of these sizes. There is one of each: its groups connect every rank with every other."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def window(full: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a full tensor that a box means."""
    return full[tuple(slice(low, high) for low, high in zip(box.offsets, box.end, strict=True))]


def parts(shard: TensorShard) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a shard, each with the local elements it has; views, so that they can be filled."""
    if len(shard.boxes) == 1:
        assert tuple(shard.data.shape) == shard.boxes[0].sizes
        return [(shard.boxes[0], shard.data)]
    assert shard.data.is_contiguous()
    assert shard.data.numel() == sum(box.volume for box in shard.boxes)
    flat, found, offset = shard.data.view(-1), [], 0
    for box in shard.boxes:
        found.append((box, flat[offset : offset + box.volume].view(box.sizes)))
        offset += box.volume
    return found


def packed(tensor: torch.Tensor) -> bytearray:
    """Return the elements as bytes: torch pickles each tensor as a file of its own, which takes a hundred times as long."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytearray(dense.reshape(-1).view(torch.uint8).numpy())


def unpacked(data: bytearray, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of these elements; of none there is no memory to look at."""
    return torch.frombuffer(data, dtype=dtype).view(sizes) if data else torch.empty(sizes, dtype=dtype)


class Gathered:
    """What all ranks hold together: every tensor put together from the boxes of all ranks."""

    def __init__(self, walked: ShardedState) -> None:
        mine = [
            (
                shard.name,
                shard.shape,
                shard.data.dtype,
                shard.dtype,
                [(box, packed(part)) for box, part in parts(shard)],
            )
            for shard in walked.tensors
        ]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (mine, dict(walked.alias), walked.values))
        self.alias: dict[str, str] = {}
        self.full: dict[str, torch.Tensor] = {}
        self.codes: dict[str, str] = {}
        seen: dict[str, torch.Tensor] = {}
        for held, alias, _ in every:
            self.alias |= alias
            for name, shape, dtype, code, boxes in held:
                self.codes[name] = code
                full = self.full.setdefault(name, torch.empty(shape, dtype=dtype))
                mask = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
                assert tuple(full.shape) == tuple(shape), name
                for box, data in boxes:
                    part = unpacked(data, dtype, box.sizes)
                    known = window(mask, box).clone()
                    assert torch.equal(window(full, box)[known], part[known]), f"replicas of {name} differ"
                    window(full, box).copy_(part)
                    window(mask, box).fill_(True)
        assert all(mask.all() for mask in seen.values()), [name for name, mask in seen.items() if not mask.all()]
        assert not set(self.alias) & set(self.full), "a rank has a tie that another has not"
        self.values = united([msgspec.json.decode(msgspec.json.encode(values)) for _, _, values in every])

    def open(self, state: Mapping[str, Any], **how: Any) -> LoadTarget:
        """Fill the tensors of *state* from the full ones, without applying."""
        tensors = {name: (self.codes[name], tuple(full.shape)) for name, full in self.full.items()}
        target = open_target(state, Stored(tensors, self.alias, self.values, {}, "the gathered state"), **how)
        for shard in target.wanted:
            for box, part in parts(shard):
                part.detach().copy_(window(self.full[shard.name], box))
        return target

    def load(self, state: Mapping[str, Any], **how: Any) -> LoadTarget:
        """Load all of *state*."""
        target = self.open(state, **how)
        target.apply()
        return target

    def equals(self, other: Gathered) -> None:
        """Check that the two hold the same, bit by bit."""
        assert self.full.keys() == other.full.keys(), self.full.keys() ^ other.full.keys()
        for name, full in self.full.items():
            assert torch.equal(full, other.full[name]), name
        assert self.alias == other.alias


def united(trees: list[Any]) -> Any:
    """The trees of all ranks as one, as a commit makes it."""
    tree, conflicts = unite(list(enumerate(trees)))
    assert not conflicts, conflicts
    return tree


def gather(state: Mapping[str, Any]) -> Gathered:
    """Walk *state* on every rank and put the tensors together."""
    return Gathered(StateWalker(rank=dist.get_rank()).walk(state))
