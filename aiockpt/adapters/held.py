"""What does this rank hold of a tensor that is spread over ranks? A global shape, and local tensors with their boxes."""

from __future__ import annotations

import msgspec
import torch

from aiockpt.state.geometry import Box, flat_range_boxes


class Piece(msgspec.Struct, frozen=True, eq=False):
    """Boxes of the global tensor and the local tensor that has their elements, in this order.

    One box: the local tensor has its sizes, and any strides. Several: it is contiguous. None: it is empty.
    """

    boxes: tuple[Box, ...]
    local: torch.Tensor


class Held(msgspec.Struct, frozen=True, eq=False):
    """The global shape, and all that this rank holds: at least one piece, which may be empty."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class FlatRange(msgspec.Struct, frozen=True):
    """Elements [*start*, *end*) of a flattened tensor of *shape*, that is what a flat-parameter shard holds of it."""

    shape: tuple[int, ...]
    start: int
    end: int

    def hold(self, tensor: torch.Tensor) -> Held:
        """Return what a rank holds whose 1-D *tensor* has these elements."""
        boxes = tuple(flat_range_boxes(self.shape, self.start, self.end))
        local = tensor.detach()
        return Held(self.shape, (Piece(boxes, local.view(boxes[0].sizes) if len(boxes) == 1 else local),))
