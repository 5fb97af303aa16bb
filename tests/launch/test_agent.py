"""What the agent adds to torch's, without trainers."""

from types import SimpleNamespace
from typing import Any, cast

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher import api as launcher_api

from aiockpt.launch.agent import WatchedAgent, renew_store, watched


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


def test_a_hang_is_ended_only_when_all_nodes_say_so() -> None:
    store = HashStore()
    nodes = [
        SimpleNamespace(_worker_group=SimpleNamespace(group_rank=rank, group_world_size=3, store=store))
        for rank in range(3)
    ]

    def agree(node: int, *, hung: bool) -> bool:
        return WatchedAgent._agree_to_end(cast(Any, nodes[node]), hung)

    assert not agree(0, hung=True)
    assert not agree(1, hung=True)
    assert not agree(2, hung=False)
    assert not agree(0, hung=True)
    assert agree(2, hung=True)
    assert not agree(1, hung=False)
    assert not agree(0, hung=True)


def test_torch_s_own_agent_is_back_after_the_block() -> None:
    before = vars(launcher_api)["LocalElasticAgent"]
    with watched():
        assert vars(launcher_api)["LocalElasticAgent"] is not before
    assert vars(launcher_api)["LocalElasticAgent"] is before
