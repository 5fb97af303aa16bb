"""Is a rank that is slower than its peers named, with its stage and since when, and nobody else?"""

from __future__ import annotations

from typing import Any

import pytest

from aiockpt.monitor.spans import TimeSpan
from aiockpt.monitor.stragglers import STEPS, stragglers


def written(rank: int, step: int, seconds: float, **facts: Any) -> TimeSpan:
    named = {"operation": "save", "stage": "write", **facts}
    return TimeSpan(process=rank, rank=rank, host=f"h{rank}", step=step, begin_s=step, seconds=seconds, **named)


def test_a_rank_that_is_slow_in_most_steps_is_named_with_stage_and_cause() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2 and step >= 4)) for rank in range(4) for step in range(12)]
    (slow,) = stragglers(some)
    assert (slow.rank, slow.host, slow.stage, slow.since, slow.steps) == (2, "h2", "write", 4, 8)
    assert slow.factor == pytest.approx(4)
    assert slow.extra_s == pytest.approx(0.3)
    assert "storage" in slow.cause


def test_one_that_became_slow_late_in_a_long_run_is_named_with_that_step() -> None:
    odd = {0, 3}  # slow twice before, by chance
    slow = {rank: {*odd, *range(90, 100)} if rank == 2 else {7} for rank in range(4)}
    some = [written(rank, step, 0.1 + 0.3 * (step in slow[rank])) for rank in slow for step in range(100)]
    (found,) = stragglers(some)
    assert (found.rank, found.since, found.steps) == (2, 90, 10)
    assert found.factor == pytest.approx(4)


def test_one_that_was_slow_and_recovered_is_not_named() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2 and step < 10)) for rank in range(4) for step in range(30)]
    assert stragglers(some) == []


def test_several_files_of_a_step_count_together() -> None:
    files = [written(rank, step, 0.1 + 0.05 * (rank == 2)) for rank in range(4) for step in range(6) for _ in range(2)]
    (found,) = stragglers(files)
    assert found.extra_s == pytest.approx(0.1)


def test_what_failed_is_not_compared() -> None:
    hung = [written(rank, step, 0.1 + 5 * (rank == 2), failed=rank == 2) for rank in range(4) for step in range(10)]
    assert stragglers(hung) == []


def test_the_slowest_comes_first_and_a_stage_without_a_known_cause_says_so() -> None:
    some = [
        written(rank, step, 0.1 + extra * (rank == 2), stage=stage)
        for stage, extra in (("vote", 0.2), ("new", 0.4))
        for rank in range(4)
        for step in range(10)
    ]
    assert [(one.stage, one.cause == "unknown") for one in stragglers(some)] == [("new", True), ("vote", False)]


def test_outliers_small_stages_few_steps_and_waiting_name_nobody() -> None:
    ranks, steps = range(4), range(10)
    once = [written(rank, step, 0.1 + 5.0 * (rank == 2 and step == 4)) for rank in ranks for step in steps]
    small = [written(rank, step, 1e-4 * (1 + 9 * (rank == 2))) for rank in ranks for step in steps]
    few = [written(rank, step, 0.1 + (rank == 2)) for rank in ranks for step in range(STEPS - 1)]
    waiting = [written(rank, step, 0.1 + (rank == 2), stage="wait") for rank in ranks for step in steps]
    pair = [written(rank, step, 0.1 + (rank == 1)) for rank in range(2) for step in steps]
    for some in (once, small, few, waiting, pair):
        assert stragglers(some) == []
