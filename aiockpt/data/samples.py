"""Resharding of the samples that a job has still to read, for when the number of readers changes.

A *reader* is a data-parallel rank, or one worker of it. A `LoaderPart` describes the samples that it still has to yield to
training, independent of the number of readers; `reshard` turns the parts of all old readers into those of the new ones
(ByteCheckpoint, NSDI'25 §4: copy, split and merge).

Guarantees:

- No sample is lost and none is read twice, over any sequence of sizes; parts that overlap are refused.
- With the same number of readers, each gets its own part back unchanged.
- New readers in lock step yield the samples of spans in the same order as the old readers in lock step would have.
- Pure and deterministic: every rank computes the same parts from the same checkpoint, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, TypeVar

import msgspec

from aiockpt.errors import UsageError

T = TypeVar("T")
_ABSENT = object()
_MAX_STRIDE = 1 << 12
"""Largest common stride at which spans are joined; beyond it they stay separate, which costs a longer list, no sample."""


class Span(msgspec.Struct, frozen=True):
    """Samples of a source with random access: ``range(start, stop, stride)`` of its order. It may be cut anywhere.

    Attributes:
        source: the name of the order, for instance a dataset, shuffled for one epoch.
    """

    source: str
    start: int
    stop: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.stride < 1:
            raise UsageError(f"{self}: start is 0 or more and stride 1 or more; correct what parts() returns")

    @property
    def positions(self) -> range:
        """The samples, as places in the order of the source."""
        return range(self.start, self.stop, self.stride)


class Stream(msgspec.Struct, frozen=True):
    """A source that is read from one place on to its end, such as a file. It moves between readers as a whole.

    Attributes:
        source: its name; one reader owns it.
        cursor: the position at which reading continues: any plain value that the reader understands.
        remaining_count: samples that are left, to distribute streams evenly; None when unknown.
    """

    source: str
    cursor: Any = None
    remaining_count: int | None = None


class LoaderPart(msgspec.Struct, frozen=True):
    """What one reader still has to yield to training.

    Attributes:
        shared: values that are equal on all readers, such as seed and epoch; kept unchanged.
        buffer: samples, or the beginning of one, that were read and not yielded; they come first. Plain values.
        spans, streams: what is to be read after the buffer, in order.
        most, least: the most and the least samples of spans that a rank has, where known; not saved.
    """

    shared: Any = None
    buffer: tuple[Any, ...] = ()
    spans: tuple[Span, ...] = ()
    streams: tuple[Stream, ...] = ()
    most: int | None = None
    least: int | None = None

    @property
    def span_count(self) -> int:
        """How many samples the spans hold."""
        return sum(len(span.positions) for span in self.spans)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return not (self.buffer or self.streams or self.span_count)


def reshard(parts: Sequence[LoaderPart], new_size: int) -> list[LoaderPart]:
    """Return the parts of *new_size* readers that together read all samples of *parts*.

    Buffered samples and spans are distributed one by one, so that counts differ by at most 1. Each stream goes as a whole to
    the reader with the least, the longest first; with fewer streams than readers, some readers get no stream.

    Args:
        parts: of the old readers, in their order.

    Raises:
        UsageError: two readers have the same sample or stream, or disagree about what is shared.
    """
    if not parts or new_size < 1:
        raise UsageError(f"{len(parts)} parts for {new_size} readers: give the parts of all old readers, and 1 or more")
    shared = _agreed(parts)
    spans = _join_spans([span for row in in_lock_step(part.spans for part in parts) for span in row])
    streams = [stream for row in in_lock_step(part.streams for part in parts) for stream in row]
    _check_owners(streams)
    if len(parts) == new_size:
        return list(parts)
    buffer = [sample for row in in_lock_step(part.buffer for part in parts) for sample in row]
    dealt_spans = _deal_spans(spans, new_size, first=len(buffer))
    dealt_streams = _deal_streams(streams, new_size)
    return [
        LoaderPart(shared, tuple(buffer[reader::new_size]), tuple(dealt_spans[reader]), tuple(dealt_streams[reader]))
        for reader in range(new_size)
    ]


def with_counts(parts: Sequence[LoaderPart], per_rank: int) -> list[LoaderPart]:
    """Return the parts of all ranks, *per_rank* of each, with `most` and `least` set."""
    counts = [sum(part.span_count for part in parts[at : at + per_rank]) for at in range(0, len(parts), per_rank)]
    return [msgspec.structs.replace(part, most=max(counts), least=min(counts)) for part in parts]


def split(spans: Sequence[Span], count: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the spans of the first *count* samples of *spans* (or of all, if fewer), and the spans of the rest."""
    taken: list[Span] = []
    left: list[Span] = []
    for span in spans:
        now = span.positions[:count]
        rest = span.positions[len(now) :]
        count -= len(now)
        if now:
            taken.append(Span(span.source, now.start, now.stop, span.stride))
        if rest:
            left.append(Span(span.source, rest.start, span.stop, span.stride))
    return tuple(taken), tuple(left)


def join_parts(parts: Sequence[LoaderPart]) -> LoaderPart:
    """Return one part with the contents of all *parts*, in their order."""
    return LoaderPart(
        parts[0].shared,
        tuple(sample for part in parts for sample in part.buffer),
        tuple(span for part in parts for span in part.spans),
        tuple(stream for part in parts for stream in part.streams),
    )


def in_lock_step(queues: Iterable[Sequence[T]]) -> Iterator[list[T]]:
    """Yield the first items of all queues, then the second items, and so on."""
    for row in zip_longest(*queues, fillvalue=_ABSENT):
        yield [item for item in row if item is not _ABSENT]  # type: ignore[misc]  # the sentinel is left out


def _agreed(parts: Sequence[LoaderPart]) -> Any:
    for reader, part in enumerate(parts[1:], 1):
        if part.shared != parts[0].shared:
            raise UsageError(
                f"readers 0 and {reader} disagree about what they share: {parts[0].shared!r:.80} and "
                f"{part.shared!r:.80}. Save at a step at which all are in the same epoch"
            )
    return parts[0].shared


# ---------------------------------------------------------------- spans


def _join_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the same samples in few spans, source by source in the order in which these appear, each ascending."""
    sources: dict[str, list[Span]] = {}
    for span in spans:
        if span.positions:
            sources.setdefault(span.source, []).append(span)
    joined: list[Span] = []
    for source, some in sources.items():
        common = math.lcm(*(span.stride for span in some if len(span.positions) > 1))
        found = _sewn(_sweep(source, some, common)) if common <= _MAX_STRIDE else sorted(some, key=lambda s: s.start)
        if sum(len(span.positions) for span in found) < sum(len(span.positions) for span in some):
            raise UsageError(
                f"two readers both have samples of {source!r}: {some[:4]}. Each sample belongs to one reader: "
                "pass each reader its rank and the number of ranks"
            )
        joined += found
    return joined


def _sweep(source: str, spans: Sequence[Span], common: int) -> Iterator[Span]:
    """Yield the union of *spans*: between two of their ends, the present residues of the common stride do not change."""
    borders = sorted({border for span in spans for border in (span.start, _end(span))})
    begin_at: dict[int, list[Span]] = {}
    end_at: dict[int, list[Span]] = {}
    for span in spans:
        begin_at.setdefault(span.start, []).append(span)
        end_at.setdefault(_end(span), []).append(span)
    present: dict[int, int] = {}
    for begin, end in pairwise(borders):
        for span in end_at.get(begin, ()):
            _count_residues(present, span, common, -1)
        for span in begin_at.get(begin, ()):
            _count_residues(present, span, common, 1)
        for start, stride in _classes(sorted(residue for residue, count in present.items() if count), common, begin):
            if start < end:
                yield Span(source, start, end, stride) if start + stride < end else Span(source, start, start + 1)


def _sewn(spans: Iterable[Span]) -> list[Span]:
    """Return the same samples, with spans joined where one continues another."""
    sewn: dict[int, Span] = {}
    apart: list[Span] = []
    # From the end: `sewn` has each span under the position at which an earlier one must end to be joined to it.
    for span in reversed(list(spans)):
        last = span.positions[-1]
        next_one = sewn.get(last)
        if next_one is not None and (len(span.positions) == 1 or span.stride == next_one.stride):
            del sewn[last]
            span = Span(span.source, span.start, next_one.stop, next_one.stride)
        if span.start - span.stride in sewn:
            apart.append(span)
        else:
            sewn[span.start - span.stride] = span
    return sorted([*sewn.values(), *apart], key=lambda span: span.start)


def _end(span: Span) -> int:
    """Return where a span ends in lock step: the place after the last round in which it has a sample."""
    return span.start + 1 if len(span.positions) == 1 else span.stop


def _count_residues(present: dict[int, int], span: Span, common: int, change: int) -> None:
    stride = common if len(span.positions) == 1 else span.stride
    for residue in range(span.start % stride, common, stride):
        present[residue] = present.get(residue, 0) + change


def _classes(residues: Sequence[int], common: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yield (first position from *begin* on, stride) of the fewest spans that cover these residues."""
    for stride in range(1, common + 1):
        if common % stride:
            continue
        firsts = {residue % stride for residue in residues}
        if len(firsts) * (common // stride) == len(residues):
            yield from sorted((begin + (first - begin) % stride, stride) for first in firsts)
            return


def _deal_spans(spans: Sequence[Span], size: int, *, first: int) -> list[list[Span]]:
    """Distribute samples one by one, beginning with reader *first* (modulo *size*): one stride for each."""
    dealt: list[list[Span]] = [[] for _ in range(size)]
    turn = first
    for span in spans:
        count = len(span.positions)
        for place in range(min(size, count)):
            start = span.start + place * span.stride
            dealt[(turn + place) % size].append(Span(span.source, start, span.stop, span.stride * size))
        turn += count
    return dealt


# ---------------------------------------------------------------- streams


def _check_owners(streams: Sequence[Stream]) -> None:
    seen: set[str] = set()
    for stream in streams:
        if stream.source in seen:
            raise UsageError(f"two readers both own the stream {stream.source!r}; give each stream to one of them")
        seen.add(stream.source)


def _deal_streams(streams: Sequence[Stream], size: int) -> list[list[Stream]]:
    """Assign each stream to the reader with the least, the longest first; a reader keeps its streams in the old order."""
    known = [stream.remaining_count for stream in streams if stream.remaining_count is not None]
    usual = max(known, default=1)
    weights = [usual if stream.remaining_count is None else stream.remaining_count for stream in streams]
    loads = [(0, 0, reader) for reader in range(size)]
    chosen: list[list[int]] = [[] for _ in range(size)]
    for index in sorted(range(len(streams)), key=lambda index: (-weights[index], index)):
        load, count, reader = min(loads)
        loads[reader] = (load + weights[index], count + 1, reader)
        chosen[reader].append(index)
    return [[streams[index] for index in sorted(some)] for some in chosen]


# ---------------------------------------------------------------- as plain values


def write_part(part: LoaderPart) -> dict[str, Any]:
    """Return a part as plain values, without the shared ones."""
    return {
        "buffer": list(part.buffer),
        "spans": [[span.source, span.start, span.stop, span.stride] for span in part.spans],
        "streams": [[stream.source, stream.cursor, stream.remaining_count] for stream in part.streams],
    }


def read_part(plain: Mapping[str, Any], shared: Any) -> LoaderPart:
    """Return the part that `write_part` wrote.

    Raises:
        UsageError: it is not a part.
    """
    try:
        return LoaderPart(
            shared,
            tuple(plain["buffer"]),
            tuple(Span(*msgspec.convert(span, tuple[str, int, int, int])) for span in plain["spans"]),
            tuple(Stream(*msgspec.convert(stream, tuple[str, Any, int | None])) for stream in plain["streams"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the part of a loader cannot be read: {error}; load another step") from error
