"""How fast could ranks that share one disk be? Each moves its even share of the bytes past the page cache, and no more.

Guarantees: memory is warm and in huge pages, threads are started before the clock. Nothing is hashed, named or committed
here, so it is no checkpoint. Readers are as many as writers were, or a multiple of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import distributed

from aiockpt.runtime.memory import map_pages
from benchmarks import floors, pages

Transfer = Callable[[int, Sequence[memoryview], int], int]


class Floor:
    """One rank's part, in the form of a contender.

    Args:
        folder: where the files lie, one for each rank that writes.
        size_bytes: this rank's share, a multiple of a page.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder = folder
        self._memory = memoryview(map_pages(size_bytes))
        self._direct = os.O_DIRECT if floors.supports_direct_io(folder.parent) else 0
        self._threads = ThreadPoolExecutor(floors.DIRECT_THREADS)
        list(self._threads.map(lambda _: None, range(floors.DIRECT_THREADS)))

    def save(self, step: int) -> Callable[[], object]:
        """Write a file of this rank's share; it is on the disk when this returns, and its name after the returned call."""
        place = self._folder / f"step-{step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        self._move(place / f"{distributed.get_rank()}.raw", os.O_WRONLY | os.O_CREAT, os.pwritev, 0)
        return lambda: pages.sync_folders(place)

    def load(self, step: int) -> None:
        """Read this rank's share of all bytes: one file, or an even part of it."""
        files = sorted((self._folder / f"step-{step:08d}").glob("*.raw"), key=lambda path: int(path.stem))
        readers = distributed.get_world_size() // len(files)
        number, part = divmod(distributed.get_rank(), readers)
        self._move(files[number], os.O_RDONLY, os.preadv, part * len(self._memory))

    def _move(self, path: Path, flags: int, transfer: Transfer, offset: int) -> None:
        descriptor = os.open(path, flags | self._direct, 0o644)

        def one(start: int) -> None:
            part = self._memory[start : start + floors.DIRECT_CHUNK_BYTES]
            if (moved := transfer(descriptor, [part], offset + start)) != len(part):
                raise RuntimeError(f"{path.name}: {moved} of {len(part)} bytes were moved at {offset + start}")

        try:
            list(self._threads.map(one, range(0, len(self._memory), floors.DIRECT_CHUNK_BYTES)))
            if flags & os.O_WRONLY:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
