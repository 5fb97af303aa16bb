"""One rank that does not do what the others do, in every way there is: who is told what, how soon, and what goes on after.

Ranks are threads here; what only processes do (being killed) is in `tests.ranks.test_killed`.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.ranks import membership
from aiockpt.runtime.world import OsClock, World
from tests.ranks.crew import PATIENT, Crew, coordinator_of
from tests.ranks.test_save import Gone, equal, loaded, replicated
from tests.small_run import steps
from tests.watch import Lines, until

HURRIED = aiockpt.Deadlines(ranks_s=1, commit_s=1, takeover_s=0.3, close_s=60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have warnings come after moments instead of ten seconds."""
    monkeypatch.setattr(membership, "WARN_AFTER_S", 0.4)
    monkeypatch.setattr(membership, "POLL_S", 0.1)


def save(crew: Crew, step: int, *ranks: int) -> dict[int, BaseException | None]:
    """Have *ranks* save *step*, all for none; return what each got."""
    chosen = ranks or range(crew.world_size)

    def work(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        if rank in chosen:
            ckpt.save(step, replicated(step)).result()

    return {rank: error for rank, error in enumerate(crew.errors(work)) if rank in chosen}


# ------------------------------------------------------------------ it does not come


@pytest.mark.parametrize("planned", [False, True], ids=["the first save", "a later one"])
def test_if_only_rank_0_saves_it_is_told(tmp_path: Path, impatient: None, planned: bool) -> None:
    with Crew(3, tmp_path, deadlines=HURRIED, on_error=lambda _: None) as crew, Lines(logging.WARNING) as warnings:
        if planned:
            assert not any(save(crew, 1).values())
            crew.hurry(commit_s=4)
        error = save(crew, 2, 0)[0]
    assert isinstance(error, aiockpt.CommitTimeoutError if planned else aiockpt.RankTimeoutError)
    assert "ranks 1, 2" in str(error)
    (said,) = [said for said in warnings.said if "the save of step 2 has waited" in said]
    assert "for ranks 1, 2" in said
    called = "called the save of step 1 last" if planned else "called neither save, load nor warm_up so far"
    assert f"ranks 1, 2 {called}" in said
    assert "Every rank must make the same calls" in said


@pytest.mark.parametrize("forgetful", [0, 1])
@pytest.mark.parametrize("planned", [False, True], ids=["the first save", "a later one"])
def test_a_save_that_one_rank_forgets_is_lost_alone(
    tmp_path: Path, impatient: None, planned: bool, forgetful: int
) -> None:
    """The one that forgot is at the next step long before the others have given this one up."""
    others = {0, 1, 2} - {forgetful}
    with Crew(3, tmp_path, deadlines=PATIENT, on_error=lambda _: None) as crew:
        if planned:
            assert not any(save(crew, 1).values())

        def train(rank: int, ckpt: aiockpt.Checkpointer) -> BaseException | None:
            lost = None if rank == forgetful else ckpt.save(10, replicated(10)).exception()
            ckpt.save(20, replicated(20)).result()
            ckpt.save(30, replicated(30)).result()
            return lost

        outcomes = crew.on_all(train)
        for rank in others:
            assert isinstance(outcomes[rank], aiockpt.RanksDisagreeError | aiockpt.RankFailedError)
            assert f"rank {forgetful} called the save of step 20 without it" in str(outcomes[rank])
            assert outcomes[rank].ranks == (forgetful,)  # type: ignore[union-attr]
    assert steps(tmp_path) == [30, 20, 1] if planned else [30, 20]
    for step in (20, 30):
        assert equal(loaded(tmp_path, replicated(step), step), replicated(step))


def test_who_comes_late_is_told_at_once(tmp_path: Path) -> None:
    with Crew(3, tmp_path, deadlines=HURRIED, on_error=lambda _: None) as crew:
        early = save(crew, 5, 0, 2)
        assert all(isinstance(error, aiockpt.RankTimeoutError | aiockpt.RankFailedError) for error in early.values())
        crew.hurry(commit_s=100)
        late = save(crew, 5, 1)[1]
        assert isinstance(late, aiockpt.RankFailedError)
        assert "step 5 was given up" in str(late)
        assert "rank 1" in str(late)  # by whom the others had waited for
        assert not any(save(crew, 5).values())  # all once more: that is another save
        assert not any(save(crew, 6).values())
    assert steps(tmp_path) == [6, 5]


def test_a_step_saved_again_after_going_back_is_another_save(tmp_path: Path) -> None:
    with Crew(2, tmp_path) as crew:
        for step in (1, 2, 3):
            assert not any(save(crew, step).values())
        crew.on_all(lambda rank, ckpt: ckpt.load(replicated(0), 1).result())
        for step in (2, 3):
            assert not any(save(crew, step).values())
    assert (tmp_path / "step-00000002/MANIFEST-2.json").exists()


# ------------------------------------------------------------------ nothing is raised for others


@pytest.mark.parametrize("on_error", ["warn", lambda future: None], ids=["warn", "a callable"])
def test_a_save_raises_nothing_of_others_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    monkeypatch.setattr("aiockpt.ranks.coordinator.PLAN_IN_CALL_S", 0.5)
    with Crew(2, tmp_path, deadlines=PATIENT, on_error=on_error) as crew, Lines(logging.WARNING) as warnings:
        future = crew.checkpointers[0].save(1, replicated(1))
        error = future.exception()
        assert isinstance(error, aiockpt.RankTimeoutError)
        assert error.ranks == (1,)
        assert "within 0.5 s" in str(error)
        told = any("the save of step 1 failed: RankTimeoutError" in said for said in warnings.said)
        assert told == callable(on_error)  # else the warning of the next call tells, unless the error was received
        for ckpt in crew.checkpointers:  # tell the test of nothing
            ckpt._engine.failures.pop()


def test_by_default_the_same_is_raised_by_the_call(tmp_path: Path) -> None:
    with (
        Crew(2, tmp_path, deadlines=HURRIED) as crew,
        pytest.raises(aiockpt.RankTimeoutError, match="nothing from rank 1"),
    ):
        crew.checkpointers[0].save(1, replicated(1))


def test_a_storage_that_is_away_is_no_error_of_the_call(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(Gone(LocalBackend(str(tmp_path)), "*"), on_error=lambda _: None) as ckpt:
        assert isinstance(ckpt.save(1, replicated(1)).exception(), aiockpt.StorageError)


def test_a_store_that_is_gone_fails_no_call(tmp_path: Path) -> None:
    class Lost:
        def __getattr__(self, verb: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    ranks = aiockpt.Ranks(1, 2, Lost())
    with aiockpt.Checkpointer(tmp_path, ranks=ranks, on_error=lambda _: None) as ckpt:
        assert isinstance(ckpt.save(1, replicated(1)).exception(), aiockpt.RankFailedError)
        with pytest.raises(aiockpt.UsageError):  # what the caller did is
            ckpt.save(-1, replicated(1))


# ------------------------------------------------------------------ it leaves


def leave_by_exception(ckpt: aiockpt.Checkpointer) -> None:
    with pytest.raises(ValueError, match="boom"), ckpt:
        raise ValueError("boom")


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("planned", [False, True], ids=["the first save", "a later one"])
def test_a_rank_that_leaves_by_an_exception_is_named(tmp_path: Path, planned: bool, leaver: int) -> None:
    left, entered = threading.Event(), threading.Barrier(3, timeout=250)

    def work(rank: int, ckpt: aiockpt.Checkpointer) -> BaseException | None:
        until(lambda: coordinator_of(ckpt).board.entered, f"rank {rank}")
        entered.wait()
        if rank != leaver:
            assert left.wait(250)
            return ckpt.save(2, replicated(2)).exception()
        leave_by_exception(ckpt)
        left.set()
        return None

    with Crew(3, tmp_path, deadlines=PATIENT, on_error=lambda _: None) as crew:
        if planned:
            assert not any(save(crew, 1).values())
        outcomes = crew.on_all(work)
    for rank in {0, 1, 2} - {leaver}:
        error = outcomes[rank]
        assert isinstance(error, aiockpt.RankFailedError)
        assert error.ranks == (leaver,), error
        assert f"rank {leaver} has left: ValueError: boom" in str(error)


def test_what_a_leaving_rank_had_begun_is_committed(tmp_path: Path) -> None:
    def work(rank: int, ckpt: aiockpt.Checkpointer) -> int:
        if rank != 1:
            return ckpt.save(2, replicated(2)).result().step
        future = ckpt.save(2, replicated(2))
        leave_by_exception(ckpt)
        return future.result(0).step

    with Crew(3, tmp_path, deadlines=PATIENT) as crew:
        assert not any(save(crew, 1).values())
        assert crew.on_all(work) == [2, 2, 2]


async def test_an_async_block_tells_the_others_too(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=PATIENT, on_error=lambda _: None) as crew:
        one, other = crew.checkpointers
        await anyio.to_thread.run_sync(lambda: save(crew, 1))
        with pytest.raises(ValueError, match="boom"):
            async with other:
                raise ValueError("boom")
        with pytest.raises(aiockpt.RankFailedError, match="rank 1 has left: ValueError: boom"):
            await one.save(2, replicated(2))
        one._engine.failures.pop()
        await one.aclose()


def test_a_rank_that_closed_without_this_save_is_named_at_once(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=PATIENT, on_error=lambda _: None) as crew:
        assert not any(save(crew, 1).values())
        crew.checkpointers[1].close()
        error = save(crew, 2, 0)[0]
        assert isinstance(error, aiockpt.RankFailedError)
        assert "rank 1 has left: its Checkpointer was closed" in str(error)


def test_a_load_without_a_rank_ends_at_once(tmp_path: Path) -> None:
    with Crew(3, tmp_path, deadlines=PATIENT) as crew:
        assert not any(save(crew, 1).values())
        crew.checkpointers[2].close()
        errors = crew.errors(lambda rank, ckpt: None if rank == 2 else ckpt.load(replicated(0)).result())
        for error in errors[:2]:
            assert isinstance(error, aiockpt.RankFailedError)
            assert error.ranks == (2,)
            assert "rank 2 has left" in str(error)


# ------------------------------------------------------------------ it means something else


@pytest.mark.parametrize("asked", [(1, 2, 1), (2, None, None), (1, 1, None)])
def test_ranks_that_load_different_steps_are_told(tmp_path: Path, asked: tuple[int | None, ...]) -> None:
    with Crew(3, tmp_path) as crew:
        for step in (1, 2):
            assert not any(save(crew, step).values())
        states = [replicated(0) for _ in range(3)]
        errors = crew.errors(lambda rank, ckpt: ckpt.load(states[rank], asked[rank]).result())
        assert all(isinstance(error, aiockpt.RanksDisagreeError) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        for rank, wanted in enumerate(asked):
            alike = [str(other) for other, theirs in enumerate(asked) if theirs == wanted]
            named = f"rank{'s' if len(alike) > 1 else ''} {', '.join(alike)}"
            assert f"load(state, {wanted}) on {named}" in str(errors[0]), rank
        assert all(equal(state, replicated(0)) for state in states)
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], 2).result())
        assert all(equal(state, replicated(2)) for state in states)


def test_a_rank_that_loads_less_strictly_is_named(tmp_path: Path) -> None:
    with Crew(2, tmp_path) as crew:
        assert not any(save(crew, 1).values())
        errors = crew.errors(lambda rank, ckpt: ckpt.load(replicated(0), strict=not rank).result())
        assert all("load(state, None, strict=False) on rank 1" in str(error) for error in errors)


def test_a_skew_of_loads_is_told_with_both_counts(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=HURRIED) as crew:
        assert not any(save(crew, 1).values())
        for _ in range(2):
            crew.on_all(lambda rank, ckpt: ckpt.load(replicated(0)).result())
        errors = crew.errors(lambda rank, ckpt: None if rank else ckpt.load(replicated(0)).result())
        assert isinstance(errors[0], aiockpt.RankTimeoutError)
        assert "load() (every rank must call it): nothing from rank 1" in str(errors[0])
        assert "load() number 2 last, load() 2 times" in str(errors[0])


def test_a_skew_of_warm_ups_is_told(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=HURRIED, on_error="warn") as crew:
        with pytest.raises(
            aiockpt.RankTimeoutError, match=r"warm_up\(\) number 1 \(every rank must call it\): nothing from rank 1"
        ):
            crew.checkpointers[0].warm_up(replicated(0)).result()
        crew.hurry(commit_s=30)
        assert not any(save(crew, 1).values())


Options = dict[str, Any]
OTHERS: dict[str, tuple[str, Callable[[Path], Options], Callable[[Path], Options]]] = {
    "on_exists": (
        "on_exists is 'new_generation' on rank 0 and 'skip' on rank 1",
        lambda place: {},
        lambda place: {"on_exists": "skip"},
    ),
    "every": (
        "the list of tiers is every=None, content='full' on rank 0 and every=2, content='full' on rank 1",
        lambda place: {"url": [aiockpt.Tier(place)]},
        lambda place: {"url": [aiockpt.Tier(place, every=2)]},
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_options_that_differ_by_rank_are_named(tmp_path: Path, what: str) -> None:
    message, mine, theirs = OTHERS[what]
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def errors_of(*options: Any) -> list[BaseException | None]:
        with Crew(2, tmp_path) as crew:
            for ckpt in crew.checkpointers:
                ckpt.close()
            crew.checkpointers = [
                aiockpt.Checkpointer(
                    **dict[str, Any](url=tmp_path, limits=aiockpt.Limits(deadlines=PATIENT)) | given,
                    ranks=aiockpt.Ranks(rank, 2, store),
                    on_error="warn",
                )
                for rank, given in enumerate(options)
            ]
            errors = list(save(crew, 2).values())
            for ckpt in crew.checkpointers:
                ckpt._engine.failures.pop()
            return errors

    found = errors_of(mine(tmp_path), theirs(tmp_path))
    assert all(isinstance(error, aiockpt.RankError) for error in found)
    assert any(isinstance(error, aiockpt.RanksDisagreeError) and message in str(error) for error in found), found
    assert errors_of(mine(tmp_path), mine(tmp_path)) == [None, None]


def test_a_rank_that_saves_to_another_place_is_named_with_it(tmp_path: Path, impatient: None) -> None:
    def place(rank: int) -> Any:
        return tmp_path / f"rank-{rank}"

    with Crew(2, place, deadlines=HURRIED, on_error=lambda _: None) as crew, Lines(logging.WARNING) as warnings:
        errors = save(crew, 1)
    assert all(isinstance(error, aiockpt.RankTimeoutError) for error in errors.values())
    assert any(
        f"rank 1 saved to file://{tmp_path}/rank-1, not to file://{tmp_path}/rank-0" in said for said in warnings.said
    )


def test_a_rank_of_another_structure_is_told_which_tensor(tmp_path: Path) -> None:
    with Crew(2, tmp_path, on_error=lambda _: None) as crew:
        state = [replicated(1), {**replicated(1), "w0": torch.zeros(3, 3)}]
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, state[rank]).result())
        assert all("w0: F32 [3, 3] on rank 1, F32 [700, 33] on rank 0" in str(error) for error in errors)
        assert not any(save(crew, 2).values())


# ------------------------------------------------------------------ its clock


class Skewed(OsClock):
    def __init__(self, years: int) -> None:
        self._ns = years * 365 * 86400 * 10**9

    def time_ns(self) -> int:
        return OsClock.time_ns() + self._ns


def test_clocks_that_differ_by_years_change_nothing(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with Crew(3, tmp_path) as crew:
        for ckpt in crew.checkpointers:
            ckpt.close()
        keep = aiockpt.Retention(last=2)
        crew.checkpointers = [
            aiockpt.Checkpointer(
                tmp_path, ranks=aiockpt.Ranks(rank, 3, store), world=World(clock=Skewed(years)), retention=keep
            )
            for rank, years in enumerate((-30, 0, 30))
        ]
        for step in (1, 2, 3):
            assert not any(save(crew, step).values())
        assert not any(crew.errors(lambda rank, ckpt: ckpt.load(replicated(0)).result()))
    until(lambda: steps(tmp_path) == [3, 2], "retention")
