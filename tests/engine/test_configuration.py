"""What of the configuration has changed since a step was saved, reported without anything secret."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.tools.cli.main import app

OLD: dict[str, Any] = {
    "lr": 0.1,
    "data": {"seed": 3, "path": "s3://me:pass@host/x"},
    "api_key": "s3cr3t-1",
    "gone": [1],
}
NEW: dict[str, Any] = {
    "lr": 0.2,
    "data": {"seed": 3, "path": "s3://me:word@host/x"},
    "api_key": "s3cr3t-2",
    "flag": True,
}


def save(root: Path, step: int, config: Any, **how: Any) -> None:
    with aiockpt.Checkpointer(root, config=config, **how) as ckpt:
        ckpt.save(step, {"x": torch.ones(2)}).result()


def load(root: Path, config: Any) -> aiockpt.LoadResult:
    with aiockpt.Checkpointer(root, config=config) as ckpt:
        found = ckpt.load({"x": torch.zeros(2)}).result()
    assert found is not None
    return found


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_what_has_changed_is_one_line_at_the_load(
    tmp_path: Path, worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 4, OLD, worker=worker)
    with caplog.at_level(logging.INFO, logger="aiockpt"):
        found = load(tmp_path, NEW)
    changes = (
        "config.lr: 0.1 → 0.2", "config.api_key: '***' → '***'", "config.gone: [1] → none", "config.flag: none → True",
    )  # fmt: skip
    assert set(changes) < set(found.config_changes)
    assert len(found.config_changes) == 5
    (line,) = [one.getMessage() for one in caplog.records if "configuration has changed" in one.getMessage()]
    assert line.startswith("step 4: the configuration has changed since it was saved: ")
    assert "config.lr: 0.1 → 0.2" in line
    assert not any(secret in f"{line}{found}" for secret in ("s3cr3t", "pass@", "word@"))


def test_same_absent_and_older_configurations_are_no_change(tmp_path: Path) -> None:
    save(tmp_path, 1, OLD)
    assert load(tmp_path, OLD).config_changes == ()
    assert load(tmp_path, None).config_changes == ()
    save(tmp_path, 2, None)
    assert load(tmp_path, NEW).config_changes == ()
    documents = [path.read_bytes() for path in (tmp_path / "step-00000002").rglob("*.json")]
    assert documents
    assert not any(b'"config"' in document for document in documents)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_configuration_of_a_save_holds_for_its_step(tmp_path: Path, worker: Any) -> None:
    with aiockpt.Checkpointer(tmp_path, config=OLD, worker=worker) as ckpt:
        ckpt.save(1, {"x": torch.ones(2)}).result()
        ckpt.save(2, {"x": torch.ones(2)}, config={**OLD, "lr": 0.3}).result()
        ckpt.save(3, {"x": torch.ones(2)}).result()
    with aiockpt.Checkpointer(tmp_path, config=OLD) as ckpt:
        told = [ckpt.load({"x": torch.zeros(2)}, step).result() for step in (1, 2, 3)]
        with pytest.raises(aiockpt.UsageError, match="config"):
            ckpt.save(4, {"x": torch.ones(2)}, config={"x": object()})
    assert [found and found.config_changes for found in told] == [(), ("config.lr: 0.3 → 0.1",), ()]


def test_diff_shows_what_has_changed(tmp_path: Path) -> None:
    save(tmp_path, 1, OLD)
    save(tmp_path, 2, NEW)
    shown = CliRunner().invoke(app, ["diff", str(tmp_path), "1", "2"]).output
    assert "config.lr" in shown
    assert "0.1 → 0.2" in shown
    assert not any(secret in shown for secret in ("s3cr3t", "pass@", "word@"))


@pytest.mark.parametrize("config", [["lr"], {"x": object()}, {"x": torch.ones(1)}])
def test_what_is_no_plain_dict_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(aiockpt.UsageError, match="config"):
        aiockpt.Checkpointer(tmp_path, config=config)
