"""Floors: the time in which the same machine moves the same bytes and does nothing else.

Guarantees:

- No floor names or commits anything, and one alone checksums (`read_hashed`): a contender that reaches one does its
  work for free.
- Memory is warm (pre-faulted), buffers are page-aligned, threads are started before the clock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from benchmarks import state as states
from benchmarks.pages import MIB

Buffer = mmap.mmap | memoryview
ALIGNMENT_BYTES = 4096
DIRECT_CHUNK_BYTES = 16 * MIB
DIRECT_THREADS = 4
WARM_READ_THREADS = 2
WARM_READ_CHUNKS_BYTES = (1 * MIB, 4 * MIB, 8 * MIB)


def aligned_buffer(size_bytes: int) -> mmap.mmap:
    """Return pre-faulted, page-aligned private memory of *size_bytes*, rounded up to whole pages."""
    rounded = max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = os.urandom(MIB)
    for start in range(0, rounded, MIB):
        end = min(start + MIB, rounded)
        memory[start:end] = block[: end - start]
    return memory


def copy_by_memmove(state: states.State, memory: mmap.mmap) -> None:
    """Copy every tensor into *memory*, one thread, one ``memmove`` a tensor."""
    anchor = ctypes.c_char.from_buffer(memory)
    target = ctypes.addressof(anchor)
    for _, tensor in states.leaves(state):
        ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
        target += tensor.nbytes


def copy_by_torch(state: states.State, memory: mmap.mmap) -> None:
    """Copy every tensor into *memory* with ``Tensor.copy_`` and torch's own threads."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = 0
    for _, tensor in states.leaves(state):
        source = tensor.view(-1).view(torch.uint8)
        flat[start : start + source.numel()].copy_(source)
        start += source.numel()


def supports_direct_io(folder: Path) -> bool:
    """Return whether the file system of *folder* supports ``O_DIRECT`` writes."""
    probe = folder / "direct-io-probe"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.pwrite(descriptor, aligned_buffer(ALIGNMENT_BYTES), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


@contextmanager
def opened(path: Path, flags: int, direct: bool | None = None) -> Iterator[int]:
    """Open *path* with ``O_DIRECT`` where its file system can, buffered otherwise; yield the descriptor.

    Args:
        direct: whether the file system supports it; None tries.
    """
    direct = supports_direct_io(path.parent) if direct is None else direct
    descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def in_chunks(
    pool: ThreadPoolExecutor | None, memory: Buffer, chunk_bytes: int, move: Callable[[memoryview, int], int]
) -> None:
    """Move all of *memory* in chunks, on the threads of *pool* or on this one; a short transfer is an error."""
    view = memoryview(memory)

    def one(start: int) -> None:
        part = view[start : start + chunk_bytes]
        moved = move(part, start)
        if moved != len(part):
            raise OSError(errno.EIO, f"moved {moved} of {len(part)} bytes at {start}")

    starts = range(0, len(view), chunk_bytes)
    for _ in map(one, starts) if pool is None else pool.map(one, starts):
        pass


def write_direct(pool: ThreadPoolExecutor | None, path: Path, memory: Buffer, direct: bool | None = None) -> None:
    """Write *memory* to a new file at *path* past the page cache, and ``fdatasync`` it."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct) as descriptor:
        in_chunks(pool, memory, DIRECT_CHUNK_BYTES, lambda part, start: os.pwrite(descriptor, part, start))
        os.fdatasync(descriptor)


def read_direct(
    pool: ThreadPoolExecutor, path: Path, memory: Buffer, direct: bool | None = None, offset: int = 0
) -> None:
    """Fill *memory* from *path*, from byte *offset* on, past the page cache."""
    with opened(path, os.O_RDONLY, direct) as descriptor:
        in_chunks(pool, memory, DIRECT_CHUNK_BYTES, lambda part, at: os.preadv(descriptor, [part], offset + at))


def read_warm(pool: ThreadPoolExecutor, path: Path, memory: Buffer, chunk_bytes: int) -> None:
    """Fill *memory* from *path* through the page cache."""
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        in_chunks(pool, memory, chunk_bytes, lambda part, start: os.preadv(descriptor, [part], start))


def cut_runs(state: states.State, run_bytes: int) -> list[list[memoryview]]:
    """Return the memory of all tensors, one after the other, in runs of *run_bytes*; the last one may be shorter."""
    runs: list[list[memoryview]] = [[]]
    left = run_bytes
    for _, tensor in states.leaves(state):
        view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        while view:
            runs[-1].append(view[:left])
            view, left = view[left:], left - min(left, len(view))
            if not left:
                runs.append([])
                left = run_bytes
    return runs if runs[-1] else runs[:-1]


def read_hashed(pool: ThreadPoolExecutor, path: Path, runs: Sequence[list[memoryview]], run_bytes: int) -> None:
    """Fill *runs* of tensors' memory from *path* through the page cache, and hash each while it is in the processor's."""

    def one(number: int) -> None:
        hasher = xxhash.xxh3_64()
        os.preadv(descriptor, runs[number], number * run_bytes)
        for view in runs[number]:
            hasher.update(view)

    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        for _ in pool.map(one, range(len(runs))):
            pass
