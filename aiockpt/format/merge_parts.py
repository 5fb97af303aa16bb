"""How do the pieces of very many receipts become one table? As `aiockpt.format.merge` does, in columns.

Guarantees:

- The same pieces in the same order as a merge one by one: of equal boxes that of the lowest rank, by their offsets.
- Each receipt is looked at once, while it is in the processor's cache, and goes to its places in the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import CommitError
from aiockpt.format.manifest import Receipt, TensorEntry
from aiockpt.format.parts import PieceTable, lay_out

Ints = NDArray[np.int64]
_pieces = attrgetter("pieces")


def make_table(votes: Sequence[Receipt], entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with the pieces of all *votes* in one table.

    Args:
        votes: by rank.
        entries: what the votes agree on: dtype and shape of every tensor that they have.

    Raises:
        CommitError: a piece lies in no file of its rank, or has other dimensions than its tensor.
    """
    filling = _Filling(votes, entries)
    base = 0
    for vote, held in zip(votes, filling.held, strict=True):
        filling.add(vote, *held, base)
        base += len(vote.files)
    return lay_out(entries, filling.settle())


class _Filling:
    """Columns with a place for every piece of every vote, tensor by tensor."""

    def __init__(self, votes: Sequence[Receipt], entries: Mapping[str, TensorEntry]) -> None:
        self._names = {name: index for index, name in enumerate(entries)}
        self._dimensions = np.array([len(entry.shape) for entry in entries.values()], np.int64)
        self._all = list(entries), np.arange(len(entries))
        self.held = [self._look_at(vote) for vote in votes]
        counts = np.zeros(len(entries), np.int64)
        for tensors, lengths in self.held:
            counts[tensors] += lengths
        self._bounds, self._box_bounds = _bounds(counts), _bounds(counts * self._dimensions)
        self._next = self._bounds[:-1].copy()
        self.file, self.start, self.end = (np.empty(self._bounds[-1], np.int64) for _ in range(3))
        self.offsets, self.sizes = (np.empty(self._box_bounds[-1], np.int64) for _ in range(2))

    def _look_at(self, vote: Receipt) -> tuple[Ints, Ints]:
        """Return the numbers of the tensors in a vote, each once, and how many pieces it has of them."""
        names, tensors = self._all
        if list(vote.tensors) != names:
            tensors = _numbers(map(self._names.__getitem__, vote.tensors), len(vote.tensors))
        return tensors, _numbers(map(len, map(_pieces, vote.tensors.values())), len(vote.tensors))

    def add(self, vote: Receipt, tensors: Ints, lengths: Ints, first_file: int) -> None:
        """Put the pieces of one vote into their places."""
        pieces = list(chain.from_iterable(map(_pieces, vote.tensors.values())))
        owners = np.repeat(tensors, lengths)
        rows = np.repeat(self._next[tensors], lengths) + _steps(lengths)
        self._next[tensors] += lengths
        file = _numbers(map(attrgetter("file"), pieces), len(pieces))
        bad = (file < 0) | (file >= len(vote.files))
        if bad.any():
            self._refuse(vote, int(owners[bad.argmax()]), "in a file that it does not have")
        self.file[rows] = file + first_file
        self.start[rows] = _numbers(map(attrgetter("start"), pieces), len(pieces))
        self.end[rows] = _numbers(map(attrgetter("end"), pieces), len(pieces))
        dimensions = self._dimensions[owners]
        first = self._box_bounds[owners] + (rows - self._bounds[owners]) * dimensions
        places = np.repeat(first, dimensions) + _steps(dimensions)
        for side, column in (("offsets", self.offsets), ("sizes", self.sizes)):
            boxes = list(map(attrgetter(side), pieces))
            bad = _numbers(map(len, boxes), len(boxes)) != dimensions
            if bad.any():
                self._refuse(vote, int(owners[bad.argmax()]), "with other dimensions than it has")
            column[places] = _numbers(chain.from_iterable(boxes), len(places))

    def _refuse(self, vote: Receipt, tensor: int, reason: str) -> None:
        name = list(self._names)[tensor]
        raise CommitError(f"{vote.id}: rank {vote.rank} places {name!r} {reason}")

    def settle(self) -> PieceTable:
        """Sort the pieces of each tensor by their boxes, drop all but the first of equal ones, and return the table."""
        kept: dict[str, list[Ints]] = {name: [] for name in ("file", "start", "end", "offsets", "sizes")}
        counts: list[int] = []
        bounds, box_bounds = self._bounds.tolist(), self._box_bounds.tolist()
        for index, rank in enumerate(self._dimensions.tolist()):
            rows = slice(*bounds[index : index + 2])
            box = slice(*box_bounds[index : index + 2])
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
        return PieceTable(self._dimensions.tolist(), counts, **joined)


def _numbers(values: Iterable[int], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


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
