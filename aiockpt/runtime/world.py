"""Where does aiockpt touch the outside? Here, and nowhere else.

``Files`` is every file-system call the engine makes, ``Clock`` every look at the time, ``World.token`` every random
byte, ``Accelerator`` every stream and event of a device. The real ones are thin; `aiockpt.testing.simulation` has twins
with a seed, faults and power cuts, `aiockpt.testing.twin_accelerator` one whose device is late. HTTP passes the other
seam, the backend contract. Blocking calls reach threads through `runtime.limits.run_blocking` only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiockpt.runtime.accelerator import Accelerator


class Files(Protocol):
    """POSIX, as much of it as is needed. Blocking; called on worker threads; raises ``OSError``.

    Paths are absolute. Directories are flushed by opening them and calling ``fsync`` on the descriptor.
    """

    def open(self, path: str, flags: int, mode: int = 0o644, /) -> int: ...
    def close(self, fd: int, /) -> None: ...
    def pwrite(self, fd: int, data: memoryview, offset: int, /) -> int: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0, /) -> int: ...
    def fallocate(self, fd: int, offset: int, size: int, /) -> None: ...
    def fadvise(self, fd: int, offset: int, size: int, advice: int, /) -> None: ...
    def fdatasync(self, fd: int, /) -> None: ...
    def fsync(self, fd: int, /) -> None: ...
    def fstat(self, fd: int, /) -> os.stat_result: ...
    def lstat(self, path: str, /) -> os.stat_result: ...
    def mkdir(self, path: str, /) -> None: ...
    def rmdir(self, path: str, /) -> None: ...
    def link(self, source: str, target: str, /) -> None: ...
    def rename(self, source: str, target: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...
    def listdir(self, path: str, /) -> list[str]: ...
    def statvfs(self, path: str, /) -> os.statvfs_result: ...


class OsFiles:
    """The operating system itself."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    pwrite = staticmethod(os.pwrite)
    preadv = staticmethod(os.preadv)
    fallocate = staticmethod(os.posix_fallocate)
    fadvise = staticmethod(os.posix_fadvise)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    fstat = staticmethod(os.fstat)
    lstat = staticmethod(os.lstat)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    link = staticmethod(os.link)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    listdir = staticmethod(os.listdir)
    statvfs = staticmethod(os.statvfs)


class Clock(Protocol):
    """Time. ``monotonic_ns`` measures; ``time_ns`` is a label for people and decides nothing."""

    def monotonic_ns(self) -> int: ...
    def time_ns(self) -> int: ...


class OsClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    time_ns = staticmethod(time.time_ns)


@dataclass(frozen=True)
class World:
    """The outside of one engine: files, clock, random bytes, and the devices that tensors are on (None: CUDA's)."""

    files: Files = field(default_factory=OsFiles)
    clock: Clock = field(default_factory=OsClock)
    token: Callable[[int], bytes] = os.urandom
    accelerator: Accelerator | None = None
