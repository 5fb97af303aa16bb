"""Notes between ranks: received once, in time, and with the names of those that sent none."""

from typing import Any

import anyio
import msgspec
import pytest
import torch.distributed

from aiockpt.errors import RankTimeoutError
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.notes import NoteBoard, StoreLostError, growing_pauses, name_ranks
from tests.simulated.simulation import SimulatedClock
from tests.simulated.virtual_time import run_virtually


class Note(msgspec.Struct, frozen=True):
    text: str


class LostStore:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


def new_store() -> Any:
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


def new_board(store: Any, rank: int, world_size: int, place: str = "a place") -> NoteBoard:
    return NoteBoard(Incarnation(store, place, rank, world_size, "a process", id="one"))


def meetings(world_size: int, store: Any = None) -> list[NoteBoard]:
    store = store or new_store()
    ranks = [new_board(store, rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.begin()
    return ranks


async def test_a_note_is_read_by_all_as_it_was_written() -> None:
    first, *others = meetings(3)
    await first.post("key", Note("ready"))
    for other in others:
        assert await other.wait("key", Note, 10, "the note") == Note("ready")
    assert await others[0].find_all(["never there", "key"], Note) == [None, Note("ready")]
    await first.delete(["key", "never there"])
    assert await first.find("key", Note) is None


async def test_a_note_may_come_while_it_is_waited_for() -> None:
    first, second = meetings(2)
    async with anyio.create_task_group() as tasks:

        async def post_later() -> None:
            await anyio.sleep(0.05)
            await first.post("key", Note("late"))

        tasks.start_soon(post_later)
        assert await second.wait("key", Note, 10, "the note") == Note("late")


async def test_who_left_no_note_is_named() -> None:
    ranks = meetings(4)
    for rank in (0, 2):
        await ranks[rank].post(f"{rank}", Note("here"))
    with pytest.raises(RankTimeoutError, match=r"the plan: nothing from ranks 1, 3 within 0\.05 s") as caught:
        await ranks[0].gather({rank: f"{rank}" for rank in range(4)}, Note, 0.05, "the plan")
    assert list(caught.value.ranks) == [1, 3]


def test_a_note_that_came_while_the_process_was_stopped_is_read_though_the_deadline_has_passed() -> None:
    store, clock = new_store(), SimulatedClock()

    async def main() -> None:
        first, second = meetings(2, store)
        async with anyio.create_task_group() as tasks:

            async def stop_the_process() -> None:
                await anyio.sleep(0.05)
                store.set(f"{first.name}/key", msgspec.msgpack.encode(Note("in time")))
                clock.now_ns += 500_000_000  # time passes, and nothing of this process runs

            tasks.start_soon(stop_the_process)
            assert await second.wait("key", Note, 0.3, "the note") == Note("in time")

    run_virtually(main, clock)


async def test_all_arrive_or_not_all() -> None:
    ranks = meetings(3)
    assert [await rank.arrive("gate") for rank in ranks[:2]] == [1, 2]
    assert not await ranks[0].wait_all_arrived("gate", 0.05)
    await ranks[2].arrive("gate")
    assert await ranks[0].wait_all_arrived("gate", 10)


async def test_a_store_that_is_gone_is_an_error_that_names_its_host() -> None:
    store: Any = LostStore()
    board = new_board(store, 1, 2)
    board.join("as another process/has begun it/1")
    with pytest.raises(StoreLostError, match="Connection reset by peer") as caught:
        await board.find("key", Note)
    assert list(caught.value.ranks) == [0]


async def test_a_store_that_is_lost_when_a_rank_comes_to_it_is_told_by_every_later_call_and_not_there() -> None:
    store: Any = LostStore()
    board = new_board(store, 1, 2)
    board.begin()
    for _ in range(2):
        with pytest.raises(StoreLostError, match="did not answer this rank's first call"):
            await board.post("key", Note("never read"))


async def test_meetings_about_one_place_do_not_hear_each_other() -> None:
    store = new_store()
    (earlier,), (later,) = meetings(1, store), meetings(1, store)
    assert earlier.name != later.name
    await earlier.post("key", Note("earlier"))
    assert await later.find("key", Note) is None


def test_pauses_grow_up_to_the_last() -> None:
    pauses = growing_pauses(0.001, 0.003)
    assert [round(next(pauses), 5) for _ in range(5)] == [0.001, 0.0015, 0.00225, 0.003, 0.003]


def test_many_ranks_are_named_in_short() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
