"""What is usual? Estimates that one odd measurement does not move, and that a lasting change moves within a few.

All of them are medians of a short window: of five, an outlier or two move nothing, and the third of a new kind is followed.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SAVES = 5
"""Measurements of saves that are remembered: a change is followed after three."""

STEPS = 32
"""Steps that are remembered."""

OVERLAP = 1.25
"""Saves in flight, on average over one of them, from which on it was written beside others."""


class Recent:
    """The last few measurements of something that each save has."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAVES)
        self._count = 0

    def add(self, value: float) -> None:
        """Remember *value*. The first of all is forgotten at the second: it planned, and faulted the pool in."""
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

    A save that has the storage to itself does not tell whether two at once would take twice as long each, as on a disk at
    its limit, or no longer, as where answers are what takes long. Once some were written beside others, they do.

    Args:
        in_flight: saves that may run at once.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._all, self._alone, self._hindered = Recent(), Recent(), Recent()

    def add(self, seconds: float, overlap: float) -> None:
        """Remember a save that took *seconds*, with *overlap* saves in flight on average, itself among them."""
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
        """How often the storage takes a save when as many run as may; 0 until some ran beside others.

        Each of those others made it longer by a share of what one takes alone: by none of it, or by all.
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
        """Remember *count* steps that took *seconds*, without the time blocked; *busy*: beside a save."""
        self._all.append(seconds / count)
        if busy:
            self._busy_s += seconds
            self._busy_count += count
        else:
            self._free.append(seconds / count)

    def end_saves(self, count: int) -> None:
        """Share what the steps since the last end lost among the *count* saves that have ended."""
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
        """What the steps beside a save take longer than as many free ones, as far as it is more than noise."""
        if not len(self._lost):
            return 0.0
        usual = median(self._free)
        spread_s = 1.4826 * median(abs(step_s - usual) for step_s in self._free)  # the median's way to a deviation
        noise_s = 2 * 1.25 * spread_s * math.sqrt(median(self._busy) / len(self._lost))  # two standard errors
        return max(0.0, self._lost.usual - noise_s)
