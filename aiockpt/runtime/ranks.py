"""How many processes save together, and which of them is this one?"""

from __future__ import annotations

import msgspec

from aiockpt.errors import UsageError
from aiockpt.options import launched_world_size


class Ranks(msgspec.Struct, frozen=True):
    """This process's place among those that save one state together."""

    rank: int = 0
    world_size: int = 1


def find_ranks() -> Ranks:
    """Return this process's place.

    Raises:
        UsageError: it is one of several; they would need a store to agree on an attempt (DECISIONS 1).
    """
    world_size = launched_world_size()
    if world_size > 1:
        raise UsageError(
            f"WORLD_SIZE={world_size}: this version saves from a single process. "
            "Save on one rank with WORLD_SIZE unset, or wait for the release that shards."
        )
    return Ranks()
