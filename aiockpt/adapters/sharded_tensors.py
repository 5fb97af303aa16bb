"""What does this rank hold of torch's old ``ShardedTensor``? Its local shards, each a box of its own.

Importing this module does not import torch's class: where that is not loaded, there are no such tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from aiockpt.adapters.local_shards import LocalPiece, LocalShards
from aiockpt.state.geometry import Box

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor


def is_sharded_tensor(tensor: object) -> TypeGuard[ShardedTensor]:
    """Return whether *tensor* is a ``ShardedTensor``."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def hold_sharded_tensor(tensor: ShardedTensor) -> LocalShards:
    """Return what this rank holds of *tensor*."""
    pieces = [
        LocalPiece(
            (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),), shard.tensor.detach()
        )
        for shard in tensor.local_shards()
        if shard.tensor.numel()
    ]
    metadata = tensor.metadata()
    nothing = LocalPiece((), torch.empty(0, dtype=metadata.tensor_properties.dtype))
    return LocalShards(tuple(metadata.size), tuple(pieces) or (nothing,))
