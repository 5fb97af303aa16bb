"""Tables of up to ten million pieces: columns beside the manifest, not JSON in it.

Beyond `MAX_PIECES` a manifest ``requires`` ["parts"]: its tensors have no pieces there, and ``parts`` describes columns
that are blobs in the attempt's folder, ``p/<column>-0000.bin`` and so on, 64 MiB each but the last:

- *name*, *file*, *start*, *end*: of piece i, the number of its tensor (in the order of the manifest), its file and bytes;
- *offsets*, *sizes*: its box, one number for each dimension of its tensor, piece after piece.

Numbers are unsigned and little-endian, 4 bytes where all of a column fit, else 8. Pieces lie by tensor; of one tensor by
offsets, then sizes. The manifest has the digest of every blob, so its own digest covers them.

Guarantee: `attach` uses no blob before it has compared the digest, and allocates no more than the size of the given blobs.
Whether the numbers agree with each other is checked by `aiockpt.format.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from aiockpt.errors import ManifestError
from aiockpt.format.document import digest128
from aiockpt.format.manifest import Manifest, PartEntry
from aiockpt.format.names import part_path
from aiockpt.format.pieces import Column, PieceTable, lay_out, narrow, table_of

REQUIRED = "parts"
COLUMNS = ("name", "file", "start", "end", "offsets", "sizes")
BLOB_BYTES = 64 << 20
MAX_TABLE_PIECES = 10**8
_TOO_LARGE = 2**63


def detach(manifest: Manifest) -> tuple[Manifest, dict[str, bytes]]:
    """Return the written form of the manifest, and the blobs to write before it, by their paths below the step's folder."""
    if REQUIRED not in manifest.requires or (table := table_of(manifest.tensors)) is None:
        return manifest, {}
    blobs: dict[str, bytes] = {}
    entries = []
    for column in COLUMNS:
        data = narrow(
            np.repeat(np.arange(len(table.counts)), table.counts) if column == "name" else getattr(table, column)
        )
        raw = data.tobytes()
        cut = [raw[low : low + BLOB_BYTES] for low in range(0, len(raw), BLOB_BYTES)]
        blobs |= {part_path(manifest.attempt, column, index): blob for index, blob in enumerate(cut)}
        entries.append(PartEntry(column, data.itemsize, len(data), tuple(map(digest128, cut))))
    tensors = {name: msgspec.structs.replace(entry, pieces=()) for name, entry in manifest.tensors.items()}
    return msgspec.structs.replace(manifest, tensors=tensors, parts=tuple(entries)), blobs


def part_paths(manifest: Manifest) -> list[str]:
    """Return the paths of a manifest's blobs below the step's folder; no path is read from a document."""
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
    # Before `bincount`, which allocates as many numbers as the greatest name says.
    if count and (int(names.max()) >= len(dimensions) or bool((names[1:] < names[:-1]).any())):
        raise _refusal(manifest, "name tensors that are not there, or not in their order")
    counts = np.bincount(names, minlength=len(dimensions))
    table = PieceTable(dimensions, counts, **found)
    if not table.box_bounds[-1] == len(table.offsets) == len(table.sizes):
        raise _refusal(manifest, "have more or fewer numbers in their boxes than the tensors have dimensions")
    return msgspec.structs.replace(manifest, tensors=lay_out(manifest.tensors, table))


def _check_entries(manifest: Manifest) -> tuple[PartEntry, ...]:
    """Return the description of the columns; raise unless it is valid."""
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
    # The checks compute in int64, where such a number would be negative.
    if entry.width == 8 and len(column) and int(column.max()) >= _TOO_LARGE:
        raise _refusal(manifest, f"have a number in {entry.column!r} that nothing of ours has")
    return column


def _refusal(manifest: Manifest, reason: str) -> ManifestError:
    return ManifestError(f"{manifest.id}, generation {manifest.generation}: its parts {reason}", key=manifest.id)
