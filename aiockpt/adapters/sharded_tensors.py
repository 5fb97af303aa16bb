"""Tensors that list their local shards, and this rank's part of them: each shard is a box of its own.

There are three kinds: `Shards`, which a program makes itself; torch's old ``ShardedTensor``; and foreign tensors with the
methods by which ``torch.distributed.checkpoint`` reads their chunks. DTensors have those methods too, but they are not
used: they return wrong offsets for strided shards (`aiockpt.adapters.dtensors`).

Importing this module does not import torch's class: as long as that is not loaded, no such tensor can exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard

import torch

from aiockpt.adapters.local_shards import FlatRange, LocalPiece, LocalShards
from aiockpt.errors import UsageError
from aiockpt.state.geometry import Box

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

_CHUNKS, _CHUNK = "__create_chunk_list__", "__get_tensor_shard__"


class Shards(torch.Tensor):
    """This rank's part of a tensor that is spread over ranks: a leaf of a state, to save and to load.

    For layouts that no class of torch describes: blocks of any place and size, slices of a flattened tensor. A save reads
    the tensors passed, a load fills them in place. Together the ranks must hold the whole tensor. Several ranks may hold
    the same part; different parts must not overlap. The object is a description; it cannot be computed with. Any thread
    may create one.

    Args:
        shape: of the whole tensor.
        parts: each local tensor with the offsets of its first element in the whole: ``{(4, 0): block}``, or pairs
            ``[((4, 0), block), …]``. All have the same dtype, and any strides. Empty on a rank without a part.
        dtype: needed where *parts* is empty.

    Raises:
        UsageError: a part lies outside the tensor, or has another dtype.
    """

    held: LocalShards
    """What this rank holds, in the terms of the rest of `adapters`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            shape: Sequence[int],
            parts: Mapping[tuple[int, ...], torch.Tensor] | Sequence[tuple[Sequence[int], torch.Tensor]],
            *,
            dtype: torch.dtype | None = None,
        ) -> None: ...

    def __new__(
        cls,
        shape: Sequence[int],
        parts: Mapping[tuple[int, ...], torch.Tensor] | Sequence[tuple[Sequence[int], torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
        pieces = tuple(
            LocalPiece((Box(tuple(offsets), tuple(part.shape)),), part.detach())
            for offsets, part in pairs
            if part.numel()
        )
        return cls._of(tuple(shape), pieces, [part for _, part in pairs], dtype)

    @classmethod
    def flat(cls, shape: Sequence[int], start: int, part: torch.Tensor) -> Self:
        """Return the shard that holds the elements from *start* on of a tensor of *shape*, flattened in row-major order.

        Args:
            part: 1-D, contiguous; it may be empty.
        """
        if part.dim() != 1 or not part.is_contiguous():
            raise UsageError(f"Shards.flat(): a part of shape {tuple(part.shape)}; give a contiguous 1-D tensor")
        try:
            held = FlatRange(tuple(shape), start, start + len(part)).hold(part)
        except ValueError as error:
            raise UsageError(f"Shards.flat(): {error}") from error
        return cls._of(held.shape, held.pieces if len(part) else (), [part], None)

    @classmethod
    def _of(
        cls,
        shape: tuple[int, ...],
        pieces: tuple[LocalPiece, ...],
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype | None,
    ) -> Self:
        dtypes = {part.dtype for part in parts} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise UsageError(
                f"Shards: parts of {found}" if dtypes else "Shards: no part; give dtype=, so that it is known"
            )
        _check_boxes([box for piece in pieces for box in piece.boxes], shape)
        (dtype,) = dtypes
        device = parts[0].device if parts else torch.device("cpu")
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.held = LocalShards(shape, pieces or (LocalPiece((), torch.empty(0, dtype=dtype, device=device)),))
        return made

    def empty_like(self, dtype: torch.dtype) -> Shards:
        """Return one with the same parts, in new memory."""
        pieces = tuple(
            LocalPiece(piece.boxes, torch.empty_like(piece.local, dtype=dtype)) for piece in self.held.pieces
        )
        return self._of(self.held.shape, pieces, [piece.local for piece in pieces], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise UsageError(f"aiockpt.Shards describes what this rank holds, and has no {func}; compute with its parts")

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes the contents of a tensor
        boxes = ", ".join(f"{box.offsets}+{box.sizes}" for piece in self.held.pieces for box in piece.boxes)
        return f"Shards({tuple(self.shape)}, {self.dtype}, parts at {boxes or 'no place'})"


def _check_boxes(boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
    """Refuse parts that lie outside a tensor of *shape*, or overlap."""
    whole = Box.whole(shape)
    for number, box in enumerate(boxes):
        where = f"Shards: a part at {box.offsets} of shape {box.sizes}"
        if box.ndim != whole.ndim or not whole.contains(box):
            raise UsageError(f"{where} is outside of {shape}")
        for other in boxes[:number]:
            if box.intersect(other) is not None:
                raise UsageError(f"{where} and one at {other.offsets} of shape {other.sizes} overlap")


def is_torchs(tensor: object) -> TypeGuard[ShardedTensor]:
    """Return whether *tensor* is a ``ShardedTensor`` of torch."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def has_chunk_methods(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is no DTensor has the methods by which ``torch.distributed.checkpoint`` reads chunks."""
    return hasattr(type(tensor), _CHUNKS) and hasattr(type(tensor), _CHUNK)


def hold_torchs(tensor: ShardedTensor) -> LocalShards:
    """Return what this rank holds of a ``ShardedTensor``."""
    pairs = (
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in tensor.local_shards()
    )
    return _hold(tensor, pairs)


def hold_foreign(tensor: Any) -> LocalShards:
    """Return what this rank holds of a tensor with chunks."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = getattr(tensor, _CHUNKS)()
    indices = (MetadataIndex("", chunk.offsets, number) for number, chunk in enumerate(chunks))
    pairs = (
        (Box(tuple(chunk.offsets), tuple(chunk.sizes)), getattr(tensor, _CHUNK)(index))
        for chunk, index in zip(chunks, indices, strict=True)
    )
    return _hold(tensor, pairs)


def _hold(tensor: Any, pairs: Iterable[tuple[Box, torch.Tensor]]) -> LocalShards:
    pieces = tuple(LocalPiece((box,), local.detach()) for box, local in pairs if local.numel())
    nothing = LocalPiece((), torch.empty(0, dtype=tensor.dtype))
    return LocalShards(tuple(tensor.size()), pieces or (nothing,))


def empty_like_foreign(tensor: torch.Tensor, dtype: torch.dtype, axes: Sequence[int] | None) -> torch.Tensor:
    """Return a new tensor of *dtype* with the same local shards as *tensor*, which its own class makes."""
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
