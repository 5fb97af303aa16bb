"""Every backend that we ship keeps the contract, plain and wrapped."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.backends.s3 import S3Backend
from aiockpt.runtime.world import World
from aiockpt.storage.backend import PROOF_KEY, Backend
from aiockpt.storage.transfer import walk
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend, FaultyFiles
from aiockpt.testing.recording import RecordingBackend, RecordingFiles
from tests.servers.seaweed import Seaweed
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import simulated_world

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


class TestMemoryWrapped(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return RecordingBackend(FaultyBackend(MemoryBackend()))


class TestLocalOnWrappedFiles(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        local = LocalBackend(tmp_path, world=World(files=RecordingFiles(FaultyFiles(World().files))))
        return RecordingBackend(FaultyBackend(local))


class S3Suite(BackendSuite):
    """The suite on an S3 backend; no multipart upload may be left."""

    BLOCK_BYTES = 8 << 20

    @pytest.fixture
    def s3(self, s3_url: str, endpoint_url: str) -> S3Backend:
        return S3Backend(s3_url, endpoint_url=endpoint_url, part_bytes=8 << 20)

    @pytest.fixture
    async def backend(self, s3: S3Backend) -> AsyncIterator[Backend]:
        yield s3
        assert await s3.leftover_uploads() == ()
        await s3.close()


class TestS3OnMoto(S3Suite):
    @pytest.fixture
    def endpoint_url(self, moto: str) -> str:
        return moto


class SeaweedSuite(S3Suite):
    """The suite on a store that keeps directories: it lists those that became empty for some minutes more.

    (https://github.com/seaweedfs/seaweedfs/issues/9810; MinIO does so too.) Such folders hold nothing, which is tested.
    """

    @pytest.fixture
    def endpoint_url(self, seaweed: Seaweed) -> str:
        return seaweed.endpoint_url

    async def test_delete_removes_objects_and_the_folders_they_leave_empty(self, backend: Backend) -> None:
        for key in ("s/m", "s/a/d/f", "s/a/r/v", "t/m"):
            await backend.put(key, b"x")
        await backend.delete(["s/a/d/f"])
        assert await held_below(backend, "s/a") == ["s/a/r/v"]
        await backend.delete(["s/m", "s/a/r/v"])
        assert await held_below(backend, "") == ["t/m"]

    async def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(self, backend: Backend) -> None:
        async def churn(worker: int) -> None:
            for turn in range(5):
                key = f"shared/deep/{worker}-{turn}"
                await backend.put_new(key, b"new")
                await backend.put(key, b"replaced")
                assert await backend.get(key, 100) == b"replaced"
                await backend.delete([key])

        await asyncio.gather(*(churn(worker) for worker in range(8)))
        assert await held_below(backend, "") == []


async def held_below(backend: Backend, prefix: str) -> list[str]:
    """Return the keys that are there, without the one that proves that keys are created once, which stays."""
    return [stat.key async for stat in walk(backend, prefix) if stat.key != PROOF_KEY]


class TestS3(SeaweedSuite):
    pass


class TestS3WithoutChecksumsWrapped(SeaweedSuite):
    @pytest.fixture
    def s3(self, s3_url: str, endpoint_url: str) -> S3Backend:
        return S3Backend(s3_url, endpoint_url=endpoint_url, part_bytes=16 << 20, checksum=None)

    @pytest.fixture
    async def backend(self, s3: S3Backend) -> AsyncIterator[Backend]:
        yield RecordingBackend(FaultyBackend(s3))
        assert await s3.leftover_uploads() == ()
        await s3.close()
