"""The files are plain safetensors: other tools open them, and find what was saved."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import aiockpt
from tests.small_run import Run, small_checkpointer


def data_files(root: Path) -> list[Path]:
    return sorted(root.glob("step-*/a-*/d/*.safetensors"))


def test_safetensors_opens_the_data_files(tmp_path: Path, run: Run) -> None:
    run.train()
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, run.state).result()
    weights, rest = data_files(tmp_path)
    loaded = load_file(weights)
    assert loaded.keys() == run.model.state_dict().keys()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    assert not any(name.startswith("model.") for name in load_file(rest))
    for path in (weights, rest):
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert opened.metadata()["aiockpt"] == ('{"v":1,"below":"model"}' if path == weights else '{"v":1}')


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_torchs_own_reader_of_hugging_face_files_loads_them(tmp_path: Path, run: Run) -> None:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": run.model}).result()
    target = {name: torch.zeros_like(tensor) for name, tensor in run.model.state_dict().items()}
    folder = data_files(tmp_path / "run")[0].parent
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(target[name], tensor)


def test_large_states_are_cut_into_several_files_that_all_open(tmp_path: Path) -> None:
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384, file_bytes=100_000)
    state = {f"t{number}": torch.randn(100, 100) for number in range(10)}
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(1, state).result()
        target = {name: torch.zeros(100, 100) for name in state}
        ckpt.load(target).result()
    assert all(torch.equal(target[name], state[name]) for name in state)
    files = data_files(tmp_path)
    assert len(files) == 5
    together = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert all(torch.equal(together[name], state[name]) for name in state)
