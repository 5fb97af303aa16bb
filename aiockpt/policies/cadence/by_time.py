"""Saves at a fixed time interval, ``every="30min"``: the measuring of `controller`, and the clock in place of its rules.

Guarantees:

- From one save to the next it is the time that was asked for, and at most a step longer; a save that came late does not
  delay those after it.
- The first comes when that time has passed since the first step: a run that fails at once has saved nothing.
- It is the time of rank 0 that counts (`aiockpt.policies.cadence.cadence` notifies the others).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from aiockpt.events import Event
from aiockpt.options import refuse_value
from aiockpt.policies.cadence.controller import Controller
from aiockpt.policies.cadence.intervals import Interval, Limits, Measured, duration
from aiockpt.units import parse_seconds


def parse_duration_s(given: str) -> float:
    """Return the seconds of ``"90s"``, ``"30min"`` or ``"1.5h"``.

    Raises:
        UsageError: it is no time of more than 0.
    """
    seconds = parse_seconds(given)
    if seconds <= 0:
        refuse_value("", "every", given, "a time such as '90s', '30min' or '2h', a number of steps, or a Cadence")
    return seconds


class TimeController:
    """Says that a save is due each so many seconds; see `aiockpt.policies.cadence.controller.Controller`."""

    def __init__(self, every_s: float, limits: Limits) -> None:
        self._every_ns = round(every_s * 1e9)
        self._measuring = Controller(limits)
        self._at: tuple[int, int] | None = None
        self._due_ns = 0

    def reach(self, step: int, now_ns: int) -> None:
        """Record that the training reaches *step*."""
        self._measuring.reach(step, now_ns)
        if self._at is None:
            self._due_ns = now_ns + self._every_ns
        self._at = step, now_ns

    def take(self, event: Event) -> None:
        """Record the outcome of a save."""
        self._measuring.take(event)

    def expect(self, step: int) -> None:
        """Record that *step* is about to be saved."""
        self._measuring.expect(step)
        now_ns = self._at[1] if self._at else 0
        late = max(0, now_ns - self._due_ns) // self._every_ns
        self._due_ns += (1 + late) * self._every_ns

    def notice_steps(self, seconds: float) -> int:
        """Return how many steps *seconds* are, about."""
        return self._measuring.notice_steps(seconds)

    def is_due(self, step: int, planned: Iterable[int] = ()) -> bool:
        """Return whether to save *step*, which the training has reached or will reach soon."""
        if self._at is None:
            return False
        ahead_ns = round((step - self._at[0]) * self.measured.step_s * 1e9)
        return self._at[1] + ahead_ns >= self._due_ns + len(list(planned)) * self._every_ns

    def earliest(self, planned: Iterable[int] = ()) -> int | None:
        """Return the step of the next save, about; None while nothing is measured."""
        step_s = self.measured.step_s
        if self._at is None or not step_s:
            return None
        left_ns = self._due_ns + len(list(planned)) * self._every_ns - self._at[1]
        return self._at[0] + max(0, math.floor(left_ns / 1e9 / step_s))

    @property
    def interval(self) -> Interval:
        """From one save to the next."""
        step_s, every_s = self.measured.step_s, self._every_ns / 1e9
        return Interval("time", max(1, round(every_s / step_s)) if step_s else 1, every_s)

    @property
    def measured(self) -> Measured:
        """What saves and steps took lately."""
        return self._measuring.measured

    def explain(self) -> str:
        """Return the interval that was asked for, in words."""
        return f"Save every {duration(self._every_ns / 1e9)} [rule: time]: that was asked for."
