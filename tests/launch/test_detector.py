"""The hang detector in virtual time: what is noticed, what is decided, and that healthy runs are left alone."""

from collections import Counter
from typing import Any

import pytest

from aiockpt.launch.detector import ENGINE_S, PERIOD_S, SLACK_S, STEPS, Detector, StackSample, StallNotice, StallVerdict
from aiockpt.runtime.progress import ProgressRecord
from tests.launch.virtual_run import COLLECTIVE, VirtualRun

STEP_S = 0.5
STANDS = StackSample(place=("acquire (train.py:7)",))


def record(step: int, at_s: float, stage: str = "train") -> ProgressRecord:
    return ProgressRecord(pid=1, thread=1, step=step, steps=step + 1, stage=stage, step_s=at_s, mark_s=at_s)


class Stalled:
    """Two ranks that have trained some steps, and then stand, rank 1 where a sample says."""

    def __init__(self, steps: int = 50, *, hang_s: float | None = None, stage: str = "train") -> None:
        self.detector = Detector(hang_s=hang_s)
        self.now_s = 100.0
        for step in range(steps):
            self.now_s += STEP_S
            self.detector.observe(self.now_s, self.records(step))
        self.last, self.since_s, self.stage = steps - 1, self.now_s, stage

    def records(self, step: int, stage: str = "train") -> dict[int, ProgressRecord]:
        return {rank: record(step, self.now_s, stage) for rank in (0, 1)}

    def notice(self, most_s: float = 7200) -> StallNotice | None:
        """Wait for a notice."""
        rows = self.records(self.last, self.stage)
        while self.now_s < self.since_s + most_s:
            self.now_s += 0.1
            if (notice := self.detector.observe(self.now_s, rows)) is not None:
                return notice
        return None

    def decide(self, most_s: float = 7200, **rates: Any) -> StallVerdict | None:
        """Wait for a decision, while rank 1 is sampled with *rates* a second; return the last verdict."""
        self.notice()
        verdict = None
        while self.now_s < self.since_s + most_s and not (verdict and verdict.hung):
            self.now_s += 0.1
            if self.detector.is_sample_due(self.now_s):
                quiet_s = self.now_s - self.since_s
                fixed = {name: value for name, value in rates.items() if isinstance(value, str | bool)}
                grown = {name: type(rate)(rate * quiet_s) for name, rate in rates.items() if name not in fixed}
                sample = StackSample(place=STANDS.place, **{"wakes": 0, **grown, **fixed})
                verdict = self.detector.add(self.now_s, {0: StackSample(place=COLLECTIVE), 1: sample})
        return verdict


def test_a_stall_is_noticed_after_ten_median_steps_and_some_seconds() -> None:
    stalled = Stalled()
    notice = stalled.notice()
    assert notice is not None
    assert notice.ranks == (0, 1)
    assert notice.quiet_s == pytest.approx(STEPS * STEP_S + SLACK_S, abs=0.2)


def test_it_is_decided_when_all_have_stood_for_a_minute() -> None:
    stalled = Stalled()
    verdict = stalled.decide()
    assert verdict is not None
    assert verdict.hung
    assert PERIOD_S < stalled.now_s - stalled.since_s < PERIOD_S + 30


def test_long_steps_take_longer_to_decide() -> None:
    detector, now_s = Detector(), 0.0
    for step in range(20):
        now_s += 60.0
        detector.observe(now_s, {0: record(step, now_s)})
    assert detector.observe(now_s + 590, {0: record(19, now_s)}) is None
    assert detector.observe(now_s + 604, {0: record(19, now_s)}) is not None
    verdicts = [detector.add(now_s + 604 + second, {0: STANDS}) for second in range(0, 590, 50)]
    assert not any(verdict.hung for verdict in verdicts)


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ({"cpu_s": 0.5}, "it computes"),
        ({"moved_bytes": 1 << 20}, "it reads or writes"),
        ({"wakes": 1}, "it polls for something outside"),
        ({"waits_for": "a program"}, "it waits for a program that it has started"),
        ({"waits_for": "aiockpt", "beside_s": 1.0}, "what it waits for in aiockpt goes on"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_busy_process_is_never_hung(rates: dict[str, Any], why: str) -> None:
    verdict = Stalled().decide(**rates)
    assert verdict is not None
    assert not verdict.hung
    assert verdict.why[1] == why


@pytest.mark.parametrize("hang_s", [None, 10.0])
def test_a_process_that_is_not_seen_is_never_hung(hang_s: float | None) -> None:
    verdict = Stalled(hang_s=hang_s).decide(gone=True)
    assert verdict is not None
    assert not verdict.hung
    assert verdict.why[1] == "its process is gone, or in a container"


def test_a_wait_in_aiockpt_is_given_its_own_deadlines() -> None:
    stalled = Stalled()
    verdict = stalled.decide(waits_for="aiockpt")
    assert verdict is not None
    assert verdict.hung
    assert stalled.now_s - stalled.since_s > ENGINE_S


def test_a_loader_that_polls_its_dead_workers_hangs() -> None:
    verdict = Stalled().decide(waits_for="a loader", wakes=1)
    assert verdict is not None
    assert verdict.hung


def test_seconds_of_the_user_decide_alone() -> None:
    stalled = Stalled(hang_s=10.0)
    verdict = stalled.decide(cpu_s=1.0, waits_for="a program")
    assert verdict is not None
    assert verdict.hung
    assert 9 < stalled.now_s - stalled.since_s < 13


@pytest.mark.parametrize(("steps", "stage"), [(2, "train"), (50, "closed")])
def test_nothing_is_noticed_before_two_steps_and_behind_the_end(steps: int, stage: str) -> None:
    assert Stalled(steps, stage=stage).notice() is None


def test_seconds_of_the_user_count_before_the_first_steps() -> None:
    assert Stalled(1, hang_s=30.0).notice() is not None


def test_a_stall_that_goes_on_by_itself_is_forgotten() -> None:
    stalled = Stalled()
    assert stalled.notice() is not None
    stalled.now_s += 1
    assert stalled.detector.observe(stalled.now_s, stalled.records(50)) is None
    assert stalled.detector.noticed is None
    assert not stalled.detector.is_sample_due(stalled.now_s + 100)


def test_a_rank_that_stands_while_others_go_on_is_noticed_once() -> None:
    stalled = Stalled()
    behind = record(stalled.last, stalled.now_s)
    notices = []
    for step in range(50, 100):
        stalled.now_s += STEP_S
        notices.append(stalled.detector.observe(stalled.now_s, {0: record(step, stalled.now_s), 1: behind}))
    (notice,) = filter(None, notices)
    assert (notice.ranks, notice.all_stand) == ((1,), False)


def test_samples_of_a_process_that_works_for_long_become_rare() -> None:
    stalled = Stalled()
    stalled.notice()
    taken = 0
    for tenth in range(36_000):
        now_s = stalled.now_s + tenth / 10
        if stalled.detector.is_sample_due(now_s):
            taken += 1
            stalled.detector.add(
                now_s, {0: StackSample(place=COLLECTIVE), 1: StackSample(place=(f"f (x.py:{taken})",))}
            )
    assert taken < 80


@pytest.mark.parametrize("seed", range(4))
def test_ten_hours_of_a_healthy_run_are_left_alone(seed: int) -> None:
    outcomes: Counter[str] = VirtualRun(seed, 10.0).run()
    assert outcomes["hours"] == 10
    assert outcomes["notices in a long phase"]
    assert not outcomes["FALSE NOTICES"]
