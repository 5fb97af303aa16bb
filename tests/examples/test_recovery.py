"""The recovery demo: a small cluster whose parts fail goes on, and its losses are those of a run without faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiockpt.tools.examples.demo import EXACT, FAILED, run_demo
from aiockpt.tools.examples.recovery import Recovery, RecoveryOptions


@pytest.mark.timeout(600)
def test_a_run_that_meets_faults_has_the_losses_of_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    options = RecoveryOptions(hosts=2, ranks=1, steps=45, faults=("gradient", "host"), dir=folder, json=True)
    assert run_demo(options) == EXACT, (folder / "drill" / "launchers.log").read_text()[-4000:]
    said = capsys.readouterr()
    result: dict[str, Any] = json.loads(said.out)
    assert result["different"] == []
    gradient, host = result["recoveries"]
    assert gradient["lost_steps"] >= 1  # the bad one is trained again
    assert gradient["from_step"] <= host["step"]
    assert (host["noticed_s"] > 0, 0 < host["from_step"] < 45) == (True, True)
    assert 0 < result["ettr"] < 1
    assert "those of the reference, bit by bit" in said.err
    assert (folder / "drill" / "run" / "LATEST").exists()


@pytest.mark.parametrize("options", [RecoveryOptions(hosts=1), RecoveryOptions(ranks=0), RecoveryOptions(steps=20)])
def test_a_cluster_without_room_for_the_faults_is_refused(
    options: RecoveryOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(options) == FAILED
    assert "or more" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_followed_a_fault_is_told() -> None:
    told = str(Recovery("rank 1 is killed", 30, 0.21, 14.2, 29, 2))
    assert told.split("\n")[0].split() == ["step", "30", "rank", "1", "is", "killed"]
    assert "noticed after 0.2 s; next step done after 14.2 s: step 29, 2 steps trained again" in told
    assert "no step lost" in str(Recovery("rank 1 hangs", 38, 4.5, 27.7, 39, 0))
    assert "step 40 is on the disk again" in str(Recovery("the disk is full", 38, 4.5, 0.0, 39, 0, 40))
