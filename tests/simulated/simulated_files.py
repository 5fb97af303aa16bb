"""POSIX file system in memory, with a volatile part and a durable part, which survives a power cut.

Guarantees:

- A file's bytes and size become durable by ``fsync`` or ``fdatasync`` of a descriptor of it; a name becomes durable,
  or durably gone, by ``fsync`` of its directory; nothing else makes anything durable.
- Until then each change stands alone: a power cut (`simulation.crash_states`) keeps any subset of them, writes torn at
  512 bytes. That is harsher than a journalled file system, which keeps names in order.
- Each call is one step, from any thread. Without threads everything is deterministic: numbers, times and order.

The model has regular files and directories, hard links, renames, O_EXCL, O_DIRECT with its rules,
the page-cache probe (RWF_NOWAIT) and a full disk. Dangling symbolic links and pipes can be placed in it, to be
listed, refused and removed. It has no permissions or memory maps.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from aiockpt.runtime.world import Clock
from tests.simulated.simulated_nodes import Folder, Kind, NameChange, Node, SimulatedFile, Write, walk

_PAGE_BYTES = 4096
_DEVICE = 1
_MODES: dict[Kind, int] = {"file": stat.S_IFREG | 0o644, "link": stat.S_IFLNK | 0o777, "fifo": stat.S_IFIFO | 0o644}
_FREE_BYTES = 1 << 40

PageCache = Literal["warm", "cold", "unsupported"]
"""Result of the page-cache probe (RWF_NOWAIT): all cached, none cached, or the probe is unsupported."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Open:
    node: Node
    path: str
    flags: int

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def readable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY


def _one_step(method: Callable[Concatenate[SimulatedFiles, P], R]) -> Callable[Concatenate[SimulatedFiles, P], R]:
    """Admit one thread at a time. The token of a queue is the lock: threads belong to the runtime."""

    @wraps(method)
    def step(self: SimulatedFiles, /, *args: P.args, **kwargs: P.kwargs) -> R:
        token = self._turn.get()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._turn.put(token)

    return step


class SimulatedFiles:
    """A file system in memory; a twin of `OsFiles`.

    Args:
        root: the initial tree, which it owns from then on; empty by default.
        capacity_bytes: limit of the contents (ENOSPC beyond it); None for no limit.
        direct_alignment: what O_DIRECT requires offset, length and address to be a multiple of; None for EINVAL at open.
        hard_links: False for EPERM from ``link``, as on FAT.
        page_cache: result of RWF_NOWAIT.
        ignore: flushes to leave out, by their labels: "fsync:PATH", "fdatasync:PATH", "fsync_dir:PATH".
        clock: for the dates of files; None: all dates are 0.
    """

    def __init__(
        self,
        root: Folder | None = None,
        *,
        capacity_bytes: int | None = None,
        direct_alignment: int | None = _PAGE_BYTES,
        hard_links: bool = True,
        page_cache: PageCache = "warm",
        ignore: Callable[[str], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.direct_alignment = direct_alignment
        self.hard_links = hard_links
        self.page_cache: PageCache = page_cache
        self.ignore = ignore
        self.clock = clock
        self.root = root or Folder(number=1)
        self._next_number = 1 + max(node.number for node in walk(self.root, every_future=True))
        self._open: dict[int, _Open] = {}
        self._turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._turn.put(None)

    @property
    def open_count(self) -> int:
        """Number of open descriptors: 0 when nothing leaks."""
        return len(self._open)

    def with_root(self, root: Folder) -> SimulatedFiles:
        """Return a file system with the same properties and the tree *root*, which it owns from then on."""
        return SimulatedFiles(
            root,
            capacity_bytes=self.capacity_bytes,
            direct_alignment=self.direct_alignment,
            hard_links=self.hard_links,
            page_cache=self.page_cache,
            ignore=self.ignore,
            clock=self.clock,
        )

    # Descriptors

    @_one_step
    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        folder, name = self._parent(path)
        node = folder.names.get(name) if name else folder
        if node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            node = SimulatedFile(self._number(), self._now())
            self._name(folder, name, node)
        elif flags & os.O_EXCL and flags & os.O_CREAT:
            raise _error(errno.EEXIST, path)
        if flags & os.O_DIRECTORY and isinstance(node, SimulatedFile):
            raise _error(errno.ENOTDIR, path)
        if isinstance(node, SimulatedFile) and node.kind != "file":
            _refuse_special(node.kind, flags, path)
        opened = _Open(node, path, flags)
        if isinstance(node, Folder) and opened.writable:
            raise _error(errno.EISDIR, path)
        if flags & os.O_TRUNC or (flags & os.O_DIRECT and self.direct_alignment is None):
            raise _error(errno.EINVAL, path)  # after the creation, as Linux does
        fd = next(number for number in range(3, len(self._open) + 4) if number not in self._open)
        self._open[fd] = opened
        return fd

    @_one_step
    def close(self, fd: int) -> None:
        self._opened(fd)
        del self._open[fd]

    @_one_step
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        opened = self._opened(fd)
        node = self._writable_file(opened)
        self._check_alignment(opened, offset, data)
        self._check_capacity(node, offset + data.nbytes)
        node.change(Write(offset, bytes(data), data.nbytes))
        node.modified_ns = self._now()
        return data.nbytes

    @_one_step
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        opened = self._opened(fd)
        node = self._readable_file(opened)
        if flags & os.RWF_NOWAIT and not opened.flags & os.O_DIRECT:
            self._check_cached(opened.path)
        done = 0
        for buffer in buffers:
            self._check_alignment(opened, offset + done, buffer)
            run = node.content[offset + done : offset + done + buffer.nbytes]
            buffer.cast("B")[: len(run)] = run
            done += len(run)
            if len(run) < buffer.nbytes:
                break
        return done

    @_one_step
    def fallocate(self, fd: int, offset: int, size: int) -> None:
        node = self._writable_file(self._opened(fd))
        self._check_capacity(node, offset + size)
        if offset + size > len(node.content):
            node.change(Write(offset, b"", size))

    def fadvise(self, fd: int, offset: int, size: int, advice: int) -> None:
        """Do nothing: advice has no effect here."""

    @_one_step
    def fdatasync(self, fd: int) -> None:
        self._flush("fdatasync", fd)

    @_one_step
    def fsync(self, fd: int) -> None:
        self._flush("fsync", fd)

    @_one_step
    def mark_clean(self, fd: int) -> None:
        """Mark unflushed data clean, as after a failed flush: processes still read it, it never reaches the disk."""
        self._opened(fd).node.unflushed.clear()

    @_one_step
    def fstat(self, fd: int) -> os.stat_result:
        return _stat(self._opened(fd).node)

    # Names

    @_one_step
    def lstat(self, path: str) -> os.stat_result:
        return _stat(self._node(path))

    @_one_step
    def mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        if not name or name in folder.names:
            raise _error(errno.EEXIST, path)
        self._name(folder, name, Folder(self._number(), self._now()))

    @_one_step
    def put_special(self, kind: Kind, path: str) -> None:
        """Place a dangling symbolic link or a pipe at *path*; for tests, not a call of programs."""
        folder, name = self._parent(path)
        if not name or name in folder.names:
            raise _error(errno.EEXIST, path)
        self._name(folder, name, SimulatedFile(self._number(), self._now(), kind=kind))

    @_one_step
    def rmdir(self, path: str) -> None:
        node = self._node(path)
        if isinstance(node, SimulatedFile):
            raise _error(errno.ENOTDIR, path)
        if node.names or node is self.root:
            raise _error(errno.ENOTEMPTY if node.names else errno.EBUSY, path)
        self._remove(path)

    @_one_step
    def link(self, source: str, target: str) -> None:
        if not self.hard_links:
            raise _error(errno.EPERM, target)
        node = self._node(source)
        folder, name = self._parent(target)
        if name in folder.names:
            raise _error(errno.EEXIST, target)
        if isinstance(node, Folder):
            raise _error(errno.EPERM, source)
        self._name(folder, name, node)

    @_one_step
    def rename(self, source: str, target: str) -> None:
        node = self._node(source)
        folder, old = self._parent(source)
        other, name = self._parent(target)
        if isinstance(replaced := folder.names.get(name), Folder) or isinstance(node, Folder):
            raise _error(errno.EISDIR, target)
        if replaced is node:
            return  # two names of one file: POSIX keeps both
        if replaced is not None:
            replaced.links -= 1
        if folder is other:
            folder.change(NameChange(name, node, old))
        else:  # harsher than any journal: each of the two names is kept or lost alone
            other.change(NameChange(name, node))
            folder.change(NameChange(old, None))

    @_one_step
    def unlink(self, path: str) -> None:
        if isinstance(self._node(path), Folder):
            raise _error(errno.EISDIR, path)
        self._remove(path)

    @_one_step
    def listdir(self, path: str) -> list[str]:
        node = self._node(path)
        if isinstance(node, SimulatedFile):
            raise _error(errno.ENOENT if node.kind == "link" else errno.ENOTDIR, path)
        return list(node.names)

    @_one_step
    def statvfs(self, path: str) -> os.statvfs_result:
        self._node(path)
        total = _FREE_BYTES if self.capacity_bytes is None else self.capacity_bytes
        free = max(0, total - self._used_bytes())
        return os.statvfs_result((1, 1, total, free, free, 1 << 30, 1 << 30, 1 << 30, 0, 255))

    @_one_step
    def utime(self, path: str) -> None:
        self._node(path).modified_ns = self._now()

    # Within a step

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _now(self) -> int:
        return 0 if self.clock is None else self.clock.time_ns()

    def _opened(self, fd: int) -> _Open:
        if fd not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[fd]

    def _writable_file(self, opened: _Open) -> SimulatedFile:
        if isinstance(opened.node, Folder) or not opened.writable:
            raise _error(errno.EBADF, opened.path)
        return opened.node

    def _readable_file(self, opened: _Open) -> SimulatedFile:
        if isinstance(opened.node, Folder):
            raise _error(errno.EISDIR, opened.path)
        if opened.node.kind == "fifo":
            raise _error(errno.ESPIPE, opened.path)
        if not opened.readable:
            raise _error(errno.EBADF, opened.path)
        return opened.node

    def _parent(self, path: str) -> tuple[Folder, str]:
        """Return the directory that *path* is in, and its name there; of the root, itself and ""."""
        folder = self.root
        *parts, name = path.strip("/").split("/")
        for part in parts:
            child = folder.names.get(part)
            if child is None:
                raise _error(errno.ENOENT, path)
            if isinstance(child, SimulatedFile):
                raise _error(errno.ENOENT if child.kind == "link" else errno.ENOTDIR, path)
            folder = child
        return folder, name

    def _node(self, path: str) -> Node:
        folder, name = self._parent(path)
        node = folder.names.get(name) if name else folder
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def _name(self, folder: Folder, name: str, node: Node) -> None:
        if isinstance(node, SimulatedFile):
            node.links += 1
        folder.change(NameChange(name, node))
        folder.modified_ns = self._now()

    def _remove(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.names[name].links -= 1
        folder.change(NameChange(name, None))

    def _flush(self, verb: str, fd: int) -> None:
        opened = self._opened(fd)
        kind = "fsync_dir" if isinstance(opened.node, Folder) else verb
        if self.ignore is None or not self.ignore(f"{kind}:{opened.path}"):
            opened.node.flush()

    def _check_alignment(self, opened: _Open, offset: int, data: memoryview) -> None:
        if not opened.flags & os.O_DIRECT or not self.direct_alignment or not data.nbytes:
            return
        address: int = np.frombuffer(data, np.uint8).ctypes.data
        if any(value % self.direct_alignment for value in (offset, data.nbytes, address)):
            raise _error(errno.EINVAL, opened.path)

    def _check_cached(self, path: str) -> None:
        if self.page_cache == "cold":
            raise _error(errno.EAGAIN, path)
        if self.page_cache == "unsupported":
            raise _error(errno.EOPNOTSUPP, path)

    def _check_capacity(self, node: SimulatedFile, end: int) -> None:
        growth = end - len(node.content)
        if self.capacity_bytes is not None and growth > 0 and self._used_bytes() + growth > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _used_bytes(self) -> int:
        return sum(len(node.content) for node in walk(self.root) if isinstance(node, SimulatedFile))


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _refuse_special(kind: Kind, flags: int, path: str) -> None:
    """Raise unless *kind* is a pipe that is opened as a reader may; links are never followed."""
    if kind == "link":
        raise _error(errno.ELOOP if flags & os.O_NOFOLLOW else errno.ENOENT, path)
    if flags & os.O_ACCMODE != os.O_RDONLY or not flags & os.O_NONBLOCK:
        raise _error(errno.ENXIO, path)


def _stat(node: Node) -> os.stat_result:
    kind, size = (
        (_MODES[node.kind], len(node.content)) if isinstance(node, SimulatedFile) else (stat.S_IFDIR | 0o755, 0)
    )
    seconds = node.modified_ns // 10**9
    return os.stat_result(
        (kind, node.number, _DEVICE, node.links, 0, 0, size, seconds, seconds, seconds),
        {"st_mtime_ns": node.modified_ns},
    )
