"""The plan of a run: how often to save, and what that costs."""

import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.sizing.run_plan import plan_run
from aiockpt.tools.cli.main import app

GIB = 2.0**30


def simulated_share(step_bytes: float, interval_s: float, *, pause_s: float, durable_s: float, mtbf_s: float) -> float:
    """Return the share of the time that goes to saves and to work done again, in a run with failures drawn at random."""
    dice = random.Random(1)
    now_s = done_s = 0.0
    while now_s < 3000 * mtbf_s:
        life_s = dice.expovariate(1 / mtbf_s)
        now_s += life_s
        periods = max(0.0, life_s - durable_s) // (interval_s + pause_s)
        done_s += periods * interval_s
    return 1 - done_s / now_s


def test_the_share_is_that_of_a_run_with_random_failures() -> None:
    plan = plan_run(900 * GIB, ranks=512, bytes_per_s=40 * GIB, mtbf_s=6 * 3600)
    found = simulated_share(
        plan.step_bytes, plan.interval_s, pause_s=plan.pause_s, durable_s=plan.durable_s, mtbf_s=plan.mtbf_s
    )
    assert plan.share == pytest.approx(found, rel=0.1)
    assert plan.durable_s == pytest.approx(22.5)
    for factor in (0.3, 3.0):
        other = simulated_share(
            plan.step_bytes,
            factor * plan.interval_s,
            pause_s=plan.pause_s,
            durable_s=plan.durable_s,
            mtbf_s=plan.mtbf_s,
        )
        assert other > found, "neither more often nor less often is better"


def test_a_small_step_takes_the_time_of_its_flushes() -> None:
    plan = plan_run(20e3, ranks=1, bytes_per_s=1 * GIB, mtbf_s=24 * 3600)
    assert (plan.durable_s, plan.pause_s) == (0.02, 0.001)


def test_no_save_begins_before_the_one_before_it_is_durable() -> None:
    plan = plan_run(900 * GIB, ranks=512, bytes_per_s=1 * GIB, mtbf_s=6 * 3600)
    assert plan.interval_s == plan.durable_s == pytest.approx(900)


@pytest.mark.parametrize("given", [{"ranks": 0}, {"bytes_per_s": 0.0}, {"mtbf_s": -1.0}])
def test_what_cannot_be_meant_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(aiockpt.UsageError, match="more than 0"):
        plan_run(1.0, **{"ranks": 1, "bytes_per_s": 1.0, "mtbf_s": 1.0, **given})  # type: ignore[arg-type]  # of a kind each


def test_the_command_plans_from_numbers_and_from_a_run_like_it(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        app, ["plan", "--parameters", "70e9", "--ranks", "512", "--bandwidth", "40GiB", "--mtbf", "6"]
    )
    assert run.exit_code == 0, run.output
    assert "a step            912.7 GiB, 1.8 GiB of each of 512 ranks" in run.output
    assert "save every        138 s" in run.output
    said = [CliRunner().invoke(app, ["plan", "--parameters", number]).output for number in ("7B", "7e9", "7000M")]
    assert said[0] == said[1] == said[2]
    assert "a step            91.3 GiB" in said[0]
    many = CliRunner().invoke(app, ["plan", "--parameters", "many"]).exception
    assert "--parameters many: give a number, such as 7B" in str(many)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": torch.zeros(1 << 20)}).result()
    run = CliRunner().invoke(app, ["plan", str(tmp_path), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.output)["step_bytes"] == pytest.approx(4 << 20, rel=0.1)
    for wrong in ([], [str(tmp_path), "--parameters", "1"]):
        refused = CliRunner().invoke(app, ["plan", *wrong]).exception
        assert isinstance(refused, aiockpt.UsageError)
        assert "give --parameters" in str(refused)
