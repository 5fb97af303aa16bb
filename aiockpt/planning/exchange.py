"""The exchange of blocks that several ranks want: which rank reads them, and which ranks receive them from it.

``plan_exchange`` matches what the ranks of a group want from the same files, in whole checksum blocks. A block that one
rank wants is read by that rank. Blocks that several want are sent in *parcels*: one rank reads, the others receive.

Guarantees:

- Pure and deterministic: every rank plans alone from the same wants, and all plans are equal.
- Every wanted block reaches every rank that wants it exactly once, from storage or in a parcel; no other rank receives it.
- A rank reads only blocks that it wants itself. All ranks read about equally much: within one parcel where all want all.

(Read once and spread: ByteCheckpoint, NSDI'25 §4.1; MegaScale, NSDI'24 §5.3.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from operator import attrgetter

import msgspec

from aiockpt.planning.read_plan import Landing

MIN_PARCEL_BYTES = 1 << 20
"""Smaller parcels cost more in messages than they gain in evenness."""
PARCELS_A_RANK = 4
"""Of a small checkpoint, so that reading one parcel overlaps sending the one before."""


class FileSpan(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Bytes [start, end) of file number *file*: whole checksum blocks."""

    file: int
    start: int
    end: int


class SharedRange(msgspec.Struct, frozen=True):
    """The blocks that one rank reads and sends to others in one message. Ranks are numbers within the group.

    Attributes:
        reader: one of the *takers*.
        takers: all ranks that want it, in order.
        spans: the blocks, one after the other as in the message.
        opens: files of which this is the first parcel: its reader compares their headers for all.
    """

    reader: int
    takers: tuple[int, ...]
    spans: tuple[FileSpan, ...]
    opens: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        return sum(span.end - span.start for span in self.spans)


class Exchange(msgspec.Struct, frozen=True):
    """The reads of a group.

    Attributes:
        alone: for each rank, the blocks that only it wants.
        parcels: one of each reader in turn; in this order they are read and taken, so that no two ranks wait for each other.
    """

    alone: tuple[tuple[FileSpan, ...], ...]
    parcels: tuple[SharedRange, ...]


def wanted_spans(passes: Iterable[Mapping[int, Sequence[Landing]]], files: Sequence[tuple[int, int]]) -> list[FileSpan]:
    """Return the blocks that hold the landings of all passes: sorted spans that do not touch.

    Args:
        files: bytes, and bytes of a block, of each file.
    """
    covers: list[FileSpan] = []
    for landings in passes:
        for file, some in landings.items():
            size, block = files[file]
            covers += (
                FileSpan(file, one.start // block * block, min(-(-one.end // block) * block, size))
                for one in some
                if one.end > one.start
            )
    return _merge(sorted(covers))


def plan_exchange(wanted: Sequence[Sequence[FileSpan]], blocks: Sequence[int], *, parcel_bytes: int) -> Exchange:
    """Return the blocks that each rank reads, and the ranks that it sends them to.

    Args:
        wanted: by each rank of the group, as `wanted_spans` returns it.
        blocks: bytes of a block, for each file.
        parcel_bytes: of the largest parcel; a file whose blocks are larger travels block by block.
    """
    alone: list[list[FileSpan]] = [[] for _ in wanted]
    shared: dict[tuple[int, ...], list[FileSpan]] = {}
    for takers, span in _intersect(wanted):
        (alone[takers[0]] if len(takers) == 1 else shared.setdefault(takers, [])).append(span)
    loads = [sum(span.end - span.start for span in spans) for spans in alone]
    reads: list[list[SharedRange]] = [[] for _ in wanted]
    for takers, spans in sorted(shared.items(), key=lambda item: (len(item[0]), item[0])):  # fewest choices first
        for bundle in _bundles(spans, blocks, _parcel_bytes(takers, spans, parcel_bytes)):
            reader = min(takers, key=lambda rank: (loads[rank], rank))
            parcel = SharedRange(reader, takers, bundle)
            loads[reader] += parcel.size_bytes
            reads[reader].append(parcel)
    return Exchange(tuple(map(tuple, alone)), tuple(_in_turn(reads)))


def _intersect(wanted: Sequence[Sequence[FileSpan]]) -> Iterator[tuple[tuple[int, ...], FileSpan]]:
    """Yield (ranks, span) for each span that the same ranks want, in the order of files and bytes."""
    edges = sorted(
        (span.file, edge, rank)
        for rank, spans in enumerate(wanted)
        for span in spans
        for edge in (span.start, span.end)
    )
    takers: set[int] = set()
    begin = (0, 0)
    for file, edge, rank in edges:
        if takers and edge > begin[1]:
            yield tuple(sorted(takers)), FileSpan(file, begin[1], edge)
        # The spans of one rank do not overlap, so its edges alternate: one begins a span, the next ends it.
        takers ^= {rank}
        begin = (file, edge)


def _merge(spans: Iterable[FileSpan]) -> list[FileSpan]:
    merged: list[FileSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.file == span.file and span.start <= last.end:
            merged[-1] = FileSpan(span.file, last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _parcel_bytes(takers: Sequence[int], spans: Sequence[FileSpan], most: int) -> int:
    """Return a parcel size for which every taker reads several parcels, as far as the limits allow."""
    total = sum(span.end - span.start for span in spans)
    return min(most, max(MIN_PARCEL_BYTES, total // (PARCELS_A_RANK * len(takers))))


def _bundles(spans: Iterable[FileSpan], blocks: Sequence[int], most: int) -> Iterator[tuple[FileSpan, ...]]:
    """Cut the spans between blocks and bundle them, in order, to at most *most* bytes (or one block)."""
    bundle: list[FileSpan] = []
    room = most
    for span in spans:
        block, at = blocks[span.file], span.start
        while at < span.end:
            end = min(span.end, at + room // block * block)
            if end <= at and bundle:  # no room for even one block: begin the next bundle
                yield tuple(bundle)
                bundle, room = [], most
                continue
            end = max(end, min(span.end, at + block))
            bundle.append(FileSpan(span.file, at, end))
            room -= end - at
            at = end
    if bundle:
        yield tuple(bundle)


def _in_turn(reads: Sequence[Sequence[SharedRange]]) -> Iterator[SharedRange]:
    """Yield one parcel of each reader in turn; the first of a file opens it."""
    seen: set[int] = set()
    for parcel in filter(None, chain.from_iterable(zip_longest(*reads))):
        opens = frozenset(span.file for span in parcel.spans) - seen
        seen |= opens
        yield msgspec.structs.replace(parcel, opens=opens)


def landings_within(landings: Sequence[Landing], span: FileSpan) -> list[Landing]:
    """Return the parts of one file's landings (sorted, without overlaps) that lie in *span*."""
    found = []
    for landing in landings[bisect_left(landings, span.start + 1, key=attrgetter("end")) :]:
        if landing.start >= span.end:
            break
        low, high = max(landing.start, span.start), min(landing.end, span.end)
        found.append(Landing(low, high, landing.target, landing.target_offset + low - landing.start))
    return found


def landings_of(
    passes: Iterable[Mapping[int, Sequence[Landing]]], spans: Sequence[FileSpan]
) -> list[dict[int, list[Landing]]]:
    """Return the parts of all landings that lie in *spans* (sorted), pass by pass."""
    clipped = []
    for landings in passes:
        some: dict[int, list[Landing]] = {}
        for span in spans:
            if parts := landings_within(landings.get(span.file, ()), span):
                some.setdefault(span.file, []).extend(parts)
        clipped.append(some)
    return clipped
