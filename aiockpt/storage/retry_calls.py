"""Makes one call again: attempts, the waits between them, a deadline over all, and an event for each further attempt.

Guarantees:

- A call that has not ended by its deadline is cut, and says that its outcome is unknown.
- No attempt is made that would begin after the deadline, and none after an error that says it is final.
- Time and jitter come from the world: a test that leaps through time waits for nothing.
- Whoever has something else to go on with can be told of failures as they come (`told_of_failures`), and give up sooner.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import anyio
import msgspec

from aiockpt.errors import StorageError, StorageTimeoutError
from aiockpt.events import StorageRetried
from aiockpt.redaction import redact_error
from aiockpt.runtime.progress import note_progress
from aiockpt.runtime.world import World
from aiockpt.storage.breaker import Breaker, BreakerState
from aiockpt.storage.retry_policy import RETRIED, ErrorClass, RetryPolicy, classify

logger = logging.getLogger("aiockpt")

QUIET_NS = 1_000_000_000
"""Between two lines in the log about one place: calls fail by the dozen when a server starts again. Events are for each."""

T = TypeVar("T")
Attempt = Callable[[bool], Awaitable[T]]
"""One attempt; it is told whether an earlier one failed, which may have taken effect all the same."""
OnRetry = Callable[[StorageRetried], object]
OnFailure = Callable[[StorageError, int], object]
"""Told of a failure, and of how many the call has had in a row."""
_on_failure: ContextVar[OnFailure | None] = ContextVar("on_failure", default=None)


@contextmanager
def told_of_failures(on_failure: OnFailure) -> Iterator[None]:
    """Have *on_failure* told of every failure that is tried again, of calls inside the block and in tasks begun there."""
    token = _on_failure.set(on_failure)
    try:
        yield
    finally:
        _on_failure.reset(token)


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
        self._policy = policy
        self._clock = world.clock
        self.listeners: list[OnRetry] = []
        self._token = world.token
        self._breaker = Breaker(url, failures_to_open=policy.failures_to_open, open_s=policy.open_s, clock=world.clock)
        self._calls = 0
        self._retries = 0
        self._attempts = 0
        self._gave_up = 0
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
        self._calls += 1
        try:
            with self._breaker.guard(key) as probe:
                most, limit_s = 1 if probe else self._policy.attempts, self._policy.limit_s(size_bytes)
                result = await self._try(verb, key, attempt, most, limit_s)
            note_progress()
            return result
        except StorageError:
            self._gave_up += 1
            raise
        finally:
            self._longest_ns = max(self._longest_ns, self._clock.monotonic_ns() - began_ns)

    async def _try(self, verb: str, key: str, attempt: Attempt[T], most: int, limit_s: float) -> T:
        end_ns = self._clock.monotonic_ns() + round(limit_s * 1e9)
        last: StorageError | None = None
        refreshed = False
        with anyio.move_on_after(limit_s):
            for made in itertools.count(1):
                self._attempts += 1
                try:
                    return await attempt(last is not None)
                except StorageError as error:
                    redact_error(error)  # a backend from elsewhere may have a library below it that quotes the URL
                    last, kind = error, classify(error)
                    self._failures[kind] += 1
                    if not error.retryable or kind not in RETRIED or (kind == "auth" and refreshed):
                        raise
                    # the client fetches new credentials where they have expired; those are refused for good
                    refreshed = refreshed or kind == "auth"
                    wait_s = self._policy.wait_s(error, made, self._draw())
                    if made >= most or self._clock.monotonic_ns() + round(wait_s * 1e9) >= end_ns:
                        if made > 1:
                            error.add_note(f"{verb} {key!r}: given up after {made} attempts")
                        raise
                    self._tell(verb, key, error, made, wait_s)
                await anyio.sleep(wait_s)
        raise StorageTimeoutError(
            f"{verb} {key!r}: no answer within {limit_s:g} s; whether it took effect is unknown", key=key
        ) from last

    def _draw(self) -> float:
        """Return a number from 0 to 1, at random."""
        return int.from_bytes(self._token(7), "big") / (1 << 56)

    def _tell(self, verb: str, key: str, error: StorageError, made: int, wait_s: float) -> None:
        """Count a further attempt and tell everybody of it."""
        on_failure = _on_failure.get()
        if on_failure is not None:
            on_failure(error, made)
        event = StorageRetried(
            at_ns=self._clock.monotonic_ns(), verb=verb, key=key, error=repr(error), attempt=made + 1, wait_s=wait_s
        )
        self._retries += 1
        self._log(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("%r raised when it was told of a retry", listener)

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
        return RetryStatistics(
            calls=self._calls,
            attempts=self._attempts,
            retries=self._retries,
            gave_up=self._gave_up,
            failures=dict(self._failures),
            longest_call_s=self._longest_ns / 1e9,
            breaker=self._breaker.state,
        )
