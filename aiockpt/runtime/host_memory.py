"""Host memory in which bytes wait, and how much of it the machine, or the container, has to spare.

Guarantees of `map_pages`:

- The memory starts on a page, as O_DIRECT requires, is faulted in when the call returns, and is private.
  What two processes share is in `aiockpt.runtime.shared_memory`.
- It lies in huge pages where the system has them. Measured (2 cores, virtual disk): a block of 4 KiB pages reaches the
  disk as thousands of pieces; in huge pages O_DIRECT writes took 4 ms of processor time for 512 MiB instead of 20, and
  reads into a reused buffer ran at 3.4 GB/s instead of 1.9.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not define it
Pages: TypeAlias = "mmap.mmap | ctypes.Array[Any]"
"""Mapped memory that lives as long as there is a reference to it."""
advise = ctypes.CDLL(None, use_errno=True).madvise
"""``madvise(address, bytes, advice)``, which unlike that of `mmap` releases the GIL; not 0 when the system refuses."""
advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(size_bytes: int) -> mmap.mmap:
    """Return new zeroed memory of *size_bytes* with every page faulted in; the GIL is released meanwhile."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fault_in(memory)
    return memory


def fault_in(memory: Pages) -> None:
    """Fault in every page of zeroed *memory*."""
    address, size_bytes = address_of(memory), len(memory)
    # Before the pages are there: the advice does not change the size of existing ones.
    advise(address, size_bytes, mmap.MADV_HUGEPAGE)  # a wish: a kernel without huge pages returns EINVAL
    if advise(address, size_bytes, _MADV_POPULATE_WRITE):
        ctypes.memset(address, 0, size_bytes)


class Memory(Protocol):
    """Where a pool gets its memory from, piece by piece."""

    def map(self, number: int, size_bytes: int) -> Pages:
        """Return piece *number*, zeroed and faulted in; each number is requested once. Any thread."""
        ...

    def make_huge(self, address: int, size_bytes: int) -> None:
        """Move a piece into huge pages where `map` did not; slow, so call it while nothing waits. Any thread."""

    def close(self) -> None:
        """Make no more pieces; those that are mapped stay. Idempotent."""


class PrivateMemory:
    """Memory of this process alone: huge pages from the beginning, and nothing to close."""

    def map(self, number: int, size_bytes: int) -> mmap.mmap:
        return map_pages(size_bytes)

    def make_huge(self, address: int, size_bytes: int) -> None: ...

    def close(self) -> None: ...


def address_of(memory: Pages) -> int:
    """Return the address of the first byte. The map cannot be closed any more, only dropped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


_LIMITS = (
    # The control groups of both versions: limit and use of a group, and in `memory.stat` the cache that it can give up.
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(system: Path = Path("/")) -> int:
    """Return the bytes that can be used without swapping and within the memory limit of the container.

    It is the smaller of what the host can spare and of what is left in each control group around this process.

    Args:
        system: below it lie ``proc`` and ``sys``.
    """
    return min([_host_bytes(system / "proc/meminfo"), *_left_in_groups(system)])


def _host_bytes(meminfo: Path) -> int:
    """Return what the host can spare; the free bytes if the kernel does not report that."""
    with suppress(OSError):  # not Linux
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(system: Path) -> Iterator[int]:
    """Yield the bytes left in each control group that this process is in and that has a limit."""
    groups: list[str] = []
    with suppress(OSError):
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = system / "sys/fs/cgroup" / controllers
        inner = root / group.strip("/")  # a container may see the path that the host has, and its own group as the root
        for folder in (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)):
            for limit, use, cache in _LIMITS:
                with suppress(OSError, ValueError):  # no such group here, or its limit is "max"
                    left = int((folder / limit).read_text()) - int((folder / use).read_text())
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    yield max(0, left + int(stat.get(cache, 0)))
