"""The rules for the interval between saves: from measurements to an interval and its reason.

The interval is the smallest that no rule forbids, or a longer one that loses less. Guarantees of `choose`:

- *overhead*: what saves cost the training is at most ``max_overhead`` of the interval (CheckFreq, FAST'21).
- *write*: the interval is at least the write time ÷ saves in flight, or saves would queue up (PCcheck, ASPLOS'25).
- *failures*: with a mean time to failure, no save is made that costs more than the work it is expected to rescue
  (`optimal_interval_s`).
- *step*: it is one step where no rule above asks for more.

It never falls when a cost or the mean time to failure rises. Hysteresis: an interval that is still good stays (`choose`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from aiockpt import units
from aiockpt.options import refuse_value

Rule = Literal["first", "step", "overhead", "write", "failures", "time"]
"""The rule that determines the interval; "first": nothing is measured yet; "time": it was requested."""

BAND = 1.5
"""An interval stays while it is not longer than needed by more than this factor (nor, of optimal ones, shorter)."""

MARGIN = 1.1
"""A new interval is so much longer than the shortest allowed, or the noise of the next measurement would move it again."""

SAVES = 5
"""Measurements of saves that are remembered: a change is followed after three."""

MOST_STEPS = 1 << 62
SHORTEST_STEP_S = 1e-9
"""The least length of a step: a clock that stands still measures 0, which must divide nothing."""


class IntervalLimits(msgspec.Struct, frozen=True):
    """The limits of an interval.

    Attributes:
        max_overhead: the most that saves may cost, as a fraction of the training time.
        mttf_s: mean seconds between failures of the whole job; None where that is unknown.
        in_flight: saves that may run at once.
    """

    max_overhead: float
    mttf_s: float | None
    in_flight: int


class Measured(msgspec.Struct, frozen=True):
    """What saves and steps took lately: medians, seconds; 0 where nothing was measured.

    Attributes:
        saves: saves measured so far, those that failed too.
        blocked_s: the training stood still, per save: in the call of ``save``, and at the barrier before the optimizer.
        lost_s: steps were slowed by the writing, in addition, per save, beyond the noise of steps.
        write_s: from the call of a save until it was committed.
        storage_s: per save, that the storage sustains when as many run as may; 0 until some ran beside others.
        step_s: one step, without the time blocked.
    """

    saves: int = 0
    blocked_s: float = 0.0
    lost_s: float = 0.0
    write_s: float = 0.0
    storage_s: float = 0.0
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

    With exponential failures of mean M, saves that cost C and are durable W after the call, recovery R and a save after
    each T of training, the k-th save survives with probability exp(-(k(T + C) - C + W)/M). The share of time that
    becomes lasting work is therefore ``T exp(-(W - C)/M) / ((M + R)(exp((T + C)/M) - 1))``: neither W nor R moves its
    maximum, which is where ``T/M = 1 - exp(-(T + C)/M)``. That is the optimum of Daly's complete model (J. T. Daly,
    FGCS 22, 2006; in closed form, by Lambert's W, in Bougeret et al., "Checkpointing strategies for parallel jobs", SC'11).
    For C much smaller than M it is Young's ``sqrt(2 C M)`` (CACM 17, 1974), and within C of Saxena et al.'s
    availability-optimal ``C + sqrt(2(M + R)C + C²)``, which is counted from save to save (arXiv:2410.18124). It never
    exceeds M.

    Args:
        cost_s: what a save costs the training, not what it takes to write; 0 or more.
        mttf_s: more than 0.
    """
    cost = cost_s / mttf_s
    if cost <= 0:
        return 0.0
    interval = min(1.0, math.sqrt(2 * cost))  # Young's; from there Newton's method comes down, the function is convex
    for _ in range(60):
        slope = -math.expm1(-(interval + cost))
        step = (interval - slope) / slope
        interval -= step
        if abs(step) <= 1e-12 * interval:
            break
    return interval * mttf_s


def choose(measured: Measured, limits: IntervalLimits, current: Interval | None = None) -> Interval:
    """Return the interval for what was *measured*: the *current* one while it is still good.

    One that a rule forbids is raised at once. One that is longer than needed is shortened only beyond `BAND`, so that
    noise moves it rarely, and never to and fro.
    """
    step_s = max(measured.step_s, SHORTEST_STEP_S)
    floors_s: dict[Rule, float] = {
        "overhead": measured.cost_s / limits.max_overhead,
        "write": max(measured.write_s / limits.in_flight, measured.storage_s),
    }
    floor = max(floors_s.values()) / step_s
    optimum = 0.0 if limits.mttf_s is None else optimal_interval_s(measured.cost_s, limits.mttf_s) / step_s
    steps = max(_whole(floor * MARGIN), min(round(optimum), MOST_STEPS), 1)
    if current is not None and current.rule != "first":
        shortest = max(_whole(floor), math.floor(min(optimum, MOST_STEPS) / BAND), 1)
        longest = max(_whole(max(floor, optimum) * BAND), 1)
        steps = current.steps if shortest <= current.steps <= longest else steps
    rule: Rule = "step"
    if optimum >= max(floor, 1):
        rule = "failures"
    elif steps > 1:
        rule = max(floors_s, key=lambda name: floors_s[name])
    return Interval(rule, steps, steps * step_s)


def _whole(steps: float) -> int:
    return math.ceil(min(steps, MOST_STEPS))


# ---------------------------------------------------------------------- in words


def describe(interval: Interval, seen: Measured, limits: IntervalLimits, overdrawn_s: float) -> str:
    """Describe the interval, the rule that determines it, and what was *seen*.

    Args:
        overdrawn_s: what must be paid back before the next save; 0 or less where nothing is.
    """
    if interval.rule == "first":
        return (
            f"First saves [rule: first]: nothing is measured yet; one comes after {interval.steps} steps, and the next "
            "when it is known what that cost."
        )
    every = "each step" if interval.steps == 1 else f"every {interval.steps} steps"
    head = f"Save {every} ({duration(interval.seconds)}) [rule: {interval.rule}]:"
    return f"{head} {_reason(interval, seen, limits)} {_measured(seen)}{_overdrawn(interval, overdrawn_s, limits)}"


def _reason(interval: Interval, seen: Measured, limits: IntervalLimits) -> str:
    match interval.rule:
        case "overhead":
            share = f"{100 * limits.max_overhead:.3g} %"
            return f"a save costs the training {duration(seen.cost_s)}, and {share} of its time may go there."
        case "write":
            storage_s = max(seen.storage_s, seen.write_s / limits.in_flight)
            return (
                f"a save is committed after {duration(seen.write_s)}, {limits.in_flight} may be in flight, and the storage "
                f"takes one in {duration(storage_s)}."
            )
        case "failures":
            mttf, cost = duration(limits.mttf_s or math.inf), duration(seen.cost_s)
            return f"with a failure every {mttf} and {cost} lost to a save, this gets most work done."
        case _:
            return "no rule asks for more."


def _measured(seen: Measured) -> str:
    saves = "of 1 save" if seen.saves == 1 else f"medians of the last {min(seen.saves, SAVES)} of {seen.saves} saves"
    return (
        f"Measured, {saves}: training blocked for {duration(seen.blocked_s)}, slowed by {duration(seen.lost_s)}, "
        f"committed after {duration(seen.write_s)}; steps of {duration(seen.step_s)}."
    )


def _overdrawn(interval: Interval, seconds: float, limits: IntervalLimits) -> str:
    pay_back_s = seconds / limits.max_overhead
    if pay_back_s <= interval.seconds:
        return ""  # the interval is long enough
    return f" The last saves blocked far more than usual: the next one waits for {duration(pay_back_s)} of training."


def duration(seconds: float) -> str:
    """Return a time as plans say it: up to three minutes count in seconds."""
    return units.duration(seconds, at_least=3)


def parse_duration_s(given: str) -> float:
    """Return the seconds of ``"90s"``, ``"30min"`` or ``"1.5h"``.

    Raises:
        UsageError: it is no time of more than 0.
    """
    seconds = units.parse_seconds(given)
    if seconds <= 0:
        refuse_value("", "every", given, "a time such as '90s', '30min' or '2h', a number of steps, or a Cadence")
    return seconds
