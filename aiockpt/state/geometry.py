"""Which part of a tensor is meant, and where do its elements lie? Boxes, and what they mean in row-major memory.

A *box* is a rectangular part of a tensor: offsets and sizes in elements, one of each per axis. Elements of a box are
stored row-major (the last axis varies fastest). All ranges are half-open.

Guarantees:

- Pure integer arithmetic, exact for any size; nothing here allocates in proportion to a tensor.
- The runs of `copy_runs` are maximal: no two of them could be one copy.
- The boxes of `flat_range_boxes` follow one another in memory and are at most 2d−1 for d axes (ByteCheckpoint,
  NSDI'25, decomposes irregular shards the same way).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import msgspec


class Box(msgspec.Struct, frozen=True, gc=False):
    """A rectangular part of a tensor; a 0-d tensor's only box has no axes and one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of *shape*."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the box on each axis."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements that both have; None when there are none."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.end, other.end))
        sizes = tuple(stop - start for start, stop in zip(low, high, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def contains(self, other: Box) -> bool:
        """Return whether every element of *other* is in this box."""
        return other.volume == 0 or self.intersect(other) == other


def copy_runs(stored: Box, wanted: Box) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements that copy what *stored* and *wanted* share.

    Both boxes are of the same tensor, each lies row-major in a memory of its own.

    Yields:
        (element offset in stored's memory, element offset in wanted's memory, count of elements), in memory order;
        each run is contiguous in both and cannot be extended.
    """
    overlap = stored.intersect(wanted)
    if overlap is None:
        return
    outer, count = _split_axes(stored, wanted, overlap)
    source = _starts(stored, overlap)
    target = _starts(wanted, overlap)
    steps = [
        [(index * source_stride, index * target_stride) for index in range(overlap.sizes[axis])]
        for axis, (source_stride, target_stride) in enumerate(
            zip(_strides(stored.sizes)[:outer], _strides(wanted.sizes)[:outer], strict=True)
        )
    ]
    for moves in product(*steps):
        yield source + sum(move[0] for move in moves), target + sum(move[1] for move in moves), count


def _split_axes(stored: Box, wanted: Box, overlap: Box) -> tuple[int, int]:
    """Return (how many leading axes must be stepped through, elements of the contiguous rest)."""
    axis, count = overlap.ndim, 1
    while axis:
        axis -= 1
        count *= overlap.sizes[axis]
        if not stored.sizes[axis] == wanted.sizes[axis] == overlap.sizes[axis]:
            break
    return axis, count


def _starts(box: Box, part: Box) -> int:
    """Return the element offset in *box*'s memory at which *part* begins."""
    strides = _strides(box.sizes)
    return sum((low - base) * step for low, base, step in zip(part.offsets, box.offsets, strides, strict=True))


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return strides


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes that elements [*start*, *end*) of a flattened tensor of *shape* are, in memory order.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= end <= prod(shape):
        raise ValueError(f"elements [{start}, {end}) are not inside a tensor of shape {tuple(shape)}")
    return [] if start == end else list(_range_boxes((), (), tuple(shape), start, end))


def _range_boxes(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], start: int, end: int
) -> Iterator[Box]:
    """Cut a range of the sub-tensor of *shape* into a partial first row, whole rows, and a partial last row."""
    if not shape:
        yield Box(offsets, sizes)
        return
    rest = shape[1:]
    row = prod(rest)
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        index = last
        yield from _range_boxes((*offsets, index), (*sizes, 1), rest, start - index * row, end - index * row)
        return
    if first * row > start:
        index = first - 1
        yield from _range_boxes((*offsets, index), (*sizes, 1), rest, start - index * row, row)
    if last > first:
        yield Box((*offsets, first, *(0 for _ in rest)), (*sizes, last - first, *rest))
    if end > last * row:
        yield from _range_boxes((*offsets, last), (*sizes, 1), rest, 0, end - last * row)
