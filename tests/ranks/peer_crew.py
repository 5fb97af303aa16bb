"""Crews whose ranks read once, over real connections on this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiockpt.ranks.peers import Peers
from aiockpt.runtime.peer_link import Network, TcpNetwork
from tests.ranks.crew import Crew, coordinator_of

Connect = partial(TcpNetwork, "127.0.0.1")


@contextmanager
def crew_with_groups(
    world_size: int, url: Any, groups: Sequence[Sequence[int]] | None = None, **options: Any
) -> Iterator[Crew]:
    """Lend a crew whose ranks read once within each of *groups* (None: all in one)."""
    with Crew(world_size, url if callable(url) else Path(url), **options) as crew:
        for ranks in groups or [range(world_size)]:
            for rank in ranks:
                use(crew, ranks, rank)
        yield crew


def use(crew: Crew, ranks: Sequence[int], rank: int, make_network: Callable[[], Network] = Connect) -> None:
    """Give a rank of the crew its peers, as ``load_group`` does with those of a process."""
    coordinator_of(crew.checkpointers[rank])._peers = Peers(tuple(ranks), rank, make_network)
