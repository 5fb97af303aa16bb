"""The outcome of each save over all ranks: one point for each, for figures over the steps of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from aiockpt.events import (
    Committed,
    DataWritten,
    Event,
    NotFiniteFound,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    SnapshotTaken,
)
from aiockpt.monitor.run_log import ProcessLog, RunLog, start_numbers


class SavePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A save as all ranks of one start of the run saw it.

    Attributes:
        start: the number of the start.
        begun_s, ended_s: of the first rank that began and the last one with an event, in seconds since 1970.
        durable_s: from the call to the commit, on the rank that took longest; None where it was not committed.
        pause_s: how long the call held its caller, the median of the ranks; *most_pause_s* on *most_pause_rank*.
        bytes: that all ranks wrote.
        ranks: that began it; *unwritten* those of them whose data were not durable, *open* those without an end.
        error: why it failed on the first rank that reported it; empty where it did not.
        metrics: those of the call, on the lowest rank that began it.
        not_finite: tensors with numbers that are NaN or infinite, by the rank that wrote them.
    """

    step: int
    start: int
    begun_s: float
    ended_s: float
    durable_s: float | None
    pause_s: float
    most_pause_s: float
    most_pause_rank: int
    bytes: int
    ranks: int
    unwritten: tuple[int, ...]
    open: tuple[int, ...]
    error: str = ""
    not_finite: dict[int, list[str]] = {}
    metrics: Mapping[str, float | None] = {}

    @property
    def bytes_per_s(self) -> float:
        """What all ranks wrote, over the time until it was durable; 0 where it was not committed."""
        return self.bytes / self.durable_s if self.durable_s else 0.0


class _Gathered:
    """The events of one save so far, from all ranks."""

    def __init__(self) -> None:
        self.begun: dict[int, float] = {}
        self.metrics: dict[int, Mapping[str, float | None]] = {}
        self.written: dict[int, int] = {}
        self.durable: dict[int, float] = {}
        self.pauses: dict[int, float] = {}
        self.failed: list[tuple[float, str]] = []
        self.ended: set[int] = set()
        self.not_finite: dict[int, list[str]] = {}
        self.last_s = 0.0

    def receive(self, event: Event, rank: int, process: ProcessLog) -> None:
        at_s = process.wall_s(event.at_ns)
        self.last_s = max(self.last_s, at_s)
        match event:
            case SaveStarted():
                self.begun[rank] = at_s
                self.metrics[rank] = event.metrics
            case SnapshotTaken():
                self.pauses[rank] = event.pause_s
            case DataWritten():
                self.written[rank] = event.bytes
            case Committed():
                self.durable[rank] = event.seconds
                self.ended.add(rank)
            case SaveFailed():
                self.failed.append((at_s, event.error))
                self.ended.add(rank)
            case NotFiniteFound():
                self.not_finite[rank] = list(event.tensors)
            case _:
                self.ended.add(rank)

    def point(self, step: int, start: int) -> SavePoint:
        worst = max(self.pauses, key=self.pauses.__getitem__, default=0)
        done = self.written.keys() | self.durable.keys()
        return SavePoint(
            step=step,
            start=start,
            begun_s=min(self.begun.values()),
            ended_s=self.last_s,
            durable_s=max(self.durable.values(), default=None),
            pause_s=median(self.pauses.values()) if self.pauses else 0.0,
            most_pause_s=self.pauses.get(worst, 0.0),
            most_pause_rank=worst,
            bytes=sum(self.written.values()),
            ranks=len(self.begun),
            unwritten=tuple(sorted(self.begun.keys() - done)),
            open=tuple(sorted(self.begun.keys() - self.ended)),
            error=min(self.failed)[1] if self.failed else "",
            not_finite=self.not_finite,
            metrics=self.metrics[min(self.metrics)],
        )


_TOLD = {SaveStarted, SnapshotTaken, DataWritten, NotFiniteFound, Committed, SaveFailed, SaveSkipped}


def save_points(run: RunLog) -> list[SavePoint]:
    """Return the saves of *run* in the order in which they began; a step that is saved again counts again."""
    gathered: dict[tuple[int, int, int], _Gathered] = {}
    often: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for process, start in zip(run.processes, start_numbers(run), strict=True):
        rank = process.opened.rank
        times = often[rank, start]
        for event in process.events:
            if type(event) in _TOLD:
                if type(event) is SaveStarted:
                    times[event.step] += 1
                key = start, event.step, times[event.step]
                gathering = gathered.get(key)
                if gathering is None:
                    gathering = gathered[key] = _Gathered()
                gathering.receive(event, rank, process)
    points = [gathering.point(step, start) for (start, step, _), gathering in gathered.items() if gathering.begun]
    return sorted(points, key=lambda point: point.begun_s)


def usual_interval_s(points: Sequence[SavePoint]) -> float | None:
    """Return the median time between consecutive saved steps of a start; None where no start has two."""
    starts: dict[int, list[SavePoint]] = defaultdict(list)
    for point in points:
        # Two jobs in one place save in turns: only the repeated step shows that two saves are of one moment.
        if not starts[point.start] or starts[point.start][-1].step != point.step:
            starts[point.start].append(point)
    gaps = [after.begun_s - before.begun_s for own in starts.values() for before, after in pairwise(own)]
    return median(gaps) if gaps else None
