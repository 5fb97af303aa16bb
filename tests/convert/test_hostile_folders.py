"""Folders that are cut short, lie, or want to lead somewhere else are refused, and nothing becomes visible."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import aiockpt
from aiockpt.errors import CheckpointError, CorruptionError, UsageError
from tests.convert.small_models import DEADLINE_S, Tied, all_same, export, load_folder, take_in
from tests.example_counts import examples

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path, root: Path) -> Path:
    """Return a folder of several files."""
    export(root, tmp_path / "in", max_shard_bytes=10_000)
    return tmp_path / "in"


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def assert_refused(folder: Path, kind: type[CheckpointError], message: str) -> None:
    run = folder.parent / "refused"
    with pytest.raises(kind, match=message):
        take_in(run, folder)
    with aiockpt.Checkpointer(run) as ckpt:
        assert ckpt.latest().result(DEADLINE_S) is None
    assert not list(run.rglob("*.safetensors"))


def test_a_file_that_the_index_names_and_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert_refused(sharded, CorruptionError, "00002-of-00003.safetensors is missing")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_that_is_cut_short(sharded: Path, kept: int) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_refused(sharded, CorruptionError, "00002-of-00003.safetensors.*(too few|cut short)")


def test_an_index_that_leads_out_of_its_folder(sharded: Path) -> None:
    save_file({"scale": torch.ones(1)}, sharded.parent / "outside.safetensors")
    for path in ("../outside.safetensors", "/etc/passwd", "sub/x.safetensors", ".hidden.safetensors"):
        edit_index(sharded, lambda index, path=path: index["weight_map"].update(scale=path))  # type: ignore[misc]
        assert_refused(sharded, CorruptionError, "no safetensors file of this folder")


def test_an_index_that_disagrees_with_the_files(sharded: Path) -> None:
    first, second = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    edit_index(sharded, lambda index: index["weight_map"].update(ghost=first))
    assert_refused(sharded, CorruptionError, "'ghost' is in model-00001.*in no file")
    edit_index(sharded, lambda index: (index["weight_map"].pop("ghost"), index["weight_map"].update(counts=second)))
    assert_refused(sharded, CorruptionError, f"'counts' is in {second}, and it is in {first}")
    edit_index(sharded, lambda index: index["weight_map"].pop("counts"))
    assert_refused(sharded, CorruptionError, "'counts', which its index does not name")


def test_an_index_that_is_none(sharded: Path) -> None:
    for text in (
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": ["x"]}}',
        "\udcff",
        '{"weight_map": {}, "weight_map": {}}',
    ):
        (sharded / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
        assert_refused(sharded, CorruptionError, "index")


def test_a_tensor_that_is_in_two_files(sharded: Path) -> None:
    tensors = {"embed.weight": torch.ones(3), "norm.weight": torch.ones(3), "norm.bias": torch.ones(3)}
    save_file(tensors, sharded / "model-00003-of-00003.safetensors")
    assert_refused(sharded, CorruptionError, r"'embed\.weight' is in model-00002.* and in model-00003")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},  # bytes for two
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},  # more than the file
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},  # a hole
        {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "b": {}},
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: dict[str, Any]) -> None:
    (tmp_path / "in").mkdir()
    text = json.dumps(header).encode()
    (tmp_path / "in" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    assert_refused(tmp_path / "in", CorruptionError, "model.safetensors")


def test_a_header_whose_length_would_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    assert_refused(tmp_path / "in", CorruptionError, "cannot have")


def test_a_tie_to_nowhere_in_the_metadata_is_no_tie(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    notes = {"format": "pt", "x": "nowhere", "a": "b", "y": "a", "author": "me"}
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "in" / "model.safetensors", metadata=notes)
    assert take_in(tmp_path / "run", tmp_path / "in").ties == {"model.y": "model.a"}


def test_folders_that_leave_it_open_what_is_meant(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert_refused(tmp_path / "in", UsageError, "neither model.safetensors nor")
    for name in ("one", "two"):
        save_file({name: torch.ones(2)}, tmp_path / "in" / f"{name}.safetensors")
    assert_refused(tmp_path / "in", UsageError, "2 safetensors files and no")
    assert take_in(tmp_path / "run", tmp_path / "in" / "two.safetensors").files == ("two.safetensors",)
    (tmp_path / "in" / "one.safetensors").unlink()
    assert take_in(tmp_path / "run", tmp_path / "in", step=1).files == ("two.safetensors",)
    save_file({}, tmp_path / "in" / "two.safetensors")
    assert_refused(tmp_path / "in", UsageError, "holds no tensor")
    assert_refused(tmp_path / "nowhere", UsageError, "No such file")


def test_the_links_of_a_cache_are_followed_and_one_to_nothing_is_not(tmp_path: Path, sharded: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        os.rename(path, tmp_path / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    take_in(tmp_path / "run", sharded)
    export(tmp_path / "run", tmp_path / "out")
    assert all_same(load_folder(tmp_path / "out"), load_folder(sharded))
    (tmp_path / "blobs" / "1").unlink()
    assert_refused(sharded, CorruptionError, "is missing")


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 700), byte=st.integers(0, 255))
def test_a_changed_byte_of_a_header_is_refused_or_changes_no_more_than_it_says(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    save_file({name: t.clone() for name, t in Tied(1).state_dict().items()}, folder / "model.safetensors")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[place] = byte
    (folder / "model.safetensors").write_bytes(data)
    try:
        done = take_in(folder / "run", folder, dry_run=True)
    except (CorruptionError, UsageError):
        return
    assert done.bytes < len(data) + 8192


def test_a_damaged_step_leaves_no_folder(tmp_path: Path, root: Path) -> None:
    (data,) = root.glob("step-*/a-*/d/*.safetensors")
    damaged = bytearray(data.read_bytes())
    for offset in range(8192, len(damaged), 4096):
        damaged[offset] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CorruptionError, match="is not what was saved"):
        export(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
