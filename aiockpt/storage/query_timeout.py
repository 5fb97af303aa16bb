"""How long is a place waited for by somebody who can go on without it? Less when it fails than when it is silent.

Guarantees:

- A place that refuses every call (nobody listens at its port) is left after `REFUSED_S`.
- One that fails now and then is not: only failures of one call in a row count. Nor is one that asks for fewer calls: it is
  there.
- What may be waited for without end is, until `QueryTimeout.limit` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aiockpt.errors import StorageError, StorageThrottledError
from aiockpt.storage.retry_calls import told_of_failures

FAILURES, REFUSED_S = 4, 3.0
"""Of one call, in a row, for so long: a server that starts again is there by then, and nobody is at a dead port."""


class QueryTimeout:
    """The wait for what one place answers. On one event loop.

    Attributes:
        refused: what it said when it was left for refusing; None when it was not.
    """

    def __init__(self) -> None:
        self.refused: StorageError | None = None
        self._scope = anyio.CancelScope()
        self._limit_s: float | None = None
        self._begun_s = anyio.current_time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Ask inside this block, which is cancelled when the patience is at an end."""
        with told_of_failures(self._hear), self._scope:
            yield

    def limit(self, seconds: float) -> None:
        """Wait at most *seconds* from now, and no longer for a place that refuses."""
        if self._limit_s is None:
            self._limit_s = seconds
            self._scope.deadline = anyio.current_time() + seconds

    def reason(self) -> str | None:
        """Say why the place was left; None when it was not."""
        if not self._scope.cancelled_caught:
            return None
        if self.refused is not None:
            return f"it fails again and again: {self.refused}"
        return f"no answer within {self._limit_s:g} s"

    def _hear(self, error: StorageError, failures: int) -> None:
        long = anyio.current_time() - self._begun_s >= REFUSED_S
        if self._limit_s is not None and long and failures >= FAILURES and not isinstance(error, StorageThrottledError):
            self.refused = error
            self._scope.cancel()
