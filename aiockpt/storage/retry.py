"""What if a call fails that would succeed a moment later? It is made again, here and nowhere else.

Backends do not retry and switch off the retries of their client: they say what happened, and whether the same call may
succeed a moment later. `Retrying` around any backend keeps the contract of `aiockpt.storage.backend`, and:

- A lost answer is neither a double commit nor a false conflict: after a failure that may have taken effect, a conflict is
  decided by what is there. What cannot be decided is an error that says so, never a success
  (docs/format.md#commit-on-object-stores).
- What a caller wants to see of the bytes (`Seen`) it sees once, in order, however often they are sent or read.
- No call outlives its deadline, and each further attempt is an event (`StorageRetried`).
- A place that is down is not asked by every call again (`aiockpt.storage.breaker`).

The loop is `aiockpt.storage.retry_calls`; here is what each verb does in a further attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StorageTransferError,
    UsageError,
)
from aiockpt.redaction import redact
from aiockpt.runtime.world import World
from aiockpt.storage.backend import (
    Backend,
    Listing,
    Reader,
    Seen,
    Space,
    Stat,
    Traits,
    UnfinishedUpload,
    Upload,
    keeps_uploads,
)
from aiockpt.storage.retry_calls import Caller, OnRetry, RetryStatistics
from aiockpt.storage.retry_policy import RetryPolicy
from aiockpt.storage.views import cut_views

__all__ = ["OnRetry", "RetryPolicy", "RetryStatistics", "Retrying"]


class Retrying:
    """*inner*, with calls made again where that may help. On one event loop.

    Args:
        inner: a backend that retries nothing itself.
        policy: how long to try.
        world: its clock and random bytes.
        on_retry: told of each further attempt before the wait for it; see also `tell`.
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy | None = None,
        *,
        world: World | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        self.inner = inner
        self._caller = Caller(inner.url, policy or RetryPolicy(), world or World())
        if on_retry is not None:
            self.tell(on_retry)

    def tell(self, on_retry: OnRetry) -> None:
        """Have *on_retry* told of each further attempt, too."""
        self._caller.listeners.append(on_retry)

    @property
    def url(self) -> str:
        return redact(self.inner.url)

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    async def put(self, key: str, data: bytes) -> None:
        await self._caller.call("put", key, lambda _: self.inner.put(key, data), len(data))

    async def put_new(self, key: str, data: bytes) -> None:
        async def create(again: bool) -> None:
            try:
                await self.inner.put_new(key, data)
            except ObjectExistsError:
                if not (again and await self._holds(key, data)):
                    raise

        await self._caller.call("put_new", key, create, len(data))

    async def _holds(self, key: str, data: bytes) -> bool:
        """Say whether an object that was there a moment ago is *data*."""
        try:
            return await self.inner.get(key, len(data) + 1) == data
        except ObjectNotFoundError as error:
            raise StorageError(f"{key!r} came and went while it was created", key=key, retryable=True) from error

    async def get(self, key: str, max_bytes: int) -> bytes:
        return await self._caller.call("get", key, lambda _: self.inner.get(key, max_bytes))

    async def open(self, key: str) -> Reader:
        return _RetryingReader(await self._caller.call("open", key, lambda _: self.inner.open(key)), key, self._caller)

    async def create(self, key: str, size: int) -> Upload:
        async def create(again: bool) -> Upload:
            try:
                return await self.inner.create(key, size)
            except ObjectExistsError as error:
                if not again:
                    raise
                raise StorageError(
                    f"{key!r} is taken, by another writer or by a create whose answer was lost: nothing tells which, so it"
                    " is left alone. Save again: a new attempt has names of its own.",
                    key=key,
                ) from error

        inner = await self._caller.call("create", key, create)
        return _RetryingUpload(inner, key, size, self.inner, self._caller)

    async def stat(self, key: str) -> Stat:
        return await self._caller.call("stat", key, lambda _: self.inner.stat(key))

    async def list(self, prefix: str) -> Listing:
        return await self._caller.call("list", prefix, lambda _: self.inner.list(prefix))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._caller.call("delete", " ".join(keys), lambda _: self.inner.delete(keys))

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        if (inner := keeps_uploads(self.inner)) is None:
            return ()
        return await self._caller.call("leftover_uploads", prefix, lambda _: inner.leftover_uploads(prefix))

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        if (inner := keeps_uploads(self.inner)) is not None:
            keys = " ".join(upload.key for upload in uploads)
            await self._caller.call("abort_uploads", keys, lambda _: inner.abort_uploads(uploads))

    async def space(self) -> Space:
        return await self._caller.call("space", "", lambda _: self.inner.space())

    async def close(self) -> None:
        await self.inner.close()

    def statistics(self) -> RetryStatistics:
        """Return the counts of this instant."""
        return self._caller.statistics()

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"<Retrying {self.inner!r}, {seen.retries} retries of {seen.calls} calls, breaker {seen.breaker}>"


class _RetryingReader:
    """A reader whose reads go on where they broke off."""

    def __init__(self, inner: Reader, key: str, caller: Caller) -> None:
        self._inner = inner
        self._key = key
        self._caller = caller

    @property
    def size(self) -> int:
        return self._inner.size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        once = _Once(seen)
        size = sum(view.nbytes for view in into)
        start = 0

        async def read(_: bool) -> None:
            nonlocal start
            once.begin(start)
            try:
                await self._inner.read(offset + start, cut_views(into, start, size) if start else into, once)
            except StorageTransferError:
                start = 0  # what came may be what was damaged: all of it is read again
                raise
            except StorageError:
                start = once.shown_bytes
                raise

        await self._caller.call("reader.read", self._key, read, size)

    async def close(self) -> None:
        await self._inner.close()


class _RetryingUpload:
    """An upload whose blocks are sent again where that may help, and shown once."""

    def __init__(self, inner: Upload, key: str, size: int, backend: Backend, caller: Caller) -> None:
        self._inner = inner
        self._key = key
        self._size = size
        self._backend = backend
        self._caller = caller
        self._found_whole = False

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._check_unfinished()
        once = None if seen is None else _Once(seen)

        async def write(_: bool) -> None:
            if once is not None:
                once.begin()
            await self._inner.write(offset, runs, once)

        await self._caller.call("upload.write", self._key, write, sum(run.nbytes for run in runs))

    async def finish(self) -> None:
        """Finish; an answer lost after its effect shows in the object being there, of the announced size.

        (No other writer has that name: those of data files bear a nonce. And the size alone is not what readers believe.)
        """
        self._check_unfinished()

        async def finish(again: bool) -> None:
            try:
                await self._inner.finish()
            except (ObjectNotFoundError, ObjectExistsError):
                if not (again and await self._is_whole()):
                    raise
                self._found_whole = True

        await self._caller.call("upload.finish", self._key, finish)

    async def _is_whole(self) -> bool:
        try:
            return (await self._backend.stat(self._key)).size == self._size
        except ObjectNotFoundError:
            return False

    async def abort(self) -> None:
        if not self._found_whole:
            await self._inner.abort()  # "never raises a StorageError": there is nothing to try again

    def _check_unfinished(self) -> None:
        if self._found_whole:  # which the inner upload does not know
            raise UsageError(f"{self._key!r} was finished; create it again")


class _Once:
    """Shows every byte of a call to *seen* once and in order, however often the call is made."""

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
        if new_bytes <= 0 and self._again:
            return
        self.shown_bytes = max(self.shown_bytes, self._at)
        if self._seen is not None:
            self._seen(view if new_bytes >= view.nbytes else view.cast("B")[view.nbytes - new_bytes :])
