"""The end of a checkpointer: it waits for saves and copies under way, abandons the late ones, and releases all.

Guarantees:

- What is under way ends by itself, within its own deadlines; it is waited for, for ``Deadlines.close_s``.
- A wait of more than `SILENT_S` seconds says what it waits for, and how to give it up; a terminal shows what is left.
- An interrupt of the wait (a second Ctrl-C) is obeyed: saves whose commit has not begun are abandoned, what they wrote is
  removed, and the wait is over in seconds. A writer process finishes what is ``snapshotted`` by itself.
- Threads end, whatever happened before: a save that was interrupted where it could not notice it does not hold them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence

from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine
from aiockpt.engine.submit import Submitter
from aiockpt.events import Closed
from aiockpt.futures import SaveFuture
from aiockpt.runtime.loop import ENDS_S, Submitted, ends_within
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.units import name_numbers, size

logger = logging.getLogger("aiockpt")

CLOSE_S = 60.0
"""For work with deadlines of its own to report that they have passed."""
GIVE_UP_S = 10.0
"""For abandoned saves to remove what they wrote; a call that has not returned for so long then counts as hanging."""
HUNG_S = 2.0
"""For threads to end when one of them hangs."""
SILENT_S = 2.0
"""A person who waits for longer than that without a word believes that the program hangs, and kills it."""
REDRAW_S = 0.5
"""Between two states of the line on a terminal."""
STEPS_NAMED = 3


class Shutdown:
    """The end of one checkpointer. Blocking; never on its loop thread.

    Args:
        before: called first, while everything still works.
        ends: called once, to end what observers do on the loop.
        after: called last, whatever happened.

    Attributes:
        after_saves: called when all saves have ended in order, while everything still works.
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
        after: Sequence[Callable[[], object]],
    ) -> None:
        self._engine = engine
        self._submitter = submitter
        self._destination = destination
        self._copies = copies
        self._before, self._ends, self._after = before, ends, after
        self.after_saves: list[Callable[[], object]] = []
        self._abandoned = False

    def wait(self) -> None:
        """Wait until no save runs, and no clean-up after one.

        Raises:
            TimeoutError: that took longer than ``Deadlines.close_s``.
        """
        self._wait(closes=False)

    def _wait(self, *, closes: bool) -> None:
        deadline_s = self._engine.options.deadlines.close_s
        if not self._is_idle_within(deadline_s, closes=closes):
            waiting = [repr(SaveFuture(promise)) for promise in self._submitter.in_flight]
            late = self._engine.calls.late(min(deadline_s, GIVE_UP_S))
            hang = f", and these calls have not returned: {'; '.join(late)}" if late else ""
            raise TimeoutError(f"after {deadline_s:g} s these saves still run: {waiting or 'clean-ups'}{hang}")

    def close(self) -> None:
        """Wait, then release everything.

        Raises:
            TimeoutError: as `wait`; what still ran was abandoned.
        """
        try:
            for begin in self._before:
                begin()
            self._end()
        finally:
            for release in self._after:
                release()

    def _end(self) -> None:
        # Stays 0 after an interrupt or a timeout: then copies to farther places are not waited for.
        patience_s = 0.0
        try:
            self._wait(closes=True)
            for finish in self.after_saves:
                finish()
            patience_s = self._engine.options.deadlines.close_s
        except BaseException:
            self._abandon()
            raise
        finally:
            self._release(patience_s)

    def _is_idle_within(self, seconds: float, *, closes: bool = True) -> bool:
        idle = self._engine.loop.submit(self._idle)
        try:
            self._outlast(idle, seconds, closes=closes)
        except TimeoutError:
            return False
        finally:
            idle.cancel()
        return True

    async def _idle(self) -> None:
        for promise in self._submitter.in_flight:
            await promise.settled()
        # A clean-up takes this lock in the very turn in which its save gets its outcome (`Submitter._run`).
        for place in self._destination.places:
            async with place.cleaning:
                pass
            # Saves are committed here, or nearer; farther places have copies, whose end `Destination.close` waits for.
            if place.backend.traits.durable:
                break

    def _outlast(self, work: Submitted, seconds: float, *, closes: bool = True) -> None:
        """Wait for *work* up to *seconds*; from `SILENT_S` on rank 0 says what for. Raises as ``work.result(seconds)``."""
        until_s = time.monotonic() + seconds
        if not (ends_within(work, min(seconds, SILENT_S)) or self._abandoned or self._engine.rank):
            self._show(work, until_s, "gives it up" if closes else "ends the wait")
        work.result(max(0.0, until_s - time.monotonic()))

    def _show(self, work: Submitted, until_s: float, effect: str) -> None:
        """Say what is waited for: once, or on a terminal in a line that follows it until *work* is done."""
        begun_s = time.monotonic() - SILENT_S
        if sys.stderr is None or not sys.stderr.isatty():
            logger.warning("%s; Ctrl-C now %s", self._describe_wait(), effect)
            return
        try:
            while not ends_within(work, REDRAW_S) and time.monotonic() < until_s:
                waited_s = time.monotonic() - begun_s
                _redraw(f"aiockpt: {self._describe_wait()}; Ctrl-C now {effect} ({waited_s:.0f} s)")
        finally:
            _redraw("")

    def _describe_wait(self) -> str:
        url, pool = self._destination.places[0].backend.url, self._engine.pool.statistics()
        steps = [promise.step for promise in self._submitter.in_flight]
        if not steps:
            return f"waiting for copies and clean-up of what was saved to {url}"
        # A slab is returned when its bytes are written.
        left_bytes = pool.used_slabs * pool.slab_bytes
        left = f"{size(left_bytes)} left to write" if left_bytes else "written, not committed yet"
        return f"waiting for the save of {name_numbers('step', steps, STEPS_NAMED)} to {url}: {left}"

    def _abandon(self) -> None:
        """End the saves in flight, and wait until they have."""
        self._abandoned = True
        waiting = self._submitter.in_flight
        ending = [promise for promise in waiting if self._destination.abandon(promise)]
        if ending:
            logger.warning("shutdown: abandoning %s", ", ".join(repr(SaveFuture(promise)) for promise in ending))
        if ending or not waiting:
            self._is_idle_within(GIVE_UP_S)

    def _release(self, patience_s: float) -> None:
        closing = self._engine.loop.submit(self._destination.close, patience_s)
        in_order = False
        late = self._engine.calls.late
        hangs = bool(late() or (patience_s == 0 and late(GIVE_UP_S)))
        try:
            self._outlast(closing, GIVE_UP_S if hangs else 2 * patience_s + CLOSE_S)  # it keeps deadlines of its own
            in_order = patience_s > 0
        finally:
            closing.cancel()
            engine = self._engine
            engine.loop.call_soon(engine.emit, Closed(at_ns=engine.now_ns()))
            for end in self._ends:
                end()
            self._engine.loop.close(cancel=not in_order or hangs, patience_s=HUNG_S if hangs else ENDS_S)
            # After the threads, which `close` joins: until then they read and fill slabs.
            self._engine.release_memory()
            self._submitter.release()
            self._copies.close()


def _redraw(line: str) -> None:
    """Replace the last line of the terminal."""
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()
