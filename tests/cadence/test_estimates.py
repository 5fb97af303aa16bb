"""The usual value of measurements, as a person would call it."""

import pytest

from aiockpt.policies.cadence.controller import Recent, StepTimes


def test_the_first_save_is_forgotten_at_the_second_and_two_outliers_of_five_move_nothing() -> None:
    recent = Recent()
    assert recent.usual == 0.0
    recent.add(100.0)
    assert recent.usual == 100.0
    for value in (1.0, 50.0, 1.1, 60.0, 0.9):
        recent.add(value)
    assert recent.usual == 1.1


def test_steps_beside_a_save_that_are_slower_within_the_noise_have_lost_nothing() -> None:
    for spread_s, lost_s in ((0.2, 0.0), (0.001, 0.3)):
        steps = StepTimes()
        for number in range(20):
            steps.add(1.0 + (spread_s if number % 2 else -spread_s), 1, busy=False)
        for _ in range(4):
            steps.add(1.075, 1, busy=True)
        steps.end_saves(1)
        assert steps.lost_s == pytest.approx(lost_s, abs=0.02)


def test_where_no_step_is_free_of_saves_nothing_is_known_of_what_they_slow() -> None:
    steps = StepTimes()
    steps.add(5.0, 5, busy=True)
    steps.end_saves(1)
    assert steps.lost_s == 0.0
    assert steps.step_s == 1.0
