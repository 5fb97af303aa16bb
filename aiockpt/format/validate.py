"""The validation of a manifest: every check of docs/format.md that needs no I/O, before anything is opened.

Guarantees:

- A manifest that passes names only plain files inside its own attempt's folder; its pieces tile every tensor exactly.
- Time and memory are linear in the manifest, hostile ones included: shapes are never allocated, pieces never compared
  in pairs.
- Everything refused raises `ManifestError` (a header: `CorruptionError`) naming what is wrong.

Numbers are within the bounds of `manifest` already: decoding has checked that.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain, islice, pairwise
from math import prod
from typing import NoReturn, overload

import numpy as np
from msgspec import UNSET

from aiockpt.errors import CorruptionError, ManifestError, UsageError
from aiockpt.format.document import ALGORITHM, MEMO_PIECES, SUM_BYTES, Memo, block_count, digest128
from aiockpt.format.dtypes import is_native, itemsize_if_known
from aiockpt.format.manifest import (
    MAX_DIM,
    MAX_RANK,
    FileEntry,
    Manifest,
    Piece,
    Receipt,
    TensorEntry,
    are_finite,
    has_table,
)
from aiockpt.format.names import (
    MAX_NAME_BYTES,
    attempt_prefix,
    check_step_id,
    manifest_key,
    parse_step,
    receipt_key,
)
from aiockpt.format.parts import REQUIRED
from aiockpt.format.pieces import PieceRows, PieceTable, pad, read_table, table_of
from aiockpt.format.safetensors import Entry, Header, read_below
from aiockpt.format.tiling import add_up, are_tiled

ROW = np.dtype([("name", "<u4"), ("box", "<u4"), ("digest", "<u8")])
"""The row of a receipt's tables of replicas (`aiockpt.format.merge`): 16 bytes."""
MAX_PIECES = 2 * 10**6
"""The most pieces in JSON; more of them are in columns (`aiockpt.format.parts`)."""
_ROWS_AT_ONCE = 1 << 18
_MOST_BYTES = 2.0**62
MAX_TENSORS = 10**6
MAX_WORLD = 65_536
MIN_BLOCK_BYTES = 4 << 10
MAX_BLOCK_BYTES = 1 << 30
_PATH_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[0-9a-f]{12}")
_MAX_PATH_PARTS = 4
_MAX_REASON = 600
"""The most characters of a message: names and shapes in it come from the document, which is not trusted."""

_good: Memo[tuple[dict[str, TensorEntry], dict[str, str], list[int]], bool] = Memo()

Placed = tuple[str, Piece]
"""A tensor's name and one of its pieces."""


def check_manifest(m: Manifest, step_id: str, generation: int) -> None:
    """Check that *m*, found as *generation* of *step_id*, is valid, by every check that needs no other object.

    Raises:
        ManifestError: it is not; the message names the manifest's key and the fault.
    """
    what = manifest_key(step_id, generation)
    if m.id != step_id or m.generation != generation:
        _refuse(what, f"it says that it is generation {m.generation} of {m.id[:140]!r}; was it copied here?")
    _check_identity(m, what)
    _check_files(m.files, m, what)
    if m.finite is not UNSET and m.finite != are_finite(m.files):
        _refuse(what, f"it says that finite is {m.finite}, and its files say otherwise")
    _check_layout(m, what)
    _check_left_out(m, what)
    for rank in m.state.get("per_rank", ()):
        if not (
            rank.isascii() and rank.isdigit() and len(rank) < 8 and str(int(rank)) == rank and int(rank) < m.world_size
        ):
            _refuse(what, f"its state names the rank {rank[:40]!r} in a world of {m.world_size}")


def _check_layout(m: Manifest, what: str) -> None:
    """Check the tensors of a manifest; without a table, tensors equal to those of the last manifest are skipped."""
    in_table = has_table(m.tensors)
    if REQUIRED in m.requires and not in_table:
        _refuse(what, "it requires parts, and its pieces are not in a table, or the other way round")
    layout = (m.tensors, m.alias, [file.size for file in m.files])
    if not in_table and _good.recall(layout):
        return
    _check_tensors(m.tensors, m.files, what, None if REQUIRED in m.requires else MAX_PIECES, whole=True)
    _check_alias(m.alias, m.tensors, what)
    if not in_table and sum(len(entry.pieces) for entry in m.tensors.values()) <= MEMO_PIECES:
        _good.remember((dict(m.tensors), dict(m.alias), layout[2]), True)


def check_receipt(receipt: Receipt, step_id: str, attempt: str, rank: int) -> None:
    """Check that *receipt*, found as the vote of *rank* in *attempt* at *step_id*, is a valid vote.

    Whether pieces and aliases are complete is known only when all votes are merged.

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
    _check_tensors(receipt.tensors, receipt.files, what, MAX_PIECES, whole=False)
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
    """Accept only plain names below the attempt's folder, which mean the same on every file system."""
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


def _check_tensors(
    tensors: Mapping[str, TensorEntry], files: Sequence[FileEntry], what: str, most: int | None, *, whole: bool
) -> None:
    """Check tensors and their pieces, which are at most *most*; with *whole*, also that the pieces tile the tensors."""
    widths = _check_shapes(tensors, what)
    pieces = sum([len(entry.pieces) for entry in tensors.values()])
    if most is not None and pieces > most:
        _refuse(what, f"{pieces} pieces are more than {most}")
    look = _Look([entry.shape for entry in tensors.values()], widths, [file.size for file in files], whole)
    table = table_of(tensors)
    if table is None:
        table = read_table(tensors)
    bad = look.at(table) if table is not None else look.at_each([entry.pieces for entry in tensors.values()])
    if bad is not None:
        name, entry = next(islice(tensors.items(), bad[0], None))
        _refuse(what, f"a piece of {name!r} {look.find_problem(bad[0], entry.pieces[bad[1]])}")
    # Without *whole*, `held` and `tiled` are empty.
    for name, shape, stored, tiled in zip(tensors, look.shapes, look.held, look.tiled, strict=False):
        volume = prod(shape)
        if stored != volume:
            kind = "leave a gap" if stored < volume else "overlap"
            _refuse(what, f"the pieces of {name!r} {kind}: they hold {stored} elements of {volume}")
        if not tiled:
            _refuse(what, f"the pieces of {name!r} overlap and leave a gap, though their {stored} elements add up")


class _Look:
    """A check of the pieces of all tensors together: numbers are below 2⁶³, dimensions below 2⁴⁸.

    Args:
        shapes, widths: of each tensor, sizes and bytes of an element.
        whole: also find how many elements the pieces of each tensor hold, and whether they tile it.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], widths: Sequence[int], file_sizes: Sequence[int], whole: bool
    ) -> None:
        self.shapes, self._widths, self._file_sizes, self._whole = shapes, widths, file_sizes, whole
        self.held: list[int] = []
        self.tiled: list[bool] = []

    def at(self, table: PieceTable) -> tuple[int, int] | None:
        """Return (number of the tensor, place among its pieces) of the first invalid piece; None when all are valid."""
        edges = np.flatnonzero(np.diff(table.bounds[1:] // _ROWS_AT_ONCE)) + 1
        # The last limit is that of files which do not exist: every end is above it.
        limits = np.array([*self._file_sizes, -1], np.int64)
        for low, stop in pairwise([0, *edges.tolist(), len(self.shapes)]):
            counts, dimensions = table.counts[low:stop], table.dimensions[low:stop]
            flat = np.fromiter(chain.from_iterable(self.shapes[low:stop]), np.int64, int(dimensions.sum()))
            shape = pad(flat, dimensions, int(dimensions.max(initial=0)), 1)
            owner, rows = np.repeat(np.arange(stop - low), counts), slice(*table.bounds[[low, stop]])
            width = np.array(self._widths[low:stop], np.int64)[owner]
            file, start, end = (column[rows].astype(np.int64) for column in (table.file, table.start, table.end))
            offsets, sizes = table.boxes(low, stop)
            bad = (start > end) | (end > limits[np.minimum(file, len(self._file_sizes))])
            # Not `offsets + sizes > shape`: numbers up to 2⁶³ − 1 may wrap.
            bad |= (sizes > shape[owner] - offsets).any(axis=1)
            # A product that might wrap is refused by its size in floating point, before it is compared.
            with np.errstate(over="ignore"):
                bad |= sizes.prod(axis=1, dtype=np.float64) * width > _MOST_BYTES
            volumes = sizes.prod(axis=1)
            bad |= end - start != volumes * width
            if bad.any():
                row, tensor = int(bad.argmax()), low + int(owner[bad.argmax()])
                return tensor, int(table.bounds[low] + row - table.bounds[tensor])
            if self._whole:
                self.held += add_up(volumes, counts)
                self.tiled += are_tiled(shape, counts, offsets, sizes).tolist()
        return None

    def at_each(self, pieces: Sequence[Sequence[Piece]]) -> tuple[int, int] | None:
        """Return the same as `at`, for pieces that cannot be in a table."""
        places = ((number, place) for number, some in enumerate(pieces) for place in range(len(some)))
        return next((one for one in places if self.find_problem(one[0], pieces[one[0]][one[1]])), None)

    def find_problem(self, number: int, piece: Piece) -> str | None:
        """Return the fault of a piece of tensor *number*, in words; None when it is valid."""
        shape, file_sizes = self.shapes[number], self._file_sizes
        if not 0 <= piece.file < len(file_sizes):
            return f"is in file number {piece.file} of {len(file_sizes)}"
        if not 0 <= piece.start <= piece.end <= file_sizes[piece.file]:
            return f"has bytes {piece.start}–{piece.end}, outside its file of {file_sizes[piece.file]} bytes"
        if not len(piece.offsets) == len(piece.sizes) == len(shape):
            return f"has {len(piece.offsets)} offsets and {len(piece.sizes)} sizes in {len(shape)} dimensions"
        if any(
            low < 0 or size < 0 or low + size > most
            for low, size, most in zip(piece.offsets, piece.sizes, shape, strict=True)
        ):
            return f"at {piece.offsets} of sizes {piece.sizes} is outside the shape {shape}"
        needed = prod(piece.sizes) * self._widths[number]
        if piece.end - piece.start != needed:
            return f"of sizes {piece.sizes} has {piece.end - piece.start} bytes and needs {needed}"
        return None


def _check_shapes(tensors: Mapping[str, TensorEntry], what: str) -> list[int]:
    """Check names, dtypes, shapes and orders of axes; return the bytes of an element of each tensor."""
    if len(tensors) > MAX_TENSORS:
        _refuse(what, f"{len(tensors)} tensors are more than {MAX_TENSORS}")
    widths: list[int] = []
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in tensors.items():
        _check_name(name, what)
        facts = entry.dtype, entry.shape
        width = known.get(facts)
        if width is not None and entry.axes is UNSET:
            widths.append(width)
            continue
        width = itemsize_if_known(entry.dtype)
        if width is None:
            _refuse(what, f"{name!r} has the unknown dtype {entry.dtype[:40]!r}")
        if len(entry.shape) > MAX_RANK or not all(0 <= size < MAX_DIM for size in entry.shape):
            _refuse(what, f"{name!r} has an impossible shape: at most {MAX_RANK} sizes below {MAX_DIM}")
        if entry.axes is not UNSET and sorted(entry.axes) != list(range(len(entry.shape))):
            shown = (
                f"{list(entry.axes)} are not the axes of a tensor of {len(entry.shape)} dimensions, each of them once"
            )
            _refuse(what, f"{name!r} lies in memory in an order that is none: {shown}")
        known[facts] = width
        widths.append(width)
    return widths


def _check_name(name: str, what: str) -> None:
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES:
        _refuse(what, f"the name {name[:40]!r} is empty or longer than {MAX_NAME_BYTES} bytes")


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
        if facts is not None and itemsize_if_known(facts[0]) is None:
            _refuse(what, f"{name[:160]!r} was left out with the unknown dtype {facts[0][:40]!r}")


def pieces_by_file(m: Manifest) -> Sequence[list[Placed]]:
    """Return the pieces in each file, by file index and in file order; pass them to `check_header` for many files.

    For a table, the pieces of a file are collected on access.
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
    """Check that the safetensors header of file number *file_index* agrees with the manifest's pieces in it.

    Args:
        m: a manifest that `check_manifest` accepted.
        placed: the file's item of `pieces_by_file`, to save a walk over all pieces.

    Raises:
        CorruptionError: they disagree; names the file and a tensor.
    """
    if placed is None:
        placed = pieces_by_file(m)[file_index]
    path = m.files[file_index].p
    below = read_below(header.metadata)
    entries = [entry for entry in header.entries if entry.end > entry.start]
    starts = [header.data_start + entry.start for entry in entries]
    owners = [f"{below}.{entry.name}" if below else entry.name for entry in entries]
    cursor = 0
    for name, piece in placed:
        if piece.start == piece.end:
            continue
        dtype, place = m.tensors[name].dtype, bisect_right(starts, piece.start) - 1
        problem: str | None
        if place < 0:
            problem = "lies before the payload"
        elif piece.start < cursor:
            problem = f"shares the bytes {piece.start}–{cursor} with another piece"
        else:
            problem = _find_contradiction(name, piece, dtype, entries[place], starts[place], owners[place])
        if problem:
            raise CorruptionError(f"{path}: {name!r} {problem}", key=path, offset=piece.start, tensors=(name,))
        cursor = piece.end


def _find_contradiction(name: str, piece: Piece, dtype: str, entry: Entry, entry_start: int, owner: str) -> str | None:
    """Return how *piece* disagrees with the *entry*, of *owner*, that holds its first byte; None when it agrees."""
    entry_end = entry_start + entry.end - entry.start
    if piece.end > entry_end:
        return f"has bytes {piece.start}–{piece.end}, the header's entry {entry.name[:80]!r} ends at {entry_end}"
    if owner != name and not owner.startswith(f"{name}#"):
        return f"has bytes {piece.start}–{piece.end}, which the header gives to {entry.name[:80]!r}"
    stored_as = dtype if entry.dtype == dtype or is_native(dtype) else "U8"
    if entry.dtype != stored_as:
        return f"is {dtype}, stored as {stored_as}; the header says {entry.dtype}"
    if entry.shape == piece.sizes or stored_as != dtype or (piece.start, piece.end) != (entry_start, entry_end):
        return None
    if entry.shape != (prod(piece.sizes),):
        return f"is a box of sizes {piece.sizes}; the header says {entry.shape}"
    return None
