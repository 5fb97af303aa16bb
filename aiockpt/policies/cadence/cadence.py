"""The cadence of saves in a training loop, the same on all ranks: ``every=Cadence(…)``.

    with aiockpt.Checkpointer(url, every=aiockpt.Cadence(max_overhead=0.03, mttf=6 * 3600)) as ckpt:
        for step in range(ckpt.resume(state), steps):
            train(batch)
            ckpt.step(step, state)

The events of saves and the times of steps are measured (`controller`), one formula makes an interval of them
(`intervals`), and a save is due when the interval is over. With several ranks, rank 0 measures and decides some steps ahead
(`NOTICE_S`). It leaves its decisions as numbered notes in the job's store, each read by all ranks and then removed; no
process group is used.

Guarantees:

- All ranks answer alike for the same step. A rank that has no decision for a step waits for the note until the deadline,
  and then raises: it never saves alone, and never skips what others save.
- When the note has come, `Cadence.due` does not wait, and takes microseconds. The loop thread requests notes beforehand, so
  that one is late only for a rank that is ahead of rank 0 by more than the notice.
- Time is monotonic, that of the checkpointer's world: setting the machine's clock changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import msgspec

from aiockpt import units
from aiockpt.errors import RankTimeoutError, UsageError
from aiockpt.events import Event
from aiockpt.options import check_amount, keywords_checked, refuse_value
from aiockpt.policies.cadence.controller import Controller
from aiockpt.policies.cadence.intervals import Interval, IntervalLimits, Measured
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.loop import refuse_in_event_loop
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.world import Clock, Loop, OsClock, find_ranks

logger = logging.getLogger("aiockpt")

NOTICE_S, NOTICE_OF_A_RANK_S = 0.25, 0.001
"""How long before a step the other ranks are notified: a read of the store takes longer the more ranks read."""

LEAP = 32
"""Most notices of a long interval that are decided at once: a decision cannot be changed any more."""

IN_FLIGHT = 2
DEADLINE_S = 600.0

REMEMBERED = 256
"""Decided saves that are remembered; a rank that is further behind reads them from their notes, in order."""


class Note(msgspec.Struct, frozen=True):
    """Rank 0's decision.

    Attributes:
        saves: the steps to be saved, of all those below *until* that were not decided before.
        notice: how many steps before *until* the next note follows.
        why: in words.
    """

    saves: tuple[int, ...]
    until: int
    notice: int
    why: str


NOTHING_DECIDED = Note((), 0, 0, "")


class Cadence:
    """Decides when to save: as often as it pays, and never more than is allowed.

    Give it to one `aiockpt.Checkpointer`: as ``every=``, and call ``ckpt.step`` after each training step; or as one of the
    ``observers=``, and ask `due` after each training step, on every rank with the same steps. The rules are described in
    `aiockpt.policies.cadence.intervals`.

    Args:
        max_overhead: what saves may cost, as a fraction of the training time: 0.03 is within the noise of most steps.
        mttf: mean seconds between failures of the whole job (for 1,000 machines, a thousandth of one machine's).
            None: as often as *max_overhead* and the storage allow.
        clock: tests pass a simulated one; None uses that of the checkpointer's world.

    Raises:
        UsageError: an option is not positive, or *max_overhead* is no fraction.
    """

    @keywords_checked
    def __init__(self, max_overhead: float = 0.03, *, mttf: float | None = None, clock: Clock | None = None) -> None:
        check_amount("Cadence", "max_overhead", max_overhead, ", as a fraction: 0.03 means 3 %")
        if max_overhead >= 1:
            refuse_value("Cadence", "max_overhead", max_overhead, "a fraction of less than 1: 0.03 means 3 %")
        check_amount("Cadence", "mttf", mttf, " seconds", optional=True)
        if clock is not None and not callable(getattr(clock, "monotonic_ns", None)):
            refuse_value(
                "Cadence", "clock", clock, "an object with monotonic_ns(), or None for the checkpointer's clock"
            )
        self._limits = IntervalLimits(max_overhead, mttf, IN_FLIGHT)
        self._controller = Controller(self._limits)
        self._clock = clock
        self._now_ns = (clock or OsClock()).monotonic_ns
        self._events: deque[Event] = deque()
        self._note, self._saves = NOTHING_DECIDED, deque[int](maxlen=REMEMBERED)
        self._channel: DecisionChannel | None = None
        self._ready = False
        self._answered: tuple[int, bool] | None = None

    @classmethod
    def by_time(cls, every: str) -> Cadence:
        """Return a cadence that saves at a fixed interval, such as ``"30min"``, whatever that costs.

        Raises:
            UsageError: *every* is no duration.
        """
        cadence, every_s = cls(), units.parse_seconds(every)
        if not every_s:
            refuse_value("", "every", every, "a time such as '90s', '30min' or '2h', a number of steps, or a Cadence")
        cadence._limits = msgspec.structs.replace(cadence._limits, every_s=every_s)
        cadence._controller = Controller(cadence._limits)
        return cadence

    def join(
        self,
        loop: Loop,
        incarnation: Incarnation,
        clock: Clock,
        in_flight: int = IN_FLIGHT,
        deadline_s: float = DEADLINE_S,
    ) -> Callable[[], None]:
        """Serve the checkpointer that calls this; return the function that ends the service.

        Args:
            incarnation: of the ranks.
            deadline_s: for rank 0, when a step is reached that it has not decided.

        Raises:
            UsageError: it serves one already.
        """
        if self._ready:
            raise UsageError(f"{self!r} serves a Checkpointer already, or was asked before it did: make one for each")
        self._ready = True
        self._controller = Controller(msgspec.structs.replace(self._limits, in_flight=in_flight))
        self._now_ns = (self._clock or clock).monotonic_ns
        if incarnation.world_size == 1:
            return lambda: None
        self._channel = DecisionChannel(loop, NoteBoard(incarnation, "cadence"), deadline_s)
        return self._channel.end

    @property
    def _leads(self) -> bool:
        return self._channel is None or self._channel.is_leader

    def on_event(self, event: Event) -> None:
        """Queue an event of a save. On the loop thread."""
        if self._leads:
            self._events.append(event)

    def due(self, step: int) -> bool:
        """Return whether to save now that *step* is trained. From the training thread, after every step, on every rank.

        It need not be called for each step: a step without a call counts with the next.

        Raises:
            RankTimeoutError: rank 0 has not decided about this step, and the deadline has passed.
            UsageError: there are other ranks, and no checkpointer to reach them through.
            BlockingCallError: rank 0 has not decided, and this thread runs an event loop: ask on a worker thread there.
        """
        if not self._ready and find_ranks().world_size > 1:
            raise UsageError(
                "Cadence.due() with several ranks: they agree through the checkpointer. Give it to one, as every= or in "
                "observers=, before you ask"
            )
        self._ready = True
        before, answer = self._answered or (step - 1, False)
        if self._answered is not None and step == before:
            return answer
        if step < before:  # an older checkpoint was loaded
            before, self._note = step - 1, NOTHING_DECIDED
            self._saves.clear()
            if self._channel is not None:
                self._channel.restart()
        if self._leads:
            self._lead(step)
        else:
            self._follow(step)
        answer = any(before < save <= step for save in self._saves)
        self._answered = step, answer
        return answer

    def _lead(self, step: int) -> None:
        """Measure; decide, when it is time, about the next steps, and notify the other ranks."""
        controller, channel, decided = self._controller, self._channel, self._note.until
        while self._events:
            controller.receive(self._events.popleft())
        controller.reach(step, self._now_ns())
        notice = 0 if channel is None else controller.notice_steps(channel.notice_s)
        if decided > step + notice:
            return
        saves: list[int] = []
        first, until = max(step, decided), step + 1 + 2 * notice
        while (save := controller.next_save()) is not None and (save := max(save, first)) < until:
            controller.expect(save)
            saves.append(save)
            first = save + 1
        if save is not None:
            until = max(until, min(save - notice, step + LEAP * notice))
        note = Note(tuple(saves), until, notice, controller.explain() if channel else "")
        self._add(note)
        if channel is not None:
            channel.post(note)

    def _follow(self, step: int) -> None:
        """Receive what rank 0 has decided; wait only where it is not known whether to save *step*."""
        assert self._channel is not None
        note = self._channel.poll()
        if note is not None:
            self._add(note)
        while step >= self._note.until:
            self._add(self._channel.wait())
        if self._note.until - step <= self._note.notice:
            self._channel.prefetch()

    def _add(self, note: Note) -> None:
        self._note = note
        self._saves.extend(note.saves)

    @property
    def interval(self) -> Interval:
        """From one save to the next, as it is now; on rank 0, which decides."""
        return self._controller.interval

    @property
    def measured(self) -> Measured:
        """What saves and steps took lately; on rank 0, which measures."""
        return self._controller.measured

    def explain(self) -> str:
        """Explain in a sentence or two how often the run saves, by which rule, and what was measured."""
        if not self._leads:
            return f"Rank 0 decides. {self._note.why}" if self._note.why else "Rank 0 has not decided yet."
        return self._controller.explain()

    def __repr__(self) -> str:
        return f"<Cadence {self.interval.rule}: every {self.interval.steps} steps>"


class DecisionChannel:
    """One rank's end of the notes about when to save (`aiockpt.runtime.notes`). For the training thread.

    Args:
        deadline_s: for rank 0, when a step is reached that it has not decided.
    """

    def __init__(self, loop: Loop, board: NoteBoard, deadline_s: float) -> None:
        self.is_leader = board.rank == 0
        self.notice_s = NOTICE_S + NOTICE_OF_A_RANK_S * board.world_size
        self._loop = loop
        self._board = board
        self._deadline_s = deadline_s
        self._epoch = self._number = 0
        self._asked: Future[Note] | None = None

    def restart(self) -> None:
        """Begin anew: an older checkpoint was loaded, on all ranks, and steps repeat."""
        self.end()
        self._epoch, self._number = self._epoch + 1, 0

    def post(self, note: Note) -> None:
        """Post the next note. Does not wait."""
        self._board.begin()
        self._number += 1
        self._loop.submit(self._board.post, self._key(self._number), note).add_done_callback(_log_failure)

    def prefetch(self) -> Future[Note]:
        """Begin to poll for the next note, unless that has begun. Does not wait."""
        if self._asked is None:
            self._board.begin()
            self._asked = self._loop.submit(self._receive, self._key(self._number + 1))
        return self._asked

    def poll(self) -> Note | None:
        """Return the next note when it has come; None while it has not. Does not wait."""
        asked = self._asked
        if asked is None or not asked.done():
            return None
        self._asked = None
        note = asked.result()
        self._number += 1
        return note

    def wait(self) -> Note:
        """Wait for the next note.

        Raises:
            RankTimeoutError: rank 0 left none before the deadline.
            StoreLostError: the store does not answer any more.
            BlockingCallError: this thread runs an event loop.
        """
        while (note := self.poll()) is None:
            refuse_in_event_loop(
                "waiting for rank 0 to decide whether to save", "ask on a worker thread (asyncio.to_thread)"
            )
            done, _ = wait([self.prefetch()], self._deadline_s)
            if not done:
                limit = f"within {self._deadline_s:g} s"
                raise RankTimeoutError(f"whether to save the next steps: nothing from rank 0 {limit}", [0])
        return note

    def end(self) -> None:
        """Stop polling. Any thread; idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()

    async def _receive(self, key: str) -> Note:
        """Wait for a note; the last rank to read it removes it. A caller that needs it now has a deadline (`wait`)."""
        board = self._board
        note = await board.wait(key, Note, math.inf, "whether to save the next steps")
        if await board.arrive(f"{key}/readers") == board.world_size - 1:
            await board.delete([key, f"{key}/readers"])
        return note

    def _key(self, number: int) -> str:
        return f"{self._epoch}/{number}"


def _log_failure(posting: Future[None]) -> None:
    if not posting.cancelled() and (error := posting.exception()) is not None:
        logger.error("cadence: a decision could not be posted for the other ranks, whose saves may time out: %s", error)
