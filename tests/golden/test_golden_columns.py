"""Checkpoints in columns of every release stay readable: each is loaded and compared bit by bit."""

import shutil
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.format.manifest import decode_manifest
from tests.golden.columns_state import RANKS, columns_state

RELEASES = sorted(path for path in (Path(__file__).parent / "columns").glob("v*") if path.is_dir())


@pytest.mark.parametrize("release", RELEASES, ids=[path.name for path in RELEASES])
def test_a_checkpoint_in_columns_of_an_earlier_release_loads_bit_for_bit(release: Path, tmp_path: Path) -> None:
    shutil.copytree(release, tmp_path / "run")
    manifest = decode_manifest(next((tmp_path / "run").glob("step-*/MANIFEST-1.json")).read_bytes())
    assert manifest.requires == ("parts",)
    assert manifest.world_size == RANKS
    assert manifest.parts
    assert manifest.parts[0].count > len(manifest.tensors)  # some are cut
    state = {name: torch.zeros_like(tensor) for name, tensor in columns_state().items()}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.load(state).result() is not None
        assert ckpt.verify(7).result().step == 7
    assert all(torch.equal(state[name], tensor) for name, tensor in columns_state().items())


def test_there_is_a_golden_checkpoint_in_columns_of_this_release() -> None:
    assert f"v{aiockpt.__version__}" in [path.name for path in RELEASES]
