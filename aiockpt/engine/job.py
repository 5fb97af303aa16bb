"""What is one save under way? What is saved, where its slabs go, how it is stopped, how its future is settled."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.snapshotter import Capture
from aiockpt.errors import SaveCancelledError, TornSnapshotError
from aiockpt.events import SaveFailed, SnapshotTaken
from aiockpt.format.replicas import ReplicaTables
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.options import Snapshot
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.slabs import Slab
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:
    from aiockpt.engine.coordinator import SaveRound
    from aiockpt.pipeline.replica_samples import Sampling

logger = logging.getLogger("aiockpt")


class SaveCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a save was asked for.

    Attributes:
        save_round: which save it is among those of all ranks; None for a process that saves alone.
        begun_ns: when; None for now.
    """

    step: int
    metrics: Mapping[str, float] = {}
    user: object = None
    config: object = None
    save_round: SaveRound | None = None
    begun_ns: int | None = None


class SaveJob:
    """One save, registered on the caller's thread. `prepare` plans it; then it may run, and be copied.

    Attributes:
        promise: what the engine settles; *future* is what the caller holds of it.
        stages: times what is done for it.
        number: of the save, in the order of the calls.
        nonce: of the attempt; None where whoever begins it makes one.
        save_round: which save it is among those of all ranks; None for a process that saves alone.
        state: the tensors until they are copied, and the encoded values; after `prepare` what this rank writes of them.
        plan: what goes where; set by `prepare`.
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        host_copied: settled when only devices have something left to copy, with the events behind that.
        copied: when the slabs have all of it, or it has failed; for one that is copied from a copy, later than its
            promise's *snapshotted*.
        begun: whether it runs, or will: then it tells the other ranks itself what goes wrong.
        confirm: awaited right before this rank's vote; raises TornSnapshotError when the state changed while it was copied.
        agreed: whether `prepare` had to plan with other ranks.
        voting: whether this rank's receipt may be in storage: from there on others may commit.
        slabs: the way of full slabs to the writers, by data file; set by `prepare`.
        hand_over: takes each full slab, on the thread that copies; gives it to *slabs* unless somebody else is to have it.
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
        self.promise = SavePromise(call.step)
        self.stages = engine.stages("save", call.step)
        self.future = SaveFuture(self.promise)
        self.copied: Promise[None] = Promise(f"copy of step {call.step}")
        self.host_copied: Promise[Sequence[DeviceEvent]] = Promise(f"copy of step {call.step}, the host's part")
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

    def prepare(self) -> None:
        """Plan the save; with other ranks where this rank does not know yet what to write.

        Raises:
            RankError: the ranks cannot save this together.
        """
        begun_ns = self._engine.now_ns()
        self.state, self.agreed = self._engine.coordinator.share(self.save_round, self.state)
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
            self.copied.resolve(None)  # last: what is written waits for it, so that all is told in order

    def _run_program(self) -> None:
        capture = self._capture
        self._guard.check_addresses()  # before anything is read; from there on the program does that
        sampling = self._engine.sample_replicas(self.state, capture)
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
        """Compare the state once more, if the copy is over and nobody has; return why the save ends when it was torn."""
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
        """Note that the call returns now, before the copy, and have whoever is about to change the state wait for that."""
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
        """Run *save* on the loop and settle the future; return the result, or None when it failed."""
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
