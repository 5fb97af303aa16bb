"""A simulated storage and store behind a network, in the time of a virtual loop.

A storage request takes its latency and the time of its bytes at one process's bandwidth; a listing is a request for each
1,000 names. Every call of the store takes a round trip, and the store serves one call after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio

from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.notes import NoteBoard
from aiockpt.storage.backend import Backend, Listing, Stat

T = TypeVar("T")
BANDWIDTH = 1 << 30
"""Bytes a second of one process."""
LISTED_AT_ONCE = 1000
STORE_ROUND_TRIP_S = 0.0002
STORE_CALL_S = 0.00001
"""The store's own work, assumed: it serves 100,000 calls a second."""


class SlowStorage:
    """A storage as seen by one process: every verb takes time. It has the verbs that a commit needs."""

    def __init__(self, inner: Backend, latency_s: float) -> None:
        self.inner = inner
        self.read_count = 0
        self.read_bytes = 0
        self._latency_s = latency_s

    async def _take_time(self, size: int = 0) -> None:
        await anyio.sleep(self._latency_s + size / BANDWIDTH)

    async def put_new(self, key: str, data: bytes) -> None:
        await self._take_time(len(data))
        await self.inner.put_new(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        data = await self.inner.get(key, max_bytes)
        self.read_count += 1
        self.read_bytes += len(data)
        await self._take_time(len(data))
        return data

    async def stat(self, key: str) -> Stat:
        self.read_count += 1
        await self._take_time()
        return await self.inner.stat(key)

    async def list(self, prefix: str) -> Listing:
        listing = await self.inner.list(prefix)
        for _ in range(0, max(1, len(listing.objects)), LISTED_AT_ONCE):
            self.read_count += 1
            await self._take_time()
        return listing


class DeadError(Exception):
    """The process has died."""


class DyingStorage(SlowStorage):
    """The storage of a process that dies after its vote, with the first receipt that it would gather."""

    async def get(self, key: str, max_bytes: int) -> bytes:
        raise DeadError


class CountingStore:
    """The notes of all ranks in a dictionary, and the number of calls."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.call_count = 0
        self.free_at_s = 0.0

    def set(self, key: str, value: bytes) -> None:
        self.call_count += 1
        self.notes[key] = value

    def get(self, key: str) -> bytes:
        self.call_count += 1
        return self.notes[key]

    def check(self, keys: list[str]) -> bool:
        self.call_count += 1
        return all(key in self.notes for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.call_count += 1
        count = int(self.notes.get(key, b"0")) + amount
        self.notes[key] = str(count).encode()
        return count

    def delete_key(self, key: str) -> bool:
        self.call_count += 1
        return self.notes.pop(key, None) is not None


class SlowMeeting(NoteBoard):
    """A rank's end of a store that serves one call after the other, a round trip away."""

    def __init__(self, store: CountingStore, rank: int, world_size: int) -> None:
        super().__init__(Incarnation(store, "simulated", rank, world_size, "", id="one"))
        self.begin()
        self.call_count = 0
        self._server = store

    async def _ask(self, work: Callable[[], T]) -> T:
        before = self._server.call_count
        result = work()
        calls = self._server.call_count - before
        self.call_count += calls
        now_s = anyio.current_time()
        self._server.free_at_s = max(now_s, self._server.free_at_s) + calls * STORE_CALL_S
        await anyio.sleep(self._server.free_at_s - now_s + calls * STORE_ROUND_TRIP_S)
        return result
