"""Groups of ranks whose receipts are gathered into one object, and the worlds that have them.

Two levels, of about √N each: the gathering rank reads the receipts of its group, rank 0 reads one object a group. So at
10,000 ranks no process reads more than 128 + 79 of them. A third level would save reads that run 32 at once anyway, and
cost a write, a wake-up and a listing in series (`python -m benchmarks run gathering` shows the waits).

Pure; the same on every rank, because it depends on the size of the world alone. The name of a group's object has its
ranks, so that a reader does not need this module.
"""

from __future__ import annotations

from math import isqrt

GATHER_ABOVE = 256
"""Ranks; up to here rank 0 has read all receipts, 32 at once, before a group could have written its own."""
MIN_GROUP = 64


def group_size(world_size: int) -> int:
    """Return how many consecutive ranks make a group: the power of two at or above √N, at least `MIN_GROUP`."""
    return max(MIN_GROUP, 1 << (isqrt(world_size - 1)).bit_length())


def groups_of(world_size: int) -> list[range]:
    """Return the groups of a world; none where it is too small for gathering to help."""
    if world_size <= GATHER_ABOVE:
        return []
    size = group_size(world_size)
    return [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]


def group_of(rank: int, world_size: int) -> range | None:
    groups = groups_of(world_size)
    return groups[rank // group_size(world_size)] if groups else None
