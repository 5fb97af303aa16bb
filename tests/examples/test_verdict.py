"""Does the verdict of the demo notice every loss that is not the reference's?"""

from __future__ import annotations

import math

from aiockpt.events import BytesWritten, Committed, Loaded, SaveFailed, SaveStarted, SnapshotTaken
from aiockpt.examples.child import StepDone
from aiockpt.examples.record import Record
from aiockpt.examples.verdict import Difference, Recovery, judge


def trained(steps: range, seconds: float = 1.0) -> Record:
    record = Record()
    for step in steps:
        record.add(StepDone(at_ns=0, step=step, loss=1 / (step + 1), seconds=seconds))
    return record


def saved(record: Record, step: int, *, committed: bool = True, pause_s: float = 0.5, seconds: float = 2.0) -> None:
    record.add(SaveStarted(at_ns=0, step=step, bytes=100, tensor_count=1))
    record.add(SnapshotTaken(at_ns=0, step=step, bytes=100, pause_s=pause_s, copy_s=pause_s))
    record.add(BytesWritten(at_ns=0, step=step, bytes=40))
    if committed:
        record.add(Committed(at_ns=0, step=step, bytes=100, seconds=seconds, generation=1))


def killed_run() -> Record:
    record = trained(range(7))
    saved(record, 2)
    saved(record, 4, committed=False)
    return record


def resumed_run(loaded: int | None = 2, end: int = 10) -> Record:
    record = trained(range(0 if loaded is None else loaded + 1, end))
    if loaded is not None:
        record.add(Loaded(at_ns=0, step=loaded, bytes=100, read_bytes=100, seconds=1.0))
    return record


def verdict(resumed: Record, killed: Record | None = None) -> Recovery:
    return judge(trained(range(10)), killed or killed_run(), resumed, killed_in_save_of=4)


def test_a_run_whose_losses_are_all_equal_is_exact() -> None:
    recovery = verdict(resumed_run())
    assert recovery.exact
    assert recovery.differences == ()
    assert recovery.compared_steps == 7 + 7
    assert recovery.resumed_from == 2
    assert (recovery.lost_steps, recovery.lost_s) == (4, 4.0)
    assert (recovery.written_bytes, recovery.save_bytes) == (40, 100)


def test_a_loss_that_differs_in_the_last_bit_after_the_kill_is_a_difference() -> None:
    resumed = resumed_run()
    off = math.nextafter(1 / 9, 1)
    resumed.add(StepDone(at_ns=0, step=8, loss=off, seconds=1.0))
    recovery = verdict(resumed)
    assert not recovery.exact
    assert recovery.differences == (Difference("resumed", 8, 1 / 9, off),)


def test_a_loss_that_differs_before_the_kill_is_a_difference() -> None:
    killed = killed_run()
    killed.add(StepDone(at_ns=0, step=1, loss=0.75, seconds=1.0))
    assert verdict(resumed_run(), killed).differences == (Difference("killed", 1, 0.5, 0.75),)


def test_a_step_that_the_resumed_run_never_took_is_a_difference() -> None:
    assert verdict(resumed_run(end=9)).differences == (Difference("resumed", 9, 0.1, None),)


def test_a_run_that_found_nothing_to_resume_from_is_not_exact_even_when_its_losses_are_equal() -> None:
    recovery = verdict(resumed_run(loaded=None))
    assert recovery.differences == ()
    assert not recovery.exact


def test_a_run_that_resumed_from_an_older_step_than_the_newest_committed_is_not_exact() -> None:
    killed = killed_run()
    saved(killed, 3)
    recovery = verdict(resumed_run(loaded=2), killed)
    assert recovery.newest_committed == 3
    assert recovery.differences == ()
    assert not recovery.exact


def test_the_samples_show_the_step_that_was_loaded_beside_its_neighbours_and_the_last() -> None:
    samples = verdict(resumed_run()).samples
    assert [sample.step for sample in samples] == [1, 2, 3, 4, 9]
    assert [sample.killed is None for sample in samples] == [False, False, False, False, True]
    assert [sample.resumed is None for sample in samples] == [True, True, False, False, False]


def test_a_save_is_in_flight_until_it_is_committed_or_has_failed() -> None:
    record = Record()
    saved(record, 1)
    saved(record, 2, committed=False)
    saved(record, 3, committed=False)
    assert record.in_flight == 2
    record.add(SaveFailed(at_ns=0, step=2, error="no space", seconds=1.0))
    assert record.in_flight == 1
