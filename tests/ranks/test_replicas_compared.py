"""What ranks have differently under one name is told at the save, by tensor and ranks; what they have alike never is."""

import logging
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

import aiockpt
from aiockpt.format.manifest import Receipt, decode_receipt, encode_receipt
from aiockpt.options import Snapshot
from aiockpt.runtime.world import World
from tests.example_counts import examples
from tests.lazy.test_device import Queued
from tests.ranks.crew import Crew
from tests.simulated.twin_accelerator import TwinAccelerator

MAKE: list[Callable[[random.Random], torch.Tensor]] = [
    lambda dice: torch.tensor(dice.random()),
    lambda dice: torch.tensor([dice.random() < 0.5] * dice.randrange(1, 300)),
    lambda dice: torch.arange(dice.randrange(1, 200)).to(torch.bfloat16),
    lambda dice: torch.full((dice.randrange(1, 40), dice.randrange(1, 40)), dice.random(), dtype=torch.float64),
    lambda dice: torch.ones(7, dice.randrange(1, 30), 3),
    lambda dice: torch.full((33, 17), complex(1, dice.random())),
    lambda dice: torch.arange(dice.randrange(300, 9000)).to(torch.uint8),
    lambda dice: torch.zeros(0, 3),
]


def grow(dice: random.Random, depth: int = 3) -> Any:
    """Return a state: tensors in dicts, lists and tuples."""
    if not depth or dice.random() < 0.3:
        return dice.choice(MAKE)(dice)
    grown: list[Any] = [grow(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    kinds: list[Callable[[list[Any]], Any]] = [list, tuple, lambda some: dict(zip("abc", some, strict=False))]
    return dice.choice(kinds)(grown)


def leaves_of(tree: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    members = [(f"{name}.{key}", one) for key, one in tree.items()] if isinstance(tree, dict) else None
    members = members or [(f"{name}[{place}]", one) for place, one in enumerate(tree)]
    return {found: leaf for at, one in members for found, leaf in leaves_of(one, at).items()}


def laid_out(tree: Any, dice: random.Random) -> Any:
    """Return the same values in other memory: in another order, or with gaps."""
    if isinstance(tree, torch.Tensor):
        wide = torch.empty_strided(tree.shape, [2 * step for step in tree.stride()], dtype=tree.dtype)
        turned = tree.t().contiguous().t() if tree.dim() == 2 else tree.clone()
        return dice.choice([wide.copy_(tree), turned, tree.clone()])
    if isinstance(tree, dict):
        return {key: laid_out(one, dice) for key, one in tree.items()}
    return type(tree)(laid_out(one, dice) for one in tree)


def _change(leaf: torch.Tensor, dice: random.Random, *, one: bool) -> None:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = leaf.view(kinds[leaf.element_size()])
    bits[tuple(dice.randrange(size) for size in leaf.shape) if one else ...] ^= 1


@examples(40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from(["eager", "lazy"]), st.sampled_from([None, "digest"]))
def test_a_difference_is_always_told_and_equal_replicas_never_are(seed: int, snapshot: Snapshot, debug: Any) -> None:
    dice = random.Random(seed)
    world_size = dice.choice([2, 3])
    tree = grow(dice)
    states = [{"of": laid_out(tree, dice)} for _ in range(world_size)]
    with Crew(
        world_size, f"memory://{uuid.uuid4().hex}", snapshot=snapshot, lazy=aiockpt.Lazy(debug=debug), on_error="warn"
    ) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, states[rank]).result())
        odd = dice.randrange(world_size)
        leaves = {name: leaf for name, leaf in leaves_of(states[odd]["of"], "of").items() if leaf.numel()}
        planted = set(dice.sample(sorted(leaves), dice.randrange(0, len(leaves) + 1)))
        for name in planted:  # a few bytes where all are looked at, else all of it
            _change(leaves[name], dice, one=debug is not None or leaves[name].nbytes <= 256)
        errors = crew.on_all(lambda rank, ckpt: ckpt.save(2, states[rank]).exception())
    for error in errors:
        if not planted:
            assert error is None
        else:
            assert isinstance(error, aiockpt.ReplicasDifferError)
            assert set(error.tensors) == planted
            assert error.ranks == ((odd,) if odd else tuple(range(1, world_size)))


def alike(odd: float = 1.0) -> dict[str, Any]:
    """Return a state of a parameter and its momentum, a bare tensor of *odd* values, and a larger one."""
    model = nn.Linear(9, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "bare": torch.full((40, 10), odd), "large": torch.ones(100, 100)}


def errors_of(crew: Crew, make: Callable[[int], dict[str, Any]], step: int = 1) -> list[BaseException | None]:
    states = [
        make(rank) for rank in range(crew.world_size)
    ]  # an optimizer that steps waits for lazy copies of any thread
    return crew.on_all(lambda rank, ckpt: ckpt.save(step, states[rank]).exception())


def assert_told(errors: list[BaseException | None], *tensors: str) -> None:
    for error in errors:
        assert isinstance(error, aiockpt.ReplicasDifferError), error
        assert error.tensors == tensors
        assert all(way in str(error) for way in ("per_rank", "DTensor", "Shards", "replicas="))


def receipts_in(place: Path) -> list[Receipt]:
    return [decode_receipt(path.read_bytes()) for path in sorted(place.glob("*/a-*/r/r*.json"))]


@pytest.mark.parametrize("options", [{}, {"worker": "process"}, {"snapshot": "lazy", "worker": "process"}])
def test_every_rank_hears_the_same_and_no_step_is_there(tmp_path: Path, options: dict[str, Any]) -> None:
    with Crew(3, tmp_path, on_error="warn", **options) as crew:
        errors = errors_of(crew, lambda rank: alike(odd=1 + (rank == 1)))
        assert_told(errors, "bare")
        assert len({str(error) for error in errors}) == 1
        assert "bare (rank 1 unlike ranks 0, 2)" in str(errors[2])
        assert crew.checkpointers[0].latest().result() is None
        assert errors_of(crew, lambda rank: alike(), step=2) == [None] * 3


def test_several_places_get_nothing_of_it(tmp_path: Path) -> None:
    def places(_: int) -> list[aiockpt.Tier]:
        return [aiockpt.Tier("shm://replicas-" + tmp_path.name), aiockpt.Tier(tmp_path / "far")]

    with Crew(2, places, on_error="warn") as crew:
        assert_told(errors_of(crew, lambda rank: alike(odd=rank)), "bare")
        assert errors_of(crew, lambda rank: alike(), step=2) == [None] * 2
        assert [step.step for step in crew.checkpointers[0].steps().result()] == [2]
        crew.checkpointers[0].delete(2).result()


def test_one_different_element_of_many_is_told(tmp_path: Path) -> None:
    def make(rank: int) -> dict[str, Any]:
        state = alike()
        state["large"][50, 51] += rank
        return state

    with Crew(2, tmp_path, lazy=aiockpt.Lazy(debug="digest"), on_error="warn") as crew:
        assert_told(errors_of(crew, make), "large")


def test_a_rank_that_gets_more_state_later_is_compared_as_well(tmp_path: Path) -> None:
    """Rank 1 has planned its new tensor alone, and so has rank 0."""
    with Crew(2, tmp_path, on_error="warn") as crew:
        assert errors_of(crew, lambda rank: alike()) == [None] * 2
        assert (
            errors_of(crew, lambda rank: {**alike(), **({"new": torch.ones(9)} if rank else {})}, step=2) == [None] * 2
        )
        assert_told(errors_of(crew, lambda rank: {**alike(), "new": torch.full((9,), float(rank))}, step=3), "new")


def test_what_one_rank_has_and_who_saves_alone_cost_nothing(tmp_path: Path) -> None:
    def make(rank: int) -> dict[str, Any]:
        rows = aiockpt.Shards((8, 5), {(4 * rank, 0): torch.ones(4, 5)})
        return {"rows": rows, f"stage{rank}": torch.ones(9), "own": aiockpt.per_rank(torch.full((3,), rank))}

    with Crew(2, tmp_path / "two") as crew:
        assert errors_of(crew, make) == [None] * 2
    with aiockpt.Checkpointer(tmp_path / "alone") as ckpt:
        ckpt.save(1, alike()).result()
    for receipt in (*receipts_in(tmp_path / "two"), *receipts_in(tmp_path / "alone")):
        assert not receipt.replicas
        assert not receipt.buffers


def test_one_ranks_values_are_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    with Crew(2, tmp_path, replicas="first") as crew:
        assert errors_of(crew, lambda rank: alike(odd=rank)) == [None] * 2
        assert crew.checkpointers[1].read(1, "bare").result().eq(0).all()
    assert not any(receipt.replicas for receipt in receipts_in(tmp_path))


def test_ranks_that_compare_and_ranks_that_do_not_disagree(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with Crew(2, tmp_path, on_error="warn") as crew:
        crew.checkpointers[1]._parts.shutdown.close()
        for rank, replicas in enumerate(("check", "first")):
            crew.checkpointers[rank] = aiockpt.Checkpointer(
                tmp_path,
                ranks=aiockpt.Ranks(rank, 2, store),
                replicas=replicas,  # type: ignore[arg-type]
                on_error="warn",
            )
        errors = errors_of(crew, lambda rank: alike())
    assert all(isinstance(error, aiockpt.RankError) and "replicas is 'check'" in str(error) for error in errors), errors


def test_buffers_that_differ_are_counted_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")

    def make(rank: int) -> dict[str, Any]:
        model = nn.BatchNorm1d(4)
        for buffer in model.buffers():
            buffer.fill_(rank)
        return {"model": model}

    with Crew(2, tmp_path) as crew:
        for step in (1, 2, 3):
            assert errors_of(crew, make, step) == [None] * 2
        assert crew.checkpointers[1].read(3, "model.running_mean").result().eq(0).all()
    (told,) = [record.message for record in caplog.records if "buffers of modules" in record.message]
    assert "3 buffers of modules differ" in told


@pytest.mark.parametrize("differ", [False, True])
def test_votes_that_differ_are_finished_by_nobody(tmp_path: Path, differ: bool) -> None:
    with Crew(2, tmp_path) as crew:
        assert errors_of(crew, lambda rank: alike()) == [None] * 2
    for path in [*tmp_path.glob("step-*/MANIFEST*"), *tmp_path.glob("step-*/a-*/DECISION.json")]:
        path.unlink()  # all have voted, and were killed before the commit
    path = max(tmp_path.glob("step-*/a-*/r/r*.json"))
    receipt = decode_receipt(path.read_bytes())
    assert receipt.replicas
    if differ:
        rows = bytearray(receipt.replicas)
        rows[-1] ^= 1
        path.write_bytes(encode_receipt(msgspec.structs.replace(receipt, replicas=bytes(rows))))
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert (ckpt.load(alike()).result() is None) == differ


@pytest.mark.parametrize("pace", ["late", "early", 1, 2, 3])
@pytest.mark.parametrize(
    ("snapshot", "debug"), [("eager", None), ("lazy", None), ("device", None), ("eager", "digest")]
)
def test_replicas_on_a_device_are_those_of_the_call(tmp_path: Path, pace: Any, snapshot: Snapshot, debug: Any) -> None:
    """Rank 1 goes on training at once, and rank 0 does not; the samples of both are of the call."""
    twins = [TwinAccelerator(random.Random(pace) if isinstance(pace, int) else pace) for _ in range(2)]
    states: list[dict[str, Any]] = []
    for twin in twins:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
        for place, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, place)
        turned = model.get_parameter("0.weight")
        turned.data = turned.data.t()
        twin.place(model)
        states.append({"model": model, "optimizer": Queued(model.parameters(), twin)})

    def train(rank: int, ckpt: aiockpt.Checkpointer) -> list[BaseException | None]:
        twin, state, first = twins[rank], states[rank], states[rank]["model"][0]
        errors = []
        for step in range(4):
            twin.compute(lambda: first.bias.data.add_(1))
            if debug:  # whose check of all bytes looks at once
                twin.finish()
            save = ckpt.save(step, state)
            if rank:
                state["optimizer"].step()
            errors.append(save.exception())
            if not rank:
                state["optimizer"].step()
            elif step == 2:
                twin.compute(lambda: first.weight.data.add_(1))
        return errors

    worlds = [World(accelerator=twin) for twin in twins]
    with Crew(2, tmp_path, worlds=worlds, snapshot=snapshot, lazy=aiockpt.Lazy(debug=debug), on_error="warn") as crew:
        for *before, last in crew.on_all(train):
            assert before == [None] * 3
            assert_told([last], "model.0.weight")


class OnTwoDevices(torch.optim.SGD):
    """Adds one to each of two parameters, whenever the compute stream of its device gets to it."""

    twin: TwinAccelerator

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for device, parameter in enumerate(self.param_groups[0]["params"]):
            self.twin.compute(lambda held=parameter.data: held.add_(1), f"cuda:{device}")  # type: ignore[misc]


def test_an_optimizer_waits_for_a_device_that_reads(tmp_path: Path) -> None:
    twins = [TwinAccelerator("late") for _ in range(2)]
    models = [nn.ParameterList([torch.ones(64, 64), torch.ones(64, 64)]) for _ in twins]  # each rank writes one

    def train(rank: int, ckpt: aiockpt.Checkpointer) -> list[BaseException | None]:
        twin, model, errors = twins[rank], models[rank], []
        for device, parameter in enumerate(model):
            twin.place(parameter, f"cuda:{device}")
        optimizer = OnTwoDevices(model.parameters(), lr=1)
        optimizer.twin = twin
        for step in range(3):
            save = ckpt.save(step, {"model": model, "optimizer": optimizer})
            optimizer.step()
            errors.append(save.exception())
        return errors

    with Crew(
        2, tmp_path, worlds=[World(accelerator=twin) for twin in twins], snapshot="lazy", on_error="warn"
    ) as crew:
        assert crew.on_all(train) == [[None] * 3] * 2
