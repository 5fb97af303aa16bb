"""`aiockpt cp`: steps copied to another place from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.small_checkpoints import Command, data_file, flip


def test_cp_copies_the_newest_step_and_says_where_it_is(aiockpt_command: Command, made: Path, tmp_path: Path) -> None:
    outcome = aiockpt_command("cp", made, tmp_path / "to")
    assert outcome.status == 0, outcome.err
    assert "step 300" in outcome.out
    assert "verified" in outcome.out
    assert aiockpt_command("verify", tmp_path / "to", 300).status == 0
    assert "already" in aiockpt_command("cp", made, tmp_path / "to").out


def test_cp_copies_all_steps_the_oldest_first(aiockpt_command: Command, made: Path, tmp_path: Path) -> None:
    outcome = aiockpt_command("cp", "--all", "--json", made, tmp_path / "to")
    assert [copied["step"] for copied in json.loads(outcome.out)] == [100, 200, 300]
    assert aiockpt_command("verify", "--all", tmp_path / "to").status == 0
    listed = json.loads(aiockpt_command("ls", "--json", tmp_path / "to").out)
    assert [step["step"] for step in listed["steps"]] == [300, 200, 100]


def test_cp_of_a_damaged_step_names_the_block_and_shows_nothing(
    aiockpt_command: Command, root: Path, tmp_path: Path
) -> None:
    flip(data_file(root, 200), 5000)
    outcome = aiockpt_command("cp", root, tmp_path / "to", 200)
    assert outcome.status == 1
    assert "block" in outcome.err
    assert "no checkpoint" in (listed := aiockpt_command("ls", tmp_path / "to")).out + listed.err


def test_cp_refuses_a_step_with_all_and_a_source_that_is_not_there(
    aiockpt_command: Command, made: Path, tmp_path: Path
) -> None:
    assert aiockpt_command("cp", "--all", made, tmp_path / "to", 100).status == 2
    assert aiockpt_command("cp", tmp_path / "none", tmp_path / "to").status == 2
    assert not (tmp_path / "to").exists()
