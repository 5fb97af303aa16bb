"""The hosts of a job, as its ranks have found each other: the ranks of each, and where each serves its memory.

Each rank serves, posts where, and rank 0 posts the list of all. It is done once, at the first call that needs it, by notes
of one incarnation: what an earlier start of the job has posted is never read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.backends.peer import HostAt, Hosts, PeerBackend
from aiockpt.errors import ObjectExistsError, StorageError, UsageError
from aiockpt.format.names import manifest_key
from aiockpt.pipeline.discover import scan
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.peer_link import Network

logger = logging.getLogger("aiockpt")

HOST_KEY = ".host"
"""The object whose content names a host's memory: all processes that see it are on one host."""


class _HeldStep(msgspec.Struct, frozen=True, array_like=True):
    """A step in a host's memory: its id, the logical clock and the attempt of its newest save, and its manifests."""

    id: str
    sequence: int
    attempt: str
    generations: tuple[int, ...]


class _Here(msgspec.Struct, frozen=True, array_like=True):
    """A rank's note: its host, the failure domain of that, where it serves, and which steps are there already."""

    host: str
    domain: str
    address: str
    steps: tuple[_HeldStep, ...] = ()


class FoundHosts:
    """Finds the hosts of a job for one place. On the engine's loop.

    Args:
        deadline_s: for the other ranks.
        apart: what hosts must not share for one to hold copies of the other; see `aiockpt.Tier`.
        address: of this host.
        token: draws random bytes.

    Attributes:
        hosts: all; None before they are known.
        host_id: of this host.
    """

    def __init__(
        self,
        backend: PeerBackend,
        board: NoteBoard,
        deadline_s: float,
        *,
        apart: str | Callable[[], str],
        address: str,
        token: Callable[[int], bytes],
    ) -> None:
        self._backend, self._board, self._deadline_s = backend, board, deadline_s
        self._apart, self._address, self._token = apart, address, token
        if isinstance(apart, str) and apart != "host" and apart not in os.environ:
            raise UsageError(
                f"Tier({backend.url!r}, apart={apart!r}): there is no such environment variable here; set it to the name of "
                'this host\'s rack or block on every rank, or give apart="host"'
            )
        self._asking = anyio.Lock()
        self._network: Network | None = None
        self._posted: _Here | None = None
        self.hosts: Hosts | None = None
        self.host_id = ""

    async def find(self) -> Hosts:
        """Return the hosts; wait for all ranks the first time.

        Raises:
            RankTimeoutError: names the ranks that have not called.
        """
        async with self._asking:
            if self.hosts is None:
                self.hosts = await self._find()
        return self.hosts

    async def close(self) -> None:
        """Serve no more, also where the hosts were never found."""
        if self._network is not None:
            await self._network.close()

    async def _find(self) -> Hosts:
        board, what = self._board, f"the hosts of {self._backend.url} (every rank must save or load there)"
        if self._posted is None:
            self.host_id = await self._name_host()
            domain = self._domain()
            self._network = self._backend.make_network(self._address, self._token)
            address = self._network.announce(self._backend.answering)
            steps = [
                _HeldStep(entry.id, entry.head.sequence, entry.head.attempt, entry.generations)
                for entry in await scan(self._backend.own)
                if entry.head is not None
            ]
            self._posted = _Here(self.host_id, domain, address, tuple(steps))
            await board.post(f"here/{board.rank}", self._posted)
        if board.rank:
            return self._join(await board.wait("hosts", Hosts, self._deadline_s, what))
        keys = {rank: f"here/{rank}" for rank in range(board.world_size)}
        found = await board.gather(keys, _Here, self._deadline_s, what)
        here = [found[rank] for rank in range(board.world_size)]
        hosts = self._join(_listed(here))
        await self._remove_replaced({one.host: one.steps for one in here})
        await board.post("hosts", hosts)
        return hosts

    def _join(self, hosts: Hosts) -> Hosts:
        assert self._network is not None
        self._backend.join(hosts, self.host_id, self._board.rank, self._network)
        return hosts

    async def _remove_replaced(self, steps: Mapping[str, Sequence[_HeldStep]]) -> None:
        """Remove the manifests of saves that another host's save of the same step has replaced, while they were apart.

        Of two manifests with one name only one is seen, and it must be the newer one's.
        """
        newest: dict[str, _HeldStep] = {}
        for held in (held for some in steps.values() for held in some):
            if held.id not in newest or held.sequence > newest[held.id].sequence:
                newest[held.id] = held
        memories = {memory.host.id: memory for memory in self._backend.hosts}
        for host, some in steps.items():
            keys = [
                manifest_key(held.id, generation)
                for held in some
                if held.attempt != newest[held.id].attempt
                for generation in held.generations
            ]
            if keys:
                logger.warning(
                    "%s: host %s was away while steps were saved again; what it has of %s is not used",
                    *(self._backend.url, host, ", ".join(sorted({key.partition("/")[0] for key in keys}))),
                )
                with suppress(StorageError):
                    await (memories.get(host) or self._backend.own).delete(keys)

    async def _name_host(self) -> str:
        own = self._backend.own
        with suppress(ObjectExistsError):
            await own.put_new(HOST_KEY, self._token(8).hex().encode())
        return (await own.get(HOST_KEY, 64)).decode()

    def _domain(self) -> str:
        if callable(self._apart):
            return str(self._apart())
        return self.host_id if self._apart == "host" else os.environ[self._apart]


def _listed(here: list[_Here]) -> Hosts:
    """Return the hosts by their first ranks, that of rank 0 first."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(here):
        ranks.setdefault(one.host, []).append(rank)
    return Hosts(
        tuple(
            HostAt(host, here[some[0]].domain, tuple(some), tuple(here[rank].address for rank in some))
            for host, some in ranks.items()
        )
    )
