"""Which rank is slower than its peers, in which stage, since when, and by how much?

A stage of one step is compared over the ranks: how many times as long as the median of all of them a rank took. It is slow
there where that is `FACTOR` or more. The steps from which on slow ones outnumber the others most are those since when it is
slow; it is a straggler where they do so by `STEPS` at least, the median of them is `FACTOR` or more, and what it adds is
`LEAST_S` or more: one outlier is nobody's property, and a small stage is of no matter. Waiting is what the others do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
            host=hosts[rank],
            operation=operation,
            stage=stage,
            factor=factor,
            extra_s=extra_s,
            steps=len(slow),
            since=slow[0],
            cause=_CAUSES.get(stage, "unknown"),
        )


def slow_steps(ratios: Sequence[float]) -> range:
    """Return which of the steps, up to the last, slow ones outnumber the others in most; none where by less than `STEPS`."""
    lead = most = 0
    first = len(ratios)
    for at in reversed(range(len(ratios))):
        lead += 1 if ratios[at] >= FACTOR else -1
        if lead > most:
            most, first = lead, at
    return range(first if most >= STEPS else len(ratios), len(ratios))
