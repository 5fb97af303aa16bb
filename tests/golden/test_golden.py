"""Checkpoints of every release stay readable: each is loaded and compared bit by bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from tests.golden.golden_state import golden_state

RELEASES = sorted(path for path in Path(__file__).parent.glob("v*") if path.is_dir())


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{path}.{key!r}", inner)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield path, type(value)
        for index, inner in enumerate(value):
            yield from leaves(f"{path}[{index}]", inner)
    elif isinstance(value, torch.Tensor):
        yield path, (value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist())
    elif isinstance(value, np.ndarray):
        yield path, (value.dtype, value.tolist())
    else:
        yield path, (type(value), value)


def blank() -> dict[str, Any]:
    """Return a state of the same structure with other contents."""
    state = golden_state()
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    state["dtypes"] = {name: torch.zeros_like(tensor) for name, tensor in state["dtypes"].items()}
    state["shapes"] = {name: torch.zeros_like(tensor) for name, tensor in state["shapes"].items()}
    state["values"] = dict.fromkeys(state["values"])
    return state


@pytest.mark.parametrize("release", RELEASES, ids=[path.name for path in RELEASES])
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_a_checkpoint_of_an_earlier_release_loads_bit_for_bit(release: Path, tmp_path: Path) -> None:
    state = blank()
    assert dict(leaves("", state)) != dict(leaves("", golden_state()))
    shutil.copytree(release, tmp_path / "run")
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        loaded = ckpt.load(state).result()
        assert loaded is not None
        assert ckpt.describe(7).result().info.metrics == {"loss": 0.25}
    assert loaded.step == 7
    assert dict(leaves("", state)) == dict(leaves("", golden_state()))
    assert state["model"][3].weight is state["model"][0].weight


def test_there_is_a_golden_checkpoint_of_this_release() -> None:
    assert f"v{aiockpt.__version__}" in [path.name for path in RELEASES]
