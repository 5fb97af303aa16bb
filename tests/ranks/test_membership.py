"""What ranks learn of each other: which have left, which were killed, and what those are doing that do not come."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import anyio
import msgspec
import pytest

from aiockpt.errors import RankError, RankFailedError, RanksDisagreeError
from aiockpt.ranks import membership
from aiockpt.ranks.membership import CallNote, Departure, Membership, Waiting
from aiockpt.runtime.processes import Process, has_ended, this_process
from tests.run_python import run_python
from tests.runtime.test_notes import LostStore, Note, meetings, new_board, new_store
from tests.simulated.virtual_time import run_virtually

OPERATION, CALL = "save/5/1", "the save of step 5"


def members(world_size: int, store: Any = None, **options: Any) -> list[Membership]:
    return [Membership(board, **options) for board in meetings(world_size, store)]


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Have a test run on a clock of its own, on which waiting costs nothing."""

    def run() -> None:
        run_virtually(test)

    run.__name__ = test.__name__
    return run


def waiting_of(one: Membership, *, step: int = 5) -> Waiting:
    return Waiting(one, OPERATION, CALL, 600, step=step)


# ------------------------------------------------------------------ who cannot come any more


@virtually
async def test_a_rank_that_leaves_takes_no_part() -> None:
    one, other, _ = members(3)
    await other.leave_group("ValueError: boom", [OPERATION])
    await one.refresh()
    assert one.departure(1, OPERATION) is None
    found = one.departure(1, "save/6/1")
    assert found is not None
    assert found.reason == "ValueError: boom"
    assert one.departure(2, "save/6/1") is None


@virtually
async def test_who_waits_for_a_leaving_rank_is_told() -> None:
    store = new_store()
    one, other = members(2, store)
    async with anyio.create_task_group() as tasks:

        async def leave_later() -> None:
            await anyio.sleep(100)
            await other.leave_group("ValueError: boom", ())

        tasks.start_soon(leave_later)
        with pytest.raises(RankFailedError, match=r"step 5 is given up\. rank 1 has left: ValueError: boom") as caught:
            await one._board.wait("key", Note, 600, "the note", [1], waiting_of(one))
        assert caught.value.ranks == (1,)
    assert 100 <= anyio.current_time() <= 101.5


@virtually
async def test_what_a_rank_wrote_before_it_left_is_found_first() -> None:
    one, other = members(2)
    await other._board.post("key", Note("last words"))
    await other.leave_group("closed", ())
    waiting = waiting_of(one)
    await anyio.sleep(5)
    assert await one._board.wait("key", Note, 600, "the note", [1], waiting) == Note("last words")


@virtually
async def test_an_ended_process_is_told_to_all() -> None:
    ended: list[int] = []
    here = this_process()
    others = [Process(here.host, 70_000 + rank, "1") for rank in range(3)]
    store = new_store()
    ranks = members(3, store, ended=lambda process, _: process.pid in ended)
    for rank, process in zip(ranks, others, strict=True):
        rank._here = process
        await rank.register()
    await ranks[0].refresh()
    assert not ranks[0].anyone_gone
    ended.append(70_002)
    await ranks[0].refresh()
    far = Membership(ranks[1]._board, ended=lambda *_: False)  # on another host: it only hears of it
    await far.refresh()
    for rank in (ranks[0], far):
        found = rank.departure(2, OPERATION)
        assert found is not None
        assert found.killed
        assert "its process 70002 has ended" in found.reason
    assert store.num_keys() < 20
    await ranks[0].refresh()
    assert store.get(f"{ranks[0]._board.name}/left") == b"1"  # told once


@virtually
async def test_votes_of_a_killed_trainer_come_from_its_writer() -> None:
    (one,) = members(1)
    one._departures[1] = Departure(1, "killed", killed=True, writes=False)
    assert one.departure(1, OPERATION) is not None
    assert one.departure(1, OPERATION, voting=True) is None
    one._departures[1] = Departure(1, "killed", killed=True)
    assert one.departure(1, OPERATION, voting=True) is not None


@virtually
async def test_a_rank_that_left_early_is_known_by_place() -> None:
    store = new_store()
    one, _ = members(2, store)
    elsewhere = Membership(new_board(store, 1, 2, "another place"))
    await elsewhere.leave_group_early("ValueError: boom")
    await one.find_early([1])
    assert not one.anyone_gone
    early = Membership(new_board(store, 1, 2))
    await early.leave_group_early("ValueError: boom")
    await early.register()  # its next checkpointer
    await one.find_early([1])
    assert not one.anyone_gone
    await early.leave_group_early("ValueError: boom")
    await one.find_early([1])
    assert one.departure(1, OPERATION) is not None


@virtually
async def test_the_last_rank_to_leave_removes_what_all_of_them_left() -> None:
    store = new_store()
    ranks = members(3, store)
    for rank in ranks:
        await rank.report(CallNote("load() number 1", -1, 1, 0))
    before = store.num_keys()
    for rank in ranks:
        await rank.leave_group("closed", ())
    assert store.num_keys() == before - 3
    assert {
        key for key in ("left", "left/1", "closed", "calls/0") if store.check([f"{ranks[0]._board.name}/{key}"])
    } == set()


@virtually
async def test_nobody_reads_of_thousands_that_leave_at_once() -> None:
    one, *others = members(6)
    for other in others:
        await other.leave_group("closed", ())
    heard = []
    with mock.patch.object(membership, "READ_AT_ONCE", 2):
        for _ in range(4):
            await one.refresh()
            heard.append(len(one._departures))
    assert heard == [2, 4, 5, 5]


# ------------------------------------------------------------------ whom one waits for


@virtually
async def test_warnings_name_the_ranks_that_are_waited_for() -> None:
    told: list[tuple[float, str]] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((round(anyio.current_time()), record.getMessage()))

    handler = Told()
    logging.getLogger("aiockpt").addHandler(handler)
    try:
        ranks = members(5)
        store = ranks[0]._board._store
        elsewhere = new_board(store, 3, 5, "file:///elsewhere")
        elsewhere.begin()
        await ranks[1].report(CallNote(CALL, 5, 0, 0))
        await ranks[2].report(CallNote("load() number 2", -1, 2, 1))
        await Membership(elsewhere).report(CallNote(CALL, 5, 0, 0))
        await ranks[4].register()
        keys = {rank: f"note/{rank}" for rank in range(1, 5)}
        with pytest.raises(TimeoutError) as caught:
            await ranks[0]._board.gather(keys, Note, 200, "the plan", waiting_of(ranks[0]))
    finally:
        logging.getLogger("aiockpt").removeHandler(handler)
    assert [at // 10 for at, _ in told] == [1, 7, 13, 19]
    said = told[0][1]
    assert said.startswith("the save of step 5 has waited 10 s for ranks 1, 2, 3, 4, and is given up after 600 s: ")
    for what in (
        "rank 1 called the save of step 5, and is not done",
        "rank 2 called load() number 2 last, load() 2 times, warm_up() 1 times",
        "rank 3 saved to file:///elsewhere, not to a place",
        "rank 4 called neither save, load nor warm_up so far",
        "Every rank must make the same calls",
    ):
        assert what in said
        assert what in f"{caught.value}. Every rank must make the same calls"


@virtually
async def test_a_save_passed_over_is_given_up_after_warning() -> None:
    one, other = members(2)
    await other.report(CallNote("the save of step 6", 6, 0, 0))
    with pytest.raises(RanksDisagreeError, match=r"step 5 is given up.*rank 1 called the save of step 6 without it"):
        await one._board.wait("key", Note, 600, "the note", [1], waiting_of(one))
    assert 10 <= anyio.current_time() < 12


@virtually
async def test_a_save_beside_this_one_passes_nothing_over() -> None:
    one, other = members(2)
    await other._board.post(f"{OPERATION}/intent/1", Note("called"))
    await other.report(CallNote("the save of step 6", 6, 0, 0))
    for step in (6, 7):  # nor one that saves this very step, or an earlier one
        with pytest.raises(TimeoutError):
            await one._board.wait("key", Note, 30, "the note", [1], waiting_of(one, step=step))
    with pytest.raises(TimeoutError):
        await one._board.wait("key", Note, 30, "the note", [1], waiting_of(one))


@virtually
async def test_votes_are_looked_for_when_ranks_are_late() -> None:
    one, other, third = members(3)
    asked = []

    async def missing() -> list[int]:
        asked.append(anyio.current_time())
        return [1]

    async def look_until(seconds: float) -> RankError | None:
        while anyio.current_time() < seconds:
            if (found := await waiting.check_votes(missing)) is not None:
                return found
            await anyio.sleep(0.5)
        return None

    waiting = waiting_of(one)
    assert await look_until(9) is None
    assert asked == []
    await third.leave_group("closed", ())
    assert await look_until(9.9) is None  # whose vote is there
    assert asked
    await other.leave_group("closed", ())
    found = await look_until(60)
    assert found is not None
    assert found.ranks == (1,)


@virtually
async def test_a_lost_store_is_told_and_waited_for() -> None:
    store: Any = LostStore()
    board = new_board(store, 0, 2)
    board.begin()
    one = Membership(board)
    waiting = waiting_of(one)
    await anyio.sleep(20)
    assert await waiting.check_ranks([1]) is None
    assert "did not answer" in await waiting.explain([1])


# ------------------------------------------------------------------ processes


def test_a_process_that_was_killed_has_ended_and_a_zombie_too() -> None:
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            started = msgspec.structs.replace(here, pid=child.pid, started=_started(child.pid))
            assert not has_ended(started, here)
            assert has_ended(msgspec.structs.replace(started, started="1"), here)  # the id is another process's now
            assert not has_ended(msgspec.structs.replace(started, host="another", pid=1 << 30), here)
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(started, here)
    assert has_ended(started, here)


def test_where_the_kernel_says_nothing_nobody_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("aiockpt.runtime.processes._PROC", tmp_path)
    here = this_process()
    assert here.pid == os.getpid()
    assert not has_ended(Process("", 1 << 30, ""), here)


def _started(pid: int) -> str:
    from aiockpt.runtime.processes import _list_process

    return _list_process(pid)[1]


def test_a_process_that_cannot_be_looked_at_has_not_ended() -> None:
    """This process has no descriptor left: what it cannot read is not gone."""
    script = (
        "import os, resource\n"
        "from aiockpt.runtime.processes import Process, has_ended, this_process\n"
        "here = this_process()\n"
        "parent = Process(here.host, os.getppid(), here.started)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
        "assert this_process().host == ''\n"
        "print(has_ended(parent, here))\n"
    )
    run = run_python("-c", script)
    assert (run.stdout, run.stderr) == ("False\n", "")
