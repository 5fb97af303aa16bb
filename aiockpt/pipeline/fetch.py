"""Verified reading of stored bytes into memory: ranged reads straight into place, each block hashed while it is in cache.

Guarantees:

- Every block that is read is compared with the manifest's checksum before ``fetch_file`` returns; a difference raises
  `CorruptionError` naming file, block, offset and tensors. Memory that was filled before is then partly overwritten.
- Nothing of a file is read before its size and its safetensors header agree with the manifest.
- What is not what was saved may have been damaged on its way: it is read once more, that block or header alone, before it
  counts as corruption.
- A block, or a file, that cannot be had here is then read from another copy of the same save, where there is one.
- Memory beyond the targets: the gaps of the reads under way.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import anyio
import msgspec
import numpy as np

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StorageTransferError,
    UsageError,
)
from aiockpt.format.checksum import BlockHasher, block_range
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.names import list_names
from aiockpt.format.safetensors import MAX_HEADER_BYTES, decode_header
from aiockpt.format.validate import check_header, pieces_by_file
from aiockpt.options import Content
from aiockpt.pipeline.discover import StepCopy
from aiockpt.planning.passes import Landing
from aiockpt.planning.read_plan import GAP, plan_reads
from aiockpt.planning.weights import WeightsPlan, plan_weights
from aiockpt.planning.write_plan import HEADER
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.stages import UNTOLD, Stages, StageTally
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Reader
from aiockpt.storage.transfer import cut_views

logger = logging.getLogger("aiockpt")


TIMED_BYTES = 1 << 15
"""Shorter runs of bytes are hashed in the time that two looks at the clock take."""


class BlockCheck:
    """Compares a run of consecutive bytes of one file with its checksums, while the bytes arrive.

    Args:
        file: the file's manifest entry.
        offset: where the run starts; a block boundary.
        now_ns: the monotonic time, from any thread.

    Attributes:
        bad_blocks: those that are not what was saved.
        seen_bytes: how many bytes were compared or are about to be.
        hash_ns: how long was hashed; runs of less than `TIMED_BYTES` are not counted.
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
        self.seen_bytes += len(view)
        if len(view) < TIMED_BYTES:
            self._compare(view)
            return
        begun_ns = self._now_ns()
        self._compare(view)
        self.hash_ns += self._now_ns() - begun_ns

    def check_complete(self, into: Sequence[memoryview]) -> None:
        """Raise `StorageTransferError` unless as many bytes were seen as fill *into*: others were compared with nothing."""
        if self.seen_bytes != (wanted := sum(map(len, into))):
            raise StorageTransferError(f"{self._file.p}: {wanted:,} bytes were asked for, {self.seen_bytes:,} came")

    def _compare(self, view: memoryview) -> None:
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
        on_read: called with the bytes of each read.
        elsewhere: finds other copies of the same save; called when a block or a file cannot be had here.
        stages: of the load, if it is watched: it has a stage "read" for each file.
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
        elsewhere: Callable[[], Awaitable[Sequence[StepCopy]]] | None = None,
        stages: Stages = UNTOLD,
    ) -> None:
        self._here = StepCopy(backend, manifest)
        self._manifest = manifest
        self._memories = memories
        self._read_bytes = read_bytes
        self._verify = verify
        self._on_read = on_read
        self._placed = pieces_by_file(manifest)
        self._reading = Limiter("read", backend.traits.block_reads)
        self._decoding = Limiter("header", 1)
        self._opening = anyio.Lock()
        self._elsewhere = elsewhere
        self._stages = stages
        self._others: Sequence[StepCopy] | None = None
        self._asking = anyio.Lock()
        self._kept: dict[int, tuple[Reader, int]] = {}

    async def fetch(self, landings: Mapping[int, Sequence[Landing]]) -> None:
        """Fill the targets of one pass, all files at once; raises as `fetch_file`."""
        async with open_tasks() as tasks:
            for index, some in landings.items():
                tasks.start_soon(self.fetch_file, index, some)

    async def fetch_file(self, index: int, landings: Sequence[Landing]) -> None:
        """Fill the targets of *landings* (sorted, not overlapping) from file number *index*.

        Raises:
            CorruptionError: the file is missing, has another size or header, or a block is not what was saved.
        """
        file = self._manifest.files[index]
        with self._stages.time("read", file.p) as told:
            await self._fetch_file(index, landings, told)

    async def _fetch_file(self, index: int, landings: Sequence[Landing], told: StageTally) -> None:
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
                    into = [
                        self._memory(segment.target, segment.target_offset, segment.size) for segment in read.segments
                    ]
                    tasks.start_soon(self._read, reader, index, read.offset, into, told)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()

    async def fetch_span(self, index: int, offset: int, into: memoryview, *, header: bool = False) -> None:
        """Fill *into* with consecutive whole blocks of file number *index*, which stays open until `close`.

        Args:
            offset: a block boundary.
            header: compare the blocks of the file's header, too; needed once for each file.

        Raises:
            CorruptionError: as `fetch_file`.
        """
        block = self._manifest.files[index].block
        reader, header_bytes = await self._keep_open(index)
        unit = max(self._read_bytes // block, 1) * block
        reads = [(offset + at, into[at : at + unit]) for at in range(0, len(into), unit)]
        if header and self._verify and offset:
            reads.insert(0, (0, memoryview(bytearray(min(-(-header_bytes // block) * block, offset)))))
        async with open_tasks() as tasks:
            for start, memory in reads:
                await self._reading.__aenter__()
                tasks.start_soon(self._read, reader, index, start, [memory], StageTally())

    async def _keep_open(self, index: int) -> tuple[Reader, int]:
        async with self._opening:
            if index not in self._kept:
                self._kept[index] = await self._open(index, self._manifest.files[index])
            return self._kept[index]

    async def close(self) -> None:
        """Close the files that `fetch_span` keeps open."""
        with anyio.CancelScope(shield=True):
            while self._kept:
                await self._kept.popitem()[1][0].close()

    async def verify_file(self, index: int) -> None:
        """Read and compare every block of file number *index*."""
        await self.fetch_file(index, [Landing(0, self._manifest.files[index].size, GAP, 0)])

    async def _open(self, index: int, file: FileEntry) -> tuple[Reader, int]:
        """Open a file whose size and header agree with the manifest; return it and the bytes of its header."""
        try:
            return await self._open_copy(self._here, index)
        except (CorruptionError, StorageError) as error:
            for other in await self._other_copies():
                with suppress(CorruptionError, StorageError):
                    opened = await self._open_copy(other, index)
                    logger.warning("%s is read from %s: %s", self._key(file), other.backend.url, error)
                    return opened
            raise

    async def _open_copy(self, copy: StepCopy, index: int) -> tuple[Reader, int]:
        file = copy.manifest.files[index]
        key = self._key(file)
        try:
            reader = await copy.backend.open(key)
        except ObjectNotFoundError as error:
            raise CorruptionError(f"{key} is missing: {error}", key=key) from error
        except StorageError as error:
            raise _as_damage(key, 0, error) from error
        try:
            if reader.size != file.size:
                raise CorruptionError(f"{key}: {reader.size} bytes in storage, {file.size} were saved", key=key)
            try:
                return reader, await self._check_header(reader, index, file)
            except CorruptionError as error:
                logger.warning("%s; it is read once more", error)
                return reader, await self._check_header(reader, index, file)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await reader.close()
            raise

    async def _other_copies(self) -> Sequence[StepCopy]:
        """Return the other copies, searched for once."""
        if self._elsewhere is None:
            return ()
        async with self._asking:
            if self._others is None:
                self._others = await self._elsewhere()
            return self._others

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
            await run_blocking(self._decoding, self._compare_header, index, bytes(prefix))
        except CorruptionError as error:
            raise CorruptionError(f"{self._key(file)}: {error}", key=self._key(file), offset=0) from error
        return header_bytes

    def _compare_header(self, index: int, prefix: bytes) -> None:
        """On a worker thread: a header that is padded to a block takes 20 ms, in which the loop could start reads."""
        header = decode_header(prefix, self._manifest.files[index].size)
        check_header(index, self._manifest, header, self._placed[index])

    async def _fill(self, reader: Reader, file: FileEntry, offset: int, into: memoryview) -> None:
        if offset + len(into) > file.size:
            key = self._key(file)
            raise CorruptionError(f"{key}: {file.size} bytes are too few for a header", key=key)
        try:
            await reader.read(offset, [into])
        except StorageError as error:
            raise _as_damage(self._key(file), offset, error) from error

    async def _read(
        self, reader: Reader, index: int, offset: int, into: Sequence[memoryview], told: StageTally
    ) -> None:
        try:
            try:
                told.hash_ns += await self._read_checked(reader, index, offset, into)
            except (CorruptionError, StorageError) as error:
                await self._read_elsewhere(index, offset, into, error)
        finally:
            await self._reading.__aexit__()
        size = sum(map(len, into))
        told.bytes += size
        self._on_read(size)

    async def _read_checked(self, reader: Reader, index: int, offset: int, into: Sequence[memoryview]) -> int:
        """Fill *into* from *offset*; a block that came damaged is read once more. Return how long was hashed, in ns."""
        file = self._manifest.files[index]
        check = BlockCheck(file, offset, self._stages.now_ns) if self._verify else None
        try:
            await reader.read(offset, into, check)
            if check is not None:
                check.check_complete(into)
            for block in check.bad_blocks if check else ():
                logger.warning("%s: block %d came damaged and is read once more", self._key(file), block)
                start, end = block_range(block, file.size, file.block)
                again = BlockCheck(file, start)
                part = cut_views(into, start - offset, end - offset)
                await reader.read(start, part, again)
                again.check_complete(part)
                if again.bad_blocks:
                    raise self._corruption(index, file, block)
            return check.hash_ns if check else 0
        except StorageError as error:
            raise _as_damage(self._key(file), offset, error) from error

    async def _read_elsewhere(
        self, index: int, offset: int, into: Sequence[memoryview], error: CheckpointError
    ) -> None:
        """Read what one copy could not give from another one; raise *error* when none can."""
        for other in await self._other_copies():
            file = other.manifest.files[index]
            with suppress(CorruptionError, StorageError):
                reader = await other.backend.open(self._key(file))
                try:
                    await self._read_checked(reader, index, offset, into)
                finally:
                    with anyio.CancelScope(shield=True):
                        await reader.close()
                logger.warning("%s: bytes from %d on are read from %s", self._key(file), offset, other.backend.url)
                return
        raise error

    def _memory(self, target: int, offset: int, size: int) -> memoryview:
        if target == GAP:
            return memoryview(bytearray(size))
        memory = self._memories[target]
        return memory if size == len(memory) else memory[offset : offset + size]

    def _corruption(self, index: int, file: FileEntry, block: int) -> CorruptionError:
        start, end = block_range(block, file.size, file.block)
        names = [name for name, piece in self._placed[index] if piece.start < end and start < piece.end]
        key = self._key(file)
        return CorruptionError(
            f"{key}: block {block} (bytes {start}–{end}) is not what was saved; it holds "
            f"{list_names(names) or 'the header'}. Load another step, or another copy of this one.",
            key=key,
            offset=start,
            tensors=names,
        )

    def _key(self, file: FileEntry) -> str:
        return f"{self._manifest.id}/{file.p}"


def _as_damage(key: str, offset: int, error: StorageError) -> CheckpointError:
    """Return what to raise: bytes that cannot be had back are lost, and any other trouble is not the checkpoint's fault."""
    if not error.damaged:
        return error
    return CorruptionError(f"{key} cannot be read at {offset}: {error}", key=key, offset=offset)


# Sources of a copy: all of a step, as it is, or its weights in files of their own.
#
# Guarantees: whatever is copied, each block that is read is compared with its checksum, and one that a copy lacks is read
# from the next one.


class VerifiedBlocks:
    """Reads whole blocks of the files of one step, from the nearest copy that has them as they were saved.

    Args:
        sources: copies of the one attempt, the nearest first.
    """

    def __init__(self, sources: Sequence[StepCopy]) -> None:
        self._sources = sources
        self._readers: dict[tuple[int, int], Reader] = {}
        self._opening = anyio.Lock()

    async def read(self, index: int, offset: int, into: Sequence[memoryview]) -> None:
        """Fill *into* with consecutive blocks of file number *index*.

        Raises:
            CorruptionError, StorageError: no copy has them; the error is that of the nearest one.
        """
        try:
            await self._read_run(index, offset, into)
        except CheckpointError:
            size, block = sum(map(len, into)), self._sources[0].manifest.files[index].block
            if len(self._sources) == 1 or size <= block:
                raise
            for at in range(0, size, block):  # each copy may lack another block
                await self._read_run(index, offset + at, cut_views(into, at, min(at + block, size)))

    async def _read_run(self, index: int, offset: int, into: Sequence[memoryview]) -> None:
        """Fill *into* from the nearest copy that has all of it."""
        failure: CheckpointError | None = None
        for number, source in enumerate(self._sources):
            file = source.manifest.files[index]
            check = BlockCheck(file, offset)
            try:
                reader = await self._open(number, index)
                await reader.read(offset, into, check)
                check.check_complete(into)
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

    async def _open(self, number: int, index: int) -> Reader:
        async with self._opening:
            if (number, index) not in self._readers:
                source = self._sources[number]
                path = source.manifest.files[index].p
                self._readers[number, index] = await source.backend.open(f"{source.manifest.id}/{path}")
            return self._readers[number, index]

    async def close(self) -> None:
        """Close the files."""
        while self._readers:
            await self._readers.popitem()[1].close()


class CopySource(Protocol):
    """What is copied: a step to be, from copies of one.

    Attributes:
        sources: the copies it is made of, the nearest first.
        id, attempt: what it is called wherever it gets to.
        files: its data files: where they should lie, and all else but the sums, which only the copy finds.
        window_bytes: of one read and write; all windows of a file but the last have so many.
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

    async def read(self, blocks: VerifiedBlocks, index: int, offset: int, view: memoryview) -> None:
        """Fill *view*, a window or what is left of the file, with the bytes of file number *index* from *offset*."""

    def manifest(self, files: Sequence[FileEntry], generation: int, write_id: str) -> Manifest:
        """Return its manifest where *files* are durable; may take a while."""
        ...


class WholeStep:
    """All of a step, as it is."""

    def __init__(self, sources: Sequence[StepCopy], window_bytes: int) -> None:
        self.sources = sources
        self.window_bytes = window_bytes
        self._manifest = sources[0].manifest
        self.id, self.attempt, self.files = self._manifest.id, self._manifest.attempt, self._manifest.files

    async def read(self, blocks: VerifiedBlocks, index: int, offset: int, view: memoryview) -> None:
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
        self._whole = sources[0].manifest
        self._plan = plan
        self.window_bytes = window_bytes
        self.id, self.attempt = self._whole.id, plan.votes[0].attempt
        self.files = tuple(file.entry for file in plan.files)

    async def read(self, blocks: VerifiedBlocks, index: int, offset: int, view: memoryview) -> None:
        made = self._plan.files[index]
        window = made.plan.windows[offset // self.window_bytes]
        for copy in window.copies:
            if copy.source == HEADER:
                part = made.plan.header[copy.source_offset : copy.source_offset + copy.size]
                view[copy.window_offset : copy.window_offset + copy.size] = part
        for file, landings in made.landings(window).items():
            for some in _apart(landings):
                await self._fetch(blocks, file, some, view)

    async def _fetch(self, blocks: VerifiedBlocks, file: int, landings: Sequence[Landing], view: memoryview) -> None:
        """Fill what lands in *view*; what else is in the blocks is read too, to compare them."""
        stored = self._whole.files[file]
        reads = plan_reads(
            landings,
            stored.size,
            block_bytes=stored.block,
            read_bytes=max(self.window_bytes // stored.block, 1) * stored.block,
            whole_blocks=True,
        )
        for read in reads:
            into = [
                np.empty(segment.size, np.uint8).data  # untouched: a bytearray is zeroed here, with the GIL
                if segment.target == GAP
                else view[segment.target_offset : segment.target_offset + segment.size]
                for segment in read.segments
            ]
            await blocks.read(file, read.offset, into)

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
    """Return what is copied of the step that *sources* have.

    Args:
        window_bytes: the most that one read and write may take.
        file_bytes: where a data file that must be made ends.

    Raises:
        UsageError: it has no weights, or blocks larger than a window.
    """
    whole = sources[0].manifest
    largest = max(whole.files, key=lambda file: file.block, default=None)
    if largest is not None and largest.block > window_bytes:
        raise UsageError(
            f"{largest.p}: blocks of {largest.block:,} bytes, and windows of {window_bytes:,}: give "
            f"IO(read_bytes={largest.block})"
        )
    if largest is not None:
        window_bytes -= window_bytes % largest.block
    if content == "full":
        return WholeStep(sources, window_bytes)

    def plan() -> WeightsPlan:
        return plan_weights(whole, window_bytes=window_bytes, file_bytes=file_bytes)

    return WeightsOfStep(sources, await run_blocking(Limiter("plan weights", 1), plan), window_bytes)
