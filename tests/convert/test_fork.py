"""A run begun from what another program wrote: filled once, told in its manifests, and resumed from its own steps."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import aiockpt
from aiockpt.convert import to_hugging_face
from tests.convert.test_foreign import trained
from tests.ranks.crew import Crew

dcp: Any = import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def write_dcp(folder: Path) -> dict[str, Any]:
    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "epoch": 4}, checkpoint_id=folder)
    return {"model": model, "optimizer": optimizer, "epoch": 4}


def write_folder(folder: Path, shard_bytes: int = 40) -> nn.Module:
    """Write the weights of a module as a folder of several files with an index."""
    model = trained(1)[0]
    with aiockpt.Checkpointer(f"memory://{folder.name}") as ckpt:
        ckpt.save(1, {"model": model}).result()
        done = to_hugging_face(ckpt, folder, max_shard_bytes=shard_bytes).result()
    assert len(done.files) > 2
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    found = other.state_dict()
    return all(torch.equal(value, found[name]) for name, value in one.state_dict().items())


def test_a_run_begins_from_a_checkpoint_of_dcp_once_and_then_resumes_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    was, url = write_dcp(tmp_path / "old"), f"dcp://{tmp_path}/old"
    model, optimizer = trained(2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.resume(state, fork=url) == 0
        assert equal(was["model"], model)
        assert optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(1.1)
        assert state["epoch"] == 4
        ckpt.save(0, state).result()
        state |= {"epoch": 5}
        ckpt.save(1, state).result()
    assert [record.message for record in caplog.records if "forked from a foreign checkpoint" in record.message]
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.resume(state, fork=url) == 2
        assert state["epoch"] == 5
        for step in ckpt.steps().result():
            assert step.forked_from == (url, "", "")
            assert step.describe_origin() == f"forked from {url}"
        assert ckpt.steps().result()[-1].parent is None


@pytest.mark.parametrize("options", [{}, {"worker": "process"}], ids=["thread", "process"])
def test_a_run_begins_from_a_folder_of_weights_and_the_rest_of_its_state_begins_anew(
    tmp_path: Path, options: Any
) -> None:
    was = write_folder(tmp_path / "weights")
    model, optimizer = trained(2)
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with aiockpt.Checkpointer(tmp_path / "run", **options) as ckpt:
        loaded = ckpt.load({"net": model, "optimizer": optimizer, "epoch": 7}, fork=f"hf://{tmp_path}/weights").result()
        assert loaded is not None
        assert (loaded.step, loaded.missing, loaded.bytes) == (-1, (), loaded.read_bytes)
        assert equal(was, model)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
        ckpt.save(0, {"net": model}).result()
        assert ckpt.steps().result()[0].forked_from == (f"hf://{tmp_path}/weights", "", "")


def test_a_folder_of_weights_may_lie_behind_a_url_and_have_other_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    tmp_path.joinpath("w").mkdir()
    save_file({"old.weight": torch.ones(3, 2), "old.bias": torch.ones(3)}, tmp_path / "w" / "model.safetensors")
    state, rules = {"model": model, "copy": nn.Linear(2, 3)}, [(r"^model\.old\.", "model.")]
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.load(state, only=["model"], rename=rules, fork=f"hf://file://{tmp_path}/w").result()
    assert bool((model.weight == 1).all())
    assert not bool((state["copy"].weight == 1).all())


@pytest.mark.parametrize(
    ("fork", "options", "told"),
    [
        ("dcp:///old", {"step": 3}, "holds one state and no steps; leave out the step"),
        ("hf:///old", {"step": 3}, "holds one state and no steps"),
        ("dcp:///old", {"optimizer_state": "by_parameter"}, "aiockpt convert dcp:///old RUN"),
        ("hf:///old", {}, r"the state has 2 modules \(model, ema\); name it: .*only="),
        ("dcp:///old", {}, "there is nothing"),
        ("hf:///old", {"only": ["ema"]}, "name a folder with"),
    ],
)
def test_what_a_foreign_checkpoint_cannot_do_is_said_and_changes_nothing(
    tmp_path: Path, fork: str, options: Any, told: str
) -> None:
    state = {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1)}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(aiockpt.UsageError, match=told):
        ckpt.load(state, fork=fork, **options).result()


def test_a_foreign_checkpoint_that_does_not_fit_names_all_and_changes_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path / "weights")
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(aiockpt.StateMismatchError, match=r"hf://.* does not fit the state:\n.*0\.bias") as found:
            ckpt.load({"model": model}, fork=f"hf://{tmp_path}/weights").result()
        assert len(found.value.problems) == 2
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        next(iter(sorted((tmp_path / "weights").glob("*.safetensors")))).unlink()
        with pytest.raises(aiockpt.CorruptionError, match="is missing"):
            ckpt.load({"model": model}, fork=f"hf://{tmp_path}/weights").result()


@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_ranks_begin_from_a_foreign_checkpoint_together_or_not_at_all(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    was: Any = write_dcp(folder)["model"] if kind == "dcp" else write_folder(folder)
    models: list[Any] = [trained(2)[0], trained(3)[0]]

    def work(rank: int, ckpt: aiockpt.Checkpointer) -> int:
        state = {"model": models[rank]}
        first = ckpt.resume(state, fork=f"{kind}://{folder}")
        ckpt.save(first, state).result()
        return first

    with Crew(2, tmp_path / "run") as crew:
        assert crew.on_all(work) == [0, 0]
    assert all(equal(was, model) for model in models)
    models[:] = trained(2)[0], nn.Sequential(nn.Linear(3, 5))
    before = models[0][0].weight.clone()

    def refused(rank: int, ckpt: aiockpt.Checkpointer) -> bool:
        with pytest.raises(aiockpt.StateMismatchError, match=r"does not fit the state:\n(.*\n)*.*\(rank 1\)"):
            ckpt.resume({"model": models[rank]}, fork=f"{kind}://{folder}")
        return torch.equal(models[0][0].weight, before)

    with Crew(2, tmp_path / "other") as crew:
        assert crew.on_all(refused) == [True, True]
