"""Files of versions on this host: deltas are downloaded whole and compared, tensors of full versions are read into place.

Guarantee: a file of a delta is used only when its bytes have the digest that its index has; a damaged one is read again
the next time.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import xxhash

from aiockpt.convert.source import read_header
from aiockpt.errors import CorruptionError, from_os_error
from aiockpt.format.safetensors import Entry, Header
from aiockpt.options import MIB
from aiockpt.publish.form import CHAIN, FileNote, VersionIndex, version_folder
from aiockpt.publish.mapped import MappedTensors, make_file
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Backend, Reader

READ_BYTES = 16 * MIB


class Downloads:
    """Downloads from *backend* to folders below *folder*; on one loop."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._reads = Limiter("downloads", backend.traits.block_reads)
        self._disk = Limiter("downloaded files", 4)
        self._there: dict[tuple[int, str], MappedTensors] = {}

    async def clear(self) -> None:
        """Remove what a killed process has left."""
        await run_blocking(self._disk, self._remove_all)

    def _remove_all(self) -> None:
        for path in self._folder.glob(f"{CHAIN}*"):
            shutil.rmtree(path, ignore_errors=True)

    async def fetch(self, index: VersionIndex) -> MappedTensors:
        """Return the frames of a delta, downloaded unless they are here.

        Raises:
            CorruptionError: a file is not what was published.
        """
        key = index.number, index.notes.attempt
        if key not in self._there:
            frames = MappedTensors()
            async with open_tasks() as tasks:
                for name, note in index.notes.files.items():
                    tasks.start_soon(self._fetch_file, index, name, note, frames)
            self._there[key] = frames
        return self._there[key]

    async def _fetch_file(self, index: VersionIndex, name: str, note: FileNote, frames: MappedTensors) -> None:
        where = f"{index.folder}/{name}"
        reader = await self._backend.open(where)
        try:
            if reader.size != note.bytes:
                raise self._damaged(where, f"{reader.size:,} bytes instead of {note.bytes:,}")
            mapped = await run_blocking(self._disk, self._make, self._folder / where, note.bytes)
            await self.read(reader, 0, memoryview(mapped))
        finally:
            await reader.close()
        if await run_blocking(self._disk, xxhash.xxh3_128_hexdigest, mapped) != note.digest:
            raise self._damaged(where, "another digest")
        frames.add(name, mapped)

    def _make(self, path: Path, size: int) -> mmap.mmap:
        try:
            path.parent.mkdir(exist_ok=True)
            return make_file(path, size)
        except OSError as error:
            raise from_os_error(error, "making", str(path)) from error

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
        for key in [key for key in self._there if key[0] < below]:
            self._there.pop(key).close()
            await run_blocking(
                self._disk, partial(shutil.rmtree, self._folder / version_folder(key[0]), ignore_errors=True)
            )

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


class FullVersion:
    """An open full version: its files as (name, reader, header)."""

    def __init__(self, index: VersionIndex, files: Sequence[tuple[str, Reader, Header]], downloads: Downloads) -> None:
        self.index = index
        self.files = files
        self._downloads = downloads
        self._places: dict[str, tuple[Reader, int, Entry]] = {
            entry.name: (reader, header.data_start, entry) for _, reader, header in files for entry in header.entries
        }

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
