"""Saves of a state that has not moved: everything is found as it was, whatever of it is gathered anew each time."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.format.safetensors import PAYLOAD_ALIGNMENT
from aiockpt.lazy.mutability import Mutability
from aiockpt.lazy.optimizer_owned import OptimizerOwned
from aiockpt.pipeline import snapshot
from aiockpt.pipeline.snapshot import CopyProgram, InFlightSlabs
from tests.small_run import SMALL, small_checkpointer


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model._register_state_dict_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    return model


def with_optimizer(model: nn.Module, **extra: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), **{"lr": 0.1, **extra})}


def counted(calls: list[object], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function*, with a note in *calls* of each call."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(function)
        return function(*arguments, **options)

    return call


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "a module and its optimizer": lambda: with_optimizer(nn.BatchNorm1d(4)),
    "a learning rate that is a tensor": lambda: with_optimizer(nn.Linear(4, 4), lr=torch.tensor(0.1)),
    "a module with a hook": lambda: with_optimizer(hooked()),
    "an array": lambda: {**with_optimizer(nn.Linear(4, 4)), "history": np.zeros(4)},
    "random generators": lambda: {**with_optimizer(nn.Linear(4, 4)), "rng": aiockpt.RNG()},
    "a list of tensors and no optimizer": lambda: {"some": [torch.ones(3), torch.ones(4)]},
}


@pytest.mark.parametrize("kind", STATES)
def test_the_second_save_makes_no_new_copies(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = STATES[kind]()
    gc.collect()  # garbage of other tests, which may go at any moment
    looks: list[object] = []
    programs: list[object] = []
    monkeypatch.setattr(OptimizerOwned, "find", counted(looks, OptimizerOwned.find))
    monkeypatch.setattr(CopyProgram, "__init__", counted(programs, CopyProgram.__init__))
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        for step in range(4):
            torch.rand(1)
            ckpt.save(step, state).result()
    assert (len(looks), len(programs)) == (1, 1)


class Swallowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies nothing, as a mode of fake tensors does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.copy_.default else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("processors", "warm", "mode", "least_bytes", "copied"),
    [
        (1, True, nullcontext, 1, 1),
        (2, True, nullcontext, 1, 4),
        (9, True, Swallowing, 1, 4),
        (2, False, nullcontext, 1, 1),
        (2, True, nullcontext, snapshot.SHARED_BYTES, 1),
    ],
    ids=["one processor", "two", "many, and a mode of the program", "slabs are made meanwhile", "a small state"],
)
def test_writing_waits_for_a_copy_on_several_threads(
    processors: int,
    warm: bool,
    mode: Any,
    least_bytes: int,
    copied: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"x": torch.arange(4 * SMALL.slab_bytes - PAYLOAD_ALIGNMENT, dtype=torch.int32).to(torch.uint8)}
    expected = state["x"].clone()  # of four windows
    copies, handed = list[object](), list[int]()
    hand_over = InFlightSlabs._deliver_first

    def note(self: InFlightSlabs) -> None:
        handed.append(len(copies))
        hand_over(self)

    monkeypatch.setattr(snapshot, "SHARED_BYTES", least_bytes)
    monkeypatch.setattr(snapshot, "_processor_count", lambda: processors)
    for way in ("_copy_fast", "_copy_together"):
        monkeypatch.setattr(snapshot, way, counted(copies, getattr(snapshot, way)))
    monkeypatch.setattr(InFlightSlabs, "_deliver_first", note)
    with small_checkpointer(tmp_path) as ckpt:
        if warm:
            ckpt.warm_up(state).result()
        with mode():
            save = ckpt.save(1, state)
        save.result()
        state["x"].zero_()
        ckpt.load(state).result()
    assert (len(copies), len(handed), handed[0]) == (4, 4, copied)
    assert state["x"].equal(expected)


def test_a_warm_up_allocates_the_pool(tmp_path: Path) -> None:
    io = aiockpt.IO(slab_bytes=1 << 14, block_bytes=1 << 12, read_bytes=1 << 14)
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.warm_up({"x": torch.zeros(100_000)}).result()
        assert ckpt.statistics().pool.allocated_bytes >= 400_000


def test_the_first_save_after_warm_up_has_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[snapshot.CopyProgram] = []

    class Noted(snapshot.CopyProgram):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(snapshot, "CopyProgram", Noted)
    state = {"x": torch.arange(1 << 16)}
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.warm_up(state).result()
        assert len(made) == 1
        ckpt.save(1, state).result()
    assert len(made) == 1


@pytest.mark.parametrize("sizes", [[], [5], [4096 * 9 + 1], [100] * 7, [1 << 20, 3, 1 << 16, 70_001]])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_of_a_copy_are_even_and_whole(sizes: list[int], count: int) -> None:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    moves = [(start, (10 << 20) + 2 * start, size) for start, size in zip(starts, sizes, strict=True)]
    shares = snapshot._share(moves, count)
    assert len(shares) <= count
    assert all(sum(size for _, _, size in share) <= sum(sizes) / count + 4096 for share in shares)
    for offset, source, size in moves:
        parts = [move for share in shares for move in share if offset <= move[0] < offset + size]
        assert sum(part for _, _, part in parts) == size
        ends = [offset, *(there + part for there, _, part in parts)]
        assert [(there, source + there - offset) for there, _, _ in parts] == [
            (end, source + end - offset) for end in ends[:-1]
        ]


def test_a_walk_gives_new_shards_for_new_memory() -> None:
    first, second = torch.ones(4), torch.ones(4)
    some, walker = [first, second], StateWalker()
    state = {"model": nn.Linear(2, 2), "some": some}
    known = walker.walk(state).tensors
    assert walker.walk(state).tensors is known
    some[1] = torch.zeros(4)
    again = walker.walk(state).tensors
    assert [one is other for one, other in zip(again, known, strict=True)] == [True, True, True, False]
    assert again[3].data.data_ptr() == some[1].data_ptr()
    some[0] = first.view(2, 2).t().reshape(4)  # as large, elsewhere
    assert walker.walk(state).tensors[2].data.data_ptr() == some[0].data_ptr()


def test_values_in_new_memory_are_those_of_now(tmp_path: Path) -> None:
    state: dict[str, Any] = with_optimizer(nn.Linear(4, 4))
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        for step in range(3):
            state["history"], state["some"] = np.full(4, float(step)), [torch.full((2,), float(step))]
            save = ckpt.save(step, state)
            state["history"][:], state["some"][0][:] = -1, -1
            save.result()
        for step in range(3):
            assert ckpt.read(step, "history").result().eq(step).all()
            assert ckpt.read(step, "some[0]").result().eq(step).all()


def test_what_a_hook_gives_is_copied() -> None:
    model, walker, mutability = hooked(), StateWalker(), Mutability()
    state = with_optimizer(model)

    def moving() -> list[bool]:
        walked = walker.walk(state)
        still = mutability.split(walked, state, trusting=False).copy(walked, reuse=True)
        return [live is not held for live, held in zip(walked.tensors, still.tensors, strict=True)]

    assert moving() == [False, False]
    elsewhere = torch.ones(4, 4)
    model._register_state_dict_hook(lambda _, found, *__: found.update(weight=elsewhere))  # type: ignore[no-untyped-call]
    assert sorted(moving()) == [False, True]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_every_dtype_is_copied_into_the_same_memory_again(dtype: torch.dtype) -> None:
    tensor, walker, mutability = torch.zeros(3, 4).to(dtype).t(), StateWalker(), Mutability()
    state = {"t": tensor, "empty": torch.zeros(0), "scalar": torch.tensor(1.0)}
    for value in (0, 1):
        tensor.copy_(torch.full((4, 3), value).to(dtype))
        walked = walker.walk(state)
        held = mutability.split(walked, state, trusting=False).copy(walked, reuse=True).tensors
        assert torch.equal(held[0].data.to(torch.complex64), tensor.to(torch.complex64))


def test_a_state_of_another_shape_is_held_anew() -> None:
    walker, mutability = StateWalker(), Mutability()
    for size in (2, 3, 2):
        state = {"some": [torch.full((size,), float(size))], "t": torch.ones(1)}
        walked = walker.walk(state)
        held = mutability.split(walked, state, trusting=False).copy(walked, reuse=True).tensors
        assert [tuple(shard.data.shape) for shard in held if shard.name == "some[0]"] == [(size,)]


@pytest.mark.parametrize("late", [torch.full((2,), 3.0), aiockpt.RNG()], ids=["a tensor", "an object"])
def test_what_comes_into_a_list_is_found(late: Any) -> None:
    log: list[Any] = [1.0]
    state, walker = {"model": nn.Linear(2, 2), "log": log}, StateWalker()
    walker.walk(state)
    log.append(late)
    found, anew = walker.walk(state), StateWalker().walk(state)
    assert found.structure == anew.structure
    assert found.values == anew.values
    assert [shard.name for shard in found.tensors] == [shard.name for shard in anew.tensors]


def test_the_same_tensors_under_another_plan_are_copied_by_that(tmp_path: Path) -> None:
    """A hook shows a tensor of the state as a weight of a module, too, now and then: then it lies in a file of its own."""
    model, tensor, shown = nn.Identity(), torch.ones(3000), dict[str, torch.Tensor]()
    model._register_state_dict_hook(lambda _, found, *__: found.update(shown))  # type: ignore[no-untyped-call]
    state = {"tensor": tensor, "other": torch.ones(20), "model": model}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        for step in range(3):
            shown.update({"extra": tensor}) if step % 2 == 0 else shown.clear()
            tensor.fill_(step)
            ckpt.save(step, state).result()
        for step in range(3):
            assert ckpt.read(step, "tensor").result().eq(step).all()


def test_tensors_of_another_shape_are_written_by_another_plan(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2)}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        for step in range(3):
            state["some"] = [torch.full((step + 1,), float(step))]
            ckpt.save(step, state).result()
        assert [ckpt.read(step, "some[0]").result().tolist() for step in range(3)] == [[0], [1, 1], [2, 2, 2]]


def test_a_tensor_of_a_list_is_copied_from_where_it_is(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "some": []}
    kept: list[Any] = []

    def change(step: int) -> None:
        kept.append(state["some"])
        state["some"] = [torch.full((4,), float(step))]

    assert read_each(tmp_path, state, change, "some[0]") == [0, 1, 2]


def test_what_was_seen_to_change_is_copied_next() -> None:
    walker, mutability = StateWalker(), Mutability()
    state = with_optimizer(nn.Linear(4, 4))
    walked = walker.walk(state)
    assert mutability.split(walked, state, trusting=False).copied_bytes == 0
    mutability.distrust(["model.weight"])
    assert mutability.split(walker.walk(state), state, trusting=False).kinds["model.weight"] == "torn"


def test_what_an_eager_save_trusts_a_lazy_copies() -> None:
    walker, mutability = StateWalker(), Mutability()
    state = {"model": nn.Linear(4, 4)}
    walked = walker.walk(state)
    assert mutability.split(walked, state, trusting=True).copied_bytes == 0
    assert mutability.split(walked, state, trusting=False).copied_bytes == 80


def read_each(folder: Path, state: dict[str, Any], change: Callable[[int], object], name: str) -> list[float]:
    """Save *state* three times, changed before each; return what each step has as the first element of *name*."""
    with aiockpt.Checkpointer(folder) as ckpt:
        for step in range(3):
            change(step)
            ckpt.save(step, state).result()
        return [ckpt.read(step, name).result().flatten()[0].item() for step in range(3)]


def test_what_is_copied_aside_is_copied_each_time(tmp_path: Path) -> None:
    turned = torch.zeros(3, 4).t()
    assert read_each(tmp_path, {"turned": turned}, turned.fill_, "turned") == [0, 1, 2]


def test_a_replaced_tensor_of_a_dict_is_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"t": torch.zeros(4), "other": torch.ones(4)}
    kept: list[torch.Tensor] = []

    def change(step: int) -> None:
        kept.append(state["t"])
        state["t"] = torch.full((4,), float(step))

    assert read_each(tmp_path, state, change, "t") == [0, 1, 2]


def test_replaced_memory_of_a_parameter_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    kept: list[torch.Tensor] = []

    def change(step: int) -> None:
        kept.append(model.weight.data)
        model.weight.data = torch.full((4, 4), float(step))

    assert read_each(tmp_path, {"model": model}, change, "model.weight") == [0, 1, 2]
