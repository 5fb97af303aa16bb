"""Batches that a run leaves out after a rewind (`aiockpt.Rewind`), by their positions among all batches of the run.

A position counts the batches that a loader has taken from its source since the run began, the skipped ones among them. So
it means the same batch after any number of rewinds and restarts, while the readers of the data are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aiockpt.errors import UsageError


class Skips(msgspec.Struct, frozen=True):
    """Half-open ranges of positions, ascending and apart."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self.ranges)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def union(self, ranges: Iterable[tuple[int, int]]) -> Skips:
        """Return these positions and those of *ranges*."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted((*self.ranges, *ranges)):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            elif start < stop:
                joined.append((start, stop))
        return Skips(tuple(joined))

    def offsets_from(self, position: int) -> frozenset[int]:
        """Return how many batches after *position* each of those that are still to come comes."""
        return frozenset(at - position for start, stop in self.ranges for at in range(max(start, position), stop))


def read_skips(own: Mapping[str, Any]) -> tuple[int, Skips]:
    """Return position and skips in the state of a data-parallel rank; empty in that of an earlier version.

    Raises:
        UsageError: it is not the state of a loader.
    """
    try:
        ranges = msgspec.convert(own.get("skips", []), list[tuple[int, int]])
        return msgspec.convert(own.get("position", 0), int), Skips().union(ranges)
    except msgspec.ValidationError as error:
        raise UsageError(f"the state of a loader cannot be read: {error}; load another step") from error


def without_skipped(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a data-parallel rank with the parts that other readers continue: those without what is skipped."""
    return {**own, "parts": own["without"]} if "without" in own else own
