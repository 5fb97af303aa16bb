"""A wrapper around a backend, its readers and its uploads, whose every call goes through one method.

A subclass defines in `Forwarding.forward` what happens around a call: it is retried (`aiockpt.storage.retry`), recorded
or made to fail (`aiockpt.testing`). The contract's verbs are defined here once, so no wrapper can omit one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from aiockpt.storage.backend import Backend, Listing, Reader, Seen, Space, Stat, Traits, Upload, WorksWhenFull
from aiockpt.storage.transfer import put_unflushed


class BackendCall(msgspec.Struct):
    """One call of the wrapped backend; ``await call()`` makes it, ``await call(*other)`` with other arguments.

    Attributes:
        verb: the method: "put", …, and of readers and uploads "reader.read", "upload.write", ….
        key: the object; for "delete" the keys joined by a space, for "list" the prefix.
        make: the inner method.
        arguments: those of the method.
        offset: bytes, for ranged verbs.
        size: bytes that are written, requested or announced.
        upload: the wrapped upload whose call it is.
    """

    verb: str
    key: str
    make: Callable[..., Awaitable[Any]]
    arguments: tuple[Any, ...] = ()
    offset: int = 0
    size: int = 0
    upload: ForwardingUpload | None = None

    async def __call__(self, *other: Any) -> Any:
        return await self.make(*(other or self.arguments))


class Forwarding:
    """*inner*, with `forward` around each call."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    async def forward(self, call: BackendCall) -> Any:
        """Make *call* and return its result; a subclass overrides this."""
        return await call()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    async def put(self, key: str, data: bytes) -> None:
        await self.forward(BackendCall("put", key, self.inner.put, (key, data), size=len(data)))

    async def put_new(self, key: str, data: bytes) -> None:
        await self.forward(BackendCall("put_new", key, self.inner.put_new, (key, data), size=len(data)))

    async def put_unflushed(self, key: str, data: bytes, *, new: bool) -> None:
        # To a wrapper it is the same call, whether flushed or not.
        make = partial(put_unflushed, self.inner, new=new)
        await self.forward(BackendCall("put_new" if new else "put", key, make, (key, data), size=len(data)))

    async def get(self, key: str, max_bytes: int) -> bytes:
        data: bytes = await self.forward(BackendCall("get", key, self.inner.get, (key, max_bytes), size=max_bytes))
        return data

    async def open(self, key: str) -> Reader:
        return ForwardingReader(await self.forward(BackendCall("open", key, self.inner.open, (key,))), key, self)

    async def create(self, key: str, size: int) -> Upload:
        inner = await self.forward(BackendCall("create", key, self.inner.create, (key, size), size=size))
        return ForwardingUpload(inner, key, size, self)

    async def stat(self, key: str) -> Stat:
        found: Stat = await self.forward(BackendCall("stat", key, self.inner.stat, (key,)))
        return found

    async def list(self, prefix: str) -> Listing:
        listing: Listing = await self.forward(BackendCall("list", prefix, self.inner.list, (prefix,)))
        return listing

    async def delete(self, keys: Sequence[str]) -> None:
        await self.forward(BackendCall("delete", " ".join(keys), self.inner.delete, (keys,)))

    async def space(self) -> Space:
        space: Space = await self.forward(BackendCall("space", "", self.inner.space))
        return space

    async def move(self, key: str, to: str, *, new: bool) -> None:
        inner = cast("WorksWhenFull", self.inner)
        await self.forward(BackendCall("move", to, lambda: inner.move(key, to, new=new)))

    async def now_ns(self) -> int:
        now_ns: int = await self.forward(BackendCall("now_ns", "", cast("WorksWhenFull", self.inner).now_ns))
        return now_ns

    async def folder_ns(self, key: str) -> int:
        dated: int = await self.forward(
            BackendCall("folder_ns", key, cast("WorksWhenFull", self.inner).folder_ns, (key,))
        )
        return dated

    async def sync(self) -> None:
        await self.forward(BackendCall("sync", "", cast("WorksWhenFull", self.inner).sync))

    async def close(self) -> None:
        await self.forward(BackendCall("close", "", self.inner.close))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"


class ForwardingReader:
    """A reader of a `Forwarding`."""

    def __init__(self, inner: Reader, key: str, backend: Forwarding) -> None:
        self._inner = inner
        self._key = key
        self._backend = backend

    @property
    def size(self) -> int:
        return self._inner.size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        size = sum(view.nbytes for view in into)
        read = BackendCall("reader.read", self._key, self._inner.read, (offset, into, seen), offset=offset, size=size)
        await self._backend.forward(read)

    async def close(self) -> None:
        await self._backend.forward(BackendCall("reader.close", self._key, self._inner.close))


class ForwardingUpload:
    """An upload of a `Forwarding`.

    Attributes:
        size: the bytes that were announced.
        finished: set by a wrapper that found the object whole although the inner upload did not report success.
    """

    def __init__(self, inner: Upload, key: str, size: int, backend: Forwarding) -> None:
        self._inner = inner
        self._key = key
        self._backend = backend
        self.size = size
        self.finished = False

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        size, write = sum(run.nbytes for run in runs), self._inner.write
        await self._backend.forward(
            BackendCall("upload.write", self._key, write, (offset, runs, seen), offset=offset, size=size, upload=self)
        )

    async def finish(self) -> None:
        await self._backend.forward(BackendCall("upload.finish", self._key, self._inner.finish, upload=self))

    async def abort(self) -> None:
        await self._backend.forward(BackendCall("upload.abort", self._key, self._inner.abort, upload=self))
