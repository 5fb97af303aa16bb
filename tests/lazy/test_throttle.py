"""The slabs of a lazy copy: few while nothing waits, and all that it needs as soon as something does."""

import mmap
import threading
from collections.abc import Callable

import anyio
import msgspec
import pytest
import torch

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.lazy.throttle import BATCH, Pacing, Throttle
from aiockpt.runtime.host_memory import PrivateMemory
from aiockpt.runtime.slabs import Slab, SlabPool
from tests.gates import Gate
from tests.seams import lazy_of
from tests.small_run import OneLayer
from tests.watch import until

KIB = 1 << 10
SLAB = 64 * KIB
IO = aiockpt.IO(pool_bytes=128 * SLAB, slab_bytes=SLAB, block_bytes=SLAB, read_bytes=SLAB)


def run_of_48_slabs() -> OneLayer:
    return OneLayer(512, bias=False)


def held_place() -> Gate:
    """Return a place whose data files are not written before it is opened up."""
    return Gate(MemoryBackend(), "upload.write")


def known(ckpt: aiockpt.Checkpointer, quiet_s: float) -> None:
    """Have it know a program that leaves its state alone for *quiet_s*, and a fast memory."""
    lazy_of(ckpt)._pacing.stepped(quiet_s)
    lazy_of(ckpt)._pacing.copied(1 << 30, 1.0)


def used(ckpt: aiockpt.Checkpointer) -> int:
    return ckpt._engine.pool.statistics().used_slabs


async def _wait(stage: aiockpt.SaveFuture) -> None:
    await stage.snapshotted()


WAYS_TO_WAIT: dict[str, Callable[[aiockpt.Checkpointer, OneLayer, aiockpt.SaveFuture], object]] = {
    "a step": lambda _, run, __: run.step(),
    "the barrier": lambda ckpt, _, __: ckpt.barrier(),
    "wait_mutable": lambda ckpt, _, __: anyio.run(ckpt.wait_mutable),
    "a wait for the snapshot": lambda _, __, save: save.snapshotted().result(),
    "an await of the snapshot": lambda _, __, save: anyio.run(_wait, save),
    "the next save": lambda ckpt, run, save: (ckpt.save(2, run.state), save.snapshotted().result()),
}


@pytest.mark.parametrize("way", WAYS_TO_WAIT)
def test_few_slabs_go_round_until_somebody_waits(way: str) -> None:
    run, place = run_of_48_slabs(), held_place()
    weight = run.model.weight.detach().clone()
    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        known(ckpt, 1000.0)
        save = ckpt.save(1, run.state)
        until(lambda: used(ckpt) == BATCH, "a turn of slabs in use")
        assert not save.snapshotted().done()
        WAYS_TO_WAIT[way](ckpt, run, save)
        assert save.snapshotted().done()
        assert used(ckpt) >= 48
        place.open_up()
        save.result()
        ckpt.load(run.state, 1).result()
    assert torch.equal(run.model.weight, weight)


def test_a_save_over_before_the_step_copies_nothing() -> None:
    run, place = run_of_48_slabs(), MemoryBackend()
    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        known(ckpt, 1000.0)
        ckpt.save(1, run.state).result()
        seen = ckpt._engine.pool.statistics()
        assert seen.peak_used_slabs <= 2 * BATCH  # of a second turn only where the first one took long
        assert seen.allocated_bytes <= 2 * BATCH * SLAB


@pytest.mark.parametrize("quiet_s", [None, 0.5])
def test_a_copy_is_made_when_a_step_is_near(quiet_s: float | None) -> None:
    run, place = run_of_48_slabs(), held_place()
    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        if quiet_s is not None:
            known(ckpt, quiet_s)
        save = ckpt.save(1, run.state)
        until(save.snapshotted().done, "the snapshot")  # `done` asks, and does not wait
        place.open_up()


def test_a_cancelled_save_is_copied_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    run, place, inside = run_of_48_slabs(), held_place(), threading.Semaphore(0)
    wait = Throttle.wait

    def seen(throttle: Throttle, left_bytes: int, timeout_s: float) -> None:
        inside.release()
        wait(throttle, left_bytes, timeout_s)
        assert inside.acquire(blocking=False)

    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        ckpt.save(1, run.state).snapshotted().result()
        known(ckpt, 600.0)  # who waited for that would hang
        monkeypatch.setattr(Throttle, "wait", seen)
        save = ckpt.save(2, run.state)
        until(lambda: inside._value == 1, "the copy at its leisure")
        save.cancel()
        until(lambda: inside._value == 0, "the end of the copy")
        copied = used(ckpt)
        place.open_up()
        assert save.exception() is not None
        assert copied == 50  # the headers of the two files, weights and the rest, have windows of their own


def test_the_time_between_steps_is_learned() -> None:
    run, place = run_of_48_slabs(), MemoryBackend()
    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        for step in range(3):
            ckpt.save(step, run.state).result()
            run.step()
            run.step()
        assert len(lazy_of(ckpt)._pacing._quiet_s) == 3


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_the_shortest_of_the_last_times_is_expected() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    assert pacing.spare_s(0.0, 0) == 0.0
    pacing.copied(1000, 1.0)
    for seconds in (10.0, 1.0, 20.0, 20.0, 20.0):
        pacing.stepped(seconds)
    assert pacing.spare_s(0.0, 0) == pytest.approx(0.85)
    pacing.stepped(20.0)
    assert pacing.spare_s(2.0, 1000) == pytest.approx(17.0 - 2.0 - 2.0)


class Batches:
    """A throttle whose slabs come back when the test says so; a batch takes as long as it says."""

    def __init__(self, slabs: int = 40) -> None:
        self.clock = Clock()
        self.pool = SlabPool(4 * KIB, slabs * 4 * KIB)
        self.pacing = Pacing(self.clock)
        self.pacing.stepped(1000.0)
        self.pacing.copied(1 << 40, 1.0)
        self.throttle = self.pacing.begin(self.pool, 6)
        self.left_bytes = 1 << 30
        self.used: list[Slab] = []

    def fill(self, timeout_s: float = 30.0) -> None:
        self.throttle.wait(self.left_bytes, timeout_s)
        self.used.append(self.pool.acquire(1))
        self.left_bytes -= 4 * KIB

    def fill_batch(self) -> list[bool]:
        """Fill one batch; return whether more of it was to come after each slab."""
        more = []
        for _ in range(BATCH):
            self.fill()
            more.append(self.throttle.fills_more)
        return more

    def write_batch(self, seconds: float) -> None:
        """Fill a batch of slabs, which are all written *seconds* later."""
        self.fill_batch()
        self.clock.ns += round(seconds * 1e9)
        for slab in self.used:
            self.pool.release(slab)
        self.used.clear()


def test_a_storage_that_stands_still_ends_the_leisure_at_the_deadline() -> None:
    batches = Batches()
    batches.fill_batch()
    assert not batches.throttle.whole
    batches.fill(0.01)
    assert batches.throttle.whole


def test_the_slabs_of_a_turn_wait_for_each_other() -> None:
    assert Batches().fill_batch() == [True] * (BATCH - 1) + [False]


def test_a_turn_begins_when_the_one_before_is_written() -> None:
    batches = Batches()
    batches.fill_batch()
    first, *others = batches.used
    for slab in others:
        batches.pool.release(slab)
    waiting = threading.Thread(target=batches.throttle.wait, args=(batches.left_bytes, 30.0))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    batches.pool.release(first)
    waiting.join(250)
    assert not waiting.is_alive()
    assert not batches.throttle.whole


def test_turns_overlap_when_one_after_the_other_would_take_too_long() -> None:
    slow, fast = Batches(), Batches()
    for batches, seconds in ((slow, 100.0), (fast, 1e-6)):
        batches.write_batch(seconds)
        batches.fill_batch()
    slow.fill(0.01)
    assert not slow.throttle.whole
    fast.fill(0.01)
    assert fast.throttle.whole


def test_a_bandwidth_is_kept() -> None:
    run, place = run_of_48_slabs(), MemoryBackend()
    io = msgspec.structs.replace(IO, bandwidth=10e6)
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=io)) as ckpt:
        result = ckpt.save(1, run.state).result()
    assert result.seconds >= 0.8 * result.bytes / 10e6


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan")])
def test_a_bandwidth_of_nothing_is_refused(bandwidth: float) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"IO\(bandwidth="):
        aiockpt.IO(bandwidth=bandwidth)


# ------------------------------------------------------------------ what goes wrong


def test_no_save_fails_for_slabs_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "no memory")

    run = run_of_48_slabs()
    with aiockpt.Checkpointer("memory://", snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        monkeypatch.setattr(ckpt._engine.pool, "warm_up", refuse)
        ckpt.save(1, run.state).result()
        ckpt.save(2, run.state).result()


def test_the_pool_is_filled_after_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the copy was so slow that few slabs went round: here none seem to be there."""
    run, asked = run_of_48_slabs(), list[int]()
    with aiockpt.Checkpointer("memory://", limits=aiockpt.Limits(io=IO)) as ckpt:
        monkeypatch.setattr(ckpt._engine.pool, "has", lambda _: False)
        monkeypatch.setattr(ckpt._engine.pool, "warm_up", asked.append)
        ckpt.save(1, run.state).result()
    assert len(asked) == 1
    assert asked[0] >= 48


def test_memory_that_cannot_be_had_is_not_counted() -> None:
    class NoMemory(PrivateMemory):
        def map(self, number: int, size_bytes: int) -> mmap.mmap:
            raise MemoryError

    pool = SlabPool(4 * KIB, 40 * KIB, NoMemory())
    with pytest.raises(MemoryError):
        pool.warm_up(2)
    with pytest.raises(MemoryError):
        pool.acquire(1)
    seen = pool.statistics()
    assert (seen.allocated_bytes, seen.used_slabs) == (0, 0)


def test_a_save_whose_task_is_cancelled_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: object) -> None:
        raise anyio.get_cancelled_exc_class()

    run = run_of_48_slabs()
    with aiockpt.Checkpointer("memory://", limits=aiockpt.Limits(io=IO), on_error=lambda _: None) as ckpt:
        monkeypatch.setattr(ckpt._destination, "save", cancelled)
        assert ckpt.save(1, run.state).exception() is not None
        monkeypatch.undo()


def test_a_program_that_steps_no_optimizer_leaves_nothing_behind() -> None:
    with aiockpt.Checkpointer("memory://", snapshot="lazy") as ckpt:
        for step in range(8):
            ckpt.save(step, {"x": torch.ones(3)}).result()
        assert len(ckpt._copies._on_change) <= 4


def test_a_metric_that_nobody_can_write_down_is_refused() -> None:
    with aiockpt.Checkpointer("memory://") as ckpt, pytest.raises(aiockpt.UsageError, match="metrics"):
        ckpt.save(1, {"x": torch.ones(3)}, metrics={"bad\udc80": 1.0})
