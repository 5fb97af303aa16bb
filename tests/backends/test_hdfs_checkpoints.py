"""Checkpoints in a real HDFS from end to end: save, load, verify, prune, racing committers, a DataNode that dies."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from hdfs_native import Client

import aiockpt
from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.storage.backend import Seen, Upload
from tests.servers.hdfs.fixture import hdfs
from tests.servers.hdfs.server import HdfsServer
from tests.small_run import Run, small_checkpointer

__all__ = ["hdfs"]

WAIT_S = 250


@pytest.fixture(params=["parts", "stream"])
def url(request: pytest.FixtureRequest, hdfs: HdfsServer) -> str:
    """Name an empty place, for each way to write a data file."""
    webhdfs = hdfs.webhdfs_url if request.param == "parts" else "off"
    return f"{hdfs.url}/runs/{uuid.uuid4().hex}?webhdfs={webhdfs}"


def below(url: str) -> list[str]:
    """Return the paths of all files below the place *url*, without it."""
    server, _, path = url.partition("?")[0].removeprefix("hdfs://").partition("/")
    found = Client(f"hdfs://{server}").list_status(f"/{path}", recursive=True)
    return sorted(status.path.removeprefix(f"/{path}/") for status in found if not status.isdir)


def test_a_run_is_saved_and_loaded_bit_by_bit(url: str) -> None:
    run = Run(seed=1)
    run.train(2)
    with small_checkpointer(url) as ckpt:
        ckpt.save(2, run.state)
        saved = run.digest()
    other = Run(seed=2)
    with small_checkpointer(url) as ckpt:
        loaded = ckpt.load(other.state).result(WAIT_S)
    assert loaded is not None
    assert loaded.step == 2
    assert other.digest() == saved
    assert not [path for path in below(url) if ".tmp/" in path or ".parts/" in path]


def test_steps_are_verified_pruned_and_deleted(url: str) -> None:
    run = Run()
    with small_checkpointer(url, retention=aiockpt.Retention(last=2)) as ckpt:
        for step in (1, 2, 3):
            run.train()
            ckpt.save(step, run.state).result(WAIT_S)
    with small_checkpointer(url) as ckpt:
        assert ckpt.verify(3).result(WAIT_S).step == 3
        ckpt.prune(aiockpt.Retention(last=2)).result(WAIT_S)
        assert [info.step for info in ckpt.steps().result(WAIT_S)] == [3, 2]
        ckpt.delete(2).result(WAIT_S)
        assert [info.step for info in ckpt.steps().result(WAIT_S)] == [3]
    assert {path.partition("/")[0] for path in below(url)} - {"LATEST"} == {"step-00000003"}


async def test_of_committers_that_race_for_a_step_the_winners_stand_whole(url: str) -> None:
    runs = [Run(seed=seed) for seed in range(4)]
    checkpointers = [small_checkpointer(url) for _ in runs]
    try:
        saves = [ckpt.save(1, run.state) for ckpt, run in zip(checkpointers, runs, strict=True)]
        outcomes = await asyncio.gather(*saves, return_exceptions=True)
    finally:
        for ckpt in checkpointers:
            await ckpt.aclose()
    won = [run.digest() for run, outcome in zip(runs, outcomes, strict=True) if not isinstance(outcome, BaseException)]
    assert won
    assert all(isinstance(lost, aiockpt.CommitConflictError) for lost in outcomes if isinstance(lost, BaseException))
    manifests = [path for path in below(url) if "/MANIFEST-" in path]
    assert 1 <= len(manifests) <= len(won)  # one that began when another had committed takes its place
    other = Run(seed=9)
    async with small_checkpointer(url) as ckpt:
        await ckpt.load(other.state)
    assert other.digest() in won


class KillsItsDataNode(HdfsBackend):
    """A backend whose DataNode dies while the first data file is written."""

    def __init__(self, url: str, server: HdfsServer) -> None:
        super().__init__(url)
        self._server: HdfsServer | None = server

    async def create(self, key: str, size: int) -> Any:
        return _DyingUpload(await super().create(key, size), self._kill)

    def _kill(self, run: memoryview) -> None:
        if self._server is not None:
            self._server.kill_datanode()
            self._server = None


class _DyingUpload:
    def __init__(self, inner: Upload, kill: Seen) -> None:
        self._inner = inner
        self._kill = kill

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        def seen_before_death(run: memoryview) -> None:
            if seen is not None:
                seen(run)
            self._kill(run)

        await self._inner.write(offset, runs, seen_before_death)

    async def finish(self) -> None:
        await self._inner.finish()

    async def abort(self) -> None:
        await self._inner.abort()


def test_a_datanode_killed_in_the_middle_of_a_save_harms_no_earlier_step(url: str, hdfs: HdfsServer) -> None:
    run = Run()
    run.train()
    with small_checkpointer(url) as ckpt:
        ckpt.save(1, run.state).result(WAIT_S)
    saved = run.digest()
    run.train()
    try:
        with small_checkpointer(KillsItsDataNode(url, hdfs), on_error="warn") as ckpt:
            failed = ckpt.save(2, run.state)
            assert isinstance(failed.exception(WAIT_S), aiockpt.StorageError)
    finally:
        hdfs.start_datanode()
    other = Run(seed=5)
    with small_checkpointer(url) as ckpt:
        loaded = ckpt.load(other.state).result(WAIT_S)
        assert loaded is not None
        assert loaded.step == 1
        assert other.digest() == saved
        ckpt.save(2, run.state).result(WAIT_S)
        assert [info.step for info in ckpt.steps().result(WAIT_S)] == [2, 1]
