"""The judgement of a phase: every loss that is not the reference's is noticed; and the account of the saves."""

from __future__ import annotations

import math

import msgspec
import pytest

from aiockpt.events import BarrierWaited, BytesWritten, Committed, Loaded, SnapshotTaken
from aiockpt.tools.examples.child import StepDone
from aiockpt.tools.examples.demo import DIFFERENT, EXACT, ONE_PROCESS, DemoOptions, conclude
from aiockpt.tools.examples.phases import Outcome, RankRecord, account, judge

_, KILLED, RESUMED = ONE_PROCESS


def trained(steps: range, seconds: float = 1.0, loaded: int | None = None) -> RankRecord:
    """Return a run of these steps, which take *seconds* each, from the step *loaded*."""
    record = RankRecord()
    if loaded is not None:
        record.add(Loaded(at_ns=0, step=loaded, bytes=100, read_bytes=120, seconds=1.0))
    for step in steps:
        record.add(StepDone(at_ns=0, step=step, loss=1 / (step + 1), seconds=seconds))
    return record


def saved(record: RankRecord, step: int, *, pause_s: float, seconds: float) -> None:
    record.add(SnapshotTaken(at_ns=0, step=step, bytes=100, pause_s=pause_s / 2, copy_s=pause_s))
    record.add(BarrierWaited(at_ns=0, step=step, seconds=pause_s / 2))
    record.add(BytesWritten(at_ns=0, step=step, bytes=40))
    record.add(Committed(at_ns=0, step=step, bytes=100, seconds=seconds, generation=1))


def test_the_account_has_pauses_commits_and_the_blocked_share_of_all_runs() -> None:
    killed, resumed = trained(range(6), seconds=1.25), trained(range(4, 10), seconds=1.5)
    saved(killed, 2, pause_s=0.1, seconds=2.0)
    saved(killed, 3, pause_s=0.3, seconds=4.0)
    saved(resumed, 5, pause_s=0.2, seconds=1.0)
    cost = account([killed, resumed])
    assert (cost["steps"], cost["saves"], cost["pause_median_s"], cost["pause_max_s"]) == (12, 3, 0.2, 0.3)
    assert cost["commit_median_s"] == 2.0
    assert cost["blocked_fraction"] == pytest.approx(0.6 / (6 * 1.25 + 6 * 1.5))
    assert killed.written_bytes[3] == 40


def verdict(record: RankRecord, newest: int | None = 2, *, exact: bool = True) -> Outcome:
    phase = msgspec.structs.replace(RESUMED, exact=exact)
    return judge(phase, {0: record}, trained(range(10)).losses, newest)


def test_a_run_whose_losses_are_all_equal_passes() -> None:
    outcome = verdict(trained(range(3, 10), loaded=2))
    assert outcome.passed
    assert (outcome.compared, outcome.differences, outcome.resumed_from) == (7, (), 2)
    assert "from step 2, the newest committed was 2 (120 B read for 100 B); 7 of 7 losses equal" in str(outcome)


def test_a_loss_that_differs_in_its_last_bit_is_a_difference() -> None:
    record, off = trained(range(3, 10), loaded=2), math.nextafter(1 / 9, 1)
    record.add(StepDone(at_ns=0, step=8, loss=off, seconds=1.0))
    outcome = verdict(record)
    assert outcome.differences == ((8, 1 / 9, off),)
    assert not outcome.passed
    assert f"step 8: loss {off!r} instead of {1 / 9!r}" in str(outcome)
    assert verdict(record, exact=False).passed, "it is close"
    record.add(StepDone(at_ns=0, step=8, loss=0.5, seconds=1.0))
    assert not verdict(record, exact=False).passed


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_that_is_no_number_is_a_difference(exact: bool) -> None:
    record = trained(range(3, 10), loaded=2)
    record.add(StepDone(at_ns=0, step=8, loss=math.nan, seconds=1.0))
    assert not verdict(record, exact=exact).passed


def test_a_loss_that_differs_before_the_kill_is_a_difference() -> None:
    record = trained(range(7))
    record.add(StepDone(at_ns=0, step=1, loss=0.75, seconds=1.0))
    assert judge(KILLED, {0: record}, trained(range(10)).losses, None).differences == ((1, 0.5, 0.75),)
    assert judge(KILLED, {0: trained(range(7))}, trained(range(10)).losses, None).passed


def test_a_step_that_the_resumed_run_never_took_is_a_difference() -> None:
    assert verdict(trained(range(3, 9), loaded=2)).differences == ((9, 0.1, None),)


@pytest.mark.parametrize("record", [trained(range(10)), trained(range(3, 10), loaded=2)], ids=["nothing", "older"])
def test_a_run_that_lost_a_committed_step_does_not_pass_though_losses_are_equal(record: RankRecord) -> None:
    outcome = verdict(record, newest=3)
    assert outcome.differences == ()
    assert not outcome.passed


def test_the_verdict_names_the_phases_whose_losses_differ() -> None:
    said: list[str] = []
    record = trained(range(10))
    saved(record, 2, pause_s=0.1, seconds=2.0)
    good, bad = verdict(trained(range(3, 10), loaded=2)), verdict(trained(range(3, 9), loaded=2))
    assert conclude(DemoOptions(), [good], account([record]), said.append) == EXACT
    assert conclude(DemoOptions(), [good, bad], account([record]), said.append) == DIFFERENT
    assert "1 saves in 10 steps blocked 1.00% of the training" in said[0]
    assert said[1].startswith("The run went on")
    assert said[-1].endswith("a committed step was lost: resumed.")
