"""How much may happen at once? Named limiters for threads, a byte budget for memory, and the one way onto a thread.

Guarantees:

- Waiting for a limit is fair (first come, first served) and cancellable; work that has begun is neither: a thread that
  holds a slab, a file or a caller's buffer is never abandoned, so nothing is reused under its feet.
- Nothing is spawned before it has its share: take budget, then start, release in ``finally``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple

import anyio
import msgspec

from aiockpt.runtime.world import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LimiterStatistics(msgspec.Struct, frozen=True):
    """A limiter at one instant: what it is for, how many may run, run, and wait, and the most that ever ran."""

    name: str
    limit: int
    running: int
    waiting: int
    peak: int


class Limiter:
    """At most *limit* at once, by name. Use as ``async with limiter:`` on one event loop."""

    def __init__(self, name: str, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limiter {name!r}: the limit is {limit}, give at least 1")
        self.name = name
        self._limit = limit
        self._semaphore = anyio.Semaphore(limit, fast_acquire=True)  # a free place costs no turn of the loop
        self._peak = 0

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self._peak = max(self._peak, self._limit - self._semaphore.value)

    async def __aexit__(self, *_: object) -> None:
        self._semaphore.release()

    def statistics(self) -> LimiterStatistics:
        """Return the counts of this instant."""
        seen = self._semaphore.statistics()
        return LimiterStatistics(
            self.name, self._limit, self._limit - self._semaphore.value, seen.tasks_waiting, self._peak
        )

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"<Limiter {self.name!r} {seen.running}/{seen.limit} running, {seen.waiting} waiting>"


async def run_blocking(limiter: Limiter, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``work(*args)`` on a worker thread of the running loop, under *limiter*, and return what it returns.

    A cancellation that comes while the thread runs is held back until the thread is done, then raised: whatever
    *work* holds is free when this returns. It uses the loop's default executor, which the engine starts beforehand
    (Python 3.12 and later cannot start threads while the interpreter exits).
    """
    async with limiter:
        running = asyncio.get_running_loop().run_in_executor(None, work, *args)
        with anyio.CancelScope(shield=True):
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                await _outwait(running)
                raise
        return running.result()


async def _outwait(running: asyncio.Future[T]) -> None:
    """Wait until *running* is done, whoever cancels us meanwhile."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # read, so that asyncio does not log it as never retrieved


class Pace:
    """Lets *bytes_per_s* through, evenly. Use on one event loop.

    Args:
        bytes_per_s: None lets everything through.
        clock: what measures.
    """

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a pace of {bytes_per_s} bytes/s: give more than 0, or None")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_ns = 0

    async def let_through(self, size_bytes: int) -> None:
        """Wait until *size_bytes* may go."""
        if self._bytes_per_s is None:
            return
        now_ns = self._clock.monotonic_ns()
        begin_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = begin_ns + round(size_bytes / self._bytes_per_s * 1e9)
        await anyio.sleep((begin_ns - now_ns) / 1e9)


class BudgetStatistics(msgspec.Struct, frozen=True):
    """A byte budget at one instant."""

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    waiting: int


class ByteBudget:
    """At most *budget_bytes* in use at once, first come first served; an oversize item is admitted alone.

    (anyio's CapacityLimiter lends one token to a borrower, so it cannot do this.) Use on one event loop.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"the byte budget is {budget_bytes}, give at least 1")
        self._budget = budget_bytes
        self._used = 0
        self._peak = 0
        self._waiters: deque[tuple[int, anyio.Event]] = deque()

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold *size_bytes* of the budget for the length of the block."""
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self._release(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return self._used == 0 or self._used + size_bytes <= self._budget

    async def _acquire(self, size_bytes: int) -> None:
        if not self._waiters and self._fits(size_bytes):
            self._grant(size_bytes)
            return
        turn = (size_bytes, anyio.Event())
        self._waiters.append(turn)
        try:
            await turn[1].wait()
        except BaseException:
            if turn[1].is_set():  # granted and cancelled at the same moment: give it back
                self._release(size_bytes)
            else:
                self._waiters.remove(turn)
                self._wake()  # ours may have been the oversize one at the head
            raise

    def _grant(self, size_bytes: int) -> None:
        self._used += size_bytes
        self._peak = max(self._peak, self._used)

    def _release(self, size_bytes: int) -> None:
        self._used -= size_bytes
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            size_bytes, event = self._waiters.popleft()
            self._grant(size_bytes)
            event.set()

    def statistics(self) -> BudgetStatistics:
        """Return the counts of this instant."""
        return BudgetStatistics(self._budget, self._used, self._peak, len(self._waiters))
