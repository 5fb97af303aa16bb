"""A save of a process that saves alone: begin an attempt, stream its files while the copy still runs, vote, commit.

`save_alone` is the whole of it; `aiockpt.ranks.save` is that of many ranks, with the same steps.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec

from aiockpt.engine.context import Engine, Place
from aiockpt.engine.job import SaveJob
from aiockpt.engine.maintenance import held_by_others, make_room
from aiockpt.errors import (
    BadStepError,
    CheckpointError,
    CommitTimeoutError,
    CorruptionError,
    StepExistsError,
    StorageFullError,
)
from aiockpt.events import Committed, DataWritten, NotFiniteFound, SaveSkipped, SaveStarted
from aiockpt.format.document import digest128
from aiockpt.format.manifest import FileEntry, Manifest, Receipt, required_for
from aiockpt.format.merge import find_differences
from aiockpt.format.names import data_path, list_names, step_id
from aiockpt.futures import SaveResult
from aiockpt.pipeline.collect import Garbage, collect
from aiockpt.pipeline.commit import Attempt, cast_vote, commit
from aiockpt.pipeline.discover import StepEntry, list_step, newest_manifest
from aiockpt.pipeline.step_info import count_not_finite_in
from aiockpt.pipeline.upload import FileScreen
from aiockpt.pipeline.wrong_places import refuse_step
from aiockpt.planning.write_plan import SavePlan
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.transfer import space_for
from aiockpt.units import count

logger = logging.getLogger("aiockpt")

CLEAN_UP_DEADLINE_S = 60.0
_NAMES_TOLD = 5
MOST_RECORDS_BYTES = 16 << 20
RECORDS_BYTES, RECORD_BYTES = 256 << 10, 2 << 10
"""Room required beside the data before a save begins: folders, receipt and manifest, and what a tensor takes in them."""
RECORD_FILES = 8
"""The folders of step, attempt, data and receipts, the receipt, decision and manifest, and one that is being written."""


class OneAtATime:
    """A lock for each step: its saves run one at a time, in the order of their arrival."""

    def __init__(self) -> None:
        self._locks: dict[int, anyio.Lock] = {}

    @asynccontextmanager
    async def saving(self, step: int) -> AsyncIterator[None]:
        """Exclude other saves of *step* for the length of the block."""
        lock = self._locks.setdefault(step, anyio.Lock())
        try:
            async with lock:
                yield
        finally:
            # anyio hands a released lock to the next waiter at once: one that is not locked has no waiter.
            if not lock.locked():
                self._locks.pop(step, None)


async def save_alone(place: Place, job: SaveJob) -> SaveResult:
    """Save one state; when this returns it is committed.

    Raises:
        CommitConflictError, CommitTimeoutError, StepExistsError, StorageError: see `aiockpt.errors`. Nothing is visible
            then; after a time-out the outcome is unknown until the storage is read.
    """
    emit_start(place.engine, job)
    with job.stages.time("begin"):
        begun = await begin(place, job, job.nonce)
    if isinstance(begun, SaveResult):
        return begun
    async with attempting(place, job, begun):
        receipt = await vote(place, job, begun, await write_files(place, job, begun.attempt))
        with job.stages.time("commit"):
            manifest = await commit_votes(place, begun, [receipt], own=True)
    return committed(place.engine, job, manifest.generation)


def emit_start(engine: Engine, job: SaveJob) -> None:
    """Notify observers of what is saved."""
    plan, now_ns = job.plan, engine.now_ns()
    engine.emit(
        SaveStarted(
            at_ns=now_ns,
            step=job.step,
            bytes=plan.tensor_bytes,
            tensor_count=len(plan.tensors),
            seconds=(now_ns - job.begun_ns) / 1e9,
            metrics=dict(job.request.metrics),
        )
    )
    job.stages.flush()


async def begin(place: Place, job: SaveJob, nonce: str | None) -> Attempt | SaveResult:
    """Return a new attempt, named *nonce* where it has a name, or the existing save where ``on_exists`` keeps it."""
    if place.newest_saved is None:
        await refuse_step(place.backend)
    entry = await list_step(place.backend, step_id(job.step))
    if entry.committed and (existing := await existing_save(place, entry)) is not None:
        return skip_existing(place.engine, job, existing)
    await check_space(place, job)
    nonce = nonce or place.engine.name_attempt(entry.attempts)
    return await place.engine.begin_attempt(entry, nonce, job.number)


async def existing_save(place: Place, entry: StepEntry) -> SaveResult | None:
    """Return the existing save of a committed step where ``on_exists`` keeps it; None means: a new generation."""
    policy = place.engine.options.on_exists
    if policy == "new_generation":
        return None
    try:
        found = await newest_manifest(place.backend, entry)
    except CorruptionError:
        # None of its generations is valid: the step is saved again, whatever the policy.
        return None
    if policy == "raise":
        raise StepExistsError(
            f"step {entry.step} is committed already (generation {found.generation}): delete it first, or use "
            'on_exists="new_generation"'
        )
    size = sum(file.size for file in found.files)
    return SaveResult(found.step, found.id, found.generation, size, seconds=0.0, existed=True)


def skip_existing(engine: Engine, job: SaveJob, existing: SaveResult) -> SaveResult:
    """Return the result of a save that found its step committed, and notify observers."""
    engine.emit(SaveSkipped(at_ns=engine.now_ns(), step=job.step, reason="committed already"))
    return msgspec.structs.replace(existing, seconds=engine.since_s(job.begun_ns))


def records_bytes(plan: SavePlan) -> int:
    """Return the room to keep in reserve for the records of a save: little for a small state."""
    return min(MOST_RECORDS_BYTES, RECORDS_BYTES + RECORD_BYTES * len(plan.tensors))


async def check_space(place: Place, job: SaveJob) -> None:
    """Refuse a save that does not fit, before a byte is written; steps that retention does not keep are deleted first."""
    if await _lack(place, job) is None:
        return
    await make_room(place)
    if (lack := await _lack(place, job)) is not None:
        raise StorageFullError(f"{lack}: free space, or keep fewer steps (Retention){await held_by_others(place)}")


async def _lack(place: Place, job: SaveJob) -> str | None:
    """Return, in words, what a save lacks room for; None where it fits, or the room is unknown."""
    reserve, files = records_bytes(job.plan), len(job.plan.files) + RECORD_FILES
    space = await space_for(place.backend, needed := job.plan.file_bytes + reserve)
    if space.free_bytes is not None and space.free_bytes < needed:
        return (
            f"step {job.step} has {job.plan.file_bytes:,} bytes and keeps {reserve:,} in reserve for its "
            f"records, {place.backend.url} has {space.free_bytes:,} free"
        )
    if space.free_files is not None and space.free_files < files:
        return (
            f"step {job.step} makes {files} files and folders, and the file system of {place.backend.url} has "
            f"{space.free_files:,} inodes free (df -i), whatever bytes it has"
        )
    return None


@asynccontextmanager
async def attempting(place: Place, job: SaveJob, attempt: Attempt) -> AsyncIterator[None]:
    """Remove the attempt where the block fails before its vote is written; later failures leave it to be finished."""
    try:
        yield
    except BaseException:
        # The vote may be in storage all the same, its answer lost: the decision *collect* then prevents a commit.
        if not job.promise.written.is_settled:
            await _drop_attempt(place, attempt)
        raise
    finally:
        place.engine.busy_attempts.discard(attempt.attempt)


async def write_files(place: Place, job: SaveJob, nonce: str) -> tuple[FileEntry, ...]:
    """Stream this rank's data files into the attempt *nonce*, the windows in the order in which the copy fills them."""
    engine, plan = place.engine, job.plan
    screens: Sequence[FileScreen | None] = engine.screens(plan) or [None] * len(plan.files)
    folder = step_id(job.step)
    written: dict[str, FileEntry] = {}
    paths = [data_path(nonce, engine.rank, index) for index in range(len(plan.files))]
    async with open_tasks() as tasks:
        for path, file, slabs, screen in zip(paths, plan.files, job.slabs, screens, strict=True):
            tasks.start_soon(
                place.uploader.write_file, folder, path, engine.rank, file, slabs, screen, job.stages, written
            )
    await job.copied.settled()  # small files may be durable before the thread that copied has reported its end
    return tuple(written[path] for path in paths)


async def vote(place: Place, job: SaveJob, attempt: Attempt, files: tuple[FileEntry, ...]) -> Receipt:
    """Write this rank's receipt, which completes its part.

    Raises:
        TornSnapshotError: the state changed while it was copied; no receipt was written.
        BadStepError: it has numbers that are not finite, and the run is set back for that; the same.
    """
    await job.target.confirm()
    if place.engine.options.screen is not None:
        _report_not_finite(place.engine, job.step, files)
    receipt = _receipt(place, job, attempt, files)
    job.voting = True
    with job.stages.time("vote"):
        await cast_vote(place.backend, receipt)
    job.promise.reach(job.promise.written)
    engine = place.engine
    seconds = engine.since_s(job.begun_ns)
    engine.emit(DataWritten(at_ns=engine.now_ns(), step=job.step, bytes=job.plan.file_bytes, seconds=seconds))
    return receipt


def _report_not_finite(engine: Engine, step: int, files: Sequence[FileEntry]) -> None:
    """Notify observers of numbers in *files* that are not finite; log whenever the affected tensors change."""
    found = count_not_finite_in(files)
    if found:
        engine.emit(NotFiniteFound(at_ns=engine.now_ns(), step=step, tensors=dict(found)))
    if found and engine.refuses_not_finite:
        raise BadStepError(f"step {step} is not saved: {list_names(list(found))} has numbers that are NaN or infinite")
    if found.keys() != engine.not_finite:
        engine.not_finite = frozenset(found)
        if found:
            some = ", ".join(f"{name} ({count:,})" for name, count in found.most_common(_NAMES_TOLD))
            more = f" and {len(found) - _NAMES_TOLD} more tensors" if len(found) > _NAMES_TOLD else ""
            logger.warning("step %d is saved with numbers that are NaN or infinite: %s%s", step, some, more)
        else:
            logger.warning("step %d is saved, and all numbers are finite again", step)


def _receipt(place: Place, job: SaveJob, attempt: Attempt, files: tuple[FileEntry, ...]) -> Receipt:
    state, tables = job.state, job.target.replica_tables()
    return Receipt(
        **msgspec.structs.asdict(attempt),
        requires=required_for(job.plan.tensors, dict(state.left_out)),
        created_ns=place.engine.world.clock.time_ns(),
        plan_digest=job.plan.digest,
        scalars_digest=digest128(msgspec.json.encode(state.values)),
        files=files,
        tensors=job.plan.tensors,
        alias=dict(state.alias),
        left_out=dict(state.left_out) or msgspec.UNSET,
        state=state.values,
        per_rank=state.per_rank,
        metrics=dict(job.request.metrics),
        user=job.request.user,
        config=msgspec.UNSET if job.request.config is None else job.request.config,
        replicas=tables.replicas or msgspec.UNSET,
        buffers=tables.buffers or msgspec.UNSET,
    )


async def _drop_attempt(place: Place, attempt: Attempt) -> None:
    """Remove an attempt without a vote, which cannot be committed; if that fails, garbage collection does it later."""
    with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
        try:
            await collect(place.backend, Garbage(attempt.id, attempt.attempt), place.engine.token(16))
        except CheckpointError as error:
            logger.warning("attempt %s of %s is left as garbage: %s", attempt.attempt, attempt.id, error)


async def commit_votes(place: Place, attempt: Attempt, votes: Sequence[Receipt], *, own: bool = False) -> Manifest:
    """Commit the attempt that all *votes* are for; once that has begun, a cancellation comes too late.

    Args:
        own: whether this process has written all files of it.
    """
    manifest: Manifest | None = None
    deadline_s = place.engine.options.deadlines.commit_s
    with anyio.move_on_after(deadline_s, shield=True):
        manifest = await commit(place.backend, votes, place.engine.world, own=own)
    if manifest is None:
        raise CommitTimeoutError(
            f"{attempt.id}: the storage did not answer within {deadline_s:g} s; whether the step "
            "is committed is unknown. Run `aiockpt commit`, or look with `aiockpt ls`."
        )
    if len(votes) > 1 and not place.engine.differing_buffers:
        _log_buffers(place.engine, votes)
    return manifest


def _log_buffers(engine: Engine, votes: Sequence[Receipt]) -> None:
    """Log, once, which buffers differ between ranks."""
    engine.differing_buffers = names = tuple(one.name for one in find_differences(votes, "buffers"))
    if names:
        logger.info(
            "step %d: %s of modules differ between ranks (%s); those of the lowest rank are saved",
            votes[0].step,
            count(len(names), "buffer"),
            list_names(names),
        )


def committed(engine: Engine, job: SaveJob, generation: int) -> SaveResult:
    """Return the result of a save that is committed, and notify observers."""
    result = SaveResult(
        step=job.step,
        id=step_id(job.step),
        generation=generation,
        bytes=job.plan.file_bytes,
        seconds=engine.since_s(job.begun_ns),
    )
    engine.lineage.note_committed(result.id, generation, job.number)
    engine.emit(
        Committed(
            at_ns=engine.now_ns(),
            step=result.step,
            bytes=result.bytes,
            seconds=result.seconds,
            generation=result.generation,
        )
    )
    return result
