"""What did the demo show? The verdict on the losses and the cost of the checkpoints, from what the runs told.

Pure: records in, figures out. Losses are compared as floats that must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from aiockpt.examples.disk import DiskSpeed
from aiockpt.examples.record import Record

WARM_UP_STEPS = 3
"""The first steps of a process are slow with or without checkpoints, and take no part in the comparison of times."""


class Difference(msgspec.Struct, frozen=True):
    """A step whose loss is not the loss of the uninterrupted run (None: the step was not taken)."""

    run: str
    step: int
    expected: float
    actual: float | None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the kill did, and what came back.

    Attributes:
        killed_in_save_of: the step whose save was under way.
        written_bytes: how much of that save was written, of *save_bytes*.
        resumed_from: the step that the second process loaded; None when it found nothing.
        lost_steps: steps that had to be taken again, which took *lost_s* seconds the first time.
        compared_steps: losses that were compared; *differences* lists those that are not equal.
    """

    killed_in_save_of: int
    written_bytes: int
    save_bytes: int
    resumed_from: int | None
    lost_steps: int
    lost_s: float
    compared_steps: int
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        """Whether the run was resumed and every loss is what it would have been."""
        return self.resumed_from is not None and not self.differences


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoints cost.

    Attributes:
        saves: how many were committed.
        pause_median_s, pause_max_s: how long a save held the training.
        commit_median_s, commit_max_s: from the call until durable and visible.
        save_bytes_per_s: bytes of a save by its time to committed, the median, beside the training.
        disk_bytes_per_s: the plain writer, the median, on an idle machine.
        disk_direct: whether that writer could go past the page cache.
        timed_steps: steps that were timed with and without saves; *plain_s* and *saving_s* are their sums.
    """

    saves: int
    pause_median_s: float
    pause_max_s: float
    commit_median_s: float
    commit_max_s: float
    save_bytes_per_s: float
    disk_bytes_per_s: float
    disk_direct: bool
    timed_steps: int
    plain_s: float
    saving_s: float

    @property
    def overhead_fraction(self) -> float:
        """Training time with saves against without, less one."""
        return self.saving_s / self.plain_s - 1


def judge(reference: Record, interrupted: Record, resumed: Record, killed_in_save_of: int) -> Recovery:
    """Compare the run that was killed and resumed with the one that was not."""
    loaded = resumed.loaded.step if resumed.loaded else None
    lost = [done for done in interrupted.steps.values() if done.step > (-1 if loaded is None else loaded)]
    expected_after = [step for step in reference.steps if step > (-1 if loaded is None else loaded)]
    return Recovery(
        killed_in_save_of=killed_in_save_of,
        written_bytes=interrupted.written_bytes[killed_in_save_of],
        save_bytes=interrupted.snapshots[killed_in_save_of].bytes,
        resumed_from=loaded,
        lost_steps=len(lost),
        lost_s=sum(done.seconds for done in lost),
        compared_steps=len(interrupted.steps) + len(expected_after),
        differences=(
            *_differences("before the kill", reference, interrupted, list(interrupted.steps)),
            *_differences("after the kill", reference, resumed, expected_after),
        ),
    )


def _differences(run: str, reference: Record, other: Record, steps: Sequence[int]) -> Iterator[Difference]:
    for step in steps:
        expected = reference.steps[step].loss
        actual = other.steps[step].loss if step in other.steps else None
        if actual != expected:
            yield Difference(run, step, expected, actual)


def account(reference: Record, saving: Sequence[Record], disk: DiskSpeed) -> Cost:
    """Add up what the saves of the runs *saving* cost, against *reference*, which took the same steps without."""
    snapshots = [snapshot for record in saving for snapshot in record.snapshots.values()]
    commits = [commit for record in saving for commit in record.commits.values()]
    plain = _warm_seconds(reference)
    pairs = [
        (plain[step], seconds)
        for record in saving
        for step, seconds in _warm_seconds(record).items()
        if step in plain
    ]
    return Cost(
        saves=len(commits),
        pause_median_s=median(snapshot.pause_s for snapshot in snapshots),
        pause_max_s=max(snapshot.pause_s for snapshot in snapshots),
        commit_median_s=median(commit.seconds for commit in commits),
        commit_max_s=max(commit.seconds for commit in commits),
        save_bytes_per_s=median(commit.bytes / commit.seconds for commit in commits),
        disk_bytes_per_s=median(disk.bytes_per_s),
        disk_direct=disk.direct,
        timed_steps=len(pairs),
        plain_s=sum(without for without, _ in pairs),
        saving_s=sum(with_saves for _, with_saves in pairs),
    )


def _warm_seconds(record: Record) -> dict[int, float]:
    steps = sorted(record.steps)[WARM_UP_STEPS:]
    return {step: record.steps[step].seconds for step in steps}
