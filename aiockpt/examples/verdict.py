"""Did the run that was killed go on exactly as if nothing had happened? Records in, verdict out.

Losses are compared as floats that must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from aiockpt.examples.record import Record


class Difference(msgspec.Struct, frozen=True):
    """A step whose loss is not the loss of the uninterrupted run (None: the step was not taken)."""

    run: str
    step: int
    expected: float
    actual: float | None


class Sample(msgspec.Struct, frozen=True):
    """The losses of one step in each run, to be looked at side by side; None where a run did not take it."""

    step: int
    reference: float
    killed: float | None
    resumed: float | None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the kill did, and what came back.

    Attributes:
        killed_in_save_of: the step whose save was under way.
        written_bytes: how much of that save was written; a whole one is *save_bytes*.
        newest_committed: the newest step that was reported as committed before the kill.
        resumed_from: the step that the second process loaded; None when it found nothing.
        lost_steps: steps that had to be taken again, which took *lost_s* seconds the first time.
        compared_steps: losses that were compared; *differences* lists those that are not equal.
        samples: some of the losses: around the step that was loaded, and the last.
    """

    killed_in_save_of: int
    written_bytes: int
    save_bytes: int
    newest_committed: int
    resumed_from: int | None
    lost_steps: int
    lost_s: float
    compared_steps: int
    differences: tuple[Difference, ...]
    samples: tuple[Sample, ...]

    @property
    def exact(self) -> bool:
        """Whether no committed step was lost and every loss is what it would have been."""
        return self.resumed_from is not None and self.resumed_from >= self.newest_committed and not self.differences


def judge(reference: Record, killed: Record, resumed: Record, killed_in_save_of: int) -> Recovery:
    """Compare the run that was killed and resumed with the one that was not."""
    loaded = resumed.loaded.step if resumed.loaded else None
    again = [step for step in reference.steps if loaded is None or step > loaded]
    lost = [killed.steps[step] for step in again if step in killed.steps]
    near = [step for step in reference.steps if loaded is not None and loaded - 1 <= step <= loaded + 2]
    return Recovery(
        killed_in_save_of=killed_in_save_of,
        written_bytes=killed.written_bytes[killed_in_save_of],
        save_bytes=max(commit.bytes for commit in killed.commits.values()),
        newest_committed=max(killed.commits),
        resumed_from=loaded,
        lost_steps=len(lost),
        lost_s=sum(done.seconds for done in lost),
        compared_steps=len(killed.steps) + len(again),
        differences=(
            *_differences("killed", reference, killed, list(killed.steps)),
            *_differences("resumed", reference, resumed, again),
        ),
        samples=tuple(
            Sample(step, reference.steps[step].loss, _loss(killed, step), _loss(resumed, step))
            for step in sorted({*near, max(reference.steps)})
        ),
    )


def _loss(record: Record, step: int) -> float | None:
    return record.steps[step].loss if step in record.steps else None


def _differences(run: str, reference: Record, other: Record, steps: Sequence[int]) -> Iterator[Difference]:
    for step in steps:
        expected = reference.steps[step].loss
        actual = _loss(other, step)
        if actual != expected:
            yield Difference(run, step, expected, actual)
