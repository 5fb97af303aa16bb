"""Places that only fsspec knows keep the contract: its memory, local files through it, and a real SFTP server."""

from __future__ import annotations

from pathlib import Path
import uuid

import pytest

pytest.importorskip("fsspec", reason="the extra aiockpt[fsspec] is not installed")

from aiockpt.backends.fsspec import FsspecBackend
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend


class TestFsspecMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")


class TestFsspecLocal(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(f"file://{tmp_path}/run")
