"""The update of a folder to a version, as planned: tensors are read or changed in place, and verified, several at once.

Guarantee: the folder becomes a whole only when each of its tensors has the digest of the version.
"""

from __future__ import annotations

import logging
import mmap
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from aiockpt.errors import CorruptionError
from aiockpt.publish.downloads import Downloads, FullVersion
from aiockpt.publish.form import COMPANION_BYTES, VersionIndex, is_companion
from aiockpt.publish.frames import FrameReader, apply_frames, digest_of, load_zstd
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.publish.mapped import MappedTensors, map_file
from aiockpt.publish.update_plan import TensorPlan, UpdatePlan
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Backend

logger = logging.getLogger("aiockpt")

MOST_THREADS = 16
READS_AT_ONCE = 8
"""Tensors of a full version that are read at once; each read is cut into parts."""


class Updater:
    """Changes *copy*; on one loop.

    Attributes:
        digests: of the tensors as they are, by name; a torn one has none.
        base: digest → name, of the tensors of another folder that can be copied.
    """

    def __init__(self, copy: LocalCopy, downloads: Downloads, backend: Backend) -> None:
        self._copy = copy
        self._downloads = downloads
        self._backend = backend
        self._zstd: Any = load_zstd()
        self._work = Limiter("updates", min(MOST_THREADS, os.cpu_count() or 1))
        self._reads = Limiter("tensors read", READS_AT_ONCE)
        self.digests: dict[str, str] = {}
        self._base = MappedTensors()
        self.base: dict[str, str] = {}

    async def hash_copy(self) -> None:
        """Find out what the tensors of the folder are."""
        self.digests = await self._hash(self._copy.weights)

    async def _hash(self, weights: MappedTensors) -> dict[str, str]:
        digests: dict[str, str] = {}

        async def hash_one(name: str) -> None:
            digests[name] = await run_blocking(self._work, digest_of, weights.view(name))

        async with open_tasks() as tasks:
            for name in weights.tensors:
                tasks.start_soon(hash_one, name)
        return digests

    async def open_base(self, folder: Path) -> None:
        """Find out what the tensors of another folder are; one that cannot be read is told and left."""
        try:
            await run_blocking(self._work, self._map_base, folder)
            self.base = {digest: name for name, digest in (await self._hash(self._base)).items()}
        except (OSError, ValueError, CorruptionError) as error:
            logger.warning("base %s is not used, for it cannot be read: %s", folder, error)

    def _map_base(self, folder: Path) -> None:
        if not (paths := sorted(folder.glob("*.safetensors"))):
            raise FileNotFoundError("there are no .safetensors files")
        for path in paths:
            self._base.add(path.name, map_file(path, mmap.ACCESS_READ))

    def close_base(self) -> None:
        """Give the other folder up."""
        self.base = {}
        self._base.close()

    async def lay_out(self, full: VersionIndex) -> None:
        """Make the files of the folder anew, like those of a full version; what lies beside these is copied."""
        async with self._downloads.full(full) as opened:
            files = {
                name: (await opened.header(number), reader.size)
                for number, (name, reader, _) in enumerate(opened.files)
            }
        beside = {
            name: await self._backend.get(stat.key, COMPANION_BYTES)
            for stat in (await self._backend.list(full.folder)).objects
            if is_companion(name := stat.key.rpartition("/")[2]) and stat.size <= COMPANION_BYTES
        }
        self.digests = {}
        await run_blocking(self._work, self._copy.create, full.notes.layout, files, beside)

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
        frames: dict[int, MappedTensors],
        target: VersionIndex,
    ) -> None:
        if how.full is not None:
            async with self._reads:
                self.digests.pop(name, None)
                await fulls[how.full.folder].read(name, self._copy.weights.view(name).data)
        found = await run_blocking(self._work, self._change, name, how, frames)
        if found != target.notes.tensors[name][1]:
            self.base.pop(how.base or "", None)
            raise CorruptionError(
                f"{self._backend.url}/{target.folder}: {name} has not the digest that was published; it is made anew from a "
                "full version: publish one if this stays so",
                key=name,
            )
        self.digests[name] = found

    def _change(self, name: str, how: TensorPlan, frames: dict[int, MappedTensors]) -> str:
        self.digests.pop(name, None)  # torn, until it is verified; not before its turn, which may not come
        view = self._copy.weights.view(name)
        if how.base is not None:
            np.copyto(view, self._base.view(self.base[how.base]))
        if not how.deltas:
            return digest_of(view)
        readers = [
            FrameReader(self._zstd, frames[index.number].view(name).data, f"{index.folder}: {name}")
            for index in how.deltas
        ]
        return apply_frames(view, readers)
