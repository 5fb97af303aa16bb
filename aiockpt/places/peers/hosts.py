"""The hosts of a job, as its ranks have found each other: the ranks of each, and where each serves its memory.

Each rank serves, posts where, and rank 0 posts the list of all. It is done once, at the first call that needs it, by notes
of one incarnation: what an earlier start of the job has posted is never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import anyio
import msgspec

from aiockpt.backends.peer import HostAt, Hosts, PeerBackend
from aiockpt.errors import ObjectExistsError, UsageError
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.peer_link import Network, TcpNetwork

MakeNetwork = Callable[[str, Callable[[int], bytes]], Network]
"""Called with the address of this host, and what draws random bytes."""
HOST_KEY = ".host"
"""The object whose content names a host's memory: all processes that see it are on one host."""


class _Here(msgspec.Struct, frozen=True, array_like=True):
    """A rank's note: its host, the failure domain of that, and where it serves."""

    host: str
    domain: str
    address: str


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
        make_network: MakeNetwork = TcpNetwork,
    ) -> None:
        self._backend, self._board, self._deadline_s = backend, board, deadline_s
        self._apart, self._address, self._token = apart, address, token
        if isinstance(apart, str) and apart != "host" and apart not in os.environ:
            raise UsageError(
                f"Tier({backend.url!r}, apart={apart!r}): there is no such environment variable here; set it to the name of "
                'this host\'s rack or block on every rank, or give apart="host"'
            )
        self._make_network = make_network
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
                assert self._network is not None
                self._backend.join(self.hosts, self.host_id, self._board.rank, self._network)
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
            self._network = self._make_network(self._address, self._token)
            address = self._network.announce(self._backend.answering)
            self._posted = _Here(self.host_id, domain, address)
            await board.post(f"here/{board.rank}", self._posted)
        if board.rank:
            return await board.wait("hosts", Hosts, self._deadline_s, what)
        keys = {rank: f"here/{rank}" for rank in range(board.world_size)}
        found = await board.gather(keys, _Here, self._deadline_s, what)
        hosts = _listed([found[rank] for rank in range(board.world_size)])
        await board.post("hosts", hosts)
        return hosts

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
