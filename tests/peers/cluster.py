"""Several hosts in one process: a folder is the memory of each, each rank is a thread, and the network is real."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.backends.peer import PeerBackend
from aiockpt.runtime.peer_link import MakeNetwork, TcpNetwork
from aiockpt.storage.backend import Backend
from tests.ranks.crew import Crew


class Cluster:
    """Hosts by name, below *folder*; what they hold outlives the crews."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def memory(self, host: str) -> Path:
        """Return where the objects of a host lie."""
        return next(iter(self.mount(host).glob("aiockpt-*/peer/run")), self.mount(host) / "nothing")

    def mount(self, host: str) -> Path:
        """Return what stands for the mounted memory of a host."""
        mount = self._folder / f"host-{host}"
        mount.mkdir(mode=0o700, exist_ok=True)
        return mount

    def lose(self, *hosts: str) -> None:
        """Forget all that these hosts held, as new ones of their names would."""
        for host in hosts:
            shutil.rmtree(self.mount(host))

    def start(
        self,
        hosts: str,
        *,
        copies: int = 1,
        keep: int | None = 2,
        more: Sequence[Any] = (),
        wrap: Callable[[int, PeerBackend], Backend] = lambda rank, backend: backend,
        apart: Any = None,
        make_network: MakeNetwork = TcpNetwork,
        **options: Any,
    ) -> PeerCrew:
        """Return a crew with a rank for each letter of *hosts*, on the host of that name.

        Args:
            more: farther tiers.
            apart: for each rank; None for the names of hosts, which then decide who holds whose copies.
            wrap: what a rank gets in place of its backend.
            make_network: how its hosts reach each other.
        """
        backends = [PeerBackend("run", mount=str(self.mount(host)), make_network=make_network) for host in hosts]

        def tiers(rank: int) -> list[Any]:
            near = wrap(rank, backends[rank])
            mine: Any = (lambda: hosts[rank]) if apart is None else apart(rank) if callable(apart) else apart
            return [aiockpt.Tier(near, copies=copies, keep=keep, apart=mine, network="127.0.0.1"), *more]

        return PeerCrew(len(hosts), tiers, backends, **options)


class PeerCrew(Crew):
    """The ranks of one job on several hosts."""

    def __init__(
        self, world_size: int, tiers: Callable[[int], Any], backends: list[PeerBackend], **options: Any
    ) -> None:
        self.backends = backends
        super().__init__(world_size, tiers, **options)

    def save(self, step: int, make: Callable[[int], dict[str, Any]], *, replicated: bool = True) -> None:
        """Save a step on all ranks; wait until it is committed, or *replicated*."""

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            future = ckpt.save(step, make(step))
            future.result(100)
            if replicated:
                future.replicated().result(100)

        self.on_all(save)

    def received_bytes(self) -> list[int]:
        """Return for each rank the bytes of data files that came from other hosts."""
        return [backend.received_bytes for backend in self.backends]
