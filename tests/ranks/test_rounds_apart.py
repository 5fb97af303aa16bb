"""Ranks that are not in step with each other: one far ahead, one far behind, one that has failed already."""

import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import ObjectNotFoundError, RankFailedError, SaveCancelledError
from aiockpt.ranks.rounds import RoundNotes
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.ranks.crew import QUICK, Crew, coordinator_of
from tests.ranks.test_save import parameter
from tests.watch import until


def state_at(value: float) -> dict[str, Any]:
    """Return a state that every rank has alike."""
    return {f"w{index}": torch.full((300, 33), float(value + index)) for index in range(3)}


class SlowOn(FaultyBackend):
    """A backend whose uploads of one step take their time."""

    def __init__(self, root: Path, match: str, seconds: float) -> None:
        super().__init__(LocalBackend(str(root), world=World()))
        self._match, self._seconds = match, seconds

    async def create(self, key: str, size: int) -> Any:
        if self._match in key:
            await anyio.sleep(self._seconds)
        return await super().create(key, size)


def test_a_slow_rank_learns_of_steps_long_past(tmp_path: Path) -> None:
    def save_all(rank: int, ckpt: aiockpt.Checkpointer) -> list[bool]:
        return [ckpt.save(step, state_at(step)).result().existed for step in range(1, 6)]

    far_ahead = threading.Event()

    def save_again(rank: int, ckpt: aiockpt.Checkpointer) -> list[bool]:
        assert rank == 0 or far_ahead.wait(250)
        existed = save_all(rank, ckpt)
        far_ahead.set()
        return existed

    with Crew(2, tmp_path, on_exists="skip", deadlines=QUICK) as crew:
        assert crew.on_all(save_all) == [[False] * 5] * 2
        assert crew.on_all(save_again) == [[True] * 5] * 2


def test_a_rank_still_writing_an_old_step_is_not_forgotten(tmp_path: Path) -> None:
    def backend(rank: int) -> Any:
        return SlowOn(tmp_path, "step-00000002/", 2) if rank == 1 else LocalBackend(str(tmp_path), world=World())

    def save_all(rank: int, ckpt: aiockpt.Checkpointer) -> list[int]:
        ckpt.save(1, state_at(1)).result()
        slow = ckpt.save(2, state_at(2))
        return [ckpt.save(step, state_at(step)).result().step for step in (3, 4, 5)] + [slow.result().step]

    with Crew(2, backend, deadlines=QUICK) as crew:
        assert crew.on_all(save_all) == [[3, 4, 5, 2]] * 2


def test_the_save_after_an_unheard_failure_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Fault(do="fail", verb="upload.finish", match="step-00000002/*", times=None)

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(tmp_path), world=World())
        return FaultyBackend(inner, [fail]) if rank == 1 else inner

    def save_all(rank: int, ckpt: aiockpt.Checkpointer) -> int:
        state = {"w": parameter(torch.zeros(2500, 1024))}  # more than a block: cut by rows
        ckpt.save(1, state).result()
        second = ckpt.save(2, state)
        if rank == 1:
            assert second.exception() is not None
        return ckpt.save(3, state).result().step

    with Crew(2, backend, deadlines=QUICK, on_error=lambda future: None) as crew:
        rounds = coordinator_of(crew.checkpointers[0]).rounds
        post_failure = RoundNotes.post_failure

        async def post_late(save_round: RoundNotes, error: BaseException) -> bool:
            await anyio.sleep(0.5 if save_round.rounds is rounds else 0.0)
            return await post_failure(save_round, error)

        monkeypatch.setattr(RoundNotes, "post_failure", post_late)
        assert crew.on_all(save_all) == [3, 3]


def test_a_manifest_gone_for_one_rank_is_left(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step)).result()

    class Blind(FaultyBackend):
        async def get(self, key: str, max_bytes: int) -> bytes:
            if "step-00000002/" in key:
                raise ObjectNotFoundError("deleted meanwhile", key=key)
            return await super().get(key, max_bytes)

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(tmp_path), world=World())
        return Blind(inner) if rank == 1 else inner

    with Crew(2, backend, deadlines=QUICK) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(state_at(0)).result())
    assert [result.step for result in results if result] == [1, 1]


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_load_cancelled_on_one_rank_ends_on_all(tmp_path: Path, cancelled: int) -> None:
    with aiockpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1)).result()
    hanging = FaultyBackend(
        LocalBackend(str(tmp_path), world=World()), [Fault(do="hang", verb="reader.read", times=None)]
    )

    def backend(rank: int) -> Any:
        return hanging if rank == cancelled else LocalBackend(str(tmp_path), world=World())

    def load(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        future = ckpt.load(state_at(0))
        if rank == cancelled:
            until(lambda: hanging.schedule.fired, "a read that hangs")
            future.cancel()
        future.result()

    with Crew(3, backend, deadlines=QUICK) as crew:
        errors = crew.errors(load)
        told = [error for rank, error in enumerate(errors) if rank != cancelled]
        assert told
        assert all(isinstance(error, RankFailedError) for error in told), errors


async def test_saves_started_in_a_loop_are_planned_in_turn(tmp_path: Path) -> None:
    import asyncio

    with_delay = [0.0, 0.3]

    async def train(crew: Crew, rank: int) -> list[int]:
        futures = []
        for step in (1, 2):
            futures.append(crew.checkpointers[rank].save(step, state_at(step)))
            await asyncio.sleep(with_delay[rank])
        return [(await future).step for future in futures]

    with Crew(2, tmp_path, deadlines=QUICK) as crew:
        assert list(await asyncio.gather(train(crew, 0), train(crew, 1))) == [[1, 2]] * 2
        for checkpointer in crew.checkpointers:
            await checkpointer.aclose()


def test_a_store_that_is_gone_after_the_commit_fails_no_save(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=aiockpt.Deadlines(ranks_s=20, commit_s=10, takeover_s=0.3, close_s=60)) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, state_at(1)).result())
        coordinator = coordinator_of(crew.checkpointers[1])
        store = coordinator.board._store
        gone: list[str] = []

        class Dying:
            def __getattr__(self, verb: str) -> Any:
                if gone:
                    raise RuntimeError("Connection reset by peer")
                return getattr(store, verb)

            def add(self, key: str, amount: int) -> int:
                result = store.add(key, amount)
                if key.endswith("votes"):
                    gone.append(key)
                return result

        dying: Any = Dying()
        coordinator.board._store = dying
        assert crew.on_all(lambda rank, ckpt: ckpt.save(2, state_at(2)).result().step) == [2, 2]


class ForgetsToLeave:
    """The store of a rank whose word that it has left one turn or load is lost on the way."""

    def __init__(self, store: Any, lost: str) -> None:
        self._store, self._lost = store, lost

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    def add(self, key: str, amount: int) -> int:
        if key.endswith(self._lost):
            raise RuntimeError("Connection reset by peer")
        return int(self._store.add(key, amount))


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_turn_never_left_keeps_no_later_notes(tmp_path: Path, what: str) -> None:
    def work(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        if what == "save":
            step = next(steps[rank])
            ckpt.save(step, state_at(step)).result()
        else:
            ckpt.load(state_at(0)).result()

    with aiockpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1)).result()
    steps = [count(1), count(1)]
    with Crew(2, tmp_path, deadlines=QUICK) as crew:
        coordinator = coordinator_of(crew.checkpointers[1])
        store: Any = ForgetsToLeave(coordinator.board._store, "save/1/1/past" if what == "save" else "load/1/past")
        coordinator.board._store = store
        held = []
        for _ in range(24):
            crew.on_all(work)
            held.append(store.num_keys())
    assert min(held[12:]) < max(held[:8]) + 6, held  # the least: those of the last one may still be removed


def test_a_rank_cancelled_after_the_commit_was_decided_alarms_nobody(tmp_path: Path) -> None:
    holding = Gate(LocalBackend(str(tmp_path), world=World()), "put_new", "*MANIFEST*")

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> str:
        future = ckpt.save(1, state_at(1))
        if rank == 1:
            assert holding.reached.wait(250)  # the commit is decided, and the manifest waits to be written
            future.cancel()
            assert isinstance(future.exception(), SaveCancelledError)
            holding.open_up()
            return "cancelled"
        return future.result().id

    with Crew(3, lambda rank: LocalBackend(str(tmp_path)) if rank else holding, deadlines=QUICK) as crew:
        assert crew.on_all(save) == ["step-00000001", "cancelled", "step-00000001"]


def test_a_save_after_a_warm_up_plans_nothing_again(tmp_path: Path) -> None:
    with Crew(3, tmp_path, deadlines=QUICK) as crew:
        posted = crew.record_notes()

        def begin(rank: int, ckpt: aiockpt.Checkpointer) -> int:
            ckpt.warm_up(state_at(1))
            time.sleep(0.1 * rank)
            return ckpt.save(1, state_at(1)).result().step

        assert crew.on_all(begin) == [1, 1, 1]
    assert {key for key in posted if "holdings" in key} == {f"warm_up/1/holdings/{rank}" for rank in range(3)}
