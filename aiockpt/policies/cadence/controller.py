"""The measurement of saves and steps, which decides when the next save is due. Its inputs are events and steps.

No clock, no threads, no ranks. Estimates are medians of a short window: of five, one or two outliers change nothing, and a
third of their kind does. Guarantees:

- Nothing measured yet: the first save comes after a few steps, and no other before it has ended.
- All that saves have blocked is at most ``max_overhead`` of the training, and three usual saves: what one cost too much is
  paid back before the next. (One accident counts as `WORST` usual saves at most, so that it does not end all saving.)
- No save is due while as many as may run at once are on their way: it would have to wait, and training with it.

With a fixed time (``every="30min"``) the clock decides in place of the formula: the interval is that time, or at most a step
longer; a late save does not delay those after it. The first save comes one interval after the first step: a run that fails
at once has saved nothing.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from aiockpt.events import BarrierWaited, Committed, Event, SaveFailed, SaveSkipped, SaveStarted, SnapshotTaken
from aiockpt.policies.cadence.intervals import (
    SAVES,
    SHORTEST_STEP_S,
    Interval,
    IntervalLimits,
    Measured,
    choose,
    describe,
    whole_steps,
)

FIRST_STEPS = 3
"""Steps that are measured before the first save, and waited for after one that came to nothing."""
POLL_EVERY = 32
"""Steps after which the interval is chosen again although no save has ended: steps may have become longer."""
WORST = 10
"""The worst save counts as so many usual ones at most when it is paid back."""
LEAST_NOTICE, MOST_NOTICE = 2, 1000
"""Steps by which rank 0 is ahead with its decisions, however long or short they are."""
STEPS = 32
"""Steps that are remembered."""


class Controller:
    """Measures one run and says when the next save is due. Times are of one monotonic clock.

    Attributes:
        interval: from a save to the next.
    """

    def __init__(self, limits: IntervalLimits) -> None:
        self.interval = Interval("first", FIRST_STEPS, 0.0)
        self._limits = limits
        self._every_ns = round((limits.every_s or 0.0) * 1e9)
        self._due_ns: int | None = None
        self._blocked, self._writes, self._steps = Recent(), Recent(), StepTimes()
        self._running: set[int] = set()
        self._expected: set[int] = set()
        self._held_s: dict[int, float] = {}
        self._stood_s = self._debt_s = 0.0
        self._saves = self._ended = self._unseen = 0
        self._at: tuple[int, int] | None = None
        self._last = -1
        self._stirred = False

    def reach(self, step: int, now_ns: int) -> None:
        """Record that the training begins, or ends, *step*: the caller must report always the same of the two."""
        before, self._at = self._at, (step, now_ns)
        if before is None:
            self._last = step - 1
        elif step < before[0]:  # an older checkpoint was loaded
            self._last = step
        elif step > before[0]:
            self._measure(step - before[0], max(0, now_ns - before[1]) / 1e9)
        self._expected = {other for other in self._expected if step <= other <= self._last}
        self._stirred = False
        if self._limits.every_s is not None:
            every_s, step_s = self._limits.every_s, self._steps.step_s
            self.interval = Interval("time", max(1, round(every_s / step_s)) if step_s else 1, every_s)
            self._due_ns = now_ns + self._every_ns if self._due_ns is None else self._due_ns

    def _measure(self, count: int, seconds: float) -> None:
        stood_s = min(seconds, self._stood_s)  # what is left belongs to the step that comes next
        self._stood_s -= stood_s
        trained_s = seconds - stood_s
        self._steps.add(trained_s, count, busy=self._stirred or bool(self._running))
        self._debt_s = max(0.0, self._debt_s - self._limits.max_overhead * trained_s)
        self._unseen += 1
        if self._ended or (self._saves and self._unseen >= POLL_EVERY):
            self._steps.end_saves(self._ended)
            self._ended = self._unseen = 0
            self.interval = choose(self.measured, self._limits, self.interval)

    def receive(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._running.add(event.step)
                self._expected.discard(event.step)
                self._last, self._stirred = max(self._last, event.step), True
            case SnapshotTaken():
                self._block(event.step, event.pause_s)
            case BarrierWaited():
                self._block(event.step, event.seconds)
            case Committed():
                self._end(event.step, event.seconds)
            case SaveFailed() | SaveSkipped():
                self._end(event.step, None)

    def _block(self, step: int, seconds: float) -> None:
        """Record that the save of *step* held the training for *seconds* (more)."""
        seconds, usual_s = max(0.0, seconds), self._blocked.usual
        self._stirred = True
        self._stood_s += seconds
        self._held_s[step] = self._held_s.get(step, 0.0) + seconds
        self._debt_s += min(seconds, WORST * usual_s) if usual_s else seconds

    def _end(self, step: int, seconds: float | None) -> None:
        """Record that a save ended, *seconds* after its call; None: it failed."""
        began, held_s = step in self._running, self._held_s.pop(step, 0.0)
        self._running.discard(step)
        self._expected.discard(step)
        if not began or (seconds is None and not held_s):
            return  # it came to nothing before it cost anything
        self._stirred = True
        self._saves += 1
        self._ended += 1
        self._blocked.add(held_s)
        if seconds is not None:
            self._writes.add(max(0.0, seconds))

    @property
    def measured(self) -> Measured:
        return Measured(
            self._saves, self._blocked.usual, self._steps.lost_s, self._writes.usual, step_s=self._steps.step_s
        )

    def notice_steps(self, seconds: float) -> int:
        """Return about how many steps take *seconds*; a few at least."""
        return max(LEAST_NOTICE, min(MOST_NOTICE, self._steps_in(seconds))) if self._steps.step_s else LEAST_NOTICE

    def _steps_in(self, seconds: float) -> int:
        return whole_steps(seconds / max(self._steps.step_s, SHORTEST_STEP_S)) if seconds > 0 else 0

    def expect(self, step: int) -> None:
        """Record the decision to save *step*."""
        self._expected.add(step)
        self._last = step
        if self._due_ns is not None and self._at is not None:
            # One that is late by several intervals is one save, not several in a row.
            self._due_ns += (1 + max(0, self._at[1] - self._due_ns) // self._every_ns) * self._every_ns

    def next_save(self) -> int | None:
        """Return the first step to be saved beyond those decided, as is known now; None: not before a save has ended."""
        assert self._at is not None
        if self._due_ns is not None:
            left_s = (self._due_ns - self._at[1]) / 1e9
            return None if left_s > 0 and not self._steps.step_s else self._at[0] + self._steps_in(left_s)
        if len(self._running) + len(self._expected) >= (self._limits.in_flight if self._saves else 1):
            return None
        return max(self._last + self.interval.steps, self._at[0] + self._steps_in(self._pay_back_s))

    @property
    def _pay_back_s(self) -> float:
        """The training that pays for what saves have blocked beyond a usual one."""
        return max(0.0, self._debt_s - self._blocked.usual) / self._limits.max_overhead

    def explain(self) -> str:
        return describe(self.interval, self.measured, self._limits, self._pay_back_s)


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


class StepTimes:
    """How long steps take, and how much longer those beside a save."""

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=STEPS)
        self._free: deque[float] = deque(maxlen=STEPS)
        self._lost = Recent()
        self._busy_s, self._busy_count = 0.0, 0
        self._beside_count = 0
        """Steps beside one of the last saves."""

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
            self._beside_count = self._busy_count
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
        noise_s = 2 * 1.25 * spread_s * math.sqrt(self._beside_count / len(self._lost))  # two standard errors
        return max(0.0, self._lost.usual - noise_s)
