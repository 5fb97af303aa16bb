"""Which rank is slower than its peers, in which stage, since when, by how much, and why?

A stage of one step is compared over the ranks: how many times as long as the median of all of them a rank took. It is slow
there where that is `FACTOR` or more. The steps from which on slow ones outnumber the others most are those since when it is
slow; it is a straggler where they do so by `STEPS` at least, the median of them is `FACTOR` or more, and what it adds is
`LEAST_S` or more: one outlier is nobody's property, and a small stage is of no matter. Waiting is what the others do. All
that a rank does itself is compared in the same way, with `FACTOR_OF_ALL`, for such sums vary less; what is found there
alone has the stage that adds most.

Why: a rank that is slow in what only its processor does, too, lacks processor time, whatever stage shows it most, where
that is `PART` at least of what it takes longer: some milliseconds more of hashing explain no half second of writing. Else
it is what the stage moves its bytes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from aiockpt.events import Operation
from aiockpt.monitor.spans import BLOCKS, WHOLE
from aiockpt.monitor.stage_times import HASH, StageKey, StageTimes

FACTOR = 1.5
FACTOR_OF_ALL = 1.2
STEPS = 5
LEAST_S = 0.02
PART = 0.05
RANKS = 3
"""With fewer there is no median to be far from."""
_VICTIMS = {WHOLE, BLOCKS, "wait", "barrier", "pause", "exchange", "commit"}
_PROCESSOR = ("walk", "plan", "match", "scatter", "snapshot", HASH)
"""Stages in which nothing is waited for."""
_OWN: dict[Operation, tuple[str, ...]] = {
    "save": ("walk", "plan", "snapshot", "write", "vote"),
    "load": ("find", "match", "plan", "read", "scatter"),
}
"""What a rank does itself, none a part of another."""
STARVED = "too little processor time, or slow memory"
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
    slow = [
        one
        for key in times.stages()
        if key[1] not in _VICTIMS
        for one in _compare(key, times.steps(key, RANKS), FACTOR, times)
    ]
    known = {(one.rank, one.operation) for one in slow}
    for operation, stages in _OWN.items():
        together = times.together([(operation, stage) for stage in stages], RANKS)
        found = _compare((operation, ""), together, FACTOR_OF_ALL, times)
        slow += [_with_stage(one, stages, times) for one in found if (one.rank, operation) not in known]
    return sorted(slow, key=lambda one: one.extra_s, reverse=True)


def _compare(
    key: StageKey, compared: Mapping[int, Mapping[int, float]], least: float, times: StageTimes
) -> Iterable[Straggler]:
    """Yield the ranks that are slow by a factor of *least* in what step → rank → seconds says."""
    usual = {step: median(ranks.values()) for step, ranks in compared.items()}
    for rank in sorted({rank for ranks in compared.values() for rank in ranks}):
        ratios = {
            step: ranks[rank] / usual[step] if usual[step] else 1.0 for step, ranks in compared.items() if rank in ranks
        }
        steps_here = list(ratios)
        slow = [steps_here[at] for at in slow_steps(list(ratios.values()), least)]
        if not slow:
            continue
        factor = median(ratios[step] for step in slow)
        extra_s = median(compared[step][rank] - usual[step] for step in slow)
        if factor < least or extra_s < LEAST_S:
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
            cause=_cause(key, rank, slow, extra_s, times),
        )


def _with_stage(found: Straggler, stages: Iterable[str], times: StageTimes) -> Straggler:
    """Return who is slow in all that it does, with the stage that adds most to that."""

    def extra_s(stage: str) -> float:
        steps = times.steps((found.operation, stage), RANKS)
        since = [ranks for step, ranks in steps.items() if step >= found.since and found.rank in ranks]
        return sum(ranks[found.rank] - median(ranks.values()) for ranks in since)

    stage = max(stages, key=extra_s)
    starved = found.cause == STARVED
    cause = STARVED if starved or stage in _PROCESSOR else _storage(times)
    return msgspec.structs.replace(found, stage=stage, cause=cause)


def _cause(key: StageKey, rank: int, slow: Sequence[int], extra_s: float, times: StageTimes) -> str:
    """Return what is likely the cause of *rank* being slow in a stage, by *extra_s* in each of the steps *slow*."""
    operation, stage = key
    if stage in _PROCESSOR or _lacks_processor(operation, rank, slow, extra_s, times):
        return STARVED
    return _storage(times) if stage in _STORAGE else "unknown"


def _storage(times: StageTimes) -> str:
    return "slow network, or its way to the store" if times.remote else "slow disk, or file system"


def _lacks_processor(operation: Operation, rank: int, slow: Sequence[int], extra_s: float, times: StageTimes) -> bool:
    """Say whether a rank is slow, over the steps *slow*, in what only its processor does, and by how much matters.

    In sum, for a processor that is taken away comes and goes; but without the worst step, which may be a hiccup.
    """
    alone = times.together([(operation, one) for one in _PROCESSOR], RANKS)
    pairs = [(alone[step][rank], median(alone[step].values())) for step in slow if rank in alone.get(step, {})]
    kept = sorted(pairs)[:-1]
    own, usual = (sum(column) for column in zip(*kept, strict=True)) if kept else (0.0, 0.0)
    return own > FACTOR_OF_ALL * usual and own - usual >= PART * extra_s * len(kept)


def slow_steps(ratios: Sequence[float], least: float = FACTOR) -> range:
    """Return which of the steps, up to the last, slow ones outnumber the others in most; none where by less than `STEPS`."""
    lead = most = 0
    first = len(ratios)
    for at in reversed(range(len(ratios))):
        lead += 1 if ratios[at] >= least else -1
        if lead > most:
            most, first = lead, at
    return range(first if most >= STEPS else len(ratios), len(ratios))
