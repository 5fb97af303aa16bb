"""The history of a launch: what counts, what is lost, and how it is shown."""

from pathlib import Path

import pytest

from aiockpt.launch.history import (
    NodeAttempt,
    NodeRun,
    Stall,
    Timeline,
    close_attempt,
    effective,
    figures_of,
    read_launches,
    write_launch,
)
from aiockpt.launch.restart_policy import TrainerFailure
from aiockpt.runtime.progress import ProgressRecord
from tests.cli.small_checkpoints import Command


def rows(step: int, at_s: float, *, behind: int = 0) -> list[ProgressRecord]:
    """Return the records of two ranks, of which one is *behind* in steps."""
    return [
        ProgressRecord(pid=1, thread=1, step=step - late, steps=step + 1 - late, step_s=at_s, mark_s=at_s)
        for late in (0, behind)
    ]


def trained(steps: int, first: int = 0, every_s: float = 2.0) -> Timeline:
    timeline = Timeline()
    timeline.add([ProgressRecord(pid=1, thread=1, mark_s=100.0)])  # it has loaded
    for number in range(steps):
        at_s = 100.0 + every_s * (number + 1)
        record = ProgressRecord(pid=1, thread=1, step=first + number, steps=number + 1, step_s=at_s, mark_s=at_s)
        timeline.add([record])
    return timeline


def test_steps_that_the_next_attempt_repeats_do_not_count() -> None:
    attempt = NodeAttempt(number=0, began_s=0.0, world_size=2)
    close_attempt(attempt, trained(10), next_step=8)
    assert (attempt.lost_steps, attempt.counted_s, attempt.lost_s) == (2, 16.0, 4.0)
    close_attempt(attempt, trained(10), next_step=10)
    assert (attempt.lost_steps, attempt.counted_s, attempt.lost_s) == (0, 20.0, 0.0)
    assert effective([attempt], 40.0) == 0.5


def test_a_step_is_done_when_the_last_rank_has_done_it() -> None:
    timeline = Timeline()
    assert timeline.add(rows(0, 1.0))
    timeline.add(rows(5, 6.0, behind=1))
    assert timeline.last == (4, 6.0)


def test_the_first_step_is_that_which_was_trained_first_not_that_which_was_seen_first() -> None:
    timeline = Timeline()
    assert timeline.add([ProgressRecord(pid=1, thread=1, step=25, steps=2, step_s=3.0)])
    assert (timeline.first_step, timeline.last) == (24, (25, 3.0))


def test_what_a_rewind_takes_back_does_not_count() -> None:
    """Ten steps of two seconds; the run goes back behind step 6 at 123, which was done at 114, and trains three more."""
    timeline = trained(10)
    for step, steps, at_s in ((6, 10, 123.0), (7, 11, 125.0), (8, 12, 127.0), (9, 13, 129.0)):
        timeline.add([ProgressRecord(pid=1, thread=1, step=step, steps=steps, step_s=at_s, thrown_s=9.0)])
    assert timeline.counted() == (20.0, 0.0)
    assert timeline.counted(before=8) == (16.0, 4.0)
    assert timeline.last[0] == 9


def test_the_trainers_are_told_the_figures() -> None:
    killed = TrainerFailure(kind="signal SIGKILL", rank=0, told=True)
    usual = {"began_s": 0.0, "world_size": 1}
    attempts = [
        NodeAttempt(number=0, failure=killed, lost_steps=1, lost_s=2.0, restart_s=9.0, **usual),  # type: ignore[arg-type]
        NodeAttempt(number=1, lost_steps=3, lost_s=4.0, restart_s=5.0, **usual),  # type: ignore[arg-type]
        NodeAttempt(number=2, first_step_s=6.0, **usual),  # type: ignore[arg-type]
    ]
    launch = NodeRun(run_id="r", host="h", pid=1, began_s=0.0, attempts=attempts, ettr=0.5)
    told = figures_of(launch)
    assert told.restarts == {"signal SIGKILL": 1, "another node": 1}
    assert (told.lost_steps, told.lost_s, told.restart_s, told.first_step_s, told.ettr) == (4, 6.0, 5.0, 6.0, 0.5)


def test_a_long_run_keeps_few_points() -> None:
    timeline = trained(50_000)
    assert len(timeline.points) < 5000
    counted_s, lost_s = timeline.counted(before=40_000)
    assert counted_s == pytest.approx(80_000, rel=0.01)
    assert counted_s + lost_s == pytest.approx(100_000)


def test_a_launch_is_shown_from_its_folder_and_beside_the_traces_of_its_run(
    tmp_path: Path, aiockpt_command: Command
) -> None:
    failure = TrainerFailure(kind="hang", where="f (/x/train.py:7)", rank=1, step=4, told=True)
    stall = Stall(
        at_s=1.0,
        attempt=0,
        quiet_s=4.0,
        median_s=0.1,
        ranks=(0, 1),
        step=4,
        behind=(1,),
        places={"1": "f (train.py:7)"},
    )
    attempts = [NodeAttempt(number=0, began_s=0.0, world_size=2, first_step=0, last_step=4, failure=failure)]
    launch = NodeRun(run_id="r", host="h", pid=1, began_s=5.0, ranks=(0, 1), attempts=attempts, stalls=[stall])
    write_launch(tmp_path / "monitor", launch)
    write_launch(tmp_path / "alone", launch)
    (tmp_path / "alone" / "launch-damaged-2.json").write_text("{")
    assert read_launches(tmp_path) == read_launches(tmp_path / "alone") == [launch]
    for command in ("report", "top"):
        shown = aiockpt_command(command, tmp_path / "alone").out
        assert "rank 1: hang at f (train.py:7) in step 4" in shown
        assert "stall in step 4, noticed after 4 s: rank 1 at f (train.py:7)" in shown
