"""The metrics of what happened, and each number with its step for the logger of experiments."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import events
from aiockpt.backends.local import LocalBackend
from aiockpt.events import PublicationFailed, VersionPublished
from aiockpt.monitor import Metrics, Scalars
from aiockpt.monitor.metrics import RunTime
from aiockpt.runtime.progress import FOLDER, RestartFigures, write_figures
from aiockpt.runtime.world import OsFiles, World
from tests.watch import Watch

prometheus: Any = pytest.importorskip("prometheus_client")
STATE: dict[str, Any] = {"x": torch.arange(1000.0)}
Read = Callable[..., float]


@pytest.fixture
def registry() -> Any:
    return prometheus.CollectorRegistry()


@pytest.fixture
def read(registry: Any) -> Any:
    return registry.get_sample_value


def test_versions_and_the_lag_of_receivers_are_counted(registry: Any, read: Read) -> None:
    metrics, url = Metrics(registry), {"url": "file:///pub"}
    usual: dict[str, Any] = {"at_ns": 1, "url": "file:///pub", "weight_bytes": 100, "seconds": 0.5}
    metrics.on_event(VersionPublished(**usual, step=3, version=0, kind="full", bytes=100))
    metrics.on_event(VersionPublished(**usual, step=4, version=1, kind="delta", bytes=7, receivers={"r": 1}))
    metrics.on_event(PublicationFailed(at_ns=2, step=5, url="file:///pub", error="no"))
    outcomes = [read("aiockpt_publications_total", url | {"outcome": one}) for one in ("full", "delta", "failed")]
    assert outcomes == [1, 1, 1]
    assert read("aiockpt_published_bytes_total", url) == 107
    assert read("aiockpt_published_step", url) == 4
    assert read("aiockpt_published_seconds", url) == 0.5
    assert read("aiockpt_receiver_lag", url | {"receiver": "r"}) == 1


def test_saves_loads_stages_and_copies_are_counted(registry: Any, read: Read, tmp_path: Path) -> None:
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far")]
    with aiockpt.Checkpointer(tiers, observers=[Metrics(registry)]) as ckpt:
        for step in (3, 7):
            ckpt.save(step, STATE).committed(tmp_path / "far").result()
        ckpt.load(STATE).result()
        with pytest.raises(aiockpt.StateMismatchError):
            ckpt.load({"y": torch.zeros(1)}).result()
        ckpt.wait()
    assert read("aiockpt_saves_total", {"outcome": "committed"}) == 2
    assert read("aiockpt_saves_in_flight") == 0
    assert read("aiockpt_durable_step") == 7
    assert abs(read("aiockpt_durable_timestamp_seconds") - (tmp_path / "near" / "step-00000007").stat().st_mtime) < 60
    assert read("aiockpt_pause_seconds_count") == read("aiockpt_durable_seconds_count") == 2
    assert read("aiockpt_stage_seconds_count", {"operation": "save", "stage": "commit"}) == 2
    assert read("aiockpt_stage_seconds_count", {"operation": "copy", "stage": "copy"}) == 2
    assert read("aiockpt_written_bytes_total") >= 8000
    assert read("aiockpt_read_bytes_total") >= 4000
    assert read("aiockpt_loads_total", {"outcome": "loaded"}) == 1
    assert read("aiockpt_loads_total", {"outcome": "failed"}) == 1
    far = f"file://{tmp_path / 'far'}"
    assert read("aiockpt_copies_total", {"url": far, "outcome": "committed"}) == 2
    assert read("aiockpt_copy_lag_seconds", {"url": far}) > 0
    assert b"aiockpt_saves_total" in prometheus.generate_latest(registry)


def test_a_registry_takes_the_metrics_of_one_checkpointer_at_a_time(registry: Any, read: Read, tmp_path: Path) -> None:
    metrics = Metrics(registry)
    for name in ("first", "second"):
        with aiockpt.Checkpointer(tmp_path / name, observers=[metrics]) as ckpt:
            ckpt.save(1, STATE).result()
    assert read("aiockpt_saves_total", {"outcome": "committed"}) == 2
    with pytest.raises(aiockpt.UsageError, match="has the metrics of another checkpointer already"):
        Metrics(registry)


def test_numbers_that_are_not_finite_and_what_a_repair_finds_are_counted(
    registry: Any, read: Read, tmp_path: Path
) -> None:
    metrics = Metrics(registry)
    with aiockpt.Checkpointer(tmp_path, observers=[metrics], screen="finite") as ckpt:
        for step, value in ((1, 0.0), (2, float("nan")), (3, float("inf"))):
            ckpt.save(step, {"x": torch.full((4,), value)}).result()
    metrics.on_event(events.StepRepaired(at_ns=1, step=1, url="file:///r", keys=("d",), bytes=4))
    metrics.on_event(events.StepDamaged(at_ns=2, step=2, url="file:///r", problem="no copy"))
    assert read("aiockpt_saves_not_finite_total") == 2
    assert read("aiockpt_repairs_total", {"outcome": "repaired"}) == 1
    assert read("aiockpt_repairs_total", {"outcome": "left"}) == 1


def test_what_loads_read_is_compared_with_what_they_filled(registry: Any, read: Read, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, observers=[Metrics(registry)]) as ckpt:
        ckpt.save(1, STATE).result()
        loaded = ckpt.load(STATE).result()
    assert loaded is not None
    assert read("aiockpt_loaded_bytes_total") == loaded.bytes == 4000
    assert read("aiockpt_load_read_ratio") == loaded.read_bytes / 4000


def test_memory_and_writes_are_looked_up_as_long_as_the_checkpointer_is_there(
    registry: Any, read: Read, tmp_path: Path
) -> None:
    ckpt = aiockpt.Checkpointer(tmp_path, observers=[Metrics(registry)])
    with ckpt:
        ckpt.save(1, STATE).result()
        now = ckpt.statistics()
        assert read("aiockpt_pool_bytes", {"state": "limit"}) == now.pool.ceiling_bytes > 0
        assert read("aiockpt_pool_bytes", {"state": "allocated"}) == now.pool.allocated_bytes > 0
        assert read("aiockpt_pool_bytes", {"state": "used"}) == read("aiockpt_pool_waiting") == 0
        assert read("aiockpt_writes", {"state": "limit"}) == now.limiters[0].limit > 0
        assert read("aiockpt_writes", {"state": "running"}) == read("aiockpt_writes", {"state": "waiting"}) == 0
    del ckpt
    gc.collect()
    assert read("aiockpt_pool_bytes", {"state": "limit"}) == 0


def test_memory_in_use_is_seen_while_a_save_writes(registry: Any, read: Read, tmp_path: Path) -> None:
    used: list[tuple[float, float]] = []

    class Files(OsFiles):
        def pwrite(self, fd: int, data: Any, offset: int) -> int:
            used.append(
                (
                    read("aiockpt_pool_bytes", {"state": "used"}),
                    read("aiockpt_writes", {"state": "running"}),
                )
            )
            return os.pwrite(fd, data, offset)

    backend = LocalBackend(tmp_path, world=World(files=Files()))
    with aiockpt.Checkpointer(backend, observers=[Metrics(registry)]) as ckpt:
        ckpt.save(1, STATE).result()
    assert any(memory > 0 and running == 1 for memory, running in used)


def test_what_waits_for_a_farther_place_is_counted_until_it_is_there_or_given_up(registry: Any, read: Read) -> None:
    metrics, far = Metrics(registry), {"url": "s3://far"}
    began_ns = time.monotonic_ns() - 60 * 10**9
    for step in (1, 2, 3):
        metrics.on_event(events.PromotionQueued(at_ns=began_ns, step=step, url="s3://far"))
    metrics.on_event(events.PromotionFailed(at_ns=0, step=1, url="s3://far", error="away", final=False))
    assert read("aiockpt_copies_waiting", far) == 3
    assert 60 <= read("aiockpt_copies_waiting_seconds", far) < 600
    metrics.on_event(events.Promoted(at_ns=0, step=1, url="s3://far", bytes=1, seconds=61.0))
    metrics.on_event(events.PromotionFailed(at_ns=0, step=2, url="s3://far", error="away", final=True))
    assert read("aiockpt_copies_waiting", far) == 1
    metrics.on_event(events.Promoted(at_ns=0, step=3, url="s3://far", bytes=1, seconds=61.0))
    assert read("aiockpt_copies_waiting", far) == read("aiockpt_copies_waiting_seconds", far) == 0


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_each_copy_is_queued_before_it_is_made(tmp_path: Path, worker: Any) -> None:
    watch = Watch()
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far", every=2)]
    with aiockpt.Checkpointer(tiers, observers=[watch], worker=worker) as ckpt:
        for step in (1, 2):
            ckpt.save(step, STATE).result()
    far = f"file://{tmp_path / 'far'}"
    told = [one for one in watch.events if isinstance(one, events.PromotionQueued | events.Promoted)]
    assert [(type(one), one.step, one.url) for one in told] == [
        (events.PromotionQueued, 2, far),
        (events.Promoted, 2, far),
    ]


def test_what_a_restart_lost_and_what_was_trained_since_are_told(tmp_path: Path) -> None:
    first, second = prometheus.CollectorRegistry(), prometheus.CollectorRegistry()
    with aiockpt.Checkpointer(tmp_path, observers=[Metrics(first)]) as ckpt:
        assert ckpt.resume(STATE) == 0
        time.sleep(0.05)
        assert first.get_sample_value("aiockpt_at_risk_seconds") >= 0.05, "nothing is durable yet"
        ckpt.save(1, STATE).result()
        ckpt.load(STATE).result()
        assert first.get_sample_value("aiockpt_lost_seconds") == 0, "going back is no restart"
    time.sleep(0.3)
    with aiockpt.Checkpointer(tmp_path, observers=[Metrics(second)]) as ckpt:
        before_s = time.monotonic()
        assert ckpt.resume(STATE) == 2
        lost_s = second.get_sample_value("aiockpt_lost_seconds")
        assert 0.3 <= lost_s < 30
        time.sleep(0.1)
        effective = second.get_sample_value("aiockpt_effective_ratio")
        assert 0 < effective < 0.1 + (time.monotonic() - before_s) / lost_s
        assert 0.1 <= second.get_sample_value("aiockpt_at_risk_seconds") <= time.monotonic() - before_s


def test_a_step_of_an_earlier_start_that_is_loaded_after_a_save_is_no_restart(
    registry: Any, read: Read, tmp_path: Path
) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).result()
    time.sleep(0.05)
    with aiockpt.Checkpointer(tmp_path, observers=[Metrics(registry)]) as ckpt:
        ckpt.save(2, STATE).result()
        ckpt.load(STATE, 1).result()
    assert read("aiockpt_lost_seconds") == 0


def test_time_that_training_was_held_is_not_trained() -> None:
    time_of = RunTime()
    told: dict[str, Any] = {"time_ns": 100 * 10**9, "pid": 1, "host": "h", "rank": 0, "world_size": 1, "urls": ()}
    time_of.receive(events.Opened(at_ns=0, **told))
    time_of.receive(events.Loaded(at_ns=0, step=1, bytes=1, read_bytes=1, seconds=2.0, saved_ns=90 * 10**9))
    time_of.receive(events.SnapshotTaken(at_ns=0, step=2, bytes=1, pause_s=1.0, copy_s=1.0))
    time_of.receive(events.BarrierWaited(at_ns=0, step=2, seconds=2.0))
    time_of.receive(events.Committed(at_ns=15 * 10**9, step=2, bytes=1, seconds=3.0, generation=1))
    assert time_of.lost_s(0) == 10
    assert time_of.effective(20 * 10**9) == pytest.approx((20 - 2 - 1 - 2) / (20 + 10))
    assert time_of.at_risk_s(20 * 10**9) == pytest.approx(8)
    assert time_of.wall_s(20 * 10**9) == pytest.approx(120)


def test_time_that_a_rewind_took_back_is_not_trained() -> None:
    time_of = RunTime()
    time_of.receive(events.Opened(at_ns=0, time_ns=0, pid=1, host="h", rank=0, world_size=1, urls=()))
    usual: dict[str, Any] = {"bad_step": 9, "reason": "", "bad_rank": 0, "skipped": 1, "seconds": 1.0}
    for step, at_s in ((5, 50), (6, 60), (7, 70)):
        time_of.receive(events.SaveStarted(at_ns=at_s * 10**9, step=step, bytes=1, tensor_count=1, seconds=1.0))
        time_of.receive(events.SnapshotTaken(at_ns=at_s * 10**9, step=step, bytes=1, pause_s=1.0, copy_s=1.0))
    time_of.receive(events.Rewound(at_ns=80 * 10**9, step=6, **usual))  # saved at 59
    assert time_of.effective(80 * 10**9) == pytest.approx((59 - 1) / 80)
    time_of.receive(events.Rewound(at_ns=90 * 10**9, step=6, **usual))  # since the one before
    assert time_of.effective(90 * 10**9) == pytest.approx((59 - 1) / 90)
    time_of.receive(events.Rewound(at_ns=95 * 10**9, step=1, **usual))  # saved by another process: all of it
    assert time_of.effective(100 * 10**9) == pytest.approx(0.05)


def test_saves_that_are_skipped_are_in_flight_no_more_whether_they_had_begun_or_not(
    registry: Any, read: Read, tmp_path: Path
) -> None:
    with aiockpt.Checkpointer(tmp_path, on_exists="skip", observers=[Metrics(registry)]) as ckpt:
        for _ in range(3):
            ckpt.save(1, STATE).result()  # committed already, which is seen when it has begun
        assert read("aiockpt_saves_total", {"outcome": "skipped"}) == 2
        assert read("aiockpt_saves_in_flight") == 0
    metrics = Metrics(second := prometheus.CollectorRegistry())
    metrics.on_event(events.SaveStarted(at_ns=0, step=1, bytes=1, tensor_count=1))
    metrics.on_event(events.SaveSkipped(at_ns=0, step=2, reason="two run"))  # never begun
    assert second.get_sample_value("aiockpt_saves_in_flight") == 1


def test_what_the_launcher_tells_is_counted(
    registry: Any, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "attempt-1"))
    Metrics(registry)
    assert read("aiockpt_launch_effective_ratio") is None, "it has told nothing yet"
    took = {"notice_s": 1.0, "decide_s": 2.0, "restart_s": 3.0, "first_step_s": 4.0}
    restarts = {"hang": 2, "signal SIGKILL": 1}
    write_figures(tmp_path, RestartFigures(restarts=restarts, lost_steps=5, lost_s=6.0, ettr=0.7, **took))
    assert [read("aiockpt_launch_restarts", {"reason": why}) for why in restarts] == [2, 1]
    phases = ("notice", "decide", "restart", "first_step")
    assert [read("aiockpt_launch_seconds", {"phase": phase}) for phase in phases] == [1, 2, 3, 4]
    assert [read(f"aiockpt_launch_{name}") for name in ("lost_steps", "lost_seconds", "effective_ratio")] == [5, 6, 0.7]


def test_a_failed_save_is_counted_and_in_flight_no_more(registry: Any, read: Read, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    broken = tmp_path / "file" / "run"
    with (
        pytest.raises(aiockpt.BackgroundSaveError),
        aiockpt.Checkpointer(broken, observers=[Metrics(registry)]) as ckpt,
    ):
        ckpt.save(1, STATE)
    assert read("aiockpt_saves_total", {"outcome": "failed"}) == 1
    assert read("aiockpt_saves_in_flight") == 0


def test_a_logger_of_experiments_gets_numbers_with_their_step_on_another_thread(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    threads: set[str] = set()

    def log(values: Mapping[str, float], step: int) -> None:
        threads.add(threading.current_thread().name)
        told.extend((name, step) for name in values)

    with aiockpt.Checkpointer(tmp_path, observers=[Scalars(log)]) as ckpt:
        for step in (3, 7):
            ckpt.save(step, STATE).result()
        ckpt.load(STATE).result()
    for step in (3, 7):
        assert {("checkpoint/pause_s", step), ("checkpoint/durable_s", step)} <= set(told)
    assert ("checkpoint/load_s", 7) in told
    assert not any("loop" in name or name == "MainThread" for name in threads)


def test_a_logger_that_raises_is_logged_and_harms_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def log(values: Mapping[str, float], step: int) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "aiockpt"), aiockpt.Checkpointer(tmp_path, observers=[Scalars(log)]) as ckpt:
        assert ckpt.save(1, STATE).result().step == 1
    assert "stopped working" in caplog.text
