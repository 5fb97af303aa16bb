"""Comparison of the digests of live tensors before and after their copy, for ``debug="digest"``.

A tensor that was changed and changed back in between is not noticed; everything else is. Costs two passes over the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.pipeline.device_copy import on_host
from aiockpt.pipeline.scatter import byte_view
from aiockpt.state.shards import TensorShard


class DigestCheck:
    """Remembers the digests of tensors, and compares them later. The tensors are kept alive meanwhile."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = shards
        self._digests = [_digest(shard.data) for shard in shards]

    def check(self) -> None:
        """Compare.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        torn = [
            shard.name
            for shard, digest in zip(self._shards, self._digests, strict=True)
            if _digest(shard.data) != digest
        ]
        if torn:
            raise TornSnapshotError(
                f"{list_names(torn)} changed while the snapshot was copied: nothing was published. Change the state inside "
                "`with ckpt.mutating():`, or name what other things than optimizers change in Checkpointer(mutable=[…]).",
                torn,
            )


def _digest(tensor: torch.Tensor) -> int:
    """Return the digest of what *tensor* holds; by address, for ``numpy()`` would forbid resizing its storage for good."""
    dense = on_host(tensor)  # a copy must live as long as the view
    return xxhash.xxh3_64_intdigest(byte_view(dense))
