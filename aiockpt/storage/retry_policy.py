"""Is it worth trying again, and after how long? Classes of errors, and the numbers of a policy. Pure.

The jitter is "full" (Marc Brooker, *Exponential Backoff and Jitter*, AWS Architecture Blog): a wait drawn evenly from zero
to a limit that doubles. Of ranks that fail together few come back together.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTransferError,
    UsageError,
)

KIB = 1 << 10

ErrorClass = Literal["throttle", "transient", "auth", "corrupt", "gone", "conflict", "full", "permanent"]
RETRIED: frozenset[ErrorClass] = frozenset({"throttle", "transient", "auth", "corrupt"})

_CLASSES: tuple[tuple[type[StorageError], ErrorClass], ...] = (
    (StorageThrottledError, "throttle"),
    (StorageTransferError, "corrupt"),
    (StorageAccessError, "auth"),
    (ObjectNotFoundError, "gone"),
    (ObjectExistsError, "conflict"),
    (StorageFullError, "full"),
)


def classify(error: StorageError) -> ErrorClass:
    """Return what an error calls for; only those of `RETRIED` that say they are retryable are worth another attempt."""
    for kind, name in _CLASSES:
        if isinstance(error, kind):
            return name
    return "transient" if error.retryable else "permanent"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long to try.

    Attributes:
        attempts: at most, the first included. Twelve take 40 s on average where the place answers at once that it cannot:
            long enough for a server to start again.
        deadline_s: seconds for a whole call, its waits included; a call that has not ended then is cut. Longer than a
            store may take to join a large upload.
        slowest_bytes_per_s: a call that moves bytes has so much longer: a slow transfer is not a stuck one.
        first_wait_s, longest_wait_s: limits of the first wait and of the longest; the limit doubles between them.
        throttled_first_wait_s, throttled_longest_wait_s: the same where the place asks for fewer calls. (A time that it
            names itself is kept.)
        failures_to_open: calls in a row that give up before the breaker opens. Several, as parallel calls fail together.
        open_s: seconds that it stays open.
    """

    attempts: int = 12
    deadline_s: float = 300.0
    slowest_bytes_per_s: int = 256 * KIB
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    throttled_first_wait_s: float = 1.0
    throttled_longest_wait_s: float = 30.0
    failures_to_open: int = 5
    open_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("attempts", "deadline_s", "slowest_bytes_per_s", "failures_to_open"):
            if getattr(self, name) <= 0:
                raise UsageError(f"RetryPolicy({name}={getattr(self, name)!r}): give more than 0")

    def limit_s(self, size_bytes: int) -> float:
        """Return the seconds that a call which moves *size_bytes* may take."""
        return self.deadline_s + size_bytes / self.slowest_bytes_per_s

    def wait_s(self, error: StorageError, attempt: int, drawn: float) -> float:
        """Return the seconds to wait after attempt number *attempt*, from 1, failed.

        Args:
            drawn: at random, from 0 to 1.
        """
        throttled = classify(error) == "throttle"
        first_s = self.throttled_first_wait_s if throttled else self.first_wait_s
        longest_s = self.throttled_longest_wait_s if throttled else self.longest_wait_s
        asked_s: float | None = getattr(error, "retry_after_s", None)
        return max(asked_s or 0.0, drawn * min(longest_s, first_s * 2.0 ** min(attempt - 1, 60)))
