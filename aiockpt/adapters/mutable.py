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
from aiockpt.state.shards import ShardedState, TensorShard


def hold_still(walked: ShardedState, state: Mapping[str, Any]) -> ShardedState:
    """Return *walked* with a copy of every tensor that something else than an optimizer step may change."""
    owned = {tensor.data_ptr() for tensor in _owned(state)}
    return msgspec.structs.replace(
        walked, tensors=tuple(shard if shard.data.data_ptr() in owned else _copied(shard) for shard in walked.tensors)
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
