"""Snapshots of the state as of their call, whatever devices do and when. With a twin that is late on purpose."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.adapters.native import StateWalker
from aiockpt.engine.job import SaveGuard
from aiockpt.errors import StorageTimeoutError
from aiockpt.pipeline import snapshot as copying
from aiockpt.pipeline.device_copy import SMALL_BYTES
from aiockpt.pipeline.snapshot import CopyProgram
from aiockpt.planning.write_plan import plan_save
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.limits import open_threads
from aiockpt.runtime.slabs import SlabPool
from tests.pipeline.device_states import SLAB_BYTES, Writer, planned, read_back
from tests.simulated.twin_accelerator import TwinAccelerator

State = dict[str, torch.Tensor]
CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")


class Snapshot:
    """One snapshot of a state on a twin, as the engine takes it."""

    def __init__(self, twin: TwinAccelerator, state: State, pool_slabs: int = 64) -> None:
        self.twin = twin
        self.walked, self.plan = planned(state)
        self.pool = SlabPool(SLAB_BYTES, pool_slabs * SLAB_BYTES)
        self.writer = Writer(self.plan, self.pool)
        self.program = CopyProgram(self.plan, self.walked.tensors, twin)
        self.used_devices = {device for device in map(twin.device_of, state.values()) if device is not None}
        self.events: Sequence[DeviceEvent] = ()

    def take(self, enqueued: Callable[[], object] = lambda: None, **options: Any) -> dict[str, torch.Tensor]:
        """Copy; *enqueued* is what the program does when it may."""

        def note(events: Sequence[DeviceEvent]) -> None:
            self.events = events
            enqueued()

        options.setdefault("after", [(device, self.twin.now(device)) for device in self.used_devices])
        options.setdefault("timeout_s", 10)
        options.setdefault("wanted", lambda: True)
        self.program.run(self.pool, self.writer, host_copied=note, guard=SaveGuard(), **options)
        return read_back(self.walked, self.plan, self.writer.files)


def placed(twin: TwinAccelerator, **tensors: torch.Tensor) -> State:
    twin.place(tensors.values())
    return tensors


def copied(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("pool_slabs", [1, 2, 64])
def test_a_slab_is_delivered_only_when_the_device_has_filled_it(pool_slabs: int) -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(5000), bias=torch.randn(7))
    snapshot = Snapshot(twin, state, pool_slabs)
    assert_equal(snapshot.take(), state)
    assert snapshot.pool.statistics().used_slabs == 0
    assert snapshot.writer.offsets == sorted(snapshot.writer.offsets)


def test_copies_come_after_what_the_program_has_asked_of_the_device_before() -> None:
    twin = TwinAccelerator("early")
    state = placed(twin, weight=torch.zeros(3000), steps=torch.zeros(3))
    twin.compute(lambda: [tensor.add_(1) for tensor in state.values()])
    found = Snapshot(twin, state).take()
    assert all(torch.equal(found[name], torch.ones_like(state[name])) for name in state)


def test_an_optimizer_behind_the_marks_changes_nothing_that_is_copied() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(3000), steps=torch.randn(3))
    before = copied(state)
    snapshot = Snapshot(twin, state)

    def step() -> None:
        for event in snapshot.events:
            event.order_before_compute()
        twin.compute(lambda: [tensor.add_(1) for tensor in state.values()])

    found = snapshot.take(step)
    assert_equal(found, before)
    twin.finish()
    assert_equal(state, {name: tensor + 1 for name, tensor in before.items()})


def test_the_twin_tears_a_snapshot_whose_marks_nobody_waits_for() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.zeros(3000))
    found = Snapshot(twin, state).take(lambda: twin.compute(lambda: state["weight"].add_(1)))
    assert found["weight"].ne(0).any()


def test_the_twin_tears_a_snapshot_that_does_not_follow_the_compute_stream() -> None:
    twin = TwinAccelerator("early")
    state = placed(twin, weight=torch.zeros(3000))
    twin.compute(lambda: state["weight"].add_(1))
    assert Snapshot(twin, state).take(after=())["weight"].eq(0).any()


def windows_of(program: CopyProgram) -> Sequence[Sequence[Any]]:
    """Return what devices move into each window."""
    assert program._devices is not None
    return program._devices.windows


def moved_together(sizes: Mapping[str, int]) -> list[set[int]]:
    """Return the sizes of the tensors that travel as one, for each such journey."""
    twin = TwinAccelerator("late")
    state = placed(twin, **{name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()})
    walked = StateWalker().walk(state)
    plan = plan_save(walked, slab_bytes=1 << 20, file_bytes=1 << 30)
    parts = windows_of(CopyProgram(plan, walked.tensors, twin))
    runs = [run for of_window in parts for part in of_window for run in part.runs if len(run.pieces) > 1]
    return [{piece.size for piece in run.pieces} for run in runs]


def test_small_neighbours_travel_together_and_large_ones_alone() -> None:
    assert moved_together({f"small{number}": 11 for number in range(50)} | {"large": 70_000}) == [{11}]
    assert moved_together({f"large{number}": SMALL_BYTES for number in range(4)}) == []
    assert moved_together({f"small{number}": SMALL_BYTES - 4096 for number in range(4)}) == [{SMALL_BYTES - 4096}]


def test_what_travels_together_is_one_piece_of_work_and_exact() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, **{f"small{number}": torch.randn(number) for number in range(90)})
    snapshot = Snapshot(twin, state)
    assert_equal(snapshot.take(), state)
    assert twin.work_count == sum(map(len, windows_of(snapshot.program)))


def test_what_is_not_row_major_is_made_so_in_the_lane() -> None:
    twin = TwinAccelerator("early")
    whole = torch.randn(64, 96)
    twin.place([whole])
    state = {"turned": whole.t(), "striped": whole[:, ::2], "plain": whole}
    twin.compute(lambda: whole.mul_(2))
    snapshot = Snapshot(twin, state)
    found = snapshot.take()
    assert_equal(found, {name: tensor.contiguous() for name, tensor in state.items()})
    assert snapshot.program.in_place


def test_of_what_is_made_row_major_the_device_holds_no_more_than_is_on_its_way() -> None:
    twin = TwinAccelerator("early")
    state = placed(twin, **{f"turned{number}": torch.randn(64, 100).t() for number in range(9)})
    found = Snapshot(twin, state).take(after=())  # the lane waits for nobody
    assert_equal(found, {name: tensor.contiguous() for name, tensor in state.items()})
    assert twin.peak_scratch_bytes <= 2 * 64 * 100 * 4 + SLAB_BYTES
    assert twin.scratch_bytes == 0


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64, torch.int16]
)
def test_every_dtype_is_copied(dtype: torch.dtype) -> None:
    twin = TwinAccelerator("late")
    raw = torch.randint(0, 2, (3, 5)).to(dtype)
    state = placed(twin, some=raw, scalar=raw[0, 0].clone(), turned=raw.t(), none=torch.empty(0, dtype=dtype))
    twin.place([raw, state["scalar"]])
    found = Snapshot(twin, state).take()
    for name, tensor in state.items():
        assert found[name].flatten().tolist() == tensor.flatten().tolist(), name


def test_tensors_of_two_devices_and_of_the_host_share_a_window() -> None:
    twin = TwinAccelerator("late")
    state = {name: torch.randn(100) for name in ("first", "second", "third", "host")}
    twin.place([state["first"], state["third"]], "cuda:0")
    twin.place([state["second"]], "cuda:1")
    snapshot = Snapshot(twin, state)
    assert_equal(snapshot.take(), state)
    assert set(twin.used_devices) == {CUDA0, CUDA1}
    assert len(snapshot.events) == 2


@pytest.mark.parametrize(("on_device", "beside", "count"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_a_copy_beside_the_program_or_from_a_device_starts_no_threads(
    on_device: bool, beside: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def note(count: int, name: str) -> AbstractContextManager[Any]:
        asked.append(count)
        return open_threads(count, name)

    monkeypatch.setattr(copying, "SHARED_BYTES", 1)
    monkeypatch.setattr(copying, "_processor_count", lambda: 2)
    monkeypatch.setattr(copying, "open_threads", note)
    twin = TwinAccelerator("late")
    state = {"host": torch.arange(3000.0), **(placed(twin, device=torch.arange(3000.0)) if on_device else {})}
    expected, taken = copied(state), Snapshot(twin, state)
    taken.pool.warm_up(64)
    assert_equal(taken.take(beside=beside), expected)
    assert asked == [count]


def test_a_state_in_host_memory_starts_no_device() -> None:
    twin = TwinAccelerator()
    state = {"weight": torch.randn(3000)}
    snapshot = Snapshot(twin, state)
    assert_equal(snapshot.take(), state)
    assert not twin.used_devices
    assert snapshot.events == ()


def test_a_program_serves_as_long_as_the_tensors_are_where_they_were() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(3000), bias=torch.randn(3))
    snapshot = Snapshot(twin, state)
    for _ in range(3):
        state["weight"].add_(1)
        assert_equal(snapshot.take(), state)
        assert snapshot.program.in_place


def test_a_snapshot_that_nobody_wants_any_more_leaves_no_slab_under_way() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(9000))
    snapshot = Snapshot(twin, state)
    answers = iter([True, True, True, False])
    snapshot.take(wanted=lambda: next(answers))
    assert snapshot.pool.statistics().used_slabs == 0
    assert len(snapshot.writer.offsets) == 3
    assert snapshot.events == ()


def test_a_slab_that_the_device_never_fills_is_never_used_again() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(3000))
    snapshot = Snapshot(twin, state)
    twin.hold()
    with pytest.raises(StorageTimeoutError, match="device"):
        snapshot.take(timeout_s=0.05)
    assert snapshot.pool.statistics().used_slabs == sum(map(bool, windows_of(snapshot.program))) == 3
    twin.release()
    slab = snapshot.pool.acquire(1)
    slab.memory[:] = b"\x00" * len(slab.memory)
    twin.finish()
    assert not any(slab.memory)


def test_moves_that_were_not_enqueued_are_not_waited_for() -> None:
    twin = TwinAccelerator("late")
    state = placed(twin, weight=torch.randn(3000))
    snapshot = Snapshot(twin, state)

    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    twin.stream(CUDA0).enqueue = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError, match="launch failure"):
        snapshot.take()
    assert snapshot.pool.statistics().used_slabs == 0


SHAPES = st.sampled_from([(), (1,), (7,), (33, 5), (64, 64), (3000,), (0,), (130, 70)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
PLACES = st.sampled_from([None, "cuda:0", "cuda:1"])


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, str | None]:
    shape, dtype = draw(SHAPES), draw(DTYPES)
    tensor = torch.randint(0, 200, shape).to(dtype)
    if len(shape) == 2 and draw(st.booleans()):
        tensor = tensor.t() if draw(st.booleans()) else tensor[::2]
    return tensor, draw(PLACES)


@given(
    st.lists(tensors(), min_size=1, max_size=24),
    st.integers(1, 9),
    st.sampled_from(["late", "early", *range(8)]),
    st.integers(1, 3),
)
def test_the_bytes_are_those_of_the_call_whatever_the_devices_do_and_when(
    drawn: list[tuple[torch.Tensor, str | None]], pool_slabs: int, pace: Any, saves: int
) -> None:
    twin = TwinAccelerator(random.Random(pace) if isinstance(pace, int) else pace)
    state: State = {}
    for number, (tensor, device) in enumerate(drawn):
        state[f"t{number}"] = tensor
        if device is not None:
            twin.place(tensor, device)
    on_device = [tensor for tensor, device in drawn if device is not None]
    homes = [str(device) for _, device in drawn if device is not None]
    expected = copied(state)

    def train() -> None:
        for tensor, device in zip(on_device, homes, strict=True):
            twin.compute(partial(tensor.add_, 1), device)

    def step() -> None:
        for event in snapshot.events:
            event.order_before_compute()
        train()

    snapshot = Snapshot(twin, state, pool_slabs)
    for _ in range(saves):
        train()
        expected = {
            name: tensor + 1 if twin.device_of(state[name]) is not None else tensor for name, tensor in expected.items()
        }
        found = snapshot.take(step)
        assert_equal(found, {name: tensor.contiguous() for name, tensor in expected.items()})
        if on_device:
            expected = {
                name: tensor + 1 if twin.device_of(state[name]) is not None else tensor
                for name, tensor in expected.items()
            }
    assert snapshot.pool.statistics().used_slabs == 0
