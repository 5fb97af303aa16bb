"""What if the storage fails right there? A backend and a file system that fail on schedule, the same way each time.

Guarantees:

- A `Fault` says which calls it is meant for and at the how-manieth of them it comes; without faults a wrapper changes
  nothing, and the conformance suite passes on it.
- `call_count` counts every call, so a test can first run through, then fail at each k up to that count.
- A failed flush loses the bytes, as on Linux: on `SimulatedFiles` they are marked clean and never reach the disk.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, Protocol, TypeVar, runtime_checkable

import anyio
import msgspec

from aiockpt.errors import UsageError, from_os_error
from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend, Listing, Reader, Seen, Space, Stat, Traits, Upload

T = TypeVar("T")
_PAGE_BYTES = 4096

Action = Literal["fail", "lose_answer", "hang", "flip", "short", "kill"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong.

    Attributes:
        do: "fail" without effect; "lose_answer": take effect, then fail; "hang" until cancelled (backends only);
            "flip" a bit of the bytes read or written; "short": transfer half of them (files only); "kill" this process
            with SIGKILL before the call.
        verb: which calls, as a pattern: "put*", "upload.write", "fsync".
        match: which keys or paths, as a pattern; a descriptor has the path it was opened by.
        at: at which of these calls it comes, from 1.
        times: at how many in a row; None for all from then on.
        error: the errno, for "fail" and "lose_answer"; backends raise ours for it.
        bit: which bit to flip, counted from the start of the transfer and wrapping around.
    """

    do: Action
    verb: str = "*"
    match: str = "*"
    at: int = 1
    times: int | None = 1
    error: int = errno.EIO
    bit: int = 0


class Schedule:
    """Counts calls and says which fault is due. Any thread: a counter's step is one step of the interpreter."""

    def __init__(self, faults: Sequence[Fault], allowed: frozenset[Action]) -> None:
        for fault in faults:
            if fault.do not in allowed:
                raise UsageError(f"{fault.do!r} cannot be done here; choose of {', '.join(sorted(allowed))}")
        self._calls = itertools.count(1)
        self._counted = [(fault, itertools.count(1)) for fault in faults]
        self.call_count = 0
        self.fired: list[str] = []

    def due(self, verb: str, name: str) -> Fault | None:
        """Count a call of *verb* on *name* and return the first fault that is due for it."""
        self.call_count = next(self._calls)
        due = None
        for fault, count in self._counted:
            if fnmatchcase(verb, fault.verb) and fnmatchcase(name, fault.match):
                over = next(count) - fault.at
                if due is None and over >= 0 and (fault.times is None or over < fault.times):
                    due = fault
        if due is not None:
            self.fired.append(f"{due.do} {verb} {name}")
            if due.do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return due


def flip_bit(data: memoryview, bit: int) -> None:
    """Flip bit number *bit* of *data*, counted from its start and wrapping around."""
    if data.nbytes:
        byte, place = divmod(bit % (8 * data.nbytes), 8)
        data.cast("B")[byte] ^= 1 << place


def _flipped(data: memoryview, bit: int) -> memoryview:
    copy = memoryview(mmap.mmap(-1, max(1, data.nbytes)))[: data.nbytes]  # page-aligned, as O_DIRECT wants it
    copy[:] = data
    flip_bit(copy, bit)
    return copy


def _os_error(fault: Fault, name: str) -> OSError:
    return OSError(fault.error, f"{os.strerror(fault.error)} (injected)", name)


class FaultyBackend:
    """*inner*, failing by *faults*. Verbs of readers and uploads are called "reader.read", "upload.write", ….

    Attributes:
        schedule: what was counted, and what has gone wrong so far (``schedule.fired``).
    """

    ACTIONS: frozenset[Action] = frozenset({"fail", "lose_answer", "hang", "flip", "kill"})

    def __init__(self, inner: Backend, faults: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.schedule = Schedule(faults, self.ACTIONS)

    @property
    def call_count(self) -> int:
        return self.schedule.call_count

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    async def put(self, key: str, data: bytes) -> None:
        fault = self.schedule.due("put", key)
        await _guarded(fault, "put", key, lambda: self.inner.put(key, bytes(_sent(fault, memoryview(data)))))

    async def put_new(self, key: str, data: bytes) -> None:
        fault = self.schedule.due("put_new", key)
        await _guarded(fault, "put_new", key, lambda: self.inner.put_new(key, bytes(_sent(fault, memoryview(data)))))

    async def get(self, key: str, max_bytes: int) -> bytes:
        fault = self.schedule.due("get", key)
        data = await _guarded(fault, "get", key, lambda: self.inner.get(key, max_bytes))
        return bytes(_sent(fault, memoryview(data)))

    async def open(self, key: str) -> Reader:
        fault = self.schedule.due("open", key)
        return _FaultyReader(await _guarded(fault, "open", key, lambda: self.inner.open(key)), key, self.schedule)

    async def create(self, key: str, size: int) -> Upload:
        fault = self.schedule.due("create", key)
        inner = await _guarded(fault, "create", key, lambda: self.inner.create(key, size))
        return _FaultyUpload(inner, key, self.schedule)

    async def stat(self, key: str) -> Stat:
        return await _guarded(self.schedule.due("stat", key), "stat", key, lambda: self.inner.stat(key))

    async def list(self, prefix: str) -> Listing:
        return await _guarded(self.schedule.due("list", prefix), "list", prefix, lambda: self.inner.list(prefix))

    async def delete(self, keys: Sequence[str]) -> None:
        name = " ".join(keys)
        await _guarded(self.schedule.due("delete", name), "delete", name, lambda: self.inner.delete(keys))

    async def space(self) -> Space:
        return await _guarded(self.schedule.due("space", ""), "space", "", self.inner.space)

    async def close(self) -> None:
        await _guarded(self.schedule.due("close", ""), "close", "", self.inner.close)

    def __repr__(self) -> str:
        return f"<FaultyBackend of {self.inner!r}, {self.call_count} calls, fired: {self.schedule.fired}>"


def _sent(fault: Fault | None, data: memoryview) -> memoryview:
    return _flipped(data, fault.bit) if fault is not None and fault.do == "flip" else data


class _FaultyReader:
    def __init__(self, inner: Reader, key: str, schedule: Schedule) -> None:
        self._inner = inner
        self._key = key
        self._schedule = schedule

    @property
    def size(self) -> int:
        return self._inner.size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        fault = self._schedule.due("reader.read", self._key)
        if fault is None or fault.do != "flip":
            await _guarded(fault, "reader.read", self._key, lambda: self._inner.read(offset, into, seen))
            return
        await self._inner.read(offset, into)
        flip_bit(next((view for view in into if view.nbytes), memoryview(b"")), fault.bit)
        if seen is not None:
            for view in into:
                seen(view)  # what is hashed is what was flipped, as with a bit that flipped on the disk

    async def close(self) -> None:
        await _guarded(self._schedule.due("reader.close", self._key), "reader.close", self._key, self._inner.close)


class _FaultyUpload:
    def __init__(self, inner: Upload, key: str, schedule: Schedule) -> None:
        self._inner = inner
        self._key = key
        self._schedule = schedule

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        fault = self._schedule.due("upload.write", self._key)
        sent = [_sent(fault, runs[0]), *runs[1:]] if runs else []
        if runs and sent[0] is not runs[0] and seen is not None:
            for run in runs:  # flipped on the way to the storage: whoever looks sees what was meant
                seen(run)
            seen = None
        await _guarded(fault, "upload.write", self._key, lambda: self._inner.write(offset, sent, seen))

    async def finish(self) -> None:
        await _guarded(self._schedule.due("upload.finish", self._key), "upload.finish", self._key, self._inner.finish)

    async def abort(self) -> None:
        await self._inner.abort()  # "never raises a StorageError" is part of the contract


async def _guarded(fault: Fault | None, verb: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make the call, with what *fault* does to it."""
    if fault is None or fault.do == "flip":
        return await call()
    if fault.do == "hang":
        await anyio.sleep_forever()
    if fault.do == "lose_answer":
        await call()
    error = _os_error(fault, key)
    raise from_os_error(error, verb, key) from error


@runtime_checkable
class _LosesOnFailedFlush(Protocol):
    def mark_clean(self, fd: int) -> None: ...


class FaultyFiles:
    """*inner*, failing by *faults*. Any thread.

    Attributes:
        schedule: what was counted, and what has gone wrong so far (``schedule.fired``).
    """

    ACTIONS: frozenset[Action] = frozenset({"fail", "lose_answer", "flip", "short", "kill"})

    def __init__(self, inner: Files, faults: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.schedule = Schedule(faults, self.ACTIONS)
        self._paths: dict[int, str] = {}

    @property
    def call_count(self) -> int:
        return self.schedule.call_count

    def _call(self, verb: str, name: str, call: Callable[[], T]) -> T:
        fault = self.schedule.due(verb, name)
        if fault is None or fault.do in ("flip", "short"):
            return call()
        if fault.do == "lose_answer":
            call()
        raise _os_error(fault, name)

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        """Open *path*; of a lost answer the file that was created is left, never a descriptor that nobody knows."""
        fault = self.schedule.due("open", path)
        if fault is not None and fault.do == "fail":
            raise _os_error(fault, path)
        fd = self.inner.open(path, flags, mode)
        if fault is not None and fault.do == "lose_answer":
            self.inner.close(fd)
            raise _os_error(fault, path)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """Close *fd*, also when a fault says that this failed: Linux frees the number in any case."""
        fault = self.schedule.due("close", self._paths.pop(fd, "?"))
        self.inner.close(fd)
        if fault is not None and fault.do in ("fail", "lose_answer"):
            raise _os_error(fault, "close")

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        fault = self.schedule.due("pwrite", self._path(fd))
        if fault is None:
            return self.inner.pwrite(fd, data, offset)
        if fault.do == "short":
            return self.inner.pwrite(fd, data[: _half(data.nbytes)], offset)
        if fault.do == "flip":
            return self.inner.pwrite(fd, _flipped(data, fault.bit), offset)
        if fault.do == "lose_answer":
            self.inner.pwrite(fd, data, offset)
        raise _os_error(fault, self._path(fd))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        fault = self.schedule.due("preadv", self._path(fd))
        if fault is None:
            return self.inner.preadv(fd, buffers, offset, flags)
        if fault.do == "short":
            return self.inner.preadv(fd, [buffers[0][: _half(buffers[0].nbytes)]], offset, flags)
        if fault.do == "flip":
            count = self.inner.preadv(fd, buffers, offset, flags)
            flip_bit(buffers[0][:count], fault.bit)
            return count
        raise _os_error(fault, self._path(fd))

    def fallocate(self, fd: int, offset: int, size: int) -> None:
        self._call("fallocate", self._path(fd), lambda: self.inner.fallocate(fd, offset, size))

    def fadvise(self, fd: int, offset: int, size: int, advice: int) -> None:
        self._call("fadvise", self._path(fd), lambda: self.inner.fadvise(fd, offset, size, advice))

    def fdatasync(self, fd: int) -> None:
        self._flush("fdatasync", fd, self.inner.fdatasync)

    def fsync(self, fd: int) -> None:
        self._flush("fsync", fd, self.inner.fsync)

    def fstat(self, fd: int) -> os.stat_result:
        return self._call("fstat", self._path(fd), lambda: self.inner.fstat(fd))

    def lstat(self, path: str) -> os.stat_result:
        return self._call("lstat", path, lambda: self.inner.lstat(path))

    def mkdir(self, path: str) -> None:
        self._call("mkdir", path, lambda: self.inner.mkdir(path))

    def rmdir(self, path: str) -> None:
        self._call("rmdir", path, lambda: self.inner.rmdir(path))

    def link(self, source: str, target: str) -> None:
        self._call("link", target, lambda: self.inner.link(source, target))

    def rename(self, source: str, target: str) -> None:
        self._call("rename", target, lambda: self.inner.rename(source, target))

    def unlink(self, path: str) -> None:
        self._call("unlink", path, lambda: self.inner.unlink(path))

    def listdir(self, path: str) -> list[str]:
        return self._call("listdir", path, lambda: self.inner.listdir(path))

    def statvfs(self, path: str) -> os.statvfs_result:
        return self._call("statvfs", path, lambda: self.inner.statvfs(path))

    def _path(self, fd: int) -> str:
        return self._paths.get(fd, "?")

    def _flush(self, verb: str, fd: int, flush: Callable[[int], None]) -> None:
        fault = self.schedule.due(verb, self._path(fd))
        if fault is None or fault.do in ("flip", "short"):
            flush(fd)
            return
        if fault.do == "lose_answer":
            flush(fd)
        elif isinstance(self.inner, _LosesOnFailedFlush):
            self.inner.mark_clean(fd)
        raise _os_error(fault, self._path(fd))


def _half(size_bytes: int) -> int:
    """Return about half, of pages whole ones: a transfer past the page cache is short by pages, never within one."""
    half = size_bytes // 2
    if size_bytes % _PAGE_BYTES == 0:
        half = max(_PAGE_BYTES, half // _PAGE_BYTES * _PAGE_BYTES)
    return min(size_bytes, max(1, half))
