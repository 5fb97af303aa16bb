"""The order of reads that land in many memories: passes over the files, most often one.

A pass never has two landings for the same bytes of a file, and brings no more into scratch memory than there may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

_SCRATCH_ALIGNMENT = 64
"""Of each piece in scratch memory, in bytes: elements of every dtype may begin there."""


class Landing(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """File bytes [start, end) go to *target_offset* of memory number *target*."""

    start: int
    end: int
    target: int
    target_offset: int


def plan_passes(
    landings: Mapping[int, list[Landing]], first_scratch: int, limit_bytes: int | None
) -> list[Mapping[int, tuple[Landing, ...]]]:
    """Return the landings of each pass by file, sorted by start.

    Args:
        first_scratch: the targets from this number on are scratch memories, each with one landing.
        limit_bytes: of scratch memory in one pass, unless one piece is larger; None: any.
    """
    return [part for one in _without_overlaps(landings) for part in _cut(one, first_scratch, limit_bytes)]


def _without_overlaps(landings: Mapping[int, list[Landing]]) -> Iterator[dict[int, tuple[Landing, ...]]]:
    """Sort the landings of each file; those that overlap an earlier one wait for the next pass."""
    waiting = {file: sorted(some, key=lambda landing: landing.start) for file, some in landings.items()}
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
    landings: Mapping[int, tuple[Landing, ...]], first_scratch: int, limit_bytes: int | None
) -> Iterator[Mapping[int, tuple[Landing, ...]]]:
    """Cut a pass, in the order of its files, where its scratch memory would become more than *limit_bytes*."""
    if limit_bytes is None:
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
    """Where a piece waits, and in which pass it comes."""

    offset: int
    size: int
    pass_number: int


def lay_out_scratch(
    passes: Sequence[Mapping[int, Sequence[Landing]]], first_scratch: int, *, shared: bool
) -> dict[int, Scratch]:
    """Return where each scratch memory lies, by its number: one behind the other, anew with each pass if *shared*."""
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
