"""Does the elastic demo say what it showed, and refuse what it cannot do?"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from aiockpt.tools.examples.demo import DIFFERENT, EXACT, FAILED
from aiockpt.tools.examples.elastic import conclude, run_elastic, verdict
from aiockpt.tools.examples.figures import Figures

FIRST: Figures = {
    "name": "FSDP2 on 2 ranks",
    "ranks": 2,
    "resumed_from": None,
    "last_step": 10,
    "seconds": 1.0,
    "load_s": 0.0,
    "needed_bytes": 0,
    "read_bytes": 0,
    "difference": 0.0,
    "exact": True,
    "passed": True,
}
LAST = FIRST | {
    "name": "TP on 4 ranks",
    "ranks": 4,
    "resumed_from": 5,
    "needed_bytes": 7 << 20,
    "read_bytes": 20 << 20,
    "difference": 1.7e-7,
    "exact": False,
}


def printed(outcomes: list[Figures]) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    status = conclude(console, outcomes, as_json=False)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_the_demo_ends_with_a_verdict_and_says_what_needed_and_read_mean() -> None:
    status, text = printed([FIRST, LAST])
    assert status == EXACT
    assert "needed: tensor bytes that the ranks of a start hold" in text
    assert "read: what was fetched from storage" in text
    assert text.splitlines()[-1].startswith("Killed 1 times and started on 2 and 4 ranks")
    assert "bit by bit on the ranks of the reference, and within 2e-07 on others" in verdict([FIRST, LAST])


def test_the_table_of_the_demo_fits_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    conclude(console, [FIRST, LAST], as_json=False)
    assert isinstance(console.file, io.StringIO)
    assert "ranks  resumed from" in console.file.getvalue()
    assert "loss beside the reference" in console.file.getvalue()


def test_losses_that_differ_are_the_verdict() -> None:
    status, text = printed([FIRST, LAST | {"difference": 0.5, "passed": False}])
    assert status == DIFFERENT
    assert text.splitlines()[-1] == "THE LOSSES DIFFER from the reference's: TP on 4 ranks."


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
