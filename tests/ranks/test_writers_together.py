"""Ranks that each save through a writer process of their own: together, as threads do."""

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import aiockpt
from tests.ranks import test_lazy_together, test_save
from tests.ranks.crew import PATIENT, QUICK, Crew
from tests.ranks.test_save import equal, loaded, replicated
from tests.watch import until
from tests.worker.test_worker_killed import orders as orders
from tests.worker.test_worker_killed import process_of, steps_of
from tests.worker.worker_places import Orders

# ------------------------------------------------------------------ tests of threads, told once more

SHARED_TESTS: list[Callable[..., Any]] = [
    test_save.test_a_changed_structure_is_planned_on_its_rank_alone,
    test_save.test_several_saves_run_at_once_on_all_ranks,
    test_save.test_warm_up_plans_for_all_ranks,
    test_save.test_no_note_is_left_behind_for_ever,
    test_lazy_together.test_a_save_every_step_holds_the_weights_of_its_step,
    test_lazy_together.test_a_rank_that_skips_lets_the_optimizers_of_the_others_go,
]


@pytest.mark.parametrize("test", SHARED_TESTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_it_is_the_same_with_writer_processes(
    test: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiockpt, "Checkpointer", partial(aiockpt.Checkpointer, worker="process"))
    given: dict[str, Any] = {"tmp_path": tmp_path, "io": {}}
    test(**{name: given[name] for name in test.__code__.co_varnames[: test.__code__.co_argcount]})


def save_on_all(crew: Crew, step: int) -> None:
    crew.on_all(lambda rank, ckpt: ckpt.save(step, replicated(step)).result())


def test_writers_and_threads_save_together(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with Crew(3, tmp_path, worker="process") as crew:
        crew.checkpointers[1]._parts.shutdown.close()
        for rank, worker in ((0, "process"), (1, "thread"), (2, "process")):
            if rank != 1:
                crew.checkpointers[rank]._parts.shutdown.close()
            crew.checkpointers[rank] = aiockpt.Checkpointer(
                tmp_path,
                ranks=aiockpt.Ranks(rank, 3, store),
                limits=aiockpt.Limits(deadlines=QUICK),
                worker=worker,  # type: ignore[arg-type]
            )
        for step in (1, 2):
            save_on_all(crew, step)
    for step in (1, 2):
        assert equal(loaded(tmp_path, replicated(step), step), replicated(step))


def test_one_rank_cleans_up_after_a_save(orders: Orders, capfd: pytest.CaptureFixture[str]) -> None:
    orders.fail("put", errno.ENOSPC, "LATEST")  # the rank that cleans up says so, and goes on without the hint
    with Crew(3, orders.url, worker="process") as crew:
        save_on_all(crew, 1)
    assert capfd.readouterr().err.count("LATEST in ") == 1


# ------------------------------------------------------------------ one rank fails


def test_a_write_that_fails_is_told_at_once(orders: Orders) -> None:
    with Crew(3, orders.url, worker="process", deadlines=PATIENT, on_error=lambda future: None) as crew:
        save_on_all(crew, 1)
        orders.fail("create", errno.ENOSPC, "r00001")
        errors = crew.errors(lambda rank, ckpt: ckpt.save(2, replicated(2)).result())
        assert isinstance(errors[1], aiockpt.StorageFullError)
        for rank in (0, 2):
            assert isinstance(errors[rank], aiockpt.RankFailedError)
            assert "rank 1 failed: StorageFullError" in str(errors[rank])
        orders.fail("create", None)
        posted = crew.record_notes()
        save_on_all(crew, 3)
        assert len([key for key in posted if "holdings" in key]) == 3  # planned anew, whatever made it fail
    assert steps_of(orders) == [3, 1]
    assert not list(orders.path.glob("step-00000002/a-*/d/*"))
    assert equal(loaded(orders.path, replicated(3)), replicated(3))


def test_a_save_that_one_rank_cancels_ends_on_all(orders: Orders) -> None:
    with Crew(2, orders.url, worker="process", on_error=lambda future: None) as crew:
        save_on_all(crew, 1)
        orders.has_reached("create")
        orders.hold("create")

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            future = ckpt.save(2, replicated(2))
            if rank == 1:
                until(lambda: orders.has_reached("create"), "the first data file")
                future.cancel()
            future.result()

        errors = crew.errors(save)
        assert isinstance(errors[1], aiockpt.SaveCancelledError)
        assert isinstance(errors[0], aiockpt.RankFailedError)
        assert "rank 1 failed: SaveCancelledError" in str(errors[0])
        orders.let_go("create")
        save_on_all(crew, 3)
        assert [ckpt.statistics().pool.used_slabs for ckpt in crew.checkpointers] == [0, 0]
    assert steps_of(orders) == [3, 1]


# ------------------------------------------------------------------ a writer dies


@pytest.mark.parametrize(
    ("dead", "part"), [(0, "/d/"), (1, "/r/")], ids=["rank 0's, before it has written", "another's, when it votes"]
)
def test_a_writer_that_dies_fails_the_save_on_all(dead: int, part: str, orders: Orders) -> None:
    verb = "create" if part == "/d/" else "put_new"
    with Crew(2, orders.url, worker="process", deadlines=PATIENT, on_error=lambda future: None) as crew:
        save_on_all(crew, 1)
        orders.has_reached(verb)
        orders.hold(verb, f"r{dead:05d}")

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            future = ckpt.save(2, replicated(2))
            if rank == dead:
                until(lambda: list(orders.path.glob(f"step-00000002/a-*{part}")), "what the writer does first")
                until(lambda: orders.has_reached(verb), verb)
                os.kill(process_of(ckpt).pid, signal.SIGKILL)
                orders.let_go(verb)
            future.result()

        errors = crew.errors(save)
        assert isinstance(errors[dead], aiockpt.WriterLostError)
        assert isinstance(errors[1 - dead], aiockpt.RankFailedError)
        assert f"rank {dead} failed: WriterLostError" in str(errors[1 - dead])
        save_on_all(crew, 3)
        assert [ckpt.statistics().pool.used_slabs for ckpt in crew.checkpointers] == [0, 0]
    assert steps_of(orders) == [3, 1]
    assert equal(loaded(orders.path, replicated(3)), replicated(3))


def test_nobody_waits_for_copies_of_a_dead_writer(orders: Orders, tmp_path: Path) -> None:
    tiers = [tmp_path / "near", orders.url]
    with Crew(2, lambda rank: tiers, worker="process", on_error=lambda future: None) as crew:
        orders.hold("create", "r00000")

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> BaseException | None:
            future = ckpt.save(1, replicated(1))
            future.result()
            if rank == 0:
                until(lambda: orders.has_reached("create"), "the copy")
                os.kill(process_of(ckpt).pid, signal.SIGKILL)
            return future.committed(orders.url).exception()

        errors = crew.on_all(save)
        assert isinstance(errors[0], aiockpt.WriterLostError)
        assert "gave step 1 up" in str(errors[1])
        orders.let_go("create")
        crew.on_all(lambda rank, ckpt: ckpt.save(2, replicated(2)).committed(orders.url).result())
    assert steps_of(orders) == [2, 1]  # the next writer has made up for the one that died
