"""The copy of a committed step to another place: read window by window, compared, written, and committed there.

Guarantees:

- What is committed at the target is the same checkpoint: the same attempt, tensors, values and checksums; or its weights,
  as a checkpoint of their own (`aiockpt.planning.weights`). Its generation is the next one there. Every block was compared
  with its checksum on the way.
- A block that cannot be read from one copy is read from the next.
- A copy that died is resumed: a data file that is durable at the target has a mark beside it and is not moved twice.
- Any number of processes may copy one step at once: no process writes into another's file; they contend for the manifest.
- No more memory is used than the given windows, whatever the size of the step. (Weights also need, during a read, memory
  for the bytes between them in their blocks.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import anyio
import msgspec

from aiockpt.errors import CheckpointError, ObjectExistsError, UsageError
from aiockpt.format.document import SUM_BYTES, block_count, described, digest128
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.names import attempt_folder, attempt_prefix, copied_folder, copied_key, copying_key, parse_copied
from aiockpt.options import MIB, Content
from aiockpt.pipeline.commit import publish
from aiockpt.pipeline.discover import StepCopy, find_copy, find_copy_in, list_step
from aiockpt.pipeline.fetch import StepFiles
from aiockpt.pipeline.upload import BlockSums
from aiockpt.planning.read_plan import Landing
from aiockpt.planning.weights import WeightsPlan, plan_weights
from aiockpt.planning.write_plan import HEADER
from aiockpt.runtime.limits import Limiter, Pace, note_progress, open_tasks, run_blocking
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, Upload
from aiockpt.storage.transfer import read_record, walk

WINDOW_BYTES = 16 * MIB
ABORT_DEADLINE_S = 5.0
"""The time limit of an abort, and so of abandoning a place; what is not aborted by then is left to prune."""
FLUSHED_BYTES_PER_S = 50e6
"""The slowest flush of a file that any place needs; meanwhile no progress is visible."""


class Windows:
    """The memory that copies move through: *count* windows of *window_bytes*, used again and again."""

    def __init__(self, count: int = 8, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._pool = SlabPool(window_bytes, count * window_bytes)
        self._free = Limiter("copy windows", count)
        self._allocating = Limiter("copy memory", 2)

    async def acquire(self) -> Slab:
        """Wait for a free window."""
        await self._free.__aenter__()
        try:
            # There is a slab, for the limiter has as many places. On a worker, because a new one is faulted in.
            return await run_blocking(self._allocating, self._pool.acquire, 0.0)
        except BaseException:
            await self._free.__aexit__()
            raise

    async def release(self, window: Slab) -> None:
        """Return *window* to the free ones."""
        self._pool.release(window)
        await self._free.__aexit__()

    def close(self) -> None:
        """Release the memory; a window that is still in use, when it is returned. Idempotent."""
        self._pool.close()


async def copy_step(
    source: CopySource,
    target: Backend,
    world: World,
    *,
    windows: Windows,
    pace: Pace,
    on_copied: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Make a step durable and visible at *target*; return its manifest there. A step that exists there is left as it is.

    Args:
        source: what is copied; the caller protects its origin from retention meanwhile.
        windows: those that *source* was opened for.
        pace: the rate of bytes to the target.
        on_copied: called with the bytes of each window, also of windows that were moved earlier.

    Raises:
        CorruptionError: a block is bad in all copies; nothing became visible.
        StorageError: the target, or every source, cannot be used.
        CommitConflictError: another save took the generation meanwhile; copying again finds the next one.
    """
    there = await find_copy(target, source.id, source.attempt)
    if there is not None:
        return there
    try:
        files = await copy_files(source, target, world, windows=windows, pace=pace, on_copied=on_copied)
        return await _publish(source, files, target, world)
    except CheckpointError:
        there = await find_copy(target, source.id, source.attempt)
        if there is None:
            raise
        return there  # another copier was faster, and has cleaned up


async def copy_files(
    source: CopySource,
    target: Backend,
    world: World,
    *,
    windows: Windows,
    pace: Pace,
    only: Callable[[FileEntry], bool] = lambda _: True,
    on_copied: Callable[[int], object] = lambda _: None,
) -> dict[int, FileEntry]:
    """Make the data files of a step durable at *target*, except those that were copied before.

    Several processes may each copy some of the files; `copy_step` makes the step visible when all are copied.

    Args:
        only: selects the files; all by default.

    Returns:
        Every file that is durable at *target*, by its number.
    """
    files = await copied_files(target, source)
    if len(files) < len(source.files):  # the attempt is not its writer's alone from here on
        await target.put(copying_key(source.id, source.attempt), b"")
    async with open_tasks() as tasks:

        async def move(index: int) -> None:
            mover = _FileMover(source, index, windows, pace, on_copied)
            files[index] = await mover.move(target, world.token(4).hex())
            await target.put(copied_key(source.id, source.attempt, index), msgspec.json.encode(files[index]))

        for index, file in enumerate(source.files):
            if index in files:
                on_copied(file.size)
            elif only(file):
                tasks.start_soon(move, index)
    return files


async def rewrite_files(
    source: CopySource,
    indexes: Sequence[int],
    target: Backend,
    world: World,
    *,
    windows: Windows,
    pace: Pace,
) -> dict[int, FileEntry]:
    """Make some data files of a step durable at *target* again, beside the old ones; return them by their numbers.

    Raises:
        CorruptionError: a block is bad in all copies; what was written is removed.
        StorageError: the target, or every source, cannot be used.
    """
    files: dict[int, FileEntry] = {}
    for index in indexes:
        mover = _FileMover(source, index, windows, pace, lambda _: None)
        try:
            files[index] = await mover.move(target, world.token(4).hex())
        except BaseException:
            with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                await target.delete([f"{source.id}/{file.p}" for file in files.values()])
            raise
    return files


async def remove_strays(target: Backend, committed: Manifest, *, marks: bool = False) -> None:
    """Remove data files of the attempt that the committed step does not name: leftovers of copiers that died or lost.

    Args:
        marks: also remove the marks of files that were copied.
    """
    named = {f"{committed.id}/{file.p}" for file in committed.files}
    data = f"{attempt_folder(committed.id, committed.attempt)}/d"
    left = [stat.key async for stat in walk(target, data) if stat.key not in named]
    if marks:
        left += [stat.key async for stat in walk(target, copied_folder(committed.id, committed.attempt))]
    await target.delete(left)


async def _publish(source: CopySource, files: Mapping[int, FileEntry], target: Backend, world: World) -> Manifest:
    """Commit at *target* a step whose *files* are durable there, unless another copier has done it meanwhile.

    Two generations of one attempt must not exist: the clean-up after one of them removes the files of the other.
    """
    entry = await list_step(target, source.id)
    if (there := await find_copy_in(target, entry, source.attempt)) is not None:
        await remove_strays(target, there, marks=True)
        return there
    generation, write_id = max(entry.generations, default=0) + 1, world.token(16).hex()
    in_order = [files[index] for index in range(len(source.files))]
    new = await run_blocking(Limiter("copied manifest", 1), source.manifest, in_order, generation, write_id)
    committed = await publish(target, new)
    await remove_strays(target, committed, marks=True)
    return committed


async def copied_files(target: Backend, source: CopySource) -> dict[int, FileEntry]:
    """Return the data files that copies have made durable at *target*, by their numbers."""
    files: dict[int, FileEntry] = {}
    for stat in (await target.list(copied_folder(source.id, source.attempt))).objects:
        index = parse_copied(stat.key.rpartition("/")[2])
        if index is None or index >= len(source.files):
            continue
        try:
            file = _read_mark(await read_record(target, stat.key), source, index)
            if file is not None and (await target.stat(f"{source.id}/{file.p}")).size == file.size:
                files[index] = file
        except CheckpointError:  # deleted, or not a valid mark
            continue
    return files


def _read_mark(data: bytes, source: CopySource, index: int) -> FileEntry | None:
    """Return the file that a mark describes; None when that cannot be file number *index*."""
    wanted = source.files[index]
    try:
        file = msgspec.json.decode(data, type=described(FileEntry))
    except (msgspec.DecodeError, UnicodeDecodeError):  # msgspec lets the second one through
        return None
    if not file.p.startswith(f"{attempt_prefix(source.attempt)}/d/"):
        return None
    if wanted.digest:
        return msgspec.structs.replace(wanted, p=file.p) if file.digest == wanted.digest else None
    sums = file.sums_bytes()
    whole = len(sums) == SUM_BYTES * block_count(wanted.size, wanted.block) and digest128(sums) == file.digest
    return msgspec.structs.replace(wanted, p=file.p, sums=file.sums, digest=file.digest) if whole else None


class _FileMover:
    """Moves one data file: number *index* of *source*."""

    def __init__(
        self, source: CopySource, index: int, windows: Windows, pace: Pace, on_copied: Callable[[int], object]
    ) -> None:
        self._source = source
        self._index = index
        self._file = source.files[index]
        self._windows = windows
        self._pace = pace
        self._on_copied = on_copied
        self._blocks = StepFiles.of_copies(source.sources)
        self._sums = BlockSums(self._file.size, self._file.block)

    async def move(self, target: Backend, token: str) -> FileEntry:
        """Write the file durably to *target*; return its entry there."""
        path, upload = await self._create(target, token)
        window_bytes = self._source.window_bytes
        try:
            async with open_tasks() as tasks:
                for offset in range(0, self._file.size, window_bytes):
                    # Before the task is started: a file of any size has no more tasks than there are windows.
                    window = await self._windows.acquire()
                    size = min(window_bytes, self._file.size - offset)
                    # anyio cancels no task before its first step, so the task always gets to return its window.
                    tasks.start_soon(self._move_window, window, upload, offset, size)
            note_progress(self._file.size / FLUSHED_BYTES_PER_S)
            await upload.finish()
            note_progress()
        except BaseException:
            with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                await upload.abort()
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._blocks.close()
        file = self._file
        if file.digest:
            return msgspec.structs.replace(file, p=path)
        return msgspec.structs.replace(self._sums.file_entry(path, file.rank, file.kind), not_finite=file.not_finite)

    async def _create(self, target: Backend, token: str) -> tuple[str, Upload]:
        """Create the file under its own name; under another one where another copier, dead or running, has it."""
        try:
            return self._file.p, await target.create(f"{self._source.id}/{self._file.p}", self._file.size)
        except ObjectExistsError:
            path = f"{self._file.p.removesuffix('.safetensors')}-{token}.safetensors"
            return path, await target.create(f"{self._source.id}/{path}", self._file.size)

    async def _move_window(self, window: Slab, upload: Upload, offset: int, size: int) -> None:
        try:
            view = window.memory[:size]
            await self._source.read(self._blocks, self._index, offset, view)
            await self._pace.throttle(size)
            # Known sums were compared in the read: only those of a new file are computed here.
            await upload.write(offset, [view], None if self._file.digest else self._sums.seen_from(offset))
        finally:
            with anyio.CancelScope(shield=True):
                await self._windows.release(window)
        self._on_copied(size)
        note_progress()


# Sources of a copy: all of a step, as it is, or its weights in files of their own.
#
# Guarantees: whatever is copied, each block that is read is compared with its checksum, and one that a copy lacks is read
# from the next one.


class CopySource(Protocol):
    """What is copied: a step to be, from copies of one.

    Attributes:
        sources: the copies that it is read from, the nearest first.
        id, attempt: its names at every target.
        files: the entries of its data files: paths and all else but the sums, which only the copy computes.
        window_bytes: bytes of one read and write, and of every window of a file but the last.
    """

    @property
    def sources(self) -> Sequence[StepCopy]: ...
    @property
    def id(self) -> str: ...
    @property
    def attempt(self) -> str: ...
    @property
    def files(self) -> Sequence[FileEntry]: ...
    @property
    def window_bytes(self) -> int: ...

    async def read(self, blocks: StepFiles, index: int, offset: int, view: memoryview) -> None:
        """Fill *view*, a window or the rest of the file, with the bytes of file number *index* from *offset*."""

    def manifest(self, files: Sequence[FileEntry], generation: int, write_id: str) -> Manifest:
        """Return the manifest for a target where *files* are durable; may take a while."""
        ...


class WholeStep:
    """All of a step, as it is."""

    def __init__(self, sources: Sequence[StepCopy], window_bytes: int) -> None:
        self.sources = sources
        self.window_bytes = window_bytes
        self._manifest = sources[0].manifest
        self.id, self.attempt, self.files = self._manifest.id, self._manifest.attempt, self._manifest.files

    async def read(self, blocks: StepFiles, index: int, offset: int, view: memoryview) -> None:
        await blocks.read(index, offset, [view])

    def manifest(self, files: Sequence[FileEntry], generation: int, write_id: str) -> Manifest:
        return msgspec.structs.replace(self._manifest, generation=generation, write_id=write_id, files=tuple(files))


class WeightsOfStep:
    """The weights of a step, in files of their own.

    Args:
        plan: for windows of *window_bytes*.
    """

    def __init__(self, sources: Sequence[StepCopy], plan: WeightsPlan, window_bytes: int) -> None:
        self.sources = sources
        self._plan = plan
        self.window_bytes = window_bytes
        self.id, self.attempt = sources[0].manifest.id, plan.votes[0].attempt
        self.files = tuple(file.entry for file in plan.files)

    async def read(self, blocks: StepFiles, index: int, offset: int, view: memoryview) -> None:
        made = self._plan.files[index]
        window = made.plan.windows[offset // self.window_bytes]
        for copy in window.copies:
            if copy.source == HEADER:
                part = made.plan.header[copy.source_offset : copy.source_offset + copy.size]
                view[copy.window_offset : copy.window_offset + copy.size] = part
        for file, landings in made.landings(window).items():
            for some in _apart(landings):
                await blocks.fill(file, some, [view], self.window_bytes)

    def manifest(self, files: Sequence[FileEntry], generation: int, write_id: str) -> Manifest:
        return self._plan.manifest(files, generation, write_id)


def _apart(landings: Sequence[Landing]) -> Iterator[list[Landing]]:
    """Yield sorted landings in groups without overlaps: two tensors of a manifest may claim the same bytes."""
    some: list[Landing] = []
    for landing in landings:
        if some and landing.start < some[-1].end:
            yield some
            some = []
        some.append(landing)
    yield some


async def open_copy_source(
    sources: Sequence[StepCopy], content: Content, *, window_bytes: int, file_bytes: int
) -> CopySource:
    """Return the source for a copy of the step in *sources*.

    Args:
        window_bytes: the most bytes of one read and write.
        file_bytes: the size at which a new data file ends.

    Raises:
        UsageError: the step has no weights, or blocks larger than a window.
    """
    whole = sources[0].manifest
    largest = max(whole.files, key=lambda file: file.block, default=None)
    if largest is not None and largest.block > window_bytes:
        raise UsageError(
            f"{largest.p}: blocks of {largest.block:,} bytes, and windows of {window_bytes:,}: give "
            f"IO(read_bytes={largest.block})"
        )
    if largest is not None:
        # Sums need whole blocks. Blocks are powers of two, so that the largest is a multiple of all others.
        window_bytes -= window_bytes % largest.block
    if content == "full":
        return WholeStep(sources, window_bytes)

    def plan() -> WeightsPlan:
        return plan_weights(whole, window_bytes=window_bytes, file_bytes=file_bytes)

    return WeightsOfStep(sources, await run_blocking(Limiter("plan weights", 1), plan), window_bytes)
