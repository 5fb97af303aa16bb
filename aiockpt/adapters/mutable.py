"""Which tensors does only an optimizer step change? All others may change at any moment, forward included.

Forward itself mutates buffers (BatchNorm statistics, FP8 amax, router bias), and bare tensors are the user's. While a
snapshot is copied beside the running program, the barrier holds the optimizers; what they do not own is copied at the call
(DECISIONS 15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.kinds import kind_of
from aiockpt.adapters.tensors import is_spread, local_tensors
from aiockpt.state.shards import ShardedState, TensorShard


def hold_still(walked: ShardedState, state: Mapping[str, Any]) -> ShardedState:
    """Return *walked* with a copy of every tensor that something else than an optimizer step may change."""
    memories, storages = set(), set()
    for tensor in _owned(state):
        if is_spread(tensor):  # its shards may begin anywhere in the local tensor
            storages |= {local.untyped_storage().data_ptr() for local in local_tensors(tensor)}
        else:
            memories.add(tensor.data_ptr())

    def is_owned(data: torch.Tensor) -> bool:
        return data.data_ptr() in memories or data.untyped_storage().data_ptr() in storages

    return msgspec.structs.replace(
        walked, tensors=tuple(shard if is_owned(shard.data) else _copied(shard) for shard in walked.tensors)
    )


def _owned(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        kind = kind_of(value)
        if kind == "container":
            yield from _owned(value)
        elif isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, Optimizer):
            for entry in value.state.values():
                yield from (held for held in entry.values() if isinstance(held, torch.Tensor))


def _copied(shard: TensorShard) -> TensorShard:
    return msgspec.structs.replace(shard, data=shard.data.detach().clone())
