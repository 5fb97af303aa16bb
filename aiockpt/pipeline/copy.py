"""How does a committed step get to another place? Read window by window, compared, written, and committed there.

Guarantees:

- What is committed at the target is the same checkpoint: the same attempt, tensors, values and checksums. Its generation
  is the next one there. Every block was compared with its checksum on the way.
- A block that one copy cannot give is read from the next copy.
- A copy that died is taken up again: a data file that is durable at the target has a mark beside it and is not moved twice.
- Any number of processes may copy one step at once: nobody writes into another's file, and they meet at the manifest.
- No more memory is used than the windows given, whatever the size of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio
import msgspec

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectExistsError,
    UsageError,
)
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.names import attempt_folder, attempt_prefix, copied_folder, copied_key, parse_copied
from aiockpt.options import MIB
from aiockpt.pipeline.commit import publish
from aiockpt.pipeline.discover import StepCopy, find_copy, look_at
from aiockpt.pipeline.fetch import BlockCheck
from aiockpt.runtime.limits import Limiter, Pace, run_blocking
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.runtime.tasks import open_tasks
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, Reader, Upload
from aiockpt.storage.transfer import read_record, walk

WINDOW_BYTES = 16 * MIB
ABORT_DEADLINE_S = 60.0


class Windows:
    """The memory that copies move through: *count* windows of *window_bytes*, used again and again."""

    def __init__(self, count: int = 8, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._pool = SlabPool(window_bytes, count * window_bytes)
        self._free = Limiter("copy windows", count)
        self._allocating = Limiter("copy memory", 2)

    async def take(self) -> Slab:
        """Wait for a free window."""
        await self._free.__aenter__()
        try:
            return await run_blocking(self._allocating, self._pool.take, 0.0)
        except BaseException:
            await self._free.__aexit__()
            raise

    async def give(self, window: Slab) -> None:
        """Take *window* back."""
        self._pool.give(window)
        await self._free.__aexit__()


async def copy_step(
    sources: Sequence[StepCopy],
    target: Backend,
    world: World,
    *,
    windows: Windows,
    pace: Pace,
    on_copied: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Make a step durable and visible at *target*; return its manifest there. One that is there already is left as it is.

    Args:
        sources: copies of the one attempt, the nearest first; somebody keeps retention away from them.
        pace: how fast bytes go to the target.
        on_copied: told the bytes of each window, also of those that need not be moved any more.

    Raises:
        CorruptionError: a block is bad in all copies; nothing became visible.
        StorageError: the target, or every source, cannot be used.
        CommitConflictError: another save took the generation meanwhile; copying again finds the next one.
    """
    manifest = sources[0].manifest
    there = await find_copy(target, manifest.id, manifest.attempt)
    if there is not None:
        return there
    try:
        paths = await copy_files(sources, target, world, windows=windows, pace=pace, on_copied=on_copied)
        return await _publish(manifest, paths, target, world)
    except CheckpointError:
        there = await find_copy(target, manifest.id, manifest.attempt)
        if there is None:
            raise
        return there  # another copier was faster, and has tidied up


async def copy_files(
    sources: Sequence[StepCopy],
    target: Backend,
    world: World,
    *,
    windows: Windows,
    pace: Pace,
    only: Callable[[FileEntry], bool] = lambda _: True,
    on_copied: Callable[[int], object] = lambda _: None,
) -> dict[int, str]:
    """Make the data files of a step durable at *target*, those that somebody has copied before left out.

    Several processes may each copy some of the files; who has them all, `copy_step` makes visible.

    Args:
        only: says which files; all by default.

    Returns:
        The path at *target* of every file that is durable there, by its number.
    """
    manifest = sources[0].manifest
    paths = await copied_paths(target, manifest)
    async with open_tasks() as tasks:

        async def move(index: int) -> None:
            mover = _FileMover(sources, index, windows, pace, on_copied)
            paths[index] = await mover.move(target, world.token(4).hex())
            await target.put(copied_key(manifest.id, manifest.attempt, index), paths[index].encode())

        for index, file in enumerate(manifest.files):
            if index in paths:
                on_copied(file.size)
            elif only(file):
                tasks.start_soon(move, index)
    return paths


async def _publish(manifest: Manifest, paths: Mapping[int, str], target: Backend, world: World) -> Manifest:
    """Commit at *target* a step whose files lie at *paths* there."""
    entry = await look_at(target, manifest.id)
    files = tuple(msgspec.structs.replace(file, p=paths[index]) for index, file in enumerate(manifest.files))
    generation, write_id = max(entry.generations, default=0) + 1, world.token(16).hex()
    new = msgspec.structs.replace(manifest, generation=generation, write_id=write_id, files=files)
    committed = await publish(target, new)
    await _tidy(target, committed)
    return committed


async def copied_paths(target: Backend, manifest: Manifest) -> dict[int, str]:
    """Return where the data files lie that copies have made durable at *target*, by their numbers."""
    paths: dict[int, str] = {}
    folder = f"{attempt_prefix(manifest.attempt)}/d/"
    for stat in (await target.list(copied_folder(manifest.id, manifest.attempt))).objects:
        index = parse_copied(stat.key.rpartition("/")[2])
        if index is None or index >= len(manifest.files):
            continue
        try:
            path = (await read_record(target, stat.key)).decode("utf-8", "replace")
            if not path.startswith(folder):
                continue
            found = (await target.stat(f"{manifest.id}/{path}")).size
        except CheckpointError:  # gone, or a mark that says nonsense
            continue
        if found == manifest.files[index].size:
            paths[index] = path
    return paths


async def _tidy(target: Backend, committed: Manifest) -> None:
    """Remove the marks, and what copies that died or lost have left in the attempt."""
    named = {f"{committed.id}/{file.p}" for file in committed.files}
    folder = attempt_folder(committed.id, committed.attempt)
    left = [stat.key async for stat in walk(target, f"{folder}/d") if stat.key not in named]
    marks = [stat.key async for stat in walk(target, copied_folder(committed.id, committed.attempt))]
    await target.delete([*left, *marks])


class _FileMover:
    """Moves one data file.

    Args:
        sources: copies of the step, the nearest first.
        index: the number of the file, the same in all of them.
    """

    def __init__(
        self,
        sources: Sequence[StepCopy],
        index: int,
        windows: Windows,
        pace: Pace,
        on_copied: Callable[[int], object],
    ) -> None:
        self._sources = sources
        self._index = index
        self._windows = windows
        self._pace = pace
        self._on_copied = on_copied
        self._readers: dict[int, Reader] = {}
        self._opening = anyio.Lock()

    @property
    def _file(self) -> FileEntry:
        return self._sources[0].manifest.files[self._index]

    async def move(self, target: Backend, token: str) -> str:
        """Write the file; return its path at *target*, where it is durable now."""
        if self._file.block > self._windows.window_bytes:
            raise UsageError(
                f"{self._file.p}: blocks of {self._file.block:,} bytes, and windows of {self._windows.window_bytes:,}: give "
                f"IO(read_bytes={self._file.block})"
            )
        path, upload = await self._create(target, token)
        window_bytes = self._windows.window_bytes // self._file.block * self._file.block
        try:
            async with open_tasks() as tasks:
                for offset in range(0, self._file.size, window_bytes):
                    window = await self._windows.take()
                    size = min(window_bytes, self._file.size - offset)
                    tasks.start_soon(self._move_window, window, upload, offset, size)
            await upload.finish()
        except BaseException:
            with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                await upload.abort()
            raise
        finally:
            with anyio.CancelScope(shield=True):
                for reader in self._readers.values():
                    await reader.close()
        return path

    async def _create(self, target: Backend, token: str) -> tuple[str, Upload]:
        """Begin the file under its own name; under another one where a copy that died, or is at work, has left that."""
        step_id = self._sources[0].manifest.id
        try:
            return self._file.p, await target.create(f"{step_id}/{self._file.p}", self._file.size)
        except ObjectExistsError:
            path = f"{self._file.p.removesuffix('.safetensors')}-{token}.safetensors"
            return path, await target.create(f"{step_id}/{path}", self._file.size)

    async def _move_window(self, window: Slab, upload: Upload, offset: int, size: int) -> None:
        try:
            view = window.memory[:size]
            await self._read(offset, view)
            await self._pace.let_through(size)
            await upload.write(offset, [view])
        finally:
            with anyio.CancelScope(shield=True):
                await self._windows.give(window)
        self._on_copied(size)

    async def _read(self, offset: int, view: memoryview) -> None:
        """Fill *view* from the first copy whose blocks there are what was saved."""
        failure: CheckpointError | None = None
        for number, source in enumerate(self._sources):
            file = source.manifest.files[self._index]
            check = BlockCheck(file, offset)
            try:
                reader = await self._open(number)
                await reader.read(offset, [view], check)
            except CheckpointError as error:
                failure = failure or error
                continue
            if not check.bad_blocks:
                return
            key = f"{source.manifest.id}/{file.p}"
            failure = failure or CorruptionError(
                f"{key}: block {check.bad_blocks[0]} is not what was saved, and no other copy has it",
                key=key,
                offset=offset,
            )
        assert failure is not None
        raise failure

    async def _open(self, number: int) -> Reader:
        async with self._opening:
            if number not in self._readers:
                source = self._sources[number]
                path = source.manifest.files[self._index].p
                self._readers[number] = await source.backend.open(f"{source.manifest.id}/{path}")
            return self._readers[number]
