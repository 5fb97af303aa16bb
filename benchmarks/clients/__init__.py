"""Storage clients that move bytes to a server: one small class for each, all behind one contract.

Guarantees:

- All clients get the same bytes, parts of the same size, and the same concurrency; other settings are the library's
  defaults, and the name of a contender states any deviation.
- A large object is sent from, and received into, memory of the caller: a tensor's.
- A library is imported only in the process that measures it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import anyio
import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The target of objects, and the transfer settings.

    Attributes:
        url: ``s3://bucket/prefix`` or ``hdfs://host:port/folder``; keys are below it.
        endpoint_url: of an S3 that is not AWS; None: from the environment.
        part_bytes: of one part of a large object, and of one ranged read.
        in_flight: parts, and small objects, under way at once.
    """

    url: str
    endpoint_url: str | None = None
    part_bytes: int = 16 << 20
    in_flight: int = 8

    @property
    def bucket(self) -> str:
        """The bucket of an S3 place."""
        return self.url.removeprefix("s3://").partition("/")[0]

    def path(self, key: str) -> str:
        """Return the full name of *key* within the bucket."""
        prefix = self.url.removeprefix("s3://").partition("/")[2]
        return f"{prefix}/{key}" if prefix else key


class Client(Protocol):
    """One way to move bytes. Used on one event loop, in a process of its own: open, puts and gets, close."""

    async def open(self, place: Place) -> None:
        """Connect."""

    async def put(self, key: str, data: bytes) -> None:
        """Store a large object; the store has acknowledged it when this returns."""

    async def get(self, key: str, into: memoryview) -> None:
        """Fill *into* with a large object of exactly that size."""

    async def put_small(self, key: str, data: bytes) -> None:
        """Store an object of a few KiB. Several are under way at once."""

    async def get_small(self, key: str) -> bytes:
        """Return such an object."""
        ...

    async def close(self) -> None:
        """Release everything."""


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


class Threaded:
    """A blocking client: each call runs on a thread; there is one for each concurrent call."""

    def connect(self) -> None:
        """Make the library's client for ``self.place``."""

    def do_put(self, key: str, data: bytes) -> None:
        """Store an object; `do_put_small` where it is a small one."""
        raise NotImplementedError

    def do_get(self, key: str, into: memoryview) -> None:
        """Fill *into* with a large object."""
        raise NotImplementedError

    def do_put_small(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self.do_put(key, data)

    def do_get_small(self, key: str) -> bytes:
        """Return a small object."""
        raise NotImplementedError

    async def open(self, place: Place) -> None:
        self.place = place
        self.threads = ThreadPoolExecutor(place.in_flight)
        self.connect()

    async def put(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self.do_put, key, data)

    async def get(self, key: str, into: memoryview) -> None:
        await asyncio.to_thread(self.do_get, key, into)

    async def put_small(self, key: str, data: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, self.do_put_small, key, data)

    async def get_small(self, key: str) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.do_get_small, key)

    async def close(self) -> None:
        self.threads.shutdown()
