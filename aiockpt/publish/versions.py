"""The versions in one place: found and read, made visible by one writer for each number, and removed.

Guarantees:

- A number has one winner. On a file system a whole folder is flushed under a hidden name, and renamed. Elsewhere the
  winner is who creates the *decision* of the number, which holds the index: its files are durable before, what other
  writers left there is removed, and then the index comes. A winner that dies is finished by the next writer.
- A version whose index can be seen is whole, and no other file of weights lies beside it; what a rank adds that wakes
  after that, it removes, or the next publication.
- A version is removed index first, so that what is left of it is none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import msgspec

from aiockpt.convert.folder_layout import INDEX_NAME
from aiockpt.convert.publish import flush_names
from aiockpt.errors import ObjectNotFoundError, from_os_error
from aiockpt.pipeline.collect import LEASE_S
from aiockpt.publish.form import (
    CHAIN,
    DECISION,
    FOLD,
    VersionIndex,
    decode_version,
    index_key,
    parse_folder,
    version_folder,
)
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.processes import ProcessNames
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, keeps_uploads, local_path
from aiockpt.storage.transfer import delete_below, put_once, read_record, storage_now_ns, walk

HIDDEN = ".aiockpt-"
SUFFIX = ".safetensors"


class Versions:
    """The versions in *backend*."""

    def __init__(self, backend: Backend, world: World) -> None:
        self.backend = backend
        self.world = world
        self.path = local_path(backend.url)
        self._names = ProcessNames()
        self._renaming = Limiter("renaming of versions", 1)

    async def list(self) -> dict[str, list[int]]:
        """Return the numbers of the folders of each kind, the newest first; some may be no versions yet, or no more."""
        found: dict[str, list[int]] = {CHAIN: [], FOLD: []}
        for name in (await self.backend.list("")).folders:
            if (placed := parse_folder(name)) is not None:
                found[placed[0]].append(placed[1])
        return {prefix: sorted(numbers, reverse=True) for prefix, numbers in found.items()}

    async def read(self, folder: str) -> VersionIndex | None:
        """Return the index of a folder; None where it is no version.

        Raises:
            CorruptionError: the index is damaged, or not ours.
        """
        try:
            return decode_version(await read_record(self.backend, index_key(folder)), folder, self.backend.url)
        except ObjectNotFoundError:
            return None

    async def newest(self, also: int = -1) -> VersionIndex | None:
        """Return the newest version of the chain; one that was decided and not finished is finished first.

        *also* is a number that is looked for even if it is not listed: some stores list what is new late.
        """
        for number in sorted({*(await self.list())[CHAIN], also} - {-1}, reverse=True):
            folder = version_folder(number)
            if (newest := await self.read(folder) or await self._finish(folder)) is not None:
                return newest
        return None

    async def _finish(self, folder: str) -> VersionIndex | None:
        """Finish a version whose winner has died after the decision; None where there is no decision."""
        if self.path is not None:
            return None
        try:
            decided = await read_record(self.backend, f"{folder}/{DECISION}")
        except ObjectNotFoundError:
            return None
        await self.remove_others(decode_version(decided, folder, self.backend.url))
        await put_once(self.backend, index_key(folder), decided)
        return await self.read(folder)

    async def publish(self, draft: Draft, index: bytes) -> bool:
        """Make the files of *draft* a version; return False when another writer has the number."""
        if self.path is not None:
            await self.backend.put(draft.key(INDEX_NAME), index)
            return await run_blocking(self._renaming, self._rename, draft.hidden, draft.folder)
        if not await put_once(self.backend, f"{draft.folder}/{DECISION}", index):
            return False
        await self.remove_others(decode_version(index, draft.folder, self.backend.url))
        return await put_once(self.backend, index_key(draft.folder), index)

    async def remove_others(self, version: VersionIndex) -> None:
        """Remove what other writers left in a version's folder: some readers take every file of weights that is there."""
        if self.path is not None:
            return
        ours = {f"{version.folder}/{name}" for name in version.notes.files}
        there = [stat.key for stat in (await self.backend.list(version.folder)).objects if stat.key.endswith(SUFFIX)]
        await self.backend.delete([key for key in there if key not in ours])
        if (store := keeps_uploads(self.backend)) is not None:
            await store.abort_uploads(await store.leftover_uploads(version.folder))

    def _rename(self, hidden: str, folder: str) -> bool:
        assert self.path is not None
        files, root = self.world.files, str(self.path)
        try:
            files.rename(os.path.join(root, hidden), os.path.join(root, folder))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise from_os_error(error, "renaming a version in", root) from error
        flush_names(files, root)
        return True

    def draft(self, folder: str) -> Draft:
        """Return where the files of a new version are written."""
        # A name tells its process, and comes again after some hundred; the digits after it never do.
        name = f"{self._names.make() or ''}{self.world.token(6).hex()}"
        return Draft(self.backend, folder, f"{HIDDEN}{name}" if self.path is not None else "", name)

    # ------------------------------------------------------------------ removal

    async def abandon(self, draft: Draft) -> None:
        """Remove the files of a draft that became no version; its mark first, as another rank may write to it now."""
        await self.backend.delete([draft.mark])
        if draft.hidden:
            await self._delete_folder(draft.hidden)
            return
        keys = [stat.key async for stat in walk(self.backend, draft.folder)]
        await self.backend.delete([key for key in keys if f".{draft.token}" in key])

    async def remove(self, folders: Iterable[str]) -> None:
        """Remove versions."""
        for folder in folders:
            if self.path is not None:
                gone = f"{HIDDEN}{self._names.make() or self.world.token(6).hex()}"
                if await run_blocking(self._renaming, self._rename, folder, gone):
                    await self._delete_folder(gone)
                continue
            await self.backend.delete([index_key(folder)])
            await delete_below(self.backend, folder)

    async def remove_leftovers(self, nonce: str) -> None:
        """Remove hidden folders whose writers have ended, or have written nothing for hours."""
        hidden = [name for name in (await self.backend.list("")).folders if name.startswith(HIDDEN)]
        if not hidden:
            return
        is_dead = self._names.find_dead()
        now_ns = await storage_now_ns(self.backend, nonce)
        for folder in hidden:
            dates = [stat.modified_ns async for stat in walk(self.backend, folder)]
            if is_dead(folder.removeprefix(HIDDEN)) or now_ns - max(dates, default=now_ns) > LEASE_S * 1e9:
                await self._delete_folder(folder)

    async def _delete_folder(self, folder: str) -> None:
        """Remove a hidden folder, also one that is empty."""
        await delete_below(self.backend, folder)
        await self.backend.delete([folder])


class Draft(msgspec.Struct, frozen=True):
    """The files of a version that is being written.

    Attributes:
        folder: of the version; *hidden*: where its files lie until then, "" for *folder* itself.
        token: of the writer, by which names differ from those of others where they lie in one folder.
    """

    backend: Backend
    folder: str
    hidden: str
    token: str

    def name(self, number: int, count: int) -> str:
        """Return the name of a file."""
        own = "" if self.hidden else f".{self.token}"
        return f"model-{number + 1:05d}-of-{count:05d}{own}{SUFFIX}"

    @property
    def mark(self) -> str:
        """The key of an object that is there while several ranks write: who removes a draft's files removes it, too."""
        return self.key(f"open.{self.token}{SUFFIX}")

    def key(self, name: str) -> str:
        """Return where a file is written."""
        return f"{self.hidden or self.folder}/{name}"
