"""Do the commands know what a step was saved without, by choice, and say it?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import aiockpt
from tests.cli.small_checkpoints import Command
from tests.small_run import SMALL


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    """Return a root with step 1, whole, and steps 2 and 3 without the base and the optimizer."""
    model = nn.ModuleDict({"base": nn.Linear(3, 3, bias=False).requires_grad_(False), "lora": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model["lora"].parameters(), momentum=0.9)
    model["lora"](torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "note": "x"}
    with aiockpt.Checkpointer(tmp_path / "run", io=SMALL) as ckpt:
        ckpt.save(1, state).result(30)
        for step in (2, 3):
            ckpt.save(step, state, only=aiockpt.trainable(), exclude=["optimizer", "note"]).result(30)
    return tmp_path / "run"


def test_inspect_lists_what_was_left_out(aiockpt_command: Command, partial: Path) -> None:
    shown = aiockpt_command("inspect", partial, 2).out
    assert "3 names left out" in shown
    assert "left out when saved" in shown
    assert "model.base.weight" in shown
    assert "3×3" in shown
    assert aiockpt_command("inspect", partial, 2, "--json").json()["left_out"] == {
        "model.base.weight": ["F32", [3, 3]],
        "optimizer": None,
        "note": None,
    }
    assert "left out" not in aiockpt_command("inspect", partial, 1).out


def test_verify_and_cp_note_it_and_the_copy_knows_it(aiockpt_command: Command, partial: Path, tmp_path: Path) -> None:
    told = "3 names of step 3 were left out when it was saved"
    assert told in aiockpt_command("verify", partial, 3).out
    assert "left out" not in aiockpt_command("verify", partial, 1).out
    assert told in aiockpt_command("cp", partial, tmp_path / "copy", 3).out
    assert "3 names left out" in aiockpt_command("inspect", tmp_path / "copy", 3).out


def test_diff_tells_what_cannot_be_compared_from_what_went(aiockpt_command: Command, partial: Path) -> None:
    found = aiockpt_command("diff", partial, 1, 2, "--json").json()
    differing = {one["name"]: (one["kind"], one["detail"]) for one in found if one["kind"] != "same"}
    assert differing == {
        "model.base.weight": ("left out", "F32 3×3 → left out (F32 3×3)"),
        "optimizer": ("left out", "there → left out"),
        "note": ("left out", "there → left out"),
    }
    assert "left out" in aiockpt_command("diff", partial, 1, 2).out
    assert aiockpt_command("diff", partial, 2, 3).status == 0


def test_a_folder_that_lacks_weights_is_converted_with_a_warning(
    aiockpt_command: Command, partial: Path, tmp_path: Path
) -> None:
    outcome = aiockpt_command("convert", partial, tmp_path / "hf", "--step", 2)
    assert outcome.status == 0
    assert "without base.weight: left out when the step was saved" in " ".join(outcome.out.split())
