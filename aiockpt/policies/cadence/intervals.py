"""The interval between saves, from what saves and steps were measured to take: one formula, and its reason in words.

An interval is the longest of what these ask for, and at least a step:

- *overhead*: what saves cost the training is at most ``max_overhead`` of the interval (CheckFreq, FAST'21).
- *write*: a save is committed before the next one begins, so that none queues up (PCcheck, ASPLOS'25).
- *failures*: with a mean time to failure, no save costs more than the work it is expected to rescue.

It never falls when a cost or the mean time to failure rises. An interval that is a little longer than needed stays.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from aiockpt import units

Rule = Literal["first", "step", "overhead", "write", "failures", "time"]
"""What an interval comes from; "first": nothing is measured yet; "time": it was requested."""

BAND = 1.5
"""An interval stays while it is not longer than needed by more than this factor."""
MARGIN = 1.1
"""A new interval is so much longer than needed, or the noise of the next measurement would move it again."""
SAVES = 5
"""Measurements of saves that are remembered: a change is followed after three."""
SHORTEST_STEP_S = 1e-9
"""The least length of a step: a clock that stands still measures 0, which must divide nothing."""


class IntervalLimits(msgspec.Struct, frozen=True):
    """The limits of an interval.

    Attributes:
        max_overhead: the most that saves may cost, as a fraction of the training time.
        mttf_s: mean seconds between failures of the whole job; None where that is unknown.
        in_flight: saves that may run at once.
        every_s: a fixed interval, whatever it costs; None: by the formula.
    """

    max_overhead: float
    mttf_s: float | None
    in_flight: int
    every_s: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """What saves and steps took lately: medians, seconds; 0 where nothing was measured.

    Attributes:
        saves: saves measured so far, those that failed too.
        blocked_s: the training stood still, per save: in the call of ``save``, and at the barrier before the optimizer.
        lost_s: steps were slowed by the writing, in addition, per save, beyond the noise of steps.
        write_s: from the call of a save until it was committed.
        step_s: one step, without the time blocked.
    """

    saves: int = 0
    blocked_s: float = 0.0
    lost_s: float = 0.0
    write_s: float = 0.0
    step_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """What a save costs the training."""
        return self.blocked_s + self.lost_s


class Interval(msgspec.Struct, frozen=True):
    """From one save to the next: so many *steps*, about *seconds*; *rule* says why it is not shorter."""

    rule: Rule
    steps: int
    seconds: float


def optimal_interval_s(cost_s: float, mttf_s: float) -> float:
    """Return the training time between saves that gets most work done when failures come at random.

    It is the higher-order estimate of J. T. Daly (FGCS 22, 2006): within 2 % of the optimum of his complete model while a
    save costs half of *mttf_s* at most, and Young's ``sqrt(2 C M)`` (CACM 17, 1974) where it costs much less. It never
    exceeds 8/9 of *mttf_s*, its value where a save costs twice that.

    Args:
        cost_s: what a save costs the training, not what it takes to write; 0 or more.
        mttf_s: more than 0.
    """
    half = min(1.0, math.sqrt(cost_s / mttf_s / 2))
    return mttf_s * half * (2 - half * 4 / 3 + half**2 * 2 / 9)


def choose(measured: Measured, limits: IntervalLimits, current: Interval | None = None) -> Interval:
    """Return the interval for what was *measured*: the *current* one while it is long enough, and not far too long."""
    step_s = max(measured.step_s, SHORTEST_STEP_S)
    asked_s: dict[Rule, float] = {
        "overhead": measured.cost_s / limits.max_overhead,
        "write": measured.write_s,
        "failures": 0.0 if limits.mttf_s is None else optimal_interval_s(measured.cost_s, limits.mttf_s),
    }
    rule = max(asked_s, key=lambda name: asked_s[name])
    needed, most = (whole_steps(asked_s[rule] / step_s * factor) for factor in (1, BAND))
    keeps = current is not None and current.rule != "first" and needed <= current.steps <= most
    steps = current.steps if current is not None and keeps else whole_steps(asked_s[rule] / step_s * MARGIN)
    return Interval(rule if steps > 1 else "step", steps, steps * step_s)


def whole_steps(steps: float) -> int:
    """Return *steps*, rounded up to at least one."""
    return max(1, math.ceil(min(steps, 1 << 62)))


def describe(interval: Interval, measured: Measured, limits: IntervalLimits, pay_back_s: float) -> str:
    """Describe the interval, the rule that determines it, and what was *measured*.

    Args:
        pay_back_s: the training that pays for what saves have blocked beyond a usual one.
    """
    if interval.rule == "first":
        return (
            f"First saves [rule: first]: nothing is measured yet; one comes after {interval.steps} steps, and the next "
            "when it is known what that cost."
        )
    if interval.rule == "time":
        return f"Save every {duration(interval.seconds)} [rule: time]: that was asked for."
    cost, share = duration(measured.cost_s), f"{100 * limits.max_overhead:.3g} %"
    reasons = {
        "overhead": f"a save costs the training {cost}, and {share} of its time may go there.",
        "write": f"a save is committed after {duration(measured.write_s)}, and none is to wait for another.",
        "failures": f"with a failure every {duration(limits.mttf_s or math.inf)} and {cost} lost to a save, this gets most "
        "work done.",
    }
    every = "each step" if interval.steps == 1 else f"every {interval.steps} steps"
    count = measured.saves
    saves = "of 1 save" if count == 1 else f"medians of the last {min(count, SAVES)} of {count} saves"
    text = (
        f"Save {every} ({duration(interval.seconds)}) [rule: {interval.rule}]: "
        f"{reasons.get(interval.rule, 'no rule asks for more.')} Measured, {saves}: training blocked for "
        f"{duration(measured.blocked_s)}, slowed by {duration(measured.lost_s)}, committed after "
        f"{duration(measured.write_s)}; steps of {duration(measured.step_s)}."
    )
    late = f" The last saves blocked far more than usual: the next one waits for {duration(pay_back_s)} of training."
    return text + late * (pay_back_s > interval.seconds)


def duration(seconds: float) -> str:
    """Return a time as plans say it: up to three minutes count in seconds."""
    return units.duration(seconds, at_least=3)
