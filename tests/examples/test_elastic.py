"""What the elastic demo refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiockpt.tools.examples.demo import FAILED
from aiockpt.tools.examples.elastic import run_elastic


@pytest.mark.parametrize(("steps", "every", "message"), [(39, 5, "take 40 or more"), (60, 0, "give 1 or more")])
def test_a_run_too_short_to_be_killed_three_times_is_refused(
    steps: int, every: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_elastic(steps=steps, every=every, folder=tmp_path / "x") == FAILED
    assert message in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run_elastic(folder=tmp_path) == FAILED
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
