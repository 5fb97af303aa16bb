"""Alignment of the clocks of a run's hosts, as far as its saves prove an offset: all ranks go through them together.

A save is a round trip through the store: the first rank writes the manifest when it has seen the receipt of another one,
and that one sees the manifest when it is written. So the other's events before its receipt were before the first rank's
commit, and its events after it had read the commit came after that. Over many saves the two bounds come close: it is what
NTP does with messages. Where the wall clocks agree with both they are right, as far as can be known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from aiockpt.events import Committed, StageEnded
from aiockpt.monitor.run_log import ProcessLog, RunLog
from aiockpt.monitor.run_starts import start_numbers


class _Seen(msgspec.Struct):
    """Times of one rank's receipt for a commit, of the commit, or of reading it, by step, in ns of its own wall clock."""

    voted: dict[int, int]
    begun: dict[int, int]
    ended: dict[int, int]
    heard: dict[int, int]


def align_clocks(run: RunLog) -> RunLog:
    """Return *run* with the clocks of each start's ranks set to that of its first rank, where they contradict its saves."""
    by_start: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, number in enumerate(start_numbers(run) if run.processes else []):
        by_start[number][run.processes[place].opened.rank].append(place)
    processes = list(run.processes)
    for ranks in by_start.values():
        seen = {rank: _seen(run.processes[place] for place in places) for rank, places in ranks.items()}
        for rank, places in ranks.items():
            shift_ns = _shift(seen[min(seen)], seen[rank])
            for place in places:
                processes[place] = msgspec.structs.replace(run.processes[place], shift_ns=shift_ns)
    return msgspec.structs.replace(run, processes=processes)


def _seen(logs: Iterable[ProcessLog]) -> _Seen:
    """Return what one rank saw, through all checkpointers that it had in one start."""
    seen = _Seen({}, {}, {}, {})
    for at_ns, event in ((log.wall_ns(event.at_ns), event) for log in logs for event in log.events):
        match event:
            case StageEnded(operation="save", stage="vote", failed=False):
                seen.voted[event.step] = at_ns
            case StageEnded(operation="save", stage="commit", failed=False):
                seen.begun[event.step] = at_ns - round(event.seconds * 1e9)
                seen.ended[event.step] = at_ns
            case Committed():
                seen.heard[event.step] = at_ns
    return seen


def _shift(first: _Seen, other: _Seen) -> int:
    """Return what to add to the clock of *other*, in nanoseconds; 0 where nothing contradicts it, or nothing is certain."""
    steps = [step for step in first.begun if step in other.voted and step in other.heard and step not in other.begun]
    if not steps:
        return 0
    most = min(first.begun[step] - other.voted[step] for step in steps)
    least = max(first.ended[step] - other.heard[step] for step in steps)
    return 0 if least <= 0 <= most or least > most else (least + most) // 2
