"""Places that only fsspec knows keep the contract: its memory, local files through it, and, wrapped, a real SFTP server."""

import itertools
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="the extra aiockpt[fsspec] is not installed")

from aiockpt.backends.fsspec import FsspecBackend
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.servers.sftp import PASSWORD, USER, run_sftp

_folders = itertools.count()


class TestFsspecMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")


class TestFsspecLocal(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(f"file://{tmp_path}/run")


@pytest.fixture(scope="session")
def sftp_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if find_spec("sshfs") is None:
        pytest.skip("sshfs, which is fsspec's file system for sftp://, is not installed")
    with run_sftp(tmp_path_factory.mktemp("sftp")) as port:
        yield port


@pytest.fixture
def sftp(sftp_port: int) -> FsspecBackend:
    options = {"username": USER, "password": PASSWORD}
    return FsspecBackend(f"sftp://127.0.0.1:{sftp_port}/run{next(_folders)}", storage_options=options)


class TestSftpWrapped(BackendSuite):
    @pytest.fixture
    def backend(self, sftp: FsspecBackend) -> Backend:
        return RecordingBackend(FaultyBackend(sftp))
