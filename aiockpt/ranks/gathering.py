"""Counting of votes in a world of thousands: the last rank of each group gathers it, the last of all groups notifies rank 0.

In a small world every rank counts itself, and rank 0 reads the count. In a large one (`aiockpt.planning.groups`) a rank
counts itself in its group only. The rank that makes that count full knows that all receipts of the group stand, gathers
them, and counts the group; the rank that makes the count of the groups full posts one note for rank 0.

Guarantees:

- No rank waits for another here, and no work depends on a particular rank: the last to vote is alive by definition.
  If it dies before it has gathered, rank 0 finds the receipts themselves (`aiockpt.pipeline.receipts`).
- The store only wakes ranks. When it is lost, the votes stand, and rank 0 polls the storage as often as it can.
"""

from __future__ import annotations

from contextlib import suppress

from aiockpt.errors import RankTimeoutError
from aiockpt.format.manifest import Receipt
from aiockpt.pipeline.receipts import gather
from aiockpt.planning.groups import group_of, groups_of
from aiockpt.runtime.notes import NoteBoard, StoreLostError
from aiockpt.storage.backend import Backend


async def count_vote(board: NoteBoard, key: str, backend: Backend, own: Receipt) -> None:
    """Count this rank's vote; if it completes its group, gather the group's receipts.

    Args:
        key: of the notes about these votes.
    """
    group = group_of(board.rank, board.world_size)
    with suppress(StoreLostError):
        if group is None:
            await board.arrive(key)
        elif await board.arrive(_group_key(key, group)) == len(group):
            await gather(backend, own, group)
            if await board.arrive(key) == len(groups_of(board.world_size)):
                await board.post(_all_key(key), True)


async def wait_likely(board: NoteBoard, key: str, patience_s: float) -> None:
    """Wait until all ranks have counted their votes, *patience_s* seconds at most.

    Raises:
        StoreLostError: the count cannot be read any more.
    """
    if group_of(board.rank, board.world_size) is None:
        await board.wait_all_arrived(key, patience_s)
        return
    with suppress(RankTimeoutError):
        await board.wait(_all_key(key), bool, patience_s, key)


def takes_over(rank: int, world_size: int) -> bool:
    """Return whether this rank may commit for rank 0; in a large world one of each group, or all would read all votes."""
    group = group_of(rank, world_size)
    return group is None or rank == group[0]


def vote_keys(key: str, world_size: int) -> list[str]:
    """Return the keys of all notes about votes, to remove them when no rank needs them any more."""
    groups = groups_of(world_size)
    return [key, *([_all_key(key)] if groups else []), *(_group_key(key, group) for group in groups)]


def _group_key(key: str, group: range) -> str:
    return f"{key}/{group[0]}"


def _all_key(key: str) -> str:
    return f"{key}/all"
