"""How do full slabs become a durable data file? Hash, write, give the slab back; flush when all are written.

Guarantees:

- Every slab that arrives goes back to the pool exactly once, whatever fails or is cancelled.
- A slab is given back only when no thread reads it any more.
- After an error the file is abandoned: a failed flush is never retried on it (FORMAT §6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable

import anyio

from aiockpt.format.checksum import ALGORITHM, SUM_BYTES, block_count
from aiockpt.format.manifest import FileEntry
from aiockpt.pipeline.serialize import hash_blocks
from aiockpt.planning.save import FilePlan, Window
from aiockpt.runtime.limits import Limiter, LimiterStatistics
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Upload

ABORT_DEADLINE_S = 60.0


class Handover:
    """Full slabs on their way from the snapshot to the writers of one data file.

    ``arrive`` and ``close`` are called on the loop thread. After ``close`` slabs that still arrive go back at once.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._waiting: deque[tuple[Window, Slab]] = deque()
        self._arrived = anyio.Event()
        self._closed = False

    def arrive(self, window: Window, slab: Slab) -> None:
        """Take a full slab."""
        if self._closed:
            self._pool.give(slab)
            return
        self._waiting.append((window, slab))
        self._arrived.set()

    async def windows(self, count: int) -> AsyncIterator[tuple[Window, Slab]]:
        """Yield *count* full windows as they arrive; whoever takes one gives its slab back."""
        for _ in range(count):
            while not self._waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            yield self._waiting.popleft()

    def close(self) -> None:
        """Give back what nobody took. Idempotent."""
        self._closed = True
        while self._waiting:
            self._pool.give(self._waiting.popleft()[1])


class Uploader:
    """Writes data files of one engine, with shared limits.

    Args:
        backend: where to.
        pool: where slabs go back to.
        block_bytes: bytes under one checksum.
    """

    def __init__(self, backend: Backend, pool: SlabPool, block_bytes: int) -> None:
        self._backend = backend
        self._pool = pool
        self._block_bytes = block_bytes
        self._writing = Limiter("window", backend.traits.block_writes + 1)  # one hashes while the others write

    async def write_file(
        self, folder: str, path: str, rank: int, file: FilePlan, slabs: Handover, on_written: Callable[[int], object]
    ) -> FileEntry:
        """Write the data file *path* below *folder* from the windows that arrive in *slabs*; return its manifest entry.

        The file and its name are durable when this returns.
        """
        sums = bytearray(SUM_BYTES * block_count(file.size, self._block_bytes))
        upload = await self._backend.create(f"{folder}/{path}", file.size)
        try:
            async with open_tasks() as tasks:
                async for window, slab in slabs.windows(len(file.windows)):
                    try:
                        await self._writing.__aenter__()
                    except BaseException:
                        self._pool.give(slab)
                        raise
                    tasks.start_soon(self._write_window, upload, window, slab, sums, on_written)
            await upload.finish()
        except BaseException:
            with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                await upload.abort()
            raise
        return FileEntry.of(path, size=file.size, rank=rank, algo=ALGORITHM, block=self._block_bytes, sums=bytes(sums))

    def statistics(self) -> tuple[LimiterStatistics, ...]:
        """Return the limiters' counts of this instant."""
        return (self._writing.statistics(),)

    async def _write_window(
        self, upload: Upload, window: Window, slab: Slab, sums: bytearray, on_written: Callable[[int], object]
    ) -> None:
        try:
            first = window.offset // self._block_bytes * SUM_BYTES

            def seen(data: memoryview) -> None:
                found = hash_blocks(data, self._block_bytes)
                sums[first : first + len(found)] = found

            await upload.write(window.offset, slab.memory[: window.size], seen)
        finally:
            self._pool.give(slab)
            await self._writing.__aexit__()
        on_written(window.size)
