"""`aiockpt convert`: weights out of a step and into one, from the command line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiockpt.errors import UsageError
from aiockpt.tools.cli.commands.app import parse_size
from tests.cli.small_checkpoints import Command
from tests.convert.small_models import Tied, all_same, load_folder, save_model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a root with steps 1 and 2 of a model."""
    for step in (1, 2):
        save_model(tmp_path / "models", step, seed=step)
    return tmp_path / "models"


def test_the_newest_step_becomes_a_folder_and_the_folder_a_step(
    aiockpt_command: Command, models: Path, tmp_path: Path
) -> None:
    outcome = aiockpt_command("convert", models, tmp_path / "out")
    assert outcome.status == 0, outcome.err
    assert "model of step 2" in outcome.out
    assert "model.safetensors" in outcome.out
    expected = {name: tensor for name, tensor in Tied(2).state_dict().items() if name != "head.weight"}
    assert all_same(load_folder(tmp_path / "out"), expected)
    back = aiockpt_command("convert", tmp_path / "out", tmp_path / "back", "--step", 40, "--json").json()
    assert (back["step"], back["prefix"], back["tensor_count"]) == (40, "model", len(expected))
    assert aiockpt_command("verify", tmp_path / "back", 40).status == 0


def test_options_reach_the_conversion(aiockpt_command: Command, models: Path, tmp_path: Path) -> None:
    options = ("--step", "step-00000001", "--prefix", "model.embed.", "--dtype", "bfloat16", "--max-shard-size", "10KB")
    done = aiockpt_command("convert", models, tmp_path / "out", *options, "--json").json()
    assert (done["step"], done["prefix"], done["dtypes"], done["dry_run"]) == (1, "model.embed", {"BF16": 1}, False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"weight"}
    done = aiockpt_command(
        "convert",
        tmp_path / "out" / "model.safetensors",
        tmp_path / "back",
        "--prefix",
        "a.b",
        "--tie",
        "x=weight",
        "--json",
    ).json()
    assert (done["step"], done["ties"]) == (0, {"a.b.x": "a.b.weight"})


def test_weights_are_linked_and_renamed_where_that_is_asked_for(
    aiockpt_command: Command, models: Path, tmp_path: Path
) -> None:
    linked = aiockpt_command("convert", models, tmp_path / "linked", "--link")
    assert ": linked to " in linked.out
    assert (tmp_path / "linked" / "model.safetensors").stat().st_nlink == 2
    assert "would link" in aiockpt_command("convert", models, tmp_path / "other", "--link", "--dry-run").out
    renamed = ("--rename", "^embed=wte", "--rename", r"\.weight$=.w")
    aiockpt_command("convert", models, tmp_path / "renamed", *renamed)
    assert {"wte.w", "norm.w", "norm.bias"} <= load_file(tmp_path / "renamed" / "model.safetensors").keys()
    wrong = aiockpt_command("convert", models, tmp_path / "no", "--rename", "x")
    assert (wrong.status, "write OLD=NEW" in wrong.err) == (2, True)
    wrong = aiockpt_command("convert", tmp_path / "renamed", tmp_path / "back", "--link")
    assert (wrong.status, "--link is for a step" in wrong.err) == (2, True)


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    aiockpt_command: Command, models: Path, tmp_path: Path
) -> None:
    outcome = aiockpt_command("convert", models, tmp_path / "out", "--dry-run", "--max-shard-size", "10KB")
    assert outcome.status == 0
    assert "would write model of step 2" in outcome.out
    assert "model-00001-of-00003.safetensors" in outcome.out
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_replaced_with_force_only(aiockpt_command: Command, models: Path, tmp_path: Path) -> None:
    assert aiockpt_command("convert", models, tmp_path / "out").status == 0
    refused = aiockpt_command("convert", models, tmp_path / "out")
    assert refused.status == 3
    assert "--force" in refused.err
    assert aiockpt_command("convert", models, tmp_path / "out", "--force").status == 0
    refused = aiockpt_command("convert", tmp_path / "out", models, "--step", 2)
    assert refused.status == 2
    assert "--force" in refused.err
    assert aiockpt_command("convert", tmp_path / "out", models, "--step", 2, "--force").status == 0


def test_wrong_calls_say_what_is_right(aiockpt_command: Command, made: Path, models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((tmp_path / "empty", tmp_path / "out"), "neither a committed step nor .safetensors"),
        ((tmp_path / "none", tmp_path / "out"), "no such folder"),
        ((made, tmp_path / "out"), "no module"),
        ((models, tmp_path / "out", "--prefix", "modell"), "did you mean --prefix model"),
        ((models, tmp_path / "out", "--dtype", "int4"), "weights can be rounded to"),
        ((models, tmp_path / "out", "--max-shard-size", "lots"), "no size"),
        ((models, tmp_path / "out", "--tie", "a=b"), "--tie is for weights that become a step"),
        ((models, tmp_path / "out", "--step", 9), "no step 9"),
    ):
        outcome = aiockpt_command("convert", *arguments)
        assert outcome.status == 2, outcome.err
        assert message in " ".join(outcome.err.split())
    assert not (tmp_path / "out").exists()


def test_a_step_becomes_a_folder_of_dcp_and_a_step_again(
    aiockpt_command: Command, models: Path, tmp_path: Path
) -> None:
    done = aiockpt_command("convert", models, tmp_path / "dcp", "--to", "dcp", "--json").json()
    assert (done["step"], done["bytes"] > 0) == (2, True)
    again = aiockpt_command("convert", models, tmp_path / "dcp", "--to", "dcp")
    assert (again.status, "--force" in again.err) == (2, True)
    back = aiockpt_command("convert", tmp_path / "dcp", tmp_path / "back")
    assert back.status == 0, back.err
    for wrong in (("--to", "zip"), ("--to", "dcp", "--dtype", "bfloat16")):
        refused = aiockpt_command("convert", models, tmp_path / "out", *wrong)
        assert (refused.status, "a step becomes hf, or dcp" in " ".join(refused.err.split())) == (2, True)


def test_what_torch_has_saved_becomes_a_step(aiockpt_command: Command, tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(3)}, "step": 4}, tmp_path / "state.pt")
    planned = aiockpt_command("convert", tmp_path / "state.pt", tmp_path / "runs", "--step", 4, "--dry-run")
    assert "would write step 4, 1 tensor (1 F32)" in planned.out
    assert not (tmp_path / "runs").exists()
    done = aiockpt_command("convert", tmp_path / "state.pt", tmp_path / "runs", "--step", 4, "--json").json()
    assert (done["step"], done["tensor_count"]) == (4, 1)
    assert "step 4" in aiockpt_command("verify", tmp_path / "runs").out.replace("step-0000000", "step ")
    again = aiockpt_command("convert", tmp_path / "state.pt", tmp_path / "runs", "--step", 4)
    assert (again.status, "--force" in again.err) == (2, True)
    refused = aiockpt_command("convert", tmp_path / "state.pt", tmp_path / "runs", "--prefix", "model")
    assert (refused.status, "are for weights" in " ".join(refused.err.split())) == (2, True)
    torch.save({"path": tmp_path}, tmp_path / "object.pt")
    refused = aiockpt_command("convert", tmp_path / "object.pt", tmp_path / "runs", "--step", 5)
    assert (refused.status, "--trust-pickle" in refused.err) == (2, True)


def test_sizes_are_read_as_hugging_face_writes_them() -> None:
    assert [parse_size(text) for text in ("5GB", "500 MB", "2GiB", "1.5kb", "77")] == [
        5 * 10**9,
        5 * 10**8,
        2 << 30,
        1500,
        77,
    ]
    for text in ("", "0", "GB", "-1GB", "5 parsecs", "0.1"):
        with pytest.raises(UsageError, match="is no size"):
            parse_size(text)


def test_a_file_of_torch_is_written_for_a_name_that_is_one(
    aiockpt_command: Command, models: Path, tmp_path: Path
) -> None:
    outcome = aiockpt_command("convert", models, tmp_path / "out.pt", "--step", 1)
    assert (outcome.status, "for torch" in outcome.out) == (0, True), outcome.err
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() >= {"model", "optimizer"}
    assert aiockpt_command("convert", models, tmp_path / "out.pt").status == 2
    assert aiockpt_command("convert", models, tmp_path / "a.bin", "--to", "torch", "--dtype", "bfloat16").status == 2
    assert aiockpt_command("convert", tmp_path / "out.pt", tmp_path / "back", "--step", 4).status == 0
