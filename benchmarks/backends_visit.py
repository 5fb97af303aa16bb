"""What does one client cost? One process that moves bytes with one contender and says how long it took.

Guarantees:

- Everything is done once untimed, so that connections and memory are warm.
- What comes back is compared with what was stored, off the clock, after every read.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import numpy as np

from benchmarks.contenders import clients
from benchmarks.contenders.clients import Client, Place

POISON = 0xA5


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        zeros: the server keeps nothing and sends zeros.
    """

    contender: str
    place: Place
    zeros: bool
    size_bytes: int
    small_bytes: int
    small_count: int
    repetitions: int
    seed: int


class Samples(msgspec.Struct):
    """Wall seconds, and CPU seconds of the client's process, for each repetition."""

    wall_s: list[float] = msgspec.field(default_factory=list)
    cpu_s: list[float] = msgspec.field(default_factory=list)

    @contextmanager
    def time(self) -> Iterator[None]:
        """Time the block."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


class Answer(msgspec.Struct, kw_only=True):
    """What came of it: samples by operation, or why there are none."""

    samples: dict[str, Samples] = {}
    unavailable: str = ""


async def perform(order: Order) -> Answer:
    """Carry out *order*."""
    try:
        client = clients.make(order.contender, order.place)
    except ImportError as error:
        return Answer(unavailable=str(error))
    await client.open(order.place)
    try:
        visit = _Visit(order, client)
        await visit.large()
        await visit.small()
        return Answer(samples=visit.samples)
    finally:
        await client.close()


class _Visit:
    def __init__(self, order: Order, client: Client) -> None:
        self._order = order
        self._client = client
        self.samples = {name: Samples() for name in ("put", "get", "put small", "get small")}

    async def large(self) -> None:
        data = np.random.default_rng(self._order.seed).bytes(self._order.size_bytes)
        target = np.full(self._order.size_bytes, POISON, np.uint8)
        meant = np.zeros_like(target) if self._order.zeros else np.frombuffer(data, np.uint8)
        for number in range(self._order.repetitions + 1):
            put, get = (Samples(), Samples()) if number == 0 else (self.samples["put"], self.samples["get"])
            key = f"large-{number}"
            with put.time():
                await self._client.put(key, data)
            target.fill(POISON)
            with get.time():
                await self._client.get(key, target.data)
            if not np.array_equal(target, meant):
                raise ValueError(f"{self._order.contender}: what was read of {key} is not what was stored")

    async def small(self) -> None:
        data = np.random.default_rng(self._order.seed + 1).bytes(self._order.small_bytes)
        meant = bytes(len(data)) if self._order.zeros else data

        async def put(key: str) -> None:
            await self._client.put_small(key, data)

        async def get(key: str) -> None:
            if await self._client.get_small(key) != meant:
                raise ValueError(f"{self._order.contender}: what was read of {key} is not what was stored")

        for number in range(self._order.repetitions + 1):
            keys = [f"small-{number}-{index}" for index in range(self._order.small_count)]
            for name, move in (("put small", put), ("get small", get)):
                with (Samples() if number == 0 else self.samples[name]).time():
                    await self._each(keys, move)

    async def _each(self, keys: list[str], move: Callable[[str], Awaitable[None]]) -> None:
        """Move all *keys*, as many at once as the place says."""
        left = iter(keys)

        async def some() -> None:
            for key in left:
                await move(key)

        async with anyio.create_task_group() as tasks:
            for _ in range(self._order.place.in_flight):
                tasks.start_soon(some)


def main() -> None:
    """Carry out the order in the file that is named first, and write the answer into the second."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(asyncio.run(perform(order))))


if __name__ == "__main__":
    main()
