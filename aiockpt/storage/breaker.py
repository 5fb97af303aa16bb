"""When is a place down, so that asking it again only costs time? A circuit breaker.

Guarantees:

- It opens after *failures_to_open* calls in a row that gave up for want of an answer, or of room for more calls. An answer
  of any kind, a refusal too, shows that the place is there, and closes it.
- While it is open every call fails at once. After *open_s* one call, the probe, is let through alone; a probe that is
  cancelled decides nothing, and the next call is the probe.
- Time is that of the clock that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from aiockpt.errors import StorageError
from aiockpt.runtime.world import Clock
from aiockpt.storage.retry_policy import classify

BreakerState = Literal["closed", "open", "half-open"]
_OUTAGES = frozenset({"throttle", "transient"})


class Breaker:
    """Says whether a place is worth asking. On one event loop.

    Args:
        place: what messages call it: its URL.
        failures_to_open: calls in a row.
        open_s: seconds.
        clock: whose monotonic time counts.
    """

    def __init__(self, place: str, *, failures_to_open: int, open_s: float, clock: Clock) -> None:
        self._place = place
        self._limit = failures_to_open
        self._open_ns = round(open_s * 1e9)
        self._clock = clock
        self._failures = 0
        self._last: StorageError | None = None
        self._until_ns: int | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """Whether calls go through, fail at once, or wait for the answer to a probe."""
        if self._until_ns is None:
            return "closed"
        return "open" if not self._probing and self._clock.monotonic_ns() < self._until_ns else "half-open"

    @contextmanager
    def guard(self, key: str) -> Iterator[bool]:
        """Make a call inside this block; it is told whether it is the probe, and its outcome counts.

        Raises:
            StorageError: the breaker is open; the call was not made.
        """
        probe = self._enter(key)
        try:
            yield probe
        except StorageError as error:
            if classify(error) in _OUTAGES:
                self._failed(error)
            else:
                self._answered()
            raise
        else:
            self._answered()
        finally:
            self._probing = self._probing and not probe

    def _enter(self, key: str) -> bool:
        if self._until_ns is None:
            return False
        left_ns = self._until_ns - self._clock.monotonic_ns()
        if left_ns > 0 or self._probing:
            raise StorageError(
                f"{self._place} is not asked for another {max(left_ns, 0) / 1e9:.0f} s: {self._failures} calls in a row"
                f" gave up, the last with {self._last!r}. Check that it can be reached; then it is asked again.",
                key=key,
                retryable=True,
            ) from self._last
        self._probing = True
        return True

    def _failed(self, error: StorageError) -> None:
        self._failures += 1
        self._last = error
        if self._failures >= self._limit:
            self._until_ns = self._clock.monotonic_ns() + self._open_ns

    def _answered(self) -> None:
        self._failures = 0
        self._last = None
        self._until_ns = None
