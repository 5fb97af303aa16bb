"""A job any part of which is killed at any time: a snapshot that all ranks took is committed, and no other one is there."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.writers_job import Job, whole
from tests.small_run import small_checkpointer
from tests.watch import until
from tests.worker.test_worker_killed import orders as orders
from tests.worker.test_worker_killed import steps_of, writers_of
from tests.worker.worker_places import Orders


def check_loads(place: Any, step: int, grown: bool = False) -> None:
    """Compare every bit of a step with what was saved."""
    expected = whole(step, grown)
    state: dict[str, Any] = {
        name: torch.zeros_like(value) if name != "step" else None for name, value in expected.items()
    }
    with small_checkpointer(place) as ckpt:
        assert ckpt.load(state, step).result() is not None
        ckpt.verify(step).result()
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value


def until_no_writer(orders: Orders) -> None:
    until(lambda: not writers_of(orders), "the end of all writers")


@pytest.mark.parametrize(
    ("world_size", "cold", "snapshot", "grown"),
    [(4, False, "lazy", True), (2, True, "eager", False)],
    ids=["four ranks, lazy, another structure", "the first save"],
)
def test_captured_states_are_committed_though_trainers_are_killed(
    world_size: int, cold: bool, snapshot: str, grown: bool, orders: Orders
) -> None:
    with Job(world_size, [orders.url]) as job:
        if not cold:
            job.ask("save", 1, "eager", False)
            assert job.ask("result") == [1] * world_size
        verb = "put" if cold else "create"  # the first thing that a writer does
        orders.hold(verb)
        job.ask("save", 2, snapshot, grown)
        job.kill(*range(world_size))
        assert len(writers_of(orders)) == world_size
        orders.let_go(verb)
        until_no_writer(orders)
    check_loads(orders.path, 2, grown)
    assert steps_of(orders) == ([2] if cold else [2, 1])


@pytest.mark.parametrize(
    ("killed", "elsewhere"),
    [(0, False), (1, False), (0, True)],
    ids=["with the store", "not with it", "a store elsewhere"],
)
def test_living_ranks_hear_of_the_commit(killed: int, elsewhere: bool, orders: Orders, tmp_path: Path) -> None:
    with Job(2, [orders.url], file=str(tmp_path / "store") if elsewhere else None) as job:
        verb = "list" if elsewhere else "create"  # before rank 0 says that it begins; and after
        orders.hold(verb)
        job.ask("save", 1, "lazy", False)
        job.kill(killed)
        orders.let_go(verb)
        assert job.ask("result", ranks=[1 - killed]) == [1]
        check_loads(orders.path, 1)
        job.kill(1 - killed)  # its barrier with a rank that is no more is not what is tested
        until_no_writer(orders)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_its_copy_leaves_no_checkpoint(killed: int, orders: Orders) -> None:
    with Job(2, [orders.url]) as job:
        job.ask("save", 1, "eager", False)
        assert job.ask("result") == [1, 1]
        job.ask("die in the copy", ranks=[killed])
        job.tell("save", 2, "eager", False)
        other = 1 - killed
        assert job.hear(other) == "done"
        kind, message = job.ask("result", ranks=[other])[0]
        assert kind == "RankFailedError", message
        assert f"rank {killed} failed" in message
        assert "before the snapshot of step 2 was complete" in message
        job.kill(other)
        until_no_writer(orders)
    assert steps_of(orders) == [1]
    assert not list(orders.path.glob("step-00000002/a-*/d/*"))
    check_loads(orders.path, 1)


def test_a_rank_that_voted_hears_of_a_failure(orders: Orders) -> None:
    """Rank 2 dies in its copy, and the trainer of rank 0, with the store, after its own."""
    with Job(3, [orders.url]) as job:
        job.ask("save", 1, "eager", False)
        assert job.ask("result") == [1, 1, 1]
        orders.hold("create", "r00001")
        job.ask("die in the copy", ranks=[2])
        job.tell("save", 2, "eager", False)
        assert [job.hear(rank) for rank in (0, 1)] == ["done", "done"]
        job.kill(0)
        until(lambda: list(orders.path.glob("step-00000002/a-*/r/r00002.fail.json")), "the record of the failure")
        orders.let_go("create")
        kind, message = job.ask("result", ranks=[1])[0]
        assert kind == "RankFailedError", message
        assert "rank 2 failed" in message
        job.kill(1)
        until_no_writer(orders)
    assert steps_of(orders) == [1]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    name = f"aiockpt-test-{tmp_path.name}-{os.getpid()}"
    yield f"shm://{name}"
    shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


@pytest.mark.parametrize("killed", [(0, 1), (0,)], ids=["all", "the one with the store"])
def test_a_step_in_memory_outlives_killed_trainers(killed: tuple[int, ...], memory: str, orders: Orders) -> None:
    with Job(2, [memory, orders.url]) as job:
        orders.hold("create")
        job.ask("save", 1, "eager", False)
        until(lambda: orders.has_reached("create"), "the copy to the disk")
        job.kill(*killed)
        orders.let_go("create")
        if len(killed) == 1:
            assert job.ask("result", ranks=[1]) == [1]
            assert job.ask("in", orders.url, ranks=[1]) == [1]
            job.kill(1)
        until_no_writer(orders)
    check_loads(orders.path, 1)
