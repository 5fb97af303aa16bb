"""Bytes go from rank to rank, and a rank that ends, however it ends, is noticed by all that wait for it."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from aiockpt.errors import UsageError
from aiockpt.ranks.peers import Peers, PeersLostError, find_peers
from aiockpt.runtime.world import Ranks
from tests.ranks.gloo_threads import connect

DEADLINE_S = 250


def memory(value: int, size: int = 5000) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, value, np.uint8)


async def receive(mine: Peers, source: int, tag: int = 0, deadline_s: float = DEADLINE_S) -> None:
    await mine.trade([], [(source, memory(0))], tag, deadline_s)


async def test_bytes_arrive_at_the_ranks_they_are_for() -> None:
    peers = connect((3, 5, 9))
    inboxes = {(mine.rank, other): memory(0) for mine in peers for other in mine.ranks if other != mine.rank}
    async with anyio.create_task_group() as tasks:
        for mine in peers:
            sends = [(other, memory(10 * mine.rank + other)) for other in mine.ranks if other != mine.rank]
            receives = [(other, inboxes[mine.rank, other]) for other in mine.ranks if other != mine.rank]
            tasks.start_soon(mine.trade, sends, receives, 7, DEADLINE_S)
    assert all((inbox == 10 * source + to).all() for (to, source), inbox in inboxes.items())
    assert all(mine.broken is None for mine in peers)


async def test_a_silent_rank_is_named_at_the_deadline_and_all_others_learn_it_at_once() -> None:
    one, silent, other = connect((0, 1, 2))
    with anyio.fail_after(250):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_lost, other, 0)  # waits for one that is about to give up
            with pytest.raises(PeersLostError, match="lost rank 1"):
                await receive(one, 1, deadline_s=0.2)
    with anyio.fail_after(250):
        await _lost(silent, 0)


async def test_who_waits_for_a_rank_that_lost_another_learns_it_too() -> None:
    one, gone, other = connect((0, 1, 2))
    with anyio.fail_after(250):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_lost, other, 0)
            await gone.hang_up("a test")
            await _lost(one, 1)


async def _lost(mine: Peers, source: int) -> None:
    with pytest.raises(PeersLostError) as caught:
        await receive(mine, source)
    assert caught.value.ranks == (source,)


async def test_a_cancelled_trade_ends_at_once_at_both_ends() -> None:
    one, other = connect((0, 1))
    with anyio.fail_after(250):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_lost, other, 0)
            with anyio.move_on_after(0.2):
                await receive(one, 1)
    assert one.broken
    assert other.broken


async def test_a_group_that_broke_is_not_used_again() -> None:
    one, other = connect((0, 1))
    await one.hang_up("a test")
    await one.hang_up("a test")
    with pytest.raises(PeersLostError, match="a test"):
        await receive(one, 1)
    assert "a test" in repr(one)
    with anyio.fail_after(250):
        await _lost(other, 0)


def test_without_a_group_nobody_is_a_peer() -> None:
    assert find_peers(None, Ranks()) is None


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        find_peers(object(), Ranks())
