"""Measurement of one point: so many workers, each making one request after the other, until the budget is spent.

Guarantees:

- A request that fails is counted and the next one is made; after too many failures in a row a point ends early, and
  the report notes it.
- What a backend refuses as a call (`UsageError`) is skipped with its reason, not counted as a failure of the storage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import msgspec

from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.tasks import open_tasks
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry_calls import RetryStatistics
from aiockpt.tools.stress.meter import Meter, Stopwatch
from aiockpt.tools.stress.payload import Payload
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Skipped, StressReport

FAILURES_TO_LEAVE = 10
"""In a row, of all workers together, before a point is given up."""

Request = Callable[[], Awaitable[None]]
Watch = Callable[[str], object]
"""Called with what begins now."""


@runtime_checkable
class _Retries(Protocol):
    def statistics(self) -> RetryStatistics: ...


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """Place and means of all measurements.

    Attributes:
        prefix: the folder of this run; all keys are below it.
        report: what was found so far.
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
        """Return how many further attempts the backend has made so far; 0 where it retries nothing."""
        if not isinstance(self.backend, _Retries):
            return 0
        return getattr(self.backend.statistics(), "retries", 0)

    async def point(
        self, operation: str, size: int, concurrency: int, requests: Iterator[Request], meters: Mapping[str, Meter]
    ) -> bool:
        """Make *requests*, *concurrency* at once, and put what was counted into the report.

        Args:
            meters: that of *operation*, and those of other operations that these requests bring along.

        Returns:
            Whether it is worth going on with this operation.
        """
        self.watch(f"{operation} {size_text(size)} × {concurrency}")
        retries = self.retries()
        stopwatch = Stopwatch(self.clock)
        try:
            given_up = await _work(requests, concurrency)
        except UsageError as error:
            self.skip(f"{operation} {size_text(size)} × {concurrency}", str(error))
            return False
        retries = self.retries() - retries
        wall_s = stopwatch.wall_s
        cpu_s = stopwatch.cpu_s
        for name, meter in meters.items():
            self.report.problems.extend(meter.wrong)
            if name == operation:
                self.report.points.append(meter.point(name, size, concurrency, wall_s, cpu_s, retries))
            elif meter.requests or meter.errors:
                self.report.points.append(meter.point(name, size, concurrency, wall_s, None, 0))
        if given_up is not None:
            self.report.problems.append(
                f"{operation} {size_text(size)} × {concurrency} was left after {FAILURES_TO_LEAVE} failures in a row:"
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
    """Return bytes as people write them on the command line: 16MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and not size % factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
