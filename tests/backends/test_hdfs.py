"""HDFS keeps the contract on a real NameNode and DataNode, and what else the backend promises of its own.

The server is started once for a session (`tests.servers.hdfs`); without Java, the jars or ``AIOCKPT_HDFS=1`` these tests
are skipped, and say why.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from hdfs_native import Client, WriteOptions

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.backends.hdfs_concat import WebHdfs
from aiockpt.backends.hdfs_upload import HdfsUpload
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    UsageError,
)
from aiockpt.runtime.limits import Limiter
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend
from aiockpt.storage.transfer import put_once
from aiockpt.testing.backend_suite import BackendSuite, download, patterned, upload
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.servers.hdfs.fixture import hdfs
from tests.servers.hdfs.server import HdfsServer

__all__ = ["hdfs"]

_BLOCK_BYTES = 1 << 20
_DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def folder() -> str:
    """Name a folder for one test."""
    return f"/tests/{uuid.uuid4().hex}"


@pytest.fixture
def raw(hdfs: HdfsServer) -> Client:
    """Lend the library itself, to look at what is there."""
    return Client(hdfs.url)


@pytest.fixture
def parts(hdfs: HdfsServer, folder: str) -> HdfsBackend:
    return HdfsBackend(f"{hdfs.url}{folder}", webhdfs_url=hdfs.webhdfs_url)


@pytest.fixture
def stream(hdfs: HdfsServer, folder: str) -> HdfsBackend:
    return HdfsBackend(f"{hdfs.url}{folder}?webhdfs=off")


def names(raw: Client, folder: str) -> list[str]:
    """Return the paths of all that is below *folder*, hidden or not, without it."""
    return sorted(found.path.removeprefix(f"{folder}/") for found in raw.list_status(folder, recursive=True))


def files(raw: Client, folder: str) -> list[str]:
    return [found.path for found in raw.list_status(folder, recursive=True) if not found.isdir]


class HdfsSuite(BackendSuite):
    """The suite on a folder of its own; no temporary file, part or lock may lie around."""

    RACERS = 16

    @pytest.fixture
    def hdfs_backend(self, parts: HdfsBackend) -> HdfsBackend:
        return parts

    @pytest.fixture
    async def backend(self, hdfs_backend: HdfsBackend, raw: Client, folder: str) -> AsyncIterator[Backend]:
        raw.mkdirs(folder, create_parent=True)
        yield hdfs_backend
        await hdfs_backend.close()
        assert not [path for path in files(raw, folder) if "/.tmp/" in path or ".parts/" in path]


class TestHdfsInParts(HdfsSuite):
    RACERS = 64


class TestHdfsInOneStream(HdfsSuite):
    @pytest.fixture
    def hdfs_backend(self, stream: HdfsBackend) -> HdfsBackend:
        return stream


class TestHdfsWrapped(HdfsSuite):
    @pytest.fixture
    def backend(self, hdfs_backend: HdfsBackend) -> Backend:  # type: ignore[override]
        return RecordingBackend(FaultyBackend(hdfs_backend))


# Parts and streams


async def write_shuffled(backend: Backend, key: str, data: memoryview, block_bytes: int) -> None:
    file = await backend.create(key, data.nbytes)
    starts = list(range(0, data.nbytes, block_bytes))
    random.Random(2).shuffle(starts)
    await asyncio.gather(*(file.write(start, [data[start : start + block_bytes]]) for start in starts))
    await file.finish()


async def test_parts_become_one_plain_file_and_nothing_else_stays(
    parts: HdfsBackend, raw: Client, folder: str, hdfs: HdfsServer
) -> None:
    data = patterned(5 * _BLOCK_BYTES + 17)
    await write_shuffled(parts, "d/file", data, _BLOCK_BYTES)
    assert parts.statistics().webhdfs == hdfs.webhdfs_url
    assert raw.read(f"{folder}/d/file").read() == bytes(data)
    assert files(raw, folder) == [f"{folder}/d/file"]
    assert names(raw, folder) == ["d", "d/file"]


async def test_parts_whose_names_fill_more_than_one_request_are_joined(parts: HdfsBackend) -> None:
    deep = "/".join(character * 220 for character in "abc")
    data = patterned(1500)
    await write_shuffled(parts, f"{deep}/file", data, 100)
    assert await parts.get(f"{deep}/file", 1 << 20) == bytes(data)


async def test_the_parts_of_a_file_are_seen_below_its_key_until_it_is_whole(parts: HdfsBackend) -> None:
    file = await parts.create("d/file", 10)
    await file.write(5, [memoryview(b"56789")])
    assert [(found.key, found.size) for found in (await parts.list("d")).objects] == [("d/file", 0)]
    assert [found.size for found in (await parts.list("d/file.parts")).objects] == [5]
    await file.write(0, [memoryview(b"01234")])
    await file.finish()
    assert (await parts.list("d")).folders == ()
    assert await parts.get("d/file", 100) == b"0123456789"


async def test_a_part_that_vanished_fails_the_file_and_leaves_nothing(
    parts: HdfsBackend, raw: Client, folder: str
) -> None:
    file = await parts.create("d/file", 15)
    for offset in (0, 5, 10):
        await file.write(offset, [memoryview(b"abcde")])
    raw.delete(sorted(files(raw, f"{folder}/d/file.parts"))[1])
    with pytest.raises(StorageError, match="joining 2 files"):
        await file.finish()
    assert files(raw, folder) == []


async def test_a_part_that_is_too_short_fails_the_file(parts: HdfsBackend, raw: Client, folder: str) -> None:
    file = await parts.create("d/file", 15)
    for offset in (0, 5, 10):
        await file.write(offset, [memoryview(b"abcde")])
    writer = raw.create(sorted(files(raw, f"{folder}/d/file.parts"))[1], WriteOptions(overwrite=True))
    writer.write(b"abcd")
    writer.close()
    with pytest.raises(StorageError, match="have 14 bytes together, not 15"):
        await file.finish()
    assert files(raw, folder) == []


async def test_a_failed_part_can_be_written_again(parts: HdfsBackend) -> None:
    def refuse(run: memoryview) -> None:
        raise ArithmeticError("on the way")

    file = await parts.create("file", 10)
    with pytest.raises(ArithmeticError):
        await file.write(0, [memoryview(b"01234")], refuse)
    await file.write(5, [memoryview(b"56789")])
    await file.write(0, [memoryview(b"01234")])
    await file.finish()
    assert await parts.get("file", 100) == b"0123456789"


async def test_a_name_with_a_comma_is_written_as_one_stream(parts: HdfsBackend) -> None:
    await write_shuffled(parts, "one,two", memoryview(b"0123456789"), 3)
    assert parts.statistics().webhdfs is None
    assert await parts.get("one,two", 100) == b"0123456789"


@contextmanager
def answering(status: int, answer: bytes) -> Iterator[str]:
    """Serve *answer* to every request, and lend the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, json.dumps({"FileStatus": {"modificationTime": 1}}).encode()),
        (200, b"<html>a proxy's page</html>"),
        (200, b"{}"),
        (401, b"log in first"),
        (403, json.dumps({"RemoteException": {"exception": "StandbyException"}}).encode()),
    ],
    ids=["another cluster", "no WebHDFS", "nonsense", "kerberos", "standby"],
)
async def test_a_server_that_does_not_see_the_same_files_is_not_used(
    hdfs: HdfsServer, folder: str, status: int, answer: bytes
) -> None:
    with answering(status, answer) as url:
        backend = HdfsBackend(f"{hdfs.url}{folder}", webhdfs_url=url)
        await write_shuffled(backend, "file", memoryview(b"0123456789"), 3)
        assert backend.statistics().webhdfs is None
        assert await backend.get("file", 100) == b"0123456789"


async def test_the_url_says_where_webhdfs_is(hdfs: HdfsServer, folder: str) -> None:
    backend = open_backend(f"{hdfs.url}{folder}?webhdfs={hdfs.webhdfs_url}")
    assert isinstance(backend, HdfsBackend)
    await write_shuffled(backend, "file", memoryview(b"0123456789"), 3)
    assert backend.statistics().webhdfs == hdfs.webhdfs_url
    assert await HdfsBackend(backend.url).get("file", 100) == b"0123456789"


async def test_a_block_whose_turn_never_comes_is_an_error(hdfs: HdfsServer, raw: Client, folder: str) -> None:
    file = HdfsUpload(raw, Limiter("writes", 2), lambda *_: None, f"{folder}/file", "file", 10, turn_timeout_s=0.05)
    file.begin()
    with pytest.raises(StorageTimeoutError, match="byte 0 was not written") as caught:
        await file.write(5, [memoryview(b"56789")])
    assert not caught.value.retryable
    await file.abort()
    assert files(raw, folder) == []


async def test_a_failed_block_ends_the_stream_for_those_that_wait(stream: HdfsBackend) -> None:
    def refuse(run: memoryview) -> None:
        raise ArithmeticError("bad block")

    file = await stream.create("file", 10)
    waiting = asyncio.ensure_future(file.write(5, [memoryview(b"56789")]))
    with pytest.raises(ArithmeticError):
        await file.write(0, [memoryview(b"01234")], refuse)
    with pytest.raises(StorageError, match=r"takes no more.*bad block"):
        await waiting
    await file.abort()
    with pytest.raises(ObjectNotFoundError):
        await stream.stat("file")


async def test_an_abort_sends_away_those_who_wait_for_their_turn(stream: HdfsBackend) -> None:
    file = await stream.create("file", 10)
    waiting = asyncio.ensure_future(file.write(5, [memoryview(b"56789")]))
    await asyncio.sleep(0)
    await file.abort()
    with pytest.raises(StorageError, match="aborted"):
        await waiting


# Small objects


class Meddler:
    """The client of a backend, that does something else besides at a rename."""

    def __init__(self, client: Client, meddle: Callable[[Client, str, str, bool], None]) -> None:
        self._client = client
        self._meddle = meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def rename(self, source: str, target: str, overwrite: bool = False) -> None:
        self._meddle(self._client, source, target, overwrite)
        self._client.rename(source, target, overwrite)


class LosesFirstAnswer:
    """The answer to the first rename to each target is lost: the library sends it again, and the first took effect."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def __call__(self, client: Client, source: str, target: str, overwrite: bool) -> None:
        if target not in self._lost:
            self._lost.add(target)
            client.rename(source, target, overwrite)


async def test_a_rename_whose_answer_was_lost_is_a_success(parts: HdfsBackend, raw: Client, folder: str) -> None:
    parts._client = Meddler(parts._client, LosesFirstAnswer())  # type: ignore[assignment]
    assert await put_once(parts, "new", b"mine")
    assert not await put_once(parts, "new", b"another's")
    await parts.put("replaced", b"1")
    await write_shuffled(parts, "file", memoryview(b"0123456789"), 3)
    assert await parts.get("replaced", 10) == b"1"
    assert await parts.get("file", 100) == b"0123456789"
    assert files(raw, folder) == [f"{folder}/{name}" for name in ("file", "new", "replaced")]


async def test_a_webhdfs_that_was_only_guessed_is_asked_once(hdfs: HdfsServer, folder: str) -> None:
    asked: list[str] = []

    class Deaf(WebHdfs, frozen=True):
        def sees(self, path: str, modified_ms: int, user: str) -> bool:
            asked.append(path)
            return False

    backend = HdfsBackend(f"{hdfs.url}{folder}")
    assert backend._webhdfs == WebHdfs("http://127.0.0.1:9870")
    backend._webhdfs = Deaf("http://127.0.0.1:9870")
    for key in ("a", "b"):
        await upload(backend, key, memoryview(b"x"))
    assert asked == [f"{folder}/a"]


async def test_a_folder_that_is_removed_under_a_writer_is_made_again(parts: HdfsBackend) -> None:
    removals = itertools.count()

    def remove_folder(client: Client, source: str, target: str, overwrite: bool) -> None:
        if next(removals) < 3:
            client.delete(target.rpartition("/")[0])

    parts._client = Meddler(parts._client, remove_folder)  # type: ignore[assignment]
    await parts.put_new("a/b", b"x")
    assert await parts.get("a/b", 10) == b"x"
    assert next(removals) == 4


async def test_a_folder_that_is_always_removed_is_an_error_that_may_pass(
    parts: HdfsBackend, raw: Client, folder: str
) -> None:
    def remove_folder(client: Client, source: str, target: str, overwrite: bool) -> None:
        client.delete(target.rpartition("/")[0])

    parts._client = Meddler(parts._client, remove_folder)  # type: ignore[assignment]
    with pytest.raises(StorageError, match="its folder was removed") as caught:
        await parts.put_new("a/b", b"x")
    assert caught.value.retryable
    assert files(raw, folder) == []


async def test_leftovers_of_killed_writers_go_after_a_day(parts: HdfsBackend, raw: Client, folder: str) -> None:
    await parts.put("a", b"x")
    now_ms = raw.get_file_info(f"{folder}/a").modification_time
    for name, age_ms in (("old", _DAY_MS + 60_000), ("young", _DAY_MS - 60_000)):
        raw.create(f"{folder}/.tmp/{name}").close()
        raw.set_times(f"{folder}/.tmp/{name}", now_ms - age_ms, now_ms)
    await HdfsBackend(parts.url).put("b", b"x")
    assert names(raw, folder) == [".tmp", ".tmp/young", "a", "b"]
    assert [found.key for found in (await parts.list("")).objects] == ["a", "b"]
    assert (await parts.list("")).folders == ()


# What the servers say


async def test_a_namenode_that_does_not_run_is_an_error_that_may_pass(free_port: int) -> None:
    backend = HdfsBackend(f"hdfs://127.0.0.1:{free_port}/x")
    for call in (lambda: backend.get("a", 1), lambda: backend.put("a", b""), lambda: backend.create("a", 1)):
        with pytest.raises(StorageError, match="Look whether the NameNode") as caught:
            await call()
        assert caught.value.retryable


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
    for write in (lambda: parts.put("small", b"x"), lambda: large.write(0, [data])):
        with pytest.raises(StorageFullError, match="Free space") as caught:
            await write()
        assert not caught.value.retryable
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
        with pytest.raises(StorageAccessError, match="Permission denied"):
            await write()
    assert (await backend.list("")).objects == ()


async def test_safe_mode_is_an_error_that_may_pass(parts: HdfsBackend, hdfs: HdfsServer) -> None:
    await parts.put("a", b"x")
    hdfs.run_admin("-safemode", "enter")
    try:
        with pytest.raises(StorageError, match="safe mode") as caught:
            await parts.put("b", b"x")
        assert caught.value.retryable
        assert await parts.get("a", 1) == b"x"
    finally:
        hdfs.run_admin("-safemode", "leave")
    await parts.put("b", b"x")


async def test_names_that_hdfs_does_not_take_are_refused(parts: HdfsBackend) -> None:
    for key in ("with:colon", "n" * 300):
        with pytest.raises(UsageError, match="HDFS takes no such name"):
            await parts.create(key, 1)


async def test_an_object_below_an_object_is_an_error_and_no_absent_folder(parts: HdfsBackend) -> None:
    await parts.put("a", b"x")
    for write in (lambda: parts.put("a/b", b"y"), lambda: parts.create("a/b", 1)):
        with pytest.raises(StorageError):
            await write()
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
        with pytest.raises(StorageError) as caught:
            await file.write(0, blocks, kill_at_third_run)
        assert caught.value.retryable
        await file.abort()
        assert files(raw, folder) == [f"{folder}/before"]
        reader = await parts.open("before")
        with pytest.raises(StorageError):
            await download(reader)
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
        with pytest.raises(StorageError) as caught:
            await parts.get("manifest", 100)
        assert caught.value.retryable
    finally:
        hdfs.start_namenode()
        hdfs.wait_writable()
    assert await parts.get("manifest", 100) == b"votes"
    assert await parts.get("d/file", data.nbytes) == bytes(data)
    with pytest.raises(ObjectExistsError):
        await parts.put_new("manifest", b"another's")
