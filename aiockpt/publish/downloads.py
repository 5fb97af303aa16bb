"""Files of versions on this host: deltas are downloaded whole and compared, tensors of full versions are read into place.

Guarantee: a file of a delta is used only when its bytes have the digest that its index has; a damaged one is read again
the next time.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import xxhash

from aiockpt.convert.source import read_header
from aiockpt.errors import CorruptionError, from_os_error
from aiockpt.format.safetensors import Entry, Header
from aiockpt.options import MIB
from aiockpt.publish.form import FileNote, VersionIndex
from aiockpt.publish.local_copy import map_file, read_mapped_header
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Backend, Reader

READ_BYTES = 16 * MIB


class Downloads:
    """Downloads from *backend* to folders below *folder*; on one loop.

    Attributes:
        there: the versions whose files are here → the frame of each tensor.
    """

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._reads = Limiter("downloads", backend.traits.block_reads)
        self._disk = Limiter("downloaded files", 4)
        self.there: dict[tuple[int, str], DeltaFrames] = {}

    async def clear(self) -> None:
        """Remove what a killed process has left."""
        await run_blocking(self._disk, self._remove_all)

    def _remove_all(self) -> None:
        for path in self._folder.glob("weight_v*"):
            shutil.rmtree(path, ignore_errors=True)

    async def fetch(self, index: VersionIndex) -> DeltaFrames:
        """Return the frames of a delta, downloaded unless they are here.

        Raises:
            CorruptionError: a file is not what was published.
        """
        key = index.number, index.notes.attempt
        if key not in self.there:
            frames = DeltaFrames(self._folder / index.folder)
            async with open_tasks() as tasks:
                for name, note in index.notes.files.items():
                    tasks.start_soon(self._fetch_file, index, name, note, frames)
            self.there[key] = frames
        return self.there[key]

    async def _fetch_file(self, index: VersionIndex, name: str, note: FileNote, frames: DeltaFrames) -> None:
        where = f"{index.folder}/{name}"
        reader = await self._backend.open(where)
        try:
            if reader.size != note.bytes:
                raise self._damaged(where, f"{reader.size:,} bytes instead of {note.bytes:,}")
            mapped = await run_blocking(self._disk, frames.make, name, note.bytes)
            await self.read(reader, 0, memoryview(mapped))
        finally:
            await reader.close()
        if await run_blocking(self._disk, xxhash.xxh3_128_hexdigest, mapped) != note.digest:
            raise self._damaged(where, "another digest")
        frames.add(mapped)

    def _damaged(self, where: str, what: str) -> CorruptionError:
        return CorruptionError(
            f"{self._backend.url}/{where} has {what}: it is damaged, or was on its way; publish a full version "
            "if it stays so",
            key=where,
        )

    async def read(self, reader: Reader, offset: int, into: memoryview) -> None:
        """Fill *into* from *offset* of an open file, some parts at once."""

        async def read_part(at: int) -> None:
            async with self._reads:
                await reader.read(offset + at, [into[at : at + READ_BYTES]])

        async with open_tasks() as tasks:
            for at in range(0, len(into), READ_BYTES):
                tasks.start_soon(read_part, at)

    async def drop(self, below: int) -> None:
        """Remove the downloaded versions below a number."""
        for key in [key for key in self.there if key[0] < below]:
            frames = self.there.pop(key)
            await run_blocking(self._disk, frames.remove)

    @asynccontextmanager
    async def full(self, index: VersionIndex) -> AsyncIterator[FullVersion]:
        """Open the files of a full version for the length of the block."""
        async with AsyncExitStack() as opened:
            files = []
            for name in index.notes.files:
                reader = await self._backend.open(f"{index.folder}/{name}")
                opened.push_async_callback(reader.close)
                files.append((name, reader, await read_header(reader, f"{self._backend.url}/{index.folder}/{name}")))
            yield FullVersion(index, files, self)


class DeltaFrames:
    """The files of one delta in *folder*, mapped: *frames* by tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.frames: dict[str, memoryview] = {}

    def make(self, name: str, size: int) -> mmap.mmap:
        """Make a file, and map it; on a worker thread."""
        try:
            self._folder.mkdir(exist_ok=True)
            return map_file(self._folder / name, size)
        except OSError as error:
            raise from_os_error(error, "making", str(self._folder / name)) from error

    def add(self, mapped: mmap.mmap) -> None:
        """Add the frames of a file that is whole."""
        header = read_mapped_header(mapped)
        whole = memoryview(mapped).toreadonly()
        for entry in header.entries:
            self.frames[entry.name] = whole[header.data_start + entry.start : header.data_start + entry.end]

    def remove(self) -> None:
        """Remove the files; on a worker thread. Views that are still in use stay valid."""
        self.frames = {}
        shutil.rmtree(self._folder, ignore_errors=True)


class FullVersion:
    """An open full version: its files as (name, reader, header)."""

    def __init__(self, index: VersionIndex, files: Sequence[tuple[str, Reader, Header]], downloads: Downloads) -> None:
        self.index = index
        self.files = files
        self._downloads = downloads
        self._places: dict[str, tuple[Reader, int, Entry]] = {
            entry.name: (reader, header.data_start, entry) for _, reader, header in files for entry in header.entries
        }

    def entry(self, name: str) -> Entry | None:
        """Return the entry of a tensor."""
        found = self._places.get(name)
        return None if found is None else found[2]

    async def read(self, name: str, into: memoryview) -> None:
        """Read a tensor.

        Raises:
            CorruptionError: it is not there, or of another size.
        """
        reader, start, entry = self._places.get(name, (None, 0, None))
        if reader is None or entry is None or entry.end - entry.start != len(into):
            raise CorruptionError(
                f"{self.index.folder} has not the tensor {name} that its index says: publish a full version"
            )
        await self._downloads.read(reader, start + entry.start, into)

    async def header(self, number: int) -> bytes:
        """Return the bytes of the header of a file."""
        _, reader, header = self.files[number]
        data = bytearray(header.data_start)
        await self._downloads.read(reader, 0, memoryview(data))
        return bytes(data)
