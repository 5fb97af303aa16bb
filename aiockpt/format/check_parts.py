"""Are the pieces of a table inside their files and tensors, and do they tile them? All at once, not one by one.

Guarantees:

- The same answers as `aiockpt.format.validate` gives piece by piece, and `aiockpt.format.tiling` box by box.
- Time and memory are linear in the table (but for sorting). No arithmetic wraps, whatever the numbers are.

Numbers are below 2⁶³ already (`aiockpt.format.parts`), and dimensions below 2⁴⁸.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aiockpt.format.parts import PieceTable

Ints = NDArray[np.int64]
_ROWS_AT_ONCE = 1 << 20
_MOST_BYTES = 2.0**62
_PRIME = 2**31 - 1
_ROUNDS = 3
"""A tiling that is none passes one round with a probability below 2⁻²⁵: the products of `tiling`, modulo a smaller prime."""


def find_bad_piece(
    table: PieceTable, shapes: Sequence[tuple[int, ...]], widths: Sequence[int], file_sizes: Sequence[int]
) -> tuple[int, int] | None:
    """Return (number of the tensor, place among its pieces) of a piece that cannot be; None when all can.

    Args:
        shapes, widths: of each tensor, sizes and bytes of an element.
    """
    dimensions, counts = np.asarray(table.dimensions), np.diff(table.bounds)
    for rank in np.unique(dimensions[counts > 0]).tolist():
        for some in _cut(np.flatnonzero((dimensions == rank) & (counts > 0)), counts):
            owners = np.repeat(np.arange(len(some)), counts[some])
            places = np.arange(len(owners)) - np.repeat(np.cumsum(counts[some]) - counts[some], counts[some])
            shape = np.array([shapes[index] for index in some], np.int64).reshape(len(some), rank)[owners]
            width = np.array([widths[index] for index in some], np.int64)[owners]
            rows = np.asarray(table.bounds)[some][owners] + places
            boxes = (np.asarray(table.box_bounds)[some][owners] + places * rank)[:, None] + np.arange(rank)
            bad = _outside_file(table, rows, file_sizes)
            offsets, sizes = table.offsets[boxes].astype(np.int64), table.sizes[boxes].astype(np.int64)
            bad |= ((offsets > shape) | (sizes > shape - offsets)).any(axis=1)
            bad |= sizes.prod(axis=1, dtype=np.float64) * width > _MOST_BYTES
            nbytes = table.end[rows].astype(np.int64) - table.start[rows].astype(np.int64)
            bad |= nbytes != sizes.prod(axis=1) * width
            if bad.any():
                first = int(bad.argmax())
                return int(some[owners[first]]), int(places[first])
    return None


def _cut(tensors: Ints, counts: Ints) -> Iterator[Ints]:
    """Cut *tensors* into some that have about as many pieces together as are looked at once."""
    groups = np.cumsum(counts[tensors]) // _ROWS_AT_ONCE
    yield from np.split(tensors, np.flatnonzero(np.diff(groups)) + 1)


def _outside_file(table: PieceTable, rows: Ints, file_sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Say which pieces are in no file, or not inside theirs."""
    file, start, end = (column[rows].astype(np.int64) for column in (table.file, table.start, table.end))
    limits = np.array([*file_sizes, -1], np.int64)
    return (start > end) | (end > limits[np.minimum(file, len(file_sizes))])


def volume_of(sizes: Ints) -> int:
    """Return the elements of all boxes of *sizes*, (pieces, dimensions), each below 2⁶³."""
    volumes = sizes.prod(axis=1)
    return (int((volumes >> 32).sum()) << 32) + int((volumes & 0xFFFFFFFF).sum())


def tiles_all(shape: tuple[int, ...], offsets: Ints, sizes: Ints) -> bool:
    """Return whether boxes, which lie inside *shape*, cover each of its elements exactly once.

    Args:
        offsets, sizes: (pieces, dimensions).
    """
    if 0 in shape:
        return True
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    cut = np.flatnonzero((sizes != np.array(shape, np.int64)).any(axis=0)).tolist()
    if not len(sizes) or not cut:
        return len(sizes) == 1
    if len(cut) == 1:
        return _follow_one_another(offsets[:, cut[0]], sizes[:, cut[0]], shape[cut[0]])
    return _weigh_as_much(shape, offsets, sizes, cut)


def _follow_one_another(starts: Ints, lengths: Ints, whole: int) -> bool:
    order = np.argsort(starts, kind="stable")
    stops = starts[order] + lengths[order]
    return bool(starts[order[0]] == 0 and (starts[order[1:]] == stops[:-1]).all() and stops[-1] == whole)


def _weigh_as_much(shape: tuple[int, ...], offsets: Ints, sizes: Ints, cut: Sequence[int]) -> bool:
    """Weigh boxes as `aiockpt.format.tiling` does, in several rounds at once."""
    seed = hashlib.blake2b(np.ascontiguousarray(offsets).tobytes())
    seed.update(np.ascontiguousarray(sizes).tobytes())
    dice = np.random.default_rng(int.from_bytes(seed.digest(), "little"))
    weights = np.ones((_ROUNDS, len(offsets)), np.int64)
    whole = np.ones(_ROUNDS, np.int64)
    for axis in cut:
        starts, stops = offsets[:, axis], offsets[:, axis] + sizes[:, axis]
        places, index = np.unique(np.concatenate([starts, stops, [0, shape[axis]]]), return_inverse=True)
        numbers = dice.integers(_PRIME, size=(_ROUNDS, len(places)), dtype=np.int64)[:, index]
        count = len(starts)
        weights = weights * ((numbers[:, count : 2 * count] - numbers[:, :count]) % _PRIME) % _PRIME
        whole = whole * ((numbers[:, -1] - numbers[:, -2]) % _PRIME) % _PRIME
    return bool((weights.sum(axis=1) % _PRIME == whole).all())
