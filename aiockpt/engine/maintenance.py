"""Maintenance of committed checkpoints: hints, retention, garbage, verification, description."""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.find import StepPlaces, committed_steps, find_manifest, find_step, finish_commits
from aiockpt.errors import CheckpointError, CorruptionError, RankFailedError, StorageError, StorageFullError
from aiockpt.events import GarbageDeleted, StepDeleted
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import attempt_folder, damaged_key, parse_step, verified_key
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
from aiockpt.pipeline.discover import (
    StepCopy,
    StepEntry,
    find_copy,
    first_in_full,
    is_news,
    list_step,
    newest_first,
    read_generation,
    scan,
)
from aiockpt.pipeline.latest import Latest, read_latest, remove_latest, write_latest
from aiockpt.pipeline.step_info import StepInfo as StepInfo
from aiockpt.pipeline.step_info import count_not_finite_in, info_of, read_info
from aiockpt.planning.weights import has_weights_only
from aiockpt.policies.retention import Doomed, Kept, StepFacts, explain_kept, may_be_thinned, plan_retention
from aiockpt.runtime.limits import Pace, open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import storage_now_ns, walk
from aiockpt.units import count

logger = logging.getLogger("aiockpt")

IDLE_S = 900.0
"""Before a save fails for room, an attempt that was not written to for so long is garbage: one that waits for a slab for so
long has failed."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One stored tensor: its name, dtype code (F32, BF16 …), global shape, bytes, and the files that hold it.

    Attributes:
        axes: their order in memory, slowest first, where it is known not to be row-major, as files are.
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
        left_out: names that the caller excluded from the save; of tensors with dtype code and shape, else None.
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
    """A copy of a step in another place.

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
        left: (step id, reason) of what should be removed, or searched for garbage, and could not.
        failed: the ids of those that were left because of the storage or its content, not because of a reader.
        kept: the steps that stay, the newest first, with what keeps them.
        thinned: the steps that keep their weights alone from now on, or would.
        uploads: the keys of unfinished uploads of dead saves that were aborted, or would be.
        note: what could not be listed or aborted, and why; None without such.
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
    """Return every committed step, the newest first, damaged ones with their problem; as its nearest tier has it."""
    nearest: dict[tuple[str, int], StepInfo] = {}
    for listed in await committed_steps(places):
        which = (listed.entry.id, listed.entry.age_order[0])
        if which not in nearest:
            nearest[which] = await read_info(listed.backend, listed.entry)
    return tuple(nearest.values())


async def finish(place: Place) -> tuple[StepInfo, ...]:
    """Roll forward every attempt whose votes are complete; return what was committed by that."""
    entries = await scan(place.backend)
    return tuple([info_of(manifest, entry) for entry in entries for manifest in await finish_commits(place, entry)])


async def latest(places: StepPlaces) -> int | None:
    """Return the newest valid step that some tier has in full; None when there is no valid step at all.

    Where there are only weights, the newest of these.

    Raises:
        NewerFormatError, StorageError: of a step that may be the newest.
    """
    found = await first_in_full(newest_first(await committed_steps(places), lambda *_: None))
    return None if found is None else found[1].step


async def describe(places: StepPlaces, step: int | None) -> Description:
    """Return what a step holds (the newest valid one for None), without reading data."""
    found = await find_manifest(places, step)
    place, manifest = found.place, found.manifest
    entry = await list_step(place.backend, manifest.id)
    tensors = []
    for name, stored in manifest.tensors.items():
        files = sorted({piece.file for piece in stored.pieces})
        size = sum(piece.end - piece.start for piece in stored.pieces)
        paths = tuple(manifest.files[file].p for file in files)
        tensors.append(TensorInfo(name, stored.dtype, stored.shape, size, paths, stored.axes or None))
    return Description(
        info=info_of(manifest, entry),
        tensors=tuple(tensors),
        alias=dict(manifest.alias),
        values=manifest.state.get("global"),
        per_rank=manifest.state.get("per_rank", {}),
        user=manifest.user,
        left_out=manifest.left_out or {},
        not_finite=dict(count_not_finite_in(manifest.files)),
    )


async def verify(places: StepPlaces, step: int | None, on_read: Callable[[int], object] = lambda _: None) -> Verified:
    """Read every block of a step, compare it, and leave a mark of the result, which retention uses.

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
        StorageError: of either place. A retry does not copy again what was copied.
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
    """Mark a generation as verified: all of it was read, and is as it was saved."""
    await _mark(place, manifest, damaged_key, verified_key, {"bytes": sum(file.size for file in manifest.files)})


async def mark_damaged(place: Place, manifest: Manifest, problem: str) -> None:
    """Mark a generation as damaged; retention does not count it."""
    await _mark(place, manifest, verified_key, damaged_key, {"problem": problem})


async def _mark(
    place: Place, manifest: Manifest, old: Callable[[str, int], str], new: Callable[[str, int], str], facts: Any
) -> None:
    """Replace the mark of an earlier verification of a generation by the result of this one."""
    mark = {"verified_ns": place.engine.world.clock.time_ns(), "write_id": manifest.write_id, **facts}
    try:
        # The old one first: at most one of the two marks exists (docs/format.md#marks-and-hints).
        await place.backend.delete([old(manifest.id, manifest.generation)])
        await place.backend.put(new(manifest.id, manifest.generation), msgspec.json.encode(mark))
    except StorageError as error:  # a read-only place can be verified too
        logger.info("%s: verified, but the mark of the result cannot be written: %s", manifest.id, error)


async def clean_up(place: Place, saved: SaveResult) -> None:
    """After a commit: move the hint, collect what the new generation made garbage, apply retention.

    The checkpoint is safe by now: failures here are logged, and the next commit retries. The hint is optional.
    """
    place.newest_saved = saved
    try:
        # The lock is taken before anything is waited for: the end of a run waits for it.
        async with place.cleaning, open_tasks() as tasks:
            if place.newest_saved is saved:  # a clean-up that comes late leaves the hint to the later ones
                tasks.start_soon(_move_hint, place, saved)
            if place.retention is not None or saved.generation > 1:
                await _remove_outdated(place, saved, place.retention)
    except CheckpointError as error:
        logger.warning("clean-up after %s failed, and is retried after the next commit: %s", saved.id, error)
    except Exception:  # no error of ours; nothing else would report it
        logger.exception("clean-up after %s failed, and is retried after the next commit", saved.id)


async def _remove_outdated(place: Place, saved: SaveResult, rules: Retention | None) -> None:
    if rules is None:
        entry = await list_step(place.backend, saved.id)
        await _Pruning(place, Retention(), place.engine.busy_attempts).collect([entry])
        return
    pruned = await prune(place, rules, with_uploads=place.uploads_are_due())
    if pruned.note is not None:
        logger.info("%s: %s", place.backend.url, pruned.note)


async def _move_hint(place: Place, saved: SaveResult) -> None:
    """Make the hint name a save; warn before if it names one that another job has made since this process moved it."""
    lineage, backend = place.engine.lineage, place.backend
    if place.hint_is_due():
        latest = await read_latest(backend)
        if latest is not None and not lineage.knows(latest.id, latest.generation):
            with suppress(CheckpointError):
                lineage.log_other_job((await list_step(backend, latest.id)).head, backend.url)
    await write_latest(backend, Latest(saved.id, saved.generation))


@asynccontextmanager
async def making_room(place: Place) -> AsyncIterator[None]:
    """Apply retention when a save in the block found no room, here or on another rank, so that a later one finds some."""
    try:
        yield
    except (StorageFullError, RankFailedError):
        await make_room(place)
        raise


async def make_room(place: Place) -> None:
    """Apply retention: the clean-up after the last save may have failed, or others may have filled the place.

    An attempt to which nothing was written for `IDLE_S` counts as dead then.
    """
    if place.engine.rank != 0:
        return
    rules = place.retention or Retention()
    try:
        async with place.cleaning:
            rules = msgspec.structs.replace(rules, grace_s=min(rules.grace_s, IDLE_S))
            await prune(place, rules, with_uploads=False)
    except CheckpointError as error:
        logger.warning("making room in %s failed: %s", place.backend.url, error)


async def held_by_others(place: Place) -> str:
    """Return in words what is left of dead saves, and of steps that could not be deleted; "" where there is nothing."""
    rules = msgspec.structs.replace(place.retention or Retention(), grace_s=0.0)
    try:
        found = await prune(place, rules, dry_run=True, with_uploads=False)
        folders = [attempt_folder(one.step_id, one.attempt) for one in found.garbage] + [one.id for one in found.steps]
        held_bytes = sum(
            [stat.size for folder in folders for stat in [one async for one in walk(place.backend, folder)]]
        )
    except CheckpointError:
        return ""
    if not folders:
        return ""
    what = [count(len(found.garbage), "attempt") + " at a save"] * bool(found.garbage)
    what += [count(len(found.steps), "step") + " that could not be deleted"] * bool(found.steps)
    last = "" if rules.last is None else f" --last {rules.last}"
    return (
        f". {' and '.join(what)}, without a manifest or past retention, hold {held_bytes:,} bytes of it; if no other job"
        f" writes here: aiockpt prune {shlex.quote(place.backend.url)}{last} --grace-hours 0 --yes"
    )


async def prune(place: Place, rules: Retention, *, dry_run: bool = False, with_uploads: bool = True) -> Pruned:
    """Delete what *rules* do not keep, and the garbage; with *dry_run* only return what that would be.

    What cannot be read or removed is left, with the reason: one bad step does not stop the others.

    Args:
        with_uploads: abort the uploads that dead saves left in an object store, too; a request more, at least.

    Raises:
        StorageError: the place cannot be listed.
    """
    engine = place.engine
    busy = set(engine.busy_attempts)  # before the scan: what is committed during it would seem abandoned
    entries = await scan(place.backend, place.heads)
    # And after it: the scan may show attempts that have begun meanwhile.
    busy |= engine.busy_attempts
    committed = [entry for entry in entries if entry.committed]
    now_ns = None
    if rules.newer_than is not None:
        with suppress(StorageError):  # where no probe can be written no age is known, and nothing goes by it
            now_ns = await storage_now_ns(place.backend, engine.token(6))
    facts = await step_facts(place.backend, committed, rules.best is not None, place.heads.doubted, now_ns)
    facts = await mark_unsound(place.backend, facts, engine.lineage.runs)
    protected = place.being_read | {entry.id for entry in entries if busy.intersection(entry.attempts)}
    judged = {fact.id for fact in facts}
    unread = [Kept(entry.id, entry.step, why_unread(entry)) for entry in committed if entry.id not in judged]
    work = _Pruning(place, rules, busy, dry_run=dry_run)
    by_id = {entry.id: entry for entry in entries}
    doomed = await work.delete(plan_retention(facts, rules, protected), by_id)
    garbage = await work.collect(list(by_id.values()))
    stay = by_id.keys() - {step.id for step in doomed}
    thinned = await work.thin(may_be_thinned(facts, rules, protected, stay))
    swept = await work.sweep() if with_uploads else DeadUploads()
    return Pruned(
        steps=tuple(doomed),
        garbage=tuple(garbage),
        left=tuple(work.left),
        kept=(*explain_kept(facts, rules, protected), *unread),
        uploads=tuple(upload.key for upload in swept.uploads),
        note=swept.problem,
        thinned=tuple(thinned),
        failed=tuple(dict.fromkeys(work.failed)),
    )


class _Pruning:
    """One pass over a place, which removes things or, in a dry run, only lists them; a bad step does not stop the others.

    Args:
        busy: attempts of this process that are under way.

    Attributes:
        left: (step id, reason) of what could not be removed; *failed*: the steps that were not left for a reader.
    """

    def __init__(self, place: Place, rules: Retention, busy: Collection[str], *, dry_run: bool = False) -> None:
        self.left: list[tuple[str, str]] = []
        self.failed: list[str] = []
        self._place, self._backend, self._engine = place, place.backend, place.engine
        self._rules, self._busy, self._dry_run = rules, busy, dry_run
        self._is_dead = place.engine.names.find_dead() if place.engine.names else lambda _: False

    async def delete(self, doomed: Sequence[Doomed], by_id: dict[str, StepEntry]) -> list[Doomed]:
        """Delete steps; return which. A step that is deleted, perhaps only in part, is removed from *by_id*."""
        deleted: list[Doomed] = []
        for step in doomed:
            with self._leaving(step.id):
                if await self._is_held(step.id):
                    continue
                if not self._dry_run:
                    await delete_step(self._backend, by_id.pop(step.id))
                    self._engine.emit(StepDeleted(at_ns=self._engine.now_ns(), step=step.step, reason=step.reason))
                deleted.append(step)
        return deleted

    async def collect(self, entries: Sequence[StepEntry]) -> list[Garbage]:
        """Remove the garbage in steps; return it."""
        engine, doubted = self._engine, self._place.heads.doubted
        collected: list[Garbage] = []
        for entry in entries:
            if entry.id in self._place.being_read:
                continue
            found: list[Garbage] = []
            with self._leaving(entry.id):
                nonce, grace_s = engine.token(6), self._rules.grace_s
                found = await find_garbage(
                    self._backend,
                    entry,
                    grace_s=grace_s,
                    nonce=nonce,
                    busy=self._busy,
                    doubted=doubted,
                    is_dead=self._is_dead,
                )
                if found and not self._dry_run:
                    reader = await find_reader(self._backend, entry.id, engine.token(6))
                    found = found if reader is None else []
            for garbage in found:
                with self._leaving(entry.id):
                    if self._dry_run or await collect(self._backend, garbage, engine.token(16)):
                        collected.append(garbage)
                        self._report(entry.step, f"{garbage.step_id}/a-{garbage.attempt}")
        return collected

    async def thin(self, steps: Sequence[StepFacts]) -> list[Thinned]:
        """Reduce the older of the kept *steps*, the newest first, to their weights; return which."""
        known, token = self._place.thin_steps, self._engine.token
        thinned: list[Thinned] = []
        whole_count, verified = 0, False
        for fact in steps:
            with self._leaving(fact.id):
                # Listed again: `collect` may have removed generations since the scan.
                entry = await list_step(self._backend, fact.id)
                highest = max(entry.generations, default=0)
                if not highest or (fact.id, highest) in known:
                    continue
                manifest = await read_generation(self._backend, fact.id, highest)
                if has_weights_only(manifest):
                    known.add((fact.id, highest))
                    continue
                whole_count += 1
                stays = whole_count <= (self._rules.optimizer or 0) or (fact.verified and not verified)
                verified = verified or fact.verified
                if stays:
                    continue
                if await self._is_held(fact.id):
                    continue
                if self._dry_run:
                    thinned.append(plan_thinning(manifest, highest + 1, "")[1])
                else:
                    thinned.append(await thin(self._backend, manifest, highest, token(16)))
                self._report(fact.step, f"{fact.id}: all but its weights")
        return thinned

    async def sweep(self) -> DeadUploads:
        """Abort the uploads that dead saves left; return them."""
        nonce = self._engine.token(6)
        found = await find_leftovers(
            self._backend, grace_s=self._rules.grace_s, nonce=nonce, busy=self._busy, is_dead=self._is_dead
        )
        swept = found if self._dry_run else await abort_leftovers(self._backend, found)
        for upload in swept.uploads:
            self._report(parse_step(upload.key.partition("/")[0]) or 0, upload.key)
        return swept

    async def _is_held(self, step_id: str) -> bool:
        """Return whether another process reads a step, which is left for it."""
        reader = await find_reader(self._backend, step_id, self._engine.token(6))
        if reader is not None:
            self.left.append((step_id, reader))
        return reader is not None

    def _report(self, step: int, key: str) -> None:
        if not self._dry_run:
            self._engine.emit(GarbageDeleted(at_ns=self._engine.now_ns(), step=step, key=key))

    @contextmanager
    def _leaving(self, step_id: str) -> Iterator[None]:
        """Record the failure of the block on one step, and go on; each reason is logged once."""
        try:
            yield
        except CheckpointError as error:
            self.left.append((step_id, str(error)))
            self.failed.append(step_id)
            if is_news(self._backend, f"{step_id}: {error}"):
                logger.warning("%s in %s is left as it is: %s", step_id, self._backend.url, error)


async def delete(places: StepPlaces, step: int) -> None:
    """Delete one step from all tiers, manifests first; the farthest first, so that nothing seems to come back."""
    async with AsyncExitStack() as held:
        for place in places.places:  # before the steps are listed: a clean-up may be thinning this one
            await held.enter_async_context(place.cleaning)
        for listed in sorted(await find_step(places, step), key=lambda one: one.number, reverse=True):
            await delete_step(listed.backend, listed.entry)
            await remove_latest(listed.backend, listed.entry.id)
    places.engine.emit(StepDeleted(at_ns=places.engine.now_ns(), step=step, reason="asked for"))
