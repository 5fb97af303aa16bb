"""The retry loop of a place: attempts, the waits between them, a deadline over all, a breaker, an event for each attempt.

Guarantees:

- A call that has not ended by its deadline is cancelled, with an error that its outcome is unknown.
- No attempt begins after the deadline, and none after an error that is marked as final.
- While a place is down, calls fail at once (`Breaker`).
- Time and jitter come from the world: a test with a simulated clock does not wait.
- A caller with an alternative gives up sooner (`QueryTimeout`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Literal, TypeVar

import anyio
import msgspec

from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    UsageError,
)
from aiockpt.events import StorageRetried
from aiockpt.redaction import redact_error
from aiockpt.runtime.limits import note_progress
from aiockpt.runtime.world import Clock, World

logger = logging.getLogger("aiockpt")

ErrorClass = Literal["throttle", "transient", "auth", "corrupt", "gone", "conflict", "full", "permanent"]
RETRIED: frozenset[ErrorClass] = frozenset({"throttle", "transient", "auth", "corrupt"})
_CLASSES: dict[type[StorageError], ErrorClass] = {
    StorageThrottledError: "throttle",
    StorageTransferError: "corrupt",
    StorageAccessError: "auth",
    ObjectNotFoundError: "gone",
    ObjectExistsError: "conflict",
    StorageFullError: "full",
}


def classify(error: StorageError) -> ErrorClass:
    """Return the class of an error; only errors of a class in `RETRIED` that are marked retryable are retried."""
    for kind, name in _CLASSES.items():
        if isinstance(error, kind):
            return name
    return "transient" if error.retryable else "permanent"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of retries.

    The jitter is "full" (Marc Brooker, *Exponential Backoff and Jitter*, AWS Architecture Blog): a wait drawn evenly from
    zero to a limit that doubles. Of ranks that fail together few retry together.

    Attributes:
        attempts: at most, the first included. Twelve take 40 s on average where the place fails each call at once: long
            enough for a server to restart.
        deadline_s: seconds for a whole call, its waits included; a call that has not ended then is cancelled. Longer than
            a store may take to join a large upload.
        slowest_bytes_per_s: a call that moves bytes gets extra time at this rate: a slow transfer is not a stuck one.
        first_wait_s, longest_wait_s: limits of the first wait and of the longest; the limit doubles between them.
        throttled_first_wait_s, throttled_longest_wait_s: the same where the place asks for fewer calls. (A wait that the
            place requests is obeyed.)
        failures_to_open: calls in a row that give up before the breaker opens. Several, as parallel calls fail together.
        open_s: seconds that it stays open.
    """

    attempts: int = 12
    deadline_s: float = 300.0
    slowest_bytes_per_s: int = 256 << 10
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
        """Return the seconds to wait after attempt number *attempt*, from 1, failed; *drawn* is random from 0 to 1."""
        throttled = classify(error) == "throttle"
        first_s = self.throttled_first_wait_s if throttled else self.first_wait_s
        longest_s = self.throttled_longest_wait_s if throttled else self.longest_wait_s
        asked_s: float | None = getattr(error, "retry_after_s", None)
        return max(asked_s or 0.0, drawn * min(longest_s, first_s * 2.0 ** min(attempt - 1, 60)))


BreakerState = Literal["closed", "open", "half-open"]
_OUTAGES = frozenset({"throttle", "transient"})


class Breaker:
    """The circuit breaker of a place: while that is down, contacting it again only costs time. On one event loop.

    It opens after ``policy.failures_to_open`` calls in a row that gave up because the place did not answer, or throttled.
    An answer of any kind, also a refusal, shows that the place is up, and closes it. While it is open every call fails at
    once. After ``policy.open_s`` a single call, the probe, is made; a probe that is cancelled decides nothing, and the
    next call is the probe.

    Args:
        place: its name in messages: the URL.
        clock: its monotonic time is used.
    """

    def __init__(self, place: str, policy: RetryPolicy, clock: Clock) -> None:
        self._place = place
        self._limit = policy.failures_to_open
        self._open_ns = round(policy.open_s * 1e9)
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
        """Guard a call that is made inside this block, and count its outcome; yield whether it is the probe.

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
                f"{self._place} will not be contacted for another {max(left_ns, 0) / 1e9:.0f} s (circuit breaker open):"
                f" {self._failures} calls in a row gave up, the last with {self._last!r}. Check that it can be reached;"
                " calls are made again after that time.",
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


QUIET_NS = 1_000_000_000
"""The interval of log lines about one place: many calls fail at once when a server restarts. Each has its event."""

T = TypeVar("T")
Attempt = Callable[[bool], Awaitable[T]]
"""One attempt; its argument is whether an earlier one failed, which may have taken effect nevertheless."""
OnRetry = Callable[[StorageRetried], object]
# Called with each failure that is retried, and with the number of failures of the call in a row.
_on_failure: ContextVar[Callable[[StorageError, int], object] | None] = ContextVar("on_failure", default=None)


class RetryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a `Retrying` so far.

    Attributes:
        calls, attempts, retries: the numbers made; each call makes at least one attempt.
        gave_up: calls that failed in the end, for any reason.
        failures: failed attempts by class of their error.
        longest_call_s: seconds.
        breaker: "closed" where calls go through.
    """

    calls: int
    attempts: int
    retries: int
    gave_up: int
    failures: Mapping[ErrorClass, int]
    longest_call_s: float
    breaker: BreakerState


class Caller:
    """Makes the calls of one backend, its readers and its uploads."""

    def __init__(self, url: str, policy: RetryPolicy, world: World) -> None:
        self.listeners: list[OnRetry] = []
        self._policy = policy
        self._clock = world.clock
        self._token = world.token
        self._breaker = Breaker(url, policy, world.clock)
        self._counts: Counter[str] = Counter()
        self._failures: Counter[ErrorClass] = Counter()
        self._longest_ns = 0
        self._url = url
        self._logged_ns: int | None = None
        self._unlogged = 0

    async def call(self, verb: str, key: str, attempt: Attempt[T], size_bytes: int = 0) -> T:
        """Make a call, and retry it while that may help; return its result.

        Args:
            verb, key: its name in events and messages.
            attempt: makes the call once.
            size_bytes: the bytes that it moves; they extend the deadline.

        Raises:
            StorageError: that of the last attempt; or the deadline has passed, or the place is down.
        """
        began_ns = self._clock.monotonic_ns()
        self._counts["calls"] += 1
        try:
            with self._breaker.guard(key) as probe:
                most = 1 if probe else self._policy.attempts
                result = await self._try(verb, key, attempt, self._policy.limit_s(size_bytes), most)
            note_progress()
            return result
        except StorageError:
            self._counts["gave_up"] += 1
            raise
        finally:
            self._longest_ns = max(self._longest_ns, self._clock.monotonic_ns() - began_ns)

    async def _try(self, verb: str, key: str, attempt: Attempt[T], limit_s: float, most: int) -> T:
        """Make up to *most* attempts within *limit_s*."""
        end_ns = self._clock.monotonic_ns() + round(limit_s * 1e9)
        last: StorageError | None = None
        kinds: set[ErrorClass] = set()
        with anyio.move_on_after(limit_s):
            for number in count(1):
                self._counts["attempts"] += 1
                try:
                    return await attempt(last is not None)
                except StorageError as error:
                    redact_error(error)  # the library below a third-party backend may quote the URL
                    last, kind = error, classify(error)
                    self._failures[kind] += 1
                    # The client fetches new credentials where they have expired; those are refused for good.
                    if not error.retryable or kind not in RETRIED or (kind == "auth" and kind in kinds):
                        raise
                    kinds.add(kind)
                    wait_s = self._policy.wait_s(error, number, int.from_bytes(self._token(7), "big") / (1 << 56))
                    if number >= most or self._clock.monotonic_ns() + round(wait_s * 1e9) >= end_ns:
                        if number > 1:
                            error.add_note(f"{verb} {key!r}: given up after {number} attempts")
                        raise
                self._emit(verb, key, last, number, wait_s)
                await anyio.sleep(wait_s)
        raise StorageTimeoutError(
            f"{verb} {key!r}: no answer within {limit_s:g} s; whether it took effect is unknown", key=key
        ) from last

    def _emit(self, verb: str, key: str, error: StorageError, failures: int, wait_s: float) -> None:
        """Count, log and report the retry that follows in *wait_s*."""
        if (on_failure := _on_failure.get()) is not None:
            on_failure(error, failures)
        self._counts["retries"] += 1
        now_ns = self._clock.monotonic_ns()
        event = StorageRetried(at_ns=now_ns, verb=verb, key=key, error=repr(error), attempt=failures + 1, wait_s=wait_s)
        self._log(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("%r raised an exception when it was called with a retry", listener)

    def _log(self, event: StorageRetried) -> None:
        """Log a retry, at most one in a second; the next line has the count of those between."""
        if self._logged_ns is not None and event.at_ns - self._logged_ns < QUIET_NS:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more failed since the last line)" if self._unlogged else ""
        self._logged_ns, self._unlogged = event.at_ns, 0
        what = f"{event.verb} {event.key!r}"
        logger.info(
            "%s: %s failed; it is tried again in %.2f s: %s%s", self._url, what, event.wait_s, event.error, others
        )

    def statistics(self) -> RetryStatistics:
        counts = self._counts
        return RetryStatistics(
            calls=counts["calls"],
            attempts=counts["attempts"],
            retries=counts["retries"],
            gave_up=counts["gave_up"],
            failures=dict(self._failures),
            longest_call_s=self._longest_ns / 1e9,
            breaker=self._breaker.state,
        )


FAILURES, REFUSED_S = 4, 3.0
"""Failures of one call in a row, over so many seconds: a restarting server is up by then; a dead port never answers."""


class QueryTimeout:
    """The timeout of a caller that can proceed without a place: shorter when the place fails than when it is silent.

    On one event loop. A place that refuses every call (no server at its port) is abandoned after `REFUSED_S`. One that
    fails now and then is not: only failures of one call in a row count. Nor is one that throttles: it is up. Until `limit`
    is called there is no limit at all.

    Attributes:
        refused: the error for which the place was abandoned as refusing; None when it was not.
    """

    def __init__(self) -> None:
        self.refused: StorageError | None = None
        self._scope = anyio.CancelScope()
        self._limit_s: float | None = None
        self._begun_s = anyio.current_time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Apply the timeout to requests inside this block, and in tasks begun there; it is cancelled when time is up."""
        token = _on_failure.set(self._count)
        try:
            with self._scope:
                yield
        finally:
            _on_failure.reset(token)

    def limit(self, seconds: float) -> None:
        """Wait at most *seconds* from now, and less for a place that refuses."""
        if self._limit_s is None:
            self._limit_s = seconds
            self._scope.deadline = anyio.current_time() + seconds

    def reason(self) -> str | None:
        """Return why the place was abandoned; None when it was not."""
        if not self._scope.cancelled_caught:
            return None
        if self.refused is not None:
            return f"it fails again and again: {self.refused}"
        return f"no answer within {self._limit_s:g} s"

    def _count(self, error: StorageError, failures: int) -> None:
        long = anyio.current_time() - self._begun_s >= REFUSED_S
        if self._limit_s is not None and long and failures >= FAILURES and not isinstance(error, StorageThrottledError):
            self.refused = error
            self._scope.cancel()
