"""The measurement of saves and steps, which decides when the next save is due. Its inputs are events and steps.

No clock, no threads, no ranks. Estimates are medians of a short window: of five, one or two outliers change nothing, and a
third of their kind does. Guarantees:

- Nothing measured yet: the first save comes after a few steps, and no other before it has ended.
- All that saves have blocked is at most ``max_overhead`` of the training, and three usual saves: what one cost too much is
  paid back before the next, whatever the estimates say. (One accident counts as `WORST` usual saves at most, so that it
  does not leave the run without checkpoints.)
- No save is due while as many as may run at once are on their way: it would have to wait, and training with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from aiockpt.events import BarrierWaited, Committed, Event, SaveFailed, SaveSkipped, SaveStarted, SnapshotTaken
from aiockpt.policies.cadence.intervals import (
    SAVES,
    Interval,
    IntervalLimits,
    Measured,
    choose,
    describe,
    duration,
)

FIRST_STEPS = 3
"""Steps that are measured before the first save, and waited for after one that came to nothing."""

POLL_EVERY = 32
"""Steps after which the interval is chosen again although no save has ended: steps may have become longer."""

WORST = 10
"""The worst save counts as so many usual ones at most when it is paid back."""

LEAST_NOTICE, MOST_NOTICE = 2, 1000
"""Steps by which rank 0 is ahead with its decisions, however long or short they are."""

LATE = 1.25
"""A save that takes longer than usual by this factor is not expected to end soon."""

STEPS = 32
"""Steps that are remembered."""

OVERLAP = 1.25
"""A save with so many in flight, on average over its time, counts as written beside others."""


class Controller:
    """Measures one run and says when the next save is due. Times are of one monotonic clock.

    Args:
        limits: what may not be exceeded.

    Attributes:
        interval: from a save to the next.
        debt_s: what saves have blocked beyond what the training has paid for since.
    """

    def __init__(self, limits: IntervalLimits) -> None:
        self.interval = Interval("first", FIRST_STEPS, 0.0)
        self.debt_s = 0.0
        self._limits = limits
        self._blocked, self._writes, self._steps = Recent(), WriteTimes(limits.in_flight), StepTimes()
        self._begun_ns: dict[int, tuple[int, float]] = {}
        self._held_s: dict[int, float] = {}
        self._stood_s = 0.0
        self._area_s, self._area_at_ns = 0.0, 0
        self._saves = self._ended = self._unseen = 0
        self._at: tuple[int, int] | None = None
        self._last: int | None = None
        self._stirred = False

    # ------------------------------------------------------------------ what is measured

    def reach(self, step: int, now_ns: int) -> None:
        """Record that the training begins, or ends, *step*: the caller must report always the same of the two."""
        before, self._at = self._at, (step, now_ns)
        if before is None:
            self._last = step - 1
        elif step < before[0]:  # an older checkpoint was loaded
            self._last = step
        elif step > before[0]:
            self._measure(step - before[0], max(0, now_ns - before[1]) / 1e9)
        self._stirred = False

    def _measure(self, count: int, seconds: float) -> None:
        stood_s = min(seconds, self._stood_s)  # what is left belongs to the step that comes next
        self._stood_s -= stood_s
        trained_s = seconds - stood_s
        self._steps.add(trained_s, count, busy=self._stirred or bool(self._begun_ns))
        self.debt_s = max(0.0, self.debt_s - self._limits.max_overhead * trained_s)
        self._unseen += 1
        if self._ended or (self._saves and self._unseen >= POLL_EVERY):
            self._steps.end_saves(self._ended)
            self._ended = self._unseen = 0
            self.interval = choose(self.measured, self._limits, self.interval)

    def receive(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._begin(event)
            case SnapshotTaken():
                self.block(event.step, event.pause_s)
            case BarrierWaited():
                self.block(event.step, event.seconds)
            case Committed():
                self._end(event, event.seconds)
            case SaveFailed() | SaveSkipped():
                self._end(event, None)

    def block(self, step: int, seconds: float) -> None:
        """Record that the save of *step* held the training for *seconds* (more)."""
        seconds = max(0.0, seconds)
        usual_s = self._blocked.usual
        self._stirred = True
        self._stood_s += seconds
        self._held_s[step] = self._held_s.get(step, 0.0) + seconds
        self.debt_s += min(seconds, WORST * usual_s) if usual_s else seconds

    def _begin(self, event: SaveStarted) -> None:
        self._pass(event.at_ns)
        self._stirred = True
        self._begun_ns[event.step] = event.at_ns, self._area_s
        if self._last is not None:
            self._last = max(self._last, event.step)

    def _end(self, event: Event, seconds: float | None) -> None:
        self._pass(event.at_ns)
        begun = self._begun_ns.pop(event.step, None)
        held_s = self._held_s.pop(event.step, 0.0)
        if begun is None or (seconds is None and not held_s):
            return  # it came to nothing before it cost anything
        self._stirred = True
        self._saves += 1
        self._ended += 1
        self._blocked.add(held_s)
        if seconds is not None:
            ran_s = (event.at_ns - begun[0]) / 1e9
            self._writes.add(max(0.0, seconds), (self._area_s - begun[1]) / ran_s if ran_s > 0 else 1.0)

    def _pass(self, now_ns: int) -> None:
        """Sum the time of saves in flight, each counted, until now."""
        self._area_s += len(self._begun_ns) * max(0, now_ns - self._area_at_ns) / 1e9
        self._area_at_ns = max(now_ns, self._area_at_ns)

    @property
    def measured(self) -> Measured:
        return Measured(
            saves=self._saves,
            blocked_s=self._blocked.usual,
            lost_s=self._steps.lost_s,
            write_s=self._writes.write_s,
            storage_s=self._writes.storage_s,
            step_s=self._steps.step_s,
        )

    def expect(self, step: int) -> None:
        self._last = step

    # ------------------------------------------------------------------ what follows

    def notice_steps(self, seconds: float) -> int:
        """Return about how many steps take *seconds*; a few at least."""
        step_s = self._steps.step_s
        return max(LEAST_NOTICE, min(MOST_NOTICE, math.ceil(seconds / step_s))) if step_s else LEAST_NOTICE

    def earliest(self, planned: Iterable[int] = ()) -> int | None:
        """Return the step of the next save, as far as the interval decides; None: not before the first one has ended.

        Args:
            planned: steps whose save is decided and has not begun.
        """
        waiting = list(planned)
        if not self._saves and (self._begun_ns or waiting):
            return None
        last = -1 if self._last is None else self._last
        return max([last, *waiting]) + self.interval.steps

    def is_due(self, step: int, planned: Iterable[int] = ()) -> bool:
        """Return whether to save *step*, which the training has reached or will reach soon."""
        waiting = list(planned)
        earliest = self.earliest(waiting)
        if earliest is None or step < earliest:
            return False
        return self._is_paid(step, len(waiting)) and self._has_room(step, waiting)

    def _is_paid(self, step: int, waiting: int) -> bool:
        """Return whether the debt will be down to a usual save by *step*, with those that *wait* to be made."""
        usual_s = self._blocked.usual
        return self.debt_s + waiting * usual_s - self._limits.max_overhead * self._ahead_s(step) <= usual_s

    def _has_room(self, step: int, waiting: list[int]) -> bool:
        """Return whether one more save may run at *step*."""
        usual_s, ahead_s = self._writes.write_s * LATE, self._ahead_s(step)
        now_ns = self._at[1] if self._at else 0
        running = 0
        for begun_ns, _ in self._begun_ns.values():
            age_s = (now_ns - begun_ns) / 1e9
            # Not counted where it is expected to end before *step*; of one that is late already nothing is expected.
            running += not (ahead_s > 0 and age_s < usual_s <= age_s + ahead_s)
        for other in waiting:
            running += self._ahead_s(step) - self._ahead_s(other) < usual_s
        return running < self._limits.in_flight

    def _ahead_s(self, step: int) -> float:
        """Return how long it is until *step*, about."""
        return max(0, step - self._at[0]) * self._steps.step_s if self._at else 0.0

    def explain(self) -> str:
        return describe(self.interval, self.measured, self._limits, self.debt_s - self._blocked.usual)


class TimeController(Controller):
    """Decides that a save is due at a fixed interval, ``every="30min"``: by the clock in place of the rules.

    The interval between saves is that time, or at most a step longer; a late save does not delay those after it. The first
    save comes one interval after the first step: a run that fails at once has saved nothing.
    """

    def __init__(self, every_s: float, limits: IntervalLimits) -> None:
        super().__init__(limits)
        self._every_ns = round(every_s * 1e9)
        self._due_ns: int | None = None
        self.interval = Interval("time", 1, every_s)

    def reach(self, step: int, now_ns: int) -> None:
        super().reach(step, now_ns)
        if self._due_ns is None:
            self._due_ns = now_ns + self._every_ns
        every_s, step_s = self._every_ns / 1e9, self._steps.step_s
        self.interval = Interval("time", max(1, round(every_s / step_s)) if step_s else 1, every_s)

    def expect(self, step: int) -> None:
        super().expect(step)
        if self._at is not None and self._due_ns is not None:
            # One that is late by several intervals is one save, not several in a row.
            self._due_ns += (1 + max(0, self._at[1] - self._due_ns) // self._every_ns) * self._every_ns

    def is_due(self, step: int, planned: Iterable[int] = ()) -> bool:
        left_ns = self._left_ns(planned)
        return left_ns is not None and round(self._ahead_s(step) * 1e9) >= left_ns

    def earliest(self, planned: Iterable[int] = ()) -> int | None:
        left_ns, step_s = self._left_ns(planned), self._steps.step_s
        if self._at is None or left_ns is None or not step_s:
            return None
        return self._at[0] + max(0, math.floor(left_ns / 1e9 / step_s))

    def _left_ns(self, planned: Iterable[int]) -> int | None:
        """Return how long it is until the save after those that are *planned*; None before the first step."""
        if self._at is None or self._due_ns is None:
            return None
        return self._due_ns + len(list(planned)) * self._every_ns - self._at[1]

    def explain(self) -> str:
        return f"Save every {duration(self._every_ns / 1e9)} [rule: time]: that was asked for."


class Recent:
    """The last few measurements of something that each save has."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAVES)
        self._count = 0

    def add(self, value: float) -> None:
        """Record *value*. The very first is dropped at the second: its save planned, and faulted the pool in."""
        self._count += 1
        if self._count == 2:
            self._values.clear()
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def usual(self) -> float:
        """The median; 0 when there is none."""
        return median(self._values) if self._values else 0.0


class WriteTimes:
    """How long saves take until they are committed, and how often the storage can take one.

    A save that has the storage to itself does not show whether two at once would take twice as long each (a disk at its
    limit), or no longer (latency dominates). Saves that were written beside others show it.

    Args:
        in_flight: saves that may run at once.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._all, self._alone, self._hindered = Recent(), Recent(), Recent()

    def add(self, seconds: float, overlap: float) -> None:
        """Record a save that took *seconds*, with *overlap* saves in flight on average, itself among them."""
        self._all.add(seconds)
        alone_s = self._alone.usual
        if overlap < OVERLAP:
            self._alone.add(seconds)
        elif alone_s:
            self._hindered.add(min(1.0, max(0.0, (seconds / alone_s - 1) / (overlap - 1))))

    @property
    def write_s(self) -> float:
        """From the call to committed."""
        return self._all.usual

    @property
    def storage_s(self) -> float:
        """Seconds per save that the storage sustains when as many run as may; 0 until some ran beside others.

        Each of those others made it longer by a share, 0 to 1, of the time that one takes alone.
        """
        if not len(self._hindered):
            return 0.0
        return self._alone.usual * (1 + (self._in_flight - 1) * self._hindered.usual) / self._in_flight


class StepTimes:
    """How long steps take, and how much longer those beside a save."""

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=STEPS)
        self._free: deque[float] = deque(maxlen=STEPS)
        self._lost = Recent()
        self._busy: deque[int] = deque(maxlen=SAVES)
        self._busy_s, self._busy_count = 0.0, 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, seconds: float, count: int, busy: bool) -> None:
        """Record *count* steps that took *seconds*, without the time blocked; *busy*: beside a save."""
        self._all.append(seconds / count)
        if busy:
            self._busy_s += seconds
            self._busy_count += count
        else:
            self._free.append(seconds / count)

    def end_saves(self, count: int) -> None:
        """Divide the time that steps have lost since the last end among the *count* saves that have ended."""
        if not count:
            return
        if self._free and self._busy_count:
            lost_s = self._busy_s - self._busy_count * median(self._free)
            for _ in range(count):
                self._lost.add(lost_s / count)
            self._busy.append(self._busy_count)
        self._busy_s, self._busy_count = 0.0, 0

    @property
    def step_s(self) -> float:
        """One step; 0 while there is none."""
        return median(self._all) if self._all else 0.0

    @property
    def lost_s(self) -> float:
        """How much longer the steps beside a save take than as many free ones, beyond the noise."""
        if not len(self._lost):
            return 0.0
        usual = median(self._free)
        spread_s = 1.4826 * median(abs(step_s - usual) for step_s in self._free)  # the median's way to a deviation
        # 1.25: for normal noise the standard error of a median is sqrt(pi / 2) times that of a mean.
        noise_s = 2 * 1.25 * spread_s * math.sqrt(median(self._busy) / len(self._lost))  # two standard errors
        return max(0.0, self._lost.usual - noise_s)
