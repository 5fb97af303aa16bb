"""A gloo group whose ranks are threads of one process: real connections, and no process to start for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aiockpt.ranks.peers import Peers
from tests.ranks.crew import Crew, coordinator_of


def connect(ranks: Sequence[int]) -> list[Peers]:
    """Return the peers of a group of these ranks, one for each."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(ranks)) as threads:
        groups = threads.map(lambda number: gloo(store, number, len(ranks), options), range(len(ranks)))
        return [Peers(group, ranks, rank) for group, rank in zip(groups, ranks, strict=True)]


@contextmanager
def crew_with_groups(
    world_size: int, url: Any, groups: Sequence[Sequence[int]] | None = None, **options: Any
) -> Iterator[Crew]:
    """Lend a crew whose ranks read once within each of *groups* (None: all in one)."""
    with Crew(world_size, url if callable(url) else Path(url), **options) as crew:
        for ranks in groups or [range(world_size)]:
            for peers in connect(ranks):
                use(crew, peers)
        yield crew


def use(crew: Crew, peers: Peers) -> None:
    """Give a rank of the crew its peers, as ``load_group`` does with those of a process."""
    coordinator_of(crew.checkpointers[peers.rank])._peers = peers


def peers_of(crew: Crew, rank: int) -> Peers:
    """Return the peers of a rank that has some."""
    peers = coordinator_of(crew.checkpointers[rank])._peers
    assert peers is not None
    return peers
