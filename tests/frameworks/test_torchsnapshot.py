"""Is what torchsnapshot itself writes read bit by bit? The real library, on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped,unused-ignore]
from torch import nn

import aiockpt
from aiockpt.convert.foreign import load, open_checkpoint, save_as_step
from aiockpt.errors import CorruptionError, UsageError
from tests.convert.same_states import assert_same
from tests.convert.snapshot_states import WRITTEN, mixed, numbers, trained, values, written_on_two
from tests.docs.running import run_page
from tests.frameworks.torchsnapshot_ranks import (
    SMALL,
    RNGState,  # pyright: ignore[reportAttributeAccessIssue]
    Snapshot,  # pyright: ignore[reportAttributeAccessIssue]
    StateDict,  # pyright: ignore[reportAttributeAccessIssue]
    take_one,
)
from tests.ranks.forked import run_forked

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchsnapshot"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of loops that it leaves open
]


def test_one_rank(tmp_path: Path) -> None:
    take_one(tmp_path / "one")
    assert_same(open_checkpoint(tmp_path / "one").state, dict(open_checkpoint(WRITTEN / "one").state))
    assert_same(open_checkpoint(tmp_path / "one").state["values"], values())


def test_two_ranks(tmp_path: Path) -> None:
    assert run_forked("tests.frameworks.torchsnapshot_ranks", 2, tmp_path, 120) == [0, 0]
    state, of_second = written_on_two()
    assert_same(open_checkpoint(tmp_path / "two").state, {**state, "other_ranks": {1: of_second}})
    save_as_step(open_checkpoint(tmp_path / "two"), tmp_path / "steps", step=1)
    rows = torch.zeros(7, 3)
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.load({"sharded": {"rows": rows}}, strict=False).result()
    assert torch.equal(rows, numbers(7, 3))


@pytest.mark.parametrize("batched", [True, False])
def test_states_of_any_form(batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", str(not batched))
    for name, limit in SMALL.items():
        monkeypatch.setenv(name, limit)
    for seed in range(20):
        state, folder = mixed(seed), tmp_path / str(seed)
        Snapshot.take(str(folder), {"a/b": StateDict(**state), "c": StateDict(**mixed(-seed - 1))})
        found = open_checkpoint(folder).state
        assert_same(found["a/b"], state)
        target = StateDict(**mixed(seed))
        for key, value in target.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            else:
                target[key] = None
        restored = {"a/b": target, "c": StateDict(**mixed(-seed - 1))}
        Snapshot(str(folder)).restore(restored)
        assert_same(found["a/b"], target.data)


def test_yaml_of_early_versions(tmp_path: Path) -> None:
    take_one(tmp_path)
    expected = open_checkpoint(tmp_path).state
    manifest = tmp_path / ".snapshot_metadata"
    manifest.write_text(yaml.dump(json.loads(manifest.read_text()), sort_keys=False))
    assert Snapshot(str(tmp_path)).get_manifest()
    assert_same(open_checkpoint(tmp_path).state, dict(expected))
    text = manifest.read_text()
    for damaged in (text.replace("keys:", "keys", 1), "[", text.replace("shape:", "form:", 1)):
        manifest.write_text(damaged)
        with pytest.raises(CorruptionError):
            open_checkpoint(tmp_path)


def test_a_model_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    """The next training step from the step that it became is that from torchsnapshot's own restore."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(4, 3)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        return loss.item()

    model, optimizer = trained(1)
    app: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    torch.manual_seed(5)
    Snapshot.take(str(tmp_path / "snapshot"), app)
    losses = [train(model, optimizer) for _ in range(3)]
    save_as_step(open_checkpoint(tmp_path / "snapshot"), tmp_path / "steps")
    for way in ("torchsnapshot", "directly", "through a step"):
        model, optimizer = trained(2)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": {"rng_state": torch.get_rng_state()}}
        if way == "torchsnapshot":
            Snapshot(str(tmp_path / "snapshot")).restore({**app, "model": model, "optimizer": optimizer})
        elif way == "directly":
            load(tmp_path / "snapshot", state)
        else:
            with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
                ckpt.load(state).result()
        if way != "torchsnapshot":
            torch.set_rng_state(state["rng"]["rng_state"])
        assert [train(model, optimizer) for _ in range(3)] == losses, way


def test_bytes_that_torchsnapshot_left_out_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bfloat16 tensor with an odd number of elements it writes all but the last (0.1.0, without batches)."""
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "True")
    Snapshot.take(str(tmp_path), {"x": StateDict(odd=numbers(5, dtype=torch.bfloat16))})
    with pytest.raises(CorruptionError, match="x/odd has 8 bytes in its file, and 10 are its shape"):
        open_checkpoint(tmp_path)


def test_one_that_was_not_finished_is_none(tmp_path: Path) -> None:
    """It fails over a tensor without elements, after it has written others."""
    program = f"""
import torch
from torchsnapshot import Snapshot, StateDict

Snapshot.take({str(tmp_path)!r}, {{"x": StateDict(none=torch.empty(0, 3), pair=(1, 2), some=torch.ones(2))}})
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 1
    with pytest.raises(UsageError, match="nor a snapshot of torchsnapshot"):
        open_checkpoint(tmp_path)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()

    train()
    run_page("frameworks/torchsnapshot.md", {"model": model, "optimizer": optimizer, "train": train})
