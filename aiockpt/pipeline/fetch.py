"""Verified reading of stored bytes into memory: ranged reads straight into place, each block hashed while it is in cache.

Guarantees:

- Every block that is read is compared with the manifest's checksum before ``fetch_file`` returns; a difference raises
  `CorruptionError` naming file, block, offset and tensors. Memory that was filled before is then partly overwritten.
- Nothing of a file is used before its size and its safetensors header agree with the manifest.
- A mismatch may be damage in transit: that block or header alone is read once more before it counts as corruption.
- A block, or a file, that cannot be read here is then read from another copy of the same save, where there is one.
- Memory beyond the targets: the gaps of the reads under way.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

import anyio
import msgspec
import numpy as np

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StorageTransferError,
)
from aiockpt.format.document import MEMO_BYTES, MEMO_PIECES, BlockHasher, Memo, block_range
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.names import list_names
from aiockpt.format.safetensors import MAX_HEADER_BYTES, decode_header
from aiockpt.format.validate import Placed, check_header, pieces_by_file
from aiockpt.pipeline.discover import StepCopy
from aiockpt.planning.read_plan import GAP, Landing, plan_reads
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.stages import UNTOLD, Stages, StageTally
from aiockpt.storage.backend import Backend, Reader
from aiockpt.storage.transfer import cut_views

logger = logging.getLogger("aiockpt")


LIKELY_HEADER_BYTES = 64 << 10
"""Read of each file at first: most headers are shorter, so that no second round trip to the storage is needed."""
TIMED_BYTES = 1 << 15
"""Shorter runs of bytes are hashed in the time that two reads of the clock take."""


class BlockCheck:
    """Compares a run of consecutive bytes of one file with its checksums, while the bytes arrive.

    Args:
        file: the file's manifest entry.
        offset: where the run starts; a block boundary.
        now_ns: the monotonic time, from any thread.

    Attributes:
        bad_blocks: those whose checksum differs.
        seen_bytes: how many bytes were compared or are about to be.
        hash_ns: the time of hashing; runs of less than `TIMED_BYTES` are not counted.
    """

    def __init__(self, file: FileEntry, offset: int, now_ns: Callable[[], int] = UNTOLD.now_ns) -> None:
        self._file = file
        self._now_ns = now_ns
        self._block = offset // file.block
        self._hasher = BlockHasher()
        self._start, self._left = self._bounds()
        self.bad_blocks: list[int] = []
        self.seen_bytes = 0
        self.hash_ns = 0

    def _bounds(self) -> tuple[int, int]:
        start, end = block_range(self._block, self._file.size, self._file.block)
        return start, end - start

    def __call__(self, view: memoryview) -> None:
        """Accept the next bytes."""
        size = len(view)
        self.seen_bytes += size
        begun_ns = self._now_ns() if size >= TIMED_BYTES else 0
        if size < self._left:  # as most of many small tensors
            self._hasher.update(view)
            self._left -= size
        else:
            self._compare(view)
        if begun_ns:
            self.hash_ns += self._now_ns() - begun_ns

    def check_complete(self, into: Sequence[memoryview]) -> None:
        """Raise `StorageTransferError` unless as many bytes were seen as fill *into*: unseen bytes were not compared."""
        if self.seen_bytes != (wanted := sum(map(len, into))):
            raise StorageTransferError(f"{self._file.p}: {wanted:,} bytes were requested, {self.seen_bytes:,} received")

    def _compare(self, view: memoryview) -> None:
        # Behind the last block of the file nothing is left: bytes there have no checksum; `check_complete` counts them.
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


_agreed: Memo[tuple[bytes, int, Sequence[Placed], list[str]], bool] = Memo()
"""The last header that agreed with its manifest: the header, the file's size, its pieces, and the dtype of each."""

Elsewhere = Callable[[], Awaitable[Sequence[StepCopy]]]
"""Finds the other copies of a save."""


async def _nowhere() -> Sequence[StepCopy]:
    return ()


class _OpenFile(msgspec.Struct, frozen=True, eq=False):
    """An open file, and the bytes of its header; 0 where that was not read."""

    reader: Reader
    header_bytes: int


async def _is_bad_again(reader: Reader, file: FileEntry, block: int, offset: int, into: Sequence[memoryview]) -> bool:
    """Read one block of *into*, which begins at *offset*, once more; return whether its checksum still differs."""
    start, end = block_range(block, file.size, file.block)
    again = BlockCheck(file, start)
    part = cut_views(into, start - offset, end - offset)
    await reader.read(start, part, again)
    again.check_complete(part)
    return bool(again.bad_blocks)


class StepFiles:
    """The data files of one step: each block is compared, and one that is lost here is read from another copy.

    Files stay open until `release` or `close`. A file that cannot be opened in a copy is not tried there again.

    Args:
        here: the copy that is read.
        elsewhere: finds other copies of the same save, the nearest first; called once, at the first failed read here.
        verify: whether blocks are compared.
        check_headers: whether the header of each file is compared with the manifest before anything of it is read.
        now_ns: the monotonic time, from any thread.
    """

    def __init__(
        self,
        here: StepCopy,
        elsewhere: Elsewhere = _nowhere,
        *,
        verify: bool = True,
        check_headers: bool = True,
        now_ns: Callable[[], int] = UNTOLD.now_ns,
    ) -> None:
        self._copies = [here]
        self._manifest = here.manifest
        self._elsewhere: Elsewhere | None = elsewhere
        self._verify = verify
        self._check_headers = check_headers
        self._now_ns = now_ns
        # msgspec decodes with the GIL held: more threads would only take turns with each other and the loop.
        self._decoding = Limiter("header", 1)
        self._searching = anyio.Lock()
        self._opened: dict[tuple[int, int], _OpenFile | CheckpointError] = {}
        self._opening: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        self._logged: set[tuple[int, int]] = set()

    @cached_property
    def _placed(self) -> Sequence[Sequence[Placed]]:
        return pieces_by_file(self._manifest)

    @classmethod
    def of_copies(cls, copies: Sequence[StepCopy]) -> StepFiles:
        """Return the files of a step that is in *copies*, the nearest first, for a caller that reads all of them."""

        async def others() -> Sequence[StepCopy]:
            return copies[1:]

        return cls(copies[0], others, check_headers=False)

    async def header_bytes(self, index: int) -> int:
        """Open file number *index*, and return the bytes of its header.

        Raises:
            CorruptionError, StorageError: as `read`.
        """
        try:
            return (await self._open(0, index)).header_bytes
        except (CorruptionError, StorageError) as error:
            for number in await self._others():
                with suppress(CorruptionError, StorageError):
                    opened = await self._open(number, index)
                    self._log_other(number, index, 0, error)
                    return opened.header_bytes
            raise

    async def read(self, index: int, offset: int, into: Sequence[memoryview]) -> int:
        """Fill *into* with consecutive whole blocks of file number *index*; return the time of hashing, in ns.

        Args:
            offset: a block boundary.

        Raises:
            CorruptionError, StorageError: no copy has them; the error is that of the nearest one.
        """
        try:
            return await self._read_from(0, index, offset, into)
        except (CorruptionError, StorageError) as error:
            others = await self._others()
            if not others:
                raise
            if not await self._read_from_any(others, index, offset, into, error):
                await self._read_each_block(index, offset, into, error)
            return 0

    async def fill(
        self, index: int, landings: Sequence[Landing], memories: Sequence[memoryview], read_bytes: int
    ) -> None:
        """Fill the targets of *landings* (sorted, not overlapping) in *memories*, read after read; raises as `read`.

        The rest of their blocks is read too, to compare the checksums.
        """
        file = self._manifest.files[index]
        unit_bytes = max(read_bytes // file.block, 1) * file.block
        for read in plan_reads(landings, file.size, block_bytes=file.block, read_bytes=unit_bytes, whole_blocks=True):
            into = [
                np.empty(segment.size, np.uint8).data  # untouched: a bytearray is zeroed here, with the GIL
                if segment.target == GAP
                else memories[segment.target][segment.target_offset : segment.target_offset + segment.size]
                for segment in read.segments
            ]
            await self.read(index, read.offset, into)

    async def _read_each_block(
        self, index: int, offset: int, into: Sequence[memoryview], error: CheckpointError
    ) -> None:
        """Read block by block what no copy has as a whole, as each may lack another; raise *error* for one all lack."""
        size, block = sum(map(len, into)), self._manifest.files[index].block
        if size <= block:
            raise error
        for at in range(0, size, block):
            part = cut_views(into, at, min(at + block, size))
            # From copy 0 on: its read of the whole run may have failed at another block only.
            if not await self._read_from_any(range(len(self._copies)), index, offset + at, part, error):
                raise error

    async def _read_from_any(
        self, numbers: Iterable[int], index: int, offset: int, into: Sequence[memoryview], error: CheckpointError
    ) -> bool:
        for number in numbers:
            with suppress(CorruptionError, StorageError):
                await self._read_from(number, index, offset, into)
                self._log_other(number, index, offset, error)
                return True
        return False

    async def _read_from(self, number: int, index: int, offset: int, into: Sequence[memoryview]) -> int:
        """Fill *into* from one copy; a damaged block is read once more."""
        file, reader = self._manifest.files[index], (await self._open(number, index)).reader
        check = BlockCheck(file, offset, self._now_ns) if self._verify else None
        key = self._key(number, index)
        try:
            await reader.read(offset, into, check)
            if check is None:
                return 0
            check.check_complete(into)
            for block in check.bad_blocks:
                logger.warning("%s: block %d does not match its checksum; it is read once more", key, block)
                if await _is_bad_again(reader, file, block, offset, into):
                    raise self._corruption(key, index, block)
        except StorageError as error:
            raise _as_damage(key, offset, error) from error
        return check.hash_ns

    async def _others(self) -> Sequence[int]:
        """Return the numbers of the other copies, which are searched for once."""
        async with self._searching:
            if self._elsewhere is not None:
                self._copies += await self._elsewhere()
                self._elsewhere = None
        return range(1, len(self._copies))

    async def _open(self, number: int, index: int) -> _OpenFile:
        """Open a file of one copy, whose size and header agree with the manifest."""
        if (number, index) not in self._opened:
            async with self._opening[index]:
                if (number, index) not in self._opened:
                    try:
                        self._opened[number, index] = await self._open_checked(number, index)
                    except (CorruptionError, StorageError) as error:
                        self._opened[number, index] = error
        opened = self._opened[number, index]
        if isinstance(opened, CheckpointError):
            raise opened
        return opened

    async def _open_checked(self, number: int, index: int) -> _OpenFile:
        file, key = self._manifest.files[index], self._key(number, index)
        try:
            reader = await self._copies[number].backend.open(key)
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{key} is missing: {error}", key=key) from error
        except StorageError as error:
            raise _as_damage(key, 0, error) from error
        try:
            if reader.size != file.size:
                raise CorruptionError(f"{key}: {reader.size} bytes in storage, {file.size} were saved", key=key)
            if not self._check_headers:
                return _OpenFile(reader, 0)
            try:
                return _OpenFile(reader, await self._check_header(reader, key, index))
            except CorruptionError as error:
                logger.warning("%s; it is read once more", error)
                return _OpenFile(reader, await self._check_header(reader, key, index))
        except BaseException:
            # The reader is not in `_opened` yet, so `release` would not close it.
            with anyio.CancelScope(shield=True):
                await reader.close()
            raise

    async def _check_header(self, reader: Reader, key: str, index: int) -> int:
        size = self._manifest.files[index].size
        if size < 8:
            raise CorruptionError(f"{key}: {size} bytes are too few for a header", key=key)
        prefix = await _read_start(reader, key, min(size, LIKELY_HEADER_BYTES))
        header_bytes = 8 + int.from_bytes(prefix[:8], "little")
        if header_bytes > min(size, MAX_HEADER_BYTES):
            raise CorruptionError(f"{key}: its header says {header_bytes} bytes, which it cannot have", key=key)
        if header_bytes > len(prefix):
            prefix = await _read_start(reader, key, header_bytes)
        try:
            await run_blocking(self._decoding, self._compare_header, index, bytes(prefix[:header_bytes]))
        except CorruptionError as error:
            raise CorruptionError(f"{key}: {error}", key=key, offset=0) from error
        return header_bytes

    def _compare_header(self, index: int, prefix: bytes) -> None:
        """Runs on a worker thread: a header that is padded to a block takes 20 ms; the loop starts reads meanwhile."""
        size, placed, tensors = self._manifest.files[index].size, self._placed[index], self._manifest.tensors
        question = (prefix, size, placed, [tensors[name].dtype for name, _ in placed])
        if _agreed.recall(question):
            return
        check_header(index, self._manifest, decode_header(prefix, size), placed)
        if len(prefix) <= MEMO_BYTES and len(placed) <= MEMO_PIECES:
            _agreed.remember(question, True)

    def _corruption(self, key: str, index: int, block: int) -> CorruptionError:
        file = self._manifest.files[index]
        start, end = block_range(block, file.size, file.block)
        names = [name for name, piece in self._placed[index] if piece.start < end and start < piece.end]
        return CorruptionError(
            f"{key}: block {block} (bytes {start}–{end}) is not what was saved; it holds "
            f"{list_names(names) or 'the header'}. Load another step, or another copy of this one.",
            key=key,
            offset=start,
            tensors=names,
        )

    def _key(self, number: int, index: int) -> str:
        manifest = self._copies[number].manifest
        return f"{manifest.id}/{manifest.files[index].p}"

    def _log_other(self, number: int, index: int, offset: int, error: CheckpointError) -> None:
        if number and (number, index) not in self._logged:
            self._logged.add((number, index))
            key, where = self._key(0, index), self._copies[number].backend.url
            logger.warning("%s: bytes from %d on are read from %s: %s", key, offset, where, error)

    async def release(self, index: int) -> None:
        """Close file number *index* in all copies."""
        with anyio.CancelScope(shield=True):
            for number, other in [place for place in self._opened if place[1] == index]:
                opened = self._opened.pop((number, other))
                if isinstance(opened, _OpenFile):
                    await opened.reader.close()

    async def close(self) -> None:
        """Close all files."""
        for index in {index for _, index in self._opened}:
            await self.release(index)


async def _read_start(reader: Reader, key: str, size: int) -> bytearray:
    into = bytearray(size)
    try:
        await reader.read(0, [memoryview(into)])
    except StorageError as error:
        raise _as_damage(key, 0, error) from error
    return into


class Fetcher:
    """Reads the data files of one manifest into memories, a few runs at once.

    Args:
        backend: where from.
        manifest: already checked.
        memories: byte views of the landing targets, by number.
        read_bytes: bytes of one read.
        verify: whether blocks are compared.
        on_read: called with the bytes of each read.
        elsewhere: finds other copies of the same save; called when a block or a file cannot be read here.
        stages: of the load, if it is traced: it has a stage "read" for each file.
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
        elsewhere: Elsewhere = _nowhere,
        stages: Stages = UNTOLD,
    ) -> None:
        self._manifest = manifest
        self._files = StepFiles(StepCopy(backend, manifest), elsewhere, verify=verify, now_ns=stages.now_ns)
        self._memories = memories
        self._read_bytes = read_bytes
        self._verify = verify
        self._on_read = on_read
        self._reading = Limiter("read", backend.traits.block_reads)
        self._stages = stages

    async def fetch(self, landings: Mapping[int, Sequence[Landing]]) -> None:
        """Fill the targets of one pass, all files at once; raises as `fetch_file`."""
        async with open_tasks() as tasks:
            for index, some in landings.items():
                tasks.start_soon(self.fetch_file, index, some)

    async def fetch_file(self, index: int, landings: Sequence[Landing]) -> None:
        """Fill the targets of *landings* (sorted, not overlapping) from file number *index*.

        Raises:
            CorruptionError: the file is missing, has another size or header, or a block whose checksum differs.
        """
        with self._stages.time("read", self._manifest.files[index].p) as tally:
            try:
                await self._fetch_file(index, landings, tally)
            finally:
                await self._files.release(index)

    async def _fetch_file(self, index: int, landings: Sequence[Landing], tally: StageTally) -> None:
        file, header_bytes = self._manifest.files[index], await self._files.header_bytes(index)
        if self._verify and not (landings and landings[0].start < header_bytes):
            landings = [Landing(0, header_bytes, GAP, 0), *landings]  # its blocks are verified like all others
        reads = plan_reads(
            landings,
            file.size,
            block_bytes=file.block,
            read_bytes=self._unit_bytes(index),
            whole_blocks=self._verify,
        )
        async with open_tasks() as tasks:
            for read in reads:
                # Before the gaps are allocated, so that their memory is limited. `_read` always releases it: anyio
                # cancels no task before its first step.
                await self._reading.__aenter__()
                into = [self._memory(segment.target, segment.target_offset, segment.size) for segment in read.segments]
                tasks.start_soon(self._read, index, read.offset, into, tally)

    async def fetch_span(self, index: int, offset: int, into: memoryview, *, header: bool = False) -> None:
        """Fill *into* with consecutive whole blocks of file number *index*, which stays open until `close`.

        Args:
            offset: a block boundary.
            header: compare the blocks of the file's header, too; needed once for each file.

        Raises:
            CorruptionError: as `fetch_file`.
        """
        block, unit = self._manifest.files[index].block, self._unit_bytes(index)
        header_bytes = await self._files.header_bytes(index)
        reads = [(offset + at, into[at : at + unit]) for at in range(0, len(into), unit)]
        # At offset 0 the span has the header's block itself; elsewhere its first block may be the header's last one.
        if header and self._verify and offset:
            reads.insert(0, (0, memoryview(bytearray(min(-(-header_bytes // block) * block, offset)))))
        async with open_tasks() as tasks:
            for start, memory in reads:
                await self._reading.__aenter__()
                tasks.start_soon(self._read, index, start, [memory], StageTally())

    async def close(self) -> None:
        """Close the files that `fetch_span` keeps open."""
        await self._files.close()

    async def verify_file(self, index: int) -> None:
        """Read and compare every block of file number *index*."""
        await self.fetch_file(index, [Landing(0, self._manifest.files[index].size, GAP, 0)])

    def _unit_bytes(self, index: int) -> int:
        """Return the bytes of one read: whole blocks."""
        block = self._manifest.files[index].block
        return max(self._read_bytes // block, 1) * block

    async def _read(self, index: int, offset: int, into: Sequence[memoryview], tally: StageTally) -> None:
        try:
            tally.hash_ns += await self._files.read(index, offset, into)
        finally:
            await self._reading.__aexit__()
        size = sum(map(len, into))
        tally.bytes += size
        self._on_read(size)

    def _memory(self, target: int, offset: int, size: int) -> memoryview:
        if target == GAP:
            return memoryview(bytearray(size))
        memory = self._memories[target]
        return memory if size == len(memory) else memory[offset : offset + size]


def _as_damage(key: str, offset: int, error: StorageError) -> CheckpointError:
    """Return `CorruptionError` for bytes that are lost for good; any other *error* is no damage, and returned itself."""
    if not error.damaged:
        return error
    return CorruptionError(f"{key} cannot be read at {offset}: {error}", key=key, offset=offset)
