"""Which processes of a run began together? A job that is killed and begun anew has one start more.

Ranks begin within seconds of each other, and starts are farther apart: a process belongs to the start of the lowest rank
that is nearest in time, so that a start with fewer ranks, and a rank that comes back later, are told apart.
"""

from __future__ import annotations

from aiockpt.monitor.run_log import ProcessLog, RunLog


def first_starts(run: RunLog) -> list[ProcessLog]:
    """Return what the lowest rank told first in each start; of several checkpointers in one process the first."""
    lowest = min(process.opened.rank for process in run.processes)
    firsts: list[ProcessLog] = []
    for one in run.processes:
        if one.opened.rank == lowest and (not firsts or _process(one) != _process(firsts[-1])):
            firsts.append(one)
    return firsts


def start_numbers(run: RunLog) -> list[int]:
    """Return for each of the processes of *run* the number of its start, from 0."""
    times = [one.wall_s(one.opened.at_ns) for one in first_starts(run)]
    began: dict[tuple[int, int, str], float] = {}
    numbers = []
    for one in run.processes:
        at_s = began.setdefault((one.opened.rank, *_process(one)), one.wall_s(one.opened.at_ns))
        numbers.append(_nearest(times, at_s))
    return numbers


def _process(one: ProcessLog) -> tuple[int, str]:
    return one.opened.pid, one.opened.host


def _nearest(times: list[float], at_s: float) -> int:
    return min(range(len(times)), key=lambda number: abs(times[number] - at_s))
