"""What the agent adds to torch's, without trainers."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher import api as launcher_api

from aiockpt.launch.agent import ENDED, RUNNING, STANDING, WatchedAgent, renew_store, watched
from aiockpt.launch.node_watch import SHARED, NodeWatch, remove_orphans
from aiockpt.launch.restart_policy import NextStart


def meet(handler: RendezvousHandler) -> tuple[int, bool]:
    """Meet once more; return the port of the trainers' store, and whether it has a key of the last start, which it gets."""
    found: Any = handler.next_rendezvous().bootstrap_store_info
    store = TCPStore(found.master_addr, found.master_port, is_master=False, wait_for_workers=False)
    has_key = store.check(["of a dead rank"])
    store.set("of a dead rank", "its address")
    return found.master_port, has_key


def test_each_start_has_a_fresh_store() -> None:
    parameters = RendezvousParameters("c10d", "localhost:0", "fresh", 1, 1, local_addr="localhost")
    handler = get_rendezvous_handler(parameters)
    try:
        first = meet(handler)
        # What torch does by itself; where it does no longer, `renew_store` can go.
        assert meet(handler) == (first[0], True)
        renew_store(handler)
        assert not meet(handler)[1]
    finally:
        handler.shutdown()


def test_a_start_with_fewer_nodes_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch starts it where it drops a node, whose clock is behind, between the meeting and the count."""
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda self, worker_group: None)
    node: Any = object.__new__(WatchedAgent)
    node._rdzv_handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "few", 2, 3))
    try:
        for count in (2, 3):
            node._rendezvous(SimpleNamespace(group_world_size=count))
        with pytest.raises(RendezvousStateError, match="1 of 2 nodes are left"):
            node._rendezvous(SimpleNamespace(group_world_size=1))
    finally:
        node._rdzv_handler.shutdown()


def test_a_hang_is_ended_only_when_all_nodes_say_so() -> None:
    store = HashStore()
    nodes = [
        SimpleNamespace(_worker_group=SimpleNamespace(group_rank=rank, group_world_size=3, store=store))
        for rank in range(3)
    ]

    def agree(node: int, *, hung: bool) -> bool:
        return WatchedAgent._agree(cast(Any, nodes[node]), STANDING if hung else RUNNING)

    assert not agree(0, hung=True)
    assert not agree(1, hung=True)
    assert not agree(2, hung=False)
    assert not agree(0, hung=True)
    assert agree(2, hung=True)
    assert not agree(1, hung=False)
    assert not agree(0, hung=True)
    # A node that has ended waits for nobody, and nobody for it.
    assert not WatchedAgent._agree(cast(Any, nodes[1]), ENDED)
    assert agree(0, hung=True)


def test_a_start_takes_back_that_all_ranks_of_a_node_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static rendezvous of several nodes keeps the store of the start before."""
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda self, worker_group: {0: 1})
    store, nodes = HashStore(), []
    for rank in range(2):
        node: Any = object.__new__(WatchedAgent)
        workers = [SimpleNamespace(global_rank=rank, local_rank=0, world_size=2)]
        node._pcontext = SimpleNamespace(close=None)
        node._worker_group = SimpleNamespace(group_rank=rank, group_world_size=2, store=store, workers=workers)
        node.watch = SimpleNamespace(begin_attempt=lambda *what: None)
        nodes.append(node)
    nodes[1]._agree(STANDING)
    assert nodes[0]._agree(STANDING)
    for node in nodes:
        node._start_workers(node._worker_group)
    assert not nodes[0]._agree(STANDING)


def test_a_restart_for_another_node_waits_for_no_failure_of_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_restart_workers", lambda self, worker_group: None)
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, worker_group: None)
    pauses: list[float] = []
    monkeypatch.setattr("aiockpt.launch.agent.time.sleep", pauses.append)
    node: Any = object.__new__(WatchedAgent)
    node.watch = SimpleNamespace(leave=lambda: None, fail=lambda failure: NextStart(pause_s=30.0))
    node._decide(None)
    for _ in range(2):
        node._restart_workers(None)
    assert pauses == [30.0, 0.0]


def test_torch_s_own_agent_is_back_after_the_block() -> None:
    before = vars(launcher_api)["LocalElasticAgent"]
    with watched():
        assert vars(launcher_api)["LocalElasticAgent"] is not before
    assert vars(launcher_api)["LocalElasticAgent"] is before


def test_what_a_killed_launcher_left_in_shared_memory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "aiockpt.launch.node_watch.tempfile.mkdtemp", lambda prefix, dir: str(tmp_path / f"{prefix}alive")
    )
    names = {name: tmp_path / f"{SHARED}{name}" for name in ("alive", "killed", "young")}
    for folder in names.values():
        folder.mkdir()
        (folder / "0.progress").write_bytes(b"page")
    watch = NodeWatch(tmp_path / "run", "run")
    for name in ("alive", "killed"):
        os.utime(names[name], (0.0, time.time() - 3600))
    remove_orphans(tmp_path)
    assert {name for name, folder in names.items() if folder.exists()} == {"alive", "young"}
    watch.end("ended")
    assert not names["alive"].exists()
