"""Saves each so many minutes, on all ranks in the same step."""

import time
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.units import parse_seconds
from tests.cadence.test_ranks import members, on_all
from tests.simulated.simulation import SimulatedClock
from tests.small_run import small_checkpointer


def saved_times(every: str, step_s: float, until_s: float, pause_s: float = 0.0) -> list[float]:
    """Return when a run saved whose steps take *step_s*, and each save *pause_s*."""
    clock = SimulatedClock(10**18)
    cadence = aiockpt.Cadence.by_time(every)
    cadence._now_ns = clock.monotonic_ns
    began_ns, step, times = clock.now_ns, 0, []
    while clock.now_ns - began_ns < until_s * 1e9:
        if cadence.due(step):
            times.append((clock.now_ns - began_ns) / 1e9)
            clock.advance(pause_s)
        clock.advance(step_s)
        step += 1
    return times


def test_a_save_comes_each_time_that_was_asked_for_and_a_step_later_at_most() -> None:
    times = saved_times("30min", step_s=7.0, until_s=6 * 3600)
    assert len(times) == 11
    for number, at_s in enumerate(times, 1):
        assert 0 <= at_s - number * 1800 < 7.0


def test_steps_that_are_longer_than_the_time_are_saved_each() -> None:
    assert saved_times("10s", step_s=25.0, until_s=200.0) == [25.0, 50.0, 75.0, 100.0, 125.0, 150.0, 175.0]


def test_all_ranks_save_the_same_steps_however_their_clocks_go() -> None:
    with members(3, make=lambda: aiockpt.Cadence.by_time("2s")) as crew:
        on_all(crew, lambda member: [member.train(step, step_s=0.05 + 0.01 * (step % 3)) for step in range(400)])
        assert all(member.saved == crew[0].saved for member in crew)
        assert 8 <= len(crew[0].saved) <= 13


def test_a_checkpointer_takes_a_time_in_place_of_a_number_of_steps(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(8)}
    with small_checkpointer(tmp_path, every="0.2s") as ckpt:
        saved = []
        for step in range(40):
            if ckpt.step(step, state) is not None:
                saved.append(step)
            time.sleep(0.025)
    assert 2 <= len(saved) <= 15
    assert "time" in repr(ckpt._cadence)
    assert "asked for" in (ckpt._cadence.explain() if ckpt._cadence else "")


@pytest.mark.parametrize(("given", "seconds"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), (" 2 d ", 172800)])
def test_a_time_is_a_number_and_a_unit(given: str, seconds: float) -> None:
    assert parse_seconds(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "30", "0min", "-1h", "30 fortnights", "1h30"])
def test_what_is_no_time_is_refused_with_one_that_is(given: str, tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match="30min"):
        aiockpt.Checkpointer(tmp_path, every=given)
