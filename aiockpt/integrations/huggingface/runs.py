"""Runs of one process that save to one place: the second ``train()``, the next fold of a cross-validation.

Each finished ``train()`` is a run of its own. The steps of the first have the numbers of the Trainer, those of the n-th
begin at ``(n - 1) * RUN``. So a run never resumes, overwrites or deletes the steps of another one. A new process that
makes the same calls finds each run again: the finished ones, and the one that was in progress.
"""

from __future__ import annotations

import os
from collections import Counter

RUN = 10**9
"""Offset between the step numbers of two runs; no run has that many steps."""

_finished: Counter[tuple[int, str]] = Counter()
"""Number of runs that this process, by its id, has finished in a place."""


def next_run(place: str) -> int:
    """Return the number, from 0, of the run that begins now; a failed or interrupted run is begun again."""
    return _finished[os.getpid(), place]


def finish_run(place: str) -> None:
    """Note that a run has ended."""
    _finished[os.getpid(), place] += 1


def is_first_run() -> bool:
    """Return whether this process has not finished a run yet, in any place."""
    return not any(process == os.getpid() for process, _ in _finished)


def run_of(step: int) -> int:
    return step // RUN


def step_in_run(step: int) -> int:
    """Return the number that the Trainer gave to a saved step."""
    return step % RUN
