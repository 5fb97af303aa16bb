"""Control of the page cache: flush, drop, warm and probe the pages of files.

Guarantees:

- ``drop`` and ``warm`` prove what they did (``residency``) or raise: no "cold" figure comes from the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def files(folder: Path) -> Iterator[Path]:
    """Yield every regular file below *folder*, or *folder* itself when it is one."""
    if folder.is_file():
        yield folder
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def sync(path: Path) -> None:
    """``fsync`` one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Make the names below *folder*, and its own name, durable: ``fsync`` of each folder and of the parent."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    sync(folder)
    sync(folder.parent)


def residency(folder: Path) -> float:
    """Return the fraction of the pages of all files below *folder* that is in the page cache."""
    resident = total = 0
    for path in files(folder):
        size = path.stat().st_size
        if size:
            seen = _resident_pages(path, size)
            resident += sum(byte & 1 for byte in seen)
            total += len(seen)
    return resident / total if total else 0.0


def _resident_pages(path: Path, size: int) -> bytes:
    pages = (size + PAGE_BYTES - 1) // PAGE_BYTES
    seen = ctypes.create_string_buffer(pages)
    with path.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), size)) as mapped:
        anchor = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), seen):
                error = ctypes.get_errno()
                raise OSError(error, f"mincore of {path.name}: {os.strerror(error)}")
        finally:
            del anchor
    return seen.raw[:pages]


def drop(folder: Path, *, at_most: float = 0.01) -> float:
    """Drop the pages of all files below *folder* from the page cache and return what is left as a fraction.

    Raises:
        RuntimeError: more than *at_most* stayed, so a load would not be cold. (Pages of tmpfs cannot be dropped.)
    """
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a dirty page cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    left = residency(folder)
    if left > at_most:
        raise RuntimeError(f"{left:.1%} of the pages stayed in the page cache; use --work on a disk's file system")
    return left


def warm(folder: Path, *, at_least: float = 0.99) -> float:
    """Read all files below *folder* into the page cache and return the fraction that is there.

    Raises:
        RuntimeError: less than *at_least* stayed: there is too little memory for a warm load of this size.
    """
    buffer = bytearray(8 * MIB)
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    there = residency(folder)
    if there < at_least:
        raise RuntimeError(f"only {there:.1%} of the pages stayed in the page cache; choose a smaller --size")
    return there


GROWTH_READS = 16
"""Reads of 64 MiB within which the page cache must grow by one read, or it is full."""


class Occupier:
    """Holds free memory with the page cache of a sparse file at *scratch*, all but *keep_free_bytes*.

    A virtual machine returns free memory to its host, and the first touch of it afterwards costs up to 20 times
    more. Clean page cache stays with the guest and is handed out again at once, so that every contender's new pages
    cost the same. Reading a hole makes no disk traffic; reading on where the last ``fill`` ended finds no page twice.
    """

    HOLE_BYTES = 8 << 40

    def __init__(self, scratch: Path, keep_free_bytes: int) -> None:
        self._keep_free_bytes = keep_free_bytes
        self._scratch = scratch
        self._file = scratch.open("w+b", buffering=0)
        self._file.truncate(self.HOLE_BYTES)
        self._buffer = bytearray(64 * MIB)

    def fill(self) -> None:
        """Occupy the memory freed since the last time, as far as the page cache may grow (a container may limit it)."""
        before = _free_bytes()
        while before > self._keep_free_bytes:
            for _ in range(GROWTH_READS):
                self._file.readinto(self._buffer)
            after = _free_bytes()
            if after > before - len(self._buffer):
                return
            before = after

    def close(self) -> None:
        """Release all of it."""
        self._file.close()
        self._scratch.unlink()


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemFree")
