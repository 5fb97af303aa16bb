"""The signs of a bad step in the metrics of this rank: a number that is not finite, or a loss far above the last ones.

Guarantees:

- A metric on a device is never waited for, unless its step is saved, which reads it anyway: it is copied in the order of
  the device's work, and looked at in the first call after that. All are looked at before a step is saved, so that a
  step of which a sign is bad is saved by no rank.
- The losses that later ones are compared with are those of good steps alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from aiockpt.errors import UsageError, kind_in_words
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.session.rewind.rules import Rewind

LEAST_SPREAD = 0.01
"""The least spread that losses are thought to have, as a share of their median: equal ones have none at all."""


class Alarm(msgspec.Struct, frozen=True):
    """A bad step.

    Attributes:
        step: the first one that is bad, and *reason* why, *rank* where.
        exact: whether it is that very step, and not one since the last good one that was saved.
    """

    step: int
    reason: str
    rank: int = 0
    exact: bool = True


class LossWindow:
    """The last good losses.

    Args:
        spike: how many times their spread a loss may be above their median.
        size: how many count.
    """

    def __init__(self, spike: float, size: int) -> None:
        self._spike, self._size, self._least = spike, size, max(2, size // 4)
        self._losses: deque[tuple[int, float]] = deque()
        self._ordered: list[float] = []

    def judge(self, step: int, loss: float) -> str | None:
        """Return why *loss* is bad; else None, and it counts from now on."""
        if len(self._ordered) >= self._least and (above := self._limit_below(loss)) is not None:
            last = f"the median of the last {len(self._ordered)} and {self._spike:g} times their spread"
            return f"{loss:.6g} is above {above:.6g}, {last}"
        self._losses.append((step, loss))
        insort(self._ordered, loss)
        if len(self._losses) > self._size:
            self._drop(self._losses.popleft()[1])
        return None

    def _limit_below(self, loss: float) -> float | None:
        """Return the limit that *loss* is above; None where it is below."""
        median = self._ordered[len(self._ordered) // 2]
        least = LEAST_SPREAD * abs(median)
        if loss <= median + self._spike * least:  # most are: the spread takes some microseconds
            return None
        distances = sorted([abs(one - median) for one in self._ordered])
        spread = max(distances[len(distances) // 2], least)
        limit = median + self._spike * spread
        return limit if spread and loss > limit else None

    def go_back(self, step: int) -> None:
        """Forget the losses after *step*."""
        while self._losses and self._losses[-1][0] > step:
            self._drop(self._losses.pop()[1])

    def _drop(self, loss: float) -> None:
        del self._ordered[bisect_left(self._ordered, loss)]


class MetricWatch:
    """Looks at the metrics of each step. On the training thread.

    Args:
        accelerator: returns the devices, where a metric is a tensor.
        rank: this one.

    Attributes:
        names: of the metrics that are looked at.
    """

    def __init__(self, policy: Rewind, accelerator: Callable[[], Accelerator], rank: int) -> None:
        self._policy, self._accelerator, self._rank = policy, accelerator, rank
        names = [*policy.finite, *([] if policy.spike is None else [policy.loss])]
        self.names: list[str] = list(dict.fromkeys(names))
        self._window = None if policy.spike is None else LossWindow(policy.spike, policy.window)
        self._pending: deque[tuple[int, str, torch.Tensor, DeviceEvent]] = deque()

    def judge(self, step: int, metrics: Mapping[str, Any], *, now: bool) -> Alarm | None:
        """Return the first bad step that is known.

        Args:
            now: whether all metrics must be known, as those of a step that is saved.
        """
        alarm = self._judge_pending(wait=now) if self._pending else None
        for name in self.names:
            value = metrics.get(name)
            if value is None or alarm is not None:
                continue
            device = self._accelerator().device_of(value) if isinstance(value, torch.Tensor) else None
            if device is None or now:
                alarm = self._judge(step, name, _number(name, value))
            else:
                copied = value.to("cpu", non_blocking=True)
                self._pending.append((step, name, copied, self._accelerator().now(device)))
        return alarm

    def _judge_pending(self, *, wait: bool) -> Alarm | None:
        while self._pending and (wait or self._pending[0][3].done()):
            step, name, copied, event = self._pending.popleft()
            event.wait(math.inf if wait else 0.0)
            if (alarm := self._judge(step, name, _number(name, copied))) is not None:
                return alarm
        return None

    def _judge(self, step: int, name: str, value: float) -> Alarm | None:
        why = None
        if not math.isfinite(value):
            why = f"is {value}" if name in self._policy.finite else None
        elif self._window is not None and name == self._policy.loss:
            why = self._window.judge(step, value)
        return None if why is None else Alarm(step, f"{name} {why}", self._rank)

    def go_back(self, step: int) -> None:
        """Forget what was seen after *step*."""
        self._pending.clear()
        if self._window is not None:
            self._window.go_back(step)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"metrics[{name!r}]: give a number, or a tensor of one element, and not {kind_in_words(value)} ({error})"
        ) from error
