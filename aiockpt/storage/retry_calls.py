"""The retry loop of a place: attempts, the waits between them, a deadline over all, a breaker, an event for each attempt.

Guarantees:

- A call that has not ended by its deadline is cut, and says that its outcome is unknown.
- No attempt is made that would begin after the deadline, and none after an error that says it is final.
- While a place is down, calls fail at once (`Breaker`).
- Time and jitter come from the world: a test that leaps through time waits for nothing.
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
    """Return what an error calls for; only those of `RETRIED` that say they are retryable are worth another attempt."""
    for kind, name in _CLASSES.items():
        if isinstance(error, kind):
            return name
    return "transient" if error.retryable else "permanent"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long to try.

    The jitter is "full" (Marc Brooker, *Exponential Backoff and Jitter*, AWS Architecture Blog): a wait drawn evenly from
    zero to a limit that doubles. Of ranks that fail together few come back together.

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
        """Return the seconds to wait after attempt number *attempt*, from 1, failed; *drawn* is at random from 0 to 1."""
        throttled = classify(error) == "throttle"
        first_s = self.throttled_first_wait_s if throttled else self.first_wait_s
        longest_s = self.throttled_longest_wait_s if throttled else self.longest_wait_s
        asked_s: float | None = getattr(error, "retry_after_s", None)
        return max(asked_s or 0.0, drawn * min(longest_s, first_s * 2.0 ** min(attempt - 1, 60)))


BreakerState = Literal["closed", "open", "half-open"]
_OUTAGES = frozenset({"throttle", "transient"})


class Breaker:
    """The circuit breaker of a place: while that is down, contacting it again only costs time. On one event loop.

    It opens after ``policy.failures_to_open`` calls in a row that gave up for want of an answer, or of room for more calls.
    An answer of any kind, a refusal too, shows that the place is there, and closes it. While it is open every call fails at
    once. After ``policy.open_s`` one call, the probe, is let through alone; a probe that is cancelled decides nothing, and
    the next call is the probe.

    Args:
        place: what messages call it: its URL.
        clock: whose monotonic time counts.
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
        """Make a call inside this block, which says whether it is the probe; its outcome counts.

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
                " then calls go there again.",
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
"""Between two lines in the log about one place: calls fail by the dozen when a server starts again. Events are for each."""

T = TypeVar("T")
Attempt = Callable[[bool], Awaitable[T]]
"""One attempt; its argument is whether an earlier one failed, which may have taken effect all the same."""
OnRetry = Callable[[StorageRetried], object]
# Called with each failure that is tried again, and with how many the call has had in a row.
_on_failure: ContextVar[Callable[[StorageError, int], object] | None] = ContextVar("on_failure", default=None)


class RetryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Retrying` has done so far.

    Attributes:
        calls, attempts, retries: made; each call makes at least one attempt.
        gave_up: calls that failed in the end, for whatever reason.
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
        """Make a call, again and again while that may help; return what it returns.

        Args:
            verb, key: what events and messages call it.
            attempt: makes the call once.
            size_bytes: what it moves; more takes longer.

        Raises:
            StorageError: the last attempt's; or that the deadline passed, or that the place is down.
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
                    redact_error(error)  # a backend from elsewhere may have a library below it that quotes the URL
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
        """Count, log and report that another attempt follows in *wait_s*."""
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
                logger.exception("%r raised when it was called with a retry", listener)

    def _log(self, event: StorageRetried) -> None:
        """Log a further attempt, at most one in a second; the next line counts those between."""
        if self._logged_ns is not None and event.at_ns - self._logged_ns < QUIET_NS:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more failed since the last line)" if self._unlogged else ""
        self._logged_ns, self._unlogged = event.at_ns, 0
        what = f"{event.verb} {event.key!r}"
        logger.info(
            "%s: %s failed and is tried again in %.2f s: %s%s", self._url, what, event.wait_s, event.error, others
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
"""Of one call, in a row, for so long: a server that starts again is there by then, and a dead port never answers."""


class QueryTimeout:
    """The wait of a caller that can go on without a place: shorter when that fails than when it is silent.

    On one event loop. A place that refuses every call (no server at its port) is given up after `REFUSED_S`. One that fails
    now and then is not: only failures of one call in a row count. Nor is one that asks for fewer calls: it is there. Until
    `limit` is called there is no limit at all.

    Attributes:
        refused: what it said when it was given up for refusing; None when it was not.
    """

    def __init__(self) -> None:
        self.refused: StorageError | None = None
        self._scope = anyio.CancelScope()
        self._limit_s: float | None = None
        self._begun_s = anyio.current_time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Make requests inside this block, and in tasks begun there; it is cancelled when the wait is over."""
        token = _on_failure.set(self._count)
        try:
            with self._scope:
                yield
        finally:
            _on_failure.reset(token)

    def limit(self, seconds: float) -> None:
        """Wait at most *seconds* from now, and no longer for a place that refuses."""
        if self._limit_s is None:
            self._limit_s = seconds
            self._scope.deadline = anyio.current_time() + seconds

    def reason(self) -> str | None:
        """Say why the place was given up; None when it was not."""
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
