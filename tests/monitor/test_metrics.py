"""Do the metrics say what happened, and is the logger of experiments handed every number with its step?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.monitor import Metrics, Scalars

prometheus: Any = pytest.importorskip("prometheus_client")
STATE: dict[str, Any] = {"x": torch.arange(1000.0)}


def test_saves_loads_stages_and_copies_are_counted(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far")]
    with aiockpt.Checkpointer(tiers, observers=[Metrics(registry)]) as ckpt:
        for step in (3, 7):
            ckpt.save(step, STATE).committed(tmp_path / "far").result(30)
        ckpt.load(STATE).result(30)
        ckpt.wait()
    read = registry.get_sample_value
    assert read("aiockpt_saves_total", {"outcome": "committed"}) == 2
    assert read("aiockpt_saves_in_flight") == 0
    assert read("aiockpt_durable_step") == 7
    assert abs(read("aiockpt_durable_timestamp_seconds") - (tmp_path / "near" / "step-00000007").stat().st_mtime) < 60
    assert read("aiockpt_pause_seconds_count") == read("aiockpt_durable_seconds_count") == 2
    assert read("aiockpt_stage_seconds_count", {"operation": "save", "stage": "commit"}) == 2
    assert read("aiockpt_stage_seconds_count", {"operation": "copy", "stage": "copy"}) == 2
    assert read("aiockpt_written_bytes_total") >= 8000
    assert read("aiockpt_read_bytes_total") >= 4000
    assert read("aiockpt_loads_total") == 1
    far = f"file://{tmp_path / 'far'}"
    assert read("aiockpt_copies_total", {"url": far, "outcome": "committed"}) == 2
    assert read("aiockpt_copy_lag_seconds", {"url": far}) > 0
    assert b"aiockpt_saves_total" in prometheus.generate_latest(registry)


def test_a_failed_save_is_counted_and_in_flight_no_more(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    (tmp_path / "file").write_text("in the way")
    broken = tmp_path / "file" / "run"
    with (
        pytest.raises(aiockpt.BackgroundSaveError),
        aiockpt.Checkpointer(broken, observers=[Metrics(registry)]) as ckpt,
    ):
        ckpt.save(1, STATE)
    assert registry.get_sample_value("aiockpt_saves_total", {"outcome": "failed"}) == 1
    assert registry.get_sample_value("aiockpt_saves_in_flight") == 0


def test_a_logger_of_experiments_gets_numbers_with_their_step_on_another_thread(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    threads: set[str] = set()

    def log(values: Mapping[str, float], step: int) -> None:
        threads.add(threading.current_thread().name)
        told.extend((name, step) for name in values)

    with aiockpt.Checkpointer(tmp_path, observers=[Scalars(log)]) as ckpt:
        for step in (3, 7):
            ckpt.save(step, STATE).result(30)
        ckpt.load(STATE).result(30)
    for step in (3, 7):
        assert {("checkpoint/pause_s", step), ("checkpoint/durable_s", step)} <= set(told)
    assert ("checkpoint/load_s", 7) in told
    assert not any("loop" in name or name == "MainThread" for name in threads)


def test_a_logger_that_raises_is_logged_and_harms_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def log(values: Mapping[str, float], step: int) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "aiockpt"), aiockpt.Checkpointer(tmp_path, observers=[Scalars(log)]) as ckpt:
        assert ckpt.save(1, STATE).result(30).step == 1
    assert "stopped working" in caplog.text
