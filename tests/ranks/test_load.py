"""Many ranks load one step: the same one, all or none, and every rank learns the same reason."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import Crew, coordinator_of


def state_at(value: float, tensors: int = 4) -> dict[str, Any]:
    state: dict[str, Any] = {f"w{index}": torch.full((90, 33), float(value + index)) for index in range(tensors)}
    return {**state, "note": f"at {value}"}


def empty() -> dict[str, Any]:
    return {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else None for name, x in state_at(0).items()}


def holds(state: dict[str, Any], value: float) -> bool:
    return state["note"] == f"at {value}" and all(
        torch.equal(state[name], tensor) for name, tensor in state_at(value).items() if isinstance(tensor, torch.Tensor)
    )


def save(root: Path, *steps: int) -> None:
    with aiockpt.Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step)).result()


def one_rank_sees(root: Path, blind: int, *faults: Fault) -> Any:
    """Return the backend of each rank: one of them sees damage."""

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(root), world=World())
        return FaultyBackend(inner, list(faults)) if rank == blind else inner

    return backend


class EndingStore:
    """A store whose host ends when it has posted the note whose key ends with *last*."""

    def __init__(self, last: str) -> None:
        self._notes = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self._last, self._has_ended = last, False

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(key: Any, *arguments: Any) -> Any:
            if self._has_ended:
                raise RuntimeError("Connection reset by peer")
            self._has_ended = verb == "set" and key.endswith(self._last)
            return getattr(self._notes, verb)(key, *arguments)

        return call


@pytest.mark.parametrize("last", ["", "fill/verdict"], ids=["with a store", "that have all their bytes"])
def test_what_one_process_saved_many_ranks_load(tmp_path: Path, last: str) -> None:
    save(tmp_path, 1, 2)
    states = [empty() for _ in range(3)]
    with Crew(3, tmp_path, store=EndingStore(last) if last else None) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert [result.step for result in results if result] == [2, 2, 2]
    assert all(holds(state, 2) for state in states)


def test_a_store_that_is_lost_before_fails_the_load(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with Crew(3, tmp_path, store=EndingStore("fit/verdict")) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty()).result())
    assert all("store of the ranks' notes does not answer" in str(error) for error in errors[1:])


def test_all_ranks_load_the_same_best_step(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        for step, acc in enumerate([0.1, 0.7, 0.7, 0.3]):
            ckpt.save(step, state_at(step), metrics={"acc": acc}).result()
    states = [empty() for _ in range(3)]
    with Crew(3, tmp_path) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], best="acc").result())
        assert [result.step for result in results if result] == [1, 1, 1]
        assert all(holds(state, 1) for state in states)
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty(), best=("acc", "loss", "acc")[rank]).result())
    assert "load(state, best=Best(metric='loss', count=1, mode='min')) on rank 1" in str(errors[0])


def test_an_empty_place_is_empty_for_all(tmp_path: Path) -> None:
    with Crew(3, tmp_path) as crew:
        assert crew.on_all(lambda rank, ckpt: ckpt.load(empty()).result()) == [None, None, None]


@pytest.mark.parametrize("blind", [0, 1, 2])
def test_a_step_that_one_rank_finds_damaged_is_left_by_all(tmp_path: Path, blind: int) -> None:
    save(tmp_path, 1, 2)
    states = [empty() for _ in range(3)]
    flip = Fault(do="flip", verb="reader.read", match="step-00000002/*", bit=80_000, times=None)
    with Crew(3, one_rank_sees(tmp_path, blind, flip)) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert [result.step for result in results if result] == [1, 1, 1]
    assert all([step for step, _ in result.skipped] == ["step-00000002"] for result in results if result)
    assert all(holds(state, 1) for state in states)


def test_all_ranks_are_told_the_same_of_what_was_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-00000001" / "MANIFEST-2.json").touch()
    (tmp_path / "step-00000005" / "MANIFEST-1.json").write_bytes(b"")
    states = [empty() for _ in range(3)]
    flip = Fault(do="flip", verb="reader.read", match="step-00000004/*", bit=80_000, times=None)
    with Crew(3, one_rank_sees(tmp_path, 1, flip)) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    told = [result.skipped for result in results if result]
    assert [name for name, _ in told[0]] == ["step-00000001", "step-00000005", "step-00000004"]
    assert told[1:] == told[:1] * 2
    assert all(result and result.step == 3 for result in results)
    assert "does not end with its digest" in told[0][1][1]
    assert "rank 1: " in told[0][2][1]


@pytest.mark.parametrize("blind", [0, 1])
def test_an_explicit_step_damaged_anywhere_is_an_error(tmp_path: Path, blind: int) -> None:
    save(tmp_path, 1, 2)
    flip = Fault(do="flip", verb="reader.read", match="step-00000002/*", bit=80_000, times=None)
    with Crew(2, one_rank_sees(tmp_path, blind, flip)) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty(), 2).result())
    assert all(isinstance(error, aiockpt.CorruptionError) for error in errors)
    assert f"rank {blind}" in str(errors[1 - blind])


def test_a_manifest_that_one_rank_cannot_believe_is_left_by_all(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    states = [empty() for _ in range(2)]
    flip = Fault(do="flip", verb="get", match="step-00000002/MANIFEST*", bit=900, times=None)
    with Crew(2, one_rank_sees(tmp_path, 1, flip)) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert all(holds(state, 1) for state in states)


def test_a_misfit_on_one_rank_changes_nothing_anywhere(tmp_path: Path) -> None:
    save(tmp_path, 1)
    states = [empty(), {**empty(), "w1": torch.zeros(3, 3), "extra": torch.zeros(2)}, empty()]
    with Crew(3, tmp_path) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert all(isinstance(error, aiockpt.StateMismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "w1" in str(errors[0])
    assert "extra" in str(errors[0])
    assert "rank 1" in str(errors[0])
    assert all(not state["w0"].any() for state in states)


def test_a_rank_that_cannot_read_stops_all(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    broken = Fault(do="fail", verb="open", match="step-00000002/*", error=24, times=None)
    with Crew(2, one_rank_sees(tmp_path, 1, broken)) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty()).result())
    assert isinstance(errors[0], aiockpt.RankFailedError)
    assert isinstance(errors[1], aiockpt.StorageError)


def test_no_load_is_done_before_all_ranks_have_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1)
    hang = Fault(do="hang", verb="reader.read", match="step-00000001/*", times=None)
    with Crew(2, one_rank_sees(tmp_path, 1, hang)) as crew:
        futures = crew.on_all(lambda rank, ckpt: ckpt.load(empty()))
        with pytest.raises(TimeoutError):
            futures[0].result(0.5)
        futures[1].cancel()
        with pytest.raises(aiockpt.RankFailedError, match="rank 1"):
            futures[0].result()
        assert futures[1].exception() is not None


def test_a_rank_that_does_not_load_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    quick = aiockpt.Deadlines(ranks_s=0.3, close_s=0.5)
    with Crew(2, tmp_path, deadlines=quick) as crew:
        errors = crew.errors(lambda rank, ckpt: None if rank == 1 else ckpt.load(empty()).result())
    assert isinstance(errors[0], aiockpt.RankTimeoutError)
    assert errors[0].ranks == (1,)


def test_what_no_rank_wants_is_a_difference(tmp_path: Path) -> None:
    stages = [{"part": {f"layer{rank}": torch.full((5, 3), float(rank))}} for rank in range(3)]
    with Crew(3, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, stages[rank]).result())
    fresh = [{"part": {f"layer{rank}": torch.zeros(5, 3)}} for rank in range(3)]
    with Crew(3, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(fresh[rank]).result())
        assert [state["part"][f"layer{rank}"][0, 0].item() for rank, state in enumerate(fresh)] == [0, 1, 2]
    with Crew(2, tmp_path) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(fresh[rank]).result())
        assert all(isinstance(error, aiockpt.StateMismatchError) and "layer2" in str(error) for error in errors)
        assert not any("layer1" in str(error) for error in errors)
        crew.on_all(lambda rank, ckpt: ckpt.load(fresh[rank], strict=False).result())


def test_a_rank_may_look_around_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    states = [empty() for _ in range(2)]
    with Crew(2, tmp_path) as looking:
        assert looking.checkpointers[1].latest().result() == 1
        with Crew(2, tmp_path) as crew:
            crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert all(holds(state, 1) for state in states)


def test_after_going_back_all_ranks_save_on_the_new_branch(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    states = [empty() for _ in range(2)]
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], 1).result())
        crew.on_all(lambda rank, ckpt: ckpt.save(2, state_at(20)).result())
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert all(holds(state, 20) for state in states)


@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (4, 1), (3, 2), (2, 3)])
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path, writers: int, readers: int) -> None:
    with Crew(writers, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(5, state_at(5)).result())
    states = [empty() for _ in range(readers)]
    with Crew(readers, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank]).result())
    assert all(holds(state, 5) for state in states)


def test_the_store_holds_notes_of_one_load(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip = Fault(do="flip", verb="reader.read", match="step-00000002/*", bit=80_000, times=None)
    with Crew(3, one_rank_sees(tmp_path, 1, flip)) as crew:
        store: Any = coordinator_of(crew.checkpointers[0]).board._store
        counts = []
        for _ in range(18):
            crew.on_all(lambda rank, ckpt: ckpt.load(empty()).result())
            counts.append(store.num_keys())
        assert max(counts[12:]) < 2 * max(counts[:6]), counts  # how many are left over at an instant varies


def test_a_failed_load_begins_no_new_branch(tmp_path: Path) -> None:
    broken = Fault(do="fail", verb="reader.read", match="step-00000001/*", error=24, times=None)
    with Crew(2, one_rank_sees(tmp_path, 1, broken)) as crew:
        for step in (1, 2):
            crew.on_all(lambda rank, ckpt, step=step: ckpt.save(step, state_at(step)).result())  # type: ignore[misc]
        assert all(crew.errors(lambda rank, ckpt: ckpt.load(empty(), 1).result()))
        crew.on_all(lambda rank, ckpt: ckpt.save(3, state_at(3)).result())
    runs = [json.loads((tmp_path / f"step-{step:08d}/MANIFEST-1.json").read_text())["run"] for step in (1, 2, 3)]
    assert len(set(runs)) == 1


class Hooked(torch.nn.Linear):
    """A layer that loads itself, and takes nothing when it is *picky*."""

    picky = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.picky:
            raise RuntimeError("this layer has moved on")
        super()._load_from_state_dict(*args, **kwargs)


class Counter:
    """An object with a state of its own, that takes none when it is *picky*."""

    picky = False

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        if self.picky:
            raise KeyError("m")
        self.n = state["n"]


@pytest.mark.parametrize("awaited", [False, True], ids=["waited for", "awaited"])
@pytest.mark.parametrize("make", [lambda: Hooked(2, 2), Counter], ids=["module", "object"])
def test_what_one_ranks_object_refuses_is_raised_on_all(tmp_path: Path, make: Callable[[], Any], awaited: bool) -> None:
    parts = [make(), make()]
    parts[1].picky = True

    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, {"part": parts[0]}).result())

        async def load(rank: int) -> None:
            await crew.checkpointers[rank].load({"part": parts[rank]})

        async def load_all() -> list[BaseException | None]:
            return list(await asyncio.gather(load(0), load(1), return_exceptions=True))

        errors = (
            asyncio.run(load_all())
            if awaited
            else crew.errors(lambda rank, ckpt: ckpt.load({"part": parts[rank]}).result())
        )
        for error in errors:
            assert isinstance(error, aiockpt.StateMismatchError), error
            assert re.search(r"(?s)part: (Hooked|Counter) refused what is stored.*partly overwritten", str(error))
        parts[1].picky = False
        crew.on_all(lambda rank, ckpt: ckpt.load({"part": parts[rank]}).result())
