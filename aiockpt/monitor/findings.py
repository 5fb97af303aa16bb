"""The findings of a run: what is wrong, where, and since when, in words for the person on call; the worst comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aiockpt.events import StorageRetried
from aiockpt.format.names import list_names
from aiockpt.monitor import rank_findings, step_findings
from aiockpt.monitor.finding import Finding, Level
from aiockpt.monitor.run_log import RunLog
from aiockpt.monitor.save_points import SavePoint
from aiockpt.monitor.summary import Summary
from aiockpt.units import count, duration

_ORDER: dict[Level, int] = {"bad": 0, "warning": 1, "note": 2}


def find_problems(run: RunLog, summary: Summary, points: Sequence[SavePoint], now_s: float) -> list[Finding]:
    """Return what is wrong with *run*, the worst first; nothing of a run in which all went well.

    Args:
        now_s: seconds since 1970, by the caller's clock.
    """
    some = [
        *rank_findings.two_jobs(run),
        *step_findings.overdue(summary, points),
        *step_findings.unfinished(run, points),
        *rank_findings.silent(run, points, now_s),
        *rank_findings.slow_ranks(summary, points),
        *step_findings.slower(summary, points),
        *step_findings.failures(summary, points),
        *step_findings.failed_loads(run),
        *step_findings.not_finite(run, points),
        *step_findings.damaged(run),
        *_restarts(summary),
        *_retries(run),
        *step_findings.held(summary, points),
        *_unread_traces(run),
    ]
    return sorted(some, key=lambda one: _ORDER[one.level])


def _restarts(summary: Summary) -> Iterator[Finding]:
    if not summary.restarts:
        return
    last = summary.restarts[-1]
    lost_s, down_s = (sum(getattr(one, name) for one in summary.restarts) for name in ("lost_s", "down_s"))
    often = "once" if len(summary.restarts) == 1 else f"{len(summary.restarts)} times"
    resumed = "from nothing" if last.resumed_from is None else f"from step {last.resumed_from}"
    yield Finding(
        level="warning",
        what=f"The run was begun anew {often}: {duration(lost_s)} of work lost, {duration(down_s)} down.",
        advice=f"The last time it went on {resumed}.",
        since_s=summary.restarts[0].at_s,
    )


def _retries(run: RunLog) -> Iterator[Finding]:
    calls = [(one.wall_s(event.at_ns), one.opened.rank, event) for one, event in run.told(StorageRetried)]
    if calls:
        (verb, _), *_ = Counter(event.verb for _, _, event in calls).most_common(1)
        (rank, many), *_ = Counter(rank for _, rank, _ in calls).most_common(1)
        last = max(calls, key=lambda call: call[0])
        again = "1 call to storage was" if len(calls) == 1 else f"{len(calls)} calls to storage were"
        yield Finding(
            level="note",
            what=f"{again} made again, most of them {verb}, {many} on rank {rank}.",
            advice=f"The last error was {last[2].error}.",
            since_s=min(calls, key=lambda call: call[0])[0],
            rank=rank,
        )


def _unread_traces(run: RunLog) -> Iterator[Finding]:
    """Report traces that could not be read, in whole or in part: what these ranks did is not known."""
    if run.missing:
        names = list_names(tuple(one.name for one in run.missing))
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
