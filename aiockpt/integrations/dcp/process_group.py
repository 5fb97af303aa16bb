"""The process group whose ranks save one checkpoint through DCP."""

from __future__ import annotations

from torch import distributed
from torch.distributed import distributed_c10d

from aiockpt.runtime.ranks import Ranks, find_ranks


def ranks_of(group: distributed.ProcessGroup | None, *, alone: bool) -> Ranks:
    """Return this process's place in *group* (None is all ranks); the only one where it saves *alone*."""
    if alone or not (distributed.is_available() and distributed.is_initialized()):
        return Ranks()
    ranks = find_ranks()
    if group is None or ranks.world_size == 1:
        return ranks
    members = distributed.get_process_group_ranks(group)
    if len(members) == 1:
        return Ranks()
    name = "-".join(map(str, members))
    store = distributed_c10d.PrefixStore(f"aiockpt.dcp/{name}", ranks.store)
    return Ranks(members.index(ranks.rank), len(members), store)
