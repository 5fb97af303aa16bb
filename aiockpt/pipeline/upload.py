"""The upload of full slabs to a durable data file: hash, write, return the slab; flush when all are written.

Guarantees:

- Every slab that arrives is returned to the pool exactly once, whatever fails or is cancelled.
- A slab is returned only when no thread reads it any more.
- After an error the file is abandoned: a failed flush is never retried on it (docs/format.md#commit-on-posix).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence

import anyio
from msgspec import UNSET, UnsetType

from aiockpt.events import LimiterStatistics
from aiockpt.format.document import ALGORITHM, SUM_BYTES, block_count, hash_block
from aiockpt.format.finite import count_not_finite
from aiockpt.format.manifest import FileEntry
from aiockpt.planning.write_plan import FilePlan, FloatSpan, Window
from aiockpt.runtime.limits import Limiter, Pace, open_tasks
from aiockpt.runtime.slabs import Lender, Slab
from aiockpt.runtime.stages import Stages
from aiockpt.storage.backend import Backend, Seen, Upload

# The screen for values that are NaN or infinite: beside the hash, while the bytes of the tensors are in the cache.
#
# Guarantees:
#
# - The report is of what was written: the bytes in the slabs, and not the tensors, which have changed since.
# - It runs on worker threads, without a lock: each run of a file is screened on its own, and again when it is written
#   again.


class FileScreen:
    """Counts values that are not finite in one data file, run by run."""

    def __init__(self, spans: Sequence[FloatSpan]) -> None:
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._found: dict[int, Counter[str]] = {}

    def screen(self, offset: int, run: memoryview) -> None:
        """Screen *run*, the bytes of the file from *offset*: whole elements, as any run of whole pages is. Any thread."""
        found: Counter[str] = Counter()
        end = offset + run.nbytes
        for span in self._spans[bisect_right(self._ends, offset) :]:
            if span.start >= end:
                break
            first, last = max(span.start, offset), min(span.end, end)
            found[span.name] += count_not_finite(span.dtype, run[first - offset : last - offset])
        self._found[offset] = found

    def not_finite(self) -> dict[str, int]:
        """Return how many numbers of each tensor are not finite; tensors without any are left out."""
        total = sum(self._found.values(), Counter[str]())
        return {name: count for name, count in sorted(total.items()) if count}


# The checksums of a data file, hashed from the very memory that is written, block by block.


class BlockSums:
    """The checksums of one data file, computed while its windows are written: in any order, and several at once.

    Args:
        size: of the file, in bytes.
        block_bytes: bytes under one checksum; the last block may be shorter.
        now_ns: the monotonic time, from any thread.
        screen: also reads each window.

    Attributes:
        hash_ns: the time that all threads together have hashed and screened.
    """

    def __init__(
        self,
        size: int,
        block_bytes: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
        screen: FileScreen | None = None,
    ) -> None:
        self.hash_ns = 0
        self._screen = screen
        self._now_ns = now_ns
        self._size = size
        self._block_bytes = block_bytes
        self._sums = bytearray(SUM_BYTES * block_count(size, block_bytes))

    def seen_from(self, offset: int) -> Seen:
        """Return the observer of the runs from *offset*, a multiple of a block: whole blocks except at a file's end.

        It runs on worker threads; the hash releases the GIL.
        """
        place = offset // self._block_bytes * SUM_BYTES

        def seen(run: memoryview) -> None:
            nonlocal place
            begun_ns = self._now_ns()
            found = _hash_blocks(run, self._block_bytes)
            if self._screen is not None:
                self._screen.screen(place // SUM_BYTES * self._block_bytes, run)
            self.hash_ns += self._now_ns() - begun_ns  # a statistic: of two threads at once one may be lost
            # Each byte comes once and in order, however often a block is sent (`aiockpt.storage.retry`).
            self._sums[place : place + len(found)] = found
            place += len(found)

        return seen

    def file_entry(self, path: str, rank: int, kind: str | UnsetType = UNSET) -> FileEntry:
        """Return the manifest entry of the file as *path* of *rank*; all of it must have been seen."""
        return FileEntry.of(
            path,
            size=self._size,
            rank=rank,
            algo=ALGORITHM,
            block=self._block_bytes,
            sums=bytes(self._sums),
            kind=kind,
            not_finite=UNSET if self._screen is None else self._screen.not_finite(),
        )


def _hash_blocks(memory: memoryview, block_bytes: int) -> bytes:
    """Return the checksums of *memory*'s blocks, 8 bytes each, one after the other; the last block may be shorter."""
    return b"".join(hash_block(memory[start : start + block_bytes]) for start in range(0, len(memory), block_bytes))


ABORT_DEADLINE_S = 60.0
WINDOWS_PER_WRITE = 4
"""All waiting windows, up to this many, go to a thread together. Every hop costs training a wait for the GIL: with one
window a hop, steps beside a save lost twice as much (2 cores, windows of 16 MiB)."""


class Handover:
    """Full slabs on their way from the snapshot to the writers of one data file, in file order.

    ``arrive`` and ``close`` are called on the loop thread. Slabs that arrive after ``close`` are returned at once.

    Args:
        pool: receives the slabs that no writer accepts.
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
        """Accept a full slab."""
        if self._closed:
            self._pool.release(slab)
            return
        self._waiting.append((window, slab))
        self._changed.set()

    async def wait(self) -> bool:
        """Wait until a window is ready for a writer; return False when all were handed out."""
        async with self._first_in_line:  # an arrival wakes one writer, not all
            while self._to_take and not self._waiting:
                self._changed = anyio.Event()
                await self._changed.wait()
            return self._to_take > 0

    def next_batch(self, most: int) -> list[tuple[Window, Slab]]:
        """Return up to *most* full windows, adjacent and in order; the caller releases their slabs."""
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._to_take -= len(taken)
        # The writer that waits for a further window has to end, too.
        if not self._to_take:
            self._changed.set()
        return taken

    def close(self) -> None:
        """Return the slabs that no writer has accepted to the pool. Idempotent."""
        self._closed = True
        while self._waiting:
            self._pool.release(self._waiting.popleft()[1])


class Uploader:
    """Writes data files of one engine, with shared limits.

    Args:
        backend: the target.
        pool: receives the written slabs.
        block_bytes: bytes under one checksum.
        pace: the rate limit of all writes together.
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
        screen: FileScreen | None,
        stages: Stages,
        written: dict[str, FileEntry],
    ) -> None:
        """Write the data file *path* below *folder* from the windows that arrive in *slabs*.

        Its bytes are durable when this returns, its name before the receipt is seen; *written* has its entry by then.
        """
        sums = BlockSums(file.size, self._block_bytes, stages.now_ns, screen)
        with stages.time("write", path, file.size) as tally:
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
            tally.hash_ns = sums.hash_ns
        written[path] = sums.file_entry(path, rank, file.kind)

    @property
    def busy_slabs(self) -> int:
        """The number of slabs that keeps all writers busy while another one is filled."""
        return self._writers + 1

    def statistics(self) -> tuple[LimiterStatistics, ...]:
        """Return the limiters' counts of this instant."""
        return (self._writing.statistics(),)

    async def _write(self, upload: Upload, path: str, slabs: Handover, sums: BlockSums, stages: Stages) -> None:
        """Write the windows that have arrived, in one hop to a thread, and repeat until every window is written.

        No limiter is held while it waits for the copy.
        """
        while await slabs.wait():
            async with self._writing:
                # Only now: a cancelled wait for the limiter has no slab to lose, and more windows may have arrived.
                batch, begun_ns = slabs.next_batch(WINDOWS_PER_WRITE), stages.now_ns()
                if not batch:
                    continue
                runs = [slab.memory[: window.size] for window, slab in batch]
                size, offset = sum(run.nbytes for run in runs), batch[0][0].offset
                try:
                    await self._pace.throttle(size)
                    await upload.write(offset, runs, sums.seen_from(offset))
                finally:
                    # Also when cancelled: by the contract of backends no thread uses the slabs once `write` has ended.
                    for _, slab in batch:
                        self._pool.release(slab)
                stages.wrote(path, size, begun_ns)
