"""Reading of the tensors of a step in any order, range by range, each block verified.

Guarantees:

- Tensors come out whole, however they were sharded; every block that is read is compared with its checksum.
- A block that one tier cannot deliver is read from the next one.
- Files stay open, and each header is verified once. A block that two ranges share is read for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiockpt.engine.place import Place
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.pipeline.scatter import Places
from aiockpt.planning.read_plan import GAP, BlockRead, Landing, plan_reads
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import TensorShard


class Slices:
    """Reads parts of the tensors of one step; `close` it.

    Args:
        place: that has the step.
        manifest: already checked.
    """

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._engine = place.engine
        self._manifest = manifest
        self._read_bytes = place.engine.options.io.read_bytes
        self._fetcher = Fetcher(
            place.backend,
            manifest,
            (),
            read_bytes=self._read_bytes,
            elsewhere=partial(place.other_copies, manifest),
        )
        self._headers_seen: set[int] = set()

    async def fill(self, wanted: Sequence[TensorShard]) -> None:
        """Fill the memory of *wanted*.

        Raises:
            CorruptionError: a block is not what was saved.
        """
        places = await run_blocking(self._engine.state_work, Places, self._manifest, wanted)
        for landings in places.plan.passes:
            async with open_tasks() as tasks:
                for index, some in landings.items():
                    tasks.start_soon(self._fill_from, index, some, places.memories)
        await run_blocking(self._engine.state_work, places.settle)

    async def _fill_from(self, index: int, landings: Sequence[Landing], memories: Sequence[memoryview]) -> None:
        file = self._manifest.files[index]
        reads = plan_reads(
            landings, file.size, block_bytes=file.block, read_bytes=self._unit_bytes(file.block), whole_blocks=True
        )
        for read in reads:
            into = _memory_of(read, memories)
            header = index not in self._headers_seen
            self._headers_seen.add(index)
            if into is not None:
                await self._fetcher.fetch_span(index, read.offset, into, header=header)
                continue
            blocks = memoryview(bytearray(read.size))
            await self._fetcher.fetch_span(index, read.offset, blocks, header=header)
            await run_blocking(self._engine.state_work, _scatter, read, blocks, memories)

    def _unit_bytes(self, block_bytes: int) -> int:
        return max(self._read_bytes // block_bytes, 1) * block_bytes

    async def close(self) -> None:
        """Close the files."""
        await self._fetcher.close()


def _memory_of(read: BlockRead, memories: Sequence[memoryview]) -> memoryview | None:
    """Return the memory that all of a read goes to; None where it goes to several, or partly to none."""
    first = read.segments[0]
    if len(read.segments) > 1 or first.target == GAP:
        return None
    return memories[first.target][first.target_offset : first.target_offset + first.size]


def _scatter(read: BlockRead, blocks: memoryview, memories: Sequence[memoryview]) -> None:
    """Copy what is wanted of *blocks* to where it is wanted."""
    cursor = 0
    for segment in read.segments:
        if segment.target != GAP:
            end = segment.target_offset + segment.size
            memories[segment.target][segment.target_offset : end] = blocks[cursor : cursor + segment.size]
        cursor += segment.size
