"""What this rank holds of a tensor that is spread over ranks: a global shape, and local tensors with their boxes."""

from __future__ import annotations

import msgspec
import torch

from aiockpt.state.geometry import Box, flat_range_boxes


class LocalPiece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Boxes of the global tensor and the local tensor that has their elements, in this order.

    One box: the local tensor has its sizes, and any strides. Several: it is contiguous. No box: it is empty.
    """

    boxes: tuple[Box, ...]
    local: torch.Tensor


class LocalShards(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The global shape, and all that this rank holds: at least one piece, which may be empty."""

    shape: tuple[int, ...]
    pieces: tuple[LocalPiece, ...]


class FlatRange(msgspec.Struct, frozen=True):
    """Elements [*start*, *end*) of a flattened tensor, that is what a flat-parameter shard holds of it.

    Attributes:
        shape: of the global tensor.
        start, end: elements of what was flattened.
        part: the box of the global tensor that was flattened, where tensor parallelism cut it before; None is all of it.
        axes: its axes as they lay in memory when it was flattened, slowest first (``channels_last``); None is in order.
    """

    shape: tuple[int, ...]
    start: int
    end: int
    part: Box | None = None
    axes: tuple[int, ...] | None = None

    def hold(self, tensor: torch.Tensor) -> LocalShards:
        """Return what a rank holds if its 1-D *tensor* has these elements."""
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
    """Return a box of what was flattened as one of the global tensor, in which it begins at *offsets*."""
    back = [axes.index(axis) for axis in range(box.ndim)]
    return Box(
        tuple(box.offsets[place] + offset for place, offset in zip(back, offsets, strict=True)),
        tuple(box.sizes[place] for place in back),
    )
