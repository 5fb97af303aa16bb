"""The findings of a run: what is wrong, where, and since when, in words for the person on call; the worst comes first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from aiockpt.events import (
    Committed,
    Loaded,
    LoadFailed,
    Rewound,
    SaveStarted,
    StepDamaged,
    StepRepaired,
    StorageRetried,
)
from aiockpt.format.names import list_names
from aiockpt.monitor.run_log import ProcessLog, RunLog, process_of, start_numbers
from aiockpt.monitor.save_points import SavePoint, usual_interval_s
from aiockpt.monitor.stragglers import Straggler, slow_steps
from aiockpt.monitor.summary import FailedStep, Summary
from aiockpt.runtime.notes import name_ranks
from aiockpt.units import count, duration, name_numbers

Level = Literal["bad", "warning", "note"]
"""Work is in danger; saves are slower or work was lost; worth attention."""
LATE = 3.0
"""Usual intervals without a durable step, or without an event, that are reported as too long."""
MOST_NAMED = 5
"""Ranks or steps that a sentence names."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator should know.

    Attributes:
        what: in one sentence, with where it is.
        advice: what to inspect, or the likely cause; may be empty.
        since_s: seconds since 1970.
        rank, step, stage: what to inspect in the figures.
    """

    level: Level
    what: str
    advice: str = ""
    since_s: float | None = None
    rank: int | None = None
    step: int | None = None
    stage: str = ""


# Processes: two jobs in one place, ranks that have fallen silent, ranks that are slow.


LEAST_SILENCE_S, LONG_S = 60.0, 3600.0
"""Least time without a word, or without a durable step, that is told; the second one where no usual interval is known."""
AT_ONCE_S = 5.0
"""Least overlap of two processes that is reported: clocks differ, so a shorter one is uncertain."""


def two_jobs(run: RunLog) -> Iterator[Finding]:
    """Report processes that saved at the same time as the same rank: each deletes and finishes what the other saves."""
    latest: dict[int, ProcessLog] = {}
    found: list[tuple[float, ProcessLog, ProcessLog]] = []
    for log in run.processes:  # in the order in which they began
        if not any(isinstance(event, SaveStarted) for event in log.events):
            continue
        before = latest.setdefault(log.opened.rank, log)
        if process_of(before) != process_of(log):
            found.append((min(before.last_s, log.last_s) - log.wall_s(log.opened.at_ns), before, log))
        if log.last_s > before.last_s:
            latest[log.opened.rank] = log
    both_s, before, after = max(
        found, key=lambda overlap: overlap[0], default=(0.0, run.processes[0], run.processes[0])
    )
    if both_s > AT_ONCE_S:
        both = " and ".join(f"process {log.opened.pid} on {log.opened.host}" for log in (before, after))
        yield Finding(
            level="bad",
            what=f"Two jobs saved to one place at once for {duration(both_s)}: {both}, both as rank {after.opened.rank}.",
            advice="Give each a place of its own. The figures below mix them.",
            since_s=after.wall_s(after.opened.at_ns),
            rank=after.opened.rank,
        )


def silent(run: RunLog, points: Sequence[SavePoint], now_s: float) -> Iterator[Finding]:
    """Report ranks without any event, and those that stopped before the others, or all at once."""
    usual_s = usual_interval_s(points)
    logs: dict[int, list[ProcessLog]] = defaultdict(list)
    for log in _last_start(run):
        logs[log.opened.rank].append(log)
    last = {rank: max(log.last_event_s for log in some) for rank, some in logs.items()}
    world_size = max(log.opened.world_size for some in logs.values() for log in some)
    missing = [rank for rank in range(world_size) if rank not in last]
    if missing:
        yield Finding(
            level="warning",
            what=f"There is no trace of {name_ranks(missing, MOST_NAMED)}, of {world_size} in the last start.",
            advice="It never began, or its file is elsewhere.",
        )
    usual_last_s = median(last.values())
    quiet = [rank for rank, at_s in sorted(last.items()) if usual_s is not None and usual_last_s - at_s > 1.5 * usual_s]
    if quiet:
        at_s = min(last[rank] for rank in quiet)
        yield Finding(
            level="bad",
            what=f"Nothing is heard of {name_ranks(quiet, MOST_NAMED)} ({logs[quiet[0]][-1].opened.host}) any more: "
            f"the others told something up to {duration(usual_last_s - at_s)} longer.",
            advice="Look at its host, and at its own log.",
            since_s=at_s,
            rank=quiet[0],
        )
    yield from _fell_silent(logs, usual_s, now_s, quiet)


def _fell_silent(
    logs: Mapping[int, Sequence[ProcessLog]], usual_s: float | None, now_s: float, reported: Collection[int]
) -> Iterator[Finding]:
    """Report that ranks have emitted nothing for long, up to now, though their checkpointer was not closed.

    Args:
        reported: ranks for which this is already reported.
    """
    silent = {rank: max(log.last_s for log in some) for rank, some in logs.items() if not some[-1].closed}
    ranks = sorted(silent.keys() - set(reported))
    if not ranks:
        return
    last_s = max(silent.values())
    if now_s - last_s <= (max(LATE * usual_s, LEAST_SILENCE_S) if usual_s is not None else LONG_S):
        return
    whole = len(silent) == len(logs)
    subject = "The run has" if whole else f"The others have ended in order; {name_ranks(ranks, MOST_NAMED)} has"
    yield Finding(
        level="bad",
        what=f"{subject} told nothing for {duration(now_s - last_s)}, and was not closed: it was killed, or hangs.",
        advice=f"Look at {logs[ranks[0]][-1].opened.host}, and at its own log.",
        since_s=last_s,
        rank=None if whole else ranks[0],
    )


def _last_start(run: RunLog) -> list[ProcessLog]:
    numbers = start_numbers(run)
    return [log for log, number in zip(run.processes, numbers, strict=True) if number == max(numbers)]


def slow_ranks(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report each host with stragglers once: a slow disk shows in several stages, and on all ranks of its host."""
    begun = {point.step: point.begun_s for point in reversed(points)}
    by_host: dict[tuple[str, str], list[Straggler]] = defaultdict(list)
    for slow in summary.stragglers:
        by_host[slow.host, slow.operation].append(slow)
    for (host, operation), some in by_host.items():
        worst, ranks = some[0], sorted({straggler.rank for straggler in some})
        whole = f"{len(ranks)} ranks of host {host} are" if len(ranks) > 1 else f"Rank {worst.rank} ({host}) is"
        beside = sorted({straggler.stage for straggler in some} - {worst.stage})
        since = min(straggler.since for straggler in some)
        advice = f"Likely: {worst.cause}."
        advice += (
            f" {' and '.join(beside).capitalize()} {'is' if len(beside) == 1 else 'are'} slow, too." if beside else ""
        )
        advice += f" It is {name_ranks(ranks, MOST_NAMED)}." if len(ranks) > 1 else ""
        yield Finding(
            level="warning",
            what=f"{whole} slow: {worst.stage} takes {worst.factor:.1f} × as long as on the others, "
            f"{duration(worst.extra_s)} more each {operation}, since step {since}.",
            advice=advice,
            since_s=begun.get(since),
            rank=worst.rank,
            stage=f"{operation} {worst.stage}",
        )


# Saves and steps: what came too late or not at all, what failed, what is damaged, what took long.


PAUSED = 0.02
"""Fraction of the time; training that is held for more of it is reported."""


def overdue(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report that no step has become durable for long."""
    usual_s = usual_interval_s(points)
    commits = [point for point in points if point.durable_s is not None]
    if not points:
        yield Finding(level="note", what="No save was made.", since_s=summary.begun_s)
    elif not commits:
        yield Finding(level="bad", what="No step has become durable: a crash would lose all.", since_s=summary.begun_s)
    elif usual_s is not None:
        last = max(commits, key=lambda commit: commit.ended_s)
        late_s = summary.ended_s - last.ended_s
        if late_s > max(LATE * usual_s, LEAST_SILENCE_S):
            yield Finding(
                level="bad",
                what=f"Nothing has become durable for {duration(late_s)}, since step {last.step}; "
                f"usually a save begins every {duration(usual_s)}.",
                advice="A crash now loses all work since then.",
                since_s=last.ended_s,
                step=last.step,
            )


def unfinished(run: RunLog, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report unfinished saves, and the ranks whose data they lack."""
    last_start = max((point.start for point in points), default=0)
    lasted = [point.durable_s for point in points if point.durable_s is not None]
    hosts = {process.opened.rank: process.opened.host for process in run.processes}
    for point in points:
        if point.start != last_start or not point.open:
            continue
        usual = f"; usually it takes {duration(median(lasted))}" if lasted else ""
        waits_for = point.unwritten if 2 * len(point.unwritten) <= point.ranks else ()
        where = (
            f", and {name_ranks(waits_for, MOST_NAMED)} ({hosts[waits_for[0]]}) has not written its data"
            if waits_for
            else ""
        )
        yield Finding(
            level="warning",
            what=f"The save of step {point.step} has not ended on {len(point.open)} of {point.ranks} ranks{where}{usual}.",
            advice="It is under way, or the job hangs or was killed in it.",
            since_s=point.begun_s,
            rank=waits_for[0] if waits_for else point.open[0],
            step=point.step,
        )


def failures(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report each error of failed saves once; its level is bad where no later step is durable."""
    if not summary.failures:
        return
    last_commit_s = max((point.ended_s for point in points if point.durable_s is not None), default=0.0)
    by_error: dict[str, list[FailedStep]] = defaultdict(list)
    for failure in summary.failures:
        by_error[failure.error].append(failure)
    for error, some in by_error.items():
        last = some[-1]
        steps = sorted({failure.step for failure in some})
        many = f"step {last.step} was not saved" if len(steps) == 1 else f"{len(steps)} steps were not saved"
        where = f"rank {last.rank}" if last.ranks == 1 else f"{last.ranks} ranks"
        yield Finding(
            level="bad" if last.at_s > last_commit_s else "warning",
            what=f"{many[0].upper()}{many[1:]}: {error} on {where}.",
            advice="" if last.at_s > last_commit_s else "Later steps are durable.",
            since_s=some[0].at_s,
            rank=last.rank,
            step=last.step,
        )


def failed_loads(run: RunLog) -> Iterator[Finding]:
    """Report each error of failed loads once; its level is bad where nothing was loaded or saved since."""
    later = [log.wall_s(event.at_ns) for kind in (Loaded, Committed) for log, event in run.events_of(kind)]
    by_error: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for log, event in run.events_of(LoadFailed):
        by_error[event.which, event.error].append((log.wall_s(event.at_ns), log.opened.rank))
    for (which, error), times in by_error.items():
        since_s, rank = min(times)
        went_on = max(later, default=0.0) > max(times)[0]
        ranks = Counter(rank for _, rank in times)
        often = f", {max(ranks.values())} times" if max(ranks.values()) > 1 else ""
        where = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
        yield Finding(
            level="warning" if went_on else "bad",
            what=f"The load of {which} failed{where}{often}: {error}",
            advice="A later one did not." if went_on else "Nothing was loaded or saved since.",
            since_s=since_s,
            rank=rank,
        )


def rewinds(run: RunLog) -> Iterator[Finding]:
    """Report that the run was set back from bad steps, with the last one."""
    found: dict[tuple[int, int], tuple[ProcessLog, Rewound]] = {}
    counts: Counter[int] = Counter()
    for log, event in run.events_of(Rewound):  # each rank tells the same
        counts[log.opened.rank] += 1
        found[log.opened.rank, counts[log.opened.rank]] = log, event
    if not found:
        return
    often = max(counts.values())
    log, last = max(found.values(), key=lambda one: one[0].wall_s(one[1].at_ns))
    times = "once" if often == 1 else f"{often} times, at last"
    lost = max(last.bad_step - last.step - 1, 0)
    yield Finding(
        level="warning",
        what=f"The run was set back {times} to step {last.step}: step {last.bad_step} was bad, {last.reason}.",
        advice=f"{count(lost, 'good step')} trained again; batches left out: {last.skipped}. Look at the data of that step.",
        since_s=log.wall_s(last.at_ns),
        rank=last.bad_rank,
        step=last.step,
    )


def not_finite(points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report NaN and infinite numbers; the level is bad where the last durable step has them, else a note."""
    durable = [point for point in points if point.durable_s is not None]
    bad = [point for point in durable if point.not_finite]
    if not bad:
        return
    since = bad[0]
    for point in reversed(durable):
        if not point.not_finite:
            break
        since = point
    lasts = bool(durable[-1].not_finite)
    first = since if lasts else bad[0]
    rank, tensors = min(first.not_finite.items())
    before = [point.step for point in durable if not point.not_finite and point.begun_s < first.begun_s]
    yield Finding(
        level="bad" if lasts else "note",
        what=f"Numbers that are NaN or infinite were saved in {list_names(tuple(tensors))}, "
        + (f"in every step since step {first.step}." if lasts else f"in {len(bad)} steps, first in step {first.step}."),
        advice=f"Step {before[-1]} is the newest before that has none." if before else "No step before it has none.",
        since_s=first.begun_s,
        rank=rank,
        step=first.step,
    )


def damaged(run: RunLog) -> Iterator[Finding]:
    """Report the damaged steps that a repair found in storage, and those that it made whole from a copy."""
    reported = [(log.wall_s(event.at_ns), event) for log, event in run.events_of(StepDamaged)]
    mended = [(log.wall_s(event.at_ns), event) for log, event in run.events_of(StepRepaired)]
    mended_s = {(event.step, event.url): at_s for at_s, event in mended}
    bad: dict[tuple[int, str], tuple[float, StepDamaged]] = {}
    for at_s, event in reported:
        if at_s > mended_s.get((event.step, event.url), 0.0):
            bad.setdefault((event.step, event.url), (at_s, event))
    for url in sorted({url for _, url in bad}):
        some = [report for (_, where), report in bad.items() if where == url]
        since_s, first = min(some, key=lambda report: report[0])
        yield Finding(
            level="bad",
            what=f"{_name_steps(event.step for _, event in some)} in {url}: damaged. {first.problem}.",
            advice="Loads go on to the next valid step. `aiockpt verify --repair FROM` takes it from a copy you name.",
            since_s=since_s,
            step=first.step,
        )
    for url in sorted({event.url for _, event in mended}):
        times = [(at_s, event.step) for at_s, event in mended if event.url == url]
        yield Finding(
            level="warning",
            what=f"{_name_steps(step for _, step in times)} in {url}: damaged, and written anew from another copy.",
            advice="Look at the disk: it has lost bytes.",
            since_s=min(times)[0],
            step=min(times)[1],
        )


def _name_steps(steps: Iterable[int]) -> str:
    return name_numbers("Step", sorted(set(steps)), MOST_NAMED)


def slower(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report that saves take longer than they did, where no straggler of that size explains it."""
    durable = [(point.step, point.durable_s, point.begun_s) for point in points if point.durable_s is not None]
    if not durable:
        return
    fastest = sorted(took for _, took, _ in durable)[: (len(durable) + 1) // 2]
    usual_s = median(fastest)
    slow = slow_steps([took / usual_s for _, took, _ in durable])
    if not slow or slow.start == 0:
        return
    step, _, since_s = durable[slow.start]
    now_s = median(took for _, took, _ in durable[slow.start :])
    explained_s = max((slow.extra_s for slow in summary.stragglers if slow.operation == "save"), default=0.0)
    if now_s < 1.5 * usual_s or explained_s > (now_s - usual_s) / 2:
        return
    yield Finding(
        level="warning",
        what=f"Saves take {duration(now_s)} until they are durable, not {duration(usual_s)}, since step {step}.",
        advice="It is so on all ranks: look at the storage that they share.",
        since_s=since_s,
        step=step,
    )


def held(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report where the calls of save held training for a large part of the time."""
    lasted_s = summary.ended_s - summary.begun_s
    held_s = sum(point.most_pause_s for point in points)
    if points and held_s > PAUSED * lasted_s:
        worst = max(points, key=lambda point: point.most_pause_s)
        yield Finding(
            level="note",
            what=f"Training was held for {held_s / lasted_s:.1%} of the time, {duration(summary.pauses_s[0])} each save.",
            advice=f"Longest: {duration(worst.most_pause_s)} on rank {worst.most_pause_rank} at step {worst.step}.",
            rank=worst.most_pause_rank,
            step=worst.step,
        )


_ORDER: dict[Level, int] = {"bad": 0, "warning": 1, "note": 2}


def find_problems(run: RunLog, summary: Summary, points: Sequence[SavePoint], now_s: float) -> list[Finding]:
    """Return the problems of *run*, the worst first; an empty list where all went well.

    Args:
        now_s: seconds since 1970, by the caller's clock.
    """
    some = [
        *two_jobs(run),
        *overdue(summary, points),
        *unfinished(run, points),
        *silent(run, points, now_s),
        *slow_ranks(summary, points),
        *slower(summary, points),
        *failures(summary, points),
        *failed_loads(run),
        *rewinds(run),
        *not_finite(points),
        *damaged(run),
        *_restarts(summary),
        *_retries(run),
        *held(summary, points),
        *_unread_traces(run),
    ]
    return sorted(some, key=lambda finding: _ORDER[finding.level])


def _restarts(summary: Summary) -> Iterator[Finding]:
    if not summary.restarts:
        return
    last = summary.restarts[-1]
    lost_s, down_s = (sum(getattr(restart, name) for restart in summary.restarts) for name in ("lost_s", "down_s"))
    often = "once" if len(summary.restarts) == 1 else f"{len(summary.restarts)} times"
    resumed = "from nothing" if last.resumed_from is None else f"from step {last.resumed_from}"
    yield Finding(
        level="warning",
        what=f"The run was started again {often}: {duration(lost_s)} of work lost, {duration(down_s)} down.",
        advice=f"The last time it went on {resumed}.",
        since_s=summary.restarts[0].at_s,
    )


def _retries(run: RunLog) -> Iterator[Finding]:
    calls = [(log.wall_s(event.at_ns), log.opened.rank, event) for log, event in run.events_of(StorageRetried)]
    if calls:
        (verb, _), *_ = Counter(event.verb for _, _, event in calls).most_common(1)
        (rank, many), *_ = Counter(rank for _, rank, _ in calls).most_common(1)
        last = max(calls, key=lambda call: call[0])
        again = "1 call to storage was" if len(calls) == 1 else f"{len(calls)} calls to storage were"
        yield Finding(
            level="note",
            what=f"{again} retried, most of them {verb}, {many} on rank {rank}.",
            advice=f"The last error was {last[2].error}.",
            since_s=min(calls, key=lambda call: call[0])[0],
            rank=rank,
        )


def _unread_traces(run: RunLog) -> Iterator[Finding]:
    """Report traces that could not be read, in whole or in part: the events of these ranks are unknown."""
    if run.missing:
        names = list_names(tuple(file.name for file in run.missing))
        yield Finding(
            level="warning",
            what=f"{count(len(run.missing), 'trace')} could not be read: {names}.",
            advice=f"What these ranks told is missing here. {run.missing[0].why}.",
        )
    if run.unread:
        yield Finding(
            level="note",
            what=f"{count(run.unread, 'line')} of the traces could not be read.",
            advice="A process that is killed leaves half a line, and a newer aiockpt may tell what this one does not know.",
        )
