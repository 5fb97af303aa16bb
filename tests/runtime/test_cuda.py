"""The CUDA module under the rules of the runtime: against a model of torch.cuda, on a machine that has no device.

The model knows where contexts come from, which streams are current and what is in them; it knows nothing of time. The
real thing is asked in tests/cuda.
"""

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from aiockpt.runtime.cuda import RESERVE_BYTES, Cuda

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class Model:
    """torch.cuda of one process; each call that reaches the driver makes a context on the thread's current device."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.refuses = False
        self.capturing = False
        self.memory = {"free": 0, "reserved": 0, "peak": 0}
        self.here = threading.local()

    @property
    def device(self) -> int:
        return int(getattr(self.here, "device", 0))

    def set_device(self, index: int) -> None:
        self.here.device = index
        self.contexts.add(index)

    def reach(self, *call: Any) -> None:
        self.contexts.add(self.device)
        self.calls.append((*call, self.device))

    def stream_of(self, index: int) -> Any:
        streams = self.here.__dict__.setdefault("streams", {})
        return streams.setdefault(index, SimpleNamespace(name=f"compute{index}", index=index, wait_event=self.wait))

    def wait(self, event: Any) -> None:
        self.reach("wait", self.stream_of(self.device).name, event)


def make_fakes(model: Model) -> dict[str, Any]:  # noqa: C901  one name of torch.cuda after the other
    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before = model.device
            model.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            model.here.device = self.before  # _maybe_exchange_device: no context where there was none

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.index, self.name = device.index, f"lane{device.index}"
            model.reach("stream", self.name)

        def wait_event(self, event: Any) -> None:
            model.reach("wait", self.name, event)

        def synchronize(self) -> None:
            model.reach("synchronize", self.name)

    class Current:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = model.stream_of(model.device)
            self.there = model.stream_of(self.stream.index)
            model.set_device(self.stream.index)
            model.here.streams[self.stream.index] = self.stream

        def __exit__(self, *_: object) -> None:
            model.here.streams[self.stream.index] = self.there
            model.set_device(self.before.index)  # what torch does, and what makes a context

    class Happening:
        answers: ClassVar[list[bool]] = [False, False, True]

        def record(self, stream: Any) -> None:
            model.reach("record", stream.name)

        def query(self) -> bool:
            model.reach("query")
            return self.answers.pop(0) if self.answers else True

    def register(address: int, size: int, flags: int) -> int:
        model.reach("register", flags)
        if model.refuses:
            return 712
        model.registered[address] = size
        return 0

    def unregister(address: int) -> int:
        model.reach("unregister")
        return 0 if model.registered.pop(address, None) else 713

    return {
        "device": Device,
        "Stream": Stream,
        "stream": Current,
        "Event": Happening,
        "current_stream": lambda device: model.stream_of(device.index),
        "is_current_stream_capturing": lambda: model.capturing,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister),
        "mem_get_info": lambda device: (model.memory["free"], 1 << 40),
        "memory_reserved": lambda device: model.memory["reserved"],
        "max_memory_allocated": lambda device: model.memory["peak"],
    }


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    for name, fake in make_fakes(model).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("empty", "zeros"):
        monkeypatch.setattr(
            torch, name, lambda *size, name=name, **_: model.reach(name, model.stream_of(model.device).name)
        )
    return model


def test_a_worker_thread_leaves_no_context_on_a_device_that_the_state_is_not_on(model: Model) -> None:
    cuda, failures = Cuda(), []

    def work() -> None:
        try:
            mark = cuda.now(SECOND)
            lane = cuda.stream(SECOND)
            lane.follow(mark)
            lane.empty(8)
            copied = lane.enqueue(lambda: model.reach("copy", model.stream_of(model.device).name))
            assert copied.wait(250)
            copied.order_before_compute()
            lane.pin(4096, 4096)
            lane.unpin(4096)
            cuda.lend(SECOND, 1)
            assert model.device == 0
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert model.contexts == {1}
    assert all(call[-1] == 1 for call in model.calls)


def test_work_is_done_in_the_lane_and_marked_behind_it(model: Model) -> None:
    cuda = Cuda()
    lane = cuda.stream(FIRST)
    lane.follow(cuda.now(FIRST))
    lane.empty(8)
    mark = lane.enqueue(lambda: model.reach("copy", model.stream_of(0).name))
    names = [call[:2] for call in model.calls]
    assert names[0] == ("stream", "lane0")
    assert [name for name in names if name[0] != "stream"] == [
        ("record", "compute0"),
        ("wait", "lane0"),
        ("empty", "lane0"),
        ("copy", "lane0"),
        ("record", "lane0"),
    ]
    mark.order_before_compute()
    assert model.calls[-1][:3] == ("wait", "compute0", mark.event)


def test_every_device_has_one_lane(model: Model) -> None:
    cuda = Cuda()
    assert cuda.stream(FIRST) is cuda.stream(FIRST)
    assert cuda.stream(FIRST) is not cuda.stream(SECOND)


def test_after_an_error_nothing_of_the_work_is_under_way(model: Model) -> None:
    def work() -> None:
        raise ValueError("not that")

    lane = Cuda().stream(FIRST)
    with pytest.raises(ValueError, match="not that"):
        lane.enqueue(work)
    assert model.calls[-1][:2] == ("synchronize", "lane0")
    assert model.stream_of(0).name == "compute0"


def test_a_wait_ends_in_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Cuda().now(FIRST)
    monkeypatch.setattr(type(mark.event), "answers", [False] * 10_000)
    assert not mark.done()
    assert not mark.wait(0.002)
    monkeypatch.setattr(type(mark.event), "answers", [])
    assert mark.wait(0)


def test_in_the_capture_of_a_graph_no_stream_waits_for_what_is_outside(model: Model) -> None:
    mark = Cuda().now(FIRST)
    model.capturing = True
    mark.order_before_compute()
    assert model.calls[-1][0] != "wait"


def test_memory_is_pinned_for_every_device_of_the_process(model: Model) -> None:
    Cuda().stream(FIRST).pin(4096, 8192)
    assert model.registered == {4096: 8192}
    assert model.calls[-1][:2] == ("register", 1)


def test_a_refused_registration_leaves_no_error_behind_for_others(model: Model) -> None:
    model.refuses = True
    lane = Cuda().stream(FIRST)
    with pytest.raises(RuntimeError, match="cudaHostRegister answered with error 712"):
        lane.pin(4096, 8192)
    assert model.calls[-1][0] == "zeros"
    with pytest.raises(RuntimeError, match="cudaHostUnregister"):
        lane.unpin(4096)


def test_a_clone_may_take_what_the_peak_of_training_leaves(model: Model) -> None:
    model.memory = {"free": RESERVE_BYTES + 100, "reserved": 1000, "peak": 900}
    cuda = Cuda()
    assert cuda.lend(FIRST, 200) == 0
    assert cuda.lend(FIRST, 201) == 1


def test_the_clones_in_the_peak_are_not_taken_for_training(model: Model) -> None:
    model.memory = {"free": RESERVE_BYTES + 100, "reserved": 1000, "peak": 900}
    cuda = Cuda()
    assert cuda.lend(FIRST, 200) == 0
    model.memory["peak"] = 1100  # training beside the clone
    assert cuda.lend(FIRST, 200) == 0
    model.memory["peak"] = 1150  # training needs more than it did
    assert cuda.lend(FIRST, 200) == 50


def test_nothing_of_cuda_is_asked_for_host_memory(model: Model) -> None:
    held = torch.tensor([1.0, 2.0])
    cuda = Cuda()
    assert cuda.device_of(held) is None
    copy = cuda.clone(held)
    held.add_(1)
    assert copy.tolist() == [1.0, 2.0]
    assert cuda.clone(held, copy) is copy
    assert copy.tolist() == [2.0, 3.0]
    assert model.calls == []
