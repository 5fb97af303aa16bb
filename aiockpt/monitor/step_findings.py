"""Findings about saves and steps: what came too late or not at all, what failed, what is damaged, what took long."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from aiockpt.events import Committed, Loaded, LoadFailed, NotFiniteFound, StepDamaged, StepRepaired
from aiockpt.format.names import list_names
from aiockpt.monitor.finding import LATE, MOST_NAMED, Finding
from aiockpt.monitor.run_log import RunLog
from aiockpt.monitor.save_points import SavePoint, usual_interval_s
from aiockpt.monitor.stragglers import slow_steps
from aiockpt.monitor.summary import FailedStep, Summary
from aiockpt.runtime.notes import name_ranks
from aiockpt.units import duration, name_numbers

PAUSED = 0.02
"""Part of the time: a larger one in which training is held is reported."""


def overdue(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report that no step has become durable for long."""
    usual_s = usual_interval_s(points)
    commits = [one for one in points if one.durable_s is not None]
    if not points:
        yield Finding(level="note", what="No save was made.", since_s=summary.begun_s)
    elif not commits:
        yield Finding(level="bad", what="No step has become durable: a crash would lose all.", since_s=summary.begun_s)
    elif usual_s is not None:
        last = max(commits, key=lambda one: one.ended_s)
        late_s = summary.ended_s - last.ended_s
        if late_s > LATE * usual_s:
            yield Finding(
                level="bad",
                what=f"Nothing has become durable for {duration(late_s)}, since step {last.step}; "
                f"usually a save begins every {duration(usual_s)}.",
                advice="A crash now loses all work since then.",
                since_s=last.ended_s,
                step=last.step,
            )


def unfinished(run: RunLog, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report saves that do not end, and the ranks whose data they lack."""
    last_start = max((one.start for one in points), default=0)
    lasted = [one.durable_s for one in points if one.durable_s is not None]
    hosts = {process.opened.rank: process.opened.host for process in run.processes}
    for one in points:
        if one.start != last_start or not one.open:
            continue
        usual = f"; usually it takes {duration(median(lasted))}" if lasted else ""
        waits_for = one.unwritten if 2 * len(one.unwritten) <= one.ranks else ()
        where = (
            f", and {name_ranks(waits_for, MOST_NAMED)} ({hosts[waits_for[0]]}) has not written its data"
            if waits_for
            else ""
        )
        yield Finding(
            level="warning",
            what=f"The save of step {one.step} has not ended on {len(one.open)} of {one.ranks} ranks{where}{usual}.",
            advice="It is under way, or the job hangs or was killed in it.",
            since_s=one.begun_s,
            rank=waits_for[0] if waits_for else one.open[0],
            step=one.step,
        )


def failures(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report each error that saves failed with once; it is bad where no later step is durable."""
    if not summary.failures:
        return
    last_commit_s = max((one.ended_s for one in points if one.durable_s is not None), default=0.0)
    by_error: dict[str, list[FailedStep]] = defaultdict(list)
    for one in summary.failures:
        by_error[one.error].append(one)
    for error, some in by_error.items():
        last = some[-1]
        steps = sorted({one.step for one in some})
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
    """Report each error that loads failed with once; it is bad where nothing was loaded or saved since."""
    later = [one.wall_s(event.at_ns) for kind in (Loaded, Committed) for one, event in run.told(kind)]
    by_error: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for one, event in run.told(LoadFailed):
        by_error[event.which, event.error].append((one.wall_s(event.at_ns), one.opened.rank))
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


def not_finite(run: RunLog, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report numbers that are NaN or infinite: it matters most whether the last steps that were saved have them."""
    told = {event.step: (one.opened.rank, event) for one, event in reversed(list(run.told(NotFiniteFound)))}
    durable = [one for one in points if one.durable_s is not None]
    bad = [one for one in durable if one.step in told]
    if not bad:
        return
    since = bad[0]
    for one in reversed(durable):
        if one.step not in told:
            break
        since = one
    lasts = durable[-1].step in told
    first = since if lasts else bad[0]
    rank, event = told[first.step]
    before = [one.step for one in durable if one.step not in told and one.begun_s < first.begun_s]
    yield Finding(
        level="bad" if lasts else "note",
        what=f"Numbers that are NaN or infinite were saved in {list_names(tuple(event.tensors))}, "
        + (f"in every step since step {first.step}." if lasts else f"in {len(bad)} steps, first in step {first.step}."),
        advice=f"Step {before[-1]} is the newest before that has none." if before else "No step before it has none.",
        since_s=first.begun_s,
        rank=rank,
        step=first.step,
    )


def damaged(run: RunLog) -> Iterator[Finding]:
    """Report steps in storage that are not what was saved, as a scrub found, and those that it repaired from a copy."""
    told = [(one.wall_s(event.at_ns), event) for one, event in run.told(StepDamaged)]
    mended = [(one.wall_s(event.at_ns), event) for one, event in run.told(StepRepaired)]
    mended_s = {(event.step, event.url): at_s for at_s, event in mended}
    bad: dict[tuple[int, str], tuple[float, StepDamaged]] = {}
    for at_s, event in told:
        if at_s > mended_s.get((event.step, event.url), 0.0):
            bad.setdefault((event.step, event.url), (at_s, event))
    for url in sorted({url for _, url in bad}):
        some = [one for (_, where), one in bad.items() if where == url]
        since_s, first = min(some, key=lambda one: one[0])
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
    durable = [(one.step, one.durable_s, one.begun_s) for one in points if one.durable_s is not None]
    if not durable:
        return
    fastest = sorted(took for _, took, _ in durable)[: (len(durable) + 1) // 2]
    usual_s = median(fastest)
    slow = slow_steps([took / usual_s for _, took, _ in durable])
    if not slow or slow.start == 0:
        return
    step, _, since_s = durable[slow.start]
    now_s = median(took for _, took, _ in durable[slow.start :])
    explained_s = max((one.extra_s for one in summary.stragglers if one.operation == "save"), default=0.0)
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
    held_s = sum(one.most_pause_s for one in points)
    if points and held_s > PAUSED * lasted_s:
        worst = max(points, key=lambda one: one.most_pause_s)
        yield Finding(
            level="note",
            what=f"Training was held for {held_s / lasted_s:.1%} of the time, {duration(summary.pauses_s[0])} each save.",
            advice=f"Longest: {duration(worst.most_pause_s)} on rank {worst.most_pause_rank} at step {worst.step}.",
            rank=worst.most_pause_rank,
            step=worst.step,
        )
