"""Makes one call again: attempts, the waits between them, a deadline over all, and an event for each further attempt.

Guarantees:

- A call that has not ended by its deadline is cut, and says that its outcome is unknown.
- No attempt is made that would begin after the deadline, and none after an error that says it is final.
- Time and jitter come from the world: a test that leaps through time waits for nothing.
- Whoever has something else to go on with can be told of failures as they come (`told_of_failures`), and give up sooner.

The loop itself is tenacity's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import anyio
import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

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
        self.policy = policy
        self.clock = world.clock
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
        began_ns = self.clock.monotonic_ns()
        self._calls += 1
        try:
            with self._breaker.guard(key) as probe:
                course = _Course(self, verb, key, self.policy.limit_s(size_bytes), 1 if probe else self.policy.attempts)
                result = await course.run(attempt)
            note_progress()
            return result
        except StorageError:
            self._gave_up += 1
            raise
        finally:
            self._longest_ns = max(self._longest_ns, self.clock.monotonic_ns() - began_ns)

    def draw(self) -> float:
        """Return a number from 0 to 1, at random."""
        return int.from_bytes(self._token(7), "big") / (1 << 56)

    def count_attempt(self) -> None:
        self._attempts += 1

    def count_failure(self, kind: ErrorClass) -> None:
        self._failures[kind] += 1

    def tell(self, event: StorageRetried) -> None:
        """Count a further attempt and tell everybody of it."""
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


class _Course:
    """How one call goes; answers what tenacity asks after each attempt."""

    def __init__(self, caller: Caller, verb: str, key: str, limit_s: float, attempts: int) -> None:
        self._caller = caller
        self._verb = verb
        self._key = key
        self._limit_s = limit_s
        self._most_attempts = attempts
        self._end_ns = caller.clock.monotonic_ns() + round(limit_s * 1e9)
        self._refreshed = False
        self._last: StorageError | None = None

    async def run(self, attempt: Attempt[T]) -> T:
        async def make() -> T:
            self._caller.count_attempt()
            return await attempt(self._last is not None)

        # One for each call: tenacity keeps the course of a call in the object, where tasks at once would mix theirs up.
        attempts = AsyncRetrying(
            sleep=anyio.sleep,
            retry=retry_if_exception(self._may_help),
            wait=self._wait_s,
            stop=self._is_over,
            before_sleep=self._tell,
            reraise=True,
        )
        with anyio.move_on_after(self._limit_s):
            result: T = await attempts(make)
            return result
        raise StorageTimeoutError(
            f"{self._verb} {self._key!r}: no answer within {self._limit_s:g} s; whether it took effect is unknown",
            key=self._key,
        ) from self._last

    def _may_help(self, error: BaseException) -> bool:
        """Say whether the same call may succeed after *error*."""
        if not isinstance(error, StorageError):
            return False
        redact_error(error)  # a backend from elsewhere may have a library below it that quotes the URL
        self._last = error
        kind = classify(error)
        self._caller.count_failure(kind)
        if kind == "auth":  # the client fetches new credentials where they have expired; those are refused for good
            tried, self._refreshed = self._refreshed, True
            return error.retryable and not tried
        return error.retryable and kind in RETRIED

    def _wait_s(self, state: RetryCallState) -> float:
        assert self._last is not None
        return self._caller.policy.wait_s(self._last, state.attempt_number, self._caller.draw())

    def _is_over(self, state: RetryCallState) -> bool:
        """Say whether to give up: after the last attempt, or where the next would begin after the deadline."""
        began_ns = self._caller.clock.monotonic_ns() + round(state.upcoming_sleep * 1e9)
        over = state.attempt_number >= self._most_attempts or began_ns >= self._end_ns
        if over and self._last is not None and state.attempt_number > 1:
            self._last.add_note(f"{self._verb} {self._key!r}: given up after {state.attempt_number} attempts")
        return over

    def _tell(self, state: RetryCallState) -> None:
        on_failure = _on_failure.get()
        if on_failure is not None and self._last is not None:
            on_failure(self._last, state.attempt_number)
        self._caller.tell(
            StorageRetried(
                at_ns=self._caller.clock.monotonic_ns(),
                verb=self._verb,
                key=self._key,
                error=repr(self._last),
                attempt=state.attempt_number + 1,
                wait_s=state.upcoming_sleep,
            )
        )
