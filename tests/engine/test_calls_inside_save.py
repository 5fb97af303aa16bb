"""A signal handler runs in the middle of a save: what it calls there is refused, or works; nothing waits for itself."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import Committed, SaveStarted, SnapshotTaken
from tests.gates import Gate
from tests.small_run import SMALL, small_checkpointer
from tests.watch import Watch, until

SOON_S = 250
Call = Callable[[aiockpt.Checkpointer], object]

REFUSED: dict[str, Call] = {
    "save": lambda ckpt: ckpt.save(7, {"x": 1}),
    "step": lambda ckpt: ckpt.step(8, {"x": 1}),
    "load": lambda ckpt: ckpt.load({"x": 1}),
    "resume": lambda ckpt: ckpt.resume({"x": 1}),
    "wait": lambda ckpt: ckpt.wait(),
    "close": lambda ckpt: ckpt.close(),
    "warm_up": lambda ckpt: ckpt.warm_up({"x": 1}),
}


class Handler:
    """What a program does at SIGUSR1: *call*."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.ckpt: aiockpt.Checkpointer | None = None
        self.refused: list[aiockpt.UsageError] = []

    def __call__(self, number: int, frame: object) -> None:
        assert self.ckpt is not None
        try:
            self.call(self.ckpt)
        except aiockpt.UsageError as error:
            self.refused.append(error)


@pytest.fixture
def install() -> Iterator[Callable[[Call], Handler]]:
    before = signal.getsignal(signal.SIGUSR1)

    def install(call: Call) -> Handler:
        handler = Handler(call)
        signal.signal(signal.SIGUSR1, handler)
        return handler

    yield install
    signal.signal(signal.SIGUSR1, before)


class ToldMeanwhile:
    """A part of the state; the signal comes while it is read."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"x": torch.arange(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("name", REFUSED)
def test_calls_of_a_handler_while_the_state_is_read(
    tmp_path: Path, name: str, install: Callable[[Call], Handler]
) -> None:
    handler = install(REFUSED[name])
    with small_checkpointer(tmp_path, every=1) as ckpt:
        handler.ckpt = ckpt
        ckpt.save(0, {"part": ToldMeanwhile()}).result(SOON_S)
        assert len(handler.refused) == 1
        assert "inside save(), from a signal handler" in str(handler.refused[0])
        ckpt.save(1, {"x": 1}).result(SOON_S)
        assert [info.step for info in ckpt.steps().result(SOON_S)] == [1, 0]


@pytest.mark.parametrize("name", REFUSED)
def test_calls_of_a_handler_while_a_save_waits(tmp_path: Path, name: str, install: Callable[[Call], Handler]) -> None:
    handler, gate = install(REFUSED[name]), Gate(LocalBackend(str(tmp_path)), "put_new", "*")
    with aiockpt.Checkpointer(gate, limits=aiockpt.Limits(io=SMALL, max_in_flight=1), every=1) as ckpt:
        handler.ckpt = ckpt
        ckpt.save(0, {"x": torch.arange(4)})
        assert gate.reached.wait(SOON_S)
        telling = threading.Timer(0.3, _tell_and_open, (threading.get_ident(), gate, handler))
        telling.start()
        ckpt.save(1, {"x": torch.arange(4)}).result(SOON_S)
        telling.join()
        assert len(handler.refused) == 1
        assert [info.step for info in ckpt.steps().result(SOON_S)] == [1, 0]


def _tell_and_open(thread: int, gate: Gate, handler: Handler) -> None:
    """Send the signal, and let the first save end once its handler is done, or hangs."""
    signal.pthread_kill(thread, signal.SIGUSR1)
    for _ in range(50):
        if handler.refused:
            break
        threading.Event().wait(0.05)
    gate.open_up()


def test_what_a_handler_does_not_wait_for_is_answered(tmp_path: Path, install: Callable[[Call], Handler]) -> None:
    answers: list[object] = []
    handler = install(lambda ckpt: answers.append(ckpt.latest().result(SOON_S)))
    with small_checkpointer(tmp_path) as ckpt:
        handler.ckpt = ckpt
        ckpt.save(0, {"x": 1}).result(SOON_S)
        ckpt.save(1, {"part": ToldMeanwhile()}).result(SOON_S)
    assert answers == [0]


def test_no_more_saves_run_at_once_than_allowed(tmp_path: Path) -> None:
    watch, all_there = Watch(), threading.Barrier(5)
    gate = Gate(LocalBackend(str(tmp_path)), "put_new", "*")

    def save(step: int) -> None:
        all_there.wait(SOON_S)
        ckpt.save(step, {"x": torch.full((1000,), step)})

    with aiockpt.Checkpointer(
        gate, limits=aiockpt.Limits(io=SMALL, max_in_flight=1), observers=[watch], snapshot="eager"
    ) as ckpt:
        threads = [threading.Thread(target=save, args=(step,)) for step in range(5)]
        for thread in threads:
            thread.start()
        assert gate.reached.wait(SOON_S)
        until(lambda: ckpt.statistics().saves_in_flight == 5, "each has called", 30)
        started = len(watch.of(SaveStarted))
        gate.open_up()
        for thread in threads:
            thread.join(SOON_S)
        ckpt.wait()
    assert started == 1
    assert [type(event) for event in watch.events if isinstance(event, SaveStarted | Committed)] == (
        [SaveStarted, Committed] * 5
    )


def test_states_are_copied_in_the_order_of_calls(tmp_path: Path) -> None:
    """The first state has many slabs, the pool two, and none is written before the second save has been called."""
    watch, gate = Watch(), Gate(LocalBackend(str(tmp_path)), "upload.write")
    io = aiockpt.IO(pool_bytes=2 << 14, slab_bytes=1 << 14, block_bytes=4096, read_bytes=1 << 14)
    with aiockpt.Checkpointer(gate, limits=aiockpt.Limits(io=io), observers=[watch], snapshot="eager") as ckpt:
        sizes = (100_000, 10)
        threads = [
            threading.Thread(target=ckpt.save, args=(step, {"x": torch.zeros(size)})) for step, size in enumerate(sizes)
        ]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: ckpt.statistics().saves_in_flight == number, "it has called")  # type: ignore[misc]
            assert gate.reached.wait(SOON_S)
        gate.open_up()
        for thread in threads:
            thread.join(SOON_S)
    assert [taken.step for taken in watch.of(SnapshotTaken)] == [0, 1]


def test_other_threads_save_while_one_saves(tmp_path: Path) -> None:
    gate = Gate(LocalBackend(str(tmp_path)), "put_new", "*")
    with aiockpt.Checkpointer(gate, limits=aiockpt.Limits(io=SMALL, max_in_flight=1)) as ckpt:
        ckpt.save(0, {"x": 1})
        assert gate.reached.wait(SOON_S)
        threads = [threading.Thread(target=ckpt.save, args=(step, {"x": step})) for step in (1, 2)]
        for thread in threads:
            thread.start()
        gate.open_up()
        for thread in threads:
            thread.join(SOON_S)
        ckpt.wait()
        assert {info.step for info in ckpt.steps().result(SOON_S)} == {0, 1, 2}
