"""This process's place among those that save together: how many there are, its number, and the store of their notes."""

from __future__ import annotations

from typing import Any

import msgspec

from aiockpt.errors import UsageError
from aiockpt.options import launched_world_size


class Ranks(msgspec.Struct, frozen=True):
    """This process's place among those that save one state together.

    Attributes:
        rank, world_size: as ``torch.distributed`` counts them.
        store: where ranks leave notes for each other (``torch.distributed.Store``); a single process needs none.
        load_group: a ``torch.distributed`` process group of gloo for this use alone. Its ranks read each block once and
            send it to those that want it, too; worth it where storage is slower than the network between them. Give
            every rank the group it is in; None lets each rank read all that it wants. ``Ranks(load_group=group)`` asks
            ``torch.distributed`` for all else.
    """

    rank: int = 0
    world_size: int = 1
    store: Any = None
    load_group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"Ranks(rank={self.rank}, world_size={self.world_size}): there is no such rank")
        if self.world_size > 1 and self.store is None:
            raise UsageError(
                f"Ranks(world_size={self.world_size}) without a store: ranks must agree on each save. Give "
                "store=torch.distributed.TCPStore(…), or call torch.distributed.init_process_group() and pass no ranks."
            )


def find_ranks() -> Ranks:
    """Return this process's place: that of ``torch.distributed`` when it is initialised, else a world of one.

    Raises:
        UsageError: a launcher announced several processes and there is no process group yet.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store() if world_size > 1 else None
        return Ranks(distributed.get_rank(), world_size, store)
    launched = launched_world_size()
    if launched > 1:
        raise UsageError(
            f"WORLD_SIZE={launched}, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before you make the Checkpointer, or pass ranks=aiockpt.Ranks(…)"
        )
    return Ranks()


def check_found(ranks: Ranks) -> None:
    """Raise when ``torch.distributed`` counts this process otherwise than when *ranks* were found.

    A process group that has ended since is fine: the store outlives it, and so may saves.

    Raises:
        UsageError: names what was found then, what is there now, and what to do.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) == (ranks.rank, ranks.world_size):
        return
    then = "alone" if ranks.world_size == 1 else f"rank {ranks.rank} of {ranks.world_size}"
    raise UsageError(
        f"when this Checkpointer was made this process was {then}, and now it is rank {rank} of {world_size}: make the "
        "Checkpointer after torch.distributed.init_process_group(). If this process is to save alone all the same, "
        "give ranks=aiockpt.Ranks()"
    )
