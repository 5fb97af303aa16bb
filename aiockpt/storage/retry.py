"""A wrapper that retries calls which may succeed a moment later: the one place where anything is retried.

Backends do not retry and disable the retries of their client. `Retrying` around any backend keeps the contract of
`aiockpt.storage.backend`, and:

- A lost answer is neither a double commit nor a false conflict: after a failure that may have taken effect, a conflict is
  resolved by reading the object. A conflict that cannot be resolved is an error, never a success
  (docs/format.md#commit-on-object-stores).
- The observer of the bytes (`Seen`) is passed each byte once, in order, however often it is sent or read. Bytes that a
  read has passed to it are never written again, because no checksum would cover the second ones.
- A read that returns before all requested bytes were passed is continued: not every place reports a short answer.

The loop, its deadline and its events are `aiockpt.storage.retry_calls`; the retry of each verb is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError, StorageTransferError, UsageError
from aiockpt.redaction import redact
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, Seen, UnfinishedUpload, Upload, keeps_uploads
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.storage.retry_calls import Attempt, Caller, OnRetry, RetryPolicy, RetryStatistics
from aiockpt.storage.transfer import cut_views

__all__ = ["OnRetry", "RetryPolicy", "RetryStatistics", "Retrying"]


class Retrying(Forwarding):
    """*inner*, with calls retried where that may help. On one event loop.

    Args:
        inner: a backend that retries nothing itself.
        policy: the limits of the retries.
        world: its clock and random bytes are used.
        on_retry: called with each retry before the wait for it; see also `add_listener`.
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy | None = None,
        *,
        world: World | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        super().__init__(inner)
        self._caller = Caller(inner.url, policy or RetryPolicy(), world or World())
        if on_retry is not None:
            self.add_listener(on_retry)

    def add_listener(self, on_retry: OnRetry) -> None:
        """Also call *on_retry* with each retry."""
        self._caller.listeners.append(on_retry)

    @property
    def url(self) -> str:
        return redact(self.inner.url)

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, and retry it where that may help."""
        if call.upload is not None and call.upload.finished:
            if call.verb == "upload.abort":
                return None
            raise UsageError(f"{call.key!r} was finished; create it again")
        if call.verb in _MADE_ONCE:
            return await call()
        attempt = _ATTEMPTS.get(call.verb, _attempt)(call, self.inner)
        return await self._caller.call(call.verb, call.key, attempt, 0 if call.verb in _ANSWER_AT_ONCE else call.size)

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        if (inner := keeps_uploads(self.inner)) is None:
            return ()
        return await self._caller.call("leftover_uploads", prefix, lambda _: inner.leftover_uploads(prefix))

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        if (inner := keeps_uploads(self.inner)) is not None:
            keys = " ".join(upload.key for upload in uploads)
            await self._caller.call("abort_uploads", keys, lambda _: inner.abort_uploads(uploads))

    def statistics(self) -> RetryStatistics:
        """Return the counts of this instant."""
        return self._caller.statistics()

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"<Retrying {self.inner!r}, {seen.retries} retries of {seen.calls} calls, breaker {seen.breaker}>"


# A retry cannot help these; by the contract an abort raises nothing.
_MADE_ONCE = frozenset({"close", "reader.close", "upload.abort"})
# Their size is a limit, or announced: it does not extend the deadline.
_ANSWER_AT_ONCE = frozenset({"get", "create"})


def _attempt(call: BackendCall, _: Backend) -> Attempt[Any]:
    """Return an attempt that repeats the call unchanged."""
    return lambda _: call()


def _attempt_put_new(call: BackendCall, inner: Backend) -> Attempt[None]:
    """Treat a conflict after a failure as success where the key holds the very data: an earlier attempt created it."""
    key, data = call.arguments

    async def put_new(again: bool) -> None:
        try:
            await call()
        except ObjectExistsError:
            if not (again and await _holds(inner, key, data)):
                raise

    return put_new


async def _holds(inner: Backend, key: str, data: bytes) -> bool:
    """Return whether the object *key*, which existed a moment ago, is *data*."""
    try:
        return await inner.get(key, len(data) + 1) == data
    except ObjectNotFoundError as error:
        raise StorageError(f"{key!r} appeared and vanished during the create", key=key, retryable=True) from error


def _attempt_create(call: BackendCall, _: Backend) -> Attempt[Upload]:
    async def create(again: bool) -> Upload:
        try:
            upload: Upload = await call()
            return upload
        except ObjectExistsError as error:
            if not again:
                raise
            raise StorageError(
                f"{call.key!r} is taken, by another writer or by a create whose answer was lost: it is unknown which, so"
                " the object is not touched. Save again: a new attempt has names of its own.",
                key=call.key,
            ) from error

    return create


def _attempt_read(call: BackendCall, _: Backend) -> Attempt[None]:
    """Continue a read after the last byte that was shown, whatever the failure: a checksum covers the bytes before."""
    offset, into, seen = call.arguments
    once = _Once(seen)

    async def read(_: bool) -> None:
        start = once.shown_bytes
        once.begin(start)
        await call(offset + start, cut_views(into, start, call.size) if start else into, once)
        if once.shown_bytes != call.size:
            came, wanted = once.shown_bytes - start, call.size - start
            raise StorageTransferError(
                f"reading {call.key!r}: {came} of {wanted} bytes received from {offset + start}", key=call.key
            )

    return read


def _attempt_write(call: BackendCall, _: Backend) -> Attempt[None]:
    """Send the block again, but show it only once."""
    offset, runs, seen = call.arguments
    once = None if seen is None else _Once(seen)

    async def write(_: bool) -> None:
        if once is not None:
            once.begin()
        await call(offset, runs, once)

    return write


def _attempt_finish(call: BackendCall, inner: Backend) -> Attempt[None]:
    """Detect an effect whose answer was lost: the object exists, with the announced size.

    (No other writer has that name: names of data files have a nonce. And readers compare more than the size.)
    """
    upload = call.upload
    assert upload is not None

    async def finish(again: bool) -> None:
        try:
            await call()
        except (ObjectNotFoundError, ObjectExistsError):
            if not (again and await _has_size(inner, call.key, upload.size)):
                raise
            upload.finished = True

    return finish


async def _has_size(inner: Backend, key: str, size: int) -> bool:
    try:
        return (await inner.stat(key)).size == size
    except ObjectNotFoundError:
        return False


_ATTEMPTS: dict[str, Callable[[BackendCall, Backend], Attempt[Any]]] = {
    "put_new": _attempt_put_new,
    "create": _attempt_create,
    "reader.read": _attempt_read,
    "upload.write": _attempt_write,
    "upload.finish": _attempt_finish,
}


class _Once:
    """Passes every byte of a call to *seen* once and in order, however often the call is made."""

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        self._at = 0
        self._again = False
        self.shown_bytes = 0

    def begin(self, at: int = 0) -> None:
        """Begin an attempt whose first byte is number *at* of the call."""
        self._again = self._again or self.shown_bytes > 0
        self._at = at

    def __call__(self, view: memoryview) -> None:
        self._at += view.nbytes
        new_bytes = self._at - self.shown_bytes
        # In a first attempt an empty run has no new bytes, and is passed like every other.
        if new_bytes <= 0 and self._again:
            return
        self.shown_bytes = max(self.shown_bytes, self._at)
        if self._seen is not None:
            self._seen(view if new_bytes >= view.nbytes else view.cast("B")[view.nbytes - new_bytes :])
