"""How are many small objects read? In one hop to a thread where the place can do that, and else several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from aiockpt.errors import ObjectNotFoundError
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, GetsMany

READS = 32
"""Objects that are read at once."""


async def get_many(backend: Backend, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
    """Return small objects whole, or their first *max_bytes*, in the order of *keys*; None for one that is not there."""
    if callable(getattr(backend, "get_many", None)):
        return await cast("GetsMany", backend).get_many(keys, max_bytes)
    found: list[bytes | None] = [None] * len(keys)

    async def get_left(left: Iterator[tuple[int, str]]) -> None:
        for place, key in left:
            try:
                found[place] = await backend.get(key, max_bytes)
            except ObjectNotFoundError:
                continue

    left = iter(enumerate(keys))
    async with open_tasks() as tasks:
        for _ in keys[:READS]:
            tasks.start_soon(get_left, left)
    return tuple(found)
