"""The update of a folder to a version, as planned: tensors are read or changed in place, and verified, several at once.

Guarantee: the folder becomes a whole only when each of its tensors has the digest of the version.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import Any

from aiockpt.errors import CorruptionError
from aiockpt.publish.downloads import DeltaFrames, Downloads, FullVersion
from aiockpt.publish.form import COMPANION_BYTES, VersionIndex, is_companion
from aiockpt.publish.frames import FrameReader, apply_frames, digest_of, load_zstd
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.publish.update_plan import TensorPlan, UpdatePlan
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Backend

MOST_THREADS = 16
READS_AT_ONCE = 8
"""Tensors of a full version that are read at once; each read is cut into parts."""


class Updater:
    """Changes *copy*; on one loop.

    Attributes:
        digests: of the tensors as they are, by name; a torn one has none.
    """

    def __init__(self, copy: LocalCopy, downloads: Downloads, backend: Backend) -> None:
        self._copy = copy
        self._downloads = downloads
        self._backend = backend
        self._zstd: Any = load_zstd()
        self._work = Limiter("updates", min(MOST_THREADS, os.cpu_count() or 1))
        self._reads = Limiter("tensors read", READS_AT_ONCE)
        self.digests: dict[str, str] = {}

    async def hash_all(self) -> None:
        """Find out what the tensors of the folder are."""

        async def hash_one(name: str) -> None:
            self.digests[name] = await run_blocking(self._work, self._digest, name)

        self.digests = {}
        async with open_tasks() as tasks:
            for name in self._copy.tensors:
                tasks.start_soon(hash_one, name)

    def _digest(self, name: str) -> str:
        return digest_of(self._copy.view(name))

    async def lay_out(self, full: VersionIndex) -> None:
        """Make the files of the folder anew, like those of a full version; what lies beside these is copied."""
        async with self._downloads.full(full) as opened:
            files = {
                name: (await opened.header(number), reader.size)
                for number, (name, reader, _) in enumerate(opened.files)
            }
        await run_blocking(self._work, self._copy.create, full.notes.layout, files)
        self.digests = {}
        for stat in (await self._backend.list(full.folder)).objects:
            name = stat.key.rpartition("/")[2]
            if is_companion(name) and stat.size <= COMPANION_BYTES:
                data = await self._backend.get(stat.key, COMPANION_BYTES)
                await run_blocking(self._work, (self._copy.path / name).write_bytes, data)

    async def apply(self, plan: UpdatePlan) -> None:
        """Make the folder that of the target.

        Raises:
            CorruptionError: a tensor is not what was published; it is torn then, and the folder no whole.
        """
        frames = {index.number: await self._downloads.fetch(index) for index in plan.deltas}
        await run_blocking(self._work, self._copy.begin)
        async with AsyncExitStack() as opened:
            fulls: dict[str, FullVersion] = {}
            for index in {one.full.folder: one.full for one in plan.tensors.values() if one.full is not None}.values():
                fulls[index.folder] = await opened.enter_async_context(self._downloads.full(index))
            async with open_tasks() as tasks:
                for name, how in plan.tensors.items():
                    tasks.start_soon(self._update, name, how, fulls, frames, plan.target)
        await run_blocking(self._work, self._copy.complete, plan.target)

    async def _update(
        self,
        name: str,
        how: TensorPlan,
        fulls: dict[str, FullVersion],
        frames: dict[int, DeltaFrames],
        target: VersionIndex,
    ) -> None:
        self.digests.pop(name, None)  # torn, until it is verified
        if how.full is not None:
            async with self._reads:
                await fulls[how.full.folder].read(name, self._copy.view(name).data)
        found = await run_blocking(self._work, self._change, name, how, frames)
        if found != target.notes.tensors[name][1]:
            raise CorruptionError(
                f"{self._backend.url}/{target.folder}: {name} has not the digest that was published; it is made anew from a "
                "full version: publish one if this stays so",
                key=name,
            )
        self.digests[name] = found

    def _change(self, name: str, how: TensorPlan, frames: dict[int, DeltaFrames]) -> str:
        view = self._copy.view(name)
        if not how.deltas:
            return digest_of(view)
        readers = [
            FrameReader(self._zstd, frames[index.number].frames[name], f"{index.folder}: {name}")
            for index in how.deltas
        ]
        return apply_frames(view, readers)
