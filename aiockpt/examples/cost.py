"""What did the checkpoints cost the training? Records in, figures out.

Two figures say how much the training was slowed, because a machine that others use drifts. The one compares whole runs,
with saves and without, minutes apart. The other compares the steps beside a save with the steps around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median, quantiles

import msgspec

from aiockpt.examples.child import StepDone
from aiockpt.examples.record import Record
from aiockpt.testing.disk import DiskSpeed

WARM_UP_STEPS = 3
"""The first steps of a process are slow with or without checkpoints, and take no part."""

NEIGHBOURHOOD = 5
"""Steps before and after a save that it is compared with."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoints cost.

    Attributes:
        steps: that the runs with saves took, those of the start of a process and those done again among them.
        saves: how many were committed.
        pause_median_s, pause_max_s: how long a save held the training.
        commit_median_s, commit_max_s: from the call until durable and visible.
        save_bytes_per_s: bytes of a save by its time to committed, the median, beside the training.
        disk_bytes_per_s: the plain writer, the median, on an idle machine.
        disk_direct: whether that writer could go past the page cache.
        blocked_s: how long saves held the training in all, of *run_s* that those runs trained and saved.
        slowed_s: how much longer the steps beside a save took, in all, than as many around it; the median of all saves.
            None when no step was free of saves.
        timed_steps: steps that were timed with and without saves; *plain_s* and *saving_s* are their sums.
        step_s: a step without saves, the median; *noise_fraction* is how far nine of ten stay from it.
    """

    steps: int
    saves: int
    pause_median_s: float
    pause_max_s: float
    commit_median_s: float
    commit_max_s: float
    save_bytes_per_s: float
    disk_bytes_per_s: float
    disk_direct: bool
    blocked_s: float
    run_s: float
    slowed_s: float | None
    timed_steps: int
    plain_s: float
    saving_s: float
    step_s: float
    noise_fraction: float

    @property
    def blocked_fraction(self) -> float:
        """The share of the time that saves held the training."""
        return self.blocked_s / self.run_s

    @property
    def overhead_fraction(self) -> float:
        """Training time with saves against without, less one."""
        return self.saving_s / self.plain_s - 1

    @property
    def overhead_is_noise(self) -> bool:
        """Whether the overhead is no larger than what steps without any save differ by among themselves."""
        return abs(self.overhead_fraction) <= self.noise_fraction

    @property
    def overhead_is_measurable(self) -> bool:
        """Whether the overhead is one: above the noise. Saves make nothing faster, so below 0 the machine drifted."""
        return self.overhead_fraction > 0 and not self.overhead_is_noise

    @property
    def slowed_is_measurable(self) -> bool:
        """Whether *slowed_s* is above what the median of so many saves strays by, were each only noise."""
        return self.slowed_s is not None and self.slowed_s > self.noise_fraction * self.step_s / math.sqrt(self.saves)


def account(reference: Record, saving: Sequence[Record], disk: DiskSpeed) -> Cost:
    """Add up what the saves of the runs *saving* cost, against *reference*, which took the same steps without."""
    pauses_s = [
        snapshot.pause_s + record.waits_s.get(step, 0.0)
        for record in saving
        for step, snapshot in record.snapshots.items()
    ]
    commits = [commit for record in saving for commit in record.commits.values()]
    slowed_s = [seconds for record in saving for seconds in _slowed_by_saves(record)]
    plain = _warm(reference)
    pairs = [(plain[step], done) for record in saving for step, done in _warm(record).items() if step in plain]
    step_s = median(done.seconds for done in plain.values())
    done = [done for record in saving for done in record.steps.values()]
    return Cost(
        steps=len(done),
        saves=len(commits),
        pause_median_s=median(pauses_s),
        pause_max_s=max(pauses_s),
        commit_median_s=median(commit.seconds for commit in commits),
        commit_max_s=max(commit.seconds for commit in commits),
        save_bytes_per_s=median(commit.bytes / commit.seconds for commit in commits),
        disk_bytes_per_s=median(disk.bytes_per_s),
        disk_direct=disk.direct,
        blocked_s=sum(pauses_s),
        run_s=sum(step.seconds for step in done),
        slowed_s=median(slowed_s) if slowed_s else None,
        timed_steps=len(pairs),
        plain_s=sum(without.seconds for without, _ in pairs),
        saving_s=sum(with_saves.seconds for _, with_saves in pairs),
        step_s=step_s,
        noise_fraction=quantiles((abs(done.seconds / step_s - 1) for done in plain.values()), n=10)[-1],
    )


def _warm(record: Record) -> dict[int, StepDone]:
    return {step: record.steps[step] for step in sorted(record.steps)[WARM_UP_STEPS:]}


def _slowed_by_saves(record: Record) -> Iterator[float]:
    """Yield for each save how many seconds longer the steps beside it took than as many of the free ones around it."""
    steps = _warm(record)
    beside = {
        save: [step for step, done in steps.items() if _overlap(done, record.starts[save].at_ns, commit.at_ns)]
        for save, commit in record.commits.items()
    }
    busy = {step for affected in beside.values() for step in affected}
    for save, affected in beside.items():
        near = range(save - NEIGHBOURHOOD, save + NEIGHBOURHOOD + 1)
        free = [steps[step].seconds for step in near if step in steps and step not in busy]
        if affected and free:
            yield sum(steps[step].seconds for step in affected) - len(affected) * median(free)


def _overlap(done: StepDone, began_ns: int, ended_ns: int) -> bool:
    return done.at_ns > began_ns and done.at_ns - done.seconds * 1e9 < ended_ns
