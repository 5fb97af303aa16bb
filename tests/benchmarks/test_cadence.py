"""Does the cadence benchmark run, and does the cadence hold its own against the best fixed interval?"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from benchmarks import cadence

CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_smoke_run_writes_a_table_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "cadence.json"
    command = [sys.executable, "-m", "benchmarks.cadence", "--smoke", "--seeds", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=cadence.Report)
    assert [row.scenario.name for row in report.rows] == ["many failures"]
    assert len(report.rows[0].fixed) == len(cadence.FIXED)
    assert done.stdout.count("\n| ") == 2
    assert "[rule: " in done.stdout


@pytest.mark.parametrize("scenario", cadence.SCENARIOS[:5], ids=lambda scenario: scenario.name)
def test_the_cadence_is_within_a_few_percent_of_the_best_fixed_interval(scenario: cadence.Scenario) -> None:
    row = cadence.measure(msgspec.structs.replace(scenario, hours=10), seeds=[7])
    assert row.failures >= 3
    assert row.regret < 0.03
    assert row.cadence.blocked_fraction < cadence.MAX_OVERHEAD


def test_all_contenders_meet_the_same_failures_and_the_same_seed_gives_the_same_run() -> None:
    scenario = msgspec.structs.replace(cadence.SCENARIOS[0], hours=20)
    rows = [cadence.contend("every 30", scenario, lambda _: cadence.Every(30), [5]) for _ in range(2)]
    assert rows[0] == rows[1]
    runs = [cadence.Run(scenario, partial(cadence.Every.start, steps), 5) for steps in (10, 100)]
    for run in runs:
        run.go()
    assert runs[0].failures == runs[1].failures > 3


def test_writes_at_once_share_the_storage_or_do_not() -> None:
    for shared, seconds in ((True, 20.0), (False, 10.0)):
        scenario = cadence.Scenario(name="x", step_s=1, pause_s=0, write_s=10, noise=0, shared=shared, failing=False)
        run = cadence.Run(scenario, lambda _: cadence.Every(10**9), 1)
        run.save()
        run.step += 1
        run.save()
        run._pass(seconds - 0.01)
        assert run.committed == -1
        run._pass(0.02)
        assert run.committed == 1
