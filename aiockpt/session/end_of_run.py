"""The end of a run: the last step is saved, what went wrong is raised. (`aiockpt.session.shutdown` waits and releases.)

A run that ends in order saves the last step that ``step()`` was given and did not save, so that it is not trained again;
only while the state is provably that of the call (`aiockpt.session.reached_state`). Ranks agree by the save itself: a rank
whose state has changed aborts the round, and then none of them commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiockpt.engine.alone import CallProbe, Interruption, StartSave
from aiockpt.engine.context import Failures
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.job import SaveRequest
from aiockpt.errors import BackgroundSaveError, RankError, UsageError
from aiockpt.futures import StartedLoads, promise_of
from aiockpt.runtime.loop import thread_id
from aiockpt.runtime.promise import SavePromise
from aiockpt.session.reached_state import MOST_VALUES, ReachedState

logger = logging.getLogger("aiockpt")


class LastStep:
    """Notes each call of ``step()`` that saves nothing, until a save begins. On the training thread.

    Args:
        wanted: whether the last step is to be saved.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._request: SaveRequest | None = None
        self._thread = 0
        self._reached = ReachedState()

    def note(self, request: SaveRequest) -> None:
        """Record a step that is not saved."""
        if self._wanted:
            self._request, self._thread = request, thread_id()
            self._reached.note(request.state)

    def drop(self) -> None:
        """Record that a save begins: the last step is that one."""
        self._request = None

    def save(self, start: StartSave, coordinator: Coordinator) -> None:
        """Save the last step, where no save has begun and nothing has changed since; the log says why not. Once."""
        request, self._request = self._request, None
        if request is None:
            return
        if self._thread != thread_id():  # so that no other rank waits for this one
            coordinator.begin(request.step).abort(
                UsageError("its Checkpointer was closed on another thread than step()'s")
            )
            return
        if self._reached.has_changed():
            why = (
                f"the state has changed since step({request.step}), so a resume goes on from an earlier one; "
                "save() where the state is what you want to resume from"
                if self._reached.is_known
                else f"its state has more than {MOST_VALUES:,} plain values, too many to compare at each step(); save() it"
            )
            logger.warning("step %d, the last one, is not saved: %s", request.step, why)
            coordinator.begin(request.step).abort(UsageError(why))
            return
        try:
            promise = promise_of(start(request))
        except RankError as error:
            logger.warning("step %d, the last one, is not saved: %s", request.step, error)
        else:
            promise.when_settled(partial(_leave_to_log, promise))

    def release(self) -> None:
        """Release the state, and its optimizers."""
        self._request = None
        self._reached.release()


def _leave_to_log(save: SavePromise) -> None:
    """Raise nothing where other ranks have not joined: the program has asked for no save here, and ends in order."""
    save.retrieved |= isinstance(save.error, RankError)


class EndOfRun:
    """Ends the run of one checkpointer, and raises what went wrong, each failure once.

    Attributes:
        loads: that no caller has waited for yet.
    """

    def __init__(
        self,
        last_step: LastStep,
        interruption: Interruption,
        coordinator: Coordinator,
        failures: Failures,
        probe: CallProbe,
    ) -> None:
        self.loads = StartedLoads()
        self._last_step = last_step
        self._interruption = interruption
        self._coordinator = coordinator
        self._failures = failures
        self._probe = probe

    def begin(self, start: StartSave, *, in_order: bool) -> None:
        """Save the last step where the program ends *in order*, or where it was told to end."""
        ended = self._interruption.on_exit(failing=False)
        if in_order and ended is None:
            self._last_step.save(start, self._coordinator)
        self._probe.closing()

    def report(self) -> None:
        """Raise what went wrong and was not reported yet, as ``on_error`` says."""
        self._failures.report()
        self.loads.check(ending=True)

    @contextmanager
    def leaving(self, error: BaseException | None) -> Iterator[None]:
        """Close in the block; after an *error* of the program, a failure of that becomes a note on the error.

        Before it, the state of a run that must end is saved if it can be, and the other ranks are notified.
        """
        ended: BaseException | None = None
        if error is not None:
            # Before `depart`: the last save is made with the other ranks, which do not wait for one that has departed.
            ended = self._interruption.on_exit(failing=True)
            self._coordinator.depart(f"{type(error).__name__}: {error}", failed=True)
        try:
            yield
        except (BackgroundSaveError, UsageError) as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        if ended is not None and isinstance(error, Exception):  # what else ends the program has its own status
            raise ended from error
