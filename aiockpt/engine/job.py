"""What is one save under way? What is saved, where its slabs go, how it is stopped, how its future is settled."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import SaveRound
from aiockpt.errors import SaveCancelledError, TornSnapshotError
from aiockpt.events import SaveFailed, SnapshotTaken
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.lazy.throttle import Throttle
from aiockpt.options import Snapshot
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.loop import Mutex
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.slabs import Slab
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:  # a writer process copies no state, and need not load torch
    import torch

    from aiockpt.lazy.digest_check import DigestCheck
    from aiockpt.lazy.version_check import VersionCheck


logger = logging.getLogger("aiockpt")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a save was asked for.

    Attributes:
        turn: which save it is among those of all ranks; None for a process that saves alone.
        begun_ns: when; None for now.
    """

    step: int
    metrics: Mapping[str, float] = {}
    user: object = None
    save_round: SaveRound | None = None
    begun_ns: int | None = None


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A state as its copy will find it.

    Attributes:
        state: its tensors are still, or are copies that nobody changes.
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        reason: why not as it was asked for.
        copied_at_call_bytes: bytes of the tensors that were copied in the call to be still.
        after: the devices, and what must have passed on each before its tensors are what they were at the call.
        versions: of the tensors that are copied after the call; None where there are none.
    """

    state: ShardedState
    snapshot: Snapshot = "eager"
    reason: str = ""
    copied_at_call_bytes: int = 0
    after: Sequence[tuple[torch.device, DeviceEvent]] = ()
    versions: VersionCheck | None = None


class SaveJob:
    """One save, registered on the caller's thread. `prepare` plans it; then it may run, and be copied.

    Attributes:
        promise: what the engine settles; *future* is what the caller holds of it.
        number: of the save, in the order of the calls.
        nonce: of the attempt; None where whoever begins it makes one.
        turn: which save it is among those of all ranks; None for a process that saves alone.
        state: the tensors until they are copied, and the encoded values; after `prepare` what this rank writes of them.
        plan: what goes where; set by `prepare`.
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        enqueued: when nothing is left to copy but what devices do by themselves: the marks behind that.
        copied: when the slabs have all of it, or it has failed; for one that is copied from a copy, later than its
            promise's *snapshotted*.
        begun: whether it runs, or will: then it tells the other ranks itself what goes wrong.
        confirm: awaited right before this rank's vote; raises TornSnapshotError when the state changed while it was copied.
        agreed: whether `prepare` had to plan with other ranks.
        voting: whether this rank's receipt may be in storage: from there on others may commit.
        on_torn: told the names of tensors that changed while they were being copied.
        slabs: the way of full slabs to the writers, by data file; set by `prepare`.
        hand_over: takes each full slab, on the thread that copies; gives it to *slabs* unless somebody else is to have it.
    """

    plan: SavePlan
    slabs: list[Handover]

    def __init__(self, engine: Engine, call: Call, capture: Capture) -> None:
        self.begun_ns = engine.now_ns() if call.begun_ns is None else call.begun_ns
        self.snapshot: Snapshot = capture.snapshot
        self._capture = msgspec.structs.replace(capture, state=_without_tensors(capture.state), versions=None)
        self._digest_check = _make_digest_check(capture.state) if engine.options.debug == "digest" else None
        self._versions = capture.versions
        self._compared = False
        self._looking = Mutex()
        self.confirm: Callable[[], Awaitable[None]] = self._confirm
        self.on_torn: Callable[[Sequence[str]], object] = lambda _: None
        self._pause_s: float | None = None
        self._throttle: Throttle | None = None
        self.number = engine.lineage.next_number()
        self.nonce: str | None = None
        self.save_round = call.save_round
        self.state = capture.state
        self.begun = False
        self.agreed = False
        self.voting = False
        self.promise = SavePromise(call.step)
        self.future = SaveFuture(self.promise)
        self.copied: Promise[None] = Promise(f"copy of step {call.step}")
        self.enqueued: Promise[Sequence[DeviceEvent]] = Promise(f"copies of step {call.step}, enqueued")
        self.promise.snapshotted.when_settled(lambda: self.enqueued.resolve(()))
        self.promise.when_settled(lambda: self.copied.resolve(None))
        self.promise.snapshotted.on_told = self.look_again
        self.metrics = dict(call.metrics)
        self.user = call.user
        self.slabs = []
        self.hand_over: Callable[[Window, Slab], object] = self._hand_over
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
        self.state, self.agreed = self._engine.share(self.save_round, self.state)
        self.plan = self._engine.plan(self.state)
        self.slabs = [Handover(self._engine.lender, len(file.windows)) for file in self.plan.files]

    def copy(self) -> None:
        """Copy the state into slabs, handing each full one to the loop; then the state may change.

        Runs on the caller's thread, or on another while the barrier holds the state still. What goes wrong fails the save
        and is not raised here.
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
            self._digest_check = None
        if self._stopped_by is None:
            self._engine.loop.call_soon(self._engine.emit, self._taken(copied_from_ns))
            self.promise.snapshotted.resolve(None)
            self.copied.resolve(None)  # last: what is written waits for it, so that all is told in order

    def _run_program(self) -> None:
        passing = self.snapshot == "device"
        self._check_places()  # before anything is read
        program = self._engine.copy_program(self.plan, self.state.tensors, keep=not passing)
        try:
            self._check_places()  # from here on the program does
            program.run(
                self._engine.pool,
                self.hand_over,
                wanted=lambda: self._stopped_by is None,
                timeout_s=self._engine.options.deadlines.slab_s,
                beside=self._pause_s is not None,
                throttle=self._throttle,
                check=self._compare,
                check_copied=self._digest_check is not None,
                after=self._capture.after,
                enqueued=self.enqueued.resolve,
            )
        finally:
            if passing:
                program.forget()

    def _check_places(self) -> None:
        if (versions := self._versions) is not None:
            versions.check_places()

    def _compare(self) -> None:
        """Compare the state with what it was at the call, when all is copied that the host copies, and no step may begin.

        Raises:
            TornSnapshotError: it has changed.
        """
        if self._digest_check is not None:
            self._digest_check.check()
        if (versions := self._versions) is not None:
            versions.check()
        self._compared = True

    def look_again(self) -> BaseException | None:
        """Compare once more, if the copy is over and nobody has; return why the save ends when it was torn. Any thread.

        Torch counts a change when it is made, and an operation may have been under way at the first comparison: that of a
        thread is over when it comes here. After this the state may change. Of a snapshot that was torn, this finds what
        else has changed by now.
        """
        with self._looking:
            if self._compared or isinstance(self._stopped_by, TornSnapshotError):
                versions, self._versions = self._versions, None
                try:
                    if versions is not None:
                        versions.check_again()
                except TornSnapshotError as error:
                    self.stop(error)
        return self._stopped_by if isinstance(self._stopped_by, TornSnapshotError) else None

    async def _confirm(self) -> None:
        error = self.look_again()
        if error is not None:
            raise error

    @property
    def is_unsure(self) -> bool:
        """Whether it may still turn out that the state changed while it is, or was, copied."""
        return self._versions is not None

    def let_go(self, throttle: Throttle | None) -> None:
        """Note that the call returns now, before the copy: the copy is made beside the program, held back by *throttle*."""
        self._pause_s = self._engine.since_s(self.begun_ns)
        self._throttle = throttle
        if throttle is not None:
            for point in (self.promise.snapshotted, self.copied, self.enqueued):
                point.on_wait = throttle.end

    @property
    def took_whole(self) -> bool:
        """Whether the copy wanted slabs for all of the state."""
        return self._throttle is None or self._throttle.whole

    def _taken(self, copied_from_ns: int) -> SnapshotTaken:
        return SnapshotTaken(
            at_ns=self._engine.now_ns(),
            step=self.step,
            bytes=self.plan.tensor_bytes,
            snapshot=self.snapshot,
            pause_s=self._engine.since_s(self.begun_ns) if self._pause_s is None else self._pause_s,
            copied_at_call_bytes=self._capture.copied_at_call_bytes,
            reason=self._capture.reason,
            copy_s=self._engine.since_s(copied_from_ns),
        )

    def _hand_over(self, window: Window, slab: Slab) -> None:
        self._engine.loop.call_soon(self.slabs[window.file].arrive, window, slab)

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
        if isinstance(error, TornSnapshotError):
            self.on_torn(error.tensors)
        else:
            self._versions = None  # not ours to keep alive any longer
        if self._throttle is not None:
            self._throttle.end()
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

    async def run(self, save: Callable[[Engine, SaveJob], Awaitable[SaveResult]]) -> SaveResult | None:
        """Run *save* on the loop and settle the future; return the result, or None when it failed."""
        result: SaveResult | None = None
        failure: BaseException | None = None
        try:
            with anyio.CancelScope() as self._scope:
                if self._stopped_by is not None:
                    self._scope.cancel()
                result = await save(self._engine, self)
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
        if self._throttle is not None:
            self._throttle.end()
        engine = self._engine
        seconds = engine.since_s(self.begun_ns)
        if not isinstance(error, SaveCancelledError):
            engine.failed.append(self.future)
            logger.error("the save of step %d failed: %r", self.step, error)
        engine.emit(SaveFailed(at_ns=engine.now_ns(), step=self.step, error=repr(error), seconds=seconds))
        self.promise.fail(error)


def _make_digest_check(state: ShardedState) -> DigestCheck:
    from aiockpt.lazy.digest_check import DigestCheck

    return DigestCheck(state.tensors)


def _without_tensors(state: ShardedState) -> ShardedState:
    return msgspec.structs.replace(state, tensors=())
