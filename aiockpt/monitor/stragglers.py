"""Which rank is slower than its peers, in which stage, since when, by how much, and why?

A stage of one step is compared over the ranks: how many times as long as the median of all of them a rank took. It is slow
there where that is `FACTOR` or more. The steps from which on slow ones outnumber the others most are those since when it is
slow; it is a straggler where they do so by `STEPS` at least, the median of them is `FACTOR` or more, and what it adds is
`LEAST_S` or more: one outlier is nobody's property, and a small stage is of no matter. Waiting is what the others do.

Why: a rank that is as slow in what only its processor does lacks processor time, whatever stage shows it most; else it is
what the stage moves its bytes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from aiockpt.events import Operation
from aiockpt.monitor.spans import BLOCKS, WHOLE
from aiockpt.monitor.stage_times import HASH, StageKey, StageTimes

FACTOR = 1.5
STEPS = 5
LEAST_S = 0.02
RANKS = 3
"""With fewer there is no median to be far from."""
_VICTIMS = {WHOLE, BLOCKS, "wait", "barrier", "pause", "exchange", "commit"}
_PROCESSOR = ("walk", "plan", "match", "scatter", "snapshot", HASH)
"""Stages in which nothing is waited for."""
_STORAGE = ("write", "flush", "read", "vote", "begin", "find")


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slower than its peers.

    Attributes:
        factor: median, over the steps since then, of its seconds over the median of all ranks.
        extra_s: median over these steps of what it took longer.
        steps: how many these are.
        since: the step from which on slow ones outnumber the others most.
        cause: what is likely.
    """

    rank: int
    host: str
    operation: Operation
    stage: str
    factor: float
    extra_s: float
    steps: int
    since: int
    cause: str


def stragglers(times: StageTimes) -> list[Straggler]:
    """Return the stragglers of a run, the slowest first."""
    slow = [one for key in times.stages() if key[1] not in _VICTIMS for one in _of_stage(key, times)]
    return sorted(slow, key=lambda one: one.extra_s, reverse=True)


def _of_stage(key: StageKey, times: StageTimes) -> Iterable[Straggler]:
    compared = times.steps(key, RANKS)
    usual = {step: median(ranks.values()) for step, ranks in compared.items()}
    for rank in sorted({rank for ranks in compared.values() for rank in ranks}):
        ratios = {
            step: ranks[rank] / usual[step] if usual[step] else 1.0 for step, ranks in compared.items() if rank in ranks
        }
        steps_here = list(ratios)
        slow = [steps_here[at] for at in slow_steps(list(ratios.values()))]
        if not slow:
            continue
        factor = median(ratios[step] for step in slow)
        extra_s = median(compared[step][rank] - usual[step] for step in slow)
        if factor < FACTOR or extra_s < LEAST_S:
            continue
        yield Straggler(
            rank=rank,
            host=times.hosts.get(rank, ""),
            operation=key[0],
            stage=key[1],
            factor=factor,
            extra_s=extra_s,
            steps=len(slow),
            since=slow[0],
            cause=_cause(key, rank, slow, times),
        )


def _cause(key: StageKey, rank: int, slow: Sequence[int], times: StageTimes) -> str:
    """Return what is likely the cause of *rank* being slow in a stage of the steps *slow*."""
    operation, stage = key
    alone: list[StageKey] = [(operation, one) for one in _PROCESSOR]
    if stage in _PROCESSOR or median(times.together(alone, rank, step) for step in slow) >= FACTOR:
        return "too little processor time, or slow memory"
    if stage in _STORAGE:
        return "slow network, or its way to the store" if times.remote else "slow disk, or file system"
    return "unknown"


def slow_steps(ratios: Sequence[float]) -> range:
    """Return which of the steps, up to the last, slow ones outnumber the others in most; none where by less than `STEPS`."""
    lead = most = 0
    first = len(ratios)
    for at in reversed(range(len(ratios))):
        lead += 1 if ratios[at] >= FACTOR else -1
        if lead > most:
            most, first = lead, at
    return range(first if most >= STEPS else len(ratios), len(ratios))
