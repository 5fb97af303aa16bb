"""Slabs that a device fills: neither read nor used again before they are full, whatever fails meanwhile."""

from collections.abc import Callable

import pytest
import torch

from aiockpt.errors import ClosedError, StorageTimeoutError, TornSnapshotError
from aiockpt.pipeline.snapshot import InFlightSlabs
from aiockpt.planning.write_plan import Window
from aiockpt.runtime.slabs import Slab, SlabPool
from tests.simulated.twin_accelerator import TwinAccelerator, TwinEvent

SLAB_BYTES = 4096
WINDOWS = [Window(0, number * SLAB_BYTES, SLAB_BYTES, ()) for number in range(8)]


class WatchfulPool(SlabPool):
    """Notes what was in the first byte of every slab that came back."""

    def __init__(self, slabs: int) -> None:
        super().__init__(SLAB_BYTES, slabs * SLAB_BYTES)
        self.given: list[int] = []

    def release(self, slab: Slab) -> None:
        self.given.append(slab.memory[0])
        slab.memory[0] = 0
        super().release(slab)


class Scene:
    """A device that writes 7 into slabs when somebody waits for it, and whoever gets them."""

    def __init__(self, slabs: int = 4, timeout_s: float = 10) -> None:
        self.twin = TwinAccelerator("late")
        self.stream = self.twin.stream(torch.device("cuda:0"))
        self.pool = WatchfulPool(slabs)
        self.delivered: list[tuple[int, int]] = []
        self.flights = InFlightSlabs(self.pool, self.deliver, timeout_s)

    def deliver(self, window: Window, slab: Slab) -> None:
        self.delivered.append((window.offset // SLAB_BYTES, slab.memory[0]))
        self.pool.release(slab)

    def fill(self, number: int, *, on_device: bool = True) -> None:
        filling = self.flights.begin(WINDOWS[number])
        memory = filling.slab.memory
        if on_device:
            filling.events.append(self.stream.enqueue(lambda: memory.__setitem__(0, 7)))
        else:
            memory[0] = 9
        self.flights.deliver_full()

    def fly(self, count: int, then: Callable[[], object] = lambda: None) -> None:
        with self.flights:
            for number in range(count):
                self.fill(number)
            then()


def test_full_slabs_are_handed_on_in_order() -> None:
    scene = Scene()
    with scene.flights:
        scene.fill(0, on_device=False)
        assert scene.delivered == [(0, 9)]
        scene.fill(1)
        scene.fill(2, on_device=False)
        assert scene.delivered == [(0, 9)]
    assert scene.delivered == [(0, 9), (1, 7), (2, 9)]


def test_one_slab_is_enough() -> None:
    scene = Scene(slabs=1)
    scene.fly(8)
    assert scene.delivered == [(number, 7) for number in range(8)]


def test_after_an_error_slabs_go_back_when_the_device_is_done_with_them_and_nobody_gets_them() -> None:
    scene = Scene()

    def torn() -> None:
        raise TornSnapshotError("torn", ["weight"])

    with pytest.raises(TornSnapshotError):
        scene.fly(3, torn)
    assert scene.pool.given == [7, 7, 7]
    assert scene.delivered == []
    assert scene.pool.statistics().used_slabs == 0


def test_slabs_that_a_device_never_fills_are_lost_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, waits, wait = Scene(timeout_s=0.05), list[float](), TwinEvent.wait

    def noted(event: TwinEvent, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(event, timeout_s)

    monkeypatch.setattr(TwinEvent, "wait", noted)
    scene.twin.hold()
    with pytest.raises(StorageTimeoutError, match="device"):
        scene.fly(4)
    assert scene.pool.given == []
    assert scene.delivered == []
    assert scene.pool.statistics().used_slabs == 4
    assert scene.pool.is_full
    assert sorted(waits) == [0, 0, 0, 0, 0.05]


def test_slabs_of_a_broken_device_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    def broken(*_: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        scene.fly(2, lambda: monkeypatch.setattr(TwinEvent, "wait", broken))
    assert scene.pool.given == []
    assert scene.pool.statistics().used_slabs == 2


def test_without_a_free_slab_in_time_the_snapshot_ends() -> None:
    scene = Scene(slabs=1, timeout_s=0.05)
    held = scene.pool.acquire(1)
    with pytest.raises(StorageTimeoutError, match="slab"):
        scene.fly(1)
    scene.pool.release(held)


def test_a_pool_that_is_closed_meanwhile_ends_it_too() -> None:
    scene = Scene()

    def close() -> None:
        scene.pool.close()
        scene.fill(1)

    with pytest.raises(ClosedError):
        scene.fly(1, close)
    assert scene.pool.given == [7]
