"""The fixture ``hdfs``: one real HDFS for the whole session, or a skip that says what is missing; and what tests do there.

Import fixtures into a test module: ``from tests.servers.hdfs.fixture import hdfs``. Modules share the server.
"""

import asyncio
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hdfs_native import Client

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.storage.backend import Backend
from tests.servers.hdfs.jars import UnavailableError
from tests.servers.hdfs.server import HdfsServer, running_server


class _Shared:
    """The server of this session, while any module's fixture holds it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: HdfsServer | None = None
        self._holders = 0

    def take(self) -> HdfsServer:
        if self._server is None:
            self._server = self._stack.enter_context(running_server())
        self._holders += 1
        return self._server

    def give(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._server = None
            self._stack.close()


_SHARED = _Shared()


@pytest.fixture(scope="session")
def hdfs() -> Iterator[HdfsServer]:
    """Lend the session's HDFS; skip where none can be run."""
    try:
        server = _SHARED.take()
    except UnavailableError as error:
        pytest.skip(f"no HDFS: {error}")
    try:
        yield server
    finally:
        _SHARED.give()


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


async def write_shuffled(backend: Backend, key: str, data: memoryview, block_bytes: int) -> None:
    file = await backend.create(key, data.nbytes)
    starts = list(range(0, data.nbytes, block_bytes))
    random.Random(2).shuffle(starts)
    await asyncio.gather(*(file.write(start, [data[start : start + block_bytes]]) for start in starts))
    await file.finish()
