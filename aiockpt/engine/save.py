"""A save: begin an attempt, stream its files while the copy still runs, vote, commit.

`save` is that of a process that saves alone; `aiockpt.ranks.save` is that of many ranks, with the same steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.maintenance import make_room
from aiockpt.engine.place import Place
from aiockpt.engine.round import SaveRound
from aiockpt.engine.snapshotter import Capture
from aiockpt.errors import (
    CheckpointError,
    CommitTimeoutError,
    CorruptionError,
    SaveCancelledError,
    StepExistsError,
    StorageFullError,
    TornSnapshotError,
)
from aiockpt.events import Committed, DataWritten, NotFiniteFound, SaveFailed, SaveSkipped, SaveStarted, SnapshotTaken
from aiockpt.format.checksum import digest128
from aiockpt.format.manifest import FileEntry, Manifest, Receipt
from aiockpt.format.names import data_path, list_names, step_id
from aiockpt.format.replicas import ReplicaTables, find_differences
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.options import Snapshot
from aiockpt.pipeline.collect import Garbage, collect
from aiockpt.pipeline.commit import Attempt, cast_vote, commit
from aiockpt.pipeline.discover import StepEntry, look_at, newest_manifest, refuse_step
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.slabs import Slab
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import ShardedState
from aiockpt.units import count

if TYPE_CHECKING:
    from aiockpt.pipeline.replica_samples import Sampling

# One save under way: what is saved, where its slabs go, how it is stopped, how its future is resolved.


logger = logging.getLogger("aiockpt")


class SaveCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a save was asked for.

    Attributes:
        save_round: the step, and which save it is among those of all ranks.
        begun_ns: when; None for now.
    """

    save_round: SaveRound
    metrics: Mapping[str, float] = {}
    user: object = None
    config: object = None
    begun_ns: int | None = None


class SharePlanner(Protocol):
    """Knows what this process writes of a state; see `aiockpt.engine.coordinator.Coordinator`."""

    def share(self, save_round: SaveRound, state: ShardedState) -> tuple[ShardedState, bool]: ...


class SaveJob:
    """One save, registered on the caller's thread. `prepare` plans it; then it may run, and be copied.

    Attributes:
        promise: what the engine resolves; *future* is what the caller holds of it.
        stages: times what is done for it.
        number: of the save, in the order of the calls.
        nonce: of the attempt; None where it is made when the attempt begins.
        save_round: which save it is among those of all ranks.
        state: the tensors until they are copied, and the encoded values; after `prepare` what this rank writes of them.
        plan: what goes where; set by `prepare`.
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        host_copied: resolved when only devices have something left to copy, with the events behind that.
        copied: when the slabs have all of it, or it has failed; for one that is copied from a copy, later than its
            promise's *snapshotted*.
        begun: whether it runs, or will: then it notifies the other ranks itself of what goes wrong.
        confirm: awaited right before this rank's vote; raises TornSnapshotError when the state changed while it was copied.
        agreed: whether `prepare` had to plan with other ranks.
        voting: whether this rank's receipt may be in storage: from there on others may commit.
        slabs: the way of full slabs to the writers, by data file; set by `prepare`.
        hand_over: takes each full slab, on the thread that copies; gives it to *slabs* unless it goes elsewhere.
        replica_tables: returns what the receipt says of replicas.
        hand_samples: takes the samples of replicas, on the thread that copies, before the copy counts as made.
    """

    plan: SavePlan
    slabs: list[Handover]

    def __init__(self, engine: Engine, call: SaveCall, capture: Capture) -> None:
        self.begun_ns = engine.now_ns() if call.begun_ns is None else call.begun_ns
        self.snapshot: Snapshot = capture.snapshot
        self._capture = msgspec.structs.replace(capture, state=_without_tensors(capture.state))
        self._guard = capture.guard
        self.confirm: Callable[[], Awaitable[None]] = self._confirm
        self._pause_s: float | None = None
        self.number = engine.lineage.next_number()
        self.nonce: str | None = None
        self.save_round = call.save_round
        self.state = capture.state
        self.begun = False
        self.agreed = False
        self.voting = False
        self.promise = SavePromise(call.save_round.step)
        self.stages = engine.stages("save", self.step)
        self.future = SaveFuture(self.promise)
        self.copied: Promise[None] = Promise(f"copy of step {self.step}")
        self.host_copied: Promise[Sequence[DeviceEvent]] = Promise(f"copy of step {self.step}, the host's part")
        self.promise.snapshotted.when_settled(lambda: self.host_copied.resolve(()))
        self.promise.when_settled(lambda: self.copied.resolve(None))
        self.promise.snapshotted.on_told = self.recheck
        self.metrics = dict(call.metrics)
        self.user, self.config = call.user, call.config
        self.slabs = []
        self.hand_over: Callable[[Window, Slab], object] = self._hand_over
        self.replica_tables: Callable[[], ReplicaTables] = ReplicaTables
        self.hand_samples: Callable[[Sampling], object] = self._hand_samples
        self._engine = engine
        self._stopped_by: BaseException | None = None
        self._scope: anyio.CancelScope | None = None
        self.promise.cancel_work = self.cancel

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.promise.step

    def prepare(self, coordinator: SharePlanner) -> None:
        """Plan the save; with other ranks where this rank does not know yet what to write.

        Raises:
            RankError: the ranks cannot save this together.
        """
        begun_ns = self._engine.now_ns()
        self.state, self.agreed = coordinator.share(self.save_round, self.state)
        self.plan = self._engine.plan(self.state)
        self.slabs = [Handover(self._engine.lender, len(file.windows)) for file in self.plan.files]
        self.stages.note("plan", begun_ns)

    def copy(self) -> None:
        """Copy the state into slabs, handing each full one to the loop; then the state may change.

        Runs on the caller's thread, or on another while the state is guarded. What goes wrong fails the save and is not
        raised here.
        """
        copied_from_ns = self._engine.now_ns()
        try:
            self._run_program()
        except BaseException as error:
            self.stop(error)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            self.state = _without_tensors(self.state)  # not ours to keep alive any longer
        if self._stopped_by is None:
            self._engine.loop.call_soon(self._engine.emit, self._taken(copied_from_ns))
            self.promise.snapshotted.resolve(None)
            self.copied.resolve(None)  # last: what is written waits for it, so that all is reported in order

    def _run_program(self) -> None:
        capture = self._capture
        self._guard.check_addresses()  # before anything is read; from there on the program does that
        sampling = self._engine.sample_replicas(self.state, capture.after, keep=not capture.is_temporary)
        program = self._engine.copy_program(self.plan, self.state.tensors, keep=not capture.is_temporary)
        try:
            program.run(
                self._engine.pool,
                self.hand_over,
                wanted=lambda: self._stopped_by is None,
                timeout_s=self._engine.options.deadlines.slab_s,
                beside=capture.beside,
                after=capture.after,
                guard=self._guard,
                begun={} if sampling is None else sampling.events,
                host_copied=self.host_copied.resolve,
            )
        finally:
            if capture.is_temporary:
                program.forget()
        if sampling is not None and self._stopped_by is None:
            sampling.finish()
            self.hand_samples(sampling)

    def recheck(self) -> BaseException | None:
        """Compare the state once more, if the copy is over and not yet compared; return why the save ends if it was torn."""
        error = self._guard.recheck()
        if error is not None and self._stopped_by is None:
            self.stop(error)
        return self._stopped_by if isinstance(self._stopped_by, TornSnapshotError) else None

    async def _confirm(self) -> None:
        error = self.recheck()
        if error is not None:
            raise error

    @property
    def is_unsure(self) -> bool:
        """Whether it may still turn out that the state changed while it is, or was, copied."""
        return self._guard.is_unsure

    def leave_to_guard(self) -> None:
        """Note that the call returns now, before the copy, and make each change of the state wait for that."""
        self._pause_s = self._engine.since_s(self.begun_ns)
        self._guard.begin(self)

    @property
    def took_whole(self) -> bool:
        """Whether the copy wanted slabs for all of the state."""
        return self._guard.took_whole

    def _taken(self, copied_from_ns: int) -> SnapshotTaken:
        now_ns = self._engine.now_ns()
        since_call_s = (now_ns - self.begun_ns) / 1e9
        return SnapshotTaken(
            at_ns=now_ns,
            step=self.step,
            bytes=self.plan.tensor_bytes,
            snapshot=self.snapshot,
            pause_s=since_call_s if self._pause_s is None else self._pause_s,
            copied_at_call_bytes=self._capture.copied_at_call_bytes,
            reason=self._capture.reason,
            copy_s=(now_ns - copied_from_ns) / 1e9,
            seconds=since_call_s,
        )

    def _hand_over(self, window: Window, slab: Slab) -> None:
        self._engine.loop.call_soon(self.slabs[window.file].arrive, window, slab)

    def _hand_samples(self, sampling: Sampling) -> None:
        self.replica_tables = sampling.tables

    def refuse(self, error: BaseException) -> None:
        """End a save that may never run."""
        self.state = _without_tensors(self.state)
        self.stop(error)
        self._engine.loop.call_soon(self._fail_unless_running, error)

    def cancel(self) -> None:
        """Stop because the caller said so."""
        self.stop(SaveCancelledError(f"the save of step {self.step} was cancelled before it was committed"))

    def stop(self, error: BaseException) -> None:
        """End the save with *error*, from any thread; too late once the commit has begun."""
        if self._stopped_by is None:
            self._stopped_by = error
        self._guard.stopped(error)
        self._guard.hurry()
        self._engine.loop.call_soon(self._cancel_scope)  # also when it was stopped: that may have been interrupted here

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called: what is copied from there on may be torn."""
        return self._stopped_by is not None

    def why(self, error: BaseException) -> BaseException:
        """Return why the save ends: what it was stopped with, where *error* is but the cancellation that follows."""
        return error if isinstance(error, Exception) else self._stopped_by or error

    def _cancel_scope(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, save: Callable[[SaveJob], Awaitable[SaveResult]]) -> SaveResult | None:
        """Run *save* on the loop and resolve the future; return the result, or None when it failed."""
        result: SaveResult | None = None
        failure: BaseException | None = None
        try:
            with anyio.CancelScope() as self._scope:
                if self._stopped_by is not None:
                    self._scope.cancel()
                result = await save(self)
        except Exception as error:  # noqa: BLE001  the future carries it to the caller
            failure = error
        except BaseException:
            self._fail(self._stopped_by)
            raise
        finally:
            for handover in self.slabs:
                handover.close()
        if result is not None:
            self.promise.resolve(result)
        else:
            self._fail(self._stopped_by or failure)
        return result

    def _fail_unless_running(self, error: BaseException) -> None:
        if self._scope is None:
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        if self.promise.is_settled:
            return
        error = error or SaveCancelledError(f"the save of step {self.step} was cancelled with its event loop")
        self._stopped_by = error
        self._guard.hurry()
        engine = self._engine
        seconds = engine.since_s(self.begun_ns)
        if not isinstance(error, SaveCancelledError):
            engine.failures.add(self.future)
            logger.error("the save of step %d failed: %r", self.step, error)
        engine.emit(SaveFailed(at_ns=engine.now_ns(), step=self.step, error=repr(error), seconds=seconds))
        self.promise.fail(error)


def _without_tensors(state: ShardedState) -> ShardedState:
    return msgspec.structs.replace(state, tensors=(), replicas=())


CLEAN_UP_DEADLINE_S = 60.0
_NAMES_TOLD = 5
MOST_RECORDS_BYTES = 16 << 20
RECORDS_BYTES, RECORD_BYTES = 256 << 10, 2 << 10
"""Room required beside the data before a save begins: folders, receipt and manifest, and what a tensor takes in them."""


async def save(place: Place, job: SaveJob) -> SaveResult:
    """Save one state; when this returns it is committed.

    Raises:
        CommitConflictError, CommitTimeoutError, StepExistsError, StorageError: see `aiockpt.errors`. Nothing is visible
            then, but for a time-out, whose outcome the storage knows.
    """
    emit_start(place.engine, job)
    with job.stages.time("begin"):
        begun = await begin(place, job, job.nonce or place.engine.token(6))
    if isinstance(begun, SaveResult):
        return begun
    manifest = await write_and_commit(place, job, begun, partial(write_files, place, job, begun.attempt))
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
        )
    )
    job.stages.tell()


async def begin(place: Place, job: SaveJob, nonce: str) -> Attempt | SaveResult:
    """Return a new attempt of the name *nonce*, or what is there already, where the policy leaves it as it is."""
    await refuse_step(place.backend)
    entry = await look_at(place.backend, step_id(job.step))
    existing = await _existing(place, entry)
    if existing is not None:
        return left_alone(place.engine, job, existing)
    await check_space(place, job)
    return await place.engine.begin_attempt(entry, nonce, job.number)


async def existing_save(place: Place, step: int) -> SaveResult | None:
    """Return what is there of *step*, where the policy leaves it as it is; None means: save."""
    return await _existing(place, await look_at(place.backend, step_id(step)))


async def _existing(place: Place, entry: StepEntry) -> SaveResult | None:
    found = await _find_existing(place, entry)
    if found is None:
        return None
    size = sum(file.size for file in found.files)
    return SaveResult(found.step, found.id, found.generation, size, seconds=0.0, existed=True)


async def _find_existing(place: Place, entry: StepEntry) -> Manifest | None:
    """Return the valid manifest that the policy leaves as it is; None means: save (a new generation)."""
    policy = place.engine.options.on_exists
    if policy == "new_generation" or not entry.committed:
        return None
    try:
        manifest = await newest_manifest(place.backend, entry)
    except CorruptionError:
        return None
    if policy == "raise":
        raise StepExistsError(
            f"step {entry.step} is committed already (generation {manifest.generation}): delete it first, or use "
            'on_exists="new_generation"'
        )
    return manifest


def left_alone(engine: Engine, job: SaveJob, existing: SaveResult) -> SaveResult:
    """Return the result of a save that found its step committed, and notify observers."""
    engine.emit(SaveSkipped(at_ns=engine.now_ns(), step=job.step, reason="committed already"))
    return msgspec.structs.replace(existing, seconds=engine.since_s(job.begun_ns))


def records_bytes(plan: SavePlan) -> int:
    """Return the room to keep in reserve for the records of a save: little for a small state."""
    return min(MOST_RECORDS_BYTES, RECORDS_BYTES + RECORD_BYTES * len(plan.tensors))


async def check_space(place: Place, job: SaveJob) -> None:
    """Refuse a save that does not fit, before a byte is written; what retention does not keep goes first."""
    reserve = records_bytes(job.plan)
    needed = job.plan.file_bytes + reserve
    free = (await place.backend.space()).free_bytes
    if free is not None and free < needed:
        await make_room(place)
        free = (await place.backend.space()).free_bytes
    if free is not None and free < needed:
        raise StorageFullError(
            f"step {job.step} has {job.plan.file_bytes:,} bytes and keeps {reserve:,} in reserve for its "
            f"records, {place.backend.url} has {free:,} free: free space, or keep fewer steps (Retention)"
        )


async def write_and_commit(
    place: Place, job: SaveJob, attempt: Attempt, write: Callable[[], Awaitable[tuple[FileEntry, ...]]]
) -> Manifest:
    """Have *write* make the data files durable, and commit them; on a failure before the vote remove what was written."""
    try:
        try:
            receipt = await vote(place, job, attempt, await write())
        except BaseException:
            await _forget(place, attempt)
            raise
        with job.stages.time("commit"):
            return await commit_votes(place, attempt, [receipt])
    finally:
        place.engine.busy_attempts.discard(attempt.attempt)


async def write_files(place: Place, job: SaveJob, nonce: str) -> tuple[FileEntry, ...]:
    """Stream this rank's data files into the attempt *nonce*, the windows in the order in which the copy fills them."""
    entries: dict[int, FileEntry] = {}
    rank = place.engine.rank
    screens = place.engine.screens(job.plan)

    async def write(index: int) -> None:
        entries[index] = await place.uploader.write_file(
            step_id(job.step),
            data_path(nonce, rank, index),
            rank,
            job.plan.files[index],
            job.slabs[index],
            job.stages,
            screens[index] if screens else None,
        )

    async with open_tasks() as tasks:
        for index in range(len(job.plan.files)):
            tasks.start_soon(write, index)
    await job.copied.settled()  # small files may be durable before the thread that copied has said that it is done
    return tuple(entries[index] for index in range(len(entries)))


async def vote(place: Place, job: SaveJob, attempt: Attempt, files: tuple[FileEntry, ...]) -> Receipt:
    """Leave this rank's receipt: from here it has done its part.

    Raises:
        TornSnapshotError: the state changed while it was copied; no receipt was left.
    """
    await job.confirm()
    _tell_not_finite(place.engine, job.step, files)
    receipt = _receipt(place, job, attempt, files)
    job.voting = True
    with job.stages.time("vote"):
        await cast_vote(place.backend, receipt)
    job.promise.reach(job.promise.written)
    engine = place.engine
    seconds = engine.since_s(job.begun_ns)
    engine.emit(DataWritten(at_ns=engine.now_ns(), step=job.step, bytes=job.plan.file_bytes, seconds=seconds))
    return receipt


def _tell_not_finite(engine: Engine, step: int, files: Sequence[FileEntry]) -> None:
    """Notify observers of what was found in *files*, and the log whenever it is found in other tensors than before."""
    found: Counter[str] = Counter()
    for file in files:
        found.update(file.not_finite or {})
    if found:
        engine.emit(NotFiniteFound(at_ns=engine.now_ns(), step=step, tensors=dict(found)))
    if found.keys() != engine.not_finite:
        engine.not_finite = frozenset(found)
        if found:
            some = ", ".join(f"{name} ({count:,})" for name, count in found.most_common(_NAMES_TOLD))
            more = f" and {len(found) - _NAMES_TOLD} more tensors" if len(found) > _NAMES_TOLD else ""
            logger.warning("step %d is saved with numbers that are NaN or infinite: %s%s", step, some, more)
        else:
            logger.warning("step %d is saved, and all numbers are finite again", step)


def _receipt(place: Place, job: SaveJob, attempt: Attempt, files: tuple[FileEntry, ...]) -> Receipt:
    state, tables = job.state, job.replica_tables()
    return Receipt(
        **msgspec.structs.asdict(attempt),
        created_ns=place.engine.world.clock.time_ns(),
        plan_digest=job.plan.digest,
        scalars_digest=digest128(msgspec.json.encode(state.values)),
        files=files,
        tensors=job.plan.tensors,
        alias=dict(state.alias),
        left_out=dict(state.left_out) or msgspec.UNSET,
        state=state.values,
        per_rank=state.per_rank,
        metrics=job.metrics,
        user=job.user,
        config=msgspec.UNSET if job.config is None else job.config,
        replicas=tables.replicas or msgspec.UNSET,
        buffers=tables.buffers or msgspec.UNSET,
    )


async def _forget(place: Place, attempt: Attempt) -> None:
    """Remove what an attempt left that has not voted: it cannot be committed. Garbage collection is the net below."""
    with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
        try:
            await collect(place.backend, Garbage(attempt.id, attempt.attempt), place.engine.token(16))
        except CheckpointError as error:
            logger.warning("attempt %s of %s is left as garbage: %s", attempt.attempt, attempt.id, error)


async def commit_votes(place: Place, attempt: Attempt, votes: Sequence[Receipt]) -> Manifest:
    """Commit the attempt that all *votes* are for; once that has begun, a cancellation comes too late."""
    manifest: Manifest | None = None
    deadline_s = place.engine.options.deadlines.commit_s
    with anyio.move_on_after(deadline_s, shield=True):
        manifest = await commit(place.backend, votes, place.engine.world)
    if manifest is None:
        raise CommitTimeoutError(
            f"{attempt.id}: the storage did not answer within {deadline_s:g} s; whether the step "
            "is committed is unknown. Run `aiockpt commit`, or look with `aiockpt ls`."
        )
    _log_buffers(place.engine, votes)
    return manifest


def _log_buffers(engine: Engine, votes: Sequence[Receipt]) -> None:
    """Log, once, how many buffers ranks have differently."""
    if not engine.differing_buffers:
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
