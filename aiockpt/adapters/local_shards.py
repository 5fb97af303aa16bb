"""This rank's part of a tensor that is spread over ranks: a global shape, and local tensors with their boxes."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import torch

from aiockpt.state.geometry import Box, flat_range_boxes


class LocalPiece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Boxes of the global tensor, and the local tensor with their elements, in this order.

    With one box, the local tensor has its sizes and any strides; with several, it is contiguous; without any, empty.
    """

    boxes: tuple[Box, ...]
    local: torch.Tensor


class LocalShards(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The global shape, and all that this rank holds: at least one piece, which may be empty."""

    shape: tuple[int, ...]
    pieces: tuple[LocalPiece, ...]


@lru_cache(maxsize=1 << 12)
def whole_boxes(shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the one box of a tensor that is held whole; a state has few shapes and many tensors."""
    return (Box.whole(shape),)


class FlatRange(msgspec.Struct, frozen=True):
    """Elements [*start*, *end*) of a flattened tensor: the part of it in a flat-parameter shard.

    Attributes:
        shape: of the global tensor.
        start, end: elements of the flattened tensor.
        part: the box of the global tensor that was flattened, where tensor parallelism had cut it; None for all of it.
        axes: the order of its axes in memory when it was flattened, slowest first (``channels_last``); None is row-major.
    """

    shape: tuple[int, ...]
    start: int
    end: int
    part: Box | None = None
    axes: tuple[int, ...] | None = None

    def hold(self, tensor: torch.Tensor) -> LocalShards:
        """Return the local shards of a rank whose 1-D *tensor* has these elements."""
        part = self.part or Box.whole(self.shape)
        axes = self.axes or tuple(range(part.ndim))
        laid_out = flat_range_boxes([part.sizes[axis] for axis in axes], self.start, self.end)
        boxes = tuple(_place(box, axes, part.offsets) for box in laid_out)
        local = tensor.detach()
        if self.axes is None:
            return LocalShards(
                self.shape, (LocalPiece(boxes, local.view(boxes[0].sizes) if len(boxes) == 1 else local),)
            )
        back = [axes.index(axis) for axis in range(part.ndim)]
        shares = torch.split(local, [box.volume for box in laid_out])
        strided = (share.view(box.sizes).permute(back) for share, box in zip(shares, laid_out, strict=False))
        pieces = tuple(LocalPiece((box,), share) for box, share in zip(boxes, strided, strict=True))
        return LocalShards(self.shape, pieces or (LocalPiece((), local),))


def _place(box: Box, axes: tuple[int, ...], offsets: tuple[int, ...]) -> Box:
    """Return a box of the flattened tensor as a box of the global one, in which that tensor begins at *offsets*."""
    back = [axes.index(axis) for axis in range(box.ndim)]
    return Box(
        tuple(box.offsets[place] + offset for place, offset in zip(back, offsets, strict=True)),
        tuple(box.sizes[place] for place in back),
    )
