"""What one rank offers reaches those that take it; a rank that ends, however it ends, keeps nobody waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from aiockpt.errors import UsageError
from aiockpt.ranks import peers as peers_module
from aiockpt.ranks.peers import Peers, Shelf, find_peers
from aiockpt.runtime.world import Ranks
from tests.ranks.peer_crew import Connect

DEADLINE_S = 60
PARCEL = 7


@asynccontextmanager
async def shelves(ranks: Sequence[int]) -> AsyncIterator[list[Shelf]]:
    """Lend the shelves of ranks that know each other's address."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(Peers(tuple(ranks), rank, Connect).connected()) for rank in ranks]
        for shelf in found:
            shelf.addresses = [other.address for other in found]
        yield found


def memory(value: int, size: int = 5000) -> memoryview:
    return memoryview(bytearray([value]) * size)


async def test_a_parcel_reaches_all_its_takers_and_its_memory_is_free_then() -> None:
    into = [memory(0), memory(0)]
    async with shelves((3, 5, 9)) as (one, *others), anyio.create_task_group() as tasks:
        for shelf, inbox in zip(others, into, strict=True):
            tasks.start_soon(shelf.take, 3, PARCEL, inbox, DEADLINE_S)
        await anyio.sleep(0.1)  # they ask before it is there
        assert await one.offer(PARCEL, memory(4), [5, 9], DEADLINE_S)
    assert into == [memory(4), memory(4)]


async def test_a_parcel_that_is_not_read_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "HELD_S", 0.01)
    inbox = memory(0)
    async with shelves((0, 1)) as (one, other), anyio.create_task_group() as tasks:
        tasks.start_soon(other.take, 0, PARCEL, inbox, DEADLINE_S)
        await anyio.sleep(0.2)
        assert await one.offer(PARCEL, memory(4), [1], DEADLINE_S)
    assert inbox == memory(4)


async def test_an_early_question_is_answered_though_another_rank_is_gone() -> None:
    inbox = memory(0)
    async with shelves((0, 1, 2)) as (one, other, _), anyio.create_task_group() as tasks:
        tasks.start_soon(other.take, 0, PARCEL, inbox, DEADLINE_S)
        await anyio.sleep(0.1)
        one.leave(2)
        assert await one.offer(PARCEL, memory(4), [1], DEADLINE_S)
    assert inbox == memory(4)


async def test_where_a_rank_has_failed_nobody_waits_for_it() -> None:
    with anyio.fail_after(DEADLINE_S):
        async with shelves((0, 1, 2)) as (one, other, failing), anyio.create_task_group() as tasks:
            tasks.start_soon(_is_refused, other)
            tasks.start_soon(one.watch, 2)
            tasks.start_soon(one.offer, PARCEL, memory(1), [2], DEADLINE_S)
            await anyio.sleep(0.1)
            failing.fail()
            await _is_refused(one)


async def _is_refused(shelf: Shelf) -> None:
    assert not await shelf.take(2, PARCEL, memory(0), DEADLINE_S)


@pytest.mark.parametrize("how", ["is done", "is lost", "has left"])
async def test_the_memory_of_a_parcel_that_a_rank_missed_is_not_used_again(how: str) -> None:
    with anyio.fail_after(DEADLINE_S):
        async with shelves((0, 1, 2)) as (one, other, gone), anyio.create_task_group() as tasks:
            if how == "has left":
                one.leave(2)
            tasks.start_soon(one.watch, 2)
            tasks.start_soon(other.take, 0, PARCEL, memory(0), DEADLINE_S)
            if how == "is done":
                gone.done.resolve(None)
            elif how == "is lost":
                await gone._network.close()
            assert not await one.offer(PARCEL, memory(1), [1, 2], DEADLINE_S)
            gone.done.resolve(None)


async def test_a_rank_that_takes_nothing_until_the_deadline_is_given_up() -> None:
    async with shelves((0, 1)) as (one, late):
        assert not await one.offer(PARCEL, memory(1), [1], 0.01)
        with pytest.raises(OSError):
            await late.take(0, PARCEL, memory(0), DEADLINE_S)


async def test_a_lost_reader_is_an_error_to_those_that_wait_for_it() -> None:
    with anyio.fail_after(DEADLINE_S):
        async with shelves((0, 1)) as (one, gone), anyio.create_task_group() as tasks:
            tasks.start_soon(_is_lost, one)
            await anyio.sleep(0.1)
            await gone._network.close()


async def _is_lost(shelf: Shelf) -> None:
    with pytest.raises(OSError):
        await shelf.take(1, PARCEL, memory(0), DEADLINE_S)


async def test_a_parcel_that_is_not_there_by_the_deadline_is_given_up_soon() -> None:
    async with shelves((0, 1)) as (one, _):
        with anyio.fail_after(DEADLINE_S), pytest.raises(TimeoutError):
            await one.take(1, PARCEL, memory(0), 0.1)


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        find_peers(Ranks(load_group=object()))
