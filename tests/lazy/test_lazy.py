"""Lazy saves: the state at the call, whatever the program does before the copy is over."""

import errno
import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import BarrierWaited, Committed, DataWritten, SaveSkipped, SnapshotTaken
from aiockpt.lazy import snapshotter
from aiockpt.lazy.optimizer_owned import OptimizerFinder
from aiockpt.options import MIB
from aiockpt.pipeline import snapshot as copying
from aiockpt.runtime import pending_copies
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.slabs import SlabPool
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.example_counts import examples
from tests.lazy.copy_gate import CopyGate
from tests.seams import promise_of, split_of
from tests.simulated.simulation import SimulatedClock
from tests.watch import Watch, until

SMALL = aiockpt.IO(pool_bytes=64 * 1024, slab_bytes=64 * 1024, block_bytes=64 * 1024, read_bytes=64 * 1024)


class Net(nn.Module):
    """Parameters, some of them frozen, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.last = nn.Linear(256, 8)
        self.teacher = nn.Linear(64, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.99)
        out: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return out


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda some: torch.optim.Adam(some, lr=0.1, foreach=False),
    "adam-fused": lambda some: torch.optim.Adam(some, lr=0.1, fused=True),
    "adamw-foreach": lambda some: torch.optim.AdamW(some, lr=0.1, foreach=True),
    "adamw-fused": lambda some: torch.optim.AdamW(some, lr=0.1, fused=True),
}


class Run:
    """A training run whose state can be copied aside, to be compared with."""

    def __init__(self, optimizer: str = "adamw-foreach") -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.train()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "note": torch.arange(3.0)}

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.randn(16, 64)).square().mean().backward()

    def train(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()

    def copied(self) -> dict[str, Any]:
        """Return what `loaded` must be equal to."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {
                (number, name): held.clone()
                for number, entry in self.optimizer.state_dict()["state"].items()
                for name, held in entry.items()
                if isinstance(held, torch.Tensor)
            },
        }


@pytest.fixture
def run() -> Run:
    return Run()


def equal(one: Any, other: Any) -> bool:
    """Say whether nested dicts of tensors are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def loaded(place: object, step: int, optimizer: str = "adamw-foreach") -> dict[str, Any]:
    run = Run(optimizer)
    with aiockpt.Checkpointer(place) as ckpt:  # type: ignore[arg-type]
        ckpt.load(run.state, step).result()
    return run.copied()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_slow_copy_is_the_state_at_the_call(optimizer: str, tmp_path: Path, gate: CopyGate) -> None:
    run = Run(optimizer)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        before = run.copied()
        save = ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        run.forward_and_backward()
        assert not save.snapshotted().done()
        threading.Timer(0.2, gate.open.set).start()
        run.optimizer.step()
        assert save.snapshotted().done()
        save.result()
    assert equal(loaded(tmp_path, 1, optimizer), before)
    assert not equal(run.copied(), before)


@contextmanager
def removed_hook() -> Iterator[None]:
    assert snapshotter._hook is not None
    snapshotter._hook.remove()
    try:
        yield
    finally:
        snapshotter._hook = register_optimizer_step_pre_hook(snapshotter._before_step)


def test_without_the_hook_the_digests_find_a_torn_save(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with (
        removed_hook(),
        aiockpt.Checkpointer(tmp_path, snapshot="lazy", lazy=aiockpt.Lazy(debug="digest"), on_error="warn") as ckpt,
    ):
        save = ckpt.save(1, run.state)
        run.train()
        gate.open.set()
        error = save.exception()
        assert isinstance(error, aiockpt.TornSnapshotError)
        assert "model.first.weight" in error.tensors
        assert "mutating" in str(error)
        assert ckpt.latest().result() is None


def test_the_digests_find_nothing_in_an_honest_save(run: Run, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", lazy=aiockpt.Lazy(debug="digest")) as ckpt:
        for step in range(3):
            ckpt.save(step, run.state)
            run.train()
        ckpt.wait()
        assert ckpt.latest().result() == 2


def test_one_hook_serves_all_checkpointers(tmp_path: Path) -> None:
    gc.collect()  # those of earlier tests would be forgotten meanwhile
    hooks, known = dict(_global_optimizer_pre_hooks), pending_copies._known
    for number in range(3):
        with aiockpt.Checkpointer(tmp_path / str(number)):
            assert len(pending_copies._known) == len(known) + 1
    assert pending_copies._known == known
    assert dict(_global_optimizer_pre_hooks) == hooks


def test_a_barrier_that_is_dropped_is_forgotten() -> None:
    gc.collect()  # those of earlier tests
    known = pending_copies._known
    dropped = pending_copies.PendingCopies(1)
    assert len(pending_copies._known) == len(known) + 1
    del dropped
    gc.collect()
    assert pending_copies._known == known


def test_hooks_of_others_run_while_a_copy_ends(tmp_path: Path, gate: CopyGate) -> None:
    run, called = Run(), []
    handles = [register_optimizer_step_pre_hook(lambda *_: called.append(1)) for _ in range(3)]
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        ckpt.save(1, run.state)
        threading.Timer(0.2, gate.open.set).start()
        run.optimizer.step()
    for handle in handles:
        handle.remove()
    assert len(called) == 3


def test_an_optimizer_that_is_not_in_the_state_waits_too(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    before = run.copied()["model"]
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {"model": run.model})
        run.forward_and_backward()
        threading.Timer(0.2, gate.open.set).start()
        run.optimizer.step()
        assert save.snapshotted().done()
    assert equal(loaded_model(tmp_path), before)


def loaded_model(place: Path) -> dict[str, torch.Tensor]:
    model = Net()
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.load({"model": model}).result()
    return dict(model.state_dict())


def test_finding_optimizers_breaks_no_tuple_of_another_thread() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    broken: list[BaseException] = []
    found = threading.Event()

    def make_tuples() -> None:
        try:
            while not found.is_set():
                tuple(number for number in range(3000))
        except SystemError as error:  # somebody else had the tuple when it was to grow
            broken.append(error)

    often = sys.getswitchinterval()
    making = threading.Thread(target=make_tuples)
    sys.setswitchinterval(1e-5)
    try:
        making.start()
        for _ in range(20):
            assert any(one is optimizer for one in OptimizerFinder().collect())
    finally:
        sys.setswitchinterval(often)
        found.set()
        making.join()
    assert not broken


def test_an_optimizer_in_backward_waits_at_its_first_step(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    each: dict[Any, Any] = {p: torch.optim.SGD([p], lr=0.1) for p in run.model.parameters() if p.requires_grad}
    for parameter in each:
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())
    before = run.copied()["model"]
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {"model": run.model, "optimizers": {str(n): o for n, o in enumerate(each.values())}})
        threading.Timer(0.2, gate.open.set).start()
        run.forward_and_backward()
        save.result()
    assert equal(loaded_model(tmp_path), before)


def test_an_average_updated_by_hand_is_copied_at_once(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    average = torch.optim.swa_utils.AveragedModel(run.model)
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {**run.state, "average": average})
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.add_(1.0)
        gate.open.set()
        save.result()
        ckpt.load({"average": average}).result()
    assert equal(dict(average.state_dict()), expected)


@pytest.mark.parametrize("skips", [False, True])
def test_a_gradient_scaler_steps_or_skips_as_it_likes(run: Run, skips: bool, tmp_path: Path, gate: CopyGate) -> None:
    scaler = torch.amp.GradScaler("cpu")
    before = run.copied()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {**run.state, "scaler": scaler})
        run.optimizer.zero_grad()
        loss = run.model(torch.randn(16, 64)).square().mean()
        scaler.scale(loss * (float("inf") if skips else 1.0)).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        threading.Timer(0.2, gate.open.set).start()
        scaler.step(run.optimizer)
        scaler.update()
        gate.open.set()
        save.result()
    got = loaded(tmp_path, 1)
    assert equal(got["optimizer"], before["optimizer"])
    assert equal(got["model"]["first.weight"], before["model"]["first.weight"])


def test_a_scheduler_that_steps_at_once_changes_nothing_saved(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {**run.state, "scheduler": scheduler})
        gate.open.set()
        run.optimizer.step()
        scheduler.step()
        save.result()
        ckpt.load({**run.state, "scheduler": scheduler}).result()
    assert scheduler.last_epoch == 0
    assert run.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_stages_come_in_order_though_told_late(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_all = copying.CopyProgram.run

    def copy_and_linger(*arguments: Any, **named: Any) -> None:
        copy_all(*arguments, **named)
        time.sleep(0.3)  # the files are durable long before

    monkeypatch.setattr(copying.CopyProgram, "run", copy_and_linger)
    seen, reached = Watch(), list[str]()
    with aiockpt.Checkpointer(tmp_path, observers=[seen], worker=worker, limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(6, {"x": torch.arange(10)}).result()  # a writer process needs seconds to start
        save = ckpt.save(7, {"x": torch.arange(10)}, snapshot="lazy")
        promise = promise_of(save)
        points: dict[str, Promise[Any]] = {
            "snapshotted": promise.snapshotted,
            "written": promise.written,
            "committed": promise,
        }
        for name, point in points.items():
            point.when_settled(partial(reached.append, name))
        save.result()
    assert reached == ["snapshotted", "written", "committed"]
    if worker == "thread":
        told = [type(event) for event in seen.events if getattr(event, "step", None) == 7]
        assert told.index(SnapshotTaken) < told.index(DataWritten) < told.index(Committed)


def test_copied_bytes_and_waits_of_optimizers_are_told(tmp_path: Path, gate: CopyGate) -> None:
    run, seen, clock = Run(), Watch(), SimulatedClock()
    with aiockpt.Checkpointer(tmp_path, observers=[seen], world=World(clock=clock)) as ckpt:
        ckpt.save(7, run.state, snapshot="lazy")
        assert gate.reached.wait(250)
        clock.advance(3.0)  # in the copy, and after the call
        run.forward_and_backward()
        with gate.open_for_who_waits(after_s=0.2):
            began_s = time.perf_counter()
            run.optimizer.step()
            step_s = time.perf_counter() - began_s
        ckpt.wait()
        ckpt.save(8, run.state).result()
    lazy, eager = seen.of(SnapshotTaken)
    assert (lazy.snapshot, eager.snapshot) == ("lazy", "eager")
    moving = [*run.model.buffers(), *run.model.teacher.parameters(), run.state["note"]]
    assert lazy.copied_at_call_bytes == sum(tensor.nbytes for tensor in moving)
    assert eager.copied_at_call_bytes == 0
    assert (lazy.pause_s, lazy.copy_s) == (0.0, 3.0)
    (waited,) = seen.of(BarrierWaited)
    assert waited.step == 7
    assert 0.19 < waited.seconds <= step_s


def test_the_user_says_what_moves_and_what_does_not(tmp_path: Path, gate: CopyGate) -> None:
    run, seen = Run(), Watch()
    lazy = aiockpt.Lazy(mutable=["model.first"], immutable=["model.teacher", "note"])
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", lazy=lazy, observers=[seen]) as ckpt:
        ckpt.save(1, run.state)
        gate.open.set()
    (taken,) = seen.of(SnapshotTaken)
    moving = [*run.model.buffers(), *run.model.first.parameters()]
    assert taken.copied_at_call_bytes == sum(tensor.nbytes for tensor in moving)


def test_copies_at_the_call_are_made_into_the_same_memory_again(run: Run, tmp_path: Path) -> None:
    gc.collect()  # an optimizer of an earlier test that is freed meanwhile has the owners of this state found anew
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        held: set[int] = set()
        for step in range(3):
            run.forward_and_backward()
            expected = run.copied()["model"]
            ckpt.save(step, {"model": run.model, "optimizer": run.optimizer}).result()
            ckpt.wait()  # so that the copies of then are written again
            held.add(id(split_of(ckpt).copies))
            assert equal(loaded_model(tmp_path), expected)
        assert len(held) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lazy": aiockpt.Lazy(mutable=[""])}, "names no tensor"),
        (
            {"lazy": aiockpt.Lazy(mutable=[3])},  # type: ignore[list-item]
            "names no tensor",
        ),
        ({"snapshot": "lasy"}, "snapshot='lasy'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match=message):
        aiockpt.Checkpointer(tmp_path, **options)


def test_a_snapshot_that_a_call_cannot_mean_is_refused(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(aiockpt.UsageError, match="snapshot='lasy'"):
        ckpt.save(1, {"a": torch.zeros(1)}, snapshot="lasy")  # type: ignore[arg-type]


# ------------------------------------------------------------------ by hand


def test_a_change_by_hand_waits_and_saves_wait_for_its_end(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    before = run.copied()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, run.state)
        threading.Timer(0.2, gate.open.set).start()
        with ckpt.mutating():
            assert save.snapshotted().done()
            with torch.no_grad():
                run.model.first.weight.zero_()
            with pytest.raises(aiockpt.UsageError, match="inside mutating"):
                ckpt.save(2, run.state)
        ckpt.save(2, run.state).result()
    assert equal(loaded(tmp_path, 1), before)
    assert not loaded(tmp_path, 2)["model"]["first.weight"].any()


def test_the_same_in_an_event_loop(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    before = run.copied()

    async def main() -> None:
        async with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
            ckpt.save(1, run.state)
            threading.Timer(0.2, gate.open.set).start()
            with pytest.raises(aiockpt.UsageError, match="event loop"), ckpt.mutating():
                pass
            async with ckpt.mutating():
                with torch.no_grad():
                    run.model.first.weight.zero_()
            save = ckpt.save(2, run.state)
            await ckpt.wait_mutable()
            assert save.snapshotted().done()

    anyio.run(main)
    assert equal(loaded(tmp_path, 1), before)


def test_a_block_that_raises_lets_the_next_save_begin(run: Run, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        with pytest.raises(ZeroDivisionError), ckpt.mutating():
            raise ZeroDivisionError
        ckpt.save(1, run.state).result()


def test_a_load_waits_for_the_snapshot(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, run.state).result()
        run.train()
        before = run.copied()
        ckpt.save(2, run.state, snapshot="lazy")
        threading.Timer(0.2, gate.open.set).start()
        ckpt.load(run.state, 1).result()
    assert equal(loaded(tmp_path, 2), before)


def test_an_eager_save_after_a_lazy_one_is_copied_after_it(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL)) as ckpt:
        lazy = ckpt.save(1, run.state, snapshot="lazy")
        threading.Timer(0.2, gate.open.set).start()
        eager = ckpt.save(2, run.state)
        assert lazy.snapshotted().done()
        assert eager.snapshotted().done()
        eager.result()
    assert equal(loaded(tmp_path, 1), loaded(tmp_path, 2))


# ------------------------------------------------------------------ what moves


def test_a_storage_that_is_resized_meanwhile_is_noticed(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", on_error="warn") as ckpt:
        save = ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        storage = run.model.last.weight.untyped_storage()
        storage.resize_(storage.nbytes() * 2)
        gate.open.set()
        error = save.exception()
        assert isinstance(error, aiockpt.TornSnapshotError)
        assert "model.last.weight" in error.tensors
        assert ckpt.latest().result() is None


def test_memory_that_is_replaced_meanwhile_is_saved_as_it_was(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    before = run.copied()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        run.model.first.weight.data = torch.zeros_like(run.model.first.weight)
        gate.open.set()
    assert equal(loaded(tmp_path, 1), before)


# ------------------------------------------------------------------ full


def test_a_pool_of_one_slab_drains_every_ticket_in_order(run: Run, tmp_path: Path) -> None:
    expected = []
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL, max_in_flight=3)) as ckpt:
        for step in range(12):
            run.train()
            expected.append(run.copied()["optimizer"])
            ckpt.save(step, run.state)
        ckpt.wait()
        assert ckpt.statistics().pool.used_slabs == 0
        assert ckpt.statistics().pool.allocated_bytes == 64 * 1024
    for step in (0, 5, 11):
        assert equal(loaded(tmp_path, step)["optimizer"], expected[step])


def test_more_saves_than_workers_may_wait_without_an_optimizer_step(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        saves = [ckpt.save(step, run.state) for step in range(30)]
        gate.open.set()
        for save in saves:
            save.result()


def test_full_means_skip_where_that_was_asked_for(tmp_path: Path, gate: CopyGate) -> None:
    run, seen = Run(), Watch()
    limits = aiockpt.Limits(io=SMALL, max_in_flight=2, when_full="skip")
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=limits, observers=[seen]) as ckpt:
        first = ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        second = ckpt.save(2, run.state)
        assert isinstance(second.exception(0), aiockpt.CheckpointError)
        gate.open.set()
        first.result()
        ckpt.save(3, run.state).result()
    (skipped,) = seen.of(SaveSkipped)
    assert skipped.step == 2
    assert "staging pool" in skipped.reason


def test_full_means_eager_where_that_was_asked_for(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(
        tmp_path, snapshot="lazy", limits=aiockpt.Limits(when_full="eager", max_in_flight=1)
    ) as ckpt:
        first = ckpt.save(1, run.state)
        with gate.open_for_who_waits():
            second = ckpt.save(2, run.state)
        assert first.done()
        assert second.snapshotted().done()


# ------------------------------------------------------------------ failure


def test_a_stuck_copy_fails_its_save_and_training_goes_on(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    deadlines = aiockpt.Deadlines(slab_s=0.3)
    with aiockpt.Checkpointer(
        tmp_path, snapshot="lazy", limits=aiockpt.Limits(deadlines=deadlines), on_error="warn"
    ) as ckpt:
        save = ckpt.save(1, run.state)
        run.train()
        gate.open.set()
        assert isinstance(save.exception(), aiockpt.StorageError)
        assert ckpt.latest().result() is None
        run.forward_and_backward()
        until_at_rest(ckpt)  # the stuck copy has a slab until it notices, and the next save waits for one as briefly
        ckpt.save(2, run.state).result()


def test_a_cancelled_save_lets_the_optimizer_go(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        save = ckpt.save(1, run.state)
        save.cancel()
        gate.open.set()
        run.train()
        assert isinstance(save.exception(), aiockpt.SaveCancelledError)
        until_at_rest(ckpt)


def test_a_forked_child_is_not_held(run: Run, tmp_path: Path, gate: CopyGate) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        ckpt.save(1, run.state)
        run.forward_and_backward()
        child = os.fork()
        if not child:
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        gate.open.set()


def test_a_lazy_save_of_an_ended_program_is_still_committed(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        run = Run()
        ckpt.save(1, run.state)
    assert equal(loaded(tmp_path, 1), run.copied())


def test_the_pool_says_when_it_is_full() -> None:
    pool = SlabPool(MIB, MIB)
    said = [pool.is_full]
    slab = pool.acquire(1)
    said.append(pool.is_full)
    pool.release(slab)
    assert [*said, pool.is_full] == [False, True, False]


# ------------------------------------------------------------------ many tickets


def until_at_rest(ckpt: aiockpt.Checkpointer) -> None:
    """Wait until all slabs are back and nobody is held: a thread may be about to notice that its save has ended."""

    def rests() -> bool:
        pool = ckpt.statistics().pool
        return pool.used_slabs == pool.waiting == len(ckpt._copies._copying) == 0

    until(rests, "all slabs back, and nobody held", timeout_s=10)


SLOW = aiockpt.IO(pool_bytes=16384, slab_bytes=16384, block_bytes=4096, read_bytes=16384, bandwidth=10e6)
"""One slab, which a state of several windows waits for while the next save begins. Some moves are made with three."""


@dataclass
class Move:
    """What a program does next.

    Attributes:
        which: of the saves so far, where one is cancelled or waited for.
        whole: whether a save is of all of the run, or of its last layer, which fits into one slab.
        refused: what the storage does not do for that save.
    """

    do: Literal["lazy", "eager", "step", "cancel", "wait"]
    which: int = 0
    whole: bool = True
    refused: Literal["", "create", "upload.write"] = ""


def refuse(moves: Sequence[Move]) -> list[Fault]:
    return [
        Fault(do="fail", verb=move.refused, match=f"step-{step:08d}/*", times=None, error=errno.EACCES)
        for step, move in enumerate(moves)
        if move.refused
    ]


def part_of(run: Run, whole: bool) -> dict[str, Any]:
    return run.state if whole else {"last": run.model.last}


def copied_part(run: Run, whole: bool) -> dict[str, Any]:
    copied = run.copied()
    return copied if whole else {name: copied["model"][f"last.{name}"] for name in ("weight", "bias")}


Made = tuple[aiockpt.SaveFuture, Move, dict[str, Any]]
"""A save, what was asked for, and what the state was at its call."""


def play(moves: Sequence[Move], run: Run, ckpt: aiockpt.Checkpointer) -> list[Made]:
    """Make *moves*, while another thread does the steps; return the saves when all of them have ended."""
    saves: list[Made] = []
    stepped: Future[None] | None = None
    with ThreadPoolExecutor(1) as beside:
        for step, move in enumerate(moves):
            if stepped is not None and move.do not in ("cancel", "wait"):
                stepped.result()
            if move.do == "lazy" or move.do == "eager":
                save = ckpt.save(step, part_of(run, move.whole), snapshot=move.do)
                saves.append((save, move, copied_part(run, move.whole)))
            elif move.do == "step":
                stepped = beside.submit(run.train)
            elif saves and move.do == "cancel":
                saves[move.which % len(saves)][0].cancel()
            elif saves:
                saves[move.which % len(saves)][0].exception()
        if stepped is not None:
            stepped.result()
    for save, _, _ in saves:
        save.exception()
    ckpt.wait()
    return saves


def check_ended(save: aiockpt.SaveFuture, refused: bool) -> None:
    assert all(stage.done() for stage in (save, save.snapshotted(), save.written(), save.committed()))
    error = save.exception(0)
    assert error is None or save.cancelled() or (refused and isinstance(error, aiockpt.StorageError)), error


@given(
    moves=st.lists(
        st.builds(
            Move,
            st.sampled_from(["lazy", "lazy", "eager", "step", "cancel", "wait"]),
            st.integers(0, 5),
            st.booleans(),
            st.sampled_from(["", "", "", "create", "upload.write"]),
        ),
        min_size=2,
        max_size=12,
    ),
    in_flight=st.integers(1, 4),
    slabs=st.sampled_from([1, 1, 3]),
)
@example(
    moves=[Move("lazy"), Move("lazy", whole=False), Move("eager", whole=False), Move("step")], in_flight=4, slabs=1
)
@examples(25)
def test_tickets_are_served_in_order(moves: list[Move], in_flight: int, slabs: int) -> None:
    run, seen = Run("sgd"), Watch()
    io = msgspec.structs.replace(SLOW, pool_bytes=slabs * SLOW.slab_bytes)
    place = FaultyBackend(MemoryBackend(f"lazy-{uuid.uuid4()}"), refuse(moves))
    options: Any = {
        "limits": aiockpt.Limits(io=io, max_in_flight=in_flight),
        "on_error": lambda _: None,
        "observers": [seen],
    }
    with aiockpt.Checkpointer(place, **options) as ckpt:
        saves = play(moves, run, ckpt)
        for save, move, _ in saves:
            check_ended(save, refused=bool(move.refused))
        until_at_rest(ckpt)
        assert ckpt.statistics().pool.peak_used_slabs <= slabs
        well = {save.step: (move.whole, expected) for save, move, expected in saves if save.exception(0) is None}
        assert [taken.step for taken in seen.of(SnapshotTaken) if taken.step in well] == list(well)
        for step, (whole, expected) in well.items():
            fresh = Run("sgd")
            ckpt.load(part_of(fresh, whole), step).result()
            assert equal(copied_part(fresh, whole), expected)
