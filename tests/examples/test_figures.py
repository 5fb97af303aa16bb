"""The demo notices every loss that is not the reference's, and its account adds up."""

from __future__ import annotations

import math

import pytest

from aiockpt.events import BytesWritten, Committed, Loaded, SaveFailed, SaveStarted, SnapshotTaken
from aiockpt.testing.disk import DiskSpeed
from aiockpt.tools.examples.child import RankRecord, StepDone
from aiockpt.tools.examples.figures import WARM_UP_STEPS, Figures, account, judge

DISK = DiskSpeed((100.0, 300.0, 200.0), direct=True)


def trained(steps: range, seconds: float = 1.0, slow: dict[int, float] | None = None) -> RankRecord:
    """Return a run whose steps follow each other from time 0 and take *seconds*, or what *slow* says."""
    record, now_s = RankRecord(), 0.0
    for step in steps:
        took_s = (slow or {}).get(step, seconds)
        now_s += took_s
        record.add(StepDone(at_ns=int(now_s * 1e9), step=step, loss=1 / (step + 1), seconds=took_s))
    return record


def saved(record: RankRecord, step: int, *, pause_s: float = 0.5, seconds: float = 0.9, committed: bool = True) -> None:
    began_ns = record[StepDone][step].at_ns
    record.add(SaveStarted(at_ns=began_ns, step=step, bytes=100, tensor_count=1))
    record.add(SnapshotTaken(at_ns=began_ns, step=step, bytes=100, pause_s=pause_s, copy_s=pause_s))
    record.add(BytesWritten(at_ns=began_ns, step=step, bytes=40))
    if committed:
        ended_ns = began_ns + int(seconds * 1e9)
        record.add(Committed(at_ns=ended_ns, step=step, bytes=100, seconds=seconds, generation=1))


def test_the_account_compares_the_same_steps_without_those_at_the_start_of_a_process() -> None:
    reference = trained(range(10), seconds=1.0)
    killed, resumed = trained(range(6), seconds=1.25), trained(range(4, 10), seconds=1.5)
    saved(killed, 2, pause_s=0.1, seconds=2.0)
    saved(killed, 3, pause_s=0.3, seconds=4.0)
    saved(resumed, 5, pause_s=0.2, seconds=1.0)
    cost = account(reference, [killed, resumed], DISK)
    assert cost["timed_steps"] == (6 - WARM_UP_STEPS) + (6 - WARM_UP_STEPS)
    assert cost["plain_s"] == 6.0
    assert cost["saving_s"] == 3 * 1.25 + 3 * 1.5
    assert cost["overhead_fraction"] == pytest.approx(8.25 / 6 - 1)
    assert (cost["saves"], cost["pause_median_s"], cost["pause_max_s"]) == (3, 0.2, 0.3)
    assert (cost["commit_median_s"], cost["commit_max_s"]) == (2.0, 4.0)
    assert (cost["save_bytes_per_s"], cost["disk_bytes_per_s"]) == (50.0, 200.0)


def test_the_share_that_is_blocked_is_of_all_steps_of_the_runs_that_save() -> None:
    killed, resumed = trained(range(6), seconds=1.25), trained(range(4, 10), seconds=1.5)
    saved(killed, 2, pause_s=0.1)
    saved(killed, 3, pause_s=0.3)
    saved(resumed, 5, pause_s=0.2)
    cost = account(trained(range(10)), [killed, resumed], DISK)
    assert (cost["steps"], cost["saves"]) == (12, 3)
    assert cost["blocked_s"] == pytest.approx(0.6)
    assert cost["blocked_fraction"] == pytest.approx(0.6 / (6 * 1.25 + 6 * 1.5))


def cost_of(saving: RankRecord) -> Figures:
    return account(trained(range(20)), [saving], DISK)


def test_a_save_slowed_what_its_steps_took_longer_than_those_around_it_however_the_machine_drifts() -> None:
    saving = trained(range(20), seconds=3.0, slow={6: 3.25, 11: 3.5, 12: 3.25})
    saved(saving, 5)
    saved(saving, 10, seconds=4.0)  # beside two steps
    saved(saving, 15)
    assert cost_of(saving)["slowed_s"] == pytest.approx(0.25)  # the median of 0.25, 0.75 and 0


def test_where_every_step_is_beside_a_save_nothing_is_said_about_one() -> None:
    saving = trained(range(20))
    for step in range(2, 19):
        saved(saving, step)
    assert cost_of(saving)["slowed_s"] is None


def test_the_noise_is_how_far_the_steps_of_the_reference_stray_by_themselves() -> None:
    steady, noisy = trained(range(23)), trained(range(23), slow=dict.fromkeys(range(4, 23, 4), 1.5))
    saved(steady, 5)
    assert account(steady, [steady], DISK)["noise_fraction"] == 0
    assert account(noisy, [steady], DISK)["noise_fraction"] == pytest.approx(0.5)
    assert account(noisy, [steady], DISK)["step_s"] == 1


@pytest.mark.parametrize(
    ("seconds", "save_step_s", "overhead", "slowed"),
    [(0.5, 0.5, False, False), (1.25, 1.5, False, False), (1.75, 3.0, True, True)],
    ids=["faster", "in the noise", "beyond the noise"],
)
def test_a_cost_is_measurable_beyond_the_noise(
    seconds: float, save_step_s: float, overhead: bool, slowed: bool
) -> None:
    noisy = trained(range(23), slow=dict.fromkeys(range(4, 23, 4), 1.5))
    saving = trained(range(23), seconds, slow={11: save_step_s})
    saved(saving, 10, seconds=0.4)
    cost = account(noisy, [saving], DISK)
    assert (cost["overhead_is_measurable"], cost["slowed_is_measurable"]) == (overhead, slowed)


def killed_run() -> RankRecord:
    record = trained(range(7))
    saved(record, 2)
    saved(record, 4, committed=False)
    return record


def resumed_run(loaded: int | None = 2, end: int = 10) -> RankRecord:
    record = trained(range(0 if loaded is None else loaded + 1, end))
    if loaded is not None:
        record.add(Loaded(at_ns=0, step=loaded, bytes=100, read_bytes=100, seconds=1.0))
    return record


def verdict(resumed: RankRecord, killed: RankRecord | None = None) -> Figures:
    return judge(trained(range(10)), killed or killed_run(), resumed, killed_in_save_of=4)


def test_a_run_whose_losses_are_all_equal_is_exact() -> None:
    recovery = verdict(resumed_run())
    assert recovery["exact"]
    assert recovery["differences"] == []
    assert recovery["compared_steps"] == 7 + 7
    assert recovery["resumed_from"] == 2
    assert (recovery["lost_steps"], recovery["lost_s"]) == (4, 4.0)
    assert (recovery["written_bytes"], recovery["save_bytes"]) == (40, 100)


def test_a_loss_that_differs_in_the_last_bit_after_the_kill_is_a_difference() -> None:
    resumed = resumed_run()
    off = math.nextafter(1 / 9, 1)
    resumed.add(StepDone(at_ns=0, step=8, loss=off, seconds=1.0))
    recovery = verdict(resumed)
    assert not recovery["exact"]
    assert recovery["differences"] == [{"run": "resumed", "step": 8, "expected": 1 / 9, "actual": off}]


def test_a_loss_that_differs_before_the_kill_is_a_difference() -> None:
    killed = killed_run()
    killed.add(StepDone(at_ns=0, step=1, loss=0.75, seconds=1.0))
    assert verdict(resumed_run(), killed)["differences"] == [
        {"run": "killed", "step": 1, "expected": 0.5, "actual": 0.75}
    ]


def test_a_step_that_the_resumed_run_never_took_is_a_difference() -> None:
    assert verdict(resumed_run(end=9))["differences"] == [
        {"run": "resumed", "step": 9, "expected": 0.1, "actual": None}
    ]


def test_a_run_that_found_nothing_to_resume_from_is_not_exact_even_when_its_losses_are_equal() -> None:
    recovery = verdict(resumed_run(loaded=None))
    assert recovery["differences"] == []
    assert not recovery["exact"]


def test_a_run_that_resumed_from_an_older_step_than_the_newest_committed_is_not_exact() -> None:
    killed = killed_run()
    saved(killed, 3)
    recovery = verdict(resumed_run(loaded=2), killed)
    assert recovery["newest_committed"] == 3
    assert recovery["differences"] == []
    assert not recovery["exact"]


def test_the_samples_show_the_step_that_was_loaded_beside_its_neighbours_and_the_last() -> None:
    samples = verdict(resumed_run())["samples"]
    assert [sample["step"] for sample in samples] == [1, 2, 3, 4, 9]
    assert [sample["killed"] is None for sample in samples] == [False, False, False, False, True]
    assert [sample["resumed"] is None for sample in samples] == [True, True, False, False, False]


def test_a_save_is_in_flight_until_it_is_committed_or_has_failed() -> None:
    record = trained(range(4))
    saved(record, 1)
    saved(record, 2, committed=False)
    saved(record, 3, committed=False)
    assert record.in_flight == 2
    record.add(SaveFailed(at_ns=0, step=2, error="no space", seconds=1.0))
    assert record.in_flight == 1
