"""Every backend that we ship keeps the contract, plain and wrapped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend, FaultyFiles
from aiockpt.testing.recording import RecordingBackend, RecordingFiles
from aiockpt.testing.simulated_files import SimulatedFiles
from aiockpt.testing.simulation import simulated_world

SHARED_MEMORY = "/dev/shm"


def leftovers(root: Path) -> list[Path]:
    return list(root.rglob(".tmp-*"))


class LocalSuite(BackendSuite):
    """The suite on a local backend; nothing may stay open or lie around."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "new" / "root"

    @pytest.fixture
    def local(self, root: Path) -> LocalBackend:
        return LocalBackend(root)

    @pytest.fixture
    async def backend(self, local: LocalBackend, root: Path) -> AsyncIterator[Backend]:
        open_before = len(os.listdir("/proc/self/fd"))
        yield local
        await local.close()
        assert len(os.listdir("/proc/self/fd")) == open_before
        assert local.statistics().open_readers == 0
        assert local.statistics().bounce_bytes == 0
        assert not leftovers(root)


class TestLocal(LocalSuite):
    pass


class TestLocalBuffered(LocalSuite):
    @pytest.fixture
    def local(self, root: Path) -> LocalBackend:
        return LocalBackend(root, direct=False)


@pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason="no file system in memory is mounted")
class TestLocalOnTmpfs(LocalSuite):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            yield Path(folder) / "root"


class SimulatedSuite(BackendSuite):
    """The suite on a local backend over simulated files; nothing may stay open."""

    BLOCK_BYTES = 1 << 16

    @pytest.fixture
    def files(self) -> SimulatedFiles:
        return SimulatedFiles()

    @pytest.fixture
    async def backend(self, files: SimulatedFiles) -> AsyncIterator[Backend]:
        yield LocalBackend("/new/root", world=simulated_world(files=files))
        assert files.open_count == 0


class TestSimulated(SimulatedSuite):
    pass


class TestSimulatedUncached(SimulatedSuite):
    @pytest.fixture
    def files(self) -> SimulatedFiles:
        return SimulatedFiles(page_cache="cold")


class TestSimulatedWithoutDirectAndProbe(SimulatedSuite):
    @pytest.fixture
    def files(self) -> SimulatedFiles:
        return SimulatedFiles(direct_alignment=None, page_cache="unsupported")


class TestSimulatedWithoutHardLinks(SimulatedSuite):
    @pytest.fixture
    def files(self) -> SimulatedFiles:
        return SimulatedFiles(hard_links=False)


class TestMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()


class TestRecordingMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return RecordingBackend(MemoryBackend())


class TestFaultyMemoryWithoutFaults(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return FaultyBackend(MemoryBackend())


class TestLocalOnWrappedFiles(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        local = LocalBackend(tmp_path, world=World(files=RecordingFiles(FaultyFiles(World().files))))
        return RecordingBackend(FaultyBackend(local))
