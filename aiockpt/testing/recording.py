"""What was asked of the storage, and in which order? A backend and a file system that write it down.

Guarantees:

- A call is written down when it has returned or raised, so the order of the log is one in which the calls took effect.
- The log holds copies: what a caller does with its buffer later does not change it.
- Wrapping changes nothing else: the conformance suite passes on a wrapped backend.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec

from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend, Listing, Reader, Seen, Space, Stat, Traits, Upload


class Operation(msgspec.Struct, frozen=True):
    """One call of a backend verb.

    Attributes:
        verb: the method: "put", "get", …, and "upload.write", "upload.finish", "reader.read", ….
        key: the object; for ``delete`` the keys joined by a space, for ``list`` the prefix.
        offset: bytes, for ranged verbs.
        size: bytes that were handed over, or announced.
        error: the name of the exception's class, "" for success.
    """

    verb: str
    key: str
    offset: int = 0
    size: int = 0
    error: str = ""


class _Log:
    """The operations of a backend with its readers and uploads."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @asynccontextmanager
    async def note(self, verb: str, key: str, offset: int = 0, size: int = 0) -> AsyncIterator[None]:
        error = ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.operations.append(Operation(verb, key, offset, size, error))


class RecordingBackend:
    """*inner*, with every call in `operations`, oldest first."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._log = _Log()

    @property
    def operations(self) -> list[Operation]:
        return self._log.operations

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    async def put(self, key: str, data: bytes) -> None:
        async with self._log.note("put", key, size=len(data)):
            await self.inner.put(key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        async with self._log.note("put_new", key, size=len(data)):
            await self.inner.put_new(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        async with self._log.note("get", key, size=max_bytes):
            return await self.inner.get(key, max_bytes)

    async def open(self, key: str) -> Reader:
        async with self._log.note("open", key):
            return _RecordingReader(await self.inner.open(key), key, self._log)

    async def create(self, key: str, size: int) -> Upload:
        async with self._log.note("create", key, size=size):
            return _RecordingUpload(await self.inner.create(key, size), key, self._log)

    async def stat(self, key: str) -> Stat:
        async with self._log.note("stat", key):
            return await self.inner.stat(key)

    async def list(self, prefix: str) -> Listing:
        async with self._log.note("list", prefix):
            return await self.inner.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        async with self._log.note("delete", " ".join(keys)):
            await self.inner.delete(keys)

    async def space(self) -> Space:
        async with self._log.note("space", ""):
            return await self.inner.space()

    async def close(self) -> None:
        async with self._log.note("close", ""):
            await self.inner.close()

    def __repr__(self) -> str:
        return f"<RecordingBackend of {self.inner!r}, {len(self.operations)} operations>"


class _RecordingReader:
    def __init__(self, inner: Reader, key: str, log: _Log) -> None:
        self._inner = inner
        self._key = key
        self._log = log

    @property
    def size(self) -> int:
        return self._inner.size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        async with self._log.note("reader.read", self._key, offset, sum(view.nbytes for view in into)):
            await self._inner.read(offset, into, seen)

    async def close(self) -> None:
        async with self._log.note("reader.close", self._key):
            await self._inner.close()


class _RecordingUpload:
    def __init__(self, inner: Upload, key: str, log: _Log) -> None:
        self._inner = inner
        self._key = key
        self._log = log

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        async with self._log.note("upload.write", self._key, offset, sum(run.nbytes for run in runs)):
            await self._inner.write(offset, runs, seen)

    async def finish(self) -> None:
        async with self._log.note("upload.finish", self._key):
            await self._inner.finish()

    async def abort(self) -> None:
        async with self._log.note("upload.abort", self._key):
            await self._inner.abort()


FLUSHES = frozenset({"fsync", "fdatasync"})


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the file-system seam that opens, closes, changes or flushes something.

    Attributes:
        verb: the method of `Files`.
        path: what it was called on; for a descriptor, the path it was opened by.
        fd: the descriptor, -1 for calls by path.
        flags: of ``open``.
        offset: bytes, of ``pwrite`` and ``fallocate``.
        size: bytes, of ``fallocate``.
        data: the bytes that ``pwrite`` wrote.
        target: the second path of ``link`` and ``rename``.
        error: the errno that it failed with, 0 for success.
    """

    verb: str
    path: str
    fd: int = -1
    flags: int = 0
    offset: int = 0
    size: int = 0
    data: bytes = b""
    target: str = ""
    error: int = 0

    @property
    def is_flush(self) -> bool:
        return self.verb in FLUSHES

    @property
    def changes(self) -> bool:
        """Whether the call changed what a power cut would leave."""
        opens = self.verb == "open" and not self.flags & os.O_CREAT
        return not self.error and self.verb != "close" and not opens

    def __str__(self) -> str:
        return f"{self.verb} {self.path}" + (f" → {self.target}" if self.target else "")


class RecordingFiles:
    """*inner*, with every call that is not a mere look in `calls`, oldest first. Any thread."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self._paths: dict[int, str] = {}

    @contextmanager
    def _note(self, call: Call) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.calls.append(msgspec.structs.replace(call, error=error.errno or -1))
            raise
        self.calls.append(call)

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        try:
            fd = self.inner.open(path, flags, mode)
        except OSError as error:
            self.calls.append(Call(verb="open", path=path, flags=flags, error=error.errno or -1))
            raise
        self._paths[fd] = path
        self.calls.append(Call(verb="open", path=path, fd=fd, flags=flags))
        return fd

    def close(self, fd: int) -> None:
        # Before the call: once it is closed, another thread may get the same number.
        with self._note(Call(verb="close", path=self._paths.pop(fd, "?"), fd=fd)):
            self.inner.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        path = self._paths.get(fd, "?")
        try:
            count = self.inner.pwrite(fd, data, offset)
        except OSError as error:
            self.calls.append(Call(verb="pwrite", path=path, fd=fd, offset=offset, error=error.errno or -1))
            raise
        self.calls.append(Call(verb="pwrite", path=path, fd=fd, offset=offset, data=bytes(data[:count])))
        return count

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        return self.inner.preadv(fd, buffers, offset, flags)

    def fallocate(self, fd: int, offset: int, size: int) -> None:
        with self._note(Call(verb="fallocate", path=self._paths.get(fd, "?"), fd=fd, offset=offset, size=size)):
            self.inner.fallocate(fd, offset, size)

    def fadvise(self, fd: int, offset: int, size: int, advice: int) -> None:
        self.inner.fadvise(fd, offset, size, advice)

    def fdatasync(self, fd: int) -> None:
        with self._note(Call(verb="fdatasync", path=self._paths.get(fd, "?"), fd=fd)):
            self.inner.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        with self._note(Call(verb="fsync", path=self._paths.get(fd, "?"), fd=fd)):
            self.inner.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return self.inner.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        return self.inner.lstat(path)

    def mkdir(self, path: str) -> None:
        with self._note(Call(verb="mkdir", path=path)):
            self.inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        with self._note(Call(verb="rmdir", path=path)):
            self.inner.rmdir(path)

    def link(self, source: str, target: str) -> None:
        with self._note(Call(verb="link", path=source, target=target)):
            self.inner.link(source, target)

    def rename(self, source: str, target: str) -> None:
        with self._note(Call(verb="rename", path=source, target=target)):
            self.inner.rename(source, target)

    def unlink(self, path: str) -> None:
        with self._note(Call(verb="unlink", path=path)):
            self.inner.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return self.inner.listdir(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        return self.inner.statvfs(path)
