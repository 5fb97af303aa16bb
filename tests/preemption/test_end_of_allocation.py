"""Runs that end before their allocation does. The time is a point of the wall clock, and one rank looks at it."""

import datetime
import time
from pathlib import Path

import pytest

import aiockpt
from aiockpt.options import announced_end_s
from aiockpt.session.preemption.handler import MARGIN_S, PreemptionHandler
from tests.preemption.programs import start, start_ranks
from tests.preemption.test_alone import newest, steps
from tests.preemption.test_ranks_end import WORLD_SIZE, ends, logs, script

AHEAD_S = 12.0
"""From the moment when a program has begun, until its allocation ends."""


def test_a_run_ends_before_the_time_that_was_given(tmp_path: Path) -> None:
    told = f"ends_at = time.time() + {AHEAD_S}\nprint(ends_at, file=sys.stderr)\n"
    program = start(tmp_path, told + steps(every=50, on_preempt="aiockpt.Preemption(ends_at=ends_at)"))
    assert program.end() == 75, program.log
    ends_at = float(program.log.split()[0])
    assert ends_at - AHEAD_S < time.time() < ends_at
    assert "the end of the allocation: the run ends; step" in program.log
    assert newest(tmp_path / "run") is not None


def test_all_ranks_end_before_slurm_ends_the_job(tmp_path: Path) -> None:
    announce = (
        f"os.environ['SLURM_JOB_END_TIME'] = str(round(time.time() + {AHEAD_S}))\n"
        "print(os.environ['SLURM_JOB_END_TIME'], file=sys.stderr)\n"
    )
    programs = start_ranks(tmp_path, announce + script(every=50), WORLD_SIZE)
    assert ends(programs) == [75] * WORLD_SIZE, logs(programs)
    assert time.time() < float(programs[0].log.split()[0])
    assert all("the end of the allocation" in program.log for program in programs)


def test_a_time_that_is_over_is_that_of_another_job() -> None:
    policy = aiockpt.Preemption()
    assert policy.find_end(1000.0, 999.0) is None
    assert policy.find_end(1000.0, 1001.0) == 1001.0
    assert policy.find_end(1000.0, None) is None
    with pytest.raises(aiockpt.UsageError, match="ago"):
        aiockpt.Preemption(ends_at=999.0).find_end(1000.0, 2000.0)


def test_a_datetime_has_a_zone() -> None:
    noon = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    assert aiockpt.Preemption(ends_at=noon).find_end(0.0, None) == noon.timestamp()
    with pytest.raises(aiockpt.UsageError, match="zone"):
        aiockpt.Preemption(ends_at=noon.replace(tzinfo=None))


def test_what_slurm_says_is_a_number_or_nothing() -> None:
    assert announced_end_s({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert announced_end_s({"SLURM_JOB_END_TIME": "UNLIMITED"}) is None
    assert announced_end_s({}) is None


def test_what_is_left_for_the_last_save_follows_from_what_saves_take() -> None:
    handler = PreemptionHandler(aiockpt.Preemption(grace_s=20), None)
    assert handler._needed_s == 20 + MARGIN_S, "nothing is measured: the grace stands for it"
    for seconds in (4.0, 10.0, 6.0):
        handler.saves._note_seconds("file:///disk", seconds)
    handler.saves._note_seconds("s3://bucket", 60.0)
    assert handler._needed_s == 15 + MARGIN_S, (
        "the longest of the last ones, of the fastest place, and half of it again"
    )
