"""Does a snapshot of torchsnapshot come back bit by bit, of one rank and of two, and can a bad one do no harm?

tests/convert/snapshots was written by the library itself; tests/frameworks/run torchsnapshot writes more of them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.convert.foreign import load, open_checkpoint, save_as_step
from aiockpt.errors import CorruptionError, UsageError
from tests.convert.same_states import assert_same
from tests.convert.snapshot_states import WRITTEN, numbers, trained, values, written_on_two
from tests.convert.test_foreign import Harm

MANIFEST = ".snapshot_metadata"


def edit(folder: Path, change: Callable[[dict[str, Any]], object], of: str = "one") -> Path:
    """Copy a snapshot, and *change* its manifest."""
    shutil.copytree(WRITTEN / of, folder)
    written = json.loads((folder / MANIFEST).read_text())
    change(written["manifest"])
    (folder / MANIFEST).write_text(json.dumps(written))
    return folder


def test_what_one_rank_wrote_is_read() -> None:
    found = open_checkpoint(WRITTEN / "one")
    assert found.kind == "a snapshot of torchsnapshot"
    assert_same(found.state["values"], values())
    assert [*found.state["values"]["ordered"]] == ["z", "a"]
    model, optimizer = trained(1)
    assert_same(found.state["model"], dict(model.state_dict()))
    assert_same(found.state["optimizer"]["state"], optimizer.state_dict()["state"])


def test_live_objects_and_steps_get_what_was_saved(tmp_path: Path) -> None:
    expected, expected_optimizer = trained(1)
    done = save_as_step(open_checkpoint(WRITTEN / "one"), tmp_path, step=3)
    assert (done.step, done.tensor_count) == (3, 16)
    for way in ("directly", "through a step"):
        model, optimizer = trained(2)
        state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "values": {"step": 0, "half": torch.zeros(4).bfloat16()},
        }
        if way == "directly":
            load(WRITTEN / "one", state, strict={"values": False})
        else:
            with aiockpt.Checkpointer(tmp_path) as ckpt:
                ckpt.load(state, strict={"values": False}).result()
        assert_same(model.state_dict(), expected.state_dict())
        assert_same(optimizer.state_dict(), expected_optimizer.state_dict())
        for key in ("step", "half", "ordered"):
            assert_same(state["values"][key], values()[key])


def test_tensors_of_two_ranks_are_whole_and_what_differs_is_kept(tmp_path: Path) -> None:
    state, of_second = written_on_two()
    found = open_checkpoint(WRITTEN / "two")
    assert_same(found.state, {**state, "other_ranks": {1: of_second}})
    save_as_step(found, tmp_path)
    target = {"sharded": {"rows": torch.zeros(7, 3)}, "replicated": {"big": torch.zeros(6, 8)}}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load(target, strict=False).result()
    assert_same(target["sharded"], state["sharded"])
    assert_same(target["replicated"]["big"], state["replicated"]["big"])


def test_shards_of_a_mesh_that_several_ranks_wrote_count_once(tmp_path: Path) -> None:
    """As later versions write a DTensor that is replicated over one side of its mesh."""

    def as_mesh(manifest: dict[str, Any]) -> None:
        shards = [*manifest["0/sharded/rows"]["shards"], *manifest["1/sharded/rows"]["shards"]]
        for rank in "01":
            manifest[f"{rank}/sharded/rows"] = {
                "type": "DTensor",
                "shards": shards[int(rank) :],
                "mesh": [0, 1],
                "dim_map": [[0]],
            }

    found = open_checkpoint(edit(tmp_path / "two", as_mesh, "two"))
    assert_same(found.state["sharded"], written_on_two()[0]["sharded"])


def test_yaml_without_pyyaml_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MANIFEST).write_text("version: 0.0.1\nworld_size: 1\nmanifest: {}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="pip install pyyaml"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["object", "tensor"])
def test_no_file_runs_code(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = edit(tmp_path / "one", lambda _: None)
    torch.save(Harm(), path / "0" / "values" / ("pair" if where == "object" else "complex"))
    with pytest.raises(UsageError, match=r"holds objects \(posix\.mkdir\).*--trust-pickle"):
        open_checkpoint(path)
    assert not (tmp_path / "harm").exists()
    if where == "object":
        open_checkpoint(path, trust_pickle=True)
        assert (tmp_path / "harm").exists()


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "outside of the folder": lambda all: all["0/values/pair"].update(location="../one/0/values/pair"),
    "is damaged: it does not describe values/step": lambda all: (
        all.pop("0/values/step") and all.update({"0/values/x": all["0/values/name"]})
    ),
    "values has other entries than keys": lambda all: all.update({"0/values/more": all["0/values/name"]}),
    "does not describe values/list/1": lambda all: all.pop("0/values/list/1"),
    "12 bytes in its file, and 24 are its shape": lambda all: all["0/values/byte"].update(
        dtype="torch.float64", shape=[3], byte_range=[0, 12]
    ),
    "is cut short": lambda all: all["0/values/byte"].update(byte_range=[0, 1 << 40]),
    r"is a torch\.load of": lambda all: all["0/values/byte"].update(dtype="torch.load"),
    r"is a torch\.uint8 of \(-1, -3\)": lambda all: all["0/values/byte"].update(shape=[-1, -3]),
    r"is a torch\.complex64 of \(2,\) in its file": lambda all: all["0/values/complex"].update(shape=[1]),
    "of an unknown type": lambda all: all["0/values/byte"].update(type="Sparse"),
    "quantised": lambda all: all["0/values/byte"].update(serializer="per_tensor_qtensor"),
    "no rank with a path": lambda all: all.update({"model": {"type": "list"}}),
    "rate": lambda all: all["0/values/rate"].update(serialized_value="AAAA"),
    "yes": lambda all: all["0/values/yes"].update(serialized_value="maybe"),
}


@pytest.mark.parametrize("told", WRONG)
def test_a_manifest_that_is_not_true_is_told(told: str, tmp_path: Path) -> None:
    with pytest.raises((CorruptionError, UsageError), match=told):
        open_checkpoint(edit(tmp_path / "one", WRONG[told]))


WRONG_SHARDS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "do not add up to its shape": lambda shards: shards.pop(0),
    "overlap": lambda shards: shards[0].update(offsets=[1, 0]),
    "is damaged": lambda shards: shards[0].update(offsets=[0]),
    "other sizes than their tensors": lambda shards: shards[0].update(sizes=[1, 3]),
}


@pytest.mark.parametrize("told", WRONG_SHARDS)
def test_shards_that_are_no_tensor_are_told(told: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match=told):
        open_checkpoint(edit(tmp_path / "two", lambda all: WRONG_SHARDS[told](all["1/sharded/rows"]["shards"]), "two"))


def test_a_part_of_the_state_with_our_name_is_not_overwritten(tmp_path: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        manifest["0/other_ranks"] = {"type": "list"}

    with pytest.raises(UsageError, match="other_ranks"):
        open_checkpoint(edit(tmp_path / "two", rename, "two"))


def test_a_damaged_snapshot_is_told_or_harmless(tmp_path: Path) -> None:
    """Whatever byte is another, reading raises ours alone; torchsnapshot has no checksums, so that values may be others."""
    path = edit(tmp_path / "two", lambda _: None, "two")
    whole = (path / MANIFEST).read_bytes()
    for at in range(0, len(whole), 5):
        (path / MANIFEST).write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with suppress(CorruptionError, UsageError):
            open_checkpoint(path)
    for size in range(0, len(whole) - 1, 97):
        (path / MANIFEST).write_bytes(whole[:size])
        with pytest.raises((CorruptionError, UsageError)):
            open_checkpoint(path)
    (path / MANIFEST).write_bytes(whole)
    for file in (path / "batched").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        with pytest.raises(CorruptionError, match="is cut short"):
            open_checkpoint(path)
        file.unlink()
        with pytest.raises(CorruptionError, match=file.name):
            open_checkpoint(path)
        file.write_bytes(data)
    (path / MANIFEST).unlink()
    with pytest.raises(UsageError, match="nor a snapshot of torchsnapshot"):
        open_checkpoint(path)


def test_an_entry_at_two_places_is_one_tensor(tmp_path: Path) -> None:
    path = edit(tmp_path / "one", lambda manifest: manifest.update({"0/values/flags": manifest["0/values/byte"]}))
    found = open_checkpoint(path).state["values"]
    assert found["flags"] is found["byte"]


def test_tensors_of_no_elements_and_at_odd_places_are_read(tmp_path: Path) -> None:
    def place(manifest: dict[str, Any]) -> None:
        manifest["0/values/double"] |= {"location": "odd", "byte_range": [1, 17]}
        manifest["0/values/byte"] |= {"location": "nowhere", "shape": [0, 3], "byte_range": None}

    path = edit(tmp_path / "one", place)
    (path / "odd").write_bytes(b"." + numbers(2, dtype=torch.float64).numpy().tobytes())
    found = open_checkpoint(path).state["values"]
    assert_same(found["double"], numbers(2, dtype=torch.float64))
    assert_same(found["byte"], torch.empty(0, 3, dtype=torch.uint8))
    assert save_as_step(open_checkpoint(path), tmp_path / "steps").tensor_count == 16
