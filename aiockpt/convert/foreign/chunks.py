"""The join of a tensor from the chunks in which another library wrote it: all of it, and no element twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.errors import CorruptionError, UsageError


def join_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[tuple[tuple[int, ...], torch.Tensor]], what: str
) -> torch.Tensor:
    """Return the tensor of *shape* whose *chunks* are given with the place of their first element; nothing is copied.

    Raises:
        CorruptionError: they are not all of it, lie over each other, or outside; it calls the tensor *what*.
    """
    if sum(chunk.numel() for _, chunk in chunks) != torch.Size(shape).numel():
        raise CorruptionError(f"the chunks of {what} are not all of it")
    if len(chunks) == 1 and tuple(chunks[0][1].shape) == shape:
        return chunks[0][1]
    try:
        return Shards(shape, chunks, dtype=dtype)
    except UsageError as error:
        raise CorruptionError(f"{what}: {error}") from error
