"""What does a shared file system or object store look like to one of many readers? The local disk, read at a given rate.

A benchmark on one machine has no network between ranks and storage. Each rank gets its share of the rate, so that all
together read no faster than the storage would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from aiockpt.backends.local import LocalBackend
from aiockpt.storage.backend import Reader, Seen


class SlowStorage:
    """A local backend whose data files are read at *bytes_s* bytes a second."""

    def __init__(self, root: Path, bytes_s: float) -> None:
        self._inner = LocalBackend(root)
        self._bytes_s = bytes_s
        self._turn = anyio.Lock()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    async def open(self, key: str) -> Reader:
        """Open an object; its reads take their time."""
        return _SlowReader(await self._inner.open(key), self._bytes_s, self._turn)


class _SlowReader:
    def __init__(self, inner: Reader, bytes_s: float, turn: anyio.Lock) -> None:
        self._inner = inner
        self._bytes_s = bytes_s
        self._turn = turn

    @property
    def size(self) -> int:
        return self._inner.size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        async with self._turn:
            await anyio.sleep(sum(map(len, into)) / self._bytes_s)
        await self._inner.read(offset, into, seen)

    async def close(self) -> None:
        await self._inner.close()
