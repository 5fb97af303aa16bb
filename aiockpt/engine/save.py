"""How is a state saved? Begin an attempt, stream its files while the copy still runs, vote, commit."""

from __future__ import annotations

import logging

import anyio
import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.ticket import Ticket
from aiockpt.errors import CheckpointError, CommitTimeoutError, CorruptionError, StepExistsError, StorageFullError
from aiockpt.events import BytesWritten, Committed, DataWritten, SaveSkipped, SaveStarted
from aiockpt.format.checksum import digest128
from aiockpt.format.manifest import FileEntry, Manifest, Receipt
from aiockpt.format.names import data_path, step_id
from aiockpt.pipeline.collect import Garbage, collect
from aiockpt.pipeline.commit import Attempt, cast_vote, commit, wait_votes
from aiockpt.pipeline.discover import StepEntry, look_at, newest_manifest
from aiockpt.runtime.future import SaveResult
from aiockpt.runtime.tasks import open_tasks

logger = logging.getLogger("aiockpt")

CLEAN_UP_DEADLINE_S = 60.0
RECORDS_BYTES = 16 << 20
"""Room asked for beside the data before a save begins: receipts, manifest, directories."""


async def save(engine: Engine, ticket: Ticket) -> SaveResult:
    """Save one state; when this returns it is committed.

    Raises:
        CommitConflictError, CommitTimeoutError, StepExistsError, StorageError: see `aiockpt.errors`. Nothing is visible
            then, but for a time-out, whose outcome the storage knows.
    """
    plan, step = ticket.plan, ticket.step
    engine.emit(SaveStarted(at_ns=engine.now_ns(), step=step, bytes=plan.tensor_bytes, tensor_count=len(plan.tensors)))
    entry = await look_at(engine.backend, step_id(step))
    existing = await _left_alone(engine, entry)
    if existing is not None:
        return _already_there(engine, ticket, existing)
    await _check_space(engine, ticket)
    attempt = await engine.begin_attempt(entry)
    try:
        receipt = await _write_and_vote(engine, ticket, attempt)
        ticket.future._written._resolve(None)
        seconds = engine.since_s(ticket.begun_ns)
        engine.emit(DataWritten(at_ns=engine.now_ns(), step=step, bytes=plan.file_bytes, seconds=seconds))
        manifest = await _commit(engine, attempt, receipt)
    finally:
        engine.busy_attempts.discard(attempt.attempt)
    return _committed(engine, ticket, manifest)


async def _left_alone(engine: Engine, entry: StepEntry) -> Manifest | None:
    """Return the valid manifest that the policy leaves as it is; None means: save (a new generation)."""
    policy = engine.options.on_exists
    if policy == "new_generation" or not entry.committed:
        return None
    try:
        manifest = await newest_manifest(engine.backend, entry)
    except CorruptionError:
        return None
    if policy == "raise":
        raise StepExistsError(
            f"step {entry.step} is committed already (generation {manifest.generation}): delete it first, or use "
            'on_exists="new_generation"'
        )
    return manifest


def _already_there(engine: Engine, ticket: Ticket, existing: Manifest) -> SaveResult:
    engine.emit(SaveSkipped(at_ns=engine.now_ns(), step=ticket.step, reason="committed already"))
    return SaveResult(
        step=ticket.step,
        id=existing.id,
        generation=existing.generation,
        bytes=sum(file.size for file in existing.files),
        seconds=engine.since_s(ticket.begun_ns),
        existed=True,
    )


async def _check_space(engine: Engine, ticket: Ticket) -> None:
    free = (await engine.backend.space()).free_bytes
    needed = ticket.plan.file_bytes + RECORDS_BYTES
    if free is not None and free < needed:
        raise StorageFullError(
            f"step {ticket.step} needs {needed:,} bytes and {engine.backend.url} has {free:,} free: free space, or keep "
            "fewer steps (Retention)"
        )


async def _write_and_vote(engine: Engine, ticket: Ticket, attempt: Attempt) -> Receipt:
    """Make this rank's data files and its receipt durable; on failure remove what was written."""
    try:
        files = await _write_files(engine, ticket, attempt)
        receipt = _receipt(engine, ticket, attempt, files)
        await cast_vote(engine.backend, receipt)
    except BaseException:
        await _forget(engine, attempt)
        raise
    return receipt


async def _write_files(engine: Engine, ticket: Ticket, attempt: Attempt) -> tuple[FileEntry, ...]:
    """Stream every data file, the windows in the order in which the copy fills them."""
    entries: dict[int, FileEntry] = {}

    def on_written(size: int) -> None:
        engine.emit(BytesWritten(at_ns=engine.now_ns(), step=ticket.step, bytes=size))

    async def write(index: int) -> None:
        entries[index] = await engine.uploader.write_file(
            attempt.id,
            data_path(attempt.attempt, attempt.rank, index),
            attempt.rank,
            ticket.plan.files[index],
            ticket.slabs[index],
            on_written,
        )

    async with open_tasks() as tasks:
        for index in range(len(ticket.plan.files)):
            tasks.start_soon(write, index)
    return tuple(entries[index] for index in range(len(entries)))


def _receipt(engine: Engine, ticket: Ticket, attempt: Attempt, files: tuple[FileEntry, ...]) -> Receipt:
    state = ticket.state
    return Receipt(
        **msgspec.structs.asdict(attempt),
        created_ns=engine.world.clock.time_ns(),
        plan_digest=ticket.plan.digest,
        scalars_digest=digest128(msgspec.json.encode(state.values)),
        files=files,
        tensors=ticket.plan.tensors,
        alias=dict(state.alias),
        state=state.values,
        per_rank=state.per_rank,
        metrics=ticket.metrics,
        user=ticket.user,
    )


async def _forget(engine: Engine, attempt: Attempt) -> None:
    """Remove what an attempt left that has not voted: nobody can commit it. Garbage collection is the net below."""
    with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
        try:
            await collect(engine.backend, Garbage(attempt.id, attempt.attempt), engine.token(16))
        except CheckpointError as error:
            logger.warning("attempt %s of %s is left as garbage: %s", attempt.attempt, attempt.id, error)


async def _commit(engine: Engine, attempt: Attempt, receipt: Receipt) -> Manifest:
    """Wait for all votes, then commit; once that has begun, a cancellation comes too late."""
    deadline_s = engine.options.deadlines.commit_s
    votes = await wait_votes(engine.backend, attempt, receipt, deadline_s)
    manifest: Manifest | None = None
    with anyio.move_on_after(deadline_s, shield=True):
        manifest = await commit(engine.backend, votes, engine.world)
    if manifest is None:
        raise CommitTimeoutError(
            f"{attempt.id}: the storage did not answer within {deadline_s:g} s; whether the step is committed is "
            "unknown. Run `aiockpt commit`, or look with `aiockpt ls`."
        )
    return manifest


def _committed(engine: Engine, ticket: Ticket, manifest: Manifest) -> SaveResult:
    result = SaveResult(
        step=ticket.step,
        id=manifest.id,
        generation=manifest.generation,
        bytes=ticket.plan.file_bytes,
        seconds=engine.since_s(ticket.begun_ns),
    )
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
