"""Memory of hosts over NIXL, where it is installed (``pip install nixl``; it needs no GPU)."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiockpt.runtime.peer_link import Network
from tests.peers.cluster import Cluster
from tests.peers.nixl_network import NixlNetwork
from tests.peers.test_peer_memory import WHOLE_BYTES, count_copies, load
from tests.ranks.test_save import replicated


def find_nixl() -> Any:
    """Return the module with NIXL's agents; None where it is not installed."""
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    return None


NIXL = find_nixl()
pytestmark = pytest.mark.skipif(NIXL is None, reason="nixl is not installed")


def test_copies_and_loads_come_by_transfers_of_nixl(tmp_path: Path) -> None:
    networks: list[NixlNetwork] = []

    def make(host: str, token: Any) -> Network:
        networks.append(NixlNetwork(NIXL, host, token))
        return networks[-1]

    cluster = Cluster(tmp_path)
    start = partial(cluster.start, make_network=make)
    with start("ab") as crew:
        crew.save(1, replicated)
        assert count_copies(cluster, "ab", 1) == [2, 2]
    assert sum(network.read_bytes for network in networks) >= WHOLE_BYTES
    cluster.lose("a")
    networks.clear()
    with start("ab") as crew:
        load(crew, 1)
    assert sum(network.read_bytes for network in networks) > 0
