"""The starts of a run: processes that began together. A job that is killed and begun anew has one start more.

Ranks begin within seconds of each other, and starts are farther apart: a process belongs to the start of the lowest rank
that is nearest in time, so that a start with fewer ranks, and a rank that comes back later, are distinguished.
"""

from __future__ import annotations

from aiockpt.monitor.run_log import ProcessLog, RunLog

_Process = tuple[str, int, str]


def first_starts(run: RunLog) -> list[ProcessLog]:
    """Return the first log of the lowest rank in each start; of several checkpointers in one process the first."""
    return [logs[0] for logs in leading_logs(run)]


def leading_logs(run: RunLog) -> list[list[ProcessLog]]:
    """Return the logs of the lowest rank in each start: of all checkpointers of its process, in their order."""
    lowest = min(process.opened.rank for process in run.processes)
    starts: dict[_Process, list[ProcessLog]] = {}
    for one in run.processes:
        if one.opened.rank == lowest:
            starts.setdefault(process_of(one), []).append(one)
    return list(starts.values())


def start_numbers(run: RunLog) -> list[int]:
    """Return for each of the processes of *run* the number of its start, from 0."""
    times = [one.wall_s(one.opened.at_ns) for one in first_starts(run)]
    began: dict[tuple[int, _Process], float] = {}
    numbers = []
    for one in run.processes:
        at_s = began.setdefault((one.opened.rank, process_of(one)), one.wall_s(one.opened.at_ns))
        numbers.append(_nearest(times, at_s))
    return numbers


def process_of(one: ProcessLog) -> _Process:
    """Return what distinguishes its process from all others."""
    return one.opened.host, one.opened.pid, one.opened.process


def _nearest(times: list[float], at_s: float) -> int:
    return min(range(len(times)), key=lambda number: abs(times[number] - at_s))
