"""Controls without a checkpoint: no saving at all, and threads that only write; they show the cost of the bytes alone."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from benchmarks import floors
from benchmarks import state as states
from benchmarks.contenders import Contender, Pending
from benchmarks.state import State


class Nothing(Contender):
    """Saves nothing: shows the difference of two quiet runs by chance."""

    checks = False

    def save(self, step: int, state: State) -> Pending:
        return Pending(lambda: True, lambda: None)


class RawWriter(Contender):
    """One plain thread writes the same number of bytes past the page cache, from warm memory.

    Args:
        copies: whether the state is copied into that memory first, by the calling thread.
    """

    checks = False

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._memory = floors.aligned_buffer(states.size_bytes(state))
        self._thread = ThreadPoolExecutor(1)

    def save(self, step: int, state: State) -> Pending:
        if self._copies:
            floors.copy_by_memmove(state, self._memory)
        name = f"raw-{step}" if self._copies else "raw"
        writing = self._thread.submit(floors.write_direct, None, self.folder / name, self._memory)
        return Pending(writing.done, writing.result)


class CopyingWriter(Contender):
    """The necessary work of a lazy save in one thread: copy, hash and write, in pieces of 16 MiB; without a commit."""

    checks = False

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._slab = floors.aligned_buffer(floors.DIRECT_CHUNK_BYTES)
        self._thread = ThreadPoolExecutor(1)

    def save(self, step: int, state: State) -> Pending:
        writing: Future[None] = self._thread.submit(self._write, state)
        return Pending(writing.done, writing.result)

    def _write(self, state: State) -> None:
        base, full, at = ctypes.addressof(ctypes.c_char.from_buffer(self._slab)), 0, 0
        with floors.opened(self.folder / "copied", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            for _, tensor in states.leaves(state):
                done = 0
                while done < tensor.nbytes:
                    count = min(tensor.nbytes - done, len(self._slab) - full)
                    ctypes.memmove(base + full, tensor.data_ptr() + done, count)
                    done, full = done + count, full + count
                    if full == len(self._slab):
                        at, full = at + self._flush(descriptor, at), 0
            self._flush(descriptor, at)
            os.fdatasync(descriptor)

    def _flush(self, descriptor: int, at: int) -> int:
        xxhash.xxh3_64_digest(self._slab)
        return os.pwrite(descriptor, self._slab, at)
