"""Memory of several hosts: one union to each of them; hosts are folders, the network is real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiockpt.backends.peer import SPARED_S, HostAt, Hosts, PeerBackend
from aiockpt.backends.ranges import Buffers
from aiockpt.errors import ObjectExistsError, StorageError, StorageTimeoutError
from aiockpt.runtime.peer_link import TcpNetwork
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite
from tests.simulated.simulation import simulated_world


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


class Silent:
    """A network on which nobody answers in time; see `aiockpt.runtime.peer_link.Network`."""

    def __init__(self) -> None:
        self.asked = 0

    def announce(self, answering: object) -> str:
        return "here"

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        self.asked += 1
        raise TimeoutError

    async def watch(self, address: str, question: bytes) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Does nothing."""


@pytest.mark.anyio
async def test_a_host_that_was_silent_is_not_asked_again_for_a_while(tmp_path: Path) -> None:
    network, world = Silent(), simulated_world()
    backend = PeerBackend("run", mount=str(tmp_path), world=World(clock=world.clock))
    hosts = Hosts((HostAt("a", "a", (0,), ("here",)), HostAt("b", "b", (1,), ("there",))))
    backend.join(hosts, "a", 0, network)
    for _ in range(3):
        with pytest.raises(StorageTimeoutError) as told:
            await backend.hosts[0].stat("key")
        assert told.value.retryable
    assert network.asked == 1
    with pytest.raises(StorageTimeoutError):  # it is not empty for that: a load would go on from less
        await backend.list("")
    world.clock.advance(SPARED_S)
    with pytest.raises(StorageTimeoutError):
        await backend.hosts[0].stat("key")
    assert network.asked == 2


@pytest.mark.anyio
async def test_records_lie_on_the_host_of_rank_0_whoever_creates_them(tmp_path: Path) -> None:
    async with hosts_of(tmp_path, 3) as (home, away, other):
        await away.put_new("a/new", b"1")
        await other.put("a/put", b"2")
        assert [stat.key for stat in (await home.own.list("a")).objects] == ["a/new", "a/put"]
        assert not (await away.own.list("a")).objects


@pytest.mark.anyio
async def test_a_record_that_another_host_brought_is_not_created_again(tmp_path: Path) -> None:
    """It is that of an earlier run, whose home was there: two manifests of one name must never be."""
    async with hosts_of(tmp_path, 3) as hosts:
        await hosts[2].own.put("a/record", b"earlier")
        for host in hosts:
            with pytest.raises(ObjectExistsError):
                await host.put_new("a/record", b"later")
        assert not (await hosts[0].own.list("a")).objects
        assert await hosts[0].get("a/record", 10) == b"earlier"


@pytest.mark.anyio
async def test_an_object_that_a_silent_host_may_have_is_not_missing(tmp_path: Path) -> None:
    """A run that takes it for missing begins anew."""
    backend = PeerBackend("run", mount=str(tmp_path))
    hosts = Hosts((HostAt("a", "a", (0,), ("here",)), HostAt("b", "b", (1,), ("there",))))
    backend.join(hosts, "a", 0, Silent())
    for look in (backend.stat("key"), backend.get("key", 10), backend.open("key")):
        with pytest.raises(StorageTimeoutError):
            await look


@pytest.mark.anyio
async def test_what_this_host_has_does_not_stand_for_that_of_a_silent_home(tmp_path: Path) -> None:
    """It may be another run's, of the same name."""
    backend = PeerBackend("run", mount=str(tmp_path))
    hosts = Hosts((HostAt("a", "a", (0,), ("there",)), HostAt("b", "b", (1,), ("here",))))
    backend.join(hosts, "b", 1, Silent())
    await backend.own.put("key", b"of another run")
    for look in (backend.stat("key"), backend.get("key", 20)):
        with pytest.raises(StorageTimeoutError):
            await look


@pytest.mark.anyio
async def test_a_copy_that_ends_too_early_is_an_error_and_its_host_answers_on(tmp_path: Path) -> None:
    async with hosts_of(tmp_path, 2) as (home, away):
        await home.own.put("a/file", b"short")
        (memory,) = away.hosts
        with pytest.raises(StorageError, match="ends before byte 9"):
            await memory.read("a/file", 9, Buffers([memoryview(bytearray(9))]), None)
        filled = bytearray(5)
        await memory.read("a/file", 5, Buffers([memoryview(filled)]), None)
        assert filled == b"short"


@pytest.mark.anyio
async def test_a_read_that_goes_on_at_another_host_finds_a_file_of_the_same_size(tmp_path: Path) -> None:
    async with hosts_of(tmp_path, 4) as hosts:
        for host, data in zip(hosts[1:], (b"0123456789", bytes(20), b"0123456789"), strict=True):
            await host.own.put("a/file", data)
        reader = await hosts[0].open("a/file")
        await hosts[1].own.delete(["a/file"])
        filled = bytearray(10)
        await reader.read(0, [memoryview(filled)])
        assert filled == b"0123456789"
        await reader.close()


@pytest.mark.anyio
async def test_of_two_objects_with_one_key_all_hosts_see_the_same(tmp_path: Path) -> None:
    async with hosts_of(tmp_path, 3) as hosts:
        for number, host in enumerate(hosts[1:]):
            await host.own.put("a/record", bytes(number + 1))
        assert {await host.get("a/record", 10) for host in hosts} == {b"\0"}
        assert {(await host.list("a")).objects[0].size for host in hosts} == {1}
