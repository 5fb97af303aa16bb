"""Tables of pieces, stored as columns: the merge of all votes, the checks and the writing use the same table.

Guarantees:

- A table stays columns: a tensor's ``pieces`` is a view of it, and `Piece` objects are made only on access.
- The merge is deterministic: of equal boxes it uses that of the lowest rank; a tensor's pieces are sorted by offsets.
- Each receipt is read once, while it is in the processor's cache; the pieces of several are placed together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, repeat
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import CommitError
from aiockpt.format.manifest import MAX_DIM, Piece, PieceView, Receipt, TensorEntry
from aiockpt.format.tiling import Flags, Ints

Column: TypeAlias = NDArray[Any]
TENSORS_AT_ONCE = 4096
"""About how many tensors of votes are read together: their pieces fit into the processor's cache."""
_pieces = attrgetter("pieces")
_BYTES = ("file", "start", "end")
_SIDES = (("offsets", 0), ("sizes", 1))
"""The columns of boxes, and the value in them for dimensions that a tensor lacks."""


class PieceTable:
    """The pieces of all tensors, by tensor.

    Args:
        dimensions: how many each tensor has.
        counts: how many pieces each tensor has.
        file, start, end: of each piece.
        offsets, sizes: of each piece, as many numbers as its tensor has dimensions.
    """

    def __init__(self, dimensions: Sequence[int] | Ints, counts: Sequence[int] | Ints, **columns: Column) -> None:
        self.dimensions, self.counts = np.asarray(dimensions, np.int64), np.asarray(counts, np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(self.counts)])
        self.box_bounds = np.concatenate([[0], np.cumsum(self.counts * self.dimensions)])
        self.file, self.start, self.end = (columns[fact] for fact in _BYTES)
        self.offsets, self.sizes = columns["offsets"], columns["sizes"]
        self.made: list[Piece] | None = None

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def boxes(self, low: int, stop: int) -> tuple[Ints, Ints]:
        """Return offsets and sizes in tensors *low* to *stop*, (pieces, dimensions); a tensor of fewer has 0 and 1."""
        some = self.dimensions[low:stop]
        dimensions, most = np.repeat(some, self.counts[low:stop]), int(some.max(initial=0))
        flat = slice(self.box_bounds[low], self.box_bounds[stop])
        return pad(self.offsets[flat], dimensions, most, 0), pad(self.sizes[flat], dimensions, most, 1)

    def make(self) -> list[Piece]:
        """Return all pieces, made once."""
        if self.made is None:
            files, starts, ends = (column.tolist() for column in (self.file, self.start, self.end))
            self.made = list(map(Piece, files, starts, ends, self._tuples(self.offsets), self._tuples(self.sizes)))
        return self.made

    def _tuples(self, column: Column) -> Iterator[tuple[int, ...]]:
        """Return the numbers of each piece in one of the columns of boxes."""
        numbers = iter(column.tolist())
        for some, counts in groupby(zip(self.dimensions.tolist(), self.counts.tolist(), strict=True), itemgetter(0)):
            count = sum(map(itemgetter(1), counts))
            # `islice` ends each group of tensors: `zip` alone would go on into the numbers of the next.
            yield from islice(zip(*[numbers] * some, strict=False), count) if some else repeat((), count)

    def is_writable(self) -> bool:
        """Return whether a reader accepts all numbers of the boxes."""
        return all(int(column.max(initial=0)) < MAX_DIM for column in (self.offsets, self.sizes))


def pad(flat: Column, dimensions: Ints, most: int, fill: int) -> Ints:
    """Return the numbers of boxes of so many *dimensions* each, one row each, filled up to *most* of them."""
    if len(flat) == most * len(dimensions):
        return flat.astype(np.int64, copy=False).reshape(len(dimensions), most)
    padded = np.full((len(dimensions), most), fill, np.int64)
    padded[np.arange(most) < dimensions[:, None]] = flat
    return padded


def unpad(padded: Column, dimensions: Ints) -> Column:
    """Return the numbers that `pad` was given."""
    most = padded.shape[1]
    if (dimensions == most).all():
        return padded.reshape(-1)
    return padded[np.arange(most) < dimensions[:, None]]


class PieceRows(PieceView):
    """The pieces of tensor number *index* of a table, by offsets."""

    __slots__ = ("_box_low", "_dimensions", "_low", "_stop", "table")

    def __init__(self, table: PieceTable, index: int) -> None:
        self.table = table
        self._low, self._stop = map(int, table.bounds[index : index + 2])
        self._box_low, self._dimensions = int(table.box_bounds[index]), int(table.dimensions[index])

    def at(self, places: Column) -> list[Piece]:
        """Return the pieces at some *places*."""
        table, rows, shape = self.table, places + self._low, (len(self), self._dimensions)
        boxes = slice(self._box_low, self._box_low + len(self) * self._dimensions)
        offsets, sizes = table.offsets[boxes].reshape(shape)[places], table.sizes[boxes].reshape(shape)[places]
        columns = (table.file[rows], table.start[rows], table.end[rows], offsets, sizes)
        files, starts, ends, lows, extents = (column.tolist() for column in columns)
        return list(map(Piece, files, starts, ends, map(tuple, lows), map(tuple, extents)))

    def listed(self) -> list[Piece]:
        return self.table.make()[self._low : self._stop]

    def is_writable(self) -> bool:
        return self.table.is_writable()

    def __len__(self) -> int:
        return self._stop - self._low

    @overload
    def __getitem__(self, place: int) -> Piece: ...
    @overload
    def __getitem__(self, place: slice) -> list[Piece]: ...
    def __getitem__(self, place: int | slice) -> Piece | list[Piece]:
        made, places = self.table.made, range(len(self))[place]
        if isinstance(places, int):
            return made[self._low + places] if made else self.at(np.array([places]))[0]
        if made:
            return [made[self._low + one] for one in places]
        return self.at(np.arange(places.start, places.stop, places.step))

    def __iter__(self) -> Iterator[Piece]:
        for low in range(0, len(self), 4096):
            yield from self[low : low + 4096]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Piece.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def table_of(tensors: Mapping[str, TensorEntry]) -> PieceTable | None:
    """Return the table that holds the pieces of *tensors*; None where each tensor has its own tuple, from JSON."""
    some = next((entry.pieces for entry in tensors.values()), ())
    return some.table if isinstance(some, PieceRows) else None


def lay_out(tensors: Mapping[str, TensorEntry], table: PieceTable, *, made: bool = False) -> dict[str, TensorEntry]:
    """Return *tensors* with their pieces in *table*, tensor by tensor; *made*: as tuples of pieces."""
    rows: Iterator[Sequence[Piece]] = (PieceRows(table, index) for index in range(len(tensors)))
    if made:
        every = iter(table.make())
        rows = (tuple(islice(every, count)) for count in table.counts.tolist())
    return {
        name: msgspec.structs.replace(entry, pieces=some)
        for (name, entry), some in zip(tensors.items(), rows, strict=True)
    }


def read_table(tensors: Mapping[str, TensorEntry]) -> PieceTable | None:
    """Return a table of the pieces of *tensors*; None where one has other dimensions than its tensor, or no number."""
    held = list(map(_pieces, tensors.values()))
    dimensions = np.fromiter((len(entry.shape) for entry in tensors.values()), np.int64, len(held))
    counts = np.fromiter(map(len, held), np.int64, len(held))
    columns = _read(list(chain.from_iterable(held)), np.repeat(dimensions, counts))
    return None if columns is None else PieceTable(dimensions, counts, **columns)


def _read(pieces: Sequence[Piece], dimensions: Ints) -> dict[str, Ints] | None:
    """Return *pieces* of so many *dimensions* each as columns, boxes flat; None where they are not. Hot."""
    try:
        columns = {fact: np.fromiter(map(attrgetter(fact), pieces), np.int64, len(pieces)) for fact in _BYTES}
    except OverflowError:
        return None
    sides = read_boxes(pieces, dimensions)
    if sides is None or any(int(column.min(initial=0)) < 0 for column in columns.values()):
        return None
    return columns | {"offsets": sides[0], "sizes": sides[1]}


def read_boxes(boxes: Sequence[Any], dimensions: Ints) -> tuple[Ints, Ints] | None:
    """Return offsets and sizes of *boxes*, flat; None where one has other *dimensions*, or a number that is too large."""
    found = []
    for side in ("offsets", "sizes"):
        tuples = list(map(attrgetter(side), boxes))
        if (np.fromiter(map(len, tuples), np.int64, len(tuples)) != dimensions).any():
            return None
        try:
            found.append(np.fromiter(chain.from_iterable(tuples), np.int64, int(dimensions.sum())))
        except OverflowError:
            return None
    return None if any(int(column.min(initial=0)) < 0 for column in found) else (found[0], found[1])


def sort_boxes(owner: Ints, count: int, offsets: Column, sizes: Column) -> tuple[Ints, Flags]:
    """Return the order of the boxes by owner, equal ones side by side, and which of them is the first of its equals.

    Args:
        owner: of each box, the number of its tensor, below *count*.
        offsets, sizes: (boxes, dimensions).
    """
    # Of two bytes by radix, which takes a tenth of the time.
    order = np.argsort(owner.astype(np.uint16) if count < 2**16 else owner, kind="stable")
    bounds = np.cumsum(np.bincount(owner, minlength=count))
    fresh = np.ones(len(order), bool)
    unsorted = _find_unsorted(offsets, order, bounds)
    if not unsorted.any():
        return order, fresh
    some = np.flatnonzero(unsorted[owner[order]])
    rows = order[some]
    boxes = np.concatenate([offsets[rows], sizes[rows]], axis=1)
    # The last key is the first to sort by.
    sort = np.lexsort((*boxes.T[::-1], owner[rows]))
    order[some] = rows[sort]
    fresh[some[1:]] = (boxes[sort[1:]] != boxes[sort[:-1]]).any(axis=1)
    fresh[some[1:]] |= owner[order[some[1:]]] != owner[order[some[:-1]]]
    return order, fresh


def _find_unsorted(offsets: Column, order: Ints, bounds: Ints) -> Flags:
    """Return which tensors have boxes whose offsets do not ascend in *order*."""
    after, same = np.zeros(max(len(order) - 1, 0), bool), np.ones(max(len(order) - 1, 0), bool)
    after[bounds[(bounds > 0) & (bounds < len(order))] - 1] = True
    for column in offsets.T:
        if after.all():
            break
        numbers = column[order]
        after |= same & (numbers[1:] > numbers[:-1])
        same &= numbers[1:] == numbers[:-1]
    unsorted = np.zeros(len(bounds), bool)
    # Not by np.unique, which imports np.ma: that takes 40 ms.
    unsorted[np.searchsorted(bounds, np.flatnonzero(~after), side="right")] = True
    return unsorted


class PieceMerge:
    """The merge of the pieces of all votes, in rows of file, start, end, offsets and sizes.

    Args:
        entries: every tensor that the votes have, those of the first one first.
        alike: the ranks that have the same *count* of tensors, the first ones, in that order.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], count: int, alike: Collection[int]) -> None:
        self._names = {name: index for index, name in enumerate(entries)}
        self._dimensions = np.array([len(entry.shape) for entry in entries.values()], np.int64)
        self._most = int(self._dimensions.max(initial=0))
        self._alike, self._first = alike, np.arange(count)
        self._file_count = self._waiting = 0
        self._votes: list[Receipt] = []
        self._taken: list[tuple[Ints, Column]] | None = []

    def add(self, vote: Receipt) -> None:
        """Add the vote of the next rank."""
        self._votes.append(vote)
        self._waiting += len(vote.tensors)
        if self._waiting >= TENSORS_AT_ONCE:
            self.read()

    def read(self) -> None:
        """Read the votes that were added.

        Raises:
            CommitError: a piece lies in no file of its rank.
        """
        votes, self._votes, self._waiting = self._votes, [], 0
        if not votes:
            return
        owners, held, counts = [], [], []
        for vote in votes:
            numbers = self._first
            if vote.rank not in self._alike:
                numbers = np.fromiter(map(self._names.__getitem__, vote.tensors), np.int64, len(vote.tensors))
            owners.append(numbers)
            held.append(list(map(_pieces, vote.tensors.values())))
            counts.append(np.fromiter(map(len, held[-1]), np.int64, len(held[-1])))
        owner = np.repeat(np.concatenate(owners), np.concatenate(counts))
        in_vote = [int(count.sum()) for count in counts]
        columns = _read(list(chain.from_iterable(chain.from_iterable(held))), self._dimensions[owner])
        files = np.array([len(vote.files) for vote in votes], np.int64)
        if columns is None or (columns["file"] >= np.repeat(files, in_vote)).any():
            self._taken = None
            for vote, name, entry in ((one, *item) for one in votes for item in one.tensors.items()):
                if not all(0 <= piece.file < len(vote.files) for piece in entry.pieces):
                    raise CommitError(f"{vote.id}: rank {vote.rank} places {name!r} in a file that it does not have")
        if columns is None or self._taken is None:
            return
        columns["file"] += np.repeat(np.cumsum(files) - files + self._file_count, in_vote)
        self._file_count += int(files.sum())
        boxes = [pad(columns[side], self._dimensions[owner], self._most, fill) for side, fill in _SIDES]
        rows = np.concatenate([np.stack([columns[fact] for fact in _BYTES], axis=1), *boxes], axis=1)
        self._taken.append((owner, narrow(rows)))

    def merge(self, most: int) -> PieceTable | None:
        """Return all pieces in one table; None where some cannot be in a table, which is so for no valid checkpoint.

        Up to *most* pieces those with equal offsets stay in the order of the votes; above, they are sorted by size.
        """
        self.read()
        if self._taken is None:
            return None
        owner, rows = (np.concatenate(some) for some in zip(*self._taken, strict=True))
        self._taken = []
        offsets, sizes = np.split(rows[:, 3:], 2, axis=1)
        order, fresh = sort_boxes(owner, len(self._dimensions), offsets, sizes)
        kept = order[fresh]
        if len(kept) <= most:
            tied = (offsets[kept[1:]] == offsets[kept[:-1]]).all(axis=1) & (owner[kept[1:]] == owner[kept[:-1]])
            if tied.any():
                # They are no tiling, unless some are empty. Documents with so few pieces have always kept that order.
                kept.sort()
                kept = kept[np.lexsort((*offsets[kept].T[::-1], owner[kept]))]
        table = rows[kept]
        counts = np.bincount(owner[kept], minlength=len(self._dimensions))
        # Copies: a view of one column would keep the whole of *table* in memory.
        facts = {fact: table[:, place].copy() for place, fact in enumerate(_BYTES)}
        for (side, _), boxes in zip(_SIDES, np.split(table[:, 3:], 2, axis=1), strict=True):
            facts[side] = unpad(boxes, np.repeat(self._dimensions, counts))
        return PieceTable(self._dimensions, counts, **facts)


def narrow(column: Column) -> Column:
    """Return *column* with the bytes a number of its written form: 4 where all of it fit, else 8."""
    return column.astype("<u4" if int(column.max(initial=0)) < 2**32 else "<u8", copy=False)
