"""The merge of the pieces of very many receipts into one table: as `aiockpt.format.merge` does, in columns.

Guarantees:

- The same pieces in the same order as a merge one by one: of equal boxes that of the lowest rank, by their offsets.
- Each receipt is read once, while it is in the processor's cache; some together go to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import CommitError
from aiockpt.format.manifest import Receipt, TensorEntry
from aiockpt.format.parts import Column, PieceTable, lay_out

Ints = NDArray[np.int64]
_pieces = attrgetter("pieces")
VOTES_AT_ONCE = 16
"""How many are put into their places together."""


def make_table(
    votes: Sequence[Receipt],
    entries: Mapping[str, TensorEntry],
    alike: Collection[int],
    check: Callable[[Receipt], object],
) -> dict[str, TensorEntry]:
    """Return the tensors with the pieces of all *votes* in one table.

    Args:
        votes: by rank.
        entries: every tensor that the votes have, those of the first one first.
        alike: the ranks that have those of the first one, in its order.
        check: refuses a vote that describes one in another way; called when the vote is about to be read.

    Raises:
        CommitError: a piece lies in no file of its rank, or has other dimensions than its tensor.
    """
    taking = _Taking(votes, entries, alike)
    base = 0
    for vote in votes:
        check(vote)
        taking.add(vote, base)
        base += len(vote.files)
    dimensions = [len(entry.shape) for entry in entries.values()]
    return lay_out(entries, _Filling(np.array(dimensions, np.int64), taking.taken()).settle())


class _Taken(NamedTuple):
    """The pieces of some votes, as columns: *owner* is the number of the tensor, *offsets* and *sizes* are flat."""

    owner: Column
    file: Column
    start: Column
    end: Column
    offsets: Column
    sizes: Column


class _Column:
    """Numbers with a place each, in as few bytes as they are written in: 4 until one needs 8."""

    def __init__(self, count: int) -> None:
        self.numbers: Column = np.empty(count, np.uint32)

    def put(self, places: Ints, numbers: Column) -> None:
        if numbers.itemsize > self.numbers.itemsize:
            self.numbers = self.numbers.astype(np.uint64)
        self.numbers[places] = numbers


class _Taking:
    """Takes the pieces out of vote after vote."""

    def __init__(self, votes: Sequence[Receipt], entries: Mapping[str, TensorEntry], alike: Collection[int]) -> None:
        self._names = {name: index for index, name in enumerate(entries)}
        self._dimensions = np.array([len(entry.shape) for entry in entries.values()], np.int64)
        self._alike, self._first = alike, np.arange(len(votes[0].tensors))
        self._last: list[_Taken] = []
        self._taken: list[_Taken] = []

    def add(self, vote: Receipt, first_file: int) -> None:
        """Take the pieces of one vote, whose files are numbered from *first_file*."""
        held = list(map(_pieces, vote.tensors.values()))
        tensors = self._first
        if vote.rank not in self._alike:
            tensors = _numbers(map(self._names.__getitem__, vote.tensors), len(held))
        owner = np.repeat(tensors, _numbers(map(len, held), len(held)))
        pieces = list(chain.from_iterable(held))
        file, start, end = (_numbers(map(attrgetter(fact), pieces), len(pieces)) for fact in ("file", "start", "end"))
        bad = (file < 0) | (file >= len(vote.files))
        if bad.any():
            self._refuse(vote, int(owner[bad.argmax()]), "in a file that it does not have")
        dimensions = self._dimensions[owner]
        count = int(dimensions.sum())
        sides = []
        for side in ("offsets", "sizes"):
            boxes = list(map(attrgetter(side), pieces))
            bad = _numbers(map(len, boxes), len(boxes)) != dimensions
            if bad.any():
                self._refuse(vote, int(owner[bad.argmax()]), "with other dimensions than it has")
            sides.append(_numbers(chain.from_iterable(boxes), count))
        self._last.append(_Taken(owner, file + first_file, start, end, *sides))
        if len(self._last) == VOTES_AT_ONCE:
            self._put_together()

    def taken(self) -> list[_Taken]:
        """Return what was taken, some votes together."""
        self._put_together()
        return self._taken

    def _put_together(self) -> None:
        if self._last:
            self._taken.append(_Taken(*(_narrow(np.concatenate(some)) for some in zip(*self._last, strict=True))))
            self._last = []

    def _refuse(self, vote: Receipt, tensor: int, reason: str) -> None:
        name = list(self._names)[tensor]
        raise CommitError(f"{vote.id}: rank {vote.rank} places {name!r} {reason}")


class _Filling:
    """Columns with a place for every piece, tensor by tensor.

    Args:
        dimensions: of each tensor.
        taken: the pieces, in the order of the votes.
    """

    def __init__(self, dimensions: Ints, taken: Sequence[_Taken]) -> None:
        self._dimensions = dimensions
        self._counts = sum((self._count(some.owner) for some in taken), np.zeros(len(dimensions), np.int64))
        self._bounds, self._box_bounds = _bounds(self._counts), _bounds(self._counts * dimensions)
        self._next = self._bounds[:-1].copy()
        self._file, self._start, self._end = (_Column(self._bounds[-1]) for _ in range(3))
        self._offsets, self._sizes = (_Column(self._box_bounds[-1]) for _ in range(2))
        for some in taken:
            self._place(some)

    def _count(self, owners: Column) -> Ints:
        return np.bincount(owners, minlength=len(self._dimensions))

    def _place(self, taken: _Taken) -> None:
        """Put pieces into their places, those of one tensor side by side: alone each would touch a page."""
        order = np.argsort(taken.owner, kind="stable")
        owner = taken.owner[order]
        counts = self._count(owner)
        rows = np.repeat(self._next, counts) + _steps(counts)
        self._next += counts
        self._file.put(rows, taken.file[order])
        self._start.put(rows, taken.start[order])
        self._end.put(rows, taken.end[order])
        dimensions = self._dimensions[owner]
        steps = _steps(dimensions)
        places = np.repeat(self._box_bounds[owner] + (rows - self._bounds[owner]) * dimensions, dimensions) + steps
        source = np.repeat(_bounds(self._dimensions[taken.owner])[:-1][order], dimensions) + steps
        self._offsets.put(places, taken.offsets[source])
        self._sizes.put(places, taken.sizes[source])

    def settle(self) -> PieceTable:
        """Sort the pieces of each tensor by their boxes, drop all but the first of equal ones, and return the table."""
        counts = self._counts.copy()
        for index in range(len(counts)):
            by_piece, by_number = self._views(index)
            order = _order(*by_number)
            if order is not None:
                counts[index] = len(order)
                for view in (*by_piece, *by_number):
                    view[: len(order)] = view[order]
        kept = _steps(self._counts) < np.repeat(counts, self._counts)
        numbers_kept = np.repeat(kept, np.repeat(self._dimensions, self._counts))
        return PieceTable(
            self._dimensions.tolist(),
            counts.tolist(),
            file=_only(self._file, kept),
            start=_only(self._start, kept),
            end=_only(self._end, kept),
            offsets=_only(self._offsets, numbers_kept),
            sizes=_only(self._sizes, numbers_kept),
        )

    def _views(self, index: int) -> tuple[list[Column], list[Column]]:
        """Return the columns of one tensor: file, start and end; offsets and sizes, each (pieces, dimensions)."""
        rows, numbers = (slice(*some[index : index + 2]) for some in (self._bounds, self._box_bounds))
        shape = self._counts[index], self._dimensions[index]
        return (
            [column.numbers[rows] for column in (self._file, self._start, self._end)],
            [column.numbers[numbers].reshape(shape) for column in (self._offsets, self._sizes)],
        )


def _only(column: _Column, kept: NDArray[np.bool_]) -> Column:
    return column.numbers if kept.all() else column.numbers[kept]


def _numbers(values: Iterable[int], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)


def _narrow(column: Ints) -> Column:
    return column.astype(np.uint32 if int(column.max(initial=0)) < 2**32 else np.uint64)


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _steps(lengths: Ints) -> Ints:
    """Return 0, 1, … for each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _order(offsets: Column, sizes: Column) -> Ints | None:
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
