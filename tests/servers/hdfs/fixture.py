"""The fixture ``hdfs``: one real HDFS for the whole session, or a skip that says what is missing.

Import it into a test module: ``from tests.servers.hdfs.fixture import hdfs``. Modules share the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

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
