"""Which rank is slower than its peers, in which stage, since when, and by how much?

A stage of one step is compared over the ranks: how many times as long as the median of all of them a rank took. A rank is a
straggler where the median of that, over the steps, is `FACTOR` or more, in `STEPS` steps at least, and what it adds is
`LEAST_S` or more: one outlier is nobody's property, and a small stage is of no matter. Waiting is what the others do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec

from aiockpt.events import Operation
from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan

FACTOR = 1.5
STEPS = 5
LEAST_S = 0.02
RANKS = 3
"""With fewer there is no median to be far from."""
_VICTIMS = {WHOLE, BLOCKS, "wait", "barrier", "pause", "exchange", "commit"}

_CAUSES = {
    "write": "slow storage or network",
    "flush": "slow disk",
    "read": "slow storage or network",
    "snapshot": "late snapshot: slow memory or device copies",
    "walk": "slow processor, or many small tensors",
    "plan": "slow processor",
    "match": "slow processor",
    "scatter": "slow processor or memory",
    "vote": "slow storage: small files take long",
    "begin": "slow storage: listing takes long",
    "find": "slow storage: listing takes long",
}


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slower than its peers.

    Attributes:
        factor: median over the steps of its seconds over the median of all ranks.
        extra_s: median over the steps of what it took longer.
        steps: how many were compared.
        since: the first step from which on it was slow more often than not.
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


def stragglers(found: Iterable[TimeSpan]) -> list[Straggler]:
    """Return the stragglers of a run, the slowest first."""
    taken: dict[tuple[Operation, str], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    hosts: dict[int, str] = {}
    for span in found:
        if span.stage in _VICTIMS or span.failed:
            continue
        hosts[span.rank] = span.host
        of_step = taken[span.operation, span.stage][span.step]
        of_step[span.rank] = of_step.get(span.rank, 0.0) + span.seconds  # several files: all of them
    slow = [one for (operation, stage), steps in taken.items() for one in _of_stage(operation, stage, steps, hosts)]
    return sorted(slow, key=lambda one: one.extra_s, reverse=True)


def _of_stage(
    operation: Operation, stage: str, steps: dict[int, dict[int, float]], hosts: dict[int, str]
) -> Iterable[Straggler]:
    compared = {step: ranks for step, ranks in sorted(steps.items()) if len(ranks) >= RANKS}
    for rank in sorted({rank for ranks in compared.values() for rank in ranks}):
        ratios: dict[int, float] = {}
        extra: list[float] = []
        for step, ranks in compared.items():
            if rank in ranks:
                usual = median(ranks.values())
                ratios[step] = ranks[rank] / usual if usual else 1.0
                extra.append(ranks[rank] - usual)
        if len(ratios) < STEPS or median(ratios.values()) < FACTOR or median(extra) < LEAST_S:
            continue
        yield Straggler(
            rank=rank,
            host=hosts[rank],
            operation=operation,
            stage=stage,
            factor=median(ratios.values()),
            extra_s=median(extra),
            steps=len(ratios),
            since=_since(ratios),
            cause=_CAUSES.get(stage, "unknown"),
        )


def _since(ratios: dict[int, float]) -> int:
    """Return the first step from which on the rank was slow in more than half of the steps."""
    steps = list(ratios)
    slow = [ratio >= FACTOR for ratio in ratios.values()]
    return next(step for at, step in enumerate(steps) if slow[at] and 2 * sum(slow[at:]) > len(slow) - at)
