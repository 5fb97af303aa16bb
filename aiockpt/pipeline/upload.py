"""How do full slabs become a durable data file? Hash, write, give the slab back; flush when all are written.

Guarantees:

- Every slab that arrives goes back to the pool exactly once, whatever fails or is cancelled.
- A slab is given back only when no thread reads it any more.
- After an error the file is abandoned: a failed flush is never retried on it (docs/format.md#commit-on-posix).
"""

from __future__ import annotations

from collections import deque

import anyio

from aiockpt.format.manifest import FileEntry
from aiockpt.pipeline.screen import FileScreen
from aiockpt.pipeline.serialize import BlockSums
from aiockpt.planning.write_plan import FilePlan, Window
from aiockpt.runtime.limits import Limiter, LimiterStatistics, Pace
from aiockpt.runtime.slabs import Lender, Slab
from aiockpt.runtime.stages import Stages
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Upload

ABORT_DEADLINE_S = 60.0
WINDOWS_PER_WRITE = 4
"""As many windows as wait go to a thread together. Every hop costs training a wait for the GIL: with one window in each,
steps beside a save lost twice as much (2 cores, windows of 16 MiB)."""


class Handover:
    """Full slabs on their way from the snapshot to the writers of one data file, in file order.

    ``arrive`` and ``close`` are called on the loop thread. After ``close`` slabs that still arrive go back at once.

    Args:
        pool: where slabs go back to that nobody takes.
        count: the windows of the file.
    """

    def __init__(self, pool: Lender, count: int) -> None:
        self._pool = pool
        self._waiting: deque[tuple[Window, Slab]] = deque()
        self._to_take = count
        self._changed = anyio.Event()
        self._first_in_line = anyio.Lock(fast_acquire=True)
        self._closed = False

    def arrive(self, window: Window, slab: Slab) -> None:
        """Take in a full slab."""
        if self._closed:
            self._pool.give(slab)
            return
        self._waiting.append((window, slab))
        self._changed.set()

    async def wait(self) -> bool:
        """Wait until a window can be taken; return False when every one was."""
        async with self._first_in_line:  # an arrival wakes one writer, not all
            while self._to_take and not self._waiting:
                self._changed = anyio.Event()
                await self._changed.wait()
            return self._to_take > 0

    def take(self, most: int) -> list[tuple[Window, Slab]]:
        """Return up to *most* full windows, adjacent and in order; whoever takes them gives their slabs back."""
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._to_take -= len(taken)
        if not self._to_take:
            self._changed.set()
        return taken

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
        pace: at which all of them are written together.
    """

    def __init__(self, backend: Backend, pool: Lender, block_bytes: int, pace: Pace) -> None:
        self._backend = backend
        self._pool = pool
        self._block_bytes = block_bytes
        self._pace = pace
        self._writers = backend.traits.block_writes + 1  # one hashes while the others write
        self._writing = Limiter("write", self._writers)

    async def write_file(
        self,
        folder: str,
        path: str,
        rank: int,
        file: FilePlan,
        slabs: Handover,
        stages: Stages,
        screen: FileScreen | None = None,
    ) -> FileEntry:
        """Write the data file *path* below *folder* from the windows that arrive in *slabs*; return its manifest entry.

        The file and its name are durable when this returns.
        """
        sums = BlockSums(file.size, self._block_bytes, stages.now_ns, screen)
        with stages.time("write", path, file.size) as told:
            upload = await self._backend.create(f"{folder}/{path}", file.size)
            try:
                async with open_tasks() as tasks:
                    for _ in range(min(self._writers, len(file.windows))):
                        tasks.start_soon(self._write, upload, path, slabs, sums, stages)
                with stages.time("flush", path):
                    await upload.finish()
            except BaseException:
                with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                    await upload.abort()
                raise
            told.hash_ns = sums.hash_ns
        return sums.file_entry(path, rank, file.kind)

    @property
    def busy_slabs(self) -> int:
        """How many slabs keep all writers busy while another one is filled."""
        return self._writers + 1

    def statistics(self) -> tuple[LimiterStatistics, ...]:
        """Return the limiters' counts of this instant."""
        return (self._writing.statistics(),)

    async def _write(self, upload: Upload, path: str, slabs: Handover, sums: BlockSums, stages: Stages) -> None:
        """Write what has arrived, and again, until every window was taken. Waiting for the copy holds no limit."""
        while await slabs.wait():
            async with self._writing:
                if batch := slabs.take(WINDOWS_PER_WRITE):
                    begun_ns = stages.now_ns()
                    stages.wrote(path, await self._write_batch(upload, batch, sums), begun_ns)

    async def _write_batch(self, upload: Upload, batch: list[tuple[Window, Slab]], sums: BlockSums) -> int:
        """Hash and write adjacent windows in one hop to a thread; return their bytes."""
        runs = [slab.memory[: window.size] for window, slab in batch]
        offset = batch[0][0].offset
        try:
            await self._pace.let_through(sum(run.nbytes for run in runs))
            await upload.write(offset, runs, sums.seen_from(offset))
        finally:
            for _, slab in batch:
                self._pool.give(slab)
        return sum(run.nbytes for run in runs)
