"""The cadence of saves in a training loop, the same on all ranks: ``every=Cadence(…)``.

    with aiockpt.Checkpointer(url, every=aiockpt.Cadence(max_overhead=0.03, mttf=6 * 3600)) as ckpt:
        for step in range(ckpt.resume(state), steps):
            train(batch)
            ckpt.step(step, state)

How it goes: the events of saves and the times of steps are measured (`controller`), the measurements choose an interval
(`intervals`: the rules), and a save is due when the interval is over. With several ranks, rank 0 measures and decides some
steps ahead (`NOTICE_S`). It leaves its decisions as numbered notes in the job's store, each read by all ranks and then
removed; no process group is used.

Guarantees:

- All ranks answer alike for the same step. A rank that has no decision for a step waits for the note until the deadline,
  and then raises: it never saves alone, and never skips what others save.
- When the note has come, `Cadence.due` does not wait, and takes microseconds. The loop thread requests notes beforehand, so
  that one is late only for a rank that is ahead of rank 0 by more than the notice.
- Time is monotonic, that of the checkpointer's world: setting the machine's clock changes nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from aiockpt.errors import RankTimeoutError, UsageError
from aiockpt.events import Event
from aiockpt.options import asks_what_was_meant, check_amount, refuse_value
from aiockpt.policies.cadence.controller import Controller, TimeController
from aiockpt.policies.cadence.intervals import Interval, IntervalLimits, Measured, parse_duration_s
from aiockpt.runtime.loop import refuse_in_event_loop
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.world import Clock, Loop, OsClock, Ranks, find_ranks

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger("aiockpt")

NOTICE_S, NOTICE_OF_A_RANK_S = 0.25, 0.001
"""How long before a step the other ranks are notified: a read of the store takes longer the more ranks read."""

LEAP = 32
"""Most notices of a long interval that are decided at once: a decision cannot be changed any more."""

IN_FLIGHT = 2
DEADLINE_S = 600.0

REMEMBERED = 256
"""Decided saves that are remembered; a rank that is further behind reads them from their notes, in order."""


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

    @asks_what_was_meant
    def __init__(self, max_overhead: float = 0.03, *, mttf: float | None = None, clock: Clock | None = None) -> None:
        check_amount("Cadence", "max_overhead", max_overhead, ", as a fraction: 0.03 means 3 %")
        if max_overhead >= 1:
            refuse_value("Cadence", "max_overhead", max_overhead, "a fraction of less than 1: 0.03 means 3 %")
        check_amount("Cadence", "mttf", mttf, " seconds", optional=True)
        self._limits = IntervalLimits(max_overhead, mttf, IN_FLIGHT)
        self._clock = clock
        self._now_ns = (clock or OsClock()).monotonic_ns
        self._every_s: float | None = None
        self._controller = Controller(self._limits)
        self._schedule = Schedule()
        self._channel: DecisionChannel | None = None
        self._notice_s = 0.0
        self._ready = False
        self._events: deque[Event] = deque()
        self._answered: tuple[int, bool] | None = None

    @classmethod
    def by_time(cls, every: str) -> Cadence:
        """Return a cadence that saves at a fixed interval, such as ``"30min"``, whatever that costs.

        Raises:
            UsageError: *every* is no duration.
        """
        cadence = cls()
        cadence._every_s = parse_duration_s(every)
        cadence._controller = cadence._make_controller(IN_FLIGHT)
        return cadence

    def _make_controller(self, in_flight: int) -> Controller:
        limits = IntervalLimits(self._limits.max_overhead, self._limits.mttf_s, in_flight)
        return Controller(limits) if self._every_s is None else TimeController(self._every_s, limits)

    def join(
        self,
        loop: Loop,
        ranks: Ranks,
        place: str,
        clock: Clock,
        in_flight: int = IN_FLIGHT,
        deadline_s: float = DEADLINE_S,
    ) -> Callable[[], None]:
        """Serve the checkpointer that calls this; return the function that ends the service.

        Args:
            place: what it saves to, the same on all ranks.
            deadline_s: for rank 0, when a step is reached that it has not decided.

        Raises:
            UsageError: it serves one already.
        """
        if self._ready:
            raise UsageError(f"{self!r} serves a Checkpointer already, or was asked before it did: make one for each")
        self._ready = True
        self._controller = self._make_controller(in_flight)
        self._now_ns = (self._clock or clock).monotonic_ns
        if ranks.world_size > 1:
            board = NoteBoard(ranks.store, f"{place}/cadence", ranks.rank, ranks.world_size)
            self._channel = DecisionChannel(loop, board, deadline_s)
            self._notice_s = NOTICE_S + NOTICE_OF_A_RANK_S * ranks.world_size
        return self._end

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.end()

    @property
    def _leads(self) -> bool:
        return self._channel is None or self._channel.is_leader

    # ------------------------------------------------------------------ what happens

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
        if not self._ready:
            self._stand_alone()
        if self._answered is not None and step == self._answered[0]:
            return self._answered[1]
        after = self._catch_up(step)
        if self._leads:
            self._lead(step)
        else:
            self._follow(after, step)
        answer = self._schedule.answer(after, step)
        assert answer is not None
        if answer:
            self._controller.expect(step)
        self._answered = step, answer
        return answer

    def _stand_alone(self) -> None:
        """Serve a process that has no other ranks, without a checkpointer."""
        if find_ranks().world_size > 1:
            raise UsageError(
                "Cadence.due() with several ranks: they agree through the checkpointer. Give it to one, as every= or in "
                "observers=, before you ask"
            )
        self._ready = True

    def _catch_up(self, step: int) -> int:
        """Record the events up to *step*; return the step of the previous call."""
        while self._events:
            self._controller.receive(self._events.popleft())
        before = step - 1 if self._answered is None else self._answered[0]
        if step < before:  # an older checkpoint was loaded
            before = step - 1
            self._schedule = Schedule()
            if self._channel is not None:
                self._channel.restart()
        if self._leads:
            self._controller.reach(step, self._now_ns())
        return before

    # ------------------------------------------------------------------ what follows

    def _lead(self, step: int) -> None:
        """Decide, when it is time, about the next steps, and notify the other ranks."""
        schedule, controller = self._schedule, self._controller
        if self._channel is None:
            if controller.is_due(step):
                schedule.add(Note((step,), step + 1, 0, ""))
            schedule.until = step + 1
            return
        notice = controller.notice_steps(self._notice_s)
        if schedule.until > step + notice:
            return
        note = self._decide(step, notice)
        schedule.add(note)
        self._channel.post(note)

    def _decide(self, step: int, notice: int) -> Note:
        """Decide about all steps for two notices from *step* on, and of a long interval about more."""
        controller, planned = self._controller, self._schedule.planned(step - 1)
        saves: list[int] = []
        until = step + 1 + 2 * notice
        for next_step in range(max(step, self._schedule.until), until):
            if controller.is_due(next_step, planned):
                planned.append(next_step)
                saves.append(next_step)
        earliest = controller.earliest(planned)
        if earliest is not None:
            until = max(until, min(earliest - notice, step + LEAP * notice))
        return Note(tuple(saves), until, notice, controller.explain())

    def _follow(self, after: int, step: int) -> None:
        """Receive what rank 0 has decided; wait only where it is not known whether to save *step*."""
        assert self._channel is not None
        schedule, channel = self._schedule, self._channel
        note = channel.poll()
        if note is not None:
            schedule.add(note)
        while schedule.answer(after, step) is None:
            schedule.add(channel.wait())
        if schedule.until - step <= schedule.notice:
            channel.prefetch()

    # ------------------------------------------------------------------ in words

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
            return f"Rank 0 decides. {self._schedule.why}" if self._schedule.why else "Rank 0 has not decided yet."
        return self._controller.explain()

    def __repr__(self) -> str:
        return f"<Cadence {self._controller.interval.rule}: every {self._controller.interval.steps} steps>"


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


class Schedule:
    """The decisions so far.

    Attributes:
        until: the first step that is not decided.
        notice, why: of the last note.
    """

    def __init__(self) -> None:
        self.until = self.notice = 0
        self.why = ""
        self._saves: deque[int] = deque(maxlen=REMEMBERED)

    def add(self, note: Note) -> None:
        self._saves.extend(note.saves)
        self.until = max(self.until, note.until)
        self.notice, self.why = note.notice, note.why

    def planned(self, after: int) -> list[int]:
        """Return the steps beyond *after* that are decided to be saved."""
        return [step for step in self._saves if step > after]

    def answer(self, after: int, step: int) -> bool | None:
        """Return whether one of the steps beyond *after*, up to *step*, is to be saved; None: that is not decided yet."""
        if step >= self.until:
            return None
        return any(after < save <= step for save in self._saves)


class DecisionChannel:
    """One rank's end of the notes about when to save (`aiockpt.runtime.notes`). For the training thread.

    Args:
        deadline_s: for rank 0, when a step is reached that it has not decided.
    """

    def __init__(self, loop: Loop, board: NoteBoard, deadline_s: float) -> None:
        self.is_leader = board.rank == 0
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

    def prefetch(self) -> None:
        """Begin to poll for the next note, unless that has begun. Does not wait."""
        if self._asked is None:
            self._board.begin()
            self._asked = self._loop.submit(self._receive, self._key(self._number + 1))

    def poll(self) -> Note | None:
        """Return the next note when it has come; None while it has not. Does not wait."""
        asked = self._asked
        if asked is None or not asked.done():
            return None
        self._asked = None
        if isinstance(asked.exception(), RankTimeoutError):
            return None  # both slept through the deadline, in a long evaluation perhaps: it was not needed so far
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
            begun_before = self._asked is not None
            self.prefetch()
            self._wait(begun_before)
        return note

    def _wait(self, begun_before: bool) -> None:
        """Wait for the end of the poll for the next note, and raise what ended it.

        A deadline that began to run before this wait is no reason to give up.
        """
        assert self._asked is not None
        error = self._asked.exception()
        if error is not None and not (begun_before and isinstance(error, RankTimeoutError)):
            self._asked = None
            raise error

    def end(self) -> None:
        """Stop polling. Any thread; idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()

    async def _receive(self, key: str) -> Note:
        """Wait for a note; the last rank to read it removes it."""
        board = self._board
        note = await board.wait(key, Note, self._deadline_s, "whether to save the next steps")
        if await board.arrive(f"{key}/readers") == board.world_size - 1:
            await board.delete([key, f"{key}/readers"])
        return note

    def _key(self, number: int) -> str:
        return f"{self._epoch}/{number}"


def _log_failure(posting: Future[None]) -> None:
    if not posting.cancelled() and (error := posting.exception()) is not None:
        logger.error("cadence: a decision could not be posted for the other ranks, whose saves may time out: %s", error)
