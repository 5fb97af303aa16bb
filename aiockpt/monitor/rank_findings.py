"""Findings about processes: two jobs in one place, ranks that have fallen silent, ranks that are slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from statistics import median

from aiockpt.events import SaveStarted
from aiockpt.monitor.finding import LATE, MOST_NAMED, Finding
from aiockpt.monitor.run_log import ProcessLog, RunLog
from aiockpt.monitor.run_starts import process_of, start_numbers
from aiockpt.monitor.save_points import SavePoint, usual_interval_s
from aiockpt.monitor.stragglers import Straggler
from aiockpt.monitor.summary import Summary
from aiockpt.runtime.notes import name_ranks
from aiockpt.units import duration

LEAST_SILENCE_S, LONG_S = 60.0, 3600.0
"""Without an event are reported at the earliest; the second where it is not known how often the run saves."""
AT_ONCE_S = 5.0
"""Overlap of two processes; less is uncertain, for clocks differ."""


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
    both_s, before, after = max(found, key=lambda one: one[0], default=(0.0, run.processes[0], run.processes[0]))
    if both_s > AT_ONCE_S:
        who = " and ".join(f"process {one.opened.pid} on {one.opened.host}" for one in (before, after))
        yield Finding(
            level="bad",
            what=f"Two jobs saved to one place at once for {duration(both_s)}: {who}, both as rank {after.opened.rank}.",
            advice="Give each a place of its own. The figures below mix them.",
            since_s=after.wall_s(after.opened.at_ns),
            rank=after.opened.rank,
        )


def silent(run: RunLog, points: Sequence[SavePoint], now_s: float) -> Iterator[Finding]:
    """Report ranks without any event, and those that stopped before the others, or all at once."""
    usual_s = usual_interval_s(points)
    last_start = _last_start(run)
    last: dict[int, float] = {}
    hosts: dict[int, str] = {}
    for process in last_start:
        rank = process.opened.rank
        last[rank], hosts[rank] = max(process.last_told_s, last.get(rank, 0.0)), process.opened.host
    world_size = max(process.opened.world_size for process in last_start)
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
            what=f"Nothing is heard of {name_ranks(quiet, MOST_NAMED)} ({hosts[quiet[0]]}) any more: "
            f"the others told something up to {duration(usual_last_s - at_s)} longer.",
            advice="Look at its host, and at its own log.",
            since_s=at_s,
            rank=quiet[0],
        )
    yield from _fell_silent(last_start, usual_s, now_s, quiet)


def _fell_silent(
    last_start: Sequence[ProcessLog], usual_s: float | None, now_s: float, told: Collection[int]
) -> Iterator[Finding]:
    """Report that ranks have emitted nothing for long, up to now, though their checkpointer was not closed.

    Args:
        told: ranks of which that is reported already.
    """
    logs: dict[int, list[ProcessLog]] = defaultdict(list)
    for log in last_start:
        logs[log.opened.rank].append(log)
    silent = {rank: max(log.last_s for log in some) for rank, some in logs.items() if not some[-1].closed}
    ranks = sorted(silent.keys() - set(told))
    if not ranks:
        return
    last_s = max(silent.values())
    if now_s - last_s <= (max(LATE * usual_s, LEAST_SILENCE_S) if usual_s is not None else LONG_S):
        return
    whole = len(silent) == len(logs)
    who = "The run has" if whole else f"The others have ended in order; {name_ranks(ranks, MOST_NAMED)} has"
    yield Finding(
        level="bad",
        what=f"{who} told nothing for {duration(now_s - last_s)}, and was not closed: it was killed, or hangs.",
        advice=f"Look at {logs[ranks[0]][-1].opened.host}, and at its own log.",
        since_s=last_s,
        rank=None if whole else ranks[0],
    )


def _last_start(run: RunLog) -> list[ProcessLog]:
    numbers = start_numbers(run)
    return [one for one, number in zip(run.processes, numbers, strict=True) if number == max(numbers)]


def slow_ranks(summary: Summary, points: Sequence[SavePoint]) -> Iterator[Finding]:
    """Report each host with stragglers once: a slow disk shows in several stages, and on all ranks of its host."""
    begun = {one.step: one.begun_s for one in reversed(points)}
    by_host: dict[tuple[str, str], list[Straggler]] = defaultdict(list)
    for slow in summary.stragglers:
        by_host[slow.host, slow.operation].append(slow)
    for (host, operation), some in by_host.items():
        worst, ranks = some[0], sorted({one.rank for one in some})
        whole = f"{len(ranks)} ranks of host {host} are" if len(ranks) > 1 else f"Rank {worst.rank} ({host}) is"
        beside = sorted({one.stage for one in some} - {worst.stage})
        since = min(one.since for one in some)
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
