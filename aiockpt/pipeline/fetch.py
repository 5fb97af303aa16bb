"""How do stored bytes reach memory, verified? Ranged reads straight into place, each block hashed while it is in cache.

Guarantees:

- Every block that is read is compared with the manifest's checksum before ``fetch_file`` returns; a difference raises
  `CorruptionError` naming file, block, offset and tensors. Memory that was filled before is then partly overwritten.
- Nothing of a file is read before its size and its safetensors header agree with the manifest.
- What came over a network and is not what was saved may have been damaged on its way: it is read once more, that block or
  header alone, before it counts as corruption.
- Memory beyond the targets: the gaps of the reads under way.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

import anyio

from aiockpt.errors import CheckpointError, CorruptionError, ObjectNotFoundError, StorageError
from aiockpt.format.checksum import BlockHasher, block_range
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.safetensors import MAX_HEADER_BYTES, decode_header
from aiockpt.format.validate import check_header, pieces_by_file
from aiockpt.planning.load import GAP, BlockRead, Landing, plan_reads
from aiockpt.runtime.limits import Limiter
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Reader
from aiockpt.storage.views import cut_views

logger = logging.getLogger("aiockpt")


class BlockCheck:
    """Compares a run of consecutive bytes of one file with its checksums, while the bytes arrive.

    Args:
        file: the file's manifest entry.
        offset: where the run starts; a block boundary.
    """

    def __init__(self, file: FileEntry, offset: int) -> None:
        self._file = file
        self._block = offset // file.block
        self._hasher = BlockHasher()
        self._start, self._left = self._bounds()
        self.bad_blocks: list[int] = []

    def _bounds(self) -> tuple[int, int]:
        start, end = block_range(self._block, self._file.size, self._file.block)
        return start, end - start

    def __call__(self, view: memoryview) -> None:
        """Take the next bytes."""
        while len(view) >= self._left > 0:
            self._hasher.update(view[: self._left])
            if self._hasher.digest() != self._file.sum_of(self._block):
                self.bad_blocks.append(self._block)
            view = view[self._left :]
            self._block += 1
            self._hasher = BlockHasher()
            self._start, self._left = self._bounds()
        if len(view):
            self._hasher.update(view)
            self._left -= len(view)


class Fetcher:
    """Reads the data files of one manifest.

    Args:
        backend: where from.
        manifest: already checked.
        memories: byte views of the landing targets, by number.
        read_bytes: bytes of one read.
        verify: whether blocks are compared.
        on_read: told the bytes of each read.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        memories: Sequence[memoryview],
        *,
        read_bytes: int,
        verify: bool = True,
        on_read: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._backend = backend
        self._manifest = manifest
        self._memories = memories
        self._read_bytes = read_bytes
        self._verify = verify
        self._on_read = on_read
        self._placed = pieces_by_file(manifest)
        self._remote = backend.traits.scope == "shared" and not backend.url.startswith("file:")
        self._reading = Limiter("read", backend.traits.block_reads)

    async def fetch_file(self, index: int, landings: Sequence[Landing]) -> None:
        """Fill the targets of *landings* (sorted, not overlapping) from file number *index*.

        Raises:
            CorruptionError: the file is missing, has another size or header, or a block is not what was saved.
        """
        file = self._manifest.files[index]
        reader, header_bytes = await self._open(index, file)
        if self._verify and not (landings and landings[0].start < header_bytes):
            landings = [Landing(0, header_bytes, GAP, 0), *landings]  # its blocks are verified like all others
        try:
            reads = plan_reads(
                landings,
                file.size,
                block_bytes=file.block,
                read_bytes=max(self._read_bytes // file.block, 1) * file.block,
                whole_blocks=self._verify,
            )
            async with open_tasks() as tasks:
                for read in reads:
                    await self._reading.__aenter__()
                    tasks.start_soon(self._read, reader, index, file, read)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()

    async def verify_file(self, index: int) -> None:
        """Read and compare every block of file number *index*."""
        await self.fetch_file(index, [Landing(0, self._manifest.files[index].size, GAP, 0)])

    async def _open(self, index: int, file: FileEntry) -> tuple[Reader, int]:
        """Open a file whose size and header agree with the manifest; return it and the bytes of its header."""
        key = self._key(file)
        try:
            reader = await self._backend.open(key)
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{key} is missing: {error}", key=key) from error
        try:
            if reader.size != file.size:
                raise CorruptionError(f"{key}: {reader.size} bytes in storage, {file.size} were saved", key=key)
            try:
                return reader, await self._check_header(reader, index, file)
            except CorruptionError as error:
                if not self._remote:
                    raise
                logger.warning("%s; it is read once more", error)
                return reader, await self._check_header(reader, index, file)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await reader.close()
            raise

    async def _check_header(self, reader: Reader, index: int, file: FileEntry) -> int:
        length = bytearray(8)
        await self._fill(reader, file, 0, memoryview(length))
        header_bytes = 8 + int.from_bytes(length, "little")
        if header_bytes > min(file.size, MAX_HEADER_BYTES):
            key = self._key(file)
            raise CorruptionError(f"{key}: its header says {header_bytes} bytes, which it cannot have", key=key)
        prefix = bytearray(header_bytes)
        await self._fill(reader, file, 0, memoryview(prefix))
        try:
            check_header(index, self._manifest, decode_header(bytes(prefix), file.size), self._placed[index])
        except CorruptionError as error:
            raise CorruptionError(f"{self._key(file)}: {error}", key=self._key(file), offset=0) from error
        return header_bytes

    async def _fill(self, reader: Reader, file: FileEntry, offset: int, into: memoryview) -> None:
        if offset + len(into) > file.size:
            key = self._key(file)
            raise CorruptionError(f"{key}: {file.size} bytes are too few for a header", key=key)
        await reader.read(offset, [into])

    async def _read(self, reader: Reader, index: int, file: FileEntry, read: BlockRead) -> None:
        try:
            into = [self._memory(segment.target, segment.target_offset, segment.size) for segment in read.segments]
            try:
                bad_block = await self._read_checked(reader, file, read.offset, into)
            except StorageError as error:
                raise self._unreadable(file, read.offset, error) from error
            if bad_block is not None:
                raise self._corruption(index, file, bad_block)
        finally:
            await self._reading.__aexit__()
        self._on_read(read.size)

    async def _read_checked(
        self, reader: Reader, file: FileEntry, offset: int, into: Sequence[memoryview]
    ) -> int | None:
        """Fill *into* from *offset*; return the first block that is not what was saved, if there is one."""
        if not self._verify:
            await reader.read(offset, into)
            return None
        check = BlockCheck(file, offset)
        await reader.read(offset, into, check)
        for block in check.bad_blocks:
            if not self._remote:
                return block
            logger.warning("%s: block %d came damaged and is read once more", self._key(file), block)
            start, end = block_range(block, file.size, file.block)
            again = BlockCheck(file, start)
            await reader.read(start, cut_views(into, start - offset, end - offset), again)
            if again.bad_blocks:
                return block
        return None

    def _unreadable(self, file: FileEntry, offset: int, error: StorageError) -> CheckpointError:
        """A device that cannot give the bytes back has lost them; any other trouble is not the checkpoint's fault."""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
            key = self._key(file)
            return CorruptionError(f"{key}: the device cannot read it at {offset}: {error}", key=key, offset=offset)
        return error

    def _memory(self, target: int, offset: int, size: int) -> memoryview:
        if target == GAP:
            return memoryview(bytearray(size))
        return self._memories[target][offset : offset + size]

    def _corruption(self, index: int, file: FileEntry, block: int) -> CorruptionError:
        start, end = block_range(block, file.size, file.block)
        names = [name for name, piece in self._placed[index] if piece.start < end and start < piece.end]
        key = self._key(file)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return CorruptionError(
            f"{key}: block {block} (bytes {start}–{end}) is not what was saved; it holds {shown or 'the header'}. "
            "Load another step, or another copy of this one.",
            key=key,
            offset=start,
            tensors=names,
        )

    def _key(self, file: FileEntry) -> str:
        return f"{self._manifest.id}/{file.p}"
