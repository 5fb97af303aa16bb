"""Repair of a damaged step: bad files are rewritten, from copies that have them as they were saved.

Guarantees:

- Nothing is overwritten in place: a bad sector is not trusted with good data. Intact files stay as they are; each bad one
  is written to a new file, block by block from whichever copy has the block, compared, and flushed.
- The step never loses data: a new generation names the new files, and is durable before anything is removed. A crash
  leaves the damaged step or the repaired one.
- It is the same save: the same attempt, tensors, values and checksums.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import msgspec

from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Place
from aiockpt.engine.find import find_step
from aiockpt.engine.maintenance import mark_damaged, mark_verified
from aiockpt.errors import (
    CheckpointError,
    CommitError,
    CorruptionError,
    ManifestError,
    ObjectNotFoundError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.events import StepDamaged, StepRepaired
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.collect import remove_overtaken
from aiockpt.pipeline.commit import publish
from aiockpt.pipeline.copy import Windows, copy_step, open_copy_source, remove_strays, rewrite_files
from aiockpt.pipeline.discover import StepCopy, StepEntry, find_copy, find_same_files, list_step, newest_manifest
from aiockpt.pipeline.fetch import StepFiles
from aiockpt.runtime.limits import Pace
from aiockpt.storage.backend import Backend
from aiockpt.units import count

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
OnRead = Callable[[int], object]


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did in one place.

    Attributes:
        step, id, url: which step, and where.
        generation: that counts from now on; the same as before where nothing was bad.
        files: keys of the files that were bad, and were rewritten; of a step whose manifest was bad, all of them.
        bytes: that were written.
        left: what is still bad, in words, because no copy has it; then nothing was changed.
        seconds: from the call to the end.
    """

    step: int
    id: str
    url: str
    generation: int
    files: tuple[str, ...]
    bytes: int
    left: str
    seconds: float


async def repair(
    destination: Destination, step: int, source: Backend | None, on_read: OnRead = lambda _: None
) -> list[Repaired]:
    """Read all of a step in each place that has it, and rewrite bad files there; return what was done in each.

    Args:
        source: another place to take good blocks from, beside the destination's own.
        on_read: called with the bytes of each read; on the loop.

    Raises:
        StepNotFoundError: no place has the step.
        StorageError: a place cannot be listed, read or written to now; that says nothing of the step.
    """
    return [
        await repair_in(place, listed.entry, others_of(destination, place, source), on_read)
        for listed in await find_step(destination, step)
        for place in [destination.places[listed.number]]
    ]


def others_of(destination: Destination, place: Place, source: Backend | None = None) -> list[Backend]:
    """Return the other places that may have good blocks of a step in *place*, the nearest first."""
    return [other.backend for other in destination.places if other is not place] + ([] if source is None else [source])


async def repair_in(
    place: Place, entry: StepEntry, others: Sequence[Backend], on_read: OnRead = lambda _: None
) -> Repaired:
    """Repair a step in one place, with good blocks of *others*.

    Raises:
        StepNotFoundError: the step was deleted meanwhile.
        StorageError: as `repair`.
    """
    begun_ns = place.engine.now_ns()
    async with place.reading(entry.id):
        async with place.cleaning:  # a deletion that has not seen this reader has ended by now
            entry = await list_step(place.backend, entry.id)
        if not entry.committed:
            raise _gone(place, entry.id)
        try:
            manifest = await newest_manifest(place.backend, entry)
        except ManifestError as error:
            made = await _fetch_whole(place, entry, others, str(error))
        else:
            made = await _mend(place, manifest, others, on_read)
    url, keys = place.backend.url, made.keys
    if keys:
        logger.warning(
            "%s in %s was damaged, and is repaired from copies: %s rewritten", entry.id, url, count(len(keys), "file")
        )
        engine = place.engine
        engine.emit(StepRepaired(at_ns=engine.now_ns(), step=entry.step, url=url, keys=keys, bytes=made.bytes))
    if made.left:
        logger.warning("%s in %s is damaged, and no copy has what is bad: %s", entry.id, url, made.left)
        place.engine.emit(StepDamaged(at_ns=place.engine.now_ns(), step=entry.step, url=url, problem=made.left))
    return Repaired(
        step=entry.step,
        id=entry.id,
        url=url,
        generation=made.generation,
        files=keys,
        bytes=made.bytes,
        left=made.left,
        seconds=place.engine.since_s(begun_ns),
    )


class _BadWriteError(StorageError):
    """What was written cannot be read back."""


class _Made(msgspec.Struct, frozen=True):
    """The generation that counts, the keys that were rewritten, their bytes, and what is still bad."""

    generation: int
    keys: tuple[str, ...] = ()
    bytes: int = 0
    left: str = ""


async def _mend(place: Place, manifest: Manifest, others: Sequence[Backend], on_read: OnRead) -> _Made:
    every = range(len(manifest.files))
    bad = await _find_bad_files(place, manifest, every, on_read)
    if not bad:
        await mark_verified(place, manifest)
        return _Made(manifest.generation)
    backend, world, io = place.backend, place.engine.world, place.engine.options.io
    copies = [StepCopy(backend, manifest), *await _find_copies(manifest, others)]
    whole = await open_copy_source(copies, "full", window_bytes=io.read_bytes, file_bytes=io.file_bytes)
    windows = Windows(window_bytes=whole.window_bytes)
    try:
        files = await rewrite_files(whole, list(bad), backend, world, windows=windows, pace=Pace(None, world.clock))
    except CheckpointError as error:
        if not _is_damage(error):
            raise
        await _check_still_there(place, manifest)
        await mark_damaged(place, manifest, next(iter(bad.values())))
        return _Made(manifest.generation, left=str(error))
    try:
        highest = await _check_still_there(place, manifest)
        new = whole.manifest([files.get(at, manifest.files[at]) for at in every], highest + 1, world.token(16).hex())
        if still := await _find_bad_files(place, new, list(files), on_read):
            raise _BadWriteError(
                f"{next(iter(still.values()))}: what is written here cannot be read back; nothing was changed"
            )
        made = await publish(backend, new)
    except (_BadWriteError, StepNotFoundError, CommitError):  # nothing names the new files, and nothing will
        await backend.delete([f"{manifest.id}/{file.p}" for file in files.values()])
        raise
    await remove_overtaken(backend, manifest, made)
    await remove_strays(backend, made)
    await mark_verified(place, made)
    keys = tuple(f"{manifest.id}/{manifest.files[at].p}" for at in bad)
    return _Made(made.generation, keys, sum(file.size for file in files.values()))


async def _check_still_there(place: Place, manifest: Manifest) -> int:
    """Return the highest generation of a step, of which that of *manifest* is one still.

    Raises:
        StepNotFoundError: another process has deleted it: what is missing is not damaged then, and must not come back.
    """
    generations = (await list_step(place.backend, manifest.id)).generations
    if manifest.generation not in generations:
        raise _gone(place, manifest.id)
    return max(generations)


def _gone(place: Place, step_id: str) -> StepNotFoundError:
    return StepNotFoundError(f"{step_id} in {place.backend.url} was deleted meanwhile")


async def _fetch_whole(place: Place, entry: StepEntry, others: Sequence[Backend], problem: str) -> _Made:
    """Copy a step with an invalid manifest here, from a place where the same save is whole."""
    engine, io = place.engine, place.engine.options.io
    for attempt in entry.attempts:
        for backend in others:
            found = await _ask(backend, entry.id, find_copy(backend, entry.id, attempt))
            if found is not None:
                there = [StepCopy(backend, found)]
                made = await copy_step(
                    await open_copy_source(there, "full", window_bytes=io.read_bytes, file_bytes=io.file_bytes),
                    place.backend,
                    engine.world,
                    windows=Windows(window_bytes=io.read_bytes),
                    pace=Pace(None, engine.world.clock),
                )
                keys = tuple(f"{made.id}/{file.p}" for file in made.files)
                return _Made(made.generation, keys, sum(file.size for file in made.files))
    return _Made(max(entry.generations, default=0), left=problem)


async def _find_copies(manifest: Manifest, others: Sequence[Backend]) -> list[StepCopy]:
    """Return the copies of the same save that have the same files."""
    found = [await _ask(backend, manifest.id, find_same_files(backend, manifest)) for backend in others]
    return [copy for copy in found if copy is not None]


async def _ask(backend: Backend, step_id: str, looking: Awaitable[T | None]) -> T | None:
    """Return what is found in another place; None where it is unreachable."""
    try:
        return await looking
    except CheckpointError as error:
        logger.info("%s: could not be searched for a copy of %s: %s", backend.url, step_id, error)
        return None


async def _find_bad_files(place: Place, manifest: Manifest, indexes: Sequence[int], on_read: OnRead) -> dict[int, str]:
    """Read every block of some files; return what is wrong with those that are bad, by their numbers."""
    bad: dict[int, str] = {}
    for index in indexes:
        try:
            await _read_file(place, manifest, index, on_read)
        except CheckpointError as error:
            if not _is_damage(error):
                raise
            bad[index] = str(error)
    return bad


def _is_damage(error: CheckpointError) -> bool:
    """Return whether *error* means damaged or missing data; any other failure may be transient."""
    return isinstance(error, CorruptionError | ObjectNotFoundError) or (
        isinstance(error, StorageError) and error.damaged
    )


async def _read_file(place: Place, manifest: Manifest, index: int, on_read: OnRead) -> None:
    file = manifest.files[index]
    unit = max(place.engine.options.io.read_bytes // file.block, 1) * file.block
    window = memoryview(bytearray(min(file.size, unit)))
    files = StepFiles.of_copies([StepCopy(place.backend, manifest)])
    try:
        for offset in range(0, file.size, unit):
            size = min(unit, file.size - offset)
            await files.read(index, offset, [window[:size]])
            on_read(size)
    finally:
        with anyio.CancelScope(shield=True):
            await files.close()
