"""How does a client without a transfer manager move a large object? Part by part, some at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio

from benchmarks.contenders.clients import Place

MovePart = Callable[[int, int, int], Awaitable[None]]
"""Moves one part: its number from 0, its first byte, the byte after its last."""


async def each_part(place: Place, size: int, move: MovePart) -> None:
    """Call *move* for each part of an object of *size* bytes, ``place.in_flight`` at once."""
    starts = iter(enumerate(range(0, size, place.part_bytes)))
    async with anyio.create_task_group() as tasks:
        for _ in range(place.in_flight):
            tasks.start_soon(_move_some, place, size, starts, move)


async def _move_some(place: Place, size: int, starts: Iterator[tuple[int, int]], move: MovePart) -> None:
    for number, start in starts:
        await move(number, start, min(start + place.part_bytes, size))
