"""A wrapper around a file system, whose every call goes through one method (see `aiockpt.storage.forwarding`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from aiockpt.runtime.world import Files


class FilesCall:
    """One call of the wrapped file system; ``call()`` makes it, ``call(*other)`` with other arguments.

    Attributes:
        verb: the method of `Files`.
        path: the file or folder; for a descriptor, the path it was opened by.
        arguments: of the inner method.
    """

    __slots__ = ("_make", "arguments", "path", "verb")

    def __init__(self, verb: str, path: str, make: Callable[..., Any], *arguments: Any) -> None:
        self.verb = verb
        self.path = path
        self.arguments = arguments
        self._make = make

    def __call__(self, *other: Any) -> Any:
        return self._make(*(other or self.arguments))


class ForwardingFiles:
    """*inner*, with `forward` around each call. Any thread."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self._paths: dict[int, str] = {}

    def forward(self, call: FilesCall) -> Any:
        """Make *call* and return its answer; a subclass adds its behaviour here."""
        return call()

    def _on_path(self, verb: str, path: str, *others: Any) -> Any:
        return self.forward(FilesCall(verb, path, getattr(self.inner, verb), path, *others))

    def _on_fd(self, verb: str, fd: int, *others: Any) -> Any:
        return self.forward(FilesCall(verb, self._paths.get(fd, "?"), getattr(self.inner, verb), fd, *others))

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        fd: int = self._on_path("open", path, flags, mode)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        # Dropped before the call: once it is closed, another thread may get the same number.
        self.forward(FilesCall("close", self._paths.pop(fd, "?"), self.inner.close, fd))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        count: int = self._on_fd("pwrite", fd, data, offset)
        return count

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        count: int = self._on_fd("preadv", fd, buffers, offset, flags)
        return count

    def fallocate(self, fd: int, offset: int, size: int) -> None:
        self._on_fd("fallocate", fd, offset, size)

    def fadvise(self, fd: int, offset: int, size: int, advice: int) -> None:
        self._on_fd("fadvise", fd, offset, size, advice)

    def fdatasync(self, fd: int) -> None:
        self._on_fd("fdatasync", fd)

    def fsync(self, fd: int) -> None:
        self._on_fd("fsync", fd)

    def fstat(self, fd: int) -> os.stat_result:
        found: os.stat_result = self._on_fd("fstat", fd)
        return found

    def lstat(self, path: str) -> os.stat_result:
        found: os.stat_result = self._on_path("lstat", path)
        return found

    def mkdir(self, path: str) -> None:
        self._on_path("mkdir", path)

    def rmdir(self, path: str) -> None:
        self._on_path("rmdir", path)

    def link(self, source: str, target: str) -> None:
        self._on_path("link", source, target)

    def rename(self, source: str, target: str) -> None:
        self._on_path("rename", source, target)

    def unlink(self, path: str) -> None:
        self._on_path("unlink", path)

    def listdir(self, path: str) -> list[str]:
        names: list[str] = self._on_path("listdir", path)
        return names

    def statvfs(self, path: str) -> os.statvfs_result:
        room: os.statvfs_result = self._on_path("statvfs", path)
        return room

    def utime(self, path: str) -> None:
        self._on_path("utime", path)
