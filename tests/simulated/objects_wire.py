"""The wire between a client and its object store: injected failures of requests, and error responses as our errors."""

import itertools
from collections.abc import Callable
from typing import TypeVar

import anyio

from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
)
from tests.simulated.object_troubles import Request, RequestVerb, Trouble, Troubles
from tests.simulated.simulated_objects import StoreError

T = TypeVar("T")


class ClientCrashedError(BaseException):
    """The simulated process that made the request is dead."""


class Wire:
    """The wire between a client and its store."""

    def __init__(self, troubles: Troubles, timeout_s: float, latency_s: Callable[[], float]) -> None:
        self._troubles = troubles
        self._timeout_s = timeout_s
        self._latency_s = latency_s
        self._numbers = itertools.count(1)
        self._crashed = False
        self.request_count = 0

    async def ask(self, verb: RequestVerb, key: str, effect: Callable[[], T]) -> T:
        """Make a request; return its response."""
        return await self.act(self.next_trouble(verb, key), key, effect)

    def next_trouble(self, verb: RequestVerb, key: str) -> Trouble | None:
        """Return the trouble of the next request."""
        self._check_alive()
        self.request_count = next(self._numbers)
        return self._troubles.next_trouble(Request(verb, key, self.request_count))

    async def act(self, trouble: Trouble | None, key: str, effect: Callable[[], T]) -> T:
        """Make a request with *trouble* injected; return its response."""
        await anyio.sleep(self._latency_s())
        self._check_alive()
        try:
            await self._before(trouble, key)
            answer = effect()
            if trouble == "resent":
                answer = effect()
        except StoreError as error:
            if trouble is not None and trouble.endswith(("_after_effect", "_lost")):
                await self._after(trouble, key)
            raise _ours(error, key) from error
        await self._after(trouble, key)
        return answer

    async def _before(self, trouble: Trouble | None, key: str) -> None:
        """Raise the failure of a request on its way to the store."""
        if trouble is None:
            return
        if trouble in _REFUSALS:
            raise StoreError(*_REFUSALS[trouble])
        match trouble:
            case "reset":
                raise broken(key)
            case "timeout":
                await self._time_out(key)
            case "hang":
                await anyio.sleep_forever()
            case "crash":
                self._crash()

    async def _after(self, trouble: Trouble | None, key: str) -> None:
        """Raise the failure of a response on its way back."""
        match trouble:
            case "answer_lost":
                raise broken(key)
            case "timeout_after_effect":
                await self._time_out(key)
            case "internal_error_after_effect" | "error_body_after_effect":
                error = StoreError(500, "InternalError")
                raise _ours(error, key) from error
            case "crash_after_effect":
                self._crash()

    async def _time_out(self, key: str) -> None:
        await anyio.sleep(self._timeout_s)
        raise StorageTimeoutError(f"{key!r}: no answer within {self._timeout_s:g} s", key=key)

    def _crash(self) -> None:
        self._crashed = True
        self._check_alive()

    def _check_alive(self) -> None:
        if self._crashed:
            raise ClientCrashedError("the simulated client has crashed")


_REFUSALS: dict[Trouble, tuple[int, str]] = {
    "internal_error": (500, "InternalError"),
    "error_body": (200, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "too_many_requests": (429, "TooManyRequests"),
    "expired": (403, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "other_writer": (409, "ConditionalRequestConflict"),
    "wrong_body": (400, "BadDigest"),
}


def _ours(error: StoreError, key: str) -> StorageError:
    """Return the error of the contract for an error response of the store."""
    message = f"{key!r}: the store answered {error}"
    if error.status == 404:
        return ObjectNotFoundError(message, key=key)
    if error.status == 412:
        return ObjectExistsError(message, key=key)
    if error.status == 403:
        return StorageAccessError(message, key=key, retryable=error.code == "ExpiredToken")
    if error.status in (429, 503):
        return StorageThrottledError(message, key=key)
    if error.code == "BadDigest":
        return StorageTransferError(message, key=key)
    return StorageError(message, key=key, retryable=error.status in (200, 409, 500))


def broken(key: str) -> StorageError:
    """Return the error of a connection that broke."""
    error = StorageError(f"{key!r}: the connection broke", key=key, retryable=True)
    error.__cause__ = ConnectionResetError()
    return error
