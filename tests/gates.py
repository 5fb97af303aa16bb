"""What happens in the middle of a save? Backends that let a test act around a call, or that hold it until let go.

Verbs are called as in `aiockpt.testing.faults`; to "put", "put_new", "get", "create", "list" and "upload.write" something
can be done, the others just pass.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase

import anyio.to_thread

from aiockpt.storage.backend import Backend, Listing, Seen, Upload
from aiockpt.testing.faults import FaultyBackend

PATIENCE_S = 40

Act = Callable[[str, str], Awaitable[None]]
"""What to do, given the verb and the key (for "list" the prefix) of a call."""


async def _nothing(verb: str, key: str) -> None: ...


class Around(FaultyBackend):
    """*inner*, with *before* and *after* awaited around each call; what they raise, the caller gets."""

    def __init__(self, inner: Backend, before: Act = _nothing, after: Act = _nothing) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    @asynccontextmanager
    async def around(self, verb: str, key: str) -> AsyncIterator[None]:
        await self._before(verb, key)
        yield
        await self._after(verb, key)

    async def put(self, key: str, data: bytes) -> None:
        async with self.around("put", key):
            await super().put(key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        async with self.around("put_new", key):
            await super().put_new(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        async with self.around("get", key):
            return await super().get(key, max_bytes)

    async def create(self, key: str, size: int) -> Upload:
        async with self.around("create", key):
            return _Upload(await super().create(key, size), key, self)

    async def list(self, prefix: str) -> Listing:
        async with self.around("list", prefix):
            return await super().list(prefix)


class _Upload:
    def __init__(self, inner: Upload, key: str, backend: Around) -> None:
        self._inner, self._key, self._backend = inner, key, backend
        self.finish, self.abort = inner.finish, inner.abort

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        async with self._backend.around("upload.write", self._key):
            await self._inner.write(offset, runs, seen)


class Gate(Around):
    """*inner*, whose calls of *verb* on keys that match wait until `open_up`.

    Args:
        times: how many of them wait; None for all.

    Attributes:
        reached: set when the first call has come to the gate.
    """

    def __init__(self, inner: Backend, verb: str = "create", match: str = "*", times: int | None = None) -> None:
        super().__init__(inner, before=self._pass)
        self._verb, self._match, self._times = verb, match, times
        self.reached, self._open = threading.Event(), threading.Event()

    def open_up(self) -> None:
        self._open.set()

    async def _pass(self, verb: str, key: str) -> None:
        if verb != self._verb or not fnmatchcase(key, self._match) or self._times == 0:
            return
        if self._times is not None:
            self._times -= 1
        self.reached.set()
        assert await anyio.to_thread.run_sync(self._open.wait, PATIENCE_S), f"nobody let {verb} {key} go on"


def striking(inner: Backend, strike: Callable[[], object]) -> Around:
    """Return *inner*, with *strike* called, once and in a thread, after the first write of a data file."""
    strikes = [strike]

    async def after(verb: str, key: str) -> None:
        if verb == "upload.write" and strikes:
            await anyio.to_thread.run_sync(strikes.pop())

    return Around(inner, after=after)
