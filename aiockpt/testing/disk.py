"""Speed of the disk itself: plain writes and reads past the page cache, as a reference for the figures of a checkpoint.

One thread moves blocks of 8 MiB with O_DIRECT, and flushes: a speed that a simple program reaches. Where the file system
has no O_DIRECT, I/O goes through the page cache, and the result reports that; reads then start from dropped pages, which a
kernel may or may not honour. The files have no name while in use, so none is left behind however the program ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

BLOCK_BYTES = 8 << 20
_NAME = ".disk-probe"
_NOT_DIRECT = {errno.EINVAL, errno.ENOTSUP}  # at opening, or at the first write

OnMoved = Callable[[int], object]


class DiskSpeed(msgspec.Struct, frozen=True):
    """Bytes a second of each file, and whether they went past the page cache."""

    bytes_per_s: tuple[float, ...]
    direct: bool


def measure_disk(
    folder: Path,
    size_bytes: int,
    repeats: int = 5,
    *,
    kind: Literal["write", "read"] = "write",
    on_moved: OnMoved = lambda _: None,
) -> DiskSpeed:
    """Write, or read, *repeats* files of *size_bytes* (rounded up to whole blocks) in *folder*, one after the other.

    Args:
        kind: the timed operation; a file to read is written first, untimed.
        on_moved: called with the bytes of each block that was timed.

    Raises:
        OSError: the folder cannot be written to, or has no room for one such file.
    """
    blocks = max(1, -(-size_bytes // BLOCK_BYTES))
    time_one = _time_writing if kind == "write" else _time_reading
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # page-aligned, as O_DIRECT requires
        block.write(os.urandom(BLOCK_BYTES))
        direct = _can_go_past_the_cache(folder, block)
        speeds = tuple(time_one(folder, block, blocks, direct, on_moved) for _ in range(repeats))
    return DiskSpeed(speeds, direct)


def _can_go_past_the_cache(folder: Path, block: mmap.mmap) -> bool:
    try:
        _time_writing(folder, block, 1, True, lambda _: None)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        return False
    return True


@contextmanager
def _nameless_file(folder: Path, direct: bool) -> Iterator[int]:
    """Open a new file in *folder* and unlink it at once: its space is freed when it is closed."""
    path = folder / f"{_NAME}-{os.getpid()}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o600)
    finally:
        path.unlink(missing_ok=True)  # a file system without O_DIRECT may have created it before it refused
    try:
        yield handle
    finally:
        os.close(handle)


def _time_writing(folder: Path, block: mmap.mmap, blocks: int, direct: bool, on_moved: OnMoved) -> float:
    """Write a file, flush it, and return the bytes a second from allocation to the flush."""
    with _nameless_file(folder, direct) as handle:
        began = time.perf_counter()
        os.posix_fallocate(handle, 0, blocks * BLOCK_BYTES)
        _write(handle, block, blocks, on_moved)
        return blocks * BLOCK_BYTES / (time.perf_counter() - began)


def _time_reading(folder: Path, block: mmap.mmap, blocks: int, direct: bool, on_moved: OnMoved) -> float:
    """Write a file, drop its pages, and return the bytes a second of reading it."""
    with _nameless_file(folder, direct) as handle:
        _write(handle, block, blocks, lambda _: None)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for index in range(blocks):
            os.preadv(handle, [block], index * BLOCK_BYTES)
            on_moved(BLOCK_BYTES)
        return blocks * BLOCK_BYTES / (time.perf_counter() - began)


def _write(handle: int, block: mmap.mmap, blocks: int, on_moved: OnMoved) -> None:
    for index in range(blocks):
        os.pwrite(handle, block, index * BLOCK_BYTES)
        on_moved(BLOCK_BYTES)
    os.fdatasync(handle)
