"""How fast is the disk itself? A plain writer past the page cache, to hold the figures of a checkpoint against.

It writes as many bytes as one save does, in blocks of 8 MiB with O_DIRECT, and flushes: what any program could reach
with one thread. Where the file system has no O_DIRECT it writes through the page cache and says so.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import msgspec

BLOCK_BYTES = 8 << 20


class DiskSpeed(msgspec.Struct, frozen=True):
    """Bytes a second, one figure for each file that was written, and whether they went past the page cache."""

    bytes_per_s: tuple[float, ...]
    direct: bool


def measure_disk(folder: Path, size_bytes: int, repeats: int = 5) -> DiskSpeed:
    """Write *repeats* files of *size_bytes* (rounded up to whole blocks) into *folder*, one after the other."""
    blocks = max(1, -(-size_bytes // BLOCK_BYTES))
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # page-aligned, as O_DIRECT wants it
        block.write(os.urandom(BLOCK_BYTES))
        direct = _can_write_directly(folder, block)
        return DiskSpeed(
            tuple(_write_file(folder / "disk.probe", block, blocks, direct) for _ in range(repeats)), direct
        )


def _can_write_directly(folder: Path, block: mmap.mmap) -> bool:
    try:
        _write_file(folder / "disk.probe", block, 1, direct=True)
    except OSError:  # EINVAL, at opening or at writing
        return False
    return True


def _write_file(path: Path, block: mmap.mmap, blocks: int, direct: bool) -> float:
    """Write a file, flush it, remove it, and return the bytes a second from the first write to the flush."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o600)
    try:
        began = time.perf_counter()
        os.posix_fallocate(handle, 0, blocks * BLOCK_BYTES)
        for index in range(blocks):
            os.pwrite(handle, block, index * BLOCK_BYTES)
        os.fdatasync(handle)
        return blocks * BLOCK_BYTES / (time.perf_counter() - began)
    finally:
        os.close(handle)
        path.unlink()
