"""Reads of many tensors of one step for a comparison: together, so that each verified block is read once.

(`Checkpointer.read` is for one tensor: it reads the blocks around it whole, and reads the manifest again each time.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import torch

from aiockpt.errors import StorageError
from aiockpt.format.dtypes import torch_name
from aiockpt.format.manifest import Manifest
from aiockpt.options import IO
from aiockpt.pipeline.collect import lease_key
from aiockpt.pipeline.discover import StepEntry, newest_manifest
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.pipeline.scatter import Places
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.runtime.world import World
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.storage.backend import Backend

RELEASE_S = 10.0


class StepReader:
    """Reads whole tensors of one step; see `open_step`."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self.manifest = manifest
        self._backend = backend
        self._threads = Limiter("reading", 1)

    async def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors *names*, every block verified.

        Raises:
            CorruptionError: a block is not as it was saved.
        """
        shards = [self._shard(name) for name in names]
        places = await run_blocking(self._threads, Places, self.manifest, shards)
        fetcher = Fetcher(
            self._backend,
            self.manifest,
            places.memories,
            read_bytes=IO().read_bytes,
            verify=True,
            on_read=lambda _: None,
        )
        for landings in places.plan.passes:
            async with open_tasks() as tasks:
                for file, some in landings.items():
                    tasks.start_soon(fetcher.fetch_file, file, some)
        await run_blocking(self._threads, places.settle)
        return [shard.data for shard in shards]

    def _shard(self, name: str) -> TensorShard:
        entry = self.manifest.tensors[name]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, torch_name(entry.dtype)))
        return TensorShard(
            name=name, dtype=entry.dtype, shape=entry.shape, boxes=(Box.whole(entry.shape),), data=tensor
        )


@asynccontextmanager
async def open_step(backend: Backend, entry: StepEntry) -> AsyncIterator[StepReader]:
    """Open a step for reading, and keep the retention of other processes away from it meanwhile.

    Raises:
        ManifestError: none of its generations is valid.
    """
    key = lease_key(entry.id, World().token(6).hex())
    try:
        await backend.put(key, b"")
    except StorageError:
        key = ""  # a place that may only be read: nothing is deleted there either
    try:
        yield StepReader(backend, await newest_manifest(backend, entry))
    finally:
        if key:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await backend.delete([key])
