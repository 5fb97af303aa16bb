"""HDFS keeps the contract on a real NameNode and DataNode, and what the backend promises of small objects and threads.

The server is started once for a session (`tests.servers.hdfs`); without Java, the jars or ``AIOCKPT_HDFS=1`` these tests
are skipped, and say why.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from hdfs_native import Client

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.errors import (
    StorageError,
)
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying
from aiockpt.storage.transfer import put_once
from aiockpt.testing.backend_suite import BackendSuite, download, patterned
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.fails import fails
from tests.servers.hdfs.fixture import files, folder, hdfs, names, parts, raw, stream, write_shuffled

__all__ = ["folder", "hdfs", "parts", "raw", "stream"]

_DAY_MS = 24 * 3600 * 1000


class HdfsSuite(BackendSuite):
    """The suite on a folder of its own, with the retries that everybody has: the one DataNode of a busy machine fails now
    and then. No temporary file, part or lock may lie around."""

    RACERS = 16

    @pytest.fixture
    def hdfs_backend(self, parts: HdfsBackend) -> HdfsBackend:
        return parts

    @pytest.fixture
    async def backend(self, hdfs_backend: HdfsBackend, raw: Client, folder: str) -> AsyncIterator[Backend]:
        raw.mkdirs(folder, create_parent=True)
        yield Retrying(hdfs_backend)
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
    def backend(self, hdfs_backend: HdfsBackend) -> Backend:
        return Retrying(RecordingBackend(FaultyBackend(hdfs_backend)))


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
    await fails(parts.put_new("a/b", b"x"), StorageError, "its folder was removed", retryable=True)
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


class OffTheLoop:
    """The library's client, readers or writers; they refuse calls on the event loop's thread."""

    def __init__(self, inner: Any, loop_thread: int) -> None:
        self._inner = inner
        self._loop_thread = loop_thread
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "inner":
            return self._wrap(found)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            assert threading.get_ident() != self._loop_thread, f"{name} was called on the event loop"
            self.called.add(name)
            answer = found(*arguments, **options)
            return self._wrap(answer) if name in ("create", "read") else answer

        return call

    def _wrap(self, inner: Any) -> OffTheLoop:
        wrapped = OffTheLoop(inner, self._loop_thread)
        wrapped.called = self.called
        return wrapped

    def __len__(self) -> int:
        return int(self._inner.size)


@pytest.mark.parametrize("webhdfs", [True, False])
async def test_no_call_of_the_library_is_made_on_the_event_loop(
    parts: HdfsBackend, stream: HdfsBackend, webhdfs: bool
) -> None:
    backend = parts if webhdfs else stream
    backend._client = watched = OffTheLoop(backend._client, threading.get_ident())  # type: ignore[assignment]
    data = patterned(1000)
    await write_shuffled(backend, "file", data, 300)
    await backend.put("a/put", b"1")
    await backend.put_new("a/new", b"2")
    await backend.get("a/put", 10)
    await backend.stat("a/new")
    await backend.list("a")
    reader = await backend.open("file")
    assert await download(reader) == bytes(data)
    await reader.close()
    await (await backend.create("aborted", 1)).abort()
    await backend.delete(["file", "a/put", "a/new"])
    verbs = {"create", "mkdirs", "rename", "read", "get_file_info", "list_status", "delete"}
    assert watched.called == verbs | {"write", "hsync", "close", "read_range", "read_range_stream"}
