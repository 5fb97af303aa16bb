"""Does a run that is killed three times go on with other ranks each time? The elastic demo, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiockpt.tools.examples.demo import EXACT
from aiockpt.tools.examples.elastic import PHASES, TOLERANCE, run_elastic


@pytest.mark.timeout(400)
def test_a_run_killed_on_2_ranks_goes_on_with_1_and_with_4_and_its_losses_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_elastic(steps=16, every=2, folder=tmp_path / "run", as_json=True)
    said = capsys.readouterr()
    assert status == EXACT, said.err[-3000:]
    phases = json.loads(said.out)
    assert [phase["ranks"] for phase in phases] == [phase.ranks for phase in PHASES] == [2, 2, 1, 4]
    assert phases[0]["resumed_from"] is None
    assert all(phase["resumed_from"] > 0 and phase["read_bytes"] > 0 for phase in phases[1:])
    assert all(phase["difference"] == 0 for phase in phases if phase["exact"])
    assert all(phase["difference"] < TOLERANCE for phase in phases)
