"""Does the account of the demo add up?"""

from __future__ import annotations

import pytest

from aiockpt.events import Committed, SaveStarted, SnapshotTaken
from aiockpt.examples.child import StepDone
from aiockpt.examples.cost import WARM_UP_STEPS, Cost, account
from aiockpt.examples.record import Record
from aiockpt.testing.disk import DiskSpeed

DISK = DiskSpeed((100.0, 300.0, 200.0), direct=True)


def trained(steps: range, seconds: float = 1.0, slow: dict[int, float] | None = None) -> Record:
    """Return a run whose steps follow each other from time 0 and take *seconds*, or what *slow* says."""
    record, now_s = Record(), 0.0
    for step in steps:
        took_s = (slow or {}).get(step, seconds)
        now_s += took_s
        record.add(StepDone(at_ns=int(now_s * 1e9), step=step, loss=1.0, seconds=took_s))
    return record


def saved(record: Record, step: int, *, pause_s: float = 0.5, seconds: float = 0.9) -> None:
    began_ns = record.steps[step].at_ns
    record.add(SaveStarted(at_ns=began_ns, step=step, bytes=100, tensor_count=1))
    record.add(SnapshotTaken(at_ns=began_ns, step=step, bytes=100, pause_s=pause_s, copy_s=pause_s))
    ended_ns = began_ns + int(seconds * 1e9)
    record.add(Committed(at_ns=ended_ns, step=step, bytes=100, seconds=seconds, generation=1))


def test_the_account_compares_the_same_steps_without_those_at_the_start_of_a_process() -> None:
    reference = trained(range(10), seconds=1.0)
    killed, resumed = trained(range(6), seconds=1.25), trained(range(4, 10), seconds=1.5)
    saved(killed, 2, pause_s=0.1, seconds=2.0)
    saved(killed, 3, pause_s=0.3, seconds=4.0)
    saved(resumed, 5, pause_s=0.2, seconds=1.0)
    cost = account(reference, [killed, resumed], DISK)
    assert cost.timed_steps == (6 - WARM_UP_STEPS) + (6 - WARM_UP_STEPS)
    assert cost.plain_s == 6.0
    assert cost.saving_s == 3 * 1.25 + 3 * 1.5
    assert cost.overhead_fraction == pytest.approx(8.25 / 6 - 1)
    assert (cost.saves, cost.pause_median_s, cost.pause_max_s) == (3, 0.2, 0.3)
    assert (cost.commit_median_s, cost.commit_max_s) == (2.0, 4.0)
    assert (cost.save_bytes_per_s, cost.disk_bytes_per_s) == (50.0, 200.0)


def test_the_share_that_is_blocked_is_of_all_steps_of_the_runs_that_save() -> None:
    killed, resumed = trained(range(6), seconds=1.25), trained(range(4, 10), seconds=1.5)
    saved(killed, 2, pause_s=0.1)
    saved(killed, 3, pause_s=0.3)
    saved(resumed, 5, pause_s=0.2)
    cost = account(trained(range(10)), [killed, resumed], DISK)
    assert (cost.steps, cost.saves) == (12, 3)
    assert cost.blocked_s == pytest.approx(0.6)
    assert cost.blocked_fraction == pytest.approx(0.6 / (6 * 1.25 + 6 * 1.5))


def cost_of(saving: Record) -> Cost:
    return account(trained(range(20)), [saving], DISK)


def test_a_save_slowed_what_its_steps_took_longer_than_those_around_it_however_the_machine_drifts() -> None:
    saving = trained(range(20), seconds=3.0, slow={6: 3.25, 11: 3.5, 12: 3.25})
    saved(saving, 5)
    saved(saving, 10, seconds=4.0)  # beside two steps
    saved(saving, 15)
    assert cost_of(saving).slowed_s == pytest.approx(0.25)  # the median of 0.25, 0.75 and 0


def test_where_every_step_is_beside_a_save_nothing_is_said_about_one() -> None:
    saving = trained(range(20))
    for step in range(2, 19):
        saved(saving, step)
    assert cost_of(saving).slowed_s is None


def test_the_noise_is_how_far_the_steps_of_the_reference_stray_by_themselves() -> None:
    steady, noisy = trained(range(23)), trained(range(23), slow=dict.fromkeys(range(4, 23, 4), 1.5))
    saved(steady, 5)
    assert account(steady, [steady], DISK).noise_fraction == 0
    assert account(noisy, [steady], DISK).noise_fraction == pytest.approx(0.5)
    assert account(noisy, [steady], DISK).step_s == 1
