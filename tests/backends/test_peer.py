"""Memory of several hosts: one union to each of them; hosts are folders, the network is real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiockpt.backends.peer import HostAt, Hosts, PeerBackend
from aiockpt.runtime.peer_link import TcpNetwork
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite


@asynccontextmanager
async def hosts_of(folder: Path, count: int) -> AsyncIterator[list[PeerBackend]]:
    """Yield a view of the union from each of *count* hosts, the home first."""

    backends, at = [], []
    for number in range(count):
        mount = folder / f"host-{number}"
        mount.mkdir(mode=0o700)
        backend, network = PeerBackend("run", mount=str(mount)), TcpNetwork("127.0.0.1")
        at.append(HostAt(f"h{number}", f"h{number}", (number,), (network.announce(backend.answering),)))
        backends.append((backend, network))
    for number, (backend, network) in enumerate(backends):
        backend.join(Hosts(tuple(at)), f"h{number}", number, network)
    yield [backend for backend, _ in backends]
    for backend, _ in backends:
        await backend.close()


class TestPeerAlone(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return PeerBackend("run", mount=str(tmp_path))


class TestPeerAtHome(BackendSuite):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        async with hosts_of(tmp_path, 3) as (home, _, _):
            yield home


class TestPeerAwayFromHome(BackendSuite):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        async with hosts_of(tmp_path, 3) as (_, away, _):
            yield away
