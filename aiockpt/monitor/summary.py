"""The summary of a run: its saves, what its stages took on which rank, its restarts, its failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import median

import msgspec

from aiockpt.events import Loaded, Promoted, PromotionFailed, Rewound, SaveFailed, SnapshotTaken, StorageRetried
from aiockpt.monitor.run_log import ProcessLog, RunLog, leading_logs
from aiockpt.monitor.spans import WHOLE, TimeSpan
from aiockpt.monitor.stragglers import Straggler, stage_times, stragglers


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage over all ranks and steps; each data file counts separately, and failed stages do not count.

    Attributes:
        slowest_rank, slowest_step: where *most_s* was.
        bytes_per_s: of stages that move bytes; 0 otherwise.
    """

    operation: str
    stage: str
    count: int
    median_s: float
    most_s: float
    slowest_rank: int
    slowest_step: int
    bytes_per_s: float


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the run after the first one.

    Attributes:
        at_s: seconds since 1970.
        resumed_from: the loaded step; None where none was loaded.
        lost_s: from the call that saved that step to the last sign of life before: repeated work, without what an
            earlier restart has lost or was down.
        down_s: from that last sign to this start.
        after_close: the process before was closed, and not killed.
    """

    at_s: float
    after_close: bool
    world_size: int
    resumed_from: int | None
    lost_s: float
    down_s: float


class FailedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A save, or its copy to another place, that failed with one error on one rank or more.

    Attributes:
        at_s: in seconds since 1970, on the *rank* that reported it first.
        ranks: how many reported it.
    """

    at_s: float
    rank: int
    step: int
    error: str
    ranks: int = 1


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run at a glance. Times are of the lowest rank that has a trace, unless stated otherwise.

    Attributes:
        committed, failed: saves.
        pauses_s: how long calls of save held their caller, over all ranks: median and most.
        durable_s: from the call to the commit, median and most.
        effective: productive time over all time (ETTR): not lost, taken back by a rewind, down, loading, or held by a save
            or for an optimizer.
        retries: repeated calls to storage.
        forked_from: the state of another place that the run began from, in words.
    """

    begun_s: float
    ended_s: float
    hosts: int
    ranks: int
    committed: int
    failed: int
    last_step: int | None
    pauses_s: tuple[float, float]
    durable_s: tuple[float, float]
    effective: float
    retries: int
    stages: list[StageFigures]
    restarts: list[Restart]
    stragglers: list[Straggler]
    failures: list[FailedStep]
    forked_from: str = ""


def summarize(run: RunLog, found: Sequence[TimeSpan]) -> Summary:
    """Return the summary of *run*, of which *found* are the spans."""
    lowest = min(process.opened.rank for process in run.processes)
    whole = [span for span in found if span.rank == lowest and span.operation == "save" and span.stage == WHOLE]
    committed = [span for span in whole if not span.failed]
    begun_s = min(process.wall_s(process.opened.at_ns) for process in run.processes)
    ended_s = max(process.last_s for process in run.processes)
    pauses = [event.pause_s for _, event in run.events_of(SnapshotTaken)]
    restarts, repeated = _restarts(leading_logs(run), committed)
    wasted_s = _covered_s(
        repeated
        + _taken_back(run, lowest, committed)
        + [(span.begin_s, span.begin_s + span.seconds) for span in found if span.rank == lowest and _holds(span)]
    )
    return Summary(
        begun_s=begun_s,
        ended_s=ended_s,
        hosts=len({process.opened.host for process in run.processes}),
        ranks=max(process.opened.world_size for process in run.processes),
        committed=len(committed),
        failed=len(whole) - len(committed),
        last_step=committed[-1].step if committed else None,
        pauses_s=_median_and_most(pauses),
        durable_s=_median_and_most([span.seconds for span in committed]),
        effective=max(0.0, 1 - wasted_s / (ended_s - begun_s)) if ended_s > begun_s else 1.0,
        retries=sum(1 for _ in run.events_of(StorageRetried)),
        stages=_figures(found),
        restarts=restarts,
        stragglers=stragglers(stage_times(run, found)),
        failures=_failures(run),
        forked_from=next((event.forked_from for _, event in run.events_of(Loaded) if event.forked_from), ""),
    )


def _taken_back(run: RunLog, rank: int, committed: list[TimeSpan]) -> list[tuple[float, float]]:
    """Return for each rewind the time from the save of the step that it went back to, to its end."""
    ends = [
        (log, log.wall_s(event.at_ns), event.step) for log, event in run.events_of(Rewound) if log.opened.rank == rank
    ]
    return [(_saved_s(committed, step, end_s, log), end_s) for log, end_s, step in ends]


def _saved_s(committed: list[TimeSpan], step: int | None, before_s: float, log: ProcessLog) -> float:
    """Return when *step* was last saved before a time; of a step of which there is no save, the begin of *log*."""
    saved_s = (span.begin_s for span in reversed(committed) if span.step == step and span.begin_s < before_s)
    return next(saved_s, log.wall_s(log.opened.at_ns))


def _covered_s(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals: lost time may overlap held time."""
    covered_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(intervals):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s


def _holds(span: TimeSpan) -> bool:
    """Return whether training is held during *span*."""
    return span.stage in ("pause", "barrier") or (span.operation, span.stage) == ("load", WHOLE)


def _failures(run: RunLog) -> list[FailedStep]:
    copied_s = {(event.step, event.url): log.wall_s(event.at_ns) for log, event in run.events_of(Promoted)}
    found: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    failed: list[tuple[ProcessLog, SaveFailed | PromotionFailed]] = [*run.events_of(SaveFailed)]
    failed += run.events_of(PromotionFailed)
    for log, event in failed:
        at_s = log.wall_s(event.at_ns)
        # A copy is retried, and by the next start, too.
        if isinstance(event, SaveFailed) or copied_s.get((event.step, event.url), 0.0) < at_s:
            found[event.step, event.error].append((at_s, log.opened.rank))
    some = [
        FailedStep(at_s=min(where)[0], rank=min(where)[1], step=step, error=error, ranks=len({at[1] for at in where}))
        for (step, error), where in found.items()
    ]
    return sorted(some, key=lambda failure: failure.at_s)


def _median_and_most(values: list[float]) -> tuple[float, float]:
    return (median(values), max(values)) if values else (0.0, 0.0)


def _figures(found: Sequence[TimeSpan]) -> list[StageFigures]:
    grouped: dict[tuple[str, str], list[TimeSpan]] = defaultdict(list)
    for span in found:
        if not span.failed:
            grouped[span.operation, span.stage].append(span)
    figures = []
    for (operation, stage), some in grouped.items():
        slowest = max(some, key=attrgetter("seconds"))
        speeds = [span.bytes / span.seconds for span in some if span.bytes and span.seconds]
        figures.append(
            StageFigures(
                operation=operation,
                stage=stage,
                count=len(some),
                median_s=median([span.seconds for span in some]),
                most_s=slowest.seconds,
                slowest_rank=slowest.rank,
                slowest_step=slowest.step,
                bytes_per_s=median(speeds) if speeds else 0.0,
            )
        )
    order = {"save": 0, "load": 1, "copy": 2}
    return sorted(figures, key=lambda figure: (order[figure.operation], figure.stage != WHOLE, -figure.median_s))


def _restarts(
    starts: list[list[ProcessLog]], committed: list[TimeSpan]
) -> tuple[list[Restart], list[tuple[float, float]]]:
    """Return the starts after the first, and for each the time from what it resumed to its begin.

    Args:
        starts: the logs of all checkpointers of one process each.
    """
    restarts, repeated = list[Restart](), list[tuple[float, float]]()
    for before, after in pairwise(starts):
        opened = after[0].opened
        at_s, last_s = after[0].wall_s(opened.at_ns), max(log.last_s for log in before)
        loads = (event.step for log in after for event in log.events if isinstance(event, Loaded))
        loaded = next((step for step in loads if step >= 0), None)  # a foreign checkpoint has none
        since_s = _saved_s(committed, loaded, at_s, before[0])
        restarts.append(
            Restart(
                at_s=at_s,
                after_close=before[-1].closed,
                world_size=opened.world_size,
                resumed_from=loaded,
                # A start that saves nothing repeats what an earlier one has lost: that counts once.
                lost_s=_covered_s([*repeated, (since_s, last_s)]) - _covered_s(repeated),
                down_s=max(at_s - last_s, 0.0),
            )
        )
        repeated.append((since_s, at_s))
    return restarts, repeated
