"""The seams to the outside: where aiockpt touches files, clocks, random bytes, devices, threads and other ranks.

``Files`` is every file-system call the engine makes, ``Clock`` every read of the time, ``World.token`` every random
byte, ``Accelerator`` every stream and event of a device, ``Loop`` every thread of a checkpointer. The real ones are thin.
`tests.simulated.simulation` has twins with a seed, faults and power cuts, `tests.simulated.twin_accelerator` one whose
device is late, `tests.simulated.inline_loop` one without threads. HTTP passes the other seam, the backend contract.
Blocking calls reach threads through `runtime.limits.run_blocking` only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, TypeVarTuple

import msgspec

from aiockpt.errors import UsageError
from aiockpt.options import check_count, launched_world_size
from aiockpt.runtime.processes import process_token

if TYPE_CHECKING:
    from aiockpt.runtime.accelerator import Accelerator

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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
    def utime(self, path: str, /) -> None: ...


_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(
    _libc, "fallocate", None
)  # musl has the 64 bits in one name
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, offset: int, size: int) -> None:
    """Reserve space, as ``fallocate(2)`` does: at once, or not at all.

    Not ``os.posix_fallocate``: where the file system cannot (NFS before 4.2, many in user space), the C library imitates
    it by a write into each block of 4 KiB, which were 16,902 requests instead of 517 for a file of 64 MiB.
    """
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(fd, 0, offset, size):
        if (error := ctypes.get_errno()) != errno.EINTR:  # a signal came; ctypes does not go on by itself
            raise OSError(error, os.strerror(error))


def preadv(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
    """Read into *buffers*; into the first alone, by way of a copy, where a kernel or sandbox has no such call."""
    try:
        return os.preadv(fd, buffers, offset, flags)
    except OSError as error:
        if flags or error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    data = os.pread(fd, buffers[0].nbytes, offset)
    buffers[0].cast("B")[: len(data)] = data
    return len(data)


class OsFiles:
    """The operating system itself."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    pwrite = staticmethod(os.pwrite)
    preadv = staticmethod(preadv)
    fallocate = staticmethod(fallocate)
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
    utime = staticmethod(os.utime)


class Clock(Protocol):
    """Time. ``monotonic_ns`` measures; ``time_ns`` is a label for people and decides nothing."""

    def monotonic_ns(self) -> int: ...
    def time_ns(self) -> int: ...


class OsClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    time_ns = staticmethod(time.time_ns)


class Loop(Protocol):
    """The event loop that a checkpointer runs on, and its worker threads; see `aiockpt.runtime.loop.LoopThread`."""

    @property
    def usable(self) -> bool: ...
    def check(self) -> None: ...
    def cpu_s(self) -> float: ...
    def submit(self, work: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> Future[T]: ...
    def call_soon(self, work: Callable[[*Ts], object], /, *args: *Ts) -> None: ...
    def in_worker(self, work: Callable[[*Ts], T], /, *args: *Ts) -> Future[T]: ...
    def close(self, *, cancel: bool = False, patience_s: float = ...) -> None: ...
    def discard(self) -> None: ...


MakeLoop = Callable[[str, Callable[[], object]], Loop]
"""Called with a name, and with a function that finishes the saves in flight when the interpreter exits."""


@dataclass(frozen=True)
class World:
    """The outside of one engine: files, clock, random bytes, the devices that tensors are on, the threads.

    Attributes:
        process: what tells this process from every other, earlier and later ones too.
        accelerator: None for CUDA's.
        make_loop: makes the loop that a checkpointer runs on; None for a thread of its own.
    """

    files: Files = field(default_factory=OsFiles)
    clock: Clock = field(default_factory=OsClock)
    token: Callable[[int], bytes] = os.urandom
    process: str = field(default_factory=process_token)
    accelerator: Accelerator | None = None
    make_loop: MakeLoop | None = None


# This process's place among those that save together: how many there are, its number, and the store of their notes.


class Ranks(msgspec.Struct, frozen=True):
    """This process's place among those that save one state together.

    Attributes:
        rank, world_size: as ``torch.distributed`` counts them.
        store: where ranks leave notes for each other (``torch.distributed.Store``); a single process needs none.
        load_group: a ``torch.distributed`` process group, such as ``torch.distributed.group.WORLD``, whose ranks read each
            block once, and take it from each other over TCP; worth it where storage is slower than the network between
            them. It only names the ranks: nothing is sent over it. Give every rank the group it is in; None lets each
            rank read all that it wants. ``Ranks(load_group=group)`` takes everything else from ``torch.distributed``.
    """

    rank: int = 0
    world_size: int = 1
    store: Any = None
    load_group: Any = None

    def __post_init__(self) -> None:
        check_count("Ranks", "rank", self.rank, least=0)
        check_count("Ranks", "world_size", self.world_size)
        if self.rank >= self.world_size:
            raise UsageError(f"Ranks(rank={self.rank}, world_size={self.world_size}): there is no such rank")
        if self.world_size > 1 and self.store is None:
            raise UsageError(
                f"Ranks(world_size={self.world_size}) without a store: ranks must agree on each save. Give "
                "store=torch.distributed.TCPStore(…), or call torch.distributed.init_process_group() and pass no ranks."
            )


def find_ranks() -> Ranks:
    """Return this process's place: that of ``torch.distributed`` when it is initialised, else a world of one.

    Raises:
        UsageError: a launcher announced several processes and there is no process group yet.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store() if world_size > 1 else None
        return Ranks(distributed.get_rank(), world_size, store)
    launched = launched_world_size()
    if launched > 1:
        raise UsageError(
            f"WORLD_SIZE={launched}, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before you make the Checkpointer, or pass ranks=aiockpt.Ranks(…)"
        )
    return Ranks()


def check_found(ranks: Ranks) -> None:
    """Raise when ``torch.distributed`` numbers this process differently than when *ranks* were found.

    A process group that has ended since is fine: the store outlives it, and so may saves.

    Raises:
        UsageError: names what was found then, what is there now, and what to do.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) != (ranks.rank, ranks.world_size):
        _refuse_found(ranks, rank, world_size)


def _refuse_found(ranks: Ranks, rank: int, world_size: int) -> NoReturn:
    then = "alone" if ranks.world_size == 1 else f"rank {ranks.rank} of {ranks.world_size}"
    raise UsageError(
        f"when this Checkpointer was made this process was {then}, and now it is rank {rank} of {world_size}: make the "
        "Checkpointer after torch.distributed.init_process_group(). If this process is to save alone all the same, "
        "give ranks=aiockpt.Ranks()"
    )
