"""The plan of a load: which bytes of which data file are read, and where each of them lands.

``plan_load`` matches the wanted boxes of tensors (row-major in memory) with the stored pieces (row-major in files). No
communication is needed: every rank plans its own reads from the manifest alone.

Guarantees:

- Pure. Every wanted byte has exactly one landing, or the tensor is refused by name.
- Landings of one pass do not overlap in the file, so a block is read once a pass; only a tensor that is wanted twice,
  or more scratch memory than the limit, needs another pass.
- Whole blocks are read (so that each can be verified); the bytes of them that are not wanted are `LoadPlan.spare_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from aiockpt.errors import StateMismatchError
from aiockpt.format.dtypes import itemsize
from aiockpt.format.manifest import Manifest, Piece, TensorEntry
from aiockpt.state.geometry import Box, copy_runs

MIN_RUN_BYTES = 4096
"""Intersections whose mean contiguous run is shorter are read whole and placed by a strided copy: a buffer a run costs
about 2 µs, as much as reading 32 KiB."""

_FEW_PIECES = 16


class Landing(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """File bytes [start, end) go to *target_offset* of memory number *target*."""

    start: int
    end: int
    target: int
    target_offset: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A wanted box of a tensor, row-major in a memory of its own."""

    name: str
    box: Box


class Scattered(msgspec.Struct, frozen=True):
    """A piece that is read into scratch memory *scratch* (a landing target too) and then placed box by box.

    Attributes:
        target: number of the wanted tensor.
        stored: the box that the scratch memory holds, row-major.
        overlap: the part of it that is wanted.
        pass_number: of the pass that reads it.
    """

    scratch: int
    target: int
    stored: Box
    overlap: Box
    pass_number: int


class LoadPlan(msgspec.Struct, frozen=True):
    """The reads of a load.

    Attributes:
        passes: landings by file index, sorted by start, without overlaps; almost always one pass.
        scattered: pieces that go through scratch memory; target numbers from ``len(wanted)`` on are scratch memories.
        scratch: (offset, size) in bytes of each scratch memory in one memory of *scratch_bytes*. Where that was limited,
            passes share it: the pieces of one pass are placed before the next pass begins.
    """

    passes: tuple[Mapping[int, tuple[Landing, ...]], ...]
    scattered: tuple[Scattered, ...]
    scratch: tuple[tuple[int, int], ...]
    scratch_bytes: int

    @property
    def wanted_bytes(self) -> int:
        return sum(one.end - one.start for landings in self.passes for some in landings.values() for one in some)


_Overlap = tuple[Piece, Box, Box]
"""A piece, its box, and the part of it that is wanted."""


def plan_load(manifest: Manifest, wanted: Sequence[Wanted], scratch_limit_bytes: int | None = None) -> LoadPlan:
    """Return the reads that fill *wanted* from *manifest* (already validated).

    Args:
        scratch_limit_bytes: the most scratch memory at once, unless one piece is larger; what exceeds it takes more
            passes. None keeps all of it until the last pass is done.

    Raises:
        StateMismatchError: the pieces do not cover a wanted box; every such tensor is named.
    """
    landings: dict[int, list[Landing]] = {}
    strided: list[tuple[int, Box, Box]] = []
    uncovered: list[str] = []
    for number, want in enumerate(wanted):
        entry, box = manifest.tensors[want.name], want.box
        piece = entry.pieces[0] if len(entry.pieces) == 1 else None
        if piece is None or piece.sizes != box.sizes or piece.offsets != box.offsets:
            found = _plan_parts(entry, box, number, len(wanted), landings, strided)
            if found != box.volume:
                uncovered.append(f"{want.name}: {found} of {box.volume} elements are stored")
        elif piece.end > piece.start:  # the only piece is the wanted box: the most frequent case
            landings.setdefault(piece.file, []).append(Landing(piece.start, piece.end, number, 0))
    if uncovered:
        raise StateMismatchError(manifest.id, uncovered, "The checkpoint has gaps: load another step.")
    passes = plan_passes(landings, len(wanted), scratch_limit_bytes if strided else None)
    laid = lay_out_scratch(passes, len(wanted), shared=scratch_limit_bytes is not None) if strided else {}
    return LoadPlan(
        passes=tuple(passes),
        scattered=tuple(
            Scattered(len(wanted) + scratch, *what, laid[scratch].pass_number) for scratch, what in enumerate(strided)
        ),
        scratch=tuple((laid[scratch].offset, laid[scratch].size) for scratch in range(len(strided))),
        scratch_bytes=max((one.offset + one.size for one in laid.values()), default=0),
    )


def _plan_parts(
    entry: TensorEntry,
    wanted: Box,
    number: int,
    first_scratch: int,
    landings: dict[int, list[Landing]],
    strided: list[tuple[int, Box, Box]],
) -> int:
    """Add the pieces with elements of *wanted*, tensor *number*, to *landings*; return the count of those elements.

    Pieces with short runs are also added to *strided*: their scratch memories are numbered from *first_scratch* on.
    """
    found = 0
    for piece, stored, overlap in _overlaps(entry, wanted):
        found += overlap.volume
        runs = _direct_runs(entry, stored, wanted, overlap)
        into = landings.setdefault(piece.file, [])
        if runs is None:
            into.append(Landing(piece.start, piece.end, first_scratch + len(strided), 0))
            strided.append((number, stored, overlap))
        else:
            into.extend(
                Landing(piece.start + low, piece.start + low + size, number, target) for low, target, size in runs
            )
    return found


def _overlaps(entry: TensorEntry, wanted: Box) -> list[_Overlap]:
    """Return the pieces that have elements of *wanted*, with their box and the part that is wanted.

    Pieces are usually sorted by offsets (`aiockpt.format.merge`), so most of many need no check. The result verifies that
    assumption: pieces are disjoint, so when as many elements are found as are wanted, none is missing.
    """
    if len(entry.pieces) > _FEW_PIECES:
        likely = _intersect(_candidates(entry.pieces, wanted), wanted)
        if sum(overlap.volume for _, _, overlap in likely) == wanted.volume:
            return likely
    return _intersect(entry.pieces, wanted)


def _intersect(pieces: Iterable[Piece], wanted: Box) -> list[_Overlap]:
    overlaps = []
    for piece in pieces:
        stored = Box(piece.offsets, piece.sizes)
        overlap = stored.intersect(wanted)
        if overlap is not None and overlap.volume:
            overlaps.append((piece, stored, overlap))
    return overlaps


def _candidates(pieces: Sequence[Piece], wanted: Box) -> Sequence[Piece]:
    """Return the pieces between the first and the last that overlap *wanted* on the first axis that is cut."""
    first, last = pieces[0].offsets, pieces[-1].offsets
    axis = next((axis for axis, (one, other) in enumerate(zip(first, last, strict=True)) if one != other), None)
    if axis is None:
        return ()
    low, high = wanted.offsets[axis], wanted.offsets[axis] + wanted.sizes[axis]
    begin = bisect_right(pieces, low, key=lambda piece: piece.offsets[axis] + piece.sizes[axis])
    return pieces[begin : bisect_left(pieces, high, key=lambda piece: piece.offsets[axis])]


def _direct_runs(entry: TensorEntry, stored: Box, wanted: Box, overlap: Box) -> list[tuple[int, int, int]] | None:
    """Return (piece offset, target offset, size) in bytes; None when the runs are too short to be worth a buffer each."""
    width = itemsize(entry.dtype)
    if stored == wanted:
        return [(0, 0, stored.volume * width)]
    most = max(1, overlap.volume * width // MIN_RUN_BYTES)
    runs: list[tuple[int, int, int]] = []
    for source, target, count in copy_runs(stored, wanted):
        # Stops at the first run too many: a cut of the last axis can have one for each row of the tensor.
        if len(runs) == most:
            return None
        runs.append((source * width, target * width, count * width))
    return runs


class Segment(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """*size* bytes of a read: to *target_offset* of memory *target*, or discarded (*target* −1, a gap)."""

    size: int
    target: int
    target_offset: int


class BlockRead(msgspec.Struct, frozen=True):
    """One read of consecutive bytes from *offset* of a file, spread over *segments*."""

    offset: int
    size: int
    segments: tuple[Segment, ...]


GAP = -1


def plan_reads(
    landings: Sequence[Landing], file_size: int, *, block_bytes: int, read_bytes: int, whole_blocks: bool
) -> Iterator[BlockRead]:
    """Cut one file's sorted landings into reads of at most *read_bytes*.

    With *whole_blocks* reads are made of whole checksum blocks, so that each can be verified: the bytes of a block that
    are not wanted go into gaps. Without it only wanted bytes are read.
    """
    first = 0
    for offset, stop in _units(landings, file_size, block_bytes if whole_blocks else 1, read_bytes):
        segments: list[Segment] = []
        cursor = offset
        while first < len(landings) and landings[first].start < stop:
            landing = landings[first]
            low, high = max(landing.start, offset), min(landing.end, stop)
            if low > cursor:
                segments.append(Segment(low - cursor, GAP, 0))
            segments.append(Segment(high - low, landing.target, landing.target_offset + low - landing.start))
            cursor = high
            if landing.end > stop:
                break
            first += 1
        if cursor < stop:
            segments.append(Segment(stop - cursor, GAP, 0))
        yield BlockRead(offset, stop - offset, tuple(segments))


def _units(landings: Sequence[Landing], file_size: int, align_bytes: int, read_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that cover the landings, aligned and merged, each cut into units of at most *read_bytes*."""
    covers: list[tuple[int, int]] = []
    low, high = 0, -1
    for landing in landings:
        if landing.end <= high:  # within the last block of the landings before
            continue
        start = landing.start // align_bytes * align_bytes
        if start > high:
            covers.append((low, high))
            low = start
        high = min(-(-landing.end // align_bytes) * align_bytes, file_size)
    # The first cover is the empty range that stood before the first landing.
    for start, end in (*covers[1:], (low, high)):
        for offset in range(start, end, read_bytes):
            yield offset, min(offset + read_bytes, end)


# The order of reads that land in many memories: passes over the files, most often one. A pass never has two landings for
# the same bytes of a file, and reads no more into scratch memory than the limit.


_SCRATCH_ALIGNMENT = 64
"""The alignment of each piece in scratch memory, in bytes: elements of every dtype may begin there."""


def plan_passes(
    landings: Mapping[int, list[Landing]], first_scratch: int, limit_bytes: int | None
) -> list[Mapping[int, tuple[Landing, ...]]]:
    """Return the landings of each pass by file, sorted by start.

    Args:
        first_scratch: the targets from this number on are scratch memories, each with one landing.
        limit_bytes: the most scratch memory of one pass, unless one piece is larger; None: no limit.
    """
    passes = _without_overlaps(landings)
    if limit_bytes is None:
        return list(passes)
    return [part for one in passes for part in _cut(one, first_scratch, limit_bytes)]


def _without_overlaps(landings: Mapping[int, list[Landing]]) -> Iterator[dict[int, tuple[Landing, ...]]]:
    """Sort the landings of each file; those that overlap an earlier one are put into the next pass."""
    waiting = {file: sorted(some, key=attrgetter("start")) for file, some in landings.items()}
    while waiting:
        this_pass: dict[int, tuple[Landing, ...]] = {}
        later: dict[int, list[Landing]] = {}
        for file, some in waiting.items():
            taken: list[Landing] = []
            cursor = 0
            for landing in some:
                if landing.start >= cursor:
                    taken.append(landing)
                    cursor = landing.end
                else:
                    later.setdefault(file, []).append(landing)
            this_pass[file] = tuple(taken)
        yield this_pass
        waiting = later


def _cut(
    landings: Mapping[int, tuple[Landing, ...]], first_scratch: int, limit_bytes: int
) -> Iterator[Mapping[int, tuple[Landing, ...]]]:
    """Cut a pass, in the order of its files, where its scratch memory would become more than *limit_bytes*."""
    if not any(one.target >= first_scratch for some in landings.values() for one in some):
        yield landings
        return
    part: dict[int, tuple[Landing, ...]] = {}
    held_bytes = 0
    for file, some in landings.items():
        taken: list[Landing] = []
        for landing in some:
            size = _aligned(landing.end - landing.start) if landing.target >= first_scratch else 0
            if held_bytes and held_bytes + size > limit_bytes:
                if taken:
                    part[file] = tuple(taken)
                yield part
                part, taken, held_bytes = {}, [], 0
            taken.append(landing)
            held_bytes += size
        part[file] = tuple(taken)
    yield part


class Scratch(msgspec.Struct, frozen=True):
    """The scratch memory of a piece, and the pass that reads it."""

    offset: int
    size: int
    pass_number: int


def lay_out_scratch(
    passes: Sequence[Mapping[int, Sequence[Landing]]], first_scratch: int, *, shared: bool
) -> dict[int, Scratch]:
    """Return the place of each scratch memory by number: one behind the other, from 0 again in each pass if *shared*."""
    laid: dict[int, Scratch] = {}
    offset = 0
    for number, landings in enumerate(passes):
        offset = 0 if shared else offset
        for landing in (landing for some in landings.values() for landing in some if landing.target >= first_scratch):
            size = landing.end - landing.start
            laid[landing.target - first_scratch] = Scratch(offset, size, number)
            offset += _aligned(size)
    return laid


def _aligned(size: int) -> int:
    return -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
