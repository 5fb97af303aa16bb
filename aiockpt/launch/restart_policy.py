"""The decision after a failure: restart, after how long, or stop, and why. Pure.

It stops where another start would fail alike: the same failure at the same step three times is the program's, and a run
that commits nothing between restarts, twice, repeats the same work. Of a script that tells no progress neither is known: it
is restarted as under torchrun.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec

STOPPED = 4
"""The exit status of a run that would fail again: a scheduler need not requeue it."""
PREEMPTED = {f"exit status {status}": status for status in (75, 76, 77)}
"""How trainers end that `aiockpt.Preempted` ends; the launcher ends alike."""
SAME_FAILURES = 3
FRUITLESS = 2
MOST_PAUSE_S = 30.0


def shorten(frame: str) -> str:
    """Return a file and line, or a frame that ends with them, without the folders."""
    return re.sub(r"[^ (]*/([^/]+:\d+)", r"\1", frame)


class TrainerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What ended an attempt.

    Attributes:
        kind: the type of an exception, ``signal SIGKILL``, ``exit status 1``, or ``hang``.
        where: the file and line of an exception, or the innermost frame of a hang; empty where it is not known.
        rank: on which it was seen first.
        step: that rank's; -1 where it told of none.
        told: whether the trainer told its progress.
        commits: of all saves of this attempt, on the rank with the most.
    """

    kind: str
    where: str = ""
    rank: int
    step: int = -1
    told: bool = False
    commits: int = 0

    def __str__(self) -> str:
        where = f" at {shorten(self.where)}" if self.where else ""
        step = f" in step {self.step}" if self.step >= 0 else ""
        return f"rank {self.rank}: {self.kind}{where}{step}"


class NextStart(msgspec.Struct, frozen=True):
    """What follows a failure: a restart after *pause_s*, or a stop with *status*, where *reason* is not empty."""

    pause_s: float = 0.0
    reason: str = ""
    status: int = STOPPED


class RestartPolicy:
    """Decides after each failure of one run."""

    def __init__(self) -> None:
        self._same: Counter[tuple[str, str, int]] = Counter()
        self._count = self._fruitless = self._without_commit = 0

    def decide(self, failure: TrainerFailure) -> NextStart:
        """Return what follows *failure*, of which there is one for each attempt that failed."""
        self._count += 1
        if failure.told and failure.kind in PREEMPTED:
            why = "the run was told to end, and has saved: a restart here would be ended, too"
            return NextStart(reason=why, status=PREEMPTED[failure.kind])
        # The first attempt follows no restart.
        self._fruitless = self._fruitless + 1 if failure.told and not failure.commits and self._count > 1 else 0
        self._without_commit = 0 if failure.commits else self._without_commit + 1
        if failure.told and (failure.where or failure.step >= 0):
            which = failure.kind, failure.where, failure.step
            self._same[which] += 1
            if self._same[which] >= SAME_FAILURES:
                return NextStart(reason=f"the same failure {SAME_FAILURES} times, so it is the program's: {failure}")
        if self._fruitless >= FRUITLESS:
            return NextStart(
                reason=f"no save was committed in the last {FRUITLESS} restarts, so each repeats the same steps: "
                f"save more often, or find what fails ({failure})"
            )
        failed = self._without_commit
        return NextStart(pause_s=0.0 if failed <= 1 or self._count == 1 else min(2.0 ** (failed - 2), MOST_PAUSE_S))
