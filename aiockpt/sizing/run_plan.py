"""The plan of a future run, from a few numbers: how often to save, what that costs, and what a failure loses."""

from __future__ import annotations

import msgspec

from aiockpt.errors import UsageError
from aiockpt.policies.cadence.intervals import duration, optimal_interval_s
from aiockpt.units import size, speed

COPY_BYTES_PER_S = 4 * 2.0**30
"""Of one rank: the speed of a copy in memory on a common host."""
DURABLE_S, PAUSE_S = 0.02, 0.001
"""Least times: what a save of hardly any bytes takes on a local disk, for its flushes, its walk and the call."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of the saves of a run.

    Attributes:
        step_bytes: of a step, of all ranks together.
        durable_s: until it is in the place, at *bytes_per_s* of all ranks together.
        pause_s: that training is held by an eager save.
        interval_s: from save to save: `optimal_interval_s`, but no shorter than *durable_s*.
        lost_s: of work, at a failure, on average.
        share: of the time that goes to saves and to work that is done again.
    """

    step_bytes: float
    ranks: int
    bytes_per_s: float
    mtbf_s: float
    durable_s: float
    pause_s: float
    interval_s: float
    lost_s: float
    share: float

    def __str__(self) -> str:
        each = f", {size(self.step_bytes / self.ranks)} of each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"a step            {size(self.step_bytes)}{each}\n"
            f"training is held  {duration(self.pause_s)} by an eager save, less by a lazy one\n"
            f"durable after     {duration(self.durable_s)}, at {speed(self.bytes_per_s)} of all ranks together\n"
            f"save every        {duration(self.interval_s)}\n"
            f"a failure loses   {duration(self.lost_s)} of work, one every {duration(self.mtbf_s)}\n"
            f"of the time       {self.share:.2%} goes to saves and to work that is done again"
        )


def plan_run(step_bytes: float, *, ranks: int, bytes_per_s: float, mtbf_s: float) -> RunPlan:
    """Return the plan of a run whose steps have *step_bytes*, and whose job fails every *mtbf_s*.

    Args:
        bytes_per_s: into the place, of all ranks together.

    Raises:
        UsageError: a number is not above 0.
    """
    given = {"step_bytes": step_bytes, "ranks": ranks, "bytes_per_s": bytes_per_s, "mtbf_s": mtbf_s}
    for name, value in given.items():
        if not value > 0:
            raise UsageError(f"{name}: {value!r}: give more than 0")
    durable_s = max(DURABLE_S, step_bytes / bytes_per_s)
    pause_s = max(PAUSE_S, step_bytes / ranks / COPY_BYTES_PER_S)
    interval_s = max(optimal_interval_s(pause_s, mtbf_s), durable_s)
    lost_s = interval_s / 2 + durable_s
    share = min(1.0, pause_s / (interval_s + pause_s) + lost_s / mtbf_s)
    return RunPlan(
        step_bytes=step_bytes,
        ranks=ranks,
        bytes_per_s=bytes_per_s,
        mtbf_s=mtbf_s,
        durable_s=durable_s,
        pause_s=pause_s,
        interval_s=interval_s,
        lost_s=lost_s,
        share=share,
    )
