"""Export of a step as a Hugging Face folder: weights are chosen, laid out, streamed window by window, published."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import msgspec
import torch

from aiockpt.adapters.rename import Rules
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.convert.casting import Cast, cast_all
from aiockpt.convert.choice import Converted, choose_weights, exported
from aiockpt.convert.folder_layout import FolderFile, plan_folder
from aiockpt.convert.publish import check_target, open_target
from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.find import find_manifest
from aiockpt.engine.load import LoadMemory
from aiockpt.format.dtypes import itemsize
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.copy import Windows
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.runtime.limits import run_blocking
from aiockpt.state.geometry import flat_range_boxes
from aiockpt.state.shards import TensorShard
from aiockpt.storage.backend import Backend

# Reading of the tensors of a step in any order, range by range, each block verified.
#
# Guarantees:
#
# - Tensors come out whole, however they were sharded; every block that is read is compared with its checksum.
# - A block that is unreadable in one tier is read from the next one.
# - Files stay open, and each header is verified once. A block that two ranges share is read for each.


class Slices:
    """Reads parts of the tensors of one step; `close` it.

    Args:
        place: of the step.
        manifest: already checked.
    """

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._engine = place.engine
        self._manifest = manifest
        self._fetcher = Fetcher(
            place.backend,
            manifest,
            read_bytes=place.engine.options.io.read_bytes,
            elsewhere=partial(place.other_copies, manifest),
            keep_open=True,
        )

    async def fill(self, wanted: Sequence[TensorShard]) -> None:
        """Fill the memory of *wanted*.

        Raises:
            CorruptionError: a block is not what was saved.
        """
        memory = await run_blocking(self._engine.state_work, LoadMemory, self._manifest, wanted)
        for landings in memory.plan.passes:
            await self._fetcher.fetch(landings, memory.views)
        if not memory.is_in_place:
            await run_blocking(self._engine.state_work, memory.finish)

    async def close(self) -> None:
        await self._fetcher.close()


WINDOWS = 3
SLABS_A_WINDOW = 2
"""A window is read in whole blocks of checksums, so the block at each of its ends is read twice; 32 MiB make that little."""


class ExportRequest(msgspec.Struct, frozen=True):
    """A request; the fields are the arguments of `aiockpt.convert.to_hugging_face`, the dtype as its code."""

    step: int | None
    prefix: str | None
    dtype: str | None
    max_shard_bytes: int
    replace: bool
    dry_run: bool
    rename: Rules


async def convert_step(
    destination: Destination, folder: Backend, request: ExportRequest, on_written: Callable[[int], object]
) -> Converted:
    """Write the weights of a step into *folder*; a dry run only plans it."""
    found = await find_manifest(destination, request.step)
    engine, manifest = destination.engine, found.manifest
    chosen = await run_blocking(
        engine.state_work, choose_weights, manifest, request.prefix, request.dtype, request.rename
    )
    layout = plan_folder(chosen.weights, chosen.ties, request.max_shard_bytes)
    sizes = {file.name: file.size for file in layout.files}
    done = exported(manifest, chosen, sizes, folder.url, dry_run=request.dry_run)
    if request.dry_run:
        await check_target(folder, request.replace)
        return done
    async with (
        open_target(folder, engine.world, layout.file_bytes, request.replace) as target,
        found.place.reading(manifest.id),
    ):
        windows = Windows(WINDOWS, SLABS_A_WINDOW * engine.options.io.slab_bytes)
        slices = Slices(found.place, manifest)
        try:
            for file in layout.files:
                await target.write(file.name, file.size, windows, FileFiller(engine, slices, file), on_written)
        finally:
            with anyio.CancelScope(shield=True):
                await slices.close()
        await target.publish(layout.index)
    return done


class FileFiller:
    """Fills any part of one file of a folder, from the tensors of a step."""

    def __init__(self, engine: Engine, slices: Slices, file: FolderFile) -> None:
        self._engine = engine
        self._slices = slices
        self._file = file
        # What is to be cast is read into memory that is used again: the allocator keeps freed blocks of many sizes.
        self._spare: list[torch.Tensor] = []

    async def __call__(self, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        header = self._file.header[offset:end]
        view[: len(header)] = header
        window = torch.frombuffer(view, dtype=torch.uint8)
        shards: list[TensorShard] = []
        casts: list[Cast] = []
        used: list[torch.Tensor] = []
        spans = self._file.spans
        for span in spans[bisect_right(spans, offset, key=lambda span: span.end) :]:
            if span.start >= end:
                break
            low, high = max(span.start, offset), min(span.end, end)
            if low == high:
                continue
            weight, width = span.weight, itemsize(span.weight.becomes)
            first, last = (low - span.start) // width, (high - span.start) // width
            data = window[low - offset : high - offset].view(torch_dtype(weight.becomes))
            if weight.dtype != weight.becomes:
                nbytes = (last - first) * itemsize(weight.dtype)
                used.append(self._memory(nbytes))
                stored = used[-1][:nbytes].view(torch_dtype(weight.dtype))
                casts.append(Cast(weight.name, stored, data))
                data = stored
            boxes = tuple(flat_range_boxes(weight.shape, first, last))
            shards.append(
                TensorShard(name=weight.stored, dtype=weight.dtype, shape=weight.shape, boxes=boxes, data=data)
            )
        await self._slices.fill(shards)
        if casts:
            await run_blocking(self._engine.state_work, cast_all, casts)
        self._spare = sorted([*self._spare, *used], key=torch.numel)

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Return the largest memory that was used before; another in its place where it is too small."""
        memory = self._spare.pop() if self._spare else None
        return memory if memory is not None and memory.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)
