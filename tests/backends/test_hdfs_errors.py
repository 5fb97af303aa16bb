"""What the servers of HDFS refuse becomes an error of ours, and what they acknowledged survives their deaths."""

import itertools
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from hdfs_native import Client

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.errors import (
    ObjectExistsError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    UsageError,
)
from aiockpt.testing.backend_suite import download, patterned, upload
from tests.fails import fails
from tests.servers.hdfs.fixture import files, folder, hdfs, parts, raw, write_shuffled
from tests.servers.hdfs.server import HdfsServer

__all__ = ["folder", "hdfs", "parts", "raw"]

_BLOCK_BYTES = 1 << 20


async def test_a_namenode_that_does_not_run_is_an_error_that_may_pass(free_port: int) -> None:
    backend = HdfsBackend(f"hdfs://127.0.0.1:{free_port}/x")
    for call in (lambda: backend.get("a", 1), lambda: backend.put("a", b""), lambda: backend.create("a", 1)):
        await fails(call(), StorageError, "Check that the NameNode", retryable=True)


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as bound:  # bound and not listening: whoever connects is refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def test_a_full_quota_says_that_there_is_no_space(
    parts: HdfsBackend, raw: Client, folder: str, hdfs: HdfsServer
) -> None:
    raw.mkdirs(folder, create_parent=True)
    hdfs.run_admin("-setSpaceQuota", str(200 << 20), folder)
    data = patterned(1 << 20)
    await upload(parts, "fits", data)
    hdfs.run_admin("-setSpaceQuota", str(2 << 20), folder)
    large = await parts.create("large", data.nbytes)
    writes: list[Callable[[], Awaitable[object]]] = [lambda: parts.put("small", b"x"), lambda: large.write(0, [data])]
    for write in writes:
        await fails(write(), StorageFullError, "Free space", retryable=False)
    await large.abort()
    assert files(raw, folder) == [f"{folder}/fits"]
    assert await parts.get("fits", 1 << 21) == bytes(data)


async def test_a_right_that_is_missing_is_named(
    hdfs: HdfsServer, raw: Client, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.mkdirs(folder, permission=0o755, create_parent=True)
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    backend = HdfsBackend(f"{hdfs.url}{folder}")
    for write in (lambda: backend.put("a", b"x"), lambda: backend.create("a", 1)):
        await fails(write(), StorageAccessError, "Permission denied")
    assert (await backend.list("")).objects == ()


async def test_safe_mode_is_an_error_that_may_pass(parts: HdfsBackend, hdfs: HdfsServer) -> None:
    await parts.put("a", b"x")
    hdfs.run_admin("-safemode", "enter")
    try:
        await fails(parts.put("b", b"x"), StorageError, "safe mode", retryable=True)
        assert await parts.get("a", 1) == b"x"
    finally:
        hdfs.run_admin("-safemode", "leave")
    await parts.put("b", b"x")


async def test_names_that_hdfs_does_not_take_are_refused(parts: HdfsBackend) -> None:
    for key in ("with:colon", "n" * 300):
        await fails(parts.create(key, 1), UsageError, "HDFS does not accept this name")


async def test_an_object_below_an_object_is_an_error_and_no_absent_folder(parts: HdfsBackend) -> None:
    await parts.put("a", b"x")
    for write in (lambda: parts.put("a/b", b"y"), lambda: parts.create("a/b", 1)):
        await fails(write())
    assert await parts.get("a", 10) == b"x"


async def test_a_datanode_that_dies_in_the_middle_of_a_block_fails_it_and_comes_back(
    parts: HdfsBackend, hdfs: HdfsServer, raw: Client, folder: str
) -> None:
    data = patterned(4 * _BLOCK_BYTES)
    await upload(parts, "before", data)
    runs = itertools.count()

    def kill_at_third_run(run: memoryview) -> None:
        if next(runs) == 2:
            hdfs.kill_datanode()

    file = await parts.create("during", data.nbytes)
    blocks = [data[start : start + _BLOCK_BYTES] for start in range(0, data.nbytes, _BLOCK_BYTES)]
    try:
        await fails(file.write(0, blocks, kill_at_third_run), retryable=True)
        await file.abort()
        assert files(raw, folder) == [f"{folder}/before"]
        reader = await parts.open("before")
        await fails(download(reader))
    finally:
        hdfs.start_datanode()
    await upload(parts, "during", data)
    for key in ("before", "during"):
        assert await parts.get(key, data.nbytes) == bytes(data)


async def test_what_was_acknowledged_survives_the_death_of_the_namenode(
    parts: HdfsBackend, hdfs: HdfsServer, folder: str
) -> None:
    data = patterned(2 * _BLOCK_BYTES)
    await write_shuffled(parts, "d/file", data, _BLOCK_BYTES)
    await parts.put_new("manifest", b"votes")
    hdfs.kill_namenode()
    try:
        await fails(parts.get("manifest", 100), retryable=True)
    finally:
        hdfs.start_namenode()
        hdfs.wait_writable()
    assert await parts.get("manifest", 100) == b"votes"
    assert await parts.get("d/file", data.nbytes) == bytes(data)
    await fails(parts.put_new("manifest", b"another's"), ObjectExistsError)
