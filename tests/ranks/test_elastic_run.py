"""A run that is killed three times and goes on with other ranks each time. The elastic demo, with real processes."""

import json
from pathlib import Path

import pytest

from aiockpt.tools.examples.demo import ELASTIC, EXACT, DemoOptions, run_demo
from aiockpt.tools.examples.phases import TOLERANCE


@pytest.mark.timeout(400)
def test_a_run_killed_goes_on_with_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_demo(DemoOptions(elastic=True, steps=16, every=2, dir=tmp_path / "run", json=True))
    said = capsys.readouterr()
    assert status == EXACT, said.err[-3000:]
    phases = json.loads(said.out)["phases"]
    assert [phase["phase"]["ranks"] for phase in phases] == [phase.ranks for phase in ELASTIC[1:]] == [2, 2, 1, 4]
    first, *resumed = (phase["resumed_from"] for phase in phases)
    assert first is None
    assert None not in resumed
    assert resumed == sorted(resumed), (
        "each goes on from the newest step; 0, where a slow machine had committed no other"
    )
    assert all(phase["read_bytes"] > 0 for phase in phases[1:])
    assert all(phase["apart"] == 0 for phase in phases if phase["phase"]["exact"])
    assert all(phase["apart"] < TOLERANCE for phase in phases)
