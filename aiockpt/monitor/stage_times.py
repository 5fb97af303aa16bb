"""Seconds of each stage of each step on each rank: what ranks are compared by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from aiockpt.events import Operation
from aiockpt.monitor.run_log import RunLog
from aiockpt.monitor.spans import TimeSpan

HASH = "hash"
"""A part of "write" and of "read": what worker threads hashed."""
StageKey = tuple[Operation, str]


class StageTimes:
    """Seconds by stage, step and rank. Several files of a step count together; what failed is no time of a stage.

    Attributes:
        hosts: of the ranks.
        remote: whether the place that is saved to is reached through a network.
    """

    def __init__(self, *, remote: bool = False) -> None:
        self.remote = remote
        self.hosts: dict[int, str] = {}
        self._taken: dict[StageKey, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, rank: int, key: StageKey, step: int, seconds: float) -> None:
        """Add what a stage of *step* took on *rank*."""
        ranks = self._taken[key][step]
        ranks[rank] = ranks.get(rank, 0.0) + seconds

    def stages(self) -> list[StageKey]:
        """Return the stages that there are."""
        return list(self._taken)

    def steps(self, key: StageKey, least_ranks: int) -> dict[int, dict[int, float]]:
        """Return step → rank → seconds, in the order of steps, of those that *least_ranks* report."""
        return {step: ranks for step, ranks in sorted(self._taken[key].items()) if len(ranks) >= least_ranks}

    def together(self, keys: Iterable[StageKey], least_ranks: int) -> dict[int, dict[int, float]]:
        """Return the same of several stages in sum."""
        sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for key in keys:
            for step, ranks in self._taken[key].items() if key in self._taken else ():
                for rank, seconds in ranks.items():
                    sums[step][rank] += seconds
        return {step: ranks for step, ranks in sorted(sums.items()) if len(ranks) >= least_ranks}


def stage_times(run: RunLog, found: Iterable[TimeSpan]) -> StageTimes:
    """Return the times of *run*, of which *found* are the spans."""
    urls = run.processes[-1].opened.urls if run.processes else ()
    times = StageTimes(remote=is_remote(urls))
    for span in found:
        if not span.failed:
            times.hosts[span.rank] = span.host
            times.add(span.rank, (span.operation, span.stage), span.step, span.seconds)
            if span.hash_s:
                times.add(span.rank, (span.operation, HASH), span.step, span.hash_s)
    return times


def is_remote(urls: Iterable[str]) -> bool:
    """Return whether the first of the places of a checkpointer is reached through a network, as far as its URL shows."""
    first = next(iter(urls), "")
    return not first.startswith(("file:", "shm:", "memory:"))
