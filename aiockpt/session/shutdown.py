"""The end of a checkpointer: it waits for what is under way, gives up what is not waited for any more, releases all.

Guarantees:

- What is under way ends by itself, within its own deadlines; it is waited for, for ``Deadlines.close_s``.
- An interrupt of the wait (a second Ctrl-C) is obeyed: saves whose commit has not begun are given up, what they wrote is
  removed, and the wait is over in seconds. A writer process finishes what is ``snapshotted`` by itself.
- Threads end, whatever happened before: a save that was interrupted where it could not notice it does not hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aiockpt.engine.context import Engine
from aiockpt.engine.destination import Destination
from aiockpt.engine.submit import Submitter
from aiockpt.events import Closed
from aiockpt.futures import SaveFuture
from aiockpt.runtime.pending_copies import PendingCopies

logger = logging.getLogger("aiockpt")

CLOSE_S = 60.0
"""For what has deadlines of its own to say that they have passed."""
GIVE_UP_S = 10.0
"""For saves that are given up to remove what they wrote."""


class Shutdown:
    """The end of one checkpointer. Blocking; never on its loop thread.

    Args:
        before: called first, while everything still works.
        ends: called once, to end what observers do on the loop.
        after: called last, whatever happened.
    """

    def __init__(
        self,
        engine: Engine,
        submitter: Submitter,
        destination: Destination,
        copies: PendingCopies,
        *,
        before: Sequence[Callable[[], object]],
        ends: Sequence[Callable[[], object]],
        after: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._submitter = submitter
        self._destination = destination
        self._copies = copies
        self._before, self._ends, self._after = before, ends, after

    def wait(self) -> None:
        """Wait until no save runs and none is being tidied up after.

        Raises:
            TimeoutError: that took longer than ``Deadlines.close_s``.
        """
        deadline_s = self._engine.options.deadlines.close_s
        if not self._is_idle_within(deadline_s):
            waiting = [repr(SaveFuture(promise)) for promise in self._submitter.in_flight]
            raise TimeoutError(f"after {deadline_s:g} s these saves still run: {waiting}")

    def close(self) -> None:
        """Wait, then release everything.

        Raises:
            TimeoutError: as `wait`; what still ran was given up.
        """
        try:
            for begin in self._before:
                begin()
            self._end()
        finally:
            self._after()

    def _end(self) -> None:
        patience_s = 0.0
        try:
            self.wait()
            patience_s = self._engine.options.deadlines.close_s
        except BaseException:
            self._give_up()
            raise
        finally:
            self._release(patience_s)

    def _is_idle_within(self, seconds: float) -> bool:
        idle = self._engine.loop.submit(self._idle)
        try:
            idle.result(seconds)
        except TimeoutError:
            return False
        finally:
            idle.cancel()
        return True

    async def _idle(self) -> None:
        for promise in self._submitter.in_flight:
            await promise.settled()
        async with self._destination.places[0].cleaning:
            pass

    def _give_up(self) -> None:
        """End the saves in flight, and wait until they have."""
        waiting = self._submitter.in_flight
        for promise in waiting:
            self._destination.give_up(promise)
        if waiting:
            logger.warning("not waited for to the end: %s", ", ".join(repr(SaveFuture(promise)) for promise in waiting))
        self._is_idle_within(GIVE_UP_S)

    def _release(self, patience_s: float) -> None:
        closing = self._engine.loop.submit(self._destination.close, patience_s)
        in_order = False
        try:
            closing.result(2 * patience_s + CLOSE_S)  # it keeps deadlines of its own
            in_order = patience_s > 0
        finally:
            closing.cancel()
            engine = self._engine
            engine.loop.call_soon(engine.emit, Closed(at_ns=engine.now_ns()))
            for end in self._ends:
                end()
            self._engine.loop.close(cancel=not in_order)
            self._engine.release_memory()
            self._submitter.forget()
            self._copies.close()
