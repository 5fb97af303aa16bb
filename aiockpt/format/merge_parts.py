"""How do the pieces of very many receipts become one table? As `aiockpt.format.merge` does, in columns.

Guarantees:

- The same pieces in the same order as a merge one by one: of equal boxes that of the lowest rank, by their offsets.
- Each receipt is looked at once, while it is in the processor's cache, and goes to its places in the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import CommitError
from aiockpt.format.manifest import Receipt, TensorEntry
from aiockpt.format.parts import PieceTable, lay_out

Ints = NDArray[np.int64]


def make_table(
    votes: Sequence[Receipt], entries: Mapping[str, TensorEntry], counts: Mapping[str, int]
) -> dict[str, TensorEntry]:
    """Return the tensors with the pieces of all *votes* in one table.

    Args:
        votes: by rank.
        entries: what the votes agree on: dtype and shape of every tensor that they have.
        counts: how many pieces all of them have of it.

    Raises:
        CommitError: a piece lies in no file of its rank, or has other dimensions than its tensor.
    """
    filling = _Filling(entries, [counts[name] for name in entries])
    base = 0
    for vote in votes:
        filling.add(vote, base)
        base += len(vote.files)
    return lay_out(entries, filling.settle())


class _Filling:
    """Columns with a place for every piece of every vote, tensor by tensor."""

    def __init__(self, entries: Mapping[str, TensorEntry], counts: Sequence[int]) -> None:
        self._names = {name: index for index, name in enumerate(entries)}
        self._dimensions = [len(entry.shape) for entry in entries.values()]
        self._bounds = list(accumulate(counts, initial=0))
        self._box_bounds = list(accumulate(map(mul, counts, self._dimensions), initial=0))
        self._next = np.array(self._bounds[:-1], np.int64)
        self.file, self.start, self.end = (np.empty(self._bounds[-1], np.int64) for _ in range(3))
        self.offsets, self.sizes = (np.empty(self._box_bounds[-1], np.int64) for _ in range(2))

    def add(self, vote: Receipt, first_file: int) -> None:
        """Put the pieces of one vote into their places."""
        tensors = np.fromiter((self._names[name] for name in vote.tensors), np.int64, len(vote.tensors))
        lengths = np.fromiter((len(entry.pieces) for entry in vote.tensors.values()), np.int64, len(vote.tensors))
        pieces = list(chain.from_iterable(entry.pieces for entry in vote.tensors.values()))
        owners = np.repeat(tensors, lengths)
        rows = np.repeat(self._next[tensors], lengths) + _steps(lengths)
        self._next[tensors] += lengths
        file = _numbers(map(attrgetter("file"), pieces), len(pieces))
        bad = (file < 0) | (file >= len(vote.files))
        if bad.any():
            self._refuse(vote, owners[bad.argmax()], "in a file that it does not have")
        self.file[rows] = file + first_file
        self.start[rows] = _numbers(map(attrgetter("start"), pieces), len(pieces))
        self.end[rows] = _numbers(map(attrgetter("end"), pieces), len(pieces))
        dimensions = np.asarray(self._dimensions)[owners]
        for side, column in (("offsets", self.offsets), ("sizes", self.sizes)):
            boxes = list(map(attrgetter(side), pieces))
            bad = _numbers(map(len, boxes), len(boxes)) != dimensions
            if bad.any():
                self._refuse(vote, owners[bad.argmax()], "with other dimensions than it has")
            first = np.asarray(self._box_bounds)[owners] + (rows - np.asarray(self._bounds)[owners]) * dimensions
            places = np.repeat(first, dimensions) + _steps(dimensions)
            column[places] = _numbers(chain.from_iterable(boxes), len(places))

    def _refuse(self, vote: Receipt, tensor: int, reason: str) -> None:
        name = list(self._names)[tensor]
        raise CommitError(f"{vote.id}: rank {vote.rank} places {name!r} {reason}")

    def settle(self) -> PieceTable:
        """Sort the pieces of each tensor by their boxes, drop all but the first of equal ones, and return the table."""
        kept: dict[str, list[Ints]] = {name: [] for name in ("file", "start", "end", "offsets", "sizes")}
        counts = []
        for index, rank in enumerate(self._dimensions):
            rows = slice(*self._bounds[index : index + 2])
            box = slice(*self._box_bounds[index : index + 2])
            shape = rows.stop - rows.start, rank
            columns = {
                "file": self.file[rows],
                "start": self.start[rows],
                "end": self.end[rows],
                "offsets": self.offsets[box].reshape(shape),
                "sizes": self.sizes[box].reshape(shape),
            }
            order = _order(columns["offsets"], columns["sizes"])
            counts.append(shape[0] if order is None else len(order))
            for name, column in columns.items():
                kept[name].append((column if order is None else column[order]).ravel())
        joined = {name: _join(columns) for name, columns in kept.items()}
        return PieceTable(self._dimensions, counts, **joined)


def _numbers(values: Iterable[int], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)


def _steps(lengths: Ints) -> Ints:
    """Return 0, 1, … for each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _order(offsets: Ints, sizes: Ints) -> Ints | None:
    """Return the rows by offsets, then sizes, the first of equal ones only; None when they are so already."""
    for column in offsets.T:
        if (column[1:] > column[:-1]).all():
            return None
        if not (column == column[0]).all():
            break
    boxes = np.concatenate([offsets, sizes], axis=1)
    order = np.lexsort(boxes.T[::-1]) if boxes.size else np.arange(len(boxes))  # the last key is the first to sort by
    new = np.ones(len(order), bool)
    new[1:] = (boxes[order[1:]] != boxes[order[:-1]]).any(axis=1)
    return order[new]


def _join(columns: Sequence[Ints]) -> NDArray[Any]:
    """Return *columns* end to end, in as few bytes as they are written in."""
    whole = np.concatenate(columns)
    return whole.astype(np.uint32 if int(whole.max(initial=0)) < 2**32 else np.uint64)
