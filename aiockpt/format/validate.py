"""The validation of a manifest: every check of docs/format.md that needs no I/O, before anything is opened.

Guarantees:

- A manifest that passes names only plain files inside its own attempt's folder; its pieces tile every tensor exactly.
- Time and memory are linear in the manifest, hostile ones included: shapes are never allocated, pieces never compared
  in pairs.
- Everything refused raises `ManifestError` (a header: `CorruptionError`) naming what is wrong.

Numbers are within the bounds of `manifest` already: decoding saw to that.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NoReturn, overload

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from aiockpt.errors import CorruptionError, ManifestError, UsageError
from aiockpt.format.checksum import ALGORITHM, SUM_BYTES, block_count, digest128
from aiockpt.format.dtypes import ITEMSIZES, is_native
from aiockpt.format.manifest import MAX_RANK, FileEntry, Manifest, Piece, Receipt, TensorEntry, are_finite
from aiockpt.format.memo import Memo
from aiockpt.format.names import (
    MAX_NAME_BYTES,
    attempt_prefix,
    check_step_id,
    manifest_key,
    parse_step,
    receipt_key,
)
from aiockpt.format.parts import REQUIRED, PieceRows, PieceTable, table_of
from aiockpt.format.replicas import ROW
from aiockpt.format.safetensors import Entry, Header, read_below
from aiockpt.format.tiling import tiles

# Checks of the pieces of a table: inside their files and tensors, which they tile. All at once, not one by one.
#
# Guarantees:
#
# - The same answers as `aiockpt.format.validate` gives piece by piece, and `aiockpt.format.tiling` box by box.
# - Time and memory are linear in the table (but for sorting). No arithmetic wraps, whatever the numbers are.
#
# Numbers are below 2⁶³ already (`aiockpt.format.parts`), and dimensions below 2⁴⁸.


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
    """Cut *tensors* into some that have about as many pieces together as are checked at once."""
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


MAX_PIECES = 2 * 10**6
"""In JSON; beyond it they are in columns (`aiockpt.format.parts`)."""
_FEW_ROWS = 16
"""Pieces of one tensor that are checked one by one, also those of a table: arrays have their price."""
MAX_TENSORS = 10**6
MAX_WORLD = 65_536
MAX_DIM = 2**48
MIN_BLOCK_BYTES = 4 << 10
MAX_BLOCK_BYTES = 1 << 30
_PATH_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[0-9a-f]{12}")
_MAX_PATH_PARTS = 4
_MAX_REASON = 600
"""Characters: names and shapes in a message come from the document, which is not trusted."""

_MEMO_PIECES = 100_000
"""Of a layout that may be kept in memory for the next manifest to be compared with."""
_good: Memo[tuple[dict[str, TensorEntry], dict[str, str], list[int]], bool] = Memo()

Placed = tuple[str, Piece]
"""A tensor's name and one of its pieces."""


def check_manifest(m: Manifest, step_id: str, generation: int) -> None:
    """Return when *m*, found as *generation* of *step_id*, can be believed as far as it itself can tell.

    Raises:
        ManifestError: it cannot; the message names the manifest's key and what is wrong.
    """
    what = manifest_key(step_id, generation)
    if m.id != step_id or m.generation != generation:
        _refuse(what, f"it says that it is generation {m.generation} of {m.id[:140]!r}; was it copied here?")
    _check_identity(m, what)
    _check_files(m.files, m, what)
    if m.finite is not UNSET and m.finite != are_finite(m.files):
        _refuse(what, f"it says that finite is {m.finite}, and its files say otherwise")
    table = table_of(m.tensors)
    if (REQUIRED in m.requires) != (table is not None):
        _refuse(what, "it requires parts, and its pieces are not in a table, or the other way round")
    if table is None:
        _check_layout(m, what)
    else:
        _check_table(m.tensors, table, m.files, what)
        _check_whole(m, what)
    _check_left_out(m, what)
    for rank in m.state.get("per_rank", ()):
        if not (
            rank.isascii() and rank.isdigit() and len(rank) < 8 and str(int(rank)) == rank and int(rank) < m.world_size
        ):
            _refuse(what, f"its state names the rank {rank[:40]!r} in a world of {m.world_size}")


def _check_layout(m: Manifest, what: str) -> None:
    """Check the tensors of a manifest without a table; not again those of the one before."""
    layout = (m.tensors, m.alias, [file.size for file in m.files])
    if _good.recall(layout):
        return
    _check_tensors(m.tensors, m.files, what)
    _check_whole(m, what)
    if sum(len(entry.pieces) for entry in m.tensors.values()) <= _MEMO_PIECES:
        _good.remember((dict(m.tensors), dict(m.alias), layout[2]), True)


def _check_whole(m: Manifest, what: str) -> None:
    for name, entry in m.tensors.items():
        _check_coverage(name, entry, what)
    _check_alias(m.alias, m.tensors, what)


def check_receipt(receipt: Receipt, step_id: str, attempt: str, rank: int) -> None:
    """Return when *receipt*, found as the vote of *rank* in *attempt* at *step_id*, can be counted as one.

    Whether pieces and aliases are complete shows only when all votes are merged.

    Raises:
        ManifestError: it is no vote.
    """
    what = receipt_key(step_id, attempt, rank)
    if (receipt.id, receipt.attempt, receipt.rank) != (step_id, attempt, rank):
        _refuse(
            what, f"it is a receipt of rank {receipt.rank} for {receipt.id[:140]!r}, attempt {receipt.attempt[:40]!r}"
        )
    _check_identity(receipt, what)
    if rank >= receipt.world_size:
        _refuse(what, f"there is no rank {rank} in a world of {receipt.world_size}")
    _check_files(receipt.files, receipt, what)
    for file in receipt.files:
        if file.rank != rank:
            _refuse(what, f"the file {file.p!r} is said to be of rank {file.rank}")
    _check_tensors(receipt.tensors, receipt.files, what)
    for table in (receipt.replicas, receipt.buffers):
        if table and len(table) % ROW.itemsize:
            _refuse(what, f"a table of replicas has {len(table)} bytes, and rows of {ROW.itemsize}")


def _refuse(what: str, reason: str) -> NoReturn:
    shown = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"
    raise ManifestError(f"{what}: {shown}", key=what)


def _check_identity(document: Manifest | Receipt, what: str) -> None:
    try:
        attempt_prefix(document.attempt)
        older = () if document.older is UNSET else document.older
        _, origin, origin_run = ("", "", "") if document.forked_from is UNSET else document.forked_from
        for step in (document.parent, origin or None, *(step for step, _ in older)):
            if step is not None:
                check_step_id(step)
    except UsageError as error:
        _refuse(what, str(error))
    ancestors = () if document.ancestors is UNSET else document.ancestors
    for run in (document.run, *(run for run, _ in ancestors), *filter(None, [origin_run])):
        if not _RUN.fullmatch(run):
            _refuse(what, f"{run[:40]!r} is not a run: 12 lower-case hex digits")
    if document.generation < 1:
        _refuse(what, f"there is no generation {document.generation}")
    number = parse_step(document.id)
    if number is not None and number != document.step:
        _refuse(what, f"it says that {document.id} is step {document.step}")
    if not 1 <= document.world_size <= MAX_WORLD:
        _refuse(what, f"a world of {document.world_size} ranks is not within 1–{MAX_WORLD}")


def _check_files(files: Sequence[FileEntry], document: Manifest | Receipt, what: str) -> None:
    prefix = attempt_prefix(document.attempt)
    seen: set[str] = set()
    for file in files:
        _check_path(file.p, prefix, what)
        folded = file.p.lower()  # some file systems do not distinguish case
        if folded in seen:
            _refuse(what, f"the file {file.p!r} is listed twice")
        seen.add(folded)
        if file.rank >= document.world_size:
            _refuse(what, f"the file {file.p!r} is of rank {file.rank} in a world of {document.world_size}")
        _check_sums(file, what)
        for name in file.not_finite or ():
            if name not in document.tensors:
                _refuse(what, f"numbers that are not finite were found in {name[:160]!r}, which it does not have")


def _check_path(path: str, prefix: str, what: str) -> None:
    """Accept plain names below the attempt's folder only; no file system reads anything else into them."""
    parts = path.split("/", _MAX_PATH_PARTS)
    if parts[0] != prefix:
        _refuse(what, f"the path {path[:160]!r} does not begin with {prefix!r}, its attempt's folder")
    names = parts[1:]
    if not 0 < len(names) < _MAX_PATH_PARTS or not all(_PATH_PART.fullmatch(name) for name in names):
        _refuse(what, f"the path {path[:160]!r} is not made of plain names (letters, digits, '.', '_', '-')")
    if not path.endswith(".safetensors"):
        _refuse(what, f"the path {path[:160]!r} does not name a .safetensors file")


def _check_sums(file: FileEntry, what: str) -> None:
    block = file.block
    if file.algo != ALGORITHM:
        _refuse(what, f"the file {file.p!r} has sums of the unknown kind {file.algo[:40]!r}")
    if not MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES or block & (block - 1):
        _refuse(what, f"the file {file.p!r} has blocks of {block} bytes, not a power of two of 4 KiB–1 GiB")
    try:
        sums = file.sums_bytes()
    except ManifestError as error:
        _refuse(what, str(error))
    if len(sums) != SUM_BYTES * block_count(file.size, block):
        _refuse(what, f"the file {file.p!r} of {file.size} bytes has {len(sums)} bytes of sums")
    if digest128(sums) != file.digest:
        _refuse(what, f"the sums of {file.p!r} do not have the digest that is written beside them")


def _check_tensors(tensors: Mapping[str, TensorEntry], files: Sequence[FileEntry], what: str) -> None:
    widths = _check_shapes(tensors, what)
    pieces = sum(len(entry.pieces) for entry in tensors.values())
    if pieces > MAX_PIECES:
        _refuse(what, f"{pieces} pieces are more than {MAX_PIECES}")
    file_sizes = [file.size for file in files]
    for (name, entry), width in zip(tensors.items(), widths, strict=True):
        for piece in entry.pieces:
            problem = _find_problem(piece, entry.shape, width, file_sizes)
            if problem:
                _refuse(what, f"a piece of {name!r} {problem}")


def _check_table(tensors: Mapping[str, TensorEntry], table: PieceTable, files: Sequence[FileEntry], what: str) -> None:
    """Check the pieces of a table as `_check_tensors` checks those of a manifest."""
    widths = _check_shapes(tensors, what)
    shapes = [entry.shape for entry in tensors.values()]
    file_sizes = [file.size for file in files]
    bad = find_bad_piece(table, shapes, widths, file_sizes)
    if bad is not None:
        index, place = bad
        problem = _find_problem(PieceRows(table, index)[place], shapes[index], widths[index], file_sizes)
        _refuse(what, f"a piece of {list(tensors)[index]!r} {problem}")


def _check_shapes(tensors: Mapping[str, TensorEntry], what: str) -> list[int]:
    """Check names, dtypes, shapes and orders of axes; return the bytes of an element of each tensor."""
    if len(tensors) > MAX_TENSORS:
        _refuse(what, f"{len(tensors)} tensors are more than {MAX_TENSORS}")
    widths = []
    for name, entry in tensors.items():
        _check_name(name, what)
        width = ITEMSIZES.get(entry.dtype)
        if width is None:
            _refuse(what, f"{name!r} has the unknown dtype {entry.dtype[:40]!r}")
        if len(entry.shape) > MAX_RANK or not all(0 <= size < MAX_DIM for size in entry.shape):
            _refuse(what, f"{name!r} has an impossible shape: at most {MAX_RANK} sizes below {MAX_DIM}")
        if entry.axes is not UNSET and sorted(entry.axes) != list(range(len(entry.shape))):
            shown = (
                f"{list(entry.axes)} are not the axes of a tensor of {len(entry.shape)} dimensions, each of them once"
            )
            _refuse(what, f"{name!r} lies in memory in an order that is none: {shown}")
        widths.append(width)
    return widths


def _check_name(name: str, what: str) -> None:
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES:
        _refuse(what, f"the name {name[:40]!r} is empty or longer than {MAX_NAME_BYTES} bytes")


def _find_problem(piece: Piece, shape: tuple[int, ...], width: int, file_sizes: Sequence[int]) -> str | None:
    """Say what is wrong with one piece; None when nothing is. Hot: 10⁵ pieces in 0.1 s."""
    if not 0 <= piece.file < len(file_sizes):
        return f"is in file number {piece.file} of {len(file_sizes)}"
    if not 0 <= piece.start <= piece.end <= file_sizes[piece.file]:
        return f"has bytes {piece.start}–{piece.end}, outside its file of {file_sizes[piece.file]} bytes"
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return f"has {len(piece.offsets)} offsets and {len(piece.sizes)} sizes in {len(shape)} dimensions"
    bytes_needed = width
    for offset, size, limit in zip(piece.offsets, piece.sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > limit:
            return f"at {piece.offsets} of sizes {piece.sizes} is outside the shape {shape}"
        bytes_needed *= size
    if piece.end - piece.start != bytes_needed:
        return f"of sizes {piece.sizes} has {piece.end - piece.start} bytes and needs {bytes_needed}"
    return None


def _check_coverage(name: str, entry: TensorEntry, what: str) -> None:
    """Refuse a tensor that has a gap or an overlap. Its pieces are inside its shape already."""
    volume = prod(entry.shape)
    stored, tile = _look_at_boxes(entry)
    if stored != volume:
        kind = "leave a gap" if stored < volume else "overlap"
        _refuse(what, f"the pieces of {name!r} {kind}: they hold {stored} elements of {volume}")
    # One piece inside the shape and of its volume is the whole: most tensors need no more than that.
    if len(entry.pieces) > 1 and not tile():
        _refuse(what, f"the pieces of {name!r} overlap and leave a gap, though their {stored} elements add up")


def _look_at_boxes(entry: TensorEntry) -> tuple[int, Callable[[], bool]]:
    """Return how many elements the pieces hold, and what says whether they tile the tensor."""
    pieces = entry.pieces
    if isinstance(pieces, PieceRows) and len(pieces) > _FEW_ROWS:
        offsets, sizes = (column.astype(np.int64) for column in pieces.boxes())
        return volume_of(sizes), lambda: tiles_all(entry.shape, offsets, sizes)
    boxes = [(piece.offsets, piece.sizes) for piece in pieces]
    return sum(prod(sizes) for _, sizes in boxes), lambda: tiles(entry.shape, boxes)


def _check_alias(alias: Mapping[str, str], tensors: Mapping[str, TensorEntry], what: str) -> None:
    if len(alias) > MAX_TENSORS:
        _refuse(what, f"{len(alias)} aliases are more than {MAX_TENSORS}")
    for name, target in alias.items():
        _check_name(name, what)
        if name in tensors:
            _refuse(what, f"{name[:160]!r} is both a tensor and an alias")
        if target not in tensors:
            chained = "another alias" if target in alias else "no tensor"
            _refuse(what, f"the alias {name[:160]!r} points at {target[:160]!r}, which is {chained}")


def _check_left_out(m: Manifest, what: str) -> None:
    left_out = m.left_out or {}
    if len(left_out) > MAX_TENSORS:
        _refuse(what, f"{len(left_out)} names that were left out are more than {MAX_TENSORS}")
    for name, facts in left_out.items():
        _check_name(name, what)
        if name in m.tensors or name in m.alias:
            _refuse(what, f"{name[:160]!r} is both stored and left out")
        if facts is not None and facts[0] not in ITEMSIZES:
            _refuse(what, f"{name[:160]!r} was left out with the unknown dtype {facts[0][:40]!r}")


def pieces_by_file(m: Manifest) -> Sequence[list[Placed]]:
    """Return the pieces in each file, by file index and in file order; pass them to `check_header` for many files.

    Of a table each file's are looked up when they are asked for.
    """
    table = table_of(m.tensors)
    if table is not None:
        return _TableByFile(table, tuple(m.tensors), len(m.files))
    placed: list[list[Placed]] = [[] for _ in m.files]
    for name, entry in m.tensors.items():
        for piece in entry.pieces:
            placed[piece.file].append((name, piece))
    for some in placed:
        some.sort(key=lambda item: item[1].start)
    return placed


class _TableByFile(Sequence[list[Placed]]):
    """The pieces of a table by file."""

    def __init__(self, table: PieceTable, names: Sequence[str], file_count: int) -> None:
        self._table, self._names, self._file_count = table, names, file_count

    def __len__(self) -> int:
        return self._file_count

    @overload
    def __getitem__(self, index: int) -> list[Placed]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Placed]]: ...
    def __getitem__(self, index: int | slice) -> list[Placed] | list[list[Placed]]:
        if isinstance(index, slice):
            return [self[one] for one in range(self._file_count)[index]]
        rows = np.flatnonzero(self._table.file == range(self._file_count)[index])
        rows = rows[np.argsort(self._table.start[rows], kind="stable")]
        tensors = np.searchsorted(self._table.bounds, rows, side="right") - 1
        found: list[Placed] = []
        for tensor, row in zip(tensors.tolist(), rows.tolist(), strict=True):
            place = int(row - self._table.bounds[tensor])
            found.append((self._names[int(tensor)], PieceRows(self._table, tensor)[place]))
        return found


def check_header(file_index: int, m: Manifest, header: Header, placed: Sequence[Placed] | None = None) -> None:
    """Return when the safetensors header of file number *file_index* agrees with the manifest's pieces in it.

    Args:
        m: a manifest that `check_manifest` accepted.
        placed: the file's item of `pieces_by_file`, to spare a walk over all pieces.

    Raises:
        CorruptionError: they contradict each other; names the file and a tensor.
    """
    if placed is None:
        placed = pieces_by_file(m)[file_index]
    path = m.files[file_index].p
    below = read_below(header.metadata)
    entries = [entry for entry in header.entries if entry.end > entry.start]
    starts = [header.data_start + entry.start for entry in entries]
    cursor = 0
    for name, piece in placed:
        if piece.start == piece.end:
            continue
        position = bisect_right(starts, piece.start) - 1
        problem = "lies before the payload" if position < 0 else None
        if piece.start < cursor:
            problem = f"shares the bytes {piece.start}–{cursor} with another piece"
        problem = problem or _find_contradiction(
            name, piece, m.tensors[name].dtype, entries[position], starts[position], below
        )
        if problem:
            raise CorruptionError(f"{path}: {name!r} {problem}", key=path, offset=piece.start, tensors=(name,))
        cursor = piece.end


def _find_contradiction(name: str, piece: Piece, dtype: str, entry: Entry, entry_start: int, below: str) -> str | None:
    """Say how *piece* contradicts the header's *entry* that its first byte lies in; None when it does not."""
    entry_end = entry_start + entry.end - entry.start
    if piece.end > entry_end:
        return f"has bytes {piece.start}–{piece.end}, the header's entry {entry.name[:80]!r} ends at {entry_end}"
    owner = f"{below}.{entry.name}" if below else entry.name
    if owner != name and not owner.startswith(f"{name}#"):
        return f"has bytes {piece.start}–{piece.end}, which the header gives to {entry.name[:80]!r}"
    stored_as = dtype if is_native(dtype) else "U8"
    if entry.dtype != stored_as:
        return f"is {dtype}, stored as {stored_as}; the header says {entry.dtype}"
    whole = (piece.start, piece.end) == (entry_start, entry_end)
    if whole and stored_as == dtype and entry.shape not in (piece.sizes, (prod(piece.sizes),)):
        return f"is a box of sizes {piece.sizes}; the header says {entry.shape}"
    return None
