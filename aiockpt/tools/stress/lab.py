"""Tools of all measurements: the bytes to write, the counters of a point, and the workers that make its requests.

Guarantees:

- A request that fails is counted and the next one is made; after too many failures in a row a point ends early, and
  the report notes it.
- A call that a backend refuses (`UsageError`) is skipped with its reason, not counted as a failure of the storage.
- A block differs from every block that a mix-up could put in its place: its neighbours in the file, the same block of
  other files, other objects. The data does not compress, and blocks begin at a page, as O_DIRECT requires.
"""

from __future__ import annotations

import mmap
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from aiockpt import units
from aiockpt.errors import StorageError, UsageError
from aiockpt.format.document import hash_block
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying
from aiockpt.storage.retry_calls import classify
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Point, Skipped, StressReport

_PAGE_BYTES = 4096
_RUNS = 1021  # a prime
_FILE_STRIDE = 401
GIB = 1 << 30
FAILURES_TO_LEAVE = 10
"""Consecutive failures, of all workers together, that end a point."""

T = TypeVar("T")
Request = Callable[[], Awaitable[None]]


class Payload:
    """The bytes of everything that is written in one run.

    Args:
        seed: of the bytes.
        block_bytes: the longest block.
    """

    def __init__(self, seed: int, block_bytes: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, block_bytes + _RUNS * _PAGE_BYTES))
        dice = random.Random(seed)
        for start in range(0, self._memory.nbytes, 1 << 20):
            room = self._memory[start : start + (1 << 20)]
            room[:] = dice.randbytes(room.nbytes)
        self._sums: dict[tuple[int, int], bytes] = {}

    def block(self, file: int, block: int, size: int) -> memoryview:
        """Return the contents of block number *block* of file number *file*: *size* bytes."""
        start = self._run(file, block) * _PAGE_BYTES
        return self._memory[start : start + size]

    def is_block(self, file: int, block: int, found: memoryview) -> bool:
        """Return whether *found* is that block. (0.4 ms for 16 MiB.)"""
        known = (self._run(file, block), found.nbytes)
        if known not in self._sums:
            self._sums[known] = hash_block(self.block(file, block, found.nbytes))
        return hash_block(found) == self._sums[known]

    def document(self, number: int, size: int) -> bytes:
        """Return the contents of small object number *number*: *size* bytes, its number first."""
        stamp = number.to_bytes(8, "big")[-size:]
        return stamp + bytes(self.block(number, 0, size - len(stamp)))

    def _run(self, file: int, block: int) -> int:
        return (file * _FILE_STRIDE + block) % _RUNS


def new_buffer(size: int) -> memoryview:
    """Return *size* bytes of page-aligned, pre-faulted memory: no page fault is timed."""
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = bytes(size)
    return memory


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Return the smallest of *ordered* that at least *fraction* of them do not exceed; None if empty."""
    if not ordered:
        return None
    return ordered[max(0, -(-round(fraction * 1000) * len(ordered) // 1000) - 1)]


class Meter:
    """Counts the requests of one operation. On one event loop.

    Attributes:
        wrong: what read other bytes than were written, a sentence each.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken_ns: list[int] = []
        self._moved_bytes = 0
        self._errors: Counter[str] = Counter()
        self.wrong: list[str] = []

    @contextmanager
    def request(self, size_bytes: int = 0) -> Iterator[None]:
        """Time one request that moves *size_bytes*; an error is counted and raised again."""
        began_ns = self._clock.monotonic_ns()
        try:
            yield
        except StorageError as error:
            self._errors[classify(error)] += 1
            raise
        self._taken_ns.append(self._clock.monotonic_ns() - began_ns)
        self._moved_bytes += size_bytes

    def point(
        self, operation: str, size_bytes: int, concurrency: int, wall_s: float, cpu_s: float | None, retries: int
    ) -> Point:
        ordered, moved_bytes = sorted(taken / 1e6 for taken in self._taken_ns), self._moved_bytes
        return Point(
            operation=operation,
            size_bytes=size_bytes,
            concurrency=concurrency,
            requests=len(ordered),
            bytes=moved_bytes,
            wall_s=wall_s,
            cpu_s=cpu_s,
            mb_per_s=moved_bytes / wall_s / 1e6 if moved_bytes else None,
            requests_per_s=len(ordered) / wall_s,
            cpu_s_per_gib=cpu_s / (moved_bytes / GIB) if moved_bytes and cpu_s is not None else None,
            p50_ms=percentile(ordered, 0.5),
            p95_ms=percentile(ordered, 0.95),
            p99_ms=percentile(ordered, 0.99),
            max_ms=ordered[-1] if ordered else None,
            errors=dict(self._errors),
            retries=retries,
            wrong=len(self.wrong),
        )


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """Place and tools of all measurements.

    Attributes:
        prefix: the folder of this run; all keys are below it.
        report: the results so far.
        watch: called with the name of each part when it begins.
    """

    backend: Backend
    prefix: str
    plan: StressPlan
    clock: Clock
    content: Payload
    report: StressReport
    watch: Callable[[str], object]

    def key(self, *parts: str) -> str:
        return "/".join((self.prefix, *parts))

    def skip(self, what: str, why: str) -> None:
        """Record that something was not measured."""
        self.report.skipped.append(Skipped(what, why))

    def stopwatch(self) -> Callable[[], float]:
        """Return a function that returns the seconds since now; never 0, so that rates are finite."""
        began_ns = self.clock.monotonic_ns()
        return lambda: max(1, self.clock.monotonic_ns() - began_ns) / 1e9

    def in_time(self, items: Iterable[T], least: int) -> Iterator[T]:
        """Yield *items* for the duration of a point, and at least *least*."""
        passed_s = self.stopwatch()
        for number, item in enumerate(items):
            if number >= least and passed_s() >= self.plan.seconds:
                return
            yield item

    async def point(
        self, operation: str, size: int, concurrency: int, requests: Iterator[Request], meters: Mapping[str, Meter]
    ) -> bool:
        """Make *requests*, *concurrency* at once, and add the counts to the report.

        Args:
            meters: that of *operation*, and those of other operations that these requests include.

        Returns:
            Whether to continue with this operation.
        """
        name = f"{operation} {units.size(size)}"
        self.watch(f"{name} × {concurrency}")
        retries, passed_s, cpu_ns = self._retries(), self.stopwatch(), time.process_time_ns()
        try:
            last_error = await _work(requests, concurrency)
        except UsageError as error:
            self.skip(f"{name} × {concurrency}", str(error))
            return False
        finally:
            self.report.problems += [problem for meter in meters.values() for problem in meter.wrong]
        wall_s, cpu_s = passed_s(), (time.process_time_ns() - cpu_ns) / 1e9
        for verb, meter in meters.items():
            own = (cpu_s, self._retries() - retries) if verb == operation else (None, 0)
            point = meter.point(verb, size, concurrency, wall_s, *own)
            if verb == operation or point.requests or point.errors:
                self.report.points.append(point)
        if last_error is None:
            return True
        stopped = f"stopped after {FAILURES_TO_LEAVE} failures in a row: {last_error}"
        self.report.problems.append(f"{name} × {concurrency}: {stopped}")
        self.skip(f"{name} at more than {concurrency}", "too many requests failed")
        return False

    def _retries(self) -> int:
        """Return the number of retries that the backend has made so far; 0 without a retrying backend."""
        return self.backend.statistics().retries if isinstance(self.backend, Retrying) else 0


async def _work(requests: Iterator[Request], concurrency: int) -> StorageError | None:
    """Make *requests* by *concurrency* workers; return the last error when too many failed in a row."""
    failures: list[StorageError] = []

    async def some() -> None:
        # All workers draw from one generator: on one thread, and without an await in it, it is never entered twice.
        for request in requests:
            try:
                await request()
                failures.clear()
            except StorageError as error:
                failures.append(error)
            if len(failures) >= FAILURES_TO_LEAVE:
                return

    async with open_tasks() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(some)
    return failures[-1] if len(failures) >= FAILURES_TO_LEAVE else None
