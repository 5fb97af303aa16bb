"""One save: what was asked for, its round among the ranks, its state as captured, and the job that is copied and written.

A `Capture` has the tensors to copy, whether that is done in the call or beside the program, behind which device events, and
the `SaveGuard` that makes others wait for the copy and compares the state when it is over. Where the call copies, nothing
can change meanwhile, and the guard compares nothing. A `Snapshotter` (`aiockpt.lazy`) captures what is copied beside the
program, or on its device.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from aiockpt.engine.context import Engine, Place
from aiockpt.errors import BadStepError, SaveCancelledError, TornSnapshotError
from aiockpt.events import Event, SaveFailed, SaveSkipped, SnapshotTaken
from aiockpt.format.merge import ReplicaTables
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.options import Snapshot
from aiockpt.pipeline.copy_guard import CopyThrottle
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.slabs import Slab
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:  # a writer process walks and copies no state, and need not load torch
    import torch

    from aiockpt.adapters.selection import Selection
    from aiockpt.pipeline.replica_samples import Sampling

logger = logging.getLogger("aiockpt")

WARM_UP = -1
"""The step of a round that plans and saves nothing."""


class RoundName(msgspec.Struct, frozen=True):
    """One save, as all ranks count them: the *number*-th of its step; 0 where this process saves alone."""

    step: int
    number: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the keys of its notes."""
        return f"warm_up/{self.number}" if self.step == WARM_UP else f"save/{self.step}/{self.number}"

    @property
    def call(self) -> str:
        """The call, in words."""
        if self.step == WARM_UP:
            return f"warm_up() number {self.number}"
        return f"the save of step {self.step}" + (f", number {self.number}" if self.number > 1 else "")

    def key(self, *parts: object) -> str:
        return "/".join([self.prefix, *map(str, parts)])


class Round(Protocol):
    """One save, or ``warm_up``, of all ranks. It ends on each of them by `save`, `abort` or `release`.

    The bodies are those of a process that saves by itself.
    """

    name: RoundName

    # ------------------------------------------------------------------ any thread but the loop's

    def share(self, state: ShardedState) -> ShardedState:
        """Return what this process writes of *state*; it waits for other ranks where they must plan that.

        Raises:
            RankError: the ranks cannot save this together.
        """
        return state

    def name_attempt(self) -> str | None:
        """Return the nonce that the save has on all ranks; None where any will do. May block."""
        return None

    def abort(self, error: BaseException) -> None:
        """Notify the others, in the background, why this process takes no part."""
        return

    def release(self) -> None:
        """Notify the others, in the background, that this process is done."""
        return

    # ------------------------------------------------------------------ on the loop

    def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AbstractAsyncContextManager[None]:
        """Notify the others of an error in the block before `save` has begun; *places*: may be written to."""
        return nullcontext()

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        """Return the one of *places* that is written to: what *choose* returns on rank 0.

        Raises:
            RankError: rank 0 has not posted it, and its vote is not found in any of them.
        """
        return await choose()

    async def save(self, place: Place, job: SaveJob) -> SaveResult:
        """Save one state to a place; when this returns it is committed. Raises as `aiockpt.engine.save.save_alone`."""
        ...

    # ------------------------------------------------------------------ on the loop, where another process writes

    async def announce(self) -> None:
        """Announce that this process knows what to write."""
        return

    def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AbstractAsyncContextManager[None]:
        """Serve the others while the block waits for the process that writes; leave the round at its end.

        Args:
            places: where the save may be written to.
            died: returns the error of that process, if it has ended and no other process continues the save.
        """
        return nullcontext()


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a save; the fields are those of `aiockpt.Checkpointer.save`.

    Attributes:
        state: as the caller gave it, of which *selection* is saved; empty where it is described otherwise.
        snapshot: how it is to be copied; None for the checkpointer's default.
        begun_ns: when the call began (monotonic); None for now.
    """

    step: int
    state: Mapping[str, Any] = {}
    selection: Selection | None = None
    snapshot: Snapshot | None = None
    metrics: Mapping[str, Any] = {}
    user: object = None
    config: object = None
    begun_ns: int | None = None


class SaveGuard:
    """What guards the state of one save until it is copied (`CopyGuard`, for the copy itself).

    This one guards nothing: the state is copied in the call, or is never changed, so that nothing waits or is compared.

    Attributes:
        needs_check: whether it may still turn out that the state changed while it is, or was, copied.
        needs_all_slabs: whether the copy needed slabs for all of the state.
    """

    throttle: CopyThrottle | None = None

    @property
    def compares_bytes(self) -> bool:
        return False

    @property
    def needs_check(self) -> bool:
        return False

    @property
    def needs_all_slabs(self) -> bool:
        return True

    def begin(self, job: SaveJob) -> None:
        """Make each change of the state wait for the copy of *job*, whose call returns before the copy ends."""

    def check_addresses(self) -> None:
        """Raise TornSnapshotError when a tensor has moved in memory: its old address must not be read."""

    def compare(self) -> None:
        """Compare the state with what it was at the call; see `CopyGuard`."""

    def recheck(self) -> TornSnapshotError | None:
        """Compare once more, if the copy is over and not yet compared; return why it is torn, if it is. Any thread."""
        return None

    def expedite(self) -> None:
        """Expedite the copy: it is waited for, or not wanted any more. Any thread; idempotent."""

    def stopped(self, error: BaseException) -> None:
        """End with the *error* of the save: changes of the state wait no longer. Any thread."""


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """How a state is copied, whose tensors do not change until then, or are copies of their own.

    Attributes:
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        reason: why not as requested.
        copied_at_call_bytes: bytes of the tensors that were copied in the call already.
        beside: whether it is copied beside the program, after the call has returned.
        is_temporary: whether all tensors were made for this save, and the next one will have others.
        after: the devices, each with the event after which its tensors have their values of the call.
        guard: of the state, until it is copied.
    """

    snapshot: Snapshot = "eager"
    reason: str = ""
    copied_at_call_bytes: int = 0
    beside: bool = False
    is_temporary: bool = False
    after: Sequence[tuple[torch.device, DeviceEvent]] = ()
    guard: SaveGuard = SaveGuard()


class Snapshotter(Protocol):
    """Captures states that are not copied in the call alone. On the threads of the program, one at a time."""

    def capture(
        self, walked: ShardedState, state: Mapping[str, Any], snapshot: Snapshot, *, busy: bool, waits: bool
    ) -> tuple[ShardedState, Capture]:
        """Choose how a state is copied, and return it as the copy will find it: as it was at the call.

        Args:
            walked: its tensors, and its encoded values; *state* as the caller gave it.
            snapshot: how it is to be copied.
            busy: whether the last capture is still being copied.
            waits: whether the copy must wait for other saves, or for other ranks.
        """
        ...

    def guard_in_call(self, state: ShardedState) -> SaveGuard:
        """Return the guard that compares the digests of a state that the call copies."""
        ...


class CopyTarget:
    """What a copy hands full slabs and samples to, and what a vote asks about it: the writers and guards of this process."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._sampling: Sampling | None = None

    def hand_over(self, window: Window, slab: Slab) -> None:
        """Accept a full slab, on the thread that copies."""
        self._job.engine.loop.call_soon(self._job.slabs[window.file].arrive, window, slab)

    def hand_samples(self, sampling: Sampling) -> None:
        """Accept the samples of replicas there, before the copy counts as made."""
        self._sampling = sampling

    def replica_tables(self) -> ReplicaTables:
        """Return the receipt's tables of replicas."""
        return ReplicaTables() if self._sampling is None else self._sampling.tables()

    async def confirm(self) -> None:
        """Wait right before this rank's vote; raise TornSnapshotError when the state changed while it was copied."""
        error = self._job.recheck()
        if error is not None:
            raise error


class SaveJob:
    """One save, registered on the caller's thread. `prepare` plans it; then it may run, and be copied.

    Attributes:
        promise: what the engine resolves; *future* is what the caller holds of it.
        request: what was asked for, without the state: the caller's future keeps the job alive, and not the state with it.
        number: of the save, in the order of the calls; *round* is the same among all ranks.
        nonce: of the attempt; None where it is made when the attempt begins.
        state: the tensors until they are copied, and the encoded values; after `prepare` what this rank writes of them.
        plan: what goes where, and *slabs* passes full slabs to the writers, by data file; set by `prepare`.
        guard: of the state, until it is copied.
        host_copied: resolved when only devices still copy, with the events after their copies.
        copied: resolved when the slabs have all of the state, or the copy has failed; later than the promise's
            *snapshotted* where a device holds a copy.
        begun: whether it runs, or will: then it notifies the other ranks of failures itself.
        voting: whether this rank's receipt may be in storage: from there on others may commit.
        target: of the copy; another one where the copy is made here and written in another process.
    """

    plan: SavePlan

    def __init__(
        self,
        engine: Engine,
        save_round: Round,
        request: SaveRequest,
        state: ShardedState,
        capture: Capture = Capture(),  # noqa: B008  it is frozen
    ) -> None:
        self.engine = engine
        self.step = step = request.step
        self.begun_ns = engine.now_ns() if request.begun_ns is None else request.begun_ns
        self.request, self.round, self.state = request, save_round, state
        self.capture, self.guard = capture, capture.guard
        self._pause_s: float | None = None
        self.number = engine.lineage.next_number()
        self.nonce: str | None = None
        self.begun = self.voting = False
        self.promise = SavePromise(step)
        self.future = SaveFuture(self.promise)
        self.stages = engine.stages("save", step)
        self.slabs: list[Handover] = []
        self.copied: Promise[None] = Promise(f"copy of step {step}")
        self.host_copied: Promise[Sequence[DeviceEvent]] = Promise(f"copy of step {step}, the host's part")
        # However the save ends, waits for a part of its copy end with it.
        self.promise.snapshotted.when_settled(lambda: self.host_copied.resolve(()))
        self.promise.when_settled(lambda: self.copied.resolve(None))
        self.promise.snapshotted.on_retrieve = self.recheck
        self.promise.cancel_work = self.cancel
        self.target = CopyTarget(self)
        self._stopped_by: BaseException | None = None
        self._scope: anyio.CancelScope | None = None

    def prepare(self) -> None:
        """Plan the save; with other ranks where this rank does not know yet what to write.

        Raises:
            RankError: the ranks cannot save this together.
        """
        begun_ns = self.engine.now_ns()
        self.state = self.round.share(self.state)
        self.plan = self.engine.plan(self.state)
        self.slabs = [Handover(self.engine.lender, len(file.windows)) for file in self.plan.files]
        self.stages.note("plan", begun_ns)

    # ------------------------------------------------------------------ the copy

    def copy(self) -> None:
        """Copy the state into slabs, handing each full one to the loop; then the state may change.

        Runs on the caller's thread, or on another while the state is guarded. What goes wrong fails the save and is not
        raised here.
        """
        copied_from_ns = self.engine.now_ns()
        try:
            self._run_program()
        except BaseException as error:
            if self.capture.is_temporary:  # its frames hold a copy of the state, on the devices
                traceback.clear_frames(error.__traceback__)
            self.stop(error)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            self.state = self.state.without_tensors()  # not ours to keep alive any longer
        if self._stopped_by is None:
            self.engine.loop.call_soon(self.stages.follow, self._snapshot_taken(copied_from_ns))
            self.promise.snapshotted.resolve(None)
            self.copied.resolve(None)  # last: what is written waits for it, so that all is reported in order

    def _run_program(self) -> None:
        capture = self.capture
        self.guard.check_addresses()  # before anything is read; from there on the program does that
        sampling = None
        if self.state.replicas:
            sampling = self.engine.sample_replicas(self.state, capture.after, keep=not capture.is_temporary)
        program = self.engine.copy_program(self.plan, self.state, keep=not capture.is_temporary)
        program.run(
            self.engine.pool,
            self.target.hand_over,
            wanted=lambda: self._stopped_by is None,
            timeout_s=self.engine.options.deadlines.slab_s,
            beside=capture.beside,
            after=capture.after,
            guard=self.guard,
            begun={} if sampling is None else sampling.events,
            host_copied=self.host_copied.resolve,
        )
        # The last window may be durable already: the vote waits for `copied`, and so for these samples.
        if sampling is not None and self._stopped_by is None:
            sampling.finish()
            self.target.hand_samples(sampling)

    def recheck(self) -> BaseException | None:
        """Compare the state once more, if the copy is over and not yet compared; return why the save ends if it was torn."""
        error = self.guard.recheck()
        if error is not None and self._stopped_by is None:
            self.stop(error)
        return self._stopped_by if isinstance(self._stopped_by, TornSnapshotError) else None

    def hand_to_guard(self) -> None:
        """Note that the call returns now, before the copy, and make each change of the state wait for that."""
        self._pause_s = self.engine.since_s(self.begun_ns)
        self.guard.begin(self)

    def _snapshot_taken(self, copied_from_ns: int) -> SnapshotTaken:
        now_ns = self.engine.now_ns()
        since_call_s = (now_ns - self.begun_ns) / 1e9
        return SnapshotTaken(
            at_ns=now_ns,
            step=self.step,
            bytes=self.plan.tensor_bytes,
            snapshot=self.capture.snapshot,
            pause_s=since_call_s if self._pause_s is None else self._pause_s,
            copied_at_call_bytes=self.capture.copied_at_call_bytes,
            reason=self.capture.reason,
            copy_s=(now_ns - copied_from_ns) / 1e9,
            seconds=since_call_s,
        )

    # ------------------------------------------------------------------ the end

    def refuse(self, error: BaseException) -> None:
        """End a save that may never run."""
        self.state = self.state.without_tensors()
        self.stop(error)
        self.engine.loop.call_soon(self._fail_unless_running, error)

    def cancel(self) -> None:
        """Stop at the caller's request."""
        self.stop(SaveCancelledError(f"the save of step {self.step} was cancelled before it was committed"))

    def stop(self, error: BaseException) -> None:
        """End the save with *error*, from any thread; too late once the commit has begun."""
        if self._stopped_by is None:
            self._stopped_by = error
        self.guard.stopped(error)
        self.guard.expedite()
        self.engine.loop.call_soon(self._cancel_scope)  # also when it was stopped: that may have been interrupted here

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called: what is copied from there on may be torn."""
        return self._stopped_by is not None

    def why(self, error: BaseException) -> BaseException:
        """Return why the save ends: the error that stopped it, where *error* is only the cancellation that follows."""
        return error if isinstance(error, Exception) else self._stopped_by or error

    def _cancel_scope(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the block that saves it, on the loop; an error of the block fails the promise, and is not raised here."""
        failure: BaseException | None = None
        try:
            with anyio.CancelScope() as self._scope:
                # It was stopped when there was no scope yet for `_cancel_scope` to cancel.
                if self._stopped_by is not None:
                    self._scope.cancel()
                yield
        except Exception as error:  # noqa: BLE001  the future carries it to the caller
            failure = error
        except BaseException:
            # The task is cancelled from outside: no other code settles the promise.
            self._fail(self._stopped_by)
            raise
        finally:
            for handover in self.slabs:
                handover.close()
        # A scope that `stop` has cancelled ends without an error; an error in it may only follow from what stopped it.
        if not self.promise.is_settled:
            self._fail(self._stopped_by or failure)

    def fail(self, error: BaseException) -> None:
        """End with *error* now, although a task of the save may still wait for a call that hangs. On the loop."""
        if self.promise.is_settled:
            logger.warning("the clean-up after step %d does not end: %s", self.step, error)
            return
        self.stop(error)
        self._fail(error)

    def _fail_unless_running(self, error: BaseException) -> None:
        if self._scope is None:
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        if self.promise.is_settled:
            return
        error = error or SaveCancelledError(f"the save of step {self.step} was cancelled with its event loop")
        # Ends the copy, if that is still being made (`wanted`).
        self._stopped_by = error
        self.guard.expedite()
        engine = self.engine
        seconds = engine.since_s(self.begun_ns)
        event: Event = SaveFailed(at_ns=engine.now_ns(), step=self.step, error=repr(error), seconds=seconds)
        if isinstance(error, BadStepError):
            event = SaveSkipped(at_ns=event.at_ns, step=self.step, reason=str(error))
            logger.info("%s", error)
        elif not isinstance(error, SaveCancelledError):
            engine.failures.add(self.future)
            logger.log(engine.failures.log_level, "the save of step %d failed: %r", self.step, error)
        self.stages.flush()
        engine.emit(event)
        self.promise.fail(error)
