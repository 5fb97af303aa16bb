"""Which start of a job a process belongs to, over a store that holds everything of earlier starts."""

import os
import time
from typing import Any

import torch.distributed

from aiockpt.runtime.incarnation import SETTLE_S, TOGETHER_S, Incarnation, began_ms
from aiockpt.runtime.processes import process_token
from tests.campaigns.sigkill import in_child

EARLIER, LATER = "1000-a", f"{1000 + int(TOGETHER_S * 1000) + 1}-b"


class Job:
    """Starts over one store."""

    def __init__(self) -> None:
        self.store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def rank(self, rank: int, process: str, world_size: int = 2) -> Incarnation:
        return Incarnation(self.store, "a place", rank, world_size, process)


def test_what_a_dead_process_announced_is_not_believed() -> None:
    job = Job()
    job.rank(0, "1000-dead").find(0)
    one = job.rank(1, "1000-one")
    assert [one.find(now_s) for now_s in (0, 10, 100)] == ["", "", ""]
    leader = job.rank(0, "1000-leader")
    assert leader.find(100) == "1000-leader"
    one.find(100)
    assert leader.answer(100)
    assert one.find(100) == "1000-leader"


def test_an_answer_to_an_earlier_process_is_not_believed() -> None:
    job = Job()
    leader = job.rank(0, "1000-leader")
    leader.find(0)
    job.rank(1, "1000-first").find(0)
    assert leader.answer(0)
    second = job.rank(1, "1001-second")
    assert second.find(0) == ""
    leader.answer(0)
    assert second.find(0) == "1000-leader"
    assert job.rank(1, "1000-first").find(0) == ""


def test_rank_0_waits_for_a_rank_that_began_with_it() -> None:
    job = Job()
    leader, zombie, right = job.rank(0, LATER), job.rank(1, EARLIER), job.rank(1, LATER)
    leader.find(0)
    zombie.find(0)
    assert not leader.answer(SETTLE_S / 2)
    right.find(SETTLE_S / 2)
    assert leader.answer(SETTLE_S / 2)
    assert right.find(SETTLE_S / 2) == LATER
    zombie.find(SETTLE_S * 2)
    leader.answer(SETTLE_S * 2)
    assert zombie.find(SETTLE_S * 2) == ""


def test_a_rank_waits_for_a_rank_0_that_began_with_it() -> None:
    job = Job()
    zombie, one = job.rank(0, EARLIER), job.rank(1, LATER)
    zombie.find(0)
    one.find(0)
    zombie.answer(0)
    assert one.find(SETTLE_S / 2) == ""
    leader = job.rank(0, LATER)
    leader.find(1)
    one.find(1)
    leader.answer(1)
    assert one.find(1) == LATER


def test_a_rank_that_began_long_before_is_taken_after_a_moment() -> None:
    job = Job()
    leader, one = job.rank(0, LATER + "-slow"), job.rank(1, EARLIER)
    leader.find(0)
    one.find(0)
    assert not leader.answer(0)
    assert leader.answer(SETTLE_S)
    assert one.find(SETTLE_S) == LATER + "-slow"
    again = job.rank(0, LATER + "-slow")  # its next checkpointer does not wait
    assert again.answer(SETTLE_S)


def test_starts_of_other_sizes_never_meet() -> None:
    job = Job()
    leader, one = job.rank(0, "1000-leader"), job.rank(1, "1000-one", world_size=3)
    leader.find(0)
    one.find(0)
    leader.answer(0)
    assert one.find(0) == ""


def test_boards_are_counted_for_each_process() -> None:
    job = Job()
    job.rank(0, "1000-dead").count_board("saves")  # and rank 1 of that start never came
    counts = [job.rank(rank, f"1000-{rank}").count_board("saves") for rank in (0, 1) for _ in range(2)]
    assert counts == [1, 2, 1, 2]


def test_a_process_token_says_when_the_process_began() -> None:
    assert process_token() == process_token()
    assert time.time() - 3600 < began_ms(process_token()) / 1000 <= time.time()

    def is_new() -> int:
        time.sleep(0.05)
        return int(began_ms(process_token()) < began_ms(parent) or process_token() == parent)

    parent = process_token()
    assert os.getpid()
    assert in_child(is_new) == (False, 0)
