"""What was asked of the storage, and in which order? A backend and a file system that write it down.

Guarantees:

- A call is written down when it has returned or raised, so the order of the log is one in which the calls took effect.
- The log holds copies: what a caller does with its buffer later does not change it.
- Wrapping changes nothing else: the conformance suite passes on a wrapped backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import Call as BackendCall
from aiockpt.storage.forwarding import Forwarding


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


class RecordingBackend(Forwarding):
    """*inner*, with every call in `operations`, oldest first."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, and write it down when it has returned or raised."""
        error = ""
        try:
            return await call()
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.operations.append(Operation(call.verb, call.key, call.offset, call.size, error))

    def __repr__(self) -> str:
        return f"<RecordingBackend of {self.inner!r}, {len(self.operations)} operations>"


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
