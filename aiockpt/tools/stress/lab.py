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
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from aiockpt.errors import StorageError, UsageError
from aiockpt.format.document import hash_block
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry_calls import RetryStatistics, classify
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Point, Skipped, StressReport

_PAGE_BYTES = 4096
_RUNS = 1021  # a prime
_FILE_STRIDE = 401


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


GIB = 1 << 30


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Return the smallest of *ordered* that at least *fraction* of them do not exceed; None if empty."""
    if not ordered:
        return None
    return ordered[max(0, -(-round(fraction * 1000) * len(ordered) // 1000) - 1)]


class Meter:
    """Counts the requests of one operation. On one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken_ns: list[int] = []
        self.moved_bytes = 0
        self.errors: Counter[str] = Counter()
        self.last_error: StorageError | None = None
        self.wrong: list[str] = []

    @property
    def requests(self) -> int:
        """Number of requests that succeeded."""
        return len(self._taken_ns)

    @contextmanager
    def request(self, size_bytes: int = 0) -> Iterator[None]:
        """Time one request that moves *size_bytes*; an error is counted and raised again."""
        began_ns = self._clock.monotonic_ns()
        try:
            yield
        except StorageError as error:
            self.errors[classify(error)] += 1
            self.last_error = error
            raise
        self._taken_ns.append(self._clock.monotonic_ns() - began_ns)
        self.moved_bytes += size_bytes

    def point(
        self, operation: str, size_bytes: int, concurrency: int, wall_s: float, cpu_s: float | None, retries: int
    ) -> Point:
        """Return the counts as a point."""
        ordered = sorted(taken / 1e6 for taken in self._taken_ns)
        return Point(
            operation=operation,
            size_bytes=size_bytes,
            concurrency=concurrency,
            requests=self.requests,
            bytes=self.moved_bytes,
            wall_s=wall_s,
            cpu_s=cpu_s,
            mb_per_s=self.moved_bytes / wall_s / 1e6 if self.moved_bytes else None,
            requests_per_s=self.requests / wall_s,
            cpu_s_per_gib=cpu_s / (self.moved_bytes / GIB) if self.moved_bytes and cpu_s is not None else None,
            p50_ms=percentile(ordered, 0.5),
            p95_ms=percentile(ordered, 0.95),
            p99_ms=percentile(ordered, 0.99),
            max_ms=ordered[-1] if ordered else None,
            errors=dict(self.errors),
            retries=retries,
            wrong=len(self.wrong),
        )


class Stopwatch:
    """Wall and processor seconds since it was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ns = clock.monotonic_ns()
        self._cpu_ns = time.process_time_ns()

    @property
    def wall_s(self) -> float:
        """Seconds; never 0, so that rates are finite."""
        return max(1, self._clock.monotonic_ns() - self._wall_ns) / 1e9

    @property
    def cpu_s(self) -> float:
        """Seconds of this process, all threads."""
        return (time.process_time_ns() - self._cpu_ns) / 1e9


FAILURES_TO_LEAVE = 10
"""Consecutive failures, of all workers together, that end a point."""

T = TypeVar("T")
Request = Callable[[], Awaitable[None]]
Watch = Callable[[str], object]
"""Called with the name of each part when it begins."""


@runtime_checkable
class _Retries(Protocol):
    def statistics(self) -> RetryStatistics: ...


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """Place and tools of all measurements.

    Attributes:
        prefix: the folder of this run; all keys are below it.
        report: the results so far.
    """

    backend: Backend
    prefix: str
    plan: StressPlan
    clock: Clock
    content: Payload
    report: StressReport
    watch: Watch

    def key(self, *parts: str) -> str:
        """Return a key of this run."""
        return "/".join((self.prefix, *parts))

    def skip(self, what: str, why: str) -> None:
        """Record that something was not measured."""
        self.report.skipped.append(Skipped(what, why))

    def retries(self) -> int:
        """Return the number of retries that the backend has made so far; 0 without a retrying backend."""
        if not isinstance(self.backend, _Retries):
            return 0
        return getattr(self.backend.statistics(), "retries", 0)

    def in_time(self, items: Iterable[T], least: int) -> Iterator[T]:
        """Yield *items* for the duration of a point, and at least *least*."""
        stopwatch = Stopwatch(self.clock)
        for number, item in enumerate(items):
            if number >= least and stopwatch.wall_s >= self.plan.seconds:
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
        self.watch(f"{operation} {size_text(size)} × {concurrency}")
        retries = self.retries()
        stopwatch = Stopwatch(self.clock)
        try:
            given_up = await _work(requests, concurrency)
        except UsageError as error:
            self.skip(f"{operation} {size_text(size)} × {concurrency}", str(error))
            return False
        finally:
            self.report.problems += [problem for meter in meters.values() for problem in meter.wrong]
        retries = self.retries() - retries
        wall_s = stopwatch.wall_s
        cpu_s = stopwatch.cpu_s
        for name, meter in meters.items():
            if name == operation:
                self.report.points.append(meter.point(name, size, concurrency, wall_s, cpu_s, retries))
            elif meter.requests or meter.errors:
                self.report.points.append(meter.point(name, size, concurrency, wall_s, None, 0))
        if given_up is not None:
            self.report.problems.append(
                f"{operation} {size_text(size)} × {concurrency}: stopped after {FAILURES_TO_LEAVE} failures in a row:"
                f" {given_up}"
            )
            self.skip(f"{operation} {size_text(size)} at more than {concurrency}", "too many requests failed")
        return given_up is None


async def _work(requests: Iterator[Request], concurrency: int) -> StorageError | None:
    """Make *requests* by *concurrency* workers; return the last error when too many failed in a row."""
    failures = 0
    last: StorageError | None = None

    async def some() -> None:
        nonlocal failures, last
        # All workers draw from one generator: on one thread, and without an await in it, it is never entered twice.
        for request in requests:
            try:
                await request()
                failures = 0
            except StorageError as error:
                failures, last = failures + 1, error
            if failures >= FAILURES_TO_LEAVE:
                return

    async with open_tasks() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(some)
    return last if failures >= FAILURES_TO_LEAVE else None


def size_text(size: int) -> str:
    """Return bytes in the form of the command line: 16MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and not size % factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
