"""Counters of one point: how long requests took, what they cost, and what went wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiockpt.errors import StorageError
from aiockpt.runtime.world import Clock
from aiockpt.storage.retry_calls import classify
from aiockpt.tools.stress.report import Point

GIB = 1 << 30


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Return the smallest of *ordered* that at least *fraction* of them do not exceed; None of none."""
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
        """Time one request that moves *size_bytes*; its error is counted and goes on."""
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
        """Return what was counted."""
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
        """Seconds; never 0, so that a rate can be had of it."""
        return max(1, self._clock.monotonic_ns() - self._wall_ns) / 1e9

    @property
    def cpu_s(self) -> float:
        """Seconds of this process, all threads."""
        return (time.process_time_ns() - self._cpu_ns) / 1e9
