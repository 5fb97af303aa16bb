"""Saves of what is on a device: the state at the call, without holding the program longer than needed. With a twin."""

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.events import BarrierWaited, SnapshotTaken
from aiockpt.options import Snapshot
from aiockpt.runtime.world import World
from tests.seams import program_of
from tests.simulated.twin_accelerator import TwinAccelerator
from tests.watch import Watch

KIB = 1024
SMALL = aiockpt.IO(slab_bytes=64 * KIB, block_bytes=64 * KIB, read_bytes=64 * KIB)
ONE_SLAB = aiockpt.IO(pool_bytes=64 * KIB, slab_bytes=64 * KIB, block_bytes=64 * KIB, read_bytes=64 * KIB)
LIMITS = aiockpt.Limits(io=SMALL)


class Queued(torch.optim.Optimizer):
    """Adds one to every parameter, whenever the compute stream of the twin gets to it."""

    def __init__(self, parameters: Iterator[nn.Parameter], twin: TwinAccelerator) -> None:
        super().__init__(parameters, {})
        self.twin = twin

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.twin.compute(lambda held=parameter.data: held.add_(1))  # type: ignore[misc]


class Run:
    """A model on a device of the twin, a note in host memory, and an optimizer whose steps queue up."""

    def __init__(self, twin: TwinAccelerator) -> None:
        torch.manual_seed(0)
        self.twin = twin
        self.model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 200))
        twin.place(self.model)
        self.note = torch.arange(5.0)
        self.optimizer = Queued(self.model.parameters(), twin)
        self.watch = Watch()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "note": self.note}

    def copied(self) -> dict[str, torch.Tensor]:
        self.twin.finish()
        return {"note": self.note.clone(), **{name: held.clone() for name, held in self.model.state_dict().items()}}

    def open(self, place: Path, *, limits: aiockpt.Limits = LIMITS, **options: Any) -> aiockpt.Checkpointer:
        world = World(accelerator=self.twin)
        return aiockpt.Checkpointer(place, observers=[self.watch], world=world, limits=limits, **options)


@pytest.fixture
def run() -> Run:
    return Run(TwinAccelerator("late"))


def loaded(place: Path, step: int) -> dict[str, torch.Tensor]:
    run = Run(TwinAccelerator())
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.load({"model": run.model, "note": run.note}, step).result()
    return {"note": run.note, **run.model.state_dict()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("io", [SMALL, ONE_SLAB], ids=["large pool", "one slab"])
@pytest.mark.parametrize("pace", ["late", "early"])
@pytest.mark.parametrize("snapshot", ["eager", "lazy", "device"])
def test_every_save_is_the_state_at_its_call(snapshot: Snapshot, pace: Any, io: aiockpt.IO, tmp_path: Path) -> None:
    run, expected = Run(TwinAccelerator(pace)), {}
    with run.open(tmp_path, snapshot=snapshot, limits=aiockpt.Limits(io=io)) as ckpt:
        for step in range(4):
            expected[step] = run.copied()
            run.optimizer.step()  # may be carried out after the call, and must be in what is saved
            expected[step] |= {name: expected[step][name] + 1 for name, _ in run.model.named_parameters()}
            ckpt.save(step, run.state)
            run.optimizer.step()
    for step in range(4):
        assert_equal(loaded(tmp_path, step), expected[step])


def test_a_real_optimizer_waits_where_the_device_would(tmp_path: Path) -> None:
    twin = TwinAccelerator("late", immediate=True)
    run, expected = Run(twin), {}
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        for step in range(4):
            run.model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            expected[step] = run.copied()
            ckpt.save(step, {"model": run.model, "note": run.note})
    for step in range(4):
        assert_equal(loaded(tmp_path, step), expected[step])


@contextmanager
def unordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let optimizers wait for what is not enqueued, and forget the marks."""
    with monkeypatch.context() as patched:
        patched.setattr("tests.simulated.twin_accelerator.TwinEvent.order_before_compute", lambda _: None)
        yield


def test_without_the_order_the_same_save_is_torn(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run.copied()
    run.twin.hold()
    with unordered(monkeypatch), run.open(tmp_path, snapshot="lazy") as ckpt:
        ckpt.save(1, run.state)
        run.optimizer.step()
        run.twin.release()
    assert not torch.equal(loaded(tmp_path, 1)["0.weight"], expected["0.weight"])


def test_a_step_goes_on_while_the_device_still_copies(run: Run, tmp_path: Path) -> None:
    expected = run.copied()
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        ckpt.warm_up(run.state).result()
        run.twin.hold()
        save = ckpt.save(1, run.state)
        run.optimizer.step()
        assert not save.snapshotted().done()
        run.twin.release()
        save.result()
    assert_equal(loaded(tmp_path, 1), expected)


def test_who_changes_the_state_by_hand_waits(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        run.twin.hold()
        save = ckpt.save(1, run.state)
        threading.Timer(0.2, run.twin.release).start()
        with ckpt.mutating():
            assert save.snapshotted().done()
    assert run.watch.of(BarrierWaited)


def test_an_eager_save_returns_when_the_device_is_done(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path) as ckpt:
        save = ckpt.save(1, run.state)
        assert save.snapshotted().done()
        assert all(not stream.queue for stream, _ in run.twin._side_streams.values())


def test_a_snapshot_on_the_device_holds_no_optimizer(run: Run, tmp_path: Path) -> None:
    expected = run.copied()
    with run.open(tmp_path, snapshot="device") as ckpt:
        run.twin.hold()
        save = ckpt.save(1, run.state)
        assert save.snapshotted().done()
        for _ in range(3):
            run.optimizer.step()
        with ckpt.mutating():
            run.note.zero_()
        assert not save.written().done()
        run.twin.release()
        save.result()
        assert run.watch.of(SnapshotTaken)[0].snapshot == "device"
    assert_equal(loaded(tmp_path, 1), expected)


def test_the_copy_on_the_device_is_freed(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="device") as ckpt:
        save = ckpt.save(1, run.state)
        save.result()
        gc.collect()
        assert run.twin.clones
        assert [clone for clone in run.twin.clones if clone() is not None] == []


def test_the_copy_on_the_device_is_freed_after_a_failure_too(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="device", on_error="warn") as ckpt:
        run.twin.hold()
        save = ckpt.save(1, run.state)
        save.cancel()
        run.twin.release()
        assert isinstance(save.exception(), aiockpt.SaveCancelledError)
    gc.collect()
    assert [clone for clone in run.twin.clones if clone() is not None] == []


def test_an_error_that_somebody_keeps_holds_no_copy_on_the_device(run: Run, tmp_path: Path) -> None:
    limits = aiockpt.Limits(io=SMALL, deadlines=aiockpt.Deadlines(slab_s=0.1))
    with run.open(tmp_path, snapshot="device", on_error="warn", limits=limits) as ckpt:
        run.twin.hold()
        error = ckpt.save(1, run.state).exception()
        assert isinstance(error, aiockpt.StorageTimeoutError)
        run.twin.release()
        run.twin.finish()
    gc.collect()
    assert [clone for clone in run.twin.clones if clone() is not None] == []


@pytest.mark.parametrize("snapshot", ["lazy", "device"])
def test_after_a_cancelled_save_the_next_one_goes_on(run: Run, snapshot: Snapshot, tmp_path: Path) -> None:
    expected = run.copied()
    with run.open(tmp_path, snapshot=snapshot) as ckpt:
        run.twin.hold()
        cancelled = ckpt.save(1, run.state)
        cancelled.cancel()
        assert isinstance(cancelled.exception(), aiockpt.SaveCancelledError)
        run.twin.release()
        ckpt.save(2, run.state).result()
        run.optimizer.step()
    assert_equal(loaded(tmp_path, 2), expected)


def test_a_snapshot_without_room_is_lazy(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.twin.spare_bytes = 1000
    expected = run.copied()
    with run.open(tmp_path, snapshot="device") as ckpt, caplog.at_level(logging.WARNING, "aiockpt"):
        ckpt.save(1, run.state)
        run.optimizer.step()
    (taken,) = run.watch.of(SnapshotTaken)
    assert taken.snapshot == "lazy"
    assert "cuda:0 lacks" in taken.reason
    assert taken.reason in caplog.text
    assert run.twin.clones != [] or taken.copied_at_call_bytes > 0
    assert_equal(loaded(tmp_path, 1), expected)


def test_a_clone_that_does_not_fit_makes_it_lazy(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = run.twin.clone, []

    def clone(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return real(tensor, into)

    monkeypatch.setattr(run.twin, "clone", clone)
    expected = run.copied()
    with run.open(tmp_path, snapshot="device") as ckpt:
        ckpt.save(1, run.state)
        run.optimizer.step()
    assert "out of memory" in run.watch.of(SnapshotTaken)[0].reason
    assert_equal(loaded(tmp_path, 1), expected)


def test_the_device_holds_one_copy_at_a_time(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="device") as ckpt:
        run.twin.hold()
        ckpt.save(1, run.state)
        ckpt.save(2, run.state)
        run.twin.release()
    assert [event.snapshot for event in run.watch.of(SnapshotTaken)] == ["device", "lazy"]


def test_a_state_in_host_memory_is_copied_eagerly(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="device") as ckpt:
        save = ckpt.save(1, {"note": run.note})
        assert save.snapshotted().done()
    (taken,) = run.watch.of(SnapshotTaken)
    assert (taken.snapshot, taken.reason) == ("eager", "no tensor is on a device")
    assert not run.twin.used_devices


def test_slabs_are_pinned_once_and_unpinned_in_the_end(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        ckpt.warm_up(run.state).result()
        warm = run.twin.pin_count
        for step in range(5):
            ckpt.save(step, run.state).result()
        pool = ckpt.statistics().pool
        assert 0 < warm == run.twin.pin_count == pool.allocated_bytes // pool.slab_bytes
    assert run.twin.pinned == {}


def test_what_cannot_be_pinned_is_told_once(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.twin.refuses_pins = True
    expected = run.copied()
    with run.open(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "aiockpt"):
        for step in range(3):
            ckpt.save(step, run.state).result()
    assert caplog.text.count("cannot be pinned") == 1
    assert_equal(loaded(tmp_path, 2), expected)


def test_what_no_optimizer_owns_waits_for_nothing(run: Run, tmp_path: Path) -> None:
    expected = run.copied()
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        run.twin.hold()
        waits = run.twin.host_wait_count
        save = ckpt.save(1, run.state)
        run.twin.compute(lambda: run.model[1].running_mean.add_(5))  # type: ignore[operator]
        assert run.twin.host_wait_count - waits <= 1  # the worker's
        run.twin.release()
        save.result()
    assert_equal(loaded(tmp_path, 1), expected)


def test_what_no_optimizer_owns_is_copied_in_turn(tmp_path: Path) -> None:
    run = Run(TwinAccelerator("early"))
    mean = run.model.state_dict()["1.running_mean"]
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        for step in range(3):  # later saves copy into the memory of the first
            run.twin.compute(lambda: mean.add_(5))
            ckpt.save(step, run.state).result()
    assert [loaded(tmp_path, step)["1.running_mean"][0].item() for step in range(3)] == [5, 10, 15]


def test_a_warm_save_compiles_nothing_anew(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path) as ckpt:
        ckpt.save(1, run.state).result()
        program = program_of(ckpt)
        ckpt.save(2, run.state).result()
        assert program_of(ckpt) is program


async def test_an_eager_save_in_a_loop_is_guarded(run: Run, tmp_path: Path) -> None:
    expected = run.copied()
    async with run.open(tmp_path, limits=aiockpt.Limits(io=SMALL, max_in_flight=1)) as ckpt:
        for step in range(2):
            save = ckpt.save(step, run.state)
            run.optimizer.step()
            run.optimizer.step()
            await save
    assert_equal(loaded_elsewhere(tmp_path, 0), expected)


def loaded_elsewhere(place: Path, step: int) -> dict[str, torch.Tensor]:
    """Load on a thread without an event loop."""
    found: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(loaded(place, step)))
    thread.start()
    thread.join()
    return found[0]


def test_the_barrier_by_hand_waits_on_the_host(run: Run, tmp_path: Path) -> None:
    with run.open(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, run.state)
        ckpt.barrier()
        assert save.snapshotted().done()
