"""Data files reach HDFS in parts that are joined, or as one stream, and leave nothing behind when they fail."""

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from hdfs_native import Client, WriteOptions

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.backends.hdfs_client import FlushedWriter, create_file
from aiockpt.backends.hdfs_upload import HdfsUpload, OrderedStream, WebHdfs
from aiockpt.errors import (
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from aiockpt.runtime.limits import Limiter
from aiockpt.storage.open import open_backend
from aiockpt.storage.retry import Retrying
from aiockpt.testing.backend_suite import patterned, upload
from tests.fails import fails
from tests.servers.hdfs.fixture import files, folder, hdfs, names, parts, raw, stream, write_shuffled
from tests.servers.hdfs.server import HdfsServer

__all__ = ["folder", "hdfs", "parts", "raw", "stream"]

_BLOCK_BYTES = 1 << 20


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
    deep = "/".join([*(character * 200 for character in "abc"), "ü '%41+?#&=;\""])
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
    await fails(file.finish(), StorageError, "joining 2 files")
    assert files(raw, folder) == []


async def test_a_part_that_is_too_short_fails_the_file(parts: HdfsBackend, raw: Client, folder: str) -> None:
    file = await parts.create("d/file", 15)
    for offset in (0, 5, 10):
        await file.write(offset, [memoryview(b"abcde")])
    writer = raw.create(sorted(files(raw, f"{folder}/d/file.parts"))[1], WriteOptions(overwrite=True))
    writer.write(b"abcd")
    writer.close()
    await fails(file.finish(), StorageError, "have 14 bytes together, not 15")
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
def answering(status: int, answer: bytes, asked: list[str] | None = None) -> Iterator[str]:
    """Serve *answer* to every request, note in *asked* what was asked for, and lend the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
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
    opened = open_backend(f"{hdfs.url}{folder}?webhdfs={hdfs.webhdfs_url}")
    assert isinstance(opened, Retrying)
    backend = opened.inner
    assert isinstance(backend, HdfsBackend)
    await write_shuffled(backend, "file", memoryview(b"0123456789"), 3)
    assert backend.statistics().webhdfs == hdfs.webhdfs_url
    assert await HdfsBackend(backend.url).get("file", 100) == b"0123456789"


async def test_a_block_whose_turn_never_comes_is_an_error(hdfs: HdfsServer, raw: Client, folder: str) -> None:
    file = HdfsUpload(raw, Limiter("writes", 2), lambda *_: None, f"{folder}/file", "file", 10, turn_timeout_s=0.05)
    file.begin()
    await fails(file.write(5, [memoryview(b"56789")]), StorageTimeoutError, "byte 0 was not written", retryable=False)
    await file.abort()
    assert files(raw, folder) == []


async def test_a_failed_block_ends_the_stream_for_those_that_wait(stream: HdfsBackend) -> None:
    def refuse(run: memoryview) -> None:
        raise ArithmeticError("bad block")

    file = await stream.create("file", 10)
    waiting = asyncio.ensure_future(file.write(5, [memoryview(b"56789")]))
    with pytest.raises(ArithmeticError):
        await file.write(0, [memoryview(b"01234")], refuse)
    await fails(waiting, StorageError, r"accepts no more.*bad block")
    await file.abort()
    await fails(stream.stat("file"), ObjectNotFoundError)


async def test_an_abort_sends_away_those_who_wait_for_their_turn(stream: HdfsBackend) -> None:
    file = await stream.create("file", 10)
    waiting = asyncio.ensure_future(file.write(5, [memoryview(b"56789")]))
    await asyncio.sleep(0)
    await file.abort()
    await fails(waiting, StorageError, "aborted")


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


class WatchedClient:
    """A client that keeps the order of things: "delete" when it is called; its writers fail when they are told to."""

    def __init__(self, client: Client, writing_fails: bool = False) -> None:
        self._client = client
        self._writing_fails = writing_fails
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def inner(self) -> Any:
        return FailingCreate(self._client.inner) if self._writing_fails else self._client.inner

    def delete(self, path: str, recursive: bool = False) -> bool:
        self.order.append("delete")
        return self._client.delete(path, recursive)


class FailingCreate:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create(self, path: str, options: WriteOptions) -> Any:
        return BrokenPipeline(self._inner.create(path, options))


class BrokenPipeline:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write(self, data: bytes) -> None:
        raise OSError("Connection reset by peer (os error 104)")

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(("webhdfs", "retryable"), [(True, True), (False, False)])
async def test_a_block_that_broke_off_may_be_sent_again_as_a_part_and_not_in_a_stream(
    parts: HdfsBackend, stream: HdfsBackend, webhdfs: bool, retryable: bool
) -> None:
    backend = parts if webhdfs else stream
    backend._client = WatchedClient(backend._client, writing_fails=True)  # type: ignore[assignment]
    file = await backend.create("file", 5)
    error = await fails(file.write(0, [memoryview(b"01234")]), StorageError, "Connection reset")
    assert error.retryable is retryable
    await file.abort()


async def test_an_abort_waits_for_the_threads_that_write(parts: HdfsBackend, raw: Client, folder: str) -> None:
    parts._client = watched = WatchedClient(parts._client)  # type: ignore[assignment]
    reached, aborting = threading.Event(), threading.Event()

    def wait_for_abort(run: memoryview) -> None:
        reached.set()
        assert aborting.wait(250)

    file = await parts.create("file", 10)
    writing = asyncio.ensure_future(file.write(0, [memoryview(b"01234")], wait_for_abort))
    writing.add_done_callback(lambda _: watched.order.append("written"))
    await asyncio.to_thread(reached.wait, 30)
    aborted = asyncio.ensure_future(file.abort())
    await asyncio.sleep(0)
    aborting.set()
    await asyncio.gather(writing, aborted)
    assert watched.order[0] == "written"
    assert files(raw, folder) == []


class SlowToFlush:
    """A writer whose flushes wait until they are let go."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.flushing, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def hsync(self) -> None:
        self.flushing.set()
        assert self.go_on.wait(250)


async def test_a_block_does_not_begin_while_the_one_before_it_is_still_flushed(raw: Client, folder: str) -> None:
    writer = SlowToFlush(create_file(raw, f"{folder}/file"))
    limiter = Limiter("writes", 2)
    stream = OrderedStream(FlushedWriter(writer, SimpleNamespace(blocksize=4)), limiter, "file", 30)  # type: ignore[arg-type]
    first = asyncio.ensure_future(stream.write(0, [memoryview(b"0123")], None))
    await asyncio.to_thread(writer.flushing.wait, 30)
    second = asyncio.ensure_future(stream.write(4, [memoryview(b"4567")], None))
    await asyncio.sleep(0)
    assert limiter.statistics().running == 1
    writer.go_on.set()
    await asyncio.gather(first, second)
    stream.close()
    assert raw.read(f"{folder}/file").read() == b"01234567"


async def test_a_writer_that_is_dropped_leaves_its_file_open(raw: Client, folder: str) -> None:
    create_file(raw, f"{folder}/torn").write(b"some of it")
    gc.collect()
    assert raw.get_file_info(f"{folder}/torn").length == 0


def test_a_long_list_of_parts_is_joined_in_order_by_requests_of_less_than_8_kib() -> None:
    parts = [f"/run/ü {number:03d}" for number in range(1000)]
    asked: list[str] = []
    with answering(200, b"", asked) as url:
        WebHdfs(url).concat("/run/first", parts, "somebody")
    assert len(asked) > 1
    assert max(map(len, asked)) < 8000
    joined = [parse_qs(urlsplit(line).query)["sources"][0].split(",") for line in asked]
    assert [part for some in joined for part in some] == parts
