"""The README: its code runs as it stands, and it is short. Pages below docs/ have tests of their own (`tests.docs`)."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks, section
from tests.docs.running import command_lines, run_block

README = ROOT / "README.md"
MOST_WORDS = 1000


def test_the_code_runs_as_it_stands_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(section(README, "The code"), "python")
    assert found == blocks(README.read_text(), "python"), "all code is in that section"
    assert len(found) == 2
    scope: dict[str, Any] = {}
    for block in found:
        run_block(block, scope)
    kept = {run: sorted(int(step.name[5:]) for step in Path(f"runs/{run}").glob("step-*")) for run in (7, 8)}
    assert kept == {7: [40, 50, 59], 8: [31]}
    again: dict[str, Any] = {}
    run_block(found[0], again)
    assert again["step"] == 60, "it begins behind the last step"
    assert again["loader"].epoch == 3


def test_it_is_short_and_begins_with_two_commands() -> None:
    text = README.read_text()
    assert len(text.split()) <= MOST_WORDS
    (first,) = blocks(text, "sh")
    assert [words[:2] for words in command_lines(first)] == [["make", "demo"], ["make", "test"]]


def test_it_leads_to_every_page_of_the_guide() -> None:
    text = README.read_text()
    missing = [page.name for page in (ROOT / "docs" / "guide").glob("*.md") if f"docs/guide/{page.name}" not in text]
    assert missing == []
