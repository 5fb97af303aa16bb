"""Maintenance of committed checkpoints: hints, retention, garbage, verification, looking inside."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec

from aiockpt.engine.find import StepPlaces, committed_steps, find_manifest, find_step, finish_commits, newest_first
from aiockpt.engine.place import Place
from aiockpt.errors import CheckpointError, CorruptionError, RankFailedError, StorageError, StorageFullError
from aiockpt.events import GarbageDeleted, StepDeleted
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import LATEST_KEY, damaged_key, parse_step, verified_key
from aiockpt.futures import SaveResult
from aiockpt.options import Retention
from aiockpt.pipeline.collect import (
    DeadUploads,
    Garbage,
    Thinned,
    abort_leftovers,
    collect,
    delete_step,
    find_garbage,
    find_leftovers,
    find_reader,
    mark_unsound,
    plan_thinning,
    step_facts,
    thin,
    why_unread,
)
from aiockpt.pipeline.copy import Windows, copy_step, open_copy_source
from aiockpt.pipeline.discover import StepCopy, StepEntry, find_copy, look_at, look_into, read_generation, scan, tell
from aiockpt.pipeline.discover import StepInfo as StepInfo
from aiockpt.planning.weights import has_weights_only
from aiockpt.policies.retention import Doomed, Kept, StepFacts, explain_kept, may_be_thinned, plan_retention
from aiockpt.runtime.limits import Pace
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import storage_now_ns

logger = logging.getLogger("aiockpt")


class TensorInfo(msgspec.Struct, frozen=True):
    """One stored tensor: its name, dtype code (F32, BF16 …), global shape, bytes, and the files that hold it.

    Attributes:
        axes: as they lay in memory, slowest first, where that is known not to be their own order; files are row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    files: tuple[str, ...]
    axes: tuple[int, ...] | None = None


class Description(msgspec.Struct, frozen=True):
    """What a checkpoint holds; read from its manifest alone.

    Attributes:
        alias: names that share the memory of another tensor.
        left_out: names that were not saved because the caller said so; of tensors with dtype code and shape, else None.
        not_finite: tensors with numbers that are NaN or infinite, and how many, where that was checked
            (``screen="finite"``; `StepInfo.finite` says whether).
        values: the plain values as they are written (docs/format.md#values); ``per_rank`` those of each rank.
    """

    info: StepInfo
    tensors: tuple[TensorInfo, ...]
    alias: dict[str, str]
    values: object
    per_rank: dict[str, object]
    user: object
    left_out: Mapping[str, tuple[str, tuple[int, ...]] | None] = {}
    not_finite: Mapping[str, int] = {}


class Verified(msgspec.Struct, frozen=True):
    """A verification that found every block as it was saved."""

    step: int
    id: str
    generation: int
    bytes: int
    seconds: float


class Copied(msgspec.Struct, frozen=True):
    """A step that is in another place now, too.

    Attributes:
        url, generation: where, and as which generation there.
        bytes: of its data files.
        existed: whether it was there already.
    """

    step: int
    id: str
    url: str
    generation: int
    bytes: int
    seconds: float
    existed: bool


class Pruned(msgspec.Struct, frozen=True):
    """What retention removed, or would remove: steps with the reason, and the folders of garbage.

    Attributes:
        left: (step id, reason) of what should go, or should be looked at for garbage, and could not.
        failed: the ids of those that are left because the storage, or what lies there, did not allow it: not for a reader.
        kept: the steps that stay, the newest first, with what keeps them.
        thinned: the steps that keep their weights alone from now on, or would.
        uploads: the keys of unfinished uploads of dead saves that were aborted, or would be.
        note: what could not be looked at or aborted, and why; None when nothing.
    """

    steps: tuple[Doomed, ...]
    garbage: tuple[Garbage, ...]
    left: tuple[tuple[str, str], ...] = ()
    kept: tuple[Kept, ...] = ()
    uploads: tuple[str, ...] = ()
    note: str | None = None
    thinned: tuple[Thinned, ...] = ()
    failed: tuple[str, ...] = ()


async def steps(places: StepPlaces) -> tuple[StepInfo, ...]:
    """Return every committed step, the newest first, damaged ones with their problem; what its nearest tier says of it."""
    nearest: dict[tuple[str, int], StepInfo] = {}
    for listed in await committed_steps(places):
        which = (listed.entry.id, listed.entry.age_order[0])
        if which not in nearest:
            nearest[which] = await look_into(listed.place.backend, listed.entry)
    return tuple(nearest.values())


async def finish(place: Place) -> tuple[StepInfo, ...]:
    """Roll forward every attempt whose votes are complete; return what was committed by that."""
    entries = await scan(place.backend)
    return tuple([tell(manifest, entry) for entry in entries for manifest in await finish_commits(place, entry)])


async def latest(places: StepPlaces) -> int | None:
    """Return the newest valid step that some tier has in full; None when there is no valid step at all.

    Where there are only weights, the newest of these.

    Raises:
        NewerFormatError, StorageError: of a step that may be the newest.
    """
    weights: int | None = None
    async for found in newest_first(await committed_steps(places), lambda *_: None):
        if not has_weights_only(found.manifest):
            return found.manifest.step
        weights = found.manifest.step if weights is None else weights
    return weights


async def describe(places: StepPlaces, step: int | None) -> Description:
    """Return what a step holds (the newest valid one for None), without reading data."""
    found = await find_manifest(places, step)
    place, manifest = found.place, found.manifest
    entry = await look_at(place.backend, manifest.id)
    tensors = []
    for name, stored in manifest.tensors.items():
        files = sorted({piece.file for piece in stored.pieces})
        size = sum(piece.end - piece.start for piece in stored.pieces)
        paths = tuple(manifest.files[file].p for file in files)
        tensors.append(TensorInfo(name, stored.dtype, stored.shape, size, paths, stored.axes or None))
    return Description(
        info=tell(manifest, entry),
        tensors=tuple(tensors),
        alias=dict(manifest.alias),
        values=manifest.state.get("global"),
        per_rank=manifest.state.get("per_rank", {}),
        user=manifest.user,
        left_out=manifest.left_out or {},
        not_finite=_count_not_finite(manifest),
    )


def _count_not_finite(manifest: Manifest) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for file in manifest.files:
        if file.not_finite is not msgspec.UNSET:
            counts.update(file.not_finite)
    return dict(counts)


async def verify(places: StepPlaces, step: int | None, on_read: Callable[[int], object] = lambda _: None) -> Verified:
    """Read every block of a step, compare it, and leave a mark of what was found; retention goes by it.

    Raises:
        CorruptionError: names the first bad file, block, offset and tensors.
    """
    from aiockpt.engine.load import verify_files  # it loads torch, which a writer process (`aiockpt.worker`) need not

    begun_ns = places.engine.now_ns()
    found = await find_manifest(places, step)
    place, manifest = found.place, found.manifest
    async with place.reading(manifest.id):
        try:
            await verify_files(place, manifest, on_read)
        except CorruptionError as error:
            await mark_damaged(place, manifest, str(error))
            raise
    size = sum(file.size for file in manifest.files)
    verified = Verified(manifest.step, manifest.id, manifest.generation, size, place.engine.since_s(begun_ns))
    await mark_verified(place, manifest)
    return verified


async def copy(
    places: StepPlaces, step: int | None, target: Backend, on_copied: Callable[[int], object] = lambda _: None
) -> Copied:
    """Copy a step (the newest valid one for None) to *target*, every block compared on the way.

    Raises:
        StepNotFoundError, NoValidCheckpointError: there is nothing to copy.
        CorruptionError: the step is damaged; nothing became visible at the target.
        StorageError: of either place. What was copied is not copied again the next time.
    """
    begun_ns = places.engine.now_ns()
    found = await find_manifest(places, step)
    place, manifest = found.place, found.manifest
    existed = await find_copy(target, manifest.id, manifest.attempt) is not None
    async with place.reading(manifest.id):
        engine, io = place.engine, place.engine.options.io
        source = [StepCopy(place.backend, manifest)]
        there = await copy_step(
            await open_copy_source(source, "full", window_bytes=io.read_bytes, file_bytes=io.file_bytes),
            target,
            engine.world,
            windows=Windows(window_bytes=io.read_bytes),
            pace=Pace(None, engine.world.clock),
            on_copied=on_copied,
        )
    size = sum(file.size for file in there.files)
    seconds = engine.since_s(begun_ns)
    return Copied(there.step, there.id, target.url, there.generation, size, seconds, existed)


async def mark_verified(place: Place, manifest: Manifest) -> None:
    """Leave a mark that all of a generation was read, and is what was saved."""
    await _mark(place, manifest, damaged_key, verified_key, {"bytes": sum(file.size for file in manifest.files)})


async def mark_damaged(place: Place, manifest: Manifest, problem: str) -> None:
    """Leave a mark that a generation is not what was saved; retention does not count it."""
    await _mark(place, manifest, verified_key, damaged_key, {"problem": problem})


async def _mark(
    place: Place, manifest: Manifest, old: Callable[[str, int], str], new: Callable[[str, int], str], facts: Any
) -> None:
    """Replace what an earlier verification said of a generation by what this one found."""
    mark = {"verified_ns": place.engine.world.clock.time_ns(), "write_id": manifest.write_id, **facts}
    try:
        await place.backend.delete([old(manifest.id, manifest.generation)])
        await place.backend.put(new(manifest.id, manifest.generation), msgspec.json.encode(mark))
    except StorageError as error:  # a read-only place can be verified too
        logger.info("%s was verified; the mark cannot be left: %s", manifest.id, error)


async def clean_up(place: Place, saved: SaveResult) -> None:
    """After a commit: move the hint, collect what the new generation made garbage, apply retention.

    The checkpoint is safe by now: trouble here is logged, and tried again after the next commit. Nothing needs the hint.
    """
    try:
        async with place.cleaning:
            await _move_hint(place, saved)
            rules = place.retention
            if rules is not None:
                pruned = await prune(place, rules, with_uploads=place.uploads_are_due())
                if pruned.note is not None:
                    logger.info("%s: %s", place.backend.url, pruned.note)
            elif saved.generation > 1:
                entry = await look_at(place.backend, saved.id)
                await _collect_all(place, [entry], Retention(), place.engine.busy_attempts, _Left(), dry_run=False)
    except CheckpointError as error:
        logger.warning("cleaning up after %s: %s", saved.id, error)


async def _move_hint(place: Place, saved: SaveResult) -> None:
    try:
        await place.backend.put(LATEST_KEY, f"{saved.id}\n".encode())
    except CheckpointError as error:  # another user's, or a bucket where nothing may be written over
        if place.heads.is_news(f"{LATEST_KEY}: {error}"):
            logger.warning("%s in %s cannot be written, and stays as it is: %s", LATEST_KEY, place.backend.url, error)


@asynccontextmanager
async def making_room(place: Place) -> AsyncIterator[None]:
    """Apply retention when a save in the block found no room, here or on another rank, so that a later one does."""
    try:
        yield
    except (StorageFullError, RankFailedError):
        await make_room(place)
        raise


async def make_room(place: Place) -> None:
    """Apply retention: the clean-up after the last save may have failed, or others may have filled the place."""
    if place.retention is None or place.engine.rank != 0:
        return
    try:
        async with place.cleaning:
            await prune(place, place.retention, with_uploads=False)
    except CheckpointError as error:
        logger.warning("making room in %s: %s", place.backend.url, error)


async def prune(place: Place, rules: Retention, *, dry_run: bool = False, with_uploads: bool = True) -> Pruned:
    """Delete what *rules* do not keep, and the garbage; with *dry_run* only say what that would be.

    What cannot be read or removed is left, with the reason: one bad step holds up no other.

    Args:
        with_uploads: abort the uploads that dead saves left in an object store, too; a request more, at least.

    Raises:
        StorageError: the place cannot be listed.
    """
    engine = place.engine
    busy = set(engine.busy_attempts)  # before the look: what is committed during it would seem to be left behind
    entries = await scan(place.backend, place.heads)
    busy |= engine.busy_attempts
    committed = [entry for entry in entries if entry.committed]
    by_id = {entry.id: entry for entry in entries}
    now_ns = None
    if rules.newer_than is not None:
        with suppress(StorageError):  # where no probe can be written no age is known, and nothing goes by it
            now_ns = await storage_now_ns(place.backend, engine.token(6))
    facts = await step_facts(place.backend, committed, rules.best is not None, place.heads.doubted, now_ns)
    facts = await mark_unsound(place.backend, facts, engine.lineage.runs)
    saving = {entry.id for entry in entries if busy.intersection(entry.attempts)}
    protected = place.being_read | saving
    doomed: list[Doomed] = []
    left = _Left()
    for step in plan_retention(facts, rules, protected):
        entry = by_id[step.id]
        with _leaving(place, entry.id, left):
            if (reader := await find_reader(place.backend, step.id, engine.token(6))) is not None:
                left.append((step.id, reader))
                continue
            if not dry_run:
                del by_id[step.id]
                await delete_step(place.backend, entry)
                engine.emit(StepDeleted(at_ns=engine.now_ns(), step=step.step, reason=step.reason))
            doomed.append(step)
    garbage = await _collect_all(place, list(by_id.values()), rules, busy, left, dry_run=dry_run)
    kept = explain_kept(facts, rules, protected)
    judged = {fact.id for fact in facts}
    kept += [Kept(entry.id, entry.step, why_unread(entry)) for entry in committed if entry.id not in judged]
    thinned = await _thin(
        place,
        rules,
        may_be_thinned(facts, rules, protected, by_id.keys() - {step.id for step in doomed}),
        left,
        dry_run=dry_run,
    )
    swept = DeadUploads()
    if with_uploads:
        swept = await find_leftovers(place.backend, grace_s=rules.grace_s, nonce=engine.token(6), busy=busy)
        swept = swept if dry_run else await abort_leftovers(place.backend, swept)
    keys = tuple(upload.key for upload in swept.uploads)
    if not dry_run:
        for key in keys:
            engine.emit(GarbageDeleted(at_ns=engine.now_ns(), step=parse_step(key.partition("/")[0]) or 0, key=key))
    return Pruned(
        tuple(doomed),
        tuple(garbage),
        tuple(left),
        tuple(kept),
        keys,
        swept.problem,
        tuple(thinned),
        tuple(dict.fromkeys(left.failed)),
    )


class _Left(list[tuple[str, str]]):
    """What is left, with the reasons; *failed*: the steps that are not left for a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []


async def _thin(place: Place, rules: Retention, steps: list[StepFacts], left: _Left, *, dry_run: bool) -> list[Thinned]:
    """Have the older of the kept *steps*, the newest first, keep their weights alone; return which."""
    engine = place.engine
    thinned: list[Thinned] = []
    whole_count, verified = 0, False
    for fact in steps:
        with _leaving(place, fact.id, left):
            entry = await look_at(place.backend, fact.id)
            if not entry.generations or (fact.id, entry.generations[0]) in place.thin_steps:
                continue
            manifest = await read_generation(place.backend, fact.id, entry.generations[0])
            if has_weights_only(manifest):
                place.thin_steps.add((fact.id, manifest.generation))
                continue
            whole_count += 1
            stays = whole_count <= (rules.optimizer or 0) or (fact.verified and not verified)
            verified = verified or fact.verified
            if stays:
                continue
            if (reader := await find_reader(place.backend, fact.id, engine.token(6))) is not None:
                left.append((fact.id, reader))
                continue
            if dry_run:
                thinned.append(plan_thinning(manifest, entry.generations[0] + 1, "")[1])
                continue
            thinned.append(await thin(place.backend, manifest, entry.generations[0], engine.token(16)))
            engine.emit(GarbageDeleted(at_ns=engine.now_ns(), step=fact.step, key=f"{fact.id}: all but its weights"))
    return thinned


@contextmanager
def _leaving(place: Place, step_id: str, left: _Left) -> Iterator[None]:
    """Go on from what cannot be done to one step in the block: *left* gets the reason, the log once."""
    try:
        yield
    except CheckpointError as error:
        left.append((step_id, str(error)))
        left.failed.append(step_id)
        if place.heads.is_news(f"{step_id}: {error}"):
            logger.warning("%s in %s is left as it is: %s", step_id, place.backend.url, error)


async def _collect_all(
    place: Place,
    entries: list[StepEntry],
    rules: Retention,
    busy: Collection[str],
    left: _Left,
    *,
    dry_run: bool,
) -> list[Garbage]:
    engine = place.engine
    collected: list[Garbage] = []
    for entry in entries:
        if entry.id in place.being_read:
            continue
        found: list[Garbage] = []
        with _leaving(place, entry.id, left):
            found = await find_garbage(
                place.backend,
                entry,
                grace_s=rules.grace_s,
                nonce=engine.token(6),
                busy=busy,
                doubted=place.heads.doubted,
            )
            if found and not dry_run and await find_reader(place.backend, entry.id, engine.token(6)) is not None:
                found = []
        for garbage in found:
            with _leaving(place, entry.id, left):
                if dry_run or await collect(place.backend, garbage, engine.token(16)):
                    collected.append(garbage)
                    if not dry_run:
                        key = f"{garbage.step_id}/a-{garbage.attempt}"
                        engine.emit(GarbageDeleted(at_ns=engine.now_ns(), step=entry.step, key=key))
    return collected


async def delete(places: StepPlaces, step: int) -> None:
    """Delete one step from all tiers, manifests first; the farthest first, so that nothing seems to come back."""
    for listed in sorted(await find_step(places, step), key=lambda one: one.place.number, reverse=True):
        await delete_step(listed.place.backend, listed.entry)
    places.engine.emit(StepDeleted(at_ns=places.engine.now_ns(), step=step, reason="asked for"))
