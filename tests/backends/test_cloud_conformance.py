"""Cloud stores keep the contract: Azurite where it can be had, and obstore's store in memory everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore", reason="the extra aiockpt[cloud] is not installed")

from obstore.store import MemoryStore

from aiockpt.backends.cloud import CloudBackend
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.servers.azurite.azurite import INSTALL_DEADLINE_S, Azurite, CannotRunError, run_azurite

CONTAINER = "conformance"
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    try:
        running = run_azurite()
        server = running.__enter__()
    except CannotRunError as error:
        pytest.skip(str(error))
    try:
        server.create_container(CONTAINER)
        yield server
    finally:
        running.__exit__(None, None, None)


@pytest.fixture
def azure(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> CloudBackend:
    """Return a backend as a user opens it: by URL, with everything else in the environment."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return CloudBackend(f"az://{CONTAINER}/run {next(_prefixes)}/ü", client_options={"allow_http": True})


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
class TestAzurite(BackendSuite):
    @pytest.fixture
    def backend(self, azure: CloudBackend) -> Backend:
        return azure


@pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
class TestAzuriteWrapped(BackendSuite):
    @pytest.fixture
    def backend(self, azure: CloudBackend) -> Backend:
        return RecordingBackend(FaultyBackend(azure))


class TestObstoreMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return CloudBackend("memory://conformance", store=MemoryStore())


class TestObstoreMemoryWrapped(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return RecordingBackend(FaultyBackend(CloudBackend("memory://conformance", store=MemoryStore())))
