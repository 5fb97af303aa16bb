"""What does a copy of a step consist of? All of it, as it is, or its weights in files of their own.

Guarantees: whatever is copied, each block that is read is compared with its checksum, and one that a copy cannot give is
read from the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import anyio
import msgspec
import numpy as np

from aiockpt.errors import CheckpointError, CorruptionError, UsageError
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.options import Content
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.fetch import BlockCheck
from aiockpt.planning.passes import Landing
from aiockpt.planning.read_plan import GAP, plan_reads
from aiockpt.planning.weights import WeightsPlan, plan_weights
from aiockpt.planning.write_plan import HEADER
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Reader
from aiockpt.storage.views import cut_views


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
            CorruptionError, StorageError: no copy has them; what the nearest one met.
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
        files: its data files: where they should lie, and all else but the sums that only the copy will tell.
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
