"""Writing of a data file at the disk's own speed: blocks past the page cache, odd ends through it.

Guarantees:

- The file is created exclusively, its space is reserved before the first byte where the file system can do that, and it is
  removed by `abort`.
- No page is written both ways: a whole aligned page goes through the O_DIRECT descriptor, every other byte through the
  buffered one.
- `finish` flushes once, on the buffered descriptor. It is open from before the first byte, so it reports every
  write-back error of the file, whatever wrote (Linux keeps an error cursor for each descriptor), and it flushes the
  device's cache for both. A failed flush fails the upload and is never tried again: the pages are marked clean by then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import anyio
import numpy as np

from aiockpt.backends.local_handle import PAGE_BYTES, DirectMode, Handle, check_wrote, write_all
from aiockpt.backends.local_tree import Tree, split_key
from aiockpt.backends.ranges import Progress
from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen


class LocalUpload:
    """One data file of *size* bytes under *key*; see `aiockpt.storage.backend.Upload`."""

    def __init__(self, tree: Tree, limiter: Limiter, direct: DirectMode, key: str, size: int) -> None:
        self._files = tree.files
        self._tree = tree
        self._limiter = limiter
        self._direct = direct
        self._key = key
        self._progress = Progress(key, size)
        self._path = tree.path(key)
        self._handle = Handle(tree.files, key)
        self._created = False
        self._buffered_fd = -1
        self._direct_fd: int | None = None

    def begin(self) -> None:
        """Create the file and reserve its space. Blocking.

        Raises:
            OSError, StorageError: it exists, or does not fit; call `abort` then.
        """
        if not self._created:  # what comes after it failed, and is tried again
            self._buffered_fd = self._handle.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._created = True
        # A second descriptor, and not one for both: O_CREAT|O_DIRECT leaves a file behind where it fails with EINVAL.
        self._direct_fd = self._direct.open(self._handle, self._path, os.O_WRONLY)
        self._reserve()

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        size = self._progress.check_block(offset, runs)
        with self._handle.use(), self._tree.errors(f"writing {size:,} bytes of", self._key):
            await run_blocking(self._limiter, self._write_runs, offset, runs, seen)
        self._progress.written_bytes += size

    async def finish(self) -> None:
        self._progress.check_whole()
        if not await self._handle.retire():
            raise UsageError(f"{self._key!r} was finished or aborted before")
        try:
            with self._tree.errors("flushing", self._key):
                await run_blocking(self._limiter, self._flush_and_close)
        except BaseException:
            await self._discard()
            raise

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            if await self._handle.retire():
                await self._discard()

    async def _discard(self) -> None:
        """Close and remove, also when cancelled. A write-back error here concerns bytes that are not needed."""
        with anyio.CancelScope(shield=True), suppress(StorageError), self._tree.errors("removing", self._key):
            await run_blocking(self._limiter, self._close_and_remove)

    def _reserve(self) -> None:
        if not self._progress.size or not self._tree.optional.has("fallocate"):
            return
        try:
            self._files.fallocate(self._buffered_fd, 0, self._progress.size)
        except OSError as error:
            if not self._tree.optional.lacks("fallocate", error):
                raise

    def _write_runs(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Write *runs* one after the other: pages past the page cache as far as that works, the rest through it."""
        for run in runs:
            if seen is not None:
                seen(run)
            data = run.cast("B")
            pages = self._direct_range(offset, data)
            done = pages.start
            write_all(self._files, self._buffered_fd, data[:done], offset)
            while self._direct_fd is not None and done in pages and (done - pages.start) % PAGE_BYTES == 0:
                rest = data[done : pages.stop]
                try:
                    written = self._files.pwrite(self._direct_fd, rest, offset + done)
                    done += check_wrote(written, rest.nbytes, offset + done)
                except OSError as error:
                    if not self._direct.refused(error, self._key):
                        raise
                    break
            write_all(self._files, self._buffered_fd, data[done:], offset + done)
            offset += data.nbytes

    def _direct_range(self, offset: int, data: memoryview) -> range:
        """Return which bytes of *data* can go past the page cache: whole pages at page-aligned addresses."""
        start = -offset % PAGE_BYTES
        stop = (offset + data.nbytes) // PAGE_BYTES * PAGE_BYTES - offset
        if self._direct_fd is None or self._direct.works is False or stop <= start:
            return range(0)
        address: int = np.frombuffer(data, np.uint8).ctypes.data
        return range(start, stop) if (address + start) % PAGE_BYTES == 0 else range(0)

    def _flush_and_close(self) -> None:
        self._files.fdatasync(self._buffered_fd)
        self._handle.close()  # NFS reports late write errors here
        folder = split_key(self._key)[0]
        self._tree.flush(folder)
        self._tree.ensure_still(folder)  # flushes again what was removed and made again meanwhile

    def _close_and_remove(self) -> None:
        with suppress(OSError):
            self._handle.close()
        if self._created:
            self._created = False
            self._files.unlink(self._path)
