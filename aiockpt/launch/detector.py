"""The hang detector: from the progress records and stack samples of one node's ranks to notices and a verdict. Pure.

To notice and to decide are two things. A stall is *noticed* when no rank has progressed for `STEPS` median steps and some
seconds: that is told, with stacks. It is *decided* to be a hang, which ends the processes, only when the training threads of
all ranks have stood at the same place in all samples over `PERIOD_S`, or `STEPS` median steps where those are longer.
Guarantees, without ``hang_s``:

- Nothing is noticed before the third step, nor after a checkpointer is closed.
- A process that is not seen is no hang, with ``hang_s`` neither: its script may do something else.
- A process that is *busy* is no hang: its training thread moves; it computes, reads or writes; it waits for a program that
  it has started; it wakes again and again, so it polls for something outside; what it waits for in aiockpt goes on. A
  device that hangs keeps the thread computing, as a rule: torch's own watchdog ends that.
- A thread that waits in aiockpt is given `ENGINE_S`: all that may hang there has a deadline of its own.

With ``hang_s`` the user has said how long a training thread may stand at one place, and nothing else counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Literal

import msgspec

from aiockpt.runtime.progress import ProgressRecord

STEPS = 10
SLACK_S = 3.0
"""Beside `STEPS` steps, before a stall is noticed: short steps vary more."""
PERIOD_S = 60.0
ENGINE_S = 660.0
"""Longer than the longest deadline of aiockpt's own, ten minutes."""
LEAST_SAMPLES = 4
SAMPLES = 6
"""Samples in a period."""
LEAST_STEPS = 2
MOST_APART_S = 60.0
_COMPUTING = 0.1
"""Share of a core from which on a process computes."""
_MOVING_BYTES = 1 << 20
_POLLS = 3
"""How often a thread that polls wakes of itself within a period, at least; one that hangs does not."""
_REMEMBERED = 256
_RECOMPUTED = 32
"""Steps after which the median is computed again."""

WaitsFor = Literal["", "aiockpt", "a program", "a loader"]


class StackSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a process.

    Attributes:
        place: the frames of its training thread, innermost first; empty where it did not answer.
        cpu_s: that it and its children have used.
        moved_bytes: that it has read and written.
        wakes: how often its main thread has waited.
        beside_s: when the engine did something in the background.
        waits_for: what its frames show.
        gone: whether the process that has told of this rank is not seen here: it has ended or become another program, below
            a script that goes on, or is in a container.
    """

    place: tuple[str, ...]
    cpu_s: float = 0.0
    moved_bytes: int = 0
    wakes: int = 0
    beside_s: float = 0.0
    waits_for: WaitsFor = ""
    gone: bool = False


class StallNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A stall that was noticed.

    Attributes:
        ranks: that stand: all of the node, or those that stand while others go on.
        quiet_s: since the last progress of any of them.
        median_s: of a step; 0 where it is unknown.
    """

    ranks: tuple[int, ...]
    quiet_s: float
    median_s: float
    all_stand: bool


class StallVerdict(msgspec.Struct, frozen=True):
    """What samples say of a stall: *hung*, or *why* not, by rank."""

    hung: bool
    why: Mapping[int, str] = {}


class Detector:
    """Watches the ranks of one node, from one start of their processes to the next.

    Args:
        hang_s: how long a training thread may stand at one place; None: by the median step.

    Attributes:
        median_s: of a step; 0 before it is known.
        noticed: the stall that goes on.
    """

    def __init__(self, *, hang_s: float | None = None) -> None:
        self.median_s = 0.0
        self.noticed: StallNotice | None = None
        self._hang_s = hang_s
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._counted = 0
        self._seen: dict[int, ProgressRecord] = {}
        self._behind: set[int] = set()
        self._samples: dict[int, list[tuple[float, StackSample]]] = {}
        self._why: dict[int, str] = {}
        self._next_s = self._apart_s = 0.0

    # ------------------------------------------------------------------ noticing

    def observe(self, now_s: float, records: Mapping[int, ProgressRecord]) -> StallNotice | None:
        """Take the *records* of this moment in; return a stall when it is noticed, once. `noticed` ends with it."""
        self._measure(records)
        working = {rank: record for rank, record in records.items() if record.stage != "closed"}
        limit_s = self._limit_s(working)
        if not limit_s or not working or len(working) < len(records):
            self._end_stall()
            return None
        last_s = max(record.mark_s for record in working.values())
        if now_s - last_s <= limit_s:
            self._end_stall()
            behind = {rank: last_s - record.mark_s for rank, record in working.items()}
            return self._notice_behind({rank: late_s for rank, late_s in behind.items() if late_s > limit_s})
        if self.noticed is not None:
            return None
        ranks = tuple(sorted(working))
        self.noticed = StallNotice(ranks=ranks, quiet_s=now_s - last_s, median_s=self.median_s, all_stand=True)
        self._next_s, self._apart_s = now_s, self._period_s("") / SAMPLES
        return self.noticed

    def _notice_behind(self, late_s: Mapping[int, float]) -> StallNotice | None:
        """Return a notice of ranks that stand while others go on, once for each."""
        new, self._behind = tuple(sorted(late_s.keys() - self._behind)), set(late_s)
        if not new:
            return None
        return StallNotice(ranks=new, quiet_s=max(late_s.values()), median_s=self.median_s, all_stand=False)

    def _measure(self, records: Mapping[int, ProgressRecord]) -> None:
        for rank, record in records.items():
            before = self._seen.get(rank)
            if before is not None and before.steps and record.steps > before.steps:
                self._durations.append((record.step_s - before.step_s) / (record.steps - before.steps))
                self._counted += 1
                if self._counted % _RECOMPUTED == 0 or self._counted < _RECOMPUTED:
                    self.median_s = median(self._durations)
            self._seen[rank] = record

    def _limit_s(self, records: Mapping[int, ProgressRecord]) -> float:
        """Return how long no progress is normal; 0 where that is not known yet."""
        steps = min((record.steps for record in records.values()), default=0)
        auto_s = STEPS * self.median_s + SLACK_S if steps > LEAST_STEPS and self.median_s else 0.0
        if self._hang_s is None:
            return auto_s
        return min(auto_s or self._hang_s, self._hang_s / 2)

    def _end_stall(self) -> None:
        self.noticed = None
        self._samples.clear()
        self._why.clear()

    # ------------------------------------------------------------------ deciding

    def is_sample_due(self, now_s: float) -> bool:
        """Return whether the processes should be looked at now."""
        return self.noticed is not None and now_s >= self._next_s

    def add(self, now_s: float, samples: Mapping[int, StackSample]) -> StallVerdict:
        """Take one sample of each rank in; return what all of them say."""
        moved = False
        for rank, sample in samples.items():
            window = self._samples.setdefault(rank, [])
            why = self._moved(window, now_s, sample)
            if why:
                window.clear()
                self._why[rank], moved = why, True
            window.append((now_s, sample))
        usual_s = self._period_s("") / SAMPLES
        # A process that works for an hour is not disturbed every ten seconds.
        self._apart_s = min(2 * self._apart_s, max(MOST_APART_S, usual_s)) if moved else usual_s
        first = min((len(window) for window in self._samples.values()), default=0) < 3 and not moved
        self._next_s = now_s + (min(1.0, self._apart_s) if first else self._apart_s)
        standing = {rank for rank, window in self._samples.items() if self._stands(window)}
        hung = self.noticed is not None and standing >= set(self.noticed.ranks)
        return StallVerdict(hung, {} if hung else dict(self._why))

    def _period_s(self, waits_for: WaitsFor) -> float:
        if self._hang_s is not None:
            return self._hang_s / 2
        return max(ENGINE_S if waits_for == "aiockpt" else PERIOD_S, STEPS * self.median_s)

    def _stands(self, window: list[tuple[float, StackSample]]) -> bool:
        (since_s, _), (until_s, last) = window[0], window[-1]
        return len(window) >= LEAST_SAMPLES and until_s - since_s >= self._period_s(last.waits_for)

    def _moved(self, window: list[tuple[float, StackSample]], now_s: float, sample: StackSample) -> str:
        """Return why a process is no longer where its *window* saw it; empty where it stands."""
        if sample.gone:
            return "its process is gone, or in a container"
        if not window:
            return ""
        first, (before_s, before) = window[0][1], window[-1]
        if sample.place != before.place:
            return "its training thread moves"
        if self._hang_s is not None:
            return ""
        if sample.waits_for == "a program":
            return "it waits for a program that it has started"
        if sample.cpu_s - before.cpu_s > _COMPUTING * (now_s - before_s):
            return "it computes"
        if sample.moved_bytes - before.moved_bytes > _MOVING_BYTES:
            return "it reads or writes"
        if sample.waits_for == "aiockpt" and sample.beside_s > before.beside_s:
            return "what it waits for in aiockpt goes on"
        # Each sample wakes the thread once.
        woken = sample.wakes - first.wakes - len(window)
        if sample.waits_for != "a loader" and woken >= _POLLS:
            return "it polls for something outside"
        return ""
