"""How does a person hear why saves come as often as they do? In two or three sentences with figures."""

from __future__ import annotations

import math

from aiockpt.cadence.estimates import SAVES
from aiockpt.cadence.intervals import Interval, Limits, Measured


def describe(interval: Interval, seen: Measured, limits: Limits, overdrawn_s: float) -> str:
    """Say what the interval is, which rule makes it so, and what was *seen*.

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


def _reason(interval: Interval, seen: Measured, limits: Limits) -> str:
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


def _overdrawn(interval: Interval, seconds: float, limits: Limits) -> str:
    pay_back_s = seconds / limits.max_overhead
    if pay_back_s <= interval.seconds:
        return ""  # the interval is long enough
    return f" The last saves blocked far more than usual: the next one waits for {duration(pay_back_s)} of training."


def duration(seconds: float) -> str:
    """Return *seconds* in the unit that suits them, with three digits."""
    if seconds >= 3 * 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 180:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.3g} ms"
