"""Compares the addresses of tensors: a storage that was resized lies elsewhere, and so does a tensor that was moved.

A storage that is freed and allocated again at the same address is not noticed. A check costs some ten nanoseconds a tensor
(all loops are C code).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import ne

import torch

from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.state.shards import TensorShard

_pointer = torch.Tensor.data_ptr


class AddressCheck:
    """Remembers where tensors are, and refers to them and their storages: nobody else's tensor can be there.

    Args:
        shards: their names.
        tensors: where the bytes are; None takes the data of *shards*.
    """

    def __init__(self, shards: Sequence[TensorShard], tensors: Sequence[torch.Tensor] | None = None) -> None:
        self._names = [shard.name for shard in shards]
        self._tensors = [shard.data for shard in shards] if tensors is None else tensors
        self._pointers = list(map(_pointer, self._tensors))

    def check(self, some: Sequence[int] | None = None) -> None:
        """Compare the addresses of *some* by their numbers, or of all.

        Raises:
            TornSnapshotError: tensors are not where they were; they are named.
        """
        if some is None:
            if list(map(_pointer, self._tensors)) == self._pointers:
                return
            some = range(len(self._tensors))
        found, known = map(_pointer, map(self._tensors.__getitem__, some)), map(self._pointers.__getitem__, some)
        moved = list(compress(some, map(ne, found, known)))
        if not moved:
            return
        names = [self._names[number] for number in moved]
        raise TornSnapshotError(
            f"{list_names(names)} moved, or changed in size, while the snapshot was copied: nothing was published. Change "
            "tensors inside `with ckpt.mutating():`, or save with snapshot='eager'.",
            names,
        )

    def forget(self) -> None:
        """Let go of the tensors."""
        self._names, self._tensors, self._pointers = [], [], []
