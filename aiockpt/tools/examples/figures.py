"""Comparison of the losses of runs, and the cost of their checkpoints. Records in, figures (as ``--json`` prints) out.

Losses are compared as floats that must be equal, not close. Two figures show how much saves slow the training, because a
shared machine drifts: one compares whole runs, with saves and without, minutes apart; the other compares the steps beside
a save with the steps around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

from aiockpt.events import Committed, Loaded, SaveStarted, SnapshotTaken
from aiockpt.testing.disk import DiskSpeed
from aiockpt.tools.examples.child import RankRecord, StepDone

WARM_UP_STEPS = 3
"""The first steps of a process are slow with or without checkpoints, and are not counted."""
NEIGHBOURHOOD = 5
"""Steps before and after a save with which the steps beside it are compared."""

Figures = dict[str, Any]


def judge(reference: RankRecord, killed: RankRecord, resumed: RankRecord, killed_in_save_of: int) -> Figures:
    """Compare the run that was killed and resumed with the one that was not.

    ``exact``: no committed step was lost, and every loss equals the reference's. ``differences`` are losses that do not;
    None for a step that was not taken. ``samples`` are the losses around the step that was loaded, and the last.
    """
    expected, before, after = reference.losses, killed.losses, resumed.losses
    loaded, newest = max(resumed[Loaded], default=None), max(killed[Committed])
    again = [step for step in expected if loaded is None or step > loaded]
    lost = [done.seconds for step, done in killed[StepDone].items() if step in again]
    near = {step for step in expected if loaded is not None and loaded - 1 <= step <= loaded + 2}
    compared = [("killed", step, before.get(step)) for step in before]
    compared += [("resumed", step, after.get(step)) for step in again]
    differences = [
        {"run": run, "step": step, "expected": expected[step], "actual": loss}
        for run, step, loss in compared
        if loss != expected[step]
    ]
    return {
        "exact": loaded is not None and loaded >= newest and not differences,
        "killed_in_save_of": killed_in_save_of,
        "written_bytes": killed.written_bytes[killed_in_save_of],
        "save_bytes": max(commit.bytes for commit in killed[Committed].values()),
        "newest_committed": newest,
        "resumed_from": loaded,
        "lost_steps": len(lost),
        "lost_s": sum(lost),
        "compared_steps": len(compared),
        "differences": differences,
        "samples": [
            {"step": step, "reference": expected[step], "killed": before.get(step), "resumed": after.get(step)}
            for step in sorted({*near, max(expected)})
        ],
    }


def account(reference: RankRecord, saving: Sequence[RankRecord], disk: DiskSpeed) -> Figures:
    """Add up the cost of the saves of the runs *saving*, against *reference*, which took the same steps without saves.

    ``disk_bytes_per_s`` is a plain writer's on the idle machine. ``noise_fraction``: the distance from
    their median within which nine of ten steps without saves stay. ``slowed_s``: extra time of the steps beside a save
    over as many around it, the median of all saves; None when no step was free of saves. An overhead is measurable above
    the noise; below 0 the machine drifted, since saves make nothing faster.
    """
    pauses_s = [it.pause_s + run.waits_s[step] for run in saving for step, it in run[SnapshotTaken].items()]
    commits = [commit for record in saving for commit in record[Committed].values()]
    commits_s = [commit.seconds for commit in commits]
    done_s = [done.seconds for record in saving for done in record[StepDone].values()]
    slowed = [seconds for record in saving for seconds in _slowed_by_saves(record)]
    slowed_s = median(slowed) if slowed else None
    plain = _warm(reference)
    pairs = [(plain[step], seconds) for record in saving for step, seconds in _warm(record).items() if step in plain]
    plain_s, saving_s = (sum(seconds) for seconds in zip(*pairs, strict=True))
    step_s = median(plain.values())
    noise = quantiles((abs(seconds / step_s - 1) for seconds in plain.values()), n=10)[-1]
    overhead = saving_s / plain_s - 1
    return {
        "steps": len(done_s),
        "saves": len(commits),
        "pause_median_s": median(pauses_s),
        "pause_max_s": max(pauses_s),
        "commit_median_s": median(commits_s),
        "commit_max_s": max(commits_s),
        "save_bytes_per_s": median(commit.bytes / commit.seconds for commit in commits),
        "disk_bytes_per_s": median(disk.bytes_per_s),
        "disk_direct": disk.direct,
        "blocked_s": sum(pauses_s),
        "run_s": sum(done_s),
        "slowed_s": slowed_s,
        "timed_steps": len(pairs),
        "plain_s": plain_s,
        "saving_s": saving_s,
        "step_s": step_s,
        "noise_fraction": noise,
        "blocked_fraction": sum(pauses_s) / sum(done_s),
        "overhead_fraction": overhead,
        "overhead_is_noise": abs(overhead) <= noise,
        "overhead_is_measurable": overhead > noise,
        # the spread of the median of so many saves if each were only noise
        "slowed_is_measurable": slowed_s is not None and slowed_s > noise * step_s / math.sqrt(len(commits)),
    }


def _warm(record: RankRecord) -> dict[int, float]:
    return {step: record[StepDone][step].seconds for step in sorted(record[StepDone])[WARM_UP_STEPS:]}


def _slowed_by_saves(record: RankRecord) -> Iterator[float]:
    """Yield for each save the extra seconds of the steps beside it over as many free steps around it."""
    steps, ended_ns = _warm(record), {step: done.at_ns for step, done in record[StepDone].items()}
    beside = {
        save: [
            step
            for step, seconds in steps.items()
            if record[SaveStarted][save].at_ns < ended_ns[step] and ended_ns[step] - seconds * 1e9 < commit.at_ns
        ]
        for save, commit in record[Committed].items()
    }
    busy = {step for affected in beside.values() for step in affected}
    for save, affected in beside.items():
        near = range(save - NEIGHBOURHOOD, save + NEIGHBOURHOOD + 1)
        free = [steps[step] for step in near if step in steps and step not in busy]
        if affected and free:
            yield sum(steps[step] for step in affected) - len(affected) * median(free)
