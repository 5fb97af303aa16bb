"""What happens to checkpoints after they are committed? Hints, retention, garbage, verification, looking inside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.find import committed_steps, find_manifest, find_step, finish_commits
from aiockpt.errors import CheckpointError, CorruptionError, StorageError
from aiockpt.events import GarbageDeleted, StepDeleted
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import LATEST_KEY, damaged_key, verified_key
from aiockpt.options import Retention
from aiockpt.pipeline.collect import Garbage, collect, delete_step, find_garbage, is_leased, step_facts
from aiockpt.pipeline.content import load_cargo
from aiockpt.pipeline.copy import Windows, copy_step
from aiockpt.pipeline.discover import StepCopy, StepEntry, find_copy, look_at, newest_manifest, scan
from aiockpt.pipeline.steps import StepInfo as StepInfo
from aiockpt.pipeline.steps import look_into, tell
from aiockpt.planning.weights import has_weights_only
from aiockpt.retention import Doomed, Kept, explain_kept, plan_retention
from aiockpt.runtime.future import SaveResult
from aiockpt.runtime.limits import Pace
from aiockpt.storage.backend import Backend

logger = logging.getLogger("aiockpt")


class TensorInfo(msgspec.Struct, frozen=True):
    """One stored tensor: its name, dtype code (F32, BF16 …), global shape, bytes, and the files that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    files: tuple[str, ...]


class Description(msgspec.Struct, frozen=True):
    """What a checkpoint holds; read from its manifest alone.

    Attributes:
        alias: names that share the memory of another tensor.
        values: the plain values as FORMAT §4 writes them; ``per_rank`` those of each rank.
    """

    info: StepInfo
    tensors: tuple[TensorInfo, ...]
    alias: dict[str, str]
    values: object
    per_rank: dict[str, object]
    user: object


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
        left: (step id, reason) of what should go and could not.
        kept: the steps that stay, the newest first, with what keeps them.
    """

    steps: tuple[Doomed, ...]
    garbage: tuple[Garbage, ...]
    left: tuple[tuple[str, str], ...] = ()
    kept: tuple[Kept, ...] = ()


async def steps(engine: Engine) -> tuple[StepInfo, ...]:
    """Return every committed step, the newest first, damaged ones with their problem; what its nearest tier says of it."""
    nearest: dict[tuple[str, int], StepInfo] = {}
    for listed in await committed_steps(engine):
        which = (listed.entry.id, listed.entry.age_order[0])
        if which not in nearest:
            nearest[which] = await look_into(listed.engine.backend, listed.entry)
    return tuple(nearest.values())


async def finish(engine: Engine) -> tuple[StepInfo, ...]:
    """Roll forward every attempt whose votes are complete; return what was committed by that."""
    entries = await scan(engine.backend)
    return tuple([tell(manifest, entry) for entry in entries for manifest in await finish_commits(engine, entry)])


async def latest(engine: Engine) -> int | None:
    """Return the newest valid step that some tier has in full; None when there is no valid step at all.

    Where there are only weights, the newest of these.
    """
    weights: int | None = None
    for listed in await committed_steps(engine):
        try:
            manifest = await newest_manifest(listed.engine.backend, listed.entry)
        except CorruptionError:
            continue
        if not has_weights_only(manifest):
            return manifest.step
        weights = manifest.step if weights is None else weights
    return weights


async def describe(engine: Engine, step: int | None) -> Description:
    """Return what a step holds (the newest valid one for None), without reading data."""
    found = await find_manifest(engine, step)
    engine, manifest = found.engine, found.manifest
    entry = await look_at(engine.backend, manifest.id)
    tensors = []
    for name, stored in manifest.tensors.items():
        files = sorted({piece.file for piece in stored.pieces})
        size = sum(piece.end - piece.start for piece in stored.pieces)
        tensors.append(
            TensorInfo(name, stored.dtype, stored.shape, size, tuple(manifest.files[file].p for file in files))
        )
    return Description(
        info=tell(manifest, entry),
        tensors=tuple(tensors),
        alias=dict(manifest.alias),
        values=manifest.state.get("global"),
        per_rank=manifest.state.get("per_rank", {}),
        user=manifest.user,
    )


async def verify(engine: Engine, step: int | None, on_read: Callable[[int], object] = lambda _: None) -> Verified:
    """Read every block of a step, compare it, and leave a mark of what was found; retention goes by it.

    Raises:
        CorruptionError: names the first bad file, block, offset and tensors.
    """
    from aiockpt.engine.load import verify_files  # it loads torch, which a writer process (`aiockpt.worker`) need not

    begun_ns = engine.now_ns()
    found = await find_manifest(engine, step)
    engine, manifest = found.engine, found.manifest
    async with engine.reading(manifest.id):
        try:
            await verify_files(engine, manifest, on_read)
        except CorruptionError as error:
            await _mark(engine, manifest, verified_key, damaged_key, {"problem": str(error)})
            raise
    size = sum(file.size for file in manifest.files)
    verified = Verified(manifest.step, manifest.id, manifest.generation, size, engine.since_s(begun_ns))
    await _mark(engine, manifest, damaged_key, verified_key, {"bytes": size})
    return verified


async def copy(
    engine: Engine, step: int | None, target: Backend, on_copied: Callable[[int], object] = lambda _: None
) -> Copied:
    """Copy a step (the newest valid one for None) to *target*, every block compared on the way.

    Raises:
        StepNotFoundError, NoValidCheckpointError: there is nothing to copy.
        CorruptionError: the step is damaged; nothing became visible at the target.
        StorageError: of either place. What was copied is not copied again the next time.
    """
    begun_ns = engine.now_ns()
    found = await find_manifest(engine, step)
    engine, manifest = found.engine, found.manifest
    existed = await find_copy(target, manifest.id, manifest.attempt) is not None
    async with engine.reading(manifest.id):
        io = engine.options.io
        source = [StepCopy(engine.backend, manifest)]
        there = await copy_step(
            await load_cargo(source, "full", window_bytes=io.read_bytes, file_bytes=io.file_bytes),
            target,
            engine.world,
            windows=Windows(window_bytes=io.read_bytes),
            pace=Pace(None, engine.world.clock),
            on_copied=on_copied,
        )
    size = sum(file.size for file in there.files)
    seconds = engine.since_s(begun_ns)
    return Copied(there.step, there.id, target.url, there.generation, size, seconds, existed)


async def _mark(
    engine: Engine, manifest: Manifest, old: Callable[[str, int], str], new: Callable[[str, int], str], facts: Any
) -> None:
    """Replace what an earlier verification said of a generation by what this one found."""
    mark = {"verified_ns": engine.world.clock.time_ns(), "write_id": manifest.write_id, **facts}
    try:
        await engine.backend.delete([old(manifest.id, manifest.generation)])
        await engine.backend.put(new(manifest.id, manifest.generation), msgspec.json.encode(mark))
    except StorageError as error:  # a read-only place can be verified too
        logger.info("%s was verified; the mark cannot be left: %s", manifest.id, error)


async def tidy(engine: Engine, saved: SaveResult) -> None:
    """After a commit: move the hint, collect what the new generation made garbage, apply retention.

    The checkpoint is safe by now: trouble here is logged, and tried again after the next commit.
    """
    try:
        async with engine.cleaning:
            await engine.backend.put(LATEST_KEY, f"{saved.id}\n".encode())
            rules = engine.options.retention
            if rules is not None:
                await prune(engine, rules)
            elif saved.generation > 1:
                entry = await look_at(engine.backend, saved.id)
                await _collect_all(engine, [entry], Retention(), engine.busy_attempts, dry_run=False)
    except CheckpointError as error:
        logger.warning("cleaning up after %s: %s", saved.id, error)


async def prune(engine: Engine, rules: Retention, *, dry_run: bool = False) -> Pruned:
    """Delete what *rules* do not keep, and the garbage; with *dry_run* only say what that would be."""
    busy = set(engine.busy_attempts)  # before the look: what is committed during it would seem to be left behind
    entries = await scan(engine.backend, engine.heads)
    busy |= engine.busy_attempts
    committed = [entry for entry in entries if entry.committed]
    facts = await step_facts(engine.backend, committed, with_metrics=rules.best is not None)
    saving = {entry.id for entry in entries if busy.intersection(entry.attempts)}
    protected = engine.being_read | saving
    doomed, left = [], []
    by_id = {entry.id: entry for entry in entries}
    for step in plan_retention(facts, rules, protected):
        if await is_leased(engine.backend, step.id, engine.token(6)):
            left.append((step.id, "another process is reading it"))
            continue
        doomed.append(step)
        if not dry_run:
            await delete_step(engine.backend, by_id.pop(step.id))
            engine.emit(StepDeleted(at_ns=engine.now_ns(), step=step.step, reason=step.reason))
    garbage = await _collect_all(engine, list(by_id.values()), rules, busy, dry_run=dry_run)
    kept = explain_kept(facts, rules, protected)
    judged = {fact.id for fact in facts}
    kept += [Kept(entry.id, entry.step, "its manifest cannot be read") for entry in committed if entry.id not in judged]
    return Pruned(tuple(doomed), tuple(garbage), tuple(left), tuple(kept))


async def _collect_all(
    engine: Engine, entries: list[StepEntry], rules: Retention, busy: Collection[str], *, dry_run: bool
) -> list[Garbage]:
    collected = []
    for entry in entries:
        if entry.id in engine.being_read:
            continue
        found = await find_garbage(engine.backend, entry, grace_s=rules.grace_s, nonce=engine.token(6), busy=busy)
        if found and not dry_run and await is_leased(engine.backend, entry.id, engine.token(6)):
            continue
        for garbage in found:
            if dry_run or await collect(engine.backend, garbage, engine.token(16)):
                collected.append(garbage)
                if not dry_run:
                    key = f"{garbage.step_id}/a-{garbage.attempt}"
                    engine.emit(GarbageDeleted(at_ns=engine.now_ns(), step=entry.step, key=key))
    return collected


async def delete(engine: Engine, step: int) -> None:
    """Delete one step from all tiers, manifests first; the farthest first, so that nothing seems to come back."""
    for listed in sorted(await find_step(engine, step), key=lambda one: engine.tiers.index(one.engine), reverse=True):
        await delete_step(listed.engine.backend, listed.entry)
    engine.emit(StepDeleted(at_ns=engine.now_ns(), step=step, reason="asked for"))
