"""The publisher of one run's steps into one place: base, version, fold, and what older versions leave.

Guarantees:

- Numbers only rise. A step that is there as the newest version is not published again; a run that went back publishes
  the next number, and the log says so.
- A delta is against the version before, and its base's bytes have the digests that this version recorded; else the
  version is a full one. So is one of which more than half has changed.
- The step of the newest version is held until the next one: it is the base, and nothing of the model stays in memory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain

import anyio

from aiockpt.convert.publish import CLEAN_UP_DEADLINE_S
from aiockpt.convert.source import Source, list_files, open_source
from aiockpt.engine.alone import Destination
from aiockpt.engine.find import find_manifest
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectNotFoundError,
    RankError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.publish.form import (
    COMPANION_BYTES,
    FOLD,
    VersionIndex,
    VersionNotes,
    encode_version,
    is_companion,
    newest_full,
    version_folder,
)
from aiockpt.publish.publication import Publish, Published
from aiockpt.publish.receiver_notes import ReceiverNote, living_receivers
from aiockpt.publish.shares import ShareRequest, ShareRequests, while_marked
from aiockpt.publish.step_weights import StepWeights, open_weights_of
from aiockpt.publish.version_chain import VersionChain
from aiockpt.publish.version_files import Base, BaseDiffersError, DeltaTooLargeError, VersionWriter, WrittenFiles
from aiockpt.publish.versions import Versions
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

logger = logging.getLogger("aiockpt")


class Publisher:
    """Publishes steps of *destination* as *options* say; used on the loop.

    Args:
        hold: keeps a step from deletion until the event that it returns is set.

    Attributes:
        shares: has other ranks write files, too; None: this process writes all.
    """

    def __init__(
        self, destination: Destination, options: Publish, hold: Callable[[int, str], Awaitable[anyio.Event]]
    ) -> None:
        self._destination = destination
        self._options = options
        self._hold = hold
        self._engine = destination.engine
        self._backend = open_backend(options.dest, world=self._engine.world)
        self._versions = Versions(self._backend, self._engine.world)
        self._chain = VersionChain(self._versions)
        self._lock = anyio.Lock()
        self._held = anyio.Event()
        self._newest = -1  # number of a version that is there
        self._companions: dict[str, bytes] | None = None
        self.shares: ShareRequests | None = None

    @property
    def url(self) -> str:
        """The place of the versions."""
        return self._backend.url

    async def publish(self, step: int, *, full: bool = False) -> tuple[Published, list[ReceiverNote]]:
        """Publish a step; with *full*, not as a delta. Return the version, and the receivers of versions.

        Raises:
            UsageError: the options do not fit the step; nothing was written.
            StepNotFoundError, CorruptionError: there is no such step, or it is damaged.
            StorageError: of either place.
        """
        async with self._lock:
            begun_ns = self._engine.now_ns()
            held = await self._begin_hold(step)
            try:
                index = await self._publish_held(step, full)
            except BaseException:
                held.set()
                raise
            self._held.set()
            self._held = held
            receivers = await self._clean_up()
            return self._result(index, self._engine.since_s(begun_ns)), receivers

    async def close(self) -> None:
        """Release the place; other ranks need not wait for a request any more."""
        if self.shares is not None:
            await self.shares.end()
        if self._backend is not self._options.dest:
            await self._backend.close()

    async def _begin_hold(self, step: int) -> anyio.Event:
        try:
            return await self._hold(step, self.url)
        except StorageError as error:
            logger.warning("step %d cannot be held, so it may be gone before the next version: %s", step, error)
            return anyio.Event()

    # ------------------------------------------------------------------ one version

    async def _publish_held(self, step: int, full: bool) -> VersionIndex:
        found = await find_manifest(self._destination, step)
        ranks = 1 if self.shares is None else len(self.shares.ranks())
        async with self._opened_like() as like, open_weights_of(found, self._options, like, ranks) as new:
            await self._versions.remove_leftovers(self._engine.token(6))
            wanted = (new.manifest.attempt, new.digest)
            while True:
                newest = await self._versions.newest(self._newest)
                self._newest = -1 if newest is None else newest.number
                if newest is not None and not full and (newest.notes.attempt, newest.notes.layout) == wanted:
                    return newest
                if newest is not None:
                    await self._versions.remove_others(newest)  # of ranks that woke late, and died then
                index = await self._write(newest, new, like, full)
                self._newest += 1
                if index is not None:
                    break
                logger.warning("%s: another publisher has taken the version; the next one follows", self.url)
            if newest is not None and newest.notes.step > step:
                logger.warning(
                    "step %d is published as version %d, after step %d as version %d: the run went back",
                    step, index.number, newest.notes.step, newest.number,
                )  # fmt: skip
            try:
                await self._fold(index, new)
            except CheckpointError as error:
                logger.warning("no fold of version %d is written; the next one follows: %s", index.number, error)
        return index

    async def _write(
        self, newest: VersionIndex | None, new: StepWeights, like: Source | None, full: bool
    ) -> VersionIndex | None:
        """Write the version that follows *newest*; return None when another writer has its number."""
        number = 0 if newest is None else newest.number + 1
        folder = version_folder(number)
        is_fold = self._options.fold == "chain" and number % self._options.full_every == 0
        if newest is not None and not full and not is_fold and newest.notes.layout == new.digest:
            async with self._base(newest, like, new.ranks) as base:
                if base is not None:
                    try:
                        return await self._write_one(folder, number, new, base)
                    except (BaseDiffersError, DeltaTooLargeError, CorruptionError, ObjectNotFoundError) as error:
                        logger.info("version %d is a full one: %s", number, error)
        return await self._write_one(folder, number, new, None)

    @asynccontextmanager
    async def _base(self, newest: VersionIndex, like: Source | None, ranks: int) -> AsyncIterator[Base | None]:
        """Open the step that *newest* is of, for the length of the block; None where it is gone."""
        step, weights = newest.notes.step, None
        async with AsyncExitStack() as opened:
            try:
                weights = await opened.enter_async_context(self._opened(step, newest.notes.attempt, like, ranks))
            except (StepNotFoundError, CorruptionError, UsageError) as error:
                logger.info("step %d, of version %d, cannot be a base: %s", step, newest.number, error)
            is_same = weights is not None and weights.digest == newest.notes.layout
            yield Base(weights, newest) if weights is not None and is_same else None

    @asynccontextmanager
    async def _opened(self, step: int, attempt: str, like: Source | None, ranks: int) -> AsyncIterator[StepWeights]:
        found = await find_manifest(self._destination, step)
        if found.manifest.attempt != attempt:
            raise StepNotFoundError(f"step {step} was saved anew")
        reading = found.place.reading(found.manifest.id)
        async with reading, open_weights_of(found, self._options, like, ranks) as weights:
            yield weights

    async def _write_one(self, folder: str, number: int, new: StepWeights, base: Base | None) -> VersionIndex | None:
        try:
            return await self._write_draft(folder, number, new, base, self.shares)
        except RankError as error:
            logger.warning("%s: rank 0 writes all files of %s by itself: %s", self.url, folder, error)
            return await self._write_draft(folder, number, new, base, None)

    async def _write_draft(
        self, folder: str, number: int, new: StepWeights, base: Base | None, shares: ShareRequests | None
    ) -> VersionIndex | None:
        draft = self._versions.draft(folder)
        is_decided = False
        try:
            writer = VersionWriter(draft, new, base)
            files = {} if shares is None else shares.deal(new)
            if shares is None or len(files) == 1:
                written = await writer.write(range(len(new.layout.files)))
            else:
                written = await shares.write(draft, number, new, base is not None, files, writer.write)
            if base is None:
                for name, data in (self._companions or {}).items():
                    await self._backend.put(draft.key(name), data)
            notes = self._notes(new, written, None if base is None else base.version, folder)
            # In a store the files may be a version's from here on, whatever error comes.
            is_decided = not draft.hidden
            if await self._versions.publish(draft, encode_version(number, notes, written.weight_map)):
                return VersionIndex(folder, number, notes, written.weight_map)
        except BaseException:
            if not is_decided:
                with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
                    await self._versions.abandon(draft)
            raise
        await self._versions.abandon(draft)
        return None

    async def write_share(self, request: ShareRequest) -> WrittenFiles:
        """Write this rank's share of a version that rank 0 writes.

        Raises:
            CheckpointError: it cannot be written here, or rank 0 has given it up; then none of its files is left.
        """
        # The mark at first: no byte goes to another place than rank 0's.
        async with while_marked(self._versions, request.draft(self._backend)) as draft, AsyncExitStack() as opened:
            like = await opened.enter_async_context(self._opened_like())
            new = await opened.enter_async_context(self._opened(request.step, request.attempt, like, request.ranks))
            if new.digest != request.layout:
                raise UsageError(f"the weights of step {request.step} have other names, dtypes or shapes here")
            base = None
            if request.is_delta:
                before = await self._versions.read(version_folder(request.number - 1))
                assert before is not None  # of the place that has the mark
                weights = self._opened(before.notes.step, before.notes.attempt, like, request.ranks)
                base = Base(await opened.enter_async_context(weights), before)
            return await VersionWriter(draft, new, base).write(request.files[self._engine.rank])

    def _notes(self, new: StepWeights, written: WrittenFiles, before: VersionIndex | None, folder: str) -> VersionNotes:
        manifest: Manifest = new.manifest
        is_fold = folder.startswith(FOLD)
        return VersionNotes(
            kind="full" if before is None else "delta",
            step=manifest.step,
            run=manifest.run,
            attempt=manifest.attempt,
            sequence=manifest.sequence,
            parent=None if before is None else before.notes.attempt,
            created_ns=self._engine.world.clock.time_ns(),
            of=int(folder.removeprefix(FOLD)) if is_fold else None,
            layout=new.digest,
            weight_bytes=new.weight_bytes,
            files=written.files,
            tensors=written.tensors,
        )

    # ------------------------------------------------------------------ like=

    @asynccontextmanager
    async def _opened_like(self) -> AsyncIterator[Source | None]:
        """Open the folder that the weights must be like; what lies beside its weights is read once."""
        if self._options.like is None:
            self._companions = {}
            yield None
            return
        folder = open_backend(self._options.like, world=self._engine.world)
        try:
            if self._companions is None:
                self._companions = await _read_companions(folder)
            async with open_source(folder) as source:
                yield source
        finally:
            if folder is not self._options.like:
                await folder.close()

    # ------------------------------------------------------------------ what follows

    async def _fold(self, index: VersionIndex, new: StepWeights) -> None:
        """Write the same state in full beside the chain, where that is due."""
        if index.number % self._options.full_every or index.is_full or self._options.fold != "beside":
            return
        await self._write_one(version_folder(index.number, FOLD), index.number, new, None)

    async def _clean_up(self) -> list[ReceiverNote]:
        """Remove versions that neither ``keep`` nor a living receiver keeps; return the living receivers."""
        try:
            receivers = await living_receivers(self._backend, self._engine.token(6))
            if self._options.keep is not None:
                await self._remove_old(self._options.keep, receivers)
        except CheckpointError as error:
            logger.warning("%s: old versions stay until the next one: %s", self.url, error)
            return []
        return receivers

    async def _remove_old(self, keep: int, receivers: Sequence[ReceiverNote]) -> None:
        newest = await self._chain.newest()
        if newest is None:
            return
        full = newest_full(chain.from_iterable(await self._chain.leading_to(newest, newest.number)))
        if full is None:
            return
        self._chain.drop(full.number)
        least = min([full.number - keep, *(note.needs for note in receivers if note.needs >= 0)])
        there = await self._versions.list()
        gone = [(number, prefix) for prefix, numbers in there.items() for number in numbers if number < least]
        await self._versions.remove(version_folder(number, prefix) for number, prefix in sorted(gone))

    def _result(self, index: VersionIndex, seconds: float) -> Published:
        notes = index.notes
        return Published(
            version=index.number,
            step=notes.step,
            base=None if index.is_full else index.number - 1,
            kind=notes.kind,
            url=f"{self.url}/{index.folder}",
            files=tuple(notes.files),
            file_bytes=index.file_bytes,
            weight_bytes=notes.weight_bytes,
            changed=len(index.weight_map),
            seconds=seconds,
        )


async def _read_companions(folder: Backend) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder: configuration, tokenizer, templates."""
    found = {}
    for name, (backend, key) in (await list_files(folder)).items():
        if not is_companion(name):
            continue
        data = await backend.get(key, COMPANION_BYTES + 1)
        if len(data) > COMPANION_BYTES:
            logger.warning("%s of %s is too large to be copied into versions", name, folder.url)
            continue
        found[name] = data
    return found
