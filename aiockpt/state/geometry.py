"""Boxes, the rectangular parts of tensors, and where their elements lie in row-major memory.

A *box* is a rectangular part of a tensor: offsets and sizes in elements, one of each per axis. Elements of a box are
stored row-major (the last axis varies fastest). All ranges are half-open.

Guarantees:

- Pure integer arithmetic, exact for any size; nothing here allocates in proportion to a tensor.
- The runs of `copy_runs` are maximal: no two of them could be one copy.
- The boxes of `flat_range_boxes` follow one another in memory and are at most 2d−1 for d axes (ByteCheckpoint,
  NSDI'25, decomposes irregular shards the same way).
- The chunks of `chunk_runs` are those of ``torch.chunk``: together they have every index once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from math import prod

import msgspec

Run = tuple[int, int]
"""Consecutive indices of one axis: (the first, how many)."""


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
        # The first axis that is cut still counts: its indices are consecutive in both memories.
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


def chunk_runs(runs: Sequence[Run], count: int, index: int, pieces: int = 1) -> list[Run]:
    """Return the indices of *runs* that are in chunk number *index* of *count*, in order.

    The rule is that of ``torch.chunk``: chunks of equal size, rounded up, so that the last may be smaller and some empty.

    Args:
        pieces: first cut the indices into so many pieces, by the same rule, and return the chunk of each: a strided shard.
    """
    total = sum(size for _, size in runs)
    taken: list[Run] = []
    for start, end in _chunks(0, total, pieces):
        step = -(-(end - start) // count)
        low = min(start + index * step, end)
        taken += _cut_runs(runs, low, min(low + step, end))
    return _join_runs(taken)


def _chunks(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    step = max(1, -(-(end - start) // count))
    for low in range(start, end, step):
        yield low, min(low + step, end)


def _cut_runs(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    """Yield the runs of positions [*start*, *end*) in the list of indices that *runs* stand for."""
    place = 0
    for first, size in runs:
        low, high = max(start - place, 0), min(end - place, size)
        if low < high:
            yield first + low, high - low
        place += size


def _join_runs(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for first, size in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((first, size))
    return joined


def runs_to_boxes(axes: Sequence[Sequence[Run]]) -> list[tuple[Box, Box]]:
    """Return the boxes of a tensor that has, on each axis, the indices in these runs.

    Returns:
        (box of the whole tensor, box of the part that has only these indices), the last axis fastest; none where an
        axis has no runs.
    """
    starts = [list(accumulate((size for _, size in runs), initial=0)) for runs in axes]
    places = [list(zip(runs, own, strict=False)) for runs, own in zip(axes, starts, strict=True)]
    found = []
    for chosen in product(*places):
        sizes = tuple(size for (_, size), _ in chosen)
        found.append(
            (Box(tuple(first for (first, _), _ in chosen), sizes), Box(tuple(own for _, own in chosen), sizes))
        )
    return found


def boxes_follow(axes: Sequence[Sequence[Run]]) -> bool:
    """Return whether the boxes of `runs_to_boxes` lie one after the other in the row-major memory of the part.

    They do unless an axis before one with several runs has a run longer than one index.
    """
    several = max((axis for axis, runs in enumerate(axes) if len(runs) > 1), default=0)
    return all(size == 1 for runs in axes[:several] for _, size in runs)
