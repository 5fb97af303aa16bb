"""Does the demo say how long it will take?"""

from __future__ import annotations

import pytest

from aiockpt.examples.outlook import ENOUGH_STEPS, Outlook, tell


class StillClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def train(outlook: Outlook, clock: StillClock, seconds: list[float]) -> None:
    for took_s in seconds:
        clock.now_s += took_s
        outlook.step(took_s)


def test_what_is_left_are_the_steps_of_all_processes_and_the_starts_of_those_to_come() -> None:
    clock = StillClock()
    outlook = Outlook({"first": 20, "second": 10, "disk": 0}, clock)
    outlook.begin("first")
    clock.now_s += 3
    train(outlook, clock, [9.0] + [0.5] * (ENOUGH_STEPS - 2))
    assert outlook.remaining_s() is None
    train(outlook, clock, [0.5])
    assert outlook.remaining_s() == pytest.approx((20 - ENOUGH_STEPS + 10) * 0.5 + 3)


def test_a_process_that_took_fewer_steps_than_expected_leaves_none_of_them() -> None:
    clock = StillClock()
    outlook = Outlook({"first": 20, "second": 10}, clock)
    outlook.begin("first")
    train(outlook, clock, [1.0] * 15)
    outlook.finish()
    outlook.begin("second")
    train(outlook, clock, [1.0] * 12)
    assert outlook.remaining_s() == 0


def test_a_time_is_told_no_more_exactly_than_it_is_known() -> None:
    assert [tell(seconds) for seconds in (0.2, 44.6, 119, 150)] == [
        "about 1 s",
        "about 45 s",
        "about 119 s",
        "about 2 minutes",
    ]
