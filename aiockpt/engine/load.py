"""How is a state loaded? Choose the newest valid step, check its manifest wholly, read straight into place, verify."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from aiockpt.adapters.native import LoadTarget, Stored, open_target
from aiockpt.engine.context import Engine
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    NoValidCheckpointError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.events import Loaded, RolledForward, StepSkipped
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import step_id
from aiockpt.pipeline.commit import roll_forward
from aiockpt.pipeline.discover import StepEntry, look_at, newest_manifest, scan
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.pipeline.place import Places
from aiockpt.runtime.future import LoadResult
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import TensorShard

logger = logging.getLogger("aiockpt")
Skipped = list[tuple[str, str]]


class LoadRequest(msgspec.Struct, frozen=True):
    """What a caller asked ``load`` for; the fields are those of `aiockpt.Checkpointer.load`."""

    state: Mapping[str, Any]
    step: int | None
    only: Sequence[str] | None
    strict: bool
    rename: Mapping[str, str] | Callable[[str], str] | None


class Filled(msgspec.Struct, frozen=True):
    """A load whose tensors are filled; ``target.apply()`` fills the objects, on the waiter's thread."""

    result: LoadResult
    target: LoadTarget


async def load(engine: Engine, request: LoadRequest) -> Filled | None:
    """Fill the tensors of a state; None only when no checkpoint exists at all.

    Raises:
        NoValidCheckpointError: steps exist and none is valid.
        StateMismatchError: the checkpoint does not fit the state; nothing was overwritten.
        CorruptionError: the step that was asked for is damaged; the state may be partly overwritten.
    """
    begun_ns = engine.now_ns()
    if request.step is not None:
        return await _load_step(engine, request, request.step, begun_ns)
    candidates = await committed_steps(engine)
    skipped: Skipped = []
    touched: frozenset[str] = frozenset()
    for entry in candidates:
        try:
            manifest = await newest_manifest(engine.backend, entry)
        except CorruptionError as error:
            _skip(engine, entry, error, skipped)
            continue
        target = await _open(engine, request, manifest)
        if not touched <= target.written:
            raise _unusable(entry, touched - target.written, skipped)
        try:
            return await _fill(engine, manifest, target, begun_ns, skipped)
        except CorruptionError as error:
            touched |= target.written
            _skip(engine, entry, error, skipped)
    if candidates:
        raise NoValidCheckpointError(engine.backend.url, skipped)
    return None


async def _load_step(engine: Engine, request: LoadRequest, step: int, begun_ns: int) -> Filled:
    entry = await find_step(engine, step)
    manifest = await newest_manifest(engine.backend, entry)
    target = await _open(engine, request, manifest)
    try:
        return await _fill(engine, manifest, target, begun_ns, [])
    except CorruptionError as error:
        error.add_note("The state given to load() is partly overwritten: build it anew, or load another step over it.")
        raise


def _skip(engine: Engine, entry: StepEntry, error: CheckpointError, skipped: Skipped) -> None:
    skipped.append((entry.id, str(error)))
    logger.warning("step %s is skipped: %s", entry.id, error)
    engine.emit(StepSkipped(at_ns=engine.now_ns(), step=entry.step, reason=str(error)))


def _unusable(entry: StepEntry, left: Collection[str], skipped: Skipped) -> StateMismatchError:
    newer = ", ".join(name for name, _ in skipped)
    return StateMismatchError(
        entry.id,
        [f"{name}: overwritten from {newer} and not stored here" for name in sorted(left)],
        "The state is partly overwritten and not usable: build it anew, then load an explicit step.",
    )


async def committed_steps(engine: Engine) -> list[StepEntry]:
    """Return the committed steps, newest first, after finishing the commits that dead jobs could not."""
    entries = await scan(engine.backend)
    finished = [manifest for entry in entries for manifest in await finish_commits(engine, entry)]
    if finished:
        entries = await scan(engine.backend)
    return [entry for entry in entries if entry.committed]


async def finish_commits(engine: Engine, entry: StepEntry) -> list[Manifest]:
    """Roll forward the attempts of a step that have all their votes and no manifest."""
    idle = tuple(attempt for attempt in entry.attempts if attempt not in engine.busy_attempts)
    if not idle or (entry.head is not None and idle == (entry.head.attempt,)):
        return []
    try:
        finished = await roll_forward(engine.backend, msgspec.structs.replace(entry, attempts=idle), engine.world)
    except StorageError as error:  # a place that can only be read: what is committed can be loaded all the same
        logger.warning("%s has votes that cannot be turned into a commit here: %s", entry.id, error)
        return []
    for manifest in finished:
        engine.emit(RolledForward(at_ns=engine.now_ns(), step=entry.step, attempt=manifest.attempt))
    return finished


async def find_step(engine: Engine, step: int) -> StepEntry:
    """Return the committed step of that number.

    Raises:
        StepNotFoundError: there is none; the message lists those that are there.
    """
    entry = await look_at(engine.backend, step_id(step))
    if not entry.committed and await finish_commits(engine, entry):
        entry = await look_at(engine.backend, step_id(step))
    if not entry.committed:
        have = [str(other.step) for other in await scan(engine.backend) if other.committed]
        raise StepNotFoundError(f"{engine.backend.url} has no step {step}; it has: {', '.join(have[:10]) or 'none'}")
    return entry


async def find_manifest(engine: Engine, step: int | None) -> Manifest:
    """Return the checked manifest of a step; of the newest valid one for None.

    Raises:
        StepNotFoundError: there is none.
        ManifestError, NoValidCheckpointError: none of it is valid.
    """
    if step is not None:
        return await newest_manifest(engine.backend, await find_step(engine, step))
    skipped: Skipped = []
    for entry in await committed_steps(engine):
        try:
            return await newest_manifest(engine.backend, entry)
        except CorruptionError as error:
            _skip(engine, entry, error, skipped)
    if skipped:
        raise NoValidCheckpointError(engine.backend.url, skipped)
    raise StepNotFoundError(f"{engine.backend.url} holds no checkpoint yet")


def stored_state(manifest: Manifest, rank: int, world_size: int = 1) -> Stored:
    """Return what *manifest* offers to a state on *rank* of *world_size*."""
    every_rank = manifest.state.get("per_rank", {})
    return Stored(
        tensors={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        alias=manifest.alias,
        values=manifest.state.get("global"),
        per_rank=every_rank.get(str(rank)),
        where=manifest.id,
        step=manifest.step,
        rank=rank,
        world_size=world_size,
        every_rank=every_rank,
        saved_world_size=manifest.world_size,
    )


async def _open(engine: Engine, request: LoadRequest, manifest: Manifest) -> LoadTarget:
    stored = stored_state(manifest, engine.ranks.rank, engine.ranks.world_size)
    return await run_blocking(
        engine.state_work,
        lambda: open_target(request.state, stored, only=request.only, strict=request.strict, rename=request.rename),
    )


async def _fill(engine: Engine, manifest: Manifest, target: LoadTarget, begun_ns: int, skipped: Skipped) -> Filled:
    async with engine.reading(manifest.id):
        if engine.options.io.verify == "full":
            await verify_files(engine, manifest)
        read_bytes = await fill_tensors(engine, manifest, target.wanted)
    engine.descend_from(manifest.id)
    result = LoadResult(
        step=manifest.step,
        id=manifest.id,
        generation=manifest.generation,
        bytes=sum(shard.nbytes for shard in target.wanted),
        read_bytes=read_bytes,
        seconds=engine.since_s(begun_ns),
        skipped=tuple(skipped),
        missing=target.missing,
        unexpected=target.unexpected,
    )
    engine.emit(
        Loaded(
            at_ns=engine.now_ns(),
            step=result.step,
            bytes=result.bytes,
            read_bytes=read_bytes,
            seconds=result.seconds,
        )
    )
    return Filled(result, target)


async def fill_tensors(engine: Engine, manifest: Manifest, wanted: Sequence[TensorShard]) -> int:
    """Fill the tensors of *wanted* from the files of *manifest*, every block verified; return the bytes read."""
    places = await run_blocking(engine.state_work, Places, manifest, wanted)
    read = 0

    def on_read(size: int) -> None:
        nonlocal read
        read += size

    io = engine.options.io
    fetcher = Fetcher(
        engine.backend,
        manifest,
        places.memories,
        read_bytes=io.read_bytes,
        verify=io.verify != "none",
        on_read=on_read,
    )
    for landings in places.plan.passes:
        async with open_tasks() as tasks:
            for file, some in landings.items():
                tasks.start_soon(fetcher.fetch_file, file, some)
    await run_blocking(engine.state_work, places.settle)
    return read


async def verify_files(engine: Engine, manifest: Manifest, on_read: Callable[[int], object] = lambda _: None) -> None:
    """Read and compare every block of every file of *manifest*.

    Raises:
        CorruptionError: names file, block, offset and tensors.
    """
    fetcher = Fetcher(engine.backend, manifest, (), read_bytes=engine.options.io.read_bytes, on_read=on_read)
    for index in range(len(manifest.files)):
        await fetcher.verify_file(index)
