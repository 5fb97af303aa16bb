"""Stragglers: ranks that are slower than their peers; in which stage, since when, by how much, and why.

A stage of one step is compared over the ranks: how many times as long as the median of all of them a rank took. It is slow
there where that is `FACTOR` or more. The steps from which on slow ones outnumber the others most are those since when it is
slow; it is a straggler where they do so by `STEPS` at least, the median of them is `FACTOR` or more, and what it adds is
`LEAST_S` or more: one outlier proves nothing, and a small stage does not matter. Where the other ranks are often slow in
that stage, too, as on a machine with more ranks than cores, it takes more steps than `STEPS`: so many that a rank like
them would come to it by chance in `CHANCE` of all runs. And what it takes longer there must show in all that it does
itself: a rank that makes up for it in other stages delays no other rank. Waiting is what the others do. All that a rank
does itself is compared in the same way, with `FACTOR_OF_ALL`, for such sums vary less; what is found there alone has the
stage that adds most.

Why: a rank that is slow in what only its processor does, too, lacks processor time, whatever stage shows it most, where
that is `PART` at least of what it takes longer: some milliseconds more of hashing explain no half second of writing. Else
it is what the stage moves its bytes to.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
CHANCE = 1e-3
MOST_OFTEN = 0.45
"""A rank that is slow more often has no peers."""
STAGES = 10
"""That are compared, about: each on each rank is a chance of its own."""
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
_PARTS = ("flush", HASH)
"""Of these."""
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
    own: dict[Operation, dict[int, dict[int, float]]] = {
        operation: times.together([(operation, stage) for stage in stages], RANKS) for operation, stages in _OWN.items()
    }
    slow = [
        one
        for key in times.stages()
        if key[1] not in _VICTIMS
        for one in _compare(key, times.steps(key, RANKS), FACTOR, times)
        if not _made_up_for(one, own)
    ]
    known = {(one.rank, one.operation) for one in slow}
    for operation, stages in _OWN.items():
        found = _compare((operation, ""), own[operation], FACTOR_OF_ALL, times)
        slow += [_with_stage(one, stages, times) for one in found if (one.rank, operation) not in known]
    return sorted(slow, key=lambda one: one.extra_s, reverse=True)


def _compare(
    key: StageKey, compared: Mapping[int, Mapping[int, float]], least: float, times: StageTimes
) -> Iterable[Straggler]:
    """Yield the ranks that are slow by a factor of *least*, from step → rank → seconds."""
    usual = {step: median(ranks.values()) for step, ranks in compared.items()}
    by_rank: dict[int, dict[int, float]] = defaultdict(dict)
    for step, ranks in compared.items():
        for rank, took_s in ranks.items():
            by_rank[rank][step] = took_s / usual[step] if usual[step] else 1.0
    often = {rank: sum(ratio >= least for ratio in ratios.values()) for rank, ratios in by_rank.items()}
    all_often, all_steps = sum(often.values()), sum(map(len, by_rank.values()))
    for rank, ratios in sorted(by_rank.items()):
        steps_here = list(ratios)
        lead = least_lead(all_often - often[rank], all_steps - len(ratios), len(by_rank))
        slow = [steps_here[at] for at in slow_steps(list(ratios.values()), least, lead)]
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


def _made_up_for(found: Straggler, own: Mapping[Operation, Mapping[int, Mapping[int, float]]]) -> bool:
    """Return whether a rank that is slow in a stage is not, by half of that at least, in all that it does itself."""
    if found.stage not in _OWN.get(found.operation, ()) and found.stage not in _PARTS:
        return False
    extra = [
        ranks[found.rank] - median(ranks.values())
        for step, ranks in own[found.operation].items()
        if step >= found.since and found.rank in ranks
    ]
    return bool(extra) and median(extra) < found.extra_s / 2


def _with_stage(found: Straggler, stages: Iterable[str], times: StageTimes) -> Straggler:
    """Return a rank that is slow in all that it does, with the stage that adds most to that."""

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
    """Return whether a rank is slow, over the steps *slow*, in what only its processor does, and by how much matters.

    In sum, for a lack of processor time comes and goes; but without the worst step, which may be a hiccup.
    """
    alone = times.together([(operation, one) for one in _PROCESSOR], RANKS)
    pairs = [(alone[step][rank], median(alone[step].values())) for step in slow if rank in alone.get(step, {})]
    kept = sorted(pairs)[:-1]
    own, usual = (sum(column) for column in zip(*kept, strict=True)) if kept else (0.0, 0.0)
    return own > FACTOR_OF_ALL * usual and own - usual >= PART * extra_s * len(kept)


def least_lead(slow: int, steps: int, ranks: int) -> int:
    """Return by how many steps slow ones must outnumber the others on a rank, whose peers are *slow* in so many of *steps*.

    The excess of slow steps over others is a random walk that goes up with the probability *q*; it ever gets as high as *n*
    with the probability (q / (1 - q))ⁿ.
    """
    q = (slow + 1) / (steps + 2)
    if q >= MOST_OFTEN:
        return steps + 1
    return max(STEPS, math.ceil(math.log(CHANCE / (ranks * STAGES)) / math.log(q / (1 - q))))


def slow_steps(ratios: Sequence[float], least: float = FACTOR, lead_least: int = STEPS) -> range:
    """Return which of the steps, up to the last, slow ones outnumber the others in most; none where by less than that."""
    lead = most = 0
    first = len(ratios)
    for at in reversed(range(len(ratios))):
        lead += 1 if ratios[at] >= least else -1
        if lead > most:
            most, first = lead, at
    return range(first if most >= lead_least else len(ratios), len(ratios))
