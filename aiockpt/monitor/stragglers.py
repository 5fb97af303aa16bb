"""Stragglers: ranks that are slower than their peers; in which stage, since when, by how much, and why.

For each stage of a step, a rank's time is divided by the median over all ranks; the rank is slow there where that ratio is
`FACTOR` or more. Its slow period begins with the step from which on slow steps outnumber the others most. It is a straggler
where that lead is at least `STEPS`, the median ratio of the period is `FACTOR` or more, and the median extra time is
`LEAST_S` or more: one outlier proves nothing, and a small stage does not matter. Where other ranks are often slow in that
stage too, as on a machine with more ranks than cores, the lead must exceed `STEPS`: a rank like them reaches the required
lead by chance in `CHANCE` of all runs. The extra time must also show in the sum of all that the rank does itself: a rank
that makes up for it in other stages delays no other rank. Waiting does not count, since the other ranks wait. That sum is
compared in the same way, with `FACTOR_OF_ALL`, because sums vary less; a rank found there alone is reported with the stage
that adds most.

Cause: a rank lacks processor time, whatever stage shows it most, if it is also slow in work that only its processor does
and that work makes up at least `PART` of the extra time: some milliseconds more of hashing explain no half second of
writing. Otherwise the cause is what the stage moves its bytes to.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import anyio.to_thread
import msgspec

from aiockpt.events import Event, Opened, Operation, SnapshotTaken, StageEnded, StragglerFound
from aiockpt.format.document import described
from aiockpt.monitor.run_log import RunLog
from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan
from aiockpt.monitor.trace import FOLDER
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import get_many

HASH = "hash"
"""A part of "write" and of "read": what worker threads hashed."""
StageKey = tuple[Operation, str]
Steps = Mapping[int, Mapping[int, float]]
"""Step → rank → seconds."""


class StageTimes:
    """Seconds by stage, step and rank. Several files of a step are summed; failed stages are not counted.

    Attributes:
        hosts: of the ranks.
        remote: whether the place that is saved to is reached through a network.
    """

    def __init__(self, *, remote: bool = False) -> None:
        self.remote = remote
        self.hosts: dict[int, str] = {}
        self._taken: dict[StageKey, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, rank: int, key: StageKey, step: int, seconds: float) -> None:
        ranks = self._taken[key][step]
        ranks[rank] = ranks.get(rank, 0.0) + seconds

    def stages(self) -> list[StageKey]:
        return list(self._taken)

    def together(self, operation: Operation, stages: Iterable[str]) -> Steps:
        """Return the sums of *stages*, in the order of steps, for steps that at least `RANKS` ranks report."""
        sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for stage in stages:
            for step, ranks in self._taken.get((operation, stage), {}).items():
                for rank, seconds in ranks.items():
                    sums[step][rank] += seconds
        return {step: ranks for step, ranks in sorted(sums.items()) if len(ranks) >= RANKS}


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
    """Return whether a checkpointer's first place is reached through a network, as far as its URL shows."""
    first = next(iter(urls), "")
    return not first.startswith(("file:", "shm:", "memory:"))


FACTOR = 1.5
FACTOR_OF_ALL = 1.2
STEPS = 5
LEAST_S = 0.02
PART = 0.05
CHANCE = 1e-3
MOST_OFTEN = 0.45
"""Fraction of slow steps above which a rank has no peers."""
STAGES = 10
"""Stages that are compared, about: each stage of each rank is a separate chance of a false finding."""
RANKS = 3
"""Least ranks that are compared: fewer have no meaningful median."""
_VICTIMS = {WHOLE, BLOCKS, "wait", "barrier", "pause", "exchange", "commit"}
_PROCESSOR = ("walk", "plan", "match", "scatter", "snapshot", HASH)
"""Stages without waiting."""
_OWN: dict[Operation, tuple[str, ...]] = {
    "save": ("walk", "plan", "snapshot", "write", "vote"),
    "load": ("find", "match", "plan", "read", "scatter"),
}
"""The work of a rank itself; the stages do not overlap."""
_PARTS = ("flush", HASH)
"""Parts of those stages."""
STARVED = "too little processor time, or slow memory"
_STORAGE = ("write", "flush", "read", "vote", "begin", "find")


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slower than its peers.

    Attributes:
        factor: median, over the steps since then, of its seconds over the median of all ranks.
        extra_s: median over these steps of the extra seconds.
        steps: how many these are.
        since: the step from which on slow ones outnumber the others most.
        cause: the likely one.
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
    own: dict[Operation, Steps] = {operation: times.together(operation, stages) for operation, stages in _OWN.items()}
    slow = [
        straggler
        for key in times.stages()
        if key[1] not in _VICTIMS
        for straggler in _compare(key, times.together(key[0], key[1:]), FACTOR, times)
        if not _made_up_for(straggler, own)
    ]
    known = {(straggler.rank, straggler.operation) for straggler in slow}
    for operation, stages in _OWN.items():
        found = _compare((operation, ""), own[operation], FACTOR_OF_ALL, times)
        slow += [_with_stage(slower, stages, times) for slower in found if (slower.rank, operation) not in known]
    return sorted(slow, key=lambda straggler: straggler.extra_s, reverse=True)


def _compare(key: StageKey, compared: Steps, least: float, times: StageTimes) -> Iterable[Straggler]:
    """Yield the ranks that are slow by a factor of *least*."""
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


def _extra_s(steps: Steps, found: Straggler) -> list[float]:
    """Return a rank's extra seconds over the median of all ranks, for each step since it is slow."""
    since = [ranks for step, ranks in steps.items() if step >= found.since and found.rank in ranks]
    return [ranks[found.rank] - median(ranks.values()) for ranks in since]


def _made_up_for(found: Straggler, own: Mapping[Operation, Steps]) -> bool:
    """Return whether a rank regains at least half of a stage's extra time in the rest of its own work."""
    if found.stage not in _OWN.get(found.operation, ()) and found.stage not in _PARTS:
        return False
    extra = _extra_s(own[found.operation], found)
    return bool(extra) and median(extra) < found.extra_s / 2


def _with_stage(found: Straggler, stages: Iterable[str], times: StageTimes) -> Straggler:
    """Return a rank that is slow in the sum of its own work, with the stage that adds most to it."""
    stage = max(stages, key=lambda name: sum(_extra_s(times.together(found.operation, [name]), found)))
    starved = found.cause == STARVED
    cause = STARVED if starved or stage in _PROCESSOR else _storage(times)
    return msgspec.structs.replace(found, stage=stage, cause=cause)


def _cause(key: StageKey, rank: int, slow: Sequence[int], extra_s: float, times: StageTimes) -> str:
    """Return the likely cause of *rank* being slow in a stage, by *extra_s* in each of the steps *slow*."""
    operation, stage = key
    if stage in _PROCESSOR or _lacks_processor(operation, rank, slow, extra_s, times):
        return STARVED
    return _storage(times) if stage in _STORAGE else "unknown"


def _storage(times: StageTimes) -> str:
    return "slow network, or its way to the store" if times.remote else "slow disk, or file system"


def _lacks_processor(operation: Operation, rank: int, slow: Sequence[int], extra_s: float, times: StageTimes) -> bool:
    """Return whether a rank is slow, over the steps *slow*, in processor work, by a relevant part of *extra_s*.

    Steps are summed because a lack of processor time comes and goes; the worst step, which may be a hiccup, is left out.
    """
    alone = times.together(operation, _PROCESSOR)
    pairs = [(alone[step][rank], median(alone[step].values())) for step in slow if rank in alone.get(step, {})]
    kept = sorted(pairs)[:-1]
    own, usual = (sum(column) for column in zip(*kept, strict=True)) if kept else (0.0, 0.0)
    return own > FACTOR_OF_ALL * usual and own - usual >= PART * extra_s * len(kept)


def least_lead(slow: int, steps: int, ranks: int) -> int:
    """Return the required lead of slow steps over others on a rank whose peers are *slow* in so many of *steps*.

    The excess of slow steps over others is a random walk that goes up with the probability *q*; it ever gets as high as *n*
    with the probability (q / (1 - q))ⁿ.
    """
    q = (slow + 1) / (steps + 2)
    if q >= MOST_OFTEN:
        return steps + 1
    return max(STEPS, math.ceil(math.log(CHANCE / (ranks * STAGES)) / math.log(q / (1 - q))))


def slow_steps(ratios: Sequence[float], least: float = FACTOR, lead_least: int = STEPS) -> range:
    """Return the last steps in which slow ones outnumber the others most; an empty range where by less than that."""
    lead = most = 0
    first = len(ratios)
    for at in reversed(range(len(ratios))):
        lead += 1 if ratios[at] >= least else -1
        if lead > most:
            most, first = lead, at
    return range(first if most >= lead_least else len(ratios), len(ratios))


# Comparison while the job runs: each rank publishes its last stage times in a small object beside the run; rank 0
# compares. A straggler is reported once, and again after it had recovered.


logger = logging.getLogger("aiockpt")

BEGINS = "times-"
KEPT_STEPS = 24
"""Steps that a rank publishes: enough for a median, and a small object."""
MAX_BYTES = 1 << 20


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the last steps took on one rank: rows of operation, stage, step and seconds."""

    rank: int
    host: str
    time_s: float
    rows: list[tuple[Operation, str, int, float]]


class PeerTimes:
    """The times that this rank publishes, and, on rank 0, the comparison of all. On the loop thread.

    Attributes:
        slow: the stragglers that were found by the last comparison.
    """

    def __init__(self) -> None:
        self.slow: list[Straggler] = []
        self._steps: dict[int, dict[StageKey, float]] = {}
        self._news = False

    def receive(self, event: Event) -> None:
        """Record the time of a stage."""
        match event:
            case StageEnded(failed=False):
                self._add(event, (event.operation, event.stage), event.seconds)
                self._add(event, (event.operation, HASH), event.hash_s)
            case SnapshotTaken():
                self._add(event, ("save", "snapshot"), event.copy_s)

    def _add(self, event: Event, key: StageKey, seconds: float) -> None:
        if seconds:
            taken = self._steps.setdefault(event.step, defaultdict(float))
            taken[key] += seconds
            self._news = True
            while len(self._steps) > KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))

    async def publish(self, backend: Backend, opened: Opened) -> None:
        """Write the times of this rank, where they are new."""
        if self._news:
            # Before the put: an event that comes during it is news for the next beat.
            self._news = False
            rows = [(*key, step, seconds) for step, taken in self._steps.items() for key, seconds in taken.items()]
            times = RankTimes(rank=opened.rank, host=opened.host, time_s=time.time(), rows=rows)
            await backend.put(f"{FOLDER}/{BEGINS}{opened.rank:05}.json", msgspec.json.encode(times))

    async def compare(self, backend: Backend, opened: Opened) -> list[Straggler]:
        """Read the times of all ranks; return, and log, the ranks that are slow now and were not at the last comparison."""
        listing = await backend.list(FOLDER)
        times = StageTimes(remote=is_remote(opened.urls))
        keys = [stat.key for stat in listing.objects if stat.key.startswith(f"{FOLDER}/{BEGINS}")]
        for data in await get_many(backend, keys, MAX_BYTES):
            if data is not None:  # else gone meanwhile
                _add_times(times, data, opened)
        known = {(straggler.rank, straggler.operation) for straggler in self.slow}
        self.slow = await anyio.to_thread.run_sync(stragglers, times)  # 0.1 s for a thousand ranks
        new = [straggler for straggler in self.slow if (straggler.rank, straggler.operation) not in known]
        for straggler in new:
            logger.warning("%s", explain(straggler))
        return new


def _add_times(times: StageTimes, data: bytes, opened: Opened) -> None:
    """Add the times of one rank, unless they are of an earlier start, or of another version."""
    try:
        found = msgspec.json.decode(data, type=described(RankTimes))
    except msgspec.MsgspecError:
        return
    if found.rank < opened.world_size and found.time_s * 1e9 >= opened.time_ns:
        times.hosts[found.rank] = found.host
        for operation, stage, step, seconds in found.rows:
            times.add(found.rank, (operation, stage), step, seconds)


def found_event(slow: Straggler, at_ns: int) -> StragglerFound:
    """Return the event of a straggler for observers."""
    fields = msgspec.structs.asdict(slow)
    return StragglerFound(at_ns=at_ns, step=fields.pop("since"), **fields)


def explain(slow: Straggler) -> str:
    """Return in few words which rank is slow, where, since when, by how much, and the likely cause."""
    return (
        f"rank {slow.rank} ({slow.host}) is slow: {slow.stage} takes {slow.factor:.1f} ×, {slow.extra_s:.3g} s more "
        f"each {slow.operation} since step {slow.since}; likely: {slow.cause}"
    )
