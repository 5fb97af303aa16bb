"""Publication of a folder of weights: a half-written one is never mistaken for a whole one.

Guarantees:

- On this machine's file systems, files are written and flushed under hidden names, and renamed when all are complete; the
  index last. Elsewhere they are written under their own names: an object store shows only whole objects, and a partial
  file on HDFS or fsspec is shorter than its header states, which every reader refuses. The index is created last.
  (Shared memory shows a file at its full size at once; tools read no weights there.)
- Existing weights are refused, or replaced with ``replace``: on a file system only after all of the new are durable,
  elsewhere before, because a store has no second name for an object.
- A failure leaves no files of its own; on a file system the old weights are there again. A crash leaves at most files with
  hidden names, which the next conversion reports.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from aiockpt.backends.local_tree import FALLBACKS
from aiockpt.convert.folder_layout import INDEX_NAME, SINGLE_NAME, is_weights
from aiockpt.errors import (
    CheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageFullError,
    UsageError,
    from_os_error,
)
from aiockpt.format.names import parse_step
from aiockpt.pipeline.copy import Windows
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.slabs import Slab
from aiockpt.runtime.world import Files, World
from aiockpt.storage.backend import Backend, Listing, Seen, local_path
from aiockpt.storage.transfer import put_once, space_for

Fill = Callable[[int, memoryview], Awaitable[object]]
"""Fills a window of the file that begins at an offset."""


async def write_file(
    target: Backend,
    key: str,
    size: int,
    windows: Windows,
    fill: Fill,
    *,
    seen_from: Callable[[int], Seen] | None = None,
    on_written: Callable[[int], object] = lambda _: None,
) -> None:
    """Create *key*, of *size* bytes; it is durable when this returns.

    Args:
        seen_from: offset → the callback for the bytes of the window that begins there.
        on_written: called with the bytes of each window.
    """
    upload = await target.create(key, size)

    async def move(window: Slab, offset: int) -> None:
        try:
            view = window.memory[: min(windows.window_bytes, size - offset)]
            await fill(offset, view)
            await upload.write(offset, [view], seen_from(offset) if seen_from else None)
        finally:
            with anyio.CancelScope(shield=True):
                await windows.release(window)
        on_written(len(view))

    try:
        async with open_tasks() as tasks:
            for offset in range(0, size, windows.window_bytes):
                tasks.start_soon(move, await windows.acquire(), offset)
        await upload.finish()
    except BaseException:
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            await upload.abort()
        raise


logger = logging.getLogger("aiockpt")

STAGING_PREFIX, STAGING_SUFFIX = ".aiockpt-", ".part"
CLEAN_UP_DEADLINE_S = 60.0


async def check_target(folder: Backend, replace: bool) -> None:
    """Refuse a folder that holds weights or checkpoints.

    Raises:
        UsageError: it holds checkpoints.
        ObjectExistsError: it holds weights, and *replace* is False.
    """
    listing = await folder.list("")
    steps = [name for name in listing.folders if parse_step(name) is not None]
    if steps:
        raise UsageError(f"{folder.url} holds checkpoints ({steps[0]}): name a folder of its own for the weights")
    there = list(filter(is_weights, _names_in(listing)))
    if there and not replace:
        raise ObjectExistsError(
            f"{folder.url} holds {there[0]} already: name another folder, or use replace=True (--force)"
        )
    left = [name for name in _names_in(listing) if name.startswith(STAGING_PREFIX)]
    if left and not replace:
        raise ObjectExistsError(
            f"{folder.url} holds {left[0]}, of a conversion that runs or was killed: wait, or use replace=True (--force)"
        )


@asynccontextmanager
async def open_target(
    folder: Backend, world: World, size: int, replace: bool
) -> AsyncIterator[_StoreTarget | _FileSystemTarget]:
    """Yield a target for *size* bytes; if the block fails, unpublished files are removed.

    Raises:
        StorageFullError: the bytes do not fit.
        ObjectExistsError, UsageError: as `check_target`.
    """
    await check_target(folder, replace)
    free = (await space_for(folder, size)).free_bytes
    if free is not None and free < size:
        raise StorageFullError(f"the folder needs {size:,} bytes and {folder.url} has {free:,} free: free space")
    path = local_path(folder.url)
    target = _StoreTarget(folder) if path is None else _FileSystemTarget(folder, path, world)
    if replace:
        left = [name for name in _names_in(await folder.list("")) if name.startswith(STAGING_PREFIX)]
        await folder.delete(left)
    await target.begin(replace)
    try:
        yield target
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
            try:
                await target.abandon()
            except CheckpointError as error:
                logger.warning("%s: files of the failed conversion could not be removed: %s", folder.url, error)
        raise


def _names_in(listing: Listing) -> list[str]:
    """Return the names of files: a link, too, and what cannot be read now, would be taken for weights."""
    return [*(stat.key for stat in listing.objects), *listing.others]


def _in_order_of_loss(names: Iterable[str]) -> list[str]:
    """Return old weights in the order of removal: the index, which makes the others a whole, goes first."""
    return sorted(names, key=lambda name: (name != INDEX_NAME, name != SINGLE_NAME, name))


class _StoreTarget:
    """A place whose objects are absent or whole; files are written under their own names."""

    def __init__(self, folder: Backend) -> None:
        self._folder = folder
        self._written: list[str] = []
        self._index: bytes | None = None

    async def begin(self, replace: bool) -> None:
        """Prepare the folder: a store has no second name for an object, so weights to be replaced are removed here."""
        if replace:
            there = filter(is_weights, _names_in(await self._folder.list("")))
            await self._folder.delete(_in_order_of_loss(there))

    async def write(
        self, name: str, size: int, windows: Windows, fill: Fill, on_written: Callable[[int], object]
    ) -> None:
        """Make a file durable, as `write_file` does."""
        # Noted only when it is written: `abandon` must not delete an object that another conversion has created.
        await write_file(self._folder, name, size, windows, fill, on_written=on_written)
        self._written.append(name)

    async def link(self, name: str, source: str) -> None:
        """Add the file at the path *source* to the folder, as a hard link; UsageError where that cannot be."""
        raise UsageError(f"{self._folder.url}: this storage has no hard links; convert without link")

    async def publish(self, index: bytes | None) -> None:
        """Make the files that were written the weights of the folder."""
        self._index = index
        if index is not None and not await put_once(self._folder, INDEX_NAME, index):
            raise ObjectExistsError(
                f"{self._folder.url}: another conversion has written {INDEX_NAME}; use a new folder"
            )

    async def abandon(self) -> None:
        """Remove what was written."""
        if self._index is not None:
            with suppress(ObjectNotFoundError):
                if await self._folder.get(INDEX_NAME, len(self._index) + 1) == self._index:  # the answer was lost
                    await self._folder.delete([INDEX_NAME])
        await self._folder.delete(self._written)


class _FileSystemTarget:
    """A folder of this machine: files are written under hidden names, and then renamed."""

    def __init__(self, folder: Backend, path: Path, world: World) -> None:
        self._folder = folder
        self._replace = False
        self._root = str(path)
        self._prefix = f"{STAGING_PREFIX}{world.token(6).hex()}-"
        self._files = world.files
        self._renaming = Limiter("renaming", 1)
        self._written: list[str] = []
        self._moved: list[str] = []
        self._replaced: Sequence[str] = ()
        self._made_root = False

    async def begin(self, replace: bool) -> None:
        self._replace = replace
        self._made_root = not await run_blocking(self._renaming, self._has_root)

    async def write(
        self, name: str, size: int, windows: Windows, fill: Fill, on_written: Callable[[int], object]
    ) -> None:
        await write_file(self._folder, self._staged(name), size, windows, fill, on_written=on_written)
        self._written.append(name)

    async def link(self, name: str, source: str) -> None:
        if not self._written:
            await self._folder.put(self._staged(INDEX_NAME), b"")  # makes the folder; replaced by the index, or removed
        await run_blocking(self._renaming, self._link, source, os.path.join(self._root, self._staged(name)))
        self._written.append(name)

    def _link(self, source: str, target: str) -> None:
        try:
            self._files.link(source, target)
        except OSError as error:
            if error.errno in FALLBACKS["link"].absent:
                raise UsageError(
                    f"{source} cannot be linked into {self._root} ({error.strerror}): name a folder on the same file "
                    "system, or convert without links"
                ) from error
            raise from_os_error(error, "linking", source) from error

    def _staged(self, name: str) -> str:
        return f"{self._prefix}{name}{STAGING_SUFFIX}"

    def _old(self, name: str) -> str:
        return self._staged(f"old-{name}")

    def _has_root(self) -> bool:
        try:
            self._files.lstat(self._root)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise from_os_error(error, "looking for", self._root) from error
        return True

    async def publish(self, index: bytes | None) -> None:
        if index is not None:
            await self._folder.put(self._staged(INDEX_NAME), index)
        else:
            await self._folder.delete([self._staged(INDEX_NAME)])
        there = list(filter(is_weights, _names_in(await self._folder.list(""))))
        if there and not self._replace:
            raise ObjectExistsError(f"{self._folder.url}: another conversion has written {there[0]}; use a new folder")
        self._replaced = _in_order_of_loss(there)
        await run_blocking(self._renaming, self._rename_all, index is not None)
        await self._folder.delete([self._old(name) for name in there])

    def _rename_all(self, has_index: bool) -> None:
        """Replace the old weights by the new ones: a single file by one rename; several while no index exists."""
        try:
            if not has_index:
                self._move(self._written)
            for name in self._replaced:
                if has_index or name not in self._written:
                    self._rename(name, self._old(name))
                    # Before the next one: a crash must not leave an index whose files are gone.
                    flush_names(self._files, self._root)
            if has_index:
                self._move(self._written)
                self._move([INDEX_NAME])
        except OSError as error:
            raise from_os_error(error, "renaming the converted files in", self._root) from error

    def _move(self, names: Sequence[str]) -> None:
        for name in names:
            self._rename(self._staged(name), name)
            self._moved.append(name)
        flush_names(self._files, self._root)

    def _rename(self, name: str, new_name: str) -> None:
        self._files.rename(os.path.join(self._root, name), os.path.join(self._root, new_name))

    async def abandon(self) -> None:
        # Listed after the renames: one whose answer was lost may have taken effect.
        if SINGLE_NAME not in self._moved and INDEX_NAME not in self._moved:  # else they are whole already
            await self._folder.delete(self._moved)
            await run_blocking(self._renaming, self._put_back, await self._list_own())
        await self._folder.delete(await self._list_own())
        if self._made_root:
            await run_blocking(self._renaming, self._remove_root)

    async def _list_own(self) -> list[str]:
        return [name for name in _names_in(await self._folder.list("")) if name.startswith(self._prefix)]

    def _put_back(self, own: Sequence[str]) -> None:
        """Give the old weights that are *own* files their names again, the index last."""
        try:
            for name in reversed(self._replaced):
                if self._old(name) in own:
                    self._rename(self._old(name), name)
                    flush_names(self._files, self._root)
        except OSError as error:
            raise from_os_error(error, "restoring the old weights", self._root) from error

    def _remove_root(self) -> None:
        try:
            self._files.rmdir(self._root)
        except OSError as error:
            # POSIX allows ENOTEMPTY and EEXIST for a folder that is not empty: another conversion writes there, too.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise from_os_error(error, "removing", self._root) from error


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file durably: after a crash or a power cut it has the old bytes, or the new one."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def flush_names(files: Files, folder: str) -> None:
    """Make the names in *folder* durable, where its file system can; where it cannot, the local backend has warned."""
    fd = files.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.fsync(fd)
    except OSError as error:
        if error.errno not in FALLBACKS["fsync of a folder"].absent:
            raise
    finally:
        files.close(fd)
