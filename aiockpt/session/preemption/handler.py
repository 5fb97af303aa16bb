"""Handling of a request to end the run: the loop thread receives it, flushes, and agrees; the next call ends the run.

A signal wakes the loop thread at once (`aiockpt.runtime.wakeup`), also while the main thread is inside a long call of C.
The loop thread then flushes snapshots; it takes no new one: the state is the main thread's. When that calls ``step`` or
``save`` next, on all ranks in the same call (`aiockpt.session.preemption.decision`), the run ends (`PreemptedCall`).
Guarantees:

- No signal handler saves, waits or raises. The program ends by `Preempted`, raised by ``step`` and ``save``, on the thread
  that made the checkpointer: with signals the main thread.
- A call that does not end the run contacts no other rank, and costs a note of its state
  (`aiockpt.session.reached_state`). A run that makes no further call, because the signal ended its workers or
  another handler the program, is saved by that note.
- The log states facts alone: which step is being flushed, which is committed, or that no step is.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from contextlib import suppress
from typing import NoReturn

import anyio

from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination, Interruption, StartSave
from aiockpt.engine.context import Engine
from aiockpt.engine.job import SaveRequest
from aiockpt.errors import CheckpointError, CorruptionError
from aiockpt.futures import SaveFuture, promise_of
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.loop import Mutex, thread_id
from aiockpt.runtime.progress import find_progress
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.wakeup import SignalWatch, children_end_quietly, watch_signals
from aiockpt.session.preemption.decision import EndAgreement, EndDecision, Notice, Reading
from aiockpt.session.preemption.policy import Preempted, Preemption
from aiockpt.session.preemption.recent_saves import RecentSave, RecentSaves
from aiockpt.session.reached_state import ReachedState

logger = logging.getLogger("aiockpt")

AGREE_FRACTION, MOST_AGREE_S = 0.4, 15.0
"""Share of the grace, and most seconds, for all ranks to answer; a rank whose process is dead never does."""
SAFETY = 1.5
"""The last save before an allocation ends has so many times the usual duration of a save."""
MARGIN_S = 3.0
"""Seconds beside that, for delays that no measurement shows."""
POLL_S = 1.0
"""Between two reads of the clock, while the end of an allocation is awaited."""
REMEMBERED_CALLS = 32
LATE_S = 1.0
"""For a signal that comes after its effects on other processes: it ends workers first, and the next batch raises."""
RENEW_NS = 10**9
"""Between two checks whether other code has taken the signals meanwhile."""


class PreemptionHandler(Interruption):
    """Ends the run of one checkpointer.

    Args:
        policy: what was asked for.
        ends_at_s: when the allocation ends, in seconds since 1970; None where that is unknown.

    Attributes:
        saves: the last ones.
        notice: what requested the end of the run; None while nothing has.
        observers: to be notified of events.
    """

    listens = True

    def __init__(self, policy: Preemption, ends_at_s: float | None) -> None:
        self.policy = policy
        self.saves = RecentSaves()
        self.notice: Notice | None = None
        self.observers = (self.saves,)
        self.ended: Preempted | None = None
        self._ends_at_s = ends_at_s
        self._thread = thread_id()
        self._lock = Mutex()
        self._calls = 0
        self._called_ns = 0
        self._renewed_ns = 0
        self._lately_ns: deque[int] = deque(maxlen=REMEMBERED_CALLS)
        self._waits = False
        self._woken, self._arrived = anyio.Event(), anyio.Event()
        self._decision: Promise[EndDecision] = Promise("the agreement of the ranks where to end")
        self._deadline_ns = 0
        self._watch: SignalWatch | None = None
        self._last: tuple[SaveRequest, StartSave] | None = None
        self._reached = ReachedState()
        self._released = False

    def begin(self, engine: Engine, destination: Destination, agreement: EndAgreement) -> None:
        """Listen, from now until `stop`.

        Raises:
            UsageError: this is not the main thread, and signals are to be handled.
        """
        self.engine = engine
        self.destination = destination
        places = [place.backend for place in destination.places]
        self.saves.lasting = frozenset(backend.url for backend in places if backend.traits.durable)
        self.agreement = agreement
        self._running = engine.loop.submit(self._run)
        if engine.world_size > 1:
            engine.loop.call_soon(find_progress().end_together)
        if self.policy.signals:
            self._watch = watch_signals(self.policy.numbers, self._receive_signal, self._is_in_step)

    def stop(self) -> None:
        """Stop listening on the loop."""
        self._running.cancel()

    def release(self) -> None:
        """Restore the signal handlers; in a run that has ended, when its grace is over.

        The end of one rank ends all, so its own signal may come when it has left already: it must end with its status, too.
        """
        if self._watch is not None:
            self._watch.close(ends_within_s=0.0 if self.ended is None else self.left_s)
        self._last = None
        self._reached.release()
        if self.notice is not None and self.ended is None and not self._released:
            logger.warning(
                "preemption: %s came, but no step() or save() after it; all saves are committed, and the program goes on",
                self.notice.reason,
            )
        self._released = True

    # ------------------------------------------------------------------ the training thread

    def watch(self, save: SaveFuture) -> None:
        """Record a save that was started."""
        self.saves.watch(save, self.engine.now_ns())

    def reach(self, request: SaveRequest, start: StartSave, *, asked: bool) -> None:
        """Count a call of ``step`` or ``save``, and end the run if this is the last one."""
        if thread_id() != self._thread:
            return
        now_ns = self.engine.now_ns()
        if self._watch is not None and now_ns - self._renewed_ns > RENEW_NS:
            self._watch.renew()
            self._renewed_ns = now_ns
        if self.agreement.begin():
            self.engine.loop.call_soon(self._arrived.set)
        self._last = request, start
        self._reached.note(request.state)
        # One lock with `_decide`: this call is counted there, or waits for the decision.
        with self._lock:
            if not self._waits:
                self._let_pass(now_ns)
                return
        decision = self._wait_for_decision()
        self._calls += 1
        if self._calls >= decision.call:
            PreemptedCall(self, decision).finish(request, start, asked=asked)

    def on_exit(self, *, failing: bool) -> BaseException | None:
        """End the run with the state of the last call, where it must end and that state is still the same."""
        last = self._last
        if last is None or self.ended is not None or thread_id() != self._thread:
            return None
        with children_end_quietly():
            return self._save_on_exit(*last, failing)

    def _save_on_exit(self, request: SaveRequest, start: StartSave, failing: bool) -> BaseException | None:
        # A signal that has come may not have been reported yet: that is done on another thread.
        if self._watch is not None:
            self._watch.flush()
        if self.notice is None and not (failing and self._is_notified_late()):
            return None
        if not failing and not self.wants_new(request.step):  # the program is done, and all is saved
            return None
        # Once: `close` comes here again, after the block was left with an error.
        self._last = None
        if self._reached.has_changed():
            logger.warning("preemption: state changed after step %d, the last call; it is not saved", request.step)
            return None
        decision = self._wait_for_decision()
        self._calls += 1
        if self._calls < decision.call:
            logger.warning("preemption: another rank is past step %d, the last call; it is not saved", request.step)
            return None
        try:
            PreemptedCall(self, decision).finish(request, start, asked=False)
        except Preempted as ended:
            return ended

    def _is_notified_late(self) -> bool:
        """Wait for a signal that may be on its way, if the state can be saved then; return whether it came."""
        if self._watch is None or self._reached.has_changed():
            return False
        woken = self.engine.loop.submit(self._woken.wait)
        with suppress(TimeoutError):
            woken.result(LATE_S)
        woken.cancel()
        return self.notice is not None

    def _let_pass(self, now_ns: int) -> None:
        self._calls += 1
        if self._called_ns:
            self._lately_ns.append(now_ns - self._called_ns)
        self._called_ns = now_ns

    def _wait_for_decision(self) -> EndDecision:
        deadline_s = self._agree_s + 2 * MARGIN_S + 10.0
        if not self._decision.wait_anyway(deadline_s):
            # Without effect if the decision comes at this moment: then that one counts.
            self._decision.resolve(EndDecision(0, failure=f"no answer of the other ranks within {deadline_s:g} s"))
        return self._decision.value

    # ------------------------------------------------------------------ time

    @property
    def left_s(self) -> float:
        """Seconds until the process may be killed."""
        return (self._deadline_ns - self.engine.now_ns()) / 1e9

    @property
    def _agree_s(self) -> float:
        return min(MOST_AGREE_S, AGREE_FRACTION * self.policy.grace_s)

    @property
    def _needed_s(self) -> float:
        """Seconds needed to end in order: until the next call, for the save, and a margin."""
        usual_s = self.saves.usual_s
        save_s = self.policy.grace_s if usual_s is None else SAFETY * usual_s
        # A copy, made by C code under the GIL: an iteration would fail when the training thread appends meanwhile.
        until_call_s = max(list(self._lately_ns), default=0) / 1e9
        return until_call_s + save_s + MARGIN_S

    def wants_new(self, step: int | None = None) -> bool:
        """Return whether the state is to be saved once more, or the last snapshot is recent enough to be flushed instead.

        Args:
            step: that the training thread has reached, where it is known.
        """
        newest = self.saves.newest()
        if newest is None:
            return True
        usual_s = self.saves.usual_s
        if newest.step == step:
            return False
        if (self.engine.now_ns() - newest.begun_ns) / 1e9 <= self.policy.recent_s:
            return False
        # A save under way is finished where a new one would not be committed in the time that is left.
        return not (self.saves.running and usual_s is not None and usual_s > self.left_s)

    # ------------------------------------------------------------------ signals

    def _receive_signal(self, number: int) -> None:
        """On the thread that waits for signals, and later on the main thread."""
        self._receive(Notice(signal.Signals(number).name, self.policy.grace_s))

    def _is_in_step(self) -> bool:
        """Return whether the state has changed since the last call: it can be saved at the next one alone."""
        return self._last is not None and self._reached.has_changed()

    def _receive(self, notice: Notice) -> None:
        if self.notice is None:
            # Before the notice: other threads that see the notice use the deadline.
            self._deadline_ns = self.engine.now_ns() + round(notice.left_s * 1e9)
            self.notice = notice
        # Each time: the handler of another signal may have raised between the two on the main thread.
        try:
            self.engine.loop.call_soon(self._woken.set)
        except RuntimeError:
            if self.engine.loop.usable:  # it is of the handler of another signal: torch's for a worker that was killed
                raise

    # ------------------------------------------------------------------ the loop thread

    async def _run(self) -> None:
        """Wait until the run must end, and end it."""
        async with open_tasks() as tasks:
            tasks.start_soon(self._receive_from_others)
            tasks.start_soon(self._watch_the_clock)
            await self._woken.wait()
            tasks.cancel_scope.cancel()
        async with open_tasks() as tasks:
            # Beside the decision: other ranks must not wait until this one has flushed.
            tasks.start_soon(self._flush)
            await self._decide()

    async def _receive_from_others(self) -> None:
        try:
            self._receive(await self.agreement.receive())
        except CheckpointError as error:
            logger.info("preemption: notices of other ranks cannot be received: %s", error)  # rank 0 may be done

    async def _watch_the_clock(self) -> None:
        """End in time before the allocation does; one rank checks the clock."""
        if self._ends_at_s is None or not self.agreement.leads:
            return
        while True:
            left_s = self._ends_at_s - self.engine.world.clock.time_ns() / 1e9
            spare_s = left_s - self._needed_s
            if spare_s <= 0:
                break
            await anyio.sleep(min(POLL_S, max(0.01, spare_s)))
        self._receive(Notice("the end of the allocation", left_s))

    async def _decide(self) -> None:
        notice = self.notice
        assert notice is not None
        # The ranks' board has its name from the first call that all of them make.
        if self.engine.world_size > 1:
            await self._arrived.wait()
        try:
            await self.agreement.notify(Notice(notice.reason, max(0.0, self.left_s)))
            with self._lock:
                self._waits = True
                calls = self._calls
            decision = await self.agreement.agree(calls, self.wants_new, self._agree_s)
        except CheckpointError as error:
            self._waits = True
            decision = EndDecision(0, failure=str(error))
        self._decision.resolve(decision)
        if decision.failure:
            find_progress().note_disagreement()

    async def _flush(self) -> None:
        """Flush the snapshots in flight, and log the result: the main thread may never make another call."""
        notice = self.notice
        assert notice is not None
        running = self.saves.running
        steps = ", ".join(f"step {promise.step}" for promise in running)
        logger.warning(
            "%s: the run ends in the next step() or save(), with %.0f s left; %s",
            *(notice.reason, self.left_s, f"{steps} is flushed now" if running else "no save is in flight"),
        )
        began_s = time.monotonic()
        for promise in running:
            for point in (promise, promise.snapshotted):
                point.expedite()
        for promise in running:
            await promise.settled()
        newest = self.saves.newest_durable
        if running:
            what = "nothing is committed" if newest is None else f"the newest committed step is {newest.step}"
            logger.warning("flushed within %.1f s: %s", time.monotonic() - began_s, what)


# The call in which a run ends: save or flush, wait, read back, and raise `Preempted` with the outcome.


LEAST_WAIT_S = 2.0
"""For a save although the grace is over: the process lives, and may not be killed."""
RESERVE_S = 1.0
"""Kept of the grace for the program to end in."""


class PreemptedCall:
    """The last call of a run, on the training thread.

    Args:
        decision: of all ranks, that the run ends at this call.
    """

    def __init__(self, handler: PreemptionHandler, decision: EndDecision) -> None:
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
            handler.destination.expedite(request.step, handler.saves.seconds)
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
        """Wait for all saves, as long as there is time; return whether they have ended."""
        handler = self._handler
        usual_s = handler.saves.usual_s or 0.0
        until_s = max(handler.left_s - RESERVE_S, 1.5 * usual_s, LEAST_WAIT_S)
        begun_ns = handler.engine.now_ns()
        return all(
            promise.wait_anyway(max(0.0, until_s - handler.engine.since_s(begun_ns)))
            for promise in handler.saves.running
        )

    def _read_back(self, newest: RecentSave | None, lost: bool) -> Reading:
        """Have the last step read back, by rank 0, as long as there is time; return what all ranks know of it."""
        handler = self._handler
        if self._decision.failure:
            return Reading()  # some rank does not answer: rank 0 would wait for it until its goodbye is over
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
        self, newest: RecentSave | None, reading: Reading, *, lost: bool, new: bool, failure: BaseException | None
    ) -> Preempted:
        notice = self._handler.notice
        reason = "an end request" if notice is None else notice.reason
        if newest is None or lost or reading.found == "damaged":
            code = Preempted.UNSAVED
        else:
            code = Preempted.VERIFIED if reading.found == "good" else Preempted.COMMITTED
        why = self._decision.failure or (failure is not None and repr(failure)) or "not committed in time"
        kept = "nothing was saved" if newest is None else f"the newest step known to be committed is {newest.step}"
        if code == Preempted.UNSAVED and reading.found != "damaged":
            notified = f"the last save is not known to be committed ({why}), and {kept}"
        elif newest is not None and reading.found == "damaged":
            notified = f"step {newest.step} is committed and was read back damaged: an older one will be resumed from"
        else:
            how = "saved" if new else "flushed"
            read = "read back and compared" if code == Preempted.VERIFIED else "not read back"
            notified = f"step {'' if newest is None else newest.step} is {how} and committed, {read}"
        step = None if newest is None else newest.step
        return Preempted(reason, step, code, f"{reason}: the run ends; {notified}")
