"""The promises of the cadence in whole runs, with noise, slow storage and odd clocks."""

import itertools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import UsageError
from aiockpt.events import Committed, SaveFailed, SaveSkipped, SaveStarted, SnapshotTaken
from aiockpt.policies.cadence import Cadence
from tests.cadence.runs import Watched, save
from tests.example_counts import examples
from tests.simulated.simulation import SimulatedClock


@examples(25)
@given(
    seed=st.integers(0, 1000),
    max_overhead=st.sampled_from([0.005, 0.03, 0.2]),
    pause_s=st.sampled_from([0.0, 0.003, 0.2, 4.0]),
    write_s=st.sampled_from([0.0, 0.3, 8.0, 40.0]),
    noise=st.sampled_from([0.0, 0.2, 0.6]),
    shared=st.booleans(),
    in_flight=st.just(2),
)
def test_what_saves_block_stays_within_the_bound_whatever_the_noise(
    seed: int, max_overhead: float, pause_s: float, write_s: float, noise: float, shared: bool, in_flight: int
) -> None:
    run = Watched.whole(seed, max_overhead=max_overhead, pause_s=pause_s, write_s=write_s, noise=noise, shared=shared,
                  in_flight=in_flight)  # fmt: skip
    worst_s = max((event.pause_s for event in run.events if isinstance(event, SnapshotTaken)), default=0.0)
    assert run.saved
    assert run.blocked_s <= max_overhead * run.trained_s + 3 * worst_s


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("write_s", [7.0, 31.0])
def test_saves_come_no_faster_than_the_storage_takes_them_and_never_wait_for_room(shared: bool, write_s: float) -> None:
    run = Watched.whole(3, pause_s=0.0001, write_s=write_s, shared=shared, noise=0.1)
    settled = run.gaps()[20:]
    assert write_s <= sum(settled) / len(settled) <= write_s * 1.5
    assert run.blocked_s < 0.001 * len(run.saved)
    assert run.intervals[-1][1] == "write"


def test_where_nothing_costs_anything_each_step_is_saved() -> None:
    run = Watched.whole(pause_s=0.00001, write_s=0.1, hours=0.1)
    assert set(run.gaps()[2:]) == {1}
    assert "each step" in run.cadence.explain()


def test_the_first_save_comes_after_a_few_steps_and_the_second_not_before_it_has_ended() -> None:
    run = Watched.whole(write_s=50.0, pause_s=0.01, hours=0.1)
    assert run.saved[0] == 2
    ended_s = next(event.at_ns for event in run.events if isinstance(event, Committed)) / 1e9
    begun_s = [event.at_ns / 1e9 for event in run.events if isinstance(event, SaveStarted)]
    assert begun_s[1] >= ended_s


@examples(10)
@given(st.integers(0, 1000))
def test_noise_does_not_make_it_jitter(seed: int) -> None:
    run = Watched.whole(seed, pause_s=0.3, write_s=4.0, noise=0.15, hours=2.0)
    settled = [steps for steps, _ in run.intervals[10:]]
    changes = sum(one != other for one, other in itertools.pairwise(settled))
    assert changes <= len(settled) / 25


def test_storage_that_becomes_slow_is_followed_within_a_few_saves_and_so_is_its_recovery() -> None:
    begins_s, ends_s = 3600.0, 3 * 3600.0
    run = Watched.whole(1, pause_s=0.001, write_s=10.0, slow=(begins_s, ends_s, 6.0), hours=4.0, noise=0.05)
    at_s = [event.at_ns / 1e9 for event in run.events if isinstance(event, SaveStarted)]
    gaps = [(begun_s, later_s - begun_s) for begun_s, later_s in itertools.pairwise(at_s)]
    normal = [gap for begun_s, gap in gaps if 600 < begun_s < begins_s - 60]
    slow = [gap for begun_s, gap in gaps if begins_s < begun_s < ends_s - 120]
    after = [gap for begun_s, gap in gaps if begun_s > ends_s]
    assert max(normal) < 20
    assert min(slow[5:]) > 45
    assert max(after[8:]) < 20
    assert run.blocked_s < 0.03 * run.trained_s


def test_a_cost_that_rises_is_followed_within_three_saves() -> None:
    run = Watched.whole(pause_s=0.1, noise=0.0, hours=0.3)
    before = run.cadence.interval.steps
    run.kind = msgspec.structs.replace(run.kind, pause_s=1.0, hours=1.0)
    saves = len(run.saved)
    run.go()
    assert before == pytest.approx(0.1 / 0.03, abs=1)
    assert [steps for steps, _ in run.intervals[saves + 3 :]] == [37] * (len(run.saved) - saves - 3)
    # the first save at the new cost is paid back before the second one
    assert run.gaps()[saves] >= 30


def test_one_accident_of_the_storage_is_paid_back_and_does_not_end_all_saving() -> None:
    run = Watched.whole(pause_s=0.1, noise=0.0, hours=0.2)
    usual = run.gaps()[-1]
    run.kind = msgspec.structs.replace(run.kind, pause_s=600.0)
    run.save()
    run.step += 1
    run.train()
    assert not run.cadence.due(run.step)
    assert "blocked far more than usual" in run.cadence.explain()
    saves = len(run.saved)
    run.kind = msgspec.structs.replace(run.kind, pause_s=0.1, hours=0.6)
    run.step += 1
    run.go()
    gap = run.gaps()[saves - 1]
    assert 5 * usual < gap < 15 * usual
    assert run.gaps()[-1] == usual


def test_the_wall_clock_may_leap() -> None:
    class Astray(SimulatedClock):
        def time_ns(self) -> int:
            return -(10**18) if self.now_ns % 2 else 10**19

    def decisions(clock: SimulatedClock) -> list[bool]:
        cadence = Cadence(clock=clock)
        answers = []
        for step in range(200):
            clock.advance(0.1)
            answers.append(cadence.due(step))
            if answers[-1]:
                save(cadence, clock, step)
        return answers

    assert decisions(Astray(0)) == decisions(SimulatedClock(0))
    assert sum(decisions(SimulatedClock(0))) > 3


def test_a_clock_that_stands_still_or_runs_backwards_divides_by_nothing() -> None:
    clock = SimulatedClock(10**12)
    cadence = Cadence(mttf=1.0, clock=clock)
    for step in range(50):
        clock.now_ns -= step % 3
        if cadence.due(step):
            save(cadence, clock, step, pause_s=0.0)
    assert cadence.explain()


def test_steps_that_a_save_slowed_count_as_its_cost_and_noise_does_not() -> None:
    slowed = Watched.whole(pause_s=0.05, write_s=20.0, drag=0.2, noise=0.05)
    assert slowed.cadence.measured.lost_s == pytest.approx(20 * 0.2 / 1.2, rel=0.4)
    only_noise = Watched.whole(pause_s=0.5, write_s=2.0, noise=0.5)
    assert only_noise.cadence.measured.lost_s < 0.1


def test_failures_of_the_job_make_it_save_as_often_as_pays() -> None:
    run = Watched.whole(pause_s=0.2, write_s=4.0, mttf=3600.0, noise=0.05, hours=2.0)
    assert run.cadence.interval.rule == "failures"
    assert run.cadence.interval.steps == pytest.approx((2 * 0.2 * 3600) ** 0.5, rel=0.5)
    assert "a failure every 60 min" in run.cadence.explain()


def test_saves_that_came_to_nothing_are_tried_again_and_measure_nothing() -> None:
    clock = SimulatedClock(0)
    cadence = Cadence(clock=clock)
    tried = []
    for step in range(1, 13):
        clock.advance(1.0)
        if cadence.due(step):
            tried.append(step)
            cadence.on_event(SaveSkipped(at_ns=clock.now_ns, step=step, reason="a test"))
    assert tried == [3, 6, 9, 12]
    assert cadence.interval.rule == "first"
    assert cadence.measured.saves == 0


def test_a_failed_save_counts_for_what_it_blocked() -> None:
    clock = SimulatedClock(0)
    cadence = Cadence(clock=clock)
    for step in range(1, 60):
        clock.advance(1.0)
        if cadence.due(step):
            cadence.on_event(SaveStarted(at_ns=clock.now_ns, step=step, bytes=1, tensor_count=1))
            clock.advance(0.3)
            cadence.on_event(SnapshotTaken(at_ns=clock.now_ns, step=step, bytes=1, pause_s=0.3, copy_s=0.3))
            cadence.on_event(SaveFailed(at_ns=clock.now_ns, step=step, error="a test", seconds=0.3))
    assert cadence.interval.rule == "overhead"
    assert cadence.interval.steps == 11


def test_going_back_to_an_older_step_begins_anew_from_there() -> None:
    clock = SimulatedClock(0)
    cadence = Cadence(clock=clock)
    saved = []
    for step in [*range(100, 160), *range(120, 200)]:
        clock.advance(1.0)
        if cadence.due(step):
            saved.append(step)
            save(cadence, clock, step, pause_s=0.3)
    again = [step for step in saved[saved.index(max(saved[:5])) :] if step > 120]
    assert cadence.interval.steps == 11
    assert len(again) >= 6


def test_asking_twice_of_a_step_answers_twice_the_same() -> None:
    cadence = Cadence(clock=SimulatedClock(0))
    assert [cadence.due(step) for step in (1, 2, 2, 3, 3)] == [False, False, False, True, True]


def test_steps_that_were_not_asked_of_count_with_the_next() -> None:
    cadence = Cadence(clock=SimulatedClock(0))
    assert [cadence.due(step) for step in (1, 10, 20)] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"pause_s": 2.0, "noise": 0.0}, "overhead"),
        ({"pause_s": 0.0001, "write_s": 60.0}, "write"),
        ({"pause_s": 0.0001, "write_s": 0.1, "noise": 0.0}, "step"),
        ({"pause_s": 1.0, "mttf": 36000.0}, "failures"),
    ],
)
def test_the_explanation_names_the_rule_and_the_figures(settings: dict[str, float], rule: str) -> None:
    run = Watched.whole(**settings)  # type: ignore[arg-type]
    text = run.cadence.explain()
    assert f"[rule: {rule}]" in text
    assert re.search(
        r"medians of the last 5 of \d+ saves: training blocked for .*s, slowed by .*s, committed after", text
    )
    assert re.search(r"steps of (1|1\.0\d|9\d\d m)", text)


def test_before_anything_is_measured_it_says_so() -> None:
    assert "nothing is measured yet" in Cadence().explain()


@pytest.mark.parametrize("options", [{"max_overhead": 0}, {"mttf": 0}, {"mttf": -1.0}, {"max_overhead": float("nan")}])
def test_limits_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give more than 0"):
        Cadence(**options)
