"""SIGKILL of a real process at each of its file-system calls: the old step or the whole new one, and saving goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def kill_at_every_call(folder: Path, stride: int) -> list[dict[str, int]]:
    run = subprocess.run(
        [sys.executable, str(HERE / "kill_at_every_call.py"), str(folder), str(stride)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(outcomes: list[dict[str, int]]) -> None:
    for outcome in outcomes:
        assert outcome["loaded"] in ((1, 2) if outcome["killed"] else (2,)), outcome
        assert outcome["on"] == 3, outcome
    assert {outcome["loaded"] for outcome in outcomes} == {1, 2}
    assert [outcome["killed"] for outcome in outcomes].count(False) == 1


def test_a_child_killed_at_some_of_its_calls_leaves_the_old_or_the_new_step(tmp_path: Path) -> None:
    check(kill_at_every_call(tmp_path, 4))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_child_killed_at_each_of_its_calls_leaves_the_old_or_the_new_step(tmp_path: Path) -> None:
    check(kill_at_every_call(tmp_path, 1))
