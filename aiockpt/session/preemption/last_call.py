"""The call in which a run ends: save or flush, wait, read back, and raise `Preempted` with the outcome."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn, Protocol

import anyio

from aiockpt.engine import maintenance
from aiockpt.errors import CheckpointError, CorruptionError
from aiockpt.futures import SaveFuture, promise_of
from aiockpt.runtime.wakeup import children_end_quietly
from aiockpt.session.preemption.decision import EndDecision, Reading
from aiockpt.session.preemption.policy import Preempted

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine
    from aiockpt.engine.destination import Destination
    from aiockpt.engine.job import SaveRequest
    from aiockpt.session.interruption import StartSave
    from aiockpt.session.preemption.decision import EndAgreement, Notice
    from aiockpt.session.preemption.policy import Preemption
    from aiockpt.session.preemption.recent_saves import DurableStep, RecentSaves

logger = logging.getLogger("aiockpt")

LEAST_WAIT_S = 2.0
"""For a save although the time is over: the process lives, and may be left alive."""
RESERVE_S = 1.0
"""Kept of the grace for the program to end in."""


class Handler(Protocol):
    """What the call asks the `aiockpt.session.preemption.handler` of its run."""

    engine: Engine
    destination: Destination
    policy: Preemption
    saves: RecentSaves
    ended: Preempted | None
    heard: Notice | None
    agreement: EndAgreement

    @property
    def left_s(self) -> float: ...
    def wants_new(self, step: int) -> bool: ...


class PreemptedCall:
    """One call, on the training thread; see `aiockpt.session.interruption.LastCall`."""

    def __init__(self, handler: Handler, decision: EndDecision) -> None:
        self._handler = handler
        self._decision = decision

    def finish(self, request: SaveRequest, start: StartSave, *, asked: bool) -> NoReturn:
        """Save, or flush what was saved last; wait until it is committed, read it back, and end the program.

        Raises:
            Preempted: always.
        """
        with children_end_quietly():
            self._finish(request, start, asked)

    def _finish(self, request: SaveRequest, start: StartSave, asked: bool) -> NoReturn:
        handler = self._handler
        if handler.ended is not None:  # it was caught, and the program goes on
            raise handler.ended
        failure: BaseException | None = None
        saved: SaveFuture | None = None
        if asked or self._saves(request.step):
            handler.destination.hasten(request.step, handler.saves.seconds)
            if handler.engine.options.when_full == "skip":  # not this one
                self._wait()
            try:
                saved = start(request)
            except Exception as error:  # noqa: BLE001  what is raised reports it
                failure = error
        in_time = self._wait()
        if saved is not None:
            failure = promise_of(saved).error
        newest = handler.saves.newest_durable
        lost = failure is not None or not in_time or bool(self._decision.failure)
        reading = self._read_back(newest, lost)
        handler.ended = self._describe(newest, reading, lost=lost, new=saved is not None, failure=failure)
        logger.warning("%s", handler.ended)
        raise handler.ended from failure

    def _saves(self, step: int) -> bool:
        if self._decision.failure:
            return False
        return self._handler.wants_new(step) if self._decision.saves is None else self._decision.saves

    def _wait(self) -> bool:
        """Wait for all saves, as long as there is time; say whether they have ended."""
        handler = self._handler
        usual_s = handler.saves.usual_s or 0.0
        until_s = max(handler.left_s - RESERVE_S, 1.5 * usual_s, LEAST_WAIT_S)
        begun_ns = handler.engine.now_ns()
        return all(
            promise.wait_anyway(max(0.0, until_s - handler.engine.since_s(begun_ns)))
            for promise in handler.saves.running
        )

    def _read_back(self, newest: DurableStep | None, lost: bool) -> Reading:
        """Have the last step read back, by rank 0, as long as there is time; return what all ranks know of it."""
        handler = self._handler
        left_s = handler.left_s - RESERVE_S
        verifies = handler.policy.verify and newest is not None and not lost and left_s > 0

        async def read() -> Reading:
            agreement = handler.agreement
            if not agreement.leads:
                return await agreement.share_reading(None, max(left_s, 0.0) + LEAST_WAIT_S)
            reading = Reading()
            if verifies and newest is not None:
                with anyio.move_on_after(left_s):
                    reading = await self._verify(newest.step)
            return await agreement.share_reading(reading, left_s)

        return handler.engine.loop.submit(read).result()

    async def _verify(self, step: int) -> Reading:
        try:
            await maintenance.verify(self._handler.destination, step)
        except CorruptionError as error:
            logger.error("step %d was read back, and is damaged: %s", step, error)
            return Reading("damaged")
        except CheckpointError as error:
            logger.warning("step %d is committed, and cannot be read back now: %s", step, error)
            return Reading()
        return Reading("good")

    def _describe(
        self, newest: DurableStep | None, reading: Reading, *, lost: bool, new: bool, failure: BaseException | None
    ) -> Preempted:
        heard = self._handler.heard
        reason = "it was told to" if heard is None else heard.reason
        if newest is None or lost or reading.found == "damaged":
            code = Preempted.UNSAVED
        else:
            code = Preempted.VERIFIED if reading.found == "good" else Preempted.COMMITTED
        why = self._decision.failure or (failure is not None and repr(failure)) or "not committed in time"
        kept = "nothing was saved" if newest is None else f"the newest step known to be committed is {newest.step}"
        if code == Preempted.UNSAVED and reading.found != "damaged":
            told = f"the last save is not known to be committed ({why}), and {kept}"
        elif newest is not None and reading.found == "damaged":
            told = f"step {newest.step} is committed and was read back damaged: an older one will be resumed from"
        else:
            how = "saved" if new else "flushed"
            read = "read back and compared" if code == Preempted.VERIFIED else "not read back"
            told = f"step {'' if newest is None else newest.step} is {how} and committed, {read}"
        step = None if newest is None else newest.step
        return Preempted(reason, step, code, f"{reason}: the run ends; {told}")
