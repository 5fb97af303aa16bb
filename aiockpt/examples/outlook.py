"""How long will the demo still take? Said as soon as a few steps were taken, and better from then on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

ENOUGH_STEPS = 5
"""The first steps of a process are slow; the median of this many is a step as they will be."""


class Outlook:
    """Watches processes that train one after the other.

    Args:
        steps: how many each of them is going to take, in their order; 0 for work that is no training.
        clock: seconds that never go back.
    """

    def __init__(self, steps: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._left = dict(steps)
        self._clock = clock
        self._phase = ""
        self._begun_s = 0.0
        self._started = False
        self._starts_s: list[float] = []
        self._steps_s: list[float] = []

    def begin(self, phase: str) -> None:
        """Note that the process *phase* is started."""
        self._phase, self._begun_s, self._started = phase, self._clock(), False

    def step(self, seconds: float) -> None:
        """Note that it took a step."""
        if not self._started:
            self._starts_s.append(max(0.0, self._clock() - self._begun_s - seconds))
            self._started = True
        self._steps_s.append(seconds)
        self._left[self._phase] = max(0, self._left[self._phase] - 1)

    def finish(self) -> None:
        """Note that the process has ended."""
        del self._left[self._phase]

    def remaining_s(self) -> float | None:
        """Return how many seconds are left: what the steps took, and what a start of a process took; None too early."""
        if len(self._steps_s) < ENOUGH_STEPS:
            return None
        to_start = sum(steps > 0 for phase, steps in self._left.items() if phase != self._phase)
        return sum(self._left.values()) * median(self._steps_s) + to_start * median(self._starts_s)


def tell(seconds: float) -> str:
    """Return a time that is only about right, as people say it."""
    return f"about {seconds / 60:.0f} minutes" if seconds >= 120 else f"about {max(1, round(seconds)):d} s"
