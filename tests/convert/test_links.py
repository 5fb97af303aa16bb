"""Folders of links, equal to written ones; a step that cannot serve as it is, refused with the reason."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import aiockpt
from aiockpt.errors import CorruptionError, ObjectExistsError, UsageError
from tests.cli.small_checkpoints import flip
from tests.convert.small_models import Tied, all_same, export, load_folder, save_model, save_state
from tests.small_run import small_checkpointer


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def test_the_files_are_those_of_the_step_and_hold_what_the_model_holds(root: Path, tmp_path: Path) -> None:
    done = export(root, tmp_path / "out", link=True)
    assert (done.step, done.prefix, done.linked, done.ties) == (7, "model", True, {"head.weight": "embed.weight"})
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["model.safetensors"] == list(done.files)
    assert files[0].stat().st_ino in {path.stat().st_ino for path in root.glob("step-*/a-*/d/*.safetensors")}
    assert all_same(load_folder(tmp_path / "out"), plain(Tied(1)))
    loaded = Tied(2)
    load_model(loaded, files[0])
    assert all_same(loaded.state_dict(), Tied(1).state_dict())


def test_several_files_get_an_index_that_says_where_each_weight_is(tmp_path: Path) -> None:
    model = nn.ModuleDict({str(number): nn.Linear(64, 64) for number in range(9)})
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=20480, file_bytes=40_000)
    with aiockpt.Checkpointer(tmp_path / "run", limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(1, {"model": model}).result()
    done = export(tmp_path / "run", tmp_path / "out", link=True)
    assert len(done.files) > 2
    assert done.files[0] == f"model-00001-of-0000{len(done.files)}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*done.files, "model.safetensors.index.json"}
    assert all_same(load_folder(tmp_path / "out"), model.state_dict())


def test_links_stay_when_the_step_is_deleted(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out", link=True)
    with small_checkpointer(root) as ckpt:
        ckpt.delete(7).result()
    assert all_same(load_folder(tmp_path / "out"), plain(Tied(1)))


def test_modules_beside_each_other_have_files_of_their_own(tmp_path: Path) -> None:
    save_state(tmp_path / "run", {"model": Tied(1), "ema": Tied(2), "teacher": {"net": Tied(3)}})
    for prefix, seed in (("ema", 2), ("teacher.net", 3)):
        export(tmp_path / "run", tmp_path / prefix, link=True, prefix=prefix)
        assert all_same(load_folder(tmp_path / prefix), plain(Tied(seed)))


def test_a_state_of_many_modules_keeps_them_in_one_file(tmp_path: Path) -> None:
    models = {f"m{number}": nn.Linear(2, 2) for number in range(9)}
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, models).result()
        found = {name: nn.Linear(2, 2) for name in models}
        ckpt.load(found).result()
    assert all(all_same(found[name].state_dict(), models[name].state_dict()) for name in models)
    assert len(list(tmp_path.glob("run/step-*/a-*/d/*"))) == 1
    with pytest.raises(UsageError, match="holds other tensors beside the weights of m3, or under other names"):
        export(tmp_path / "run", tmp_path / "out", link=True, prefix="m3")


def test_tensors_that_something_else_holds_too_are_no_file_of_the_module(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"first": model.weight, "model": model}).result()
        found: dict[str, Any] = {"first": torch.zeros(3, 3), "model": nn.Linear(3, 3)}
        ckpt.load(found).result()
    assert torch.equal(found["first"], model.weight)
    assert all_same(found["model"].state_dict(), model.state_dict())
    with pytest.raises(UsageError, match="holds other tensors"):
        export(tmp_path / "run", tmp_path / "out", link=True)
    export(tmp_path / "run", tmp_path / "out")
    assert all_same(load_folder(tmp_path / "out"), model.state_dict())


@pytest.mark.parametrize(
    ("state", "options", "why"),
    [
        ({"model": Tied(1).state_dict()}, {"prefix": "model"}, "a dict of tensors is no module"),
        ({"model": Tied(1)}, {"dtype": "bfloat16"}, "a link cannot round"),
        (
            {"model": {"w": aiockpt.Shards((4,), [((0,), torch.ones(2)), ((2,), torch.ones(2))])}},
            {"prefix": "model"},
            "saved parts of w, and a link is to a whole file",
        ),
    ],
)
def test_what_cannot_serve_as_it_is_is_refused_and_leaves_nothing(
    state: dict[str, Any], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save_state(tmp_path / "run", state)
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=why):
            export(tmp_path / "run", tmp_path / "out", link=True, dry_run=dry_run, **options)
    assert not (tmp_path / "out").exists()


def test_names_that_change_places_are_refused_as_the_files_have_their_own(tmp_path: Path) -> None:
    save_state(tmp_path / "run", {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    with pytest.raises(UsageError, match="or under other names"):
        export(
            tmp_path / "run", tmp_path / "out", link=True, rename=lambda name: {"a": "b", "b": "a"}[name[0]] + name[1:]
        )
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_no_file_system_is_refused(tmp_path: Path) -> None:
    save_model("memory://links", 1)
    with pytest.raises(UsageError, match="links need one file system of this machine"):
        export("memory://links", tmp_path / "out", link=True)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS])
def test_another_file_system_is_refused_with_what_to_do(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("aiockpt.runtime.world.OsFiles.link", staticmethod(refuse))
    with pytest.raises(UsageError, match=r"cannot be linked into .* name a folder on the same file system"):
        export(root, tmp_path / "out", link=True)
    assert not (tmp_path / "out").exists()


def test_damage_is_found_before_anything_is_visible(root: Path, tmp_path: Path) -> None:
    weights = min(root.glob("step-*/a-*/d/*.safetensors"))
    flip(weights, weights.stat().st_size - 5)
    with pytest.raises(CorruptionError):
        export(root, tmp_path / "out", link=True)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_there_stay_unless_they_are_to_be_replaced(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out", link=True)
    before = (tmp_path / "out" / "model.safetensors").stat().st_ino
    with pytest.raises(ObjectExistsError, match=r"holds model\.safetensors already"):
        export(root, tmp_path / "out", link=True)
    save_model(root, 8, seed=4)
    export(root, tmp_path / "out", link=True, replace=True)
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino != before
    assert all_same(load_folder(tmp_path / "out"), plain(Tied(4)))
