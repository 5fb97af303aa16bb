"""Many ranks save one step: written once, evenly, whole or not there; whoever fails is named to all."""

import errno
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import RankFailedError, RankTimeoutError, StepExistsError, UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.ranks.crew import PATIENT, QUICK, SMALL, Crew, coordinator_of
from tests.small_run import steps
from tests.watch import until


def replicated(value: float, tensors: int = 5, rows: int = 700) -> dict[str, Any]:
    """Return a state that every rank has alike, as under DDP."""
    state: dict[str, Any] = {
        f"w{index}": parameter(torch.full((rows, 33), float(value + index))) for index in range(tensors)
    }
    return {**state, "bias": parameter(torch.arange(7) + int(value)), "note": f"at {value}"}


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return what ranks have alike by nature, so that any of them may write it."""
    return torch.nn.Parameter(tensor, requires_grad=False)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in other
    )


def loaded(url: Any, like: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Load on a single process, into fresh memory."""
    state = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in like.items()}
    with aiockpt.Checkpointer(url) as checkpointer:
        assert checkpointer.load(state, step).result() is not None
    return state


def test_what_all_ranks_hold_is_written_once_and_evenly(tmp_path: Path) -> None:
    with Crew(3, tmp_path) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    assert {result.step for result in results} == {1}
    written = [result.bytes for result in results]
    whole = sum(value.nbytes for value in replicated(1).values() if isinstance(value, torch.Tensor))
    assert whole <= sum(written) < whole + 3 * 3 * 4096
    assert max(written) - min(written) <= 33 * 4 * 700 + 2 * 4096  # one tensor: smaller than a block, it is not cut
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_a_later_save_of_the_same_structure_exchanges_nothing(tmp_path: Path) -> None:
    with Crew(3, tmp_path) as crew:
        posted = crew.record_notes()
        for step in (1, 2, 3):
            crew.on_all(lambda rank, ckpt, step=step: ckpt.save(step, replicated(step)).result())  # type: ignore[misc]
    exchanged = [key for key in posted if "holdings" in key or "share" in key]
    assert exchanged
    assert all(key.startswith("save/1/") for key in exchanged)
    for step in (1, 2, 3):
        assert equal(loaded(tmp_path, replicated(step), step), replicated(step))


def test_ranks_with_parts_of_their_own_are_saved_side_by_side(tmp_path: Path) -> None:
    def stage(rank: int) -> dict[str, Any]:
        return {f"layer{rank}": torch.full((50, 3), float(rank)), "common": torch.arange(9), "step": 4}

    with Crew(4, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(4, stage(rank)).result())
    whole = {**stage(0), **stage(1), **stage(2), **stage(3)}
    assert equal(loaded(tmp_path, whole), whole)


def test_a_structure_that_changed_on_all_ranks_is_planned_anew(tmp_path: Path) -> None:
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1, tensors=2)).result())
        results = crew.on_all(lambda rank, ckpt: ckpt.save(2, replicated(2, tensors=7)).result())
    assert abs(results[0].bytes - results[1].bytes) <= 33 * 4 * 700 + 2 * 4096
    assert equal(loaded(tmp_path, replicated(2, tensors=7)), replicated(2, tensors=7))


def test_a_changed_structure_is_planned_on_its_rank_alone(tmp_path: Path) -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        grown = {"moment": torch.full((40, 2), float(step))} if rank == 1 and step > 1 else {}
        return {**replicated(step), **grown}

    with Crew(3, tmp_path) as crew:
        for step in (1, 2, 3):
            crew.on_all(lambda rank, ckpt, step=step: ckpt.save(step, state(rank, step)).result())  # type: ignore[misc]
    for step in (2, 3):
        assert equal(loaded(tmp_path, state(1, step), step), state(1, step))


def failing_on(rank_that_fails: int, root: Path, *faults: Fault) -> Any:
    """Return the backend of each rank: that of one of them fails."""

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(root), world=World())
        return FaultyBackend(inner, list(faults)) if rank == rank_that_fails else inner

    return backend


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_fails_fails_its_step_alone(tmp_path: Path, broken: int) -> None:
    fault = Fault(do="fail", verb="upload.write", match="step-00000002/*", error=errno.ENOSPC)
    with Crew(3, failing_on(broken, tmp_path, fault), on_error=lambda future: None) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        errors = crew.errors(lambda rank, ckpt: ckpt.save(2, replicated(2)).result())
        assert isinstance(errors[broken], aiockpt.StorageError)
        for rank in {0, 1, 2} - {broken}:
            assert isinstance(errors[rank], RankFailedError)
            assert f"rank {broken}" in str(errors[rank])
        crew.on_all(lambda rank, ckpt: ckpt.save(3, replicated(3)).result())
    assert steps(tmp_path) == [3, 1]
    assert equal(loaded(tmp_path, replicated(1), 1), replicated(1))
    assert not list(tmp_path.glob("step-00000002/*/d/*.safetensors"))
    assert list(tmp_path.glob(f"step-00000002/*/r/r{broken:05d}.fail.json"))


def test_a_rank_with_an_unsavable_state_tells_all(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {**replicated(1), "odd": object()} if rank == 2 else replicated(1)

    with Crew(3, tmp_path, on_error=lambda future: None) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        errors = crew.errors(lambda rank, ckpt: ckpt.save(2, state(rank)).result())
    assert isinstance(errors[2], aiockpt.UnsupportedStateError)
    assert all("rank 2" in str(error) and "odd" in str(error) for error in errors[:2])
    assert steps(tmp_path) == [1]


def test_the_first_save_is_given_up_at_once_too(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {**replicated(1), "odd": object()} if rank == 1 else replicated(1)

    with Crew(3, tmp_path, deadlines=PATIENT, on_error=lambda future: None) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, state(rank)).result())
        assert all(isinstance(errors[rank], RankFailedError) and "odd" in str(errors[rank]) for rank in (0, 2))
        crew.on_all(lambda rank, ckpt: ckpt.save(2, replicated(2)).result())
    assert steps(tmp_path) == [2]


class Gone(FaultyBackend):
    """A storage that refuses every call about one step."""

    def __init__(self, inner: Backend, match: str) -> None:
        verbs = ("put", "put_new", "get", "stat", "list", "create", "delete", "open")
        super().__init__(inner, [Fault(do="fail", verb=verb, match=match, times=None) for verb in verbs])


def test_a_rank_without_storage_tells_the_others(tmp_path: Path) -> None:
    """Nothing of it can be committed without its vote, so it need not ask the storage who decides."""
    gone = Gone(LocalBackend(str(tmp_path)), "*step-00000002*")
    backends = [LocalBackend(str(tmp_path)), gone, LocalBackend(str(tmp_path))]
    with Crew(3, backends.__getitem__, deadlines=PATIENT, on_error=lambda future: None) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        errors = crew.errors(lambda rank, ckpt: ckpt.save(2, replicated(2)).result())
        assert isinstance(errors[1], aiockpt.StorageError)
        assert all(isinstance(errors[rank], RankFailedError) and "rank 1" in str(errors[rank]) for rank in (0, 2))
    assert steps(tmp_path) == [1]


def test_ranks_that_count_themselves_differently_are_told(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with Crew(2, tmp_path, on_error=lambda future: None) as crew:
        crew.checkpointers[1]._parts.shutdown.close()
        crew.checkpointers = [
            aiockpt.Checkpointer(
                tmp_path, ranks=aiockpt.Ranks(rank, world, store), limits=aiockpt.Limits(deadlines=QUICK)
            )
            for rank, world in ((0, 2), (1, 3))
        ]
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    assert "one of 2" in str(errors[0])
    assert "one of 3" in str(errors[0])
    assert errors[1] is not None


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    quick = aiockpt.Deadlines(ranks_s=1, close_s=60)
    with Crew(3, tmp_path, deadlines=quick, on_error=lambda future: None) as crew:
        errors = crew.errors(lambda rank, ckpt: None if rank == 1 else ckpt.save(1, replicated(1)).result())
        for rank in (0, 2):
            assert isinstance(errors[rank], RankTimeoutError | RankFailedError)
            assert re.search(r"ranks? (0, )?1\b", str(errors[rank]))  # and maybe one that was late, on a busy machine
    assert steps(tmp_path) == []


def test_a_rank_away_from_a_planned_save_is_named(tmp_path: Path) -> None:
    vote_of_rank_0 = Gate(LocalBackend(str(tmp_path)), "put_new", "step-00000002/*/r00000.json")

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        if rank == 1:
            until(lambda: list(tmp_path.glob("step-00000002/a-*/r/r00002.json")), "the vote of rank 2")
            vote_of_rank_0.open_up()  # from which on it waits for the others
        else:
            ckpt.save(2, replicated(2)).result()

    with Crew(3, lambda rank: LocalBackend(str(tmp_path)) if rank else vote_of_rank_0, on_error=lambda _: None) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        crew.hurry(commit_s=0.5, takeover_s=0.2)
        errors = crew.errors(save)
        assert isinstance(errors[0], aiockpt.CommitTimeoutError)
        assert errors[0].missing_ranks == (1,)
        assert isinstance(errors[2], aiockpt.CommitTimeoutError | RankFailedError)
    assert steps(tmp_path) == [1]


def test_values_that_differ_are_named_with_their_ranks(tmp_path: Path) -> None:
    with Crew(2, tmp_path, on_error=lambda future: None) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, {**replicated(1), "seed": rank}).result())
        assert isinstance(errors[0], aiockpt.CheckpointError)
        assert "seed" in str(errors[0])
        assert "seed" in str(errors[1])
    assert steps(tmp_path) == []


def test_values_of_one_rank_stay_with_that_rank(tmp_path: Path) -> None:
    def state(rank: int, value: Any) -> dict[str, Any]:
        return {"w": torch.arange(6), "own": aiockpt.per_rank(value)}

    with Crew(2, tmp_path) as crew:
        crew.on_all(
            lambda rank, ckpt: ckpt.save(1, state(rank, {"at": rank, "buffer": torch.full((3,), rank)})).result()
        )
    targets = [state(rank, None) for rank in range(2)]
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(targets[rank]).result())
    assert [target["own"].value["at"] for target in targets] == [0, 1]
    assert [target["own"].value["buffer"].tolist() for target in targets] == [[0] * 3, [1] * 3]


def test_a_dead_rank_0_is_replaced_when_all_have_voted(tmp_path: Path) -> None:
    hang = Fault(do="hang", verb="put_new", match="*DECISION*", times=None)
    quick = aiockpt.Deadlines(ranks_s=20, commit_s=3, takeover_s=0.3, close_s=60)
    with Crew(3, failing_on(0, tmp_path, hang), deadlines=quick, on_error=lambda future: None) as crew:
        outcomes = crew.start(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        assert [outcome.result().generation for outcome in outcomes[1:]] == [1, 1]
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_a_save_cancelled_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    hang = Fault(do="hang", verb="upload.finish", times=None)

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        future = ckpt.save(1, replicated(1))
        if rank == 1:
            future.cancel()
        future.result()

    with Crew(3, failing_on(1, tmp_path, hang), on_error=lambda future: None) as crew:
        errors = crew.errors(save)
        assert isinstance(errors[1], aiockpt.CheckpointError)
        assert all(isinstance(errors[rank], RankFailedError) for rank in (0, 2))
    assert steps(tmp_path) == []


def test_a_committed_step_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    def save(_: int, ckpt: aiockpt.Checkpointer) -> Any:
        return ckpt.save(1, replicated(1)).result()

    with Crew(3, tmp_path, on_exists="raise") as crew:
        crew.on_all(save)
        errors = crew.errors(save)
        assert [type(error) for error in errors] == [StepExistsError] * 3
        assert all("step 1 is committed already" in str(error) for error in errors)
        crew.on_all(lambda _, ckpt: ckpt.save(2, replicated(2)).result())
    assert steps(tmp_path) == [2, 1]


def test_a_committed_step_is_skipped_on_all_ranks_alike(tmp_path: Path) -> None:
    with Crew(3, tmp_path, on_exists="skip") as crew:
        first = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        again = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(2)).result())
    assert [result.existed for result in first + again] == [False] * 3 + [True] * 3
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_several_saves_run_at_once_on_all_ranks(tmp_path: Path) -> None:
    def save_all(rank: int, ckpt: aiockpt.Checkpointer) -> list[int]:
        futures = [ckpt.save(step, replicated(step)) for step in range(1, 7)]
        return [future.result().step for future in futures]

    with Crew(3, tmp_path, limits=aiockpt.Limits(io=SMALL, deadlines=QUICK, max_in_flight=3)) as crew:
        assert crew.on_all(save_all) == [[1, 2, 3, 4, 5, 6]] * 3
    for step in range(1, 7):
        assert equal(loaded(tmp_path, replicated(step), step), replicated(step))


def test_warm_up_plans_for_all_ranks(tmp_path: Path) -> None:
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.warm_up(replicated(0)).result())
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_a_warm_up_refused_on_one_is_refused_everywhere(tmp_path: Path) -> None:
    with Crew(2, tmp_path) as crew:
        errors = crew.errors(
            lambda rank, ckpt: ckpt.warm_up({**replicated(0), "odd": [object()] if rank else []}).result()
        )
        assert isinstance(errors[1], aiockpt.UnsupportedStateError)
        assert isinstance(errors[0], aiockpt.RankFailedError)
        crew.on_all(lambda rank, ckpt: ckpt.warm_up(replicated(0)).result())


async def test_an_async_trainer_saves_together_too(tmp_path: Path) -> None:
    import asyncio

    with Crew(2, tmp_path) as crew:
        saves = [ckpt.save(1, replicated(1)) for ckpt in crew.checkpointers]
        results = await asyncio.gather(*(asyncio.ensure_future(_await(save)) for save in saves))
        assert [result.step for result in results] == [1, 1]
    assert equal(await asyncio.to_thread(loaded, tmp_path, replicated(1)), replicated(1))


async def _await(save: aiockpt.SaveFuture) -> aiockpt.SaveResult:
    return await save


def test_several_processes_without_a_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        aiockpt.Checkpointer("memory://nobody")
    with pytest.raises(UsageError, match="store"):
        aiockpt.Ranks(0, 2)


@pytest.fixture
def group_of_two() -> Iterator[Callable[[], None]]:
    """Lend what makes this process rank 1 of 2, as ``init_process_group`` does; nobody else is there."""

    def begin() -> None:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_checkpointer_made_before_the_process_group_says_that(
    tmp_path: Path, group_of_two: Callable[[], None]
) -> None:
    with aiockpt.Checkpointer(tmp_path) as early, aiockpt.Checkpointer(tmp_path, ranks=aiockpt.Ranks()) as alone:
        early.save(1, replicated(1)).result()
        group_of_two()
        calls: list[Callable[[int, dict[str, Any]], object]] = [
            early.save,
            early.step,
            lambda step, state: early.warm_up(state),
            lambda step, state: early.load(state),
        ]
        early._options = msgspec.structs.replace(early._options, every=1)
        for call in calls:
            with pytest.raises(
                UsageError, match=r"was alone, and now it is rank 1 of 2.*after torch\.distributed\.init"
            ):
                call(2, replicated(2))
        assert early.latest().result() == 1  # who only looks needs nobody
        assert alone.save(2, replicated(2)).result().step == 2
        torch.distributed.destroy_process_group()
        assert early.save(3, replicated(3)).result().step == 3


def test_who_saves_alone_is_told_who_has_the_rest(tmp_path: Path, group_of_two: Callable[[], None]) -> None:
    group_of_two()
    mesh = DeviceMesh("cpu", [0, 1])
    half = DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)], run_check=False)
    with aiockpt.Checkpointer(tmp_path, ranks=aiockpt.Ranks(), on_error="warn") as ckpt:
        with pytest.raises(UsageError, match=r"(?s)saves alone.*w: 24 of 48 elements.*init_process_group"):
            ckpt.save(1, {"w": half, "whole": torch.zeros(3)})
        many = {f"w{number}": half for number in range(1)} | {f"v{n}": half.clone() for n in range(25)}
        with pytest.raises(UsageError, match=r"and 6 more"):
            ckpt.save(1, many)
    assert steps(tmp_path) == []


def test_no_note_is_left_behind_for_ever(tmp_path: Path) -> None:
    with Crew(2, tmp_path, deadlines=QUICK) as crew:
        store: Any = coordinator_of(crew.checkpointers[0]).board._store
        for step in range(1, 12):
            crew.on_all(lambda rank, ckpt, step=step: ckpt.save(step, replicated(step)).result())  # type: ignore[misc]
        assert store.num_keys() < 40
        for size in range(1, 12):  # another structure each time, which the ranks must plan
            crew.on_all(lambda rank, ckpt, size=size: ckpt.warm_up({"w": torch.zeros(size)}).result())  # type: ignore[misc]
        assert store.num_keys() < 40


def test_a_rank_closed_by_another_thread_holds_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot know that its state is that of its last step, so the ranks do not save that."""
    first, second, other = (ThreadPoolExecutor(1) for _ in range(3))
    with first, second, other, Crew(2, tmp_path, deadlines=PATIENT, every=10) as crew:
        for rank, threads in enumerate((first, second)):
            threads.submit(crew.checkpointers[rank].step, 1, replicated(1)).result()
        closes = [threads.submit(crew.checkpointers[rank].close) for rank, threads in enumerate((first, other))]
        for close in closes:
            close.result(PATIENT.ranks_s / 2)
    assert "another thread than step()'s" in caplog.text
    assert steps(tmp_path) == []
