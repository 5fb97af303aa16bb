"""Verified reading of stored bytes into memory: ranged reads straight into place, each block hashed while it is in cache.

Guarantees:

- Every block that is read is compared with the manifest's checksum before ``fetch_file`` returns; a difference raises
  `CorruptionError` naming file, block, offset and tensors. Memory that was filled before is then partly overwritten.
- No fetch of a file ends well unless its size and its safetensors header agree with the manifest. The header is compared
  as it comes with its blocks; where blocks are not compared, it is read and compared before anything else of the file.
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
import numpy as np

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StorageTransferError,
)
from aiockpt.format.document import MEMO_BYTES, MEMO_PIECES, BlockHasher, Memo, block_range
from aiockpt.format.manifest import FileEntry, Manifest, TensorEntry, has_table
from aiockpt.format.names import list_names
from aiockpt.format.safetensors import MAX_HEADER_BYTES, decode_header, header_size
from aiockpt.format.validate import Placed, check_header, pieces_by_file
from aiockpt.pipeline.discover import StepCopy
from aiockpt.planning.read_plan import GAP, Landing, Segment, plan_reads
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.stages import UNREPORTED, Stages, StageTally
from aiockpt.storage.backend import Backend, Reader
from aiockpt.storage.transfer import cut_views

logger = logging.getLogger("aiockpt")


HEADER = -2
"""The target of a landing that is the header."""
LIKELY_HEADER_BYTES = 64 << 10
"""Read at first of a file whose blocks are not compared: most headers are shorter, and need no second round trip."""
HEADERS_KEPT = 4
"""Headers that a process remembers: a state has weights and the rest in two files at least."""
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

    def __init__(self, file: FileEntry, offset: int, now_ns: Callable[[], int] = UNREPORTED.now_ns) -> None:
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


_agreed: Memo[tuple[bytes, int, int, Mapping[str, TensorEntry]], bool] = Memo(HEADERS_KEPT)
"""The last headers that agreed with their manifest: the header, the file's size and number, and all tensors."""

Elsewhere = Callable[[], Awaitable[Sequence[StepCopy]]]
"""Finds the other copies of a save."""


async def _nowhere() -> Sequence[StepCopy]:
    return ()


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
        verify: whether blocks are compared; if not, the header of each file is, before anything of it is read.
        now_ns: the monotonic time, from any thread.
    """

    def __init__(
        self,
        here: StepCopy,
        elsewhere: Elsewhere = _nowhere,
        *,
        verify: bool = True,
        now_ns: Callable[[], int] = UNREPORTED.now_ns,
    ) -> None:
        self._copies = [here]
        self._manifest = here.manifest
        self._elsewhere: Elsewhere | None = elsewhere
        self._verify = verify
        self._now_ns = now_ns
        # msgspec decodes with the GIL held: more threads would only take turns with each other and the loop.
        self._decoding = Limiter("header", 1)
        self._searching = anyio.Lock()
        self._opened: dict[tuple[int, int], Reader | CheckpointError] = {}
        self._opening: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        self._logged: set[tuple[int, int]] = set()

    @cached_property
    def _starts(self) -> Mapping[int, int]:
        """Where the first piece of each file begins; nothing where pieces are in a table, too long to be walked."""
        starts: dict[int, int] = {}
        for entry in () if has_table(self._manifest.tensors) else self._manifest.tensors.values():
            for piece in entry.pieces:
                if piece.start < starts.get(piece.file, piece.start + 1):
                    starts[piece.file] = piece.start
        return starts

    @cached_property
    def _placed(self) -> Sequence[Sequence[Placed]]:
        return pieces_by_file(self._manifest)

    @classmethod
    def of_copies(cls, copies: Sequence[StepCopy]) -> StepFiles:
        """Return the files of a step that is in *copies*, the nearest first, for a caller that reads all of them."""

        async def others() -> Sequence[StepCopy]:
            return copies[1:]

        return cls(copies[0], others)

    def header_span(self, index: int) -> int:
        """Return how many bytes of file number *index* hold its header: those before its first piece, at most."""
        size, start = self._manifest.files[index].size, self._starts.get(index)
        if start is None:
            start = self._placed[index][0][1].start if self._placed[index] else size
        return min(start, size, MAX_HEADER_BYTES)

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
        unit_bytes = _unit_bytes(file, read_bytes)
        for read in plan_reads(landings, file.size, block_bytes=file.block, read_bytes=unit_bytes, whole_blocks=True):
            await self.read(index, read.offset, _targets(read.segments, memories, memoryview(b"")))

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
        file, reader = self._manifest.files[index], await self._open(number, index)
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

    async def _open(self, number: int, index: int) -> Reader:
        """Open a file of one copy, whose size agrees with the manifest, and its header where blocks are not compared."""
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

    async def _open_checked(self, number: int, index: int) -> Reader:
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
            if not self._verify:
                await self._check_header_alone(reader, key, index)
        except BaseException:
            # The reader is not in `_opened` yet, so `release` would not close it.
            with anyio.CancelScope(shield=True):
                await reader.close()
            raise
        return reader

    async def _check_header_alone(self, reader: Reader, key: str, index: int) -> None:
        """Read the header of a file, and compare it with the manifest; once more where it differs."""
        size = self._manifest.files[index].size
        for tries_left in (1, 0):
            prefix = await _read_start(reader, key, min(size, LIKELY_HEADER_BYTES))
            header_bytes = min(header_size(prefix), size, MAX_HEADER_BYTES)
            if header_bytes > len(prefix):
                prefix = await _read_start(reader, key, header_bytes)
            try:
                await self.check_header(index, prefix)
                break
            except CorruptionError as error:
                if not tries_left:
                    raise
                logger.warning("%s; it is read once more", error)

    async def check_header(self, index: int, start: bytearray) -> None:
        """Raise `CorruptionError` unless the header at the *start* of file number *index* agrees with the manifest."""
        key, header = self._key(0, index), bytes(memoryview(start)[: header_size(start)])
        try:
            await run_blocking(self._decoding, self._compare_header, index, header)
        except CorruptionError as error:
            raise CorruptionError(f"{key}: {error}", key=key, offset=0) from error

    def _compare_header(self, index: int, prefix: bytes) -> None:
        """Runs on a worker thread: a header that is padded to a block takes 20 ms; the loop starts reads meanwhile."""
        size, tensors = self._manifest.files[index].size, self._manifest.tensors
        question = (prefix, size, index, tensors)
        if not has_table(tensors) and _agreed.recall(question):
            return
        placed = self._placed[index]
        check_header(index, self._manifest, decode_header(prefix, size), placed)
        if not has_table(tensors) and len(prefix) <= MEMO_BYTES and len(placed) <= MEMO_PIECES:
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
                if not isinstance(opened, CheckpointError):
                    await opened.close()

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
        read_bytes: bytes of one read.
        verify: whether blocks are compared.
        on_read: called with the bytes of each read.
        elsewhere: finds other copies of the same save; called when a block or a file cannot be read here.
        stages: of the load, if it is traced: it has a stage "read" for each file.
        keep_open: files stay open until `close`, for many fetches from each.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        *,
        read_bytes: int,
        verify: bool = True,
        on_read: Callable[[int], object] = lambda _: None,
        elsewhere: Elsewhere = _nowhere,
        stages: Stages = UNREPORTED,
        keep_open: bool = False,
    ) -> None:
        self._manifest = manifest
        self._files = StepFiles(StepCopy(backend, manifest), elsewhere, verify=verify, now_ns=stages.now_ns)
        self._read_bytes = read_bytes
        self._verify = verify
        self._on_read = on_read
        self._reading = Limiter("read", backend.traits.block_reads)
        self._stages = stages
        self._keep_open = keep_open
        self._headers_seen: set[int] = set()

    async def fetch(self, landings: Mapping[int, Sequence[Landing]], memories: Sequence[memoryview]) -> None:
        """Fill the targets of one pass, all files at once; raises as `fetch_file`."""
        async with open_tasks() as tasks:
            for index, some in landings.items():
                tasks.start_soon(self.fetch_file, index, some, memories)

    async def fetch_file(self, index: int, landings: Sequence[Landing], memories: Sequence[memoryview]) -> None:
        """Fill the targets of *landings* (sorted, not overlapping) from file number *index*.

        Args:
            memories: byte views of the targets, by number.

        Raises:
            CorruptionError: the file is missing, has another size or header, or a block whose checksum differs.
        """
        with self._stages.time("read", self._manifest.files[index].p) as tally:
            try:
                await self._fetch_file(index, landings, memories, tally)
            finally:
                if not self._keep_open:
                    await self._files.release(index)

    async def _fetch_file(
        self, index: int, landings: Sequence[Landing], memories: Sequence[memoryview], tally: StageTally
    ) -> None:
        file, header = self._manifest.files[index], self._unseen_header(index)
        if header:
            landings = [Landing(0, len(header), HEADER, 0), *landings]  # its blocks are verified like all others
        unit_bytes = _unit_bytes(file, self._read_bytes)
        reads = plan_reads(
            landings, file.size, block_bytes=file.block, read_bytes=unit_bytes, whole_blocks=self._verify
        )
        async with open_tasks() as tasks:
            for read in reads:
                # Before the gaps are allocated, so that their memory is limited. `_read` always releases it: anyio
                # cancels no task before its first step.
                await self._reading.__aenter__()
                into = _targets(read.segments, memories, memoryview(header))
                tasks.start_soon(self._read, index, read.offset, into, tally)
        if header:
            await self._files.check_header(index, header)

    def _unseen_header(self, index: int) -> bytearray:
        """Return memory for the header of a file, which comes with the first bytes of it; empty where it needs not."""
        if not self._verify or index in self._headers_seen:
            return bytearray()
        self._headers_seen.add(index)
        return bytearray(self._files.header_span(index))

    async def fetch_span(self, index: int, offset: int, into: memoryview, *, header: bool = False) -> None:
        """Fill *into* with consecutive whole blocks of file number *index*, which stays open until `close`.

        Args:
            offset: a block boundary.
            header: compare the blocks of the file's header, too; needed once for each file.

        Raises:
            CorruptionError: as `fetch_file`.
        """
        file = self._manifest.files[index]
        unit = _unit_bytes(file, self._read_bytes)
        start = self._unseen_header(index) if header else bytearray()
        # The header's blocks before *offset*; all of them, where the rest of it does not lie within *into*.
        before = len(start) if offset + len(into) < len(start) else min(len(start), offset)
        blocks = memoryview(bytearray(min(-(-before // file.block) * file.block, file.size)))
        reads = [(offset + at, into[at : at + unit]) for at in range(0, len(into), unit)]
        reads += [(at, blocks[at : at + unit]) for at in range(0, len(blocks), unit)]
        async with open_tasks() as tasks:
            for first, memory in reads:
                await self._reading.__aenter__()
                tasks.start_soon(self._read, index, first, [memory], StageTally())
        if start:
            start[:before] = blocks[:before]
            if before < len(start):
                start[before:] = into[before - offset : len(start) - offset]
            await self._files.check_header(index, start)

    async def close(self) -> None:
        """Close the files that are kept open."""
        await self._files.close()

    async def verify_file(self, index: int) -> None:
        """Read and compare every block of file number *index*."""
        start, size = self._files.header_span(index) if self._verify else 0, self._manifest.files[index].size
        await self.fetch_file(index, [Landing(start, size, GAP, 0)] if size > start else [], ())

    async def _read(self, index: int, offset: int, into: Sequence[memoryview], tally: StageTally) -> None:
        try:
            tally.hash_ns += await self._files.read(index, offset, into)
        finally:
            await self._reading.__aexit__()
        size = sum(map(len, into))
        tally.bytes += size
        self._on_read(size)


def _unit_bytes(file: FileEntry, read_bytes: int) -> int:
    """Return the bytes of one read: whole blocks."""
    return max(read_bytes // file.block, 1) * file.block


def _targets(segments: Sequence[Segment], memories: Sequence[memoryview], header: memoryview) -> list[memoryview]:
    """Return the memory for one read: parts of the targets and of *header*, and new memory for the gaps between them."""
    return [
        np.empty(segment.size, np.uint8).data  # untouched: a bytearray is zeroed here, with the GIL
        if segment.target == GAP
        else _part(header if segment.target == HEADER else memories[segment.target], segment)
        for segment in segments
    ]


def _part(memory: memoryview, segment: Segment) -> memoryview:
    start, size = segment.target_offset, segment.size
    return memory if size == len(memory) else memory[start : start + size]


def _as_damage(key: str, offset: int, error: StorageError) -> CheckpointError:
    """Return `CorruptionError` for bytes that are lost for good; any other *error* is no damage, and returned itself."""
    if not error.damaged:
        return error
    return CorruptionError(f"{key} cannot be read at {offset}: {error}", key=key, offset=offset)
