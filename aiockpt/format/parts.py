"""Tables of up to ten million pieces: columns beside the manifest, not JSON in it.

Beyond `MAX_PIECES` a manifest ``requires`` ["parts"]: its tensors have no pieces there, and ``parts`` describes columns
that are blobs in the attempt's folder, ``p/<column>-0000.bin`` and so on, 64 MiB each but the last:

- *name*, *file*, *start*, *end*: of piece i, the number of its tensor (in the order of the manifest), its file and bytes;
- *offsets*, *sizes*: its box, one number for each dimension of its tensor, piece after piece.

Numbers are unsigned and little-endian, 4 bytes where all of a column fit, else 8. Pieces lie by tensor; of one tensor by
offsets, then sizes. The manifest has the digest of every blob, so its own digest covers them.

Guarantees:

- A table stays columns: a tensor's ``pieces`` is a view of it that makes a `Piece` only on access.
- `attach` believes no blob before its digest, and allocates no more than the blobs that it was given. What the numbers
  mean to each other is for `aiockpt.format.validate` to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import ManifestError
from aiockpt.format.checksum import digest128
from aiockpt.format.manifest import Manifest, PartEntry, Piece, TensorEntry
from aiockpt.format.names import part_path

Column: TypeAlias = NDArray[Any]
REQUIRED = "parts"
COLUMNS = ("name", "file", "start", "end", "offsets", "sizes")
BLOB_BYTES = 64 << 20
MAX_TABLE_PIECES = 10**8
_TOO_LARGE = 2**63


class PieceTable:
    """The pieces of all tensors, by tensor.

    Args:
        dimensions: how many each tensor has.
        counts: how many pieces each tensor has.
        file, start, end: of each piece.
        offsets, sizes: of each piece, as many numbers as its tensor has dimensions.
    """

    def __init__(
        self,
        dimensions: Sequence[int],
        counts: Sequence[int],
        *,
        file: Column,
        start: Column,
        end: Column,
        offsets: Column,
        sizes: Column,
    ) -> None:
        self.dimensions = tuple(dimensions)
        self.bounds = tuple(accumulate(counts, initial=0))
        self.box_bounds = tuple(accumulate(map(mul, dimensions, counts), initial=0))
        self.file, self.start, self.end, self.offsets, self.sizes = file, start, end, offsets, sizes

    def __len__(self) -> int:
        return self.bounds[-1]

    def numbers(self) -> Column:
        """Return the number of each piece's tensor."""
        return np.repeat(np.arange(len(self.dimensions), dtype=np.uint32), np.diff(self.bounds))


class PieceRows(Sequence[Piece]):
    """The pieces of tensor number *index* of a table, by offsets."""

    __slots__ = ("_box_low", "_dimensions", "_low", "_stop", "table")

    def __init__(self, table: PieceTable, index: int) -> None:
        self.table = table
        self._low, self._stop = table.bounds[index : index + 2]
        self._box_low = table.box_bounds[index]
        self._dimensions = table.dimensions[index]

    def boxes(self) -> tuple[Column, Column]:
        """Return offsets and sizes, each (pieces, dimensions)."""
        low, high = self._box_low, self._box_low + len(self) * self._dimensions
        shape = len(self), self._dimensions
        return self.table.offsets[low:high].reshape(shape), self.table.sizes[low:high].reshape(shape)

    def at(self, places: Column) -> list[Piece]:
        """Return the pieces at some *places*."""
        offsets, sizes = self.boxes()
        rows = places + self._low
        columns = (self.table.file[rows], self.table.start[rows], self.table.end[rows], offsets[places], sizes[places])
        files, starts, ends, lows, extents = (column.tolist() for column in columns)
        return [
            Piece(file, start, end, tuple(low), tuple(extent))
            for file, start, end, low, extent in zip(files, starts, ends, lows, extents, strict=True)
        ]

    def __len__(self) -> int:
        return self._stop - self._low

    @overload
    def __getitem__(self, place: int) -> Piece: ...
    @overload
    def __getitem__(self, place: slice) -> list[Piece]: ...
    def __getitem__(self, place: int | slice) -> Piece | list[Piece]:
        if isinstance(place, slice):
            return self.at(np.arange(*place.indices(len(self))))
        return self.at(np.array([range(len(self))[place]]))[0]

    def __iter__(self) -> Iterator[Piece]:
        for low in range(0, len(self), 4096):
            yield from self[low : low + 4096]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Piece.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def table_of(tensors: Mapping[str, TensorEntry]) -> PieceTable | None:
    """Return the table that the pieces of *tensors* lie in; None where each has its own, from JSON."""
    some = next((entry.pieces for entry in tensors.values()), ())
    return some.table if isinstance(some, PieceRows) else None


def lay_out(tensors: Mapping[str, TensorEntry], table: PieceTable) -> dict[str, TensorEntry]:
    """Return *tensors* with their pieces in *table*, tensor by tensor."""
    return {
        name: msgspec.structs.replace(entry, pieces=PieceRows(table, index))
        for index, (name, entry) in enumerate(tensors.items())
    }


def detach(manifest: Manifest) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest as it is written, and the blobs to write before it, by their paths below the step's folder."""
    table = table_of(manifest.tensors)
    if table is None:
        return manifest, {}
    blobs: dict[str, bytes] = {}
    entries = []
    for column in COLUMNS:
        data = _narrow(table.numbers() if column == "name" else getattr(table, column))
        raw = data.tobytes()
        cut = [raw[low : low + BLOB_BYTES] for low in range(0, len(raw), BLOB_BYTES)]
        blobs |= {part_path(manifest.attempt, column, index): blob for index, blob in enumerate(cut)}
        entries.append(PartEntry(column, data.itemsize, len(data), tuple(map(digest128, cut))))
    tensors = {name: msgspec.structs.replace(entry, pieces=()) for name, entry in manifest.tensors.items()}
    return msgspec.structs.replace(manifest, tensors=tensors, parts=tuple(entries), requires=(REQUIRED,)), blobs


def _narrow(column: Column) -> Column:
    return column.astype("<u4" if int(column.max(initial=0)) < 2**32 else "<u8")


def part_paths(manifest: Manifest) -> list[str]:
    """Return where the blobs of a manifest lie, below the step's folder; no path is taken from a document."""
    return [
        part_path(manifest.attempt, column, index)
        for column, entry in zip(COLUMNS, _check_entries(manifest), strict=True)
        for index in range(len(entry.digests))
    ]


def attach(manifest: Manifest, blobs: Mapping[str, bytes]) -> Manifest:
    """Return the manifest with the pieces that its *blobs* hold, by their paths.

    Raises:
        ManifestError: a blob is damaged, or the columns do not make a table.
    """
    found = {entry.column: _read_column(manifest, entry, blobs) for entry in _check_entries(manifest)}
    names, count = found.pop("name"), len(found["file"])
    dimensions = [len(entry.shape) for entry in manifest.tensors.values()]
    if not len(names) == count == len(found["start"]) == len(found["end"]):
        raise _refusal(manifest, "have different lengths")
    if count and (int(names.max()) >= len(dimensions) or bool((names[1:] < names[:-1]).any())):
        raise _refusal(manifest, "name tensors that are not there, or not in their order")
    counts = np.bincount(names, minlength=len(dimensions)).tolist()
    table = PieceTable(dimensions, counts, **found)
    if not table.box_bounds[-1] == len(table.offsets) == len(table.sizes):
        raise _refusal(manifest, "have more or fewer numbers in their boxes than the tensors have dimensions")
    return msgspec.structs.replace(manifest, tensors=lay_out(manifest.tensors, table))


def _check_entries(manifest: Manifest) -> tuple[PartEntry, ...]:
    """Return the description of the columns when it can be one."""
    parts = tuple(manifest.parts or ())
    if REQUIRED not in manifest.requires or tuple(entry.column for entry in parts) != COLUMNS:
        raise _refusal(manifest, f"are not {', '.join(COLUMNS)}, or are not announced")
    if any(entry.pieces for entry in manifest.tensors.values()):
        raise _refusal(manifest, "are there, and pieces in the manifest too")
    if parts[1].count > MAX_TABLE_PIECES:
        raise _refusal(manifest, f"have {parts[1].count} pieces, more than {MAX_TABLE_PIECES}")
    for entry in parts:
        size = entry.count * entry.width
        if entry.width not in (4, 8) or len(entry.digests) != -(-size // BLOB_BYTES):
            raise _refusal(
                manifest, f"have {len(entry.digests)} blobs of {entry.column!r}, which do not hold {size} bytes"
            )
    return parts


def _read_column(manifest: Manifest, entry: PartEntry, blobs: Mapping[str, bytes]) -> Column:
    size, found = entry.count * entry.width, []
    for index, digest in enumerate(entry.digests):
        blob = blobs[part_path(manifest.attempt, entry.column, index)]
        if len(blob) != min(BLOB_BYTES, size - index * BLOB_BYTES) or digest128(blob) != digest:
            raise _refusal(manifest, f"are damaged: blob {index} of {entry.column!r} is not what was written")
        found.append(np.frombuffer(blob, f"<u{entry.width}"))
    column = np.concatenate(found) if len(found) != 1 else found[0]
    if entry.width == 8 and len(column) and int(column.max()) >= _TOO_LARGE:
        raise _refusal(manifest, f"have a number in {entry.column!r} that nothing of ours has")
    return column


def _refusal(manifest: Manifest, reason: str) -> ManifestError:
    return ManifestError(f"{manifest.id}, generation {manifest.generation}: its parts {reason}", key=manifest.id)
