"""A twin of `aiockpt.runtime.cuda` without a device: the worst behavior of a device, without chance.

Tensors in host memory are *placed* on devices. The compute and side streams of a device are queues of calls. The twin may
run them at any time, as long as each queue keeps its order and no wait passes an event too early: the freedom of a real
device. So a missing order is not a race that is won most of the time; it yields wrong bytes in every run.

- ``"late"``: side streams run only when a wait requires it, compute streams as far as they can. Code that does not wait
  for a copy, or does not make the optimizer wait for it, fails.
- ``"early"``: the reverse. Code that does not order a copy after the program's own work fails.
- a `random.Random`: in between, another way with every seed.

The program's own work is queued by `TwinAccelerator.compute`. Or it runs directly, such as a real optimizer's step; then
the twin is *immediate*: `DeviceEvent.order_before_compute` returns when that work may run.
"""

from __future__ import annotations

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Condition
from typing import Literal

import torch
from torch import nn

from aiockpt.runtime.accelerator import DeviceEvent

STUCK_S = 60.0
Pace = Literal["late", "early"] | random.Random


class TwinEvent:
    """A point in a queue of the twin."""

    def __init__(self, twin: TwinAccelerator, stream: _Stream) -> None:
        self._twin = twin
        self.stream = stream
        self.reached = False

    def done(self) -> bool:
        return self._twin.query(self)

    def wait(self, timeout_s: float) -> bool:
        return self._twin.wait_for(self, timeout_s)

    def order_before_compute(self) -> None:
        self._twin.order_before_compute(self)


class _Stream:
    """Queued calls and events, in order; an event of another stream must be reached there first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: deque[Callable[[], object] | TwinEvent] = deque()

    def blocked_by(self) -> TwinEvent | None:
        head = self.queue[0]
        return head if isinstance(head, TwinEvent) and head.stream is not self and not head.reached else None

    def step(self) -> None:
        """Run the next item."""
        head = self.queue.popleft()
        if not isinstance(head, TwinEvent):
            head()
        elif head.stream is self:
            head.reached = True


class TwinStream:
    """A side stream of the twin."""

    def __init__(self, twin: TwinAccelerator, stream: _Stream) -> None:
        self._twin = twin
        self._stream = stream

    def follow(self, event: DeviceEvent) -> None:
        assert isinstance(event, TwinEvent)
        self._twin.enqueue(self._stream, event)

    def empty(self, size_bytes: int) -> torch.Tensor:
        memory = torch.full((size_bytes,), 0xA5, dtype=torch.uint8)  # a value unlike that of uninitialised memory
        self._twin.count_scratch(size_bytes)
        weakref.finalize(memory, self._twin.count_scratch, -size_bytes).atexit = False
        return memory

    def enqueue(self, work: Callable[[], object]) -> TwinEvent:
        return self._twin.enqueue(self._stream, work)

    def pin(self, address: int, size_bytes: int) -> None:
        if self._twin.refuses_pins:
            raise RuntimeError("this twin pins nothing")
        assert address not in self._twin.pinned, "pinned twice: CUDA refuses that"
        self._twin.pinned[address] = size_bytes
        self._twin.pin_count += 1

    def unpin(self, address: int) -> None:
        del self._twin.pinned[address]


class TwinAccelerator:
    """Simulated devices; pass it as ``World(accelerator=…)``.

    Args:
        pace: what runs without a wait, and when.
        immediate: whether the program's own work runs directly.

    Attributes:
        pinned: registered host memory, by address; *pin_count*: number of registrations.
        refuses_pins: whether it refuses to pin, as a container with little locked memory does.
        spare_bytes: free memory of a device beside training.
        work_count: pieces of work that side streams received; *host_wait_count*: how often a thread waited for an event.
        scratch_bytes: memory of the side streams; *peak_scratch_bytes*: its maximum.
        clones: copies that were made on devices, as weak references.
    """

    def __init__(self, pace: Pace = "late", *, immediate: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.pin_count = 0
        self.refuses_pins = False
        self.spare_bytes = 1 << 40
        self.work_count = 0
        self.host_wait_count = 0
        self.scratch_bytes = self.peak_scratch_bytes = 0
        self.clones: list[weakref.ref[torch.Tensor]] = []
        self._pace = pace
        self._immediate = immediate
        self._held = False
        self._changed = Condition()
        self._compute: dict[torch.device, _Stream] = {}
        self._side_streams: dict[torch.device, tuple[_Stream, TwinStream]] = {}
        self._homes: dict[int, tuple[torch.device, object]] = {}

    # what tests do

    def place(self, what: torch.Tensor | nn.Module | Iterable[torch.Tensor], device: str = "cuda:0") -> None:
        """Place tensors on *device*, permanently."""
        if isinstance(what, nn.Module):
            what = [*what.parameters(), *what.buffers()]
        for tensor in [what] if isinstance(what, torch.Tensor) else what:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._homes[storage.data_ptr()] = (torch.device(device), storage)

    def compute(self, work: Callable[[], object], device: str = "cuda:0") -> None:
        """Queue *work* on the program's compute stream."""
        self.enqueue(self._compute_stream(torch.device(device)), work)

    def hold(self) -> None:
        """Hold all side streams until `release`; a wait for one of them lasts until then."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Undo `hold`."""
        with self._changed:
            self._held = False
            self._play()
            self._changed.notify_all()

    def finish(self) -> None:
        """Run all queued work, like a synchronisation of all devices."""
        with self._changed:
            for stream in self._streams():
                self._drain(stream)
            self._changed.notify_all()

    @property
    def used_devices(self) -> Collection[torch.device]:
        """The devices that have a side stream."""
        return self._side_streams.keys()

    # what the engine does

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        home = self._homes.get(tensor.untyped_storage().data_ptr())
        return None if home is None else home[0]

    def stream(self, device: torch.device) -> TwinStream:
        with self._changed:
            if device not in self._side_streams:
                stream = _Stream(device)
                self._side_streams[device] = (stream, TwinStream(self, stream))
            return self._side_streams[device][1]

    def now(self, device: torch.device) -> TwinEvent:
        return self._event(self._compute_stream(device))

    def clone(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        device = self.device_of(tensor)
        copy = torch.empty_like(tensor) if into is None else into
        if device is None:
            return copy.copy_(tensor.detach())
        if into is None:
            address = copy.untyped_storage().data_ptr()
            self._homes[address] = (device, None)
            weakref.finalize(copy, self._homes.pop, address, None).atexit = False
            self.clones.append(weakref.ref(copy))
        self.enqueue(self._compute_stream(device), lambda: copy.copy_(tensor.detach()))
        return copy

    def lend(self, device: torch.device, size_bytes: int) -> int:
        return max(0, size_bytes - self.spare_bytes)

    # how time goes by

    def count_scratch(self, more_bytes: int) -> None:
        self.scratch_bytes += more_bytes
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, self.scratch_bytes)

    def _compute_stream(self, device: torch.device) -> _Stream:
        with self._changed:
            return self._compute.setdefault(device, _Stream(device))

    def _streams(self) -> Sequence[_Stream]:
        return [*self._compute.values(), *(stream for stream, _ in self._side_streams.values())]

    def _is_side_stream(self, stream: _Stream) -> bool:
        return stream is not self._compute.get(stream.device)

    def enqueue(self, stream: _Stream, item: Callable[[], object] | TwinEvent) -> TwinEvent:
        with self._changed:
            stream.queue.append(item)
            if self._is_side_stream(stream) and not isinstance(item, TwinEvent):
                self.work_count += 1
            return self._event(stream)

    def _event(self, stream: _Stream) -> TwinEvent:
        with self._changed:
            event = TwinEvent(self, stream)
            stream.queue.append(event)
            self._play()
            return event

    def _play(self) -> None:
        """Run what the pace allows without a wait."""
        if isinstance(self._pace, random.Random):
            for _ in range(self._pace.randrange(6)):
                able = [stream for stream in self._streams() if self._able(stream)]
                if able:
                    self._pace.choice(able).step()
            return
        early = self._pace == "early"
        moved = True
        while moved:
            moved = False
            for stream in self._streams():
                while self._is_side_stream(stream) == early and self._able(stream):
                    stream.step()
                    moved = True

    def _able(self, stream: _Stream) -> bool:
        return bool(stream.queue) and stream.blocked_by() is None and not (self._held and self._is_side_stream(stream))

    def _demand(self, event: TwinEvent) -> bool:
        """Run the work needed to reach *event*; return whether that was possible."""
        while not event.reached:
            if self._held and self._is_side_stream(event.stream):
                return False
            blocking = event.stream.blocked_by()
            if blocking is not None and not self._demand(blocking):
                return False
            event.stream.step()
        return True

    def _drain(self, stream: _Stream) -> None:
        while stream.queue:
            blocking = stream.blocked_by()
            if blocking is not None:
                self._demand(blocking)
            stream.step()

    def query(self, event: TwinEvent) -> bool:
        with self._changed:
            self._play()
            return event.reached

    def wait_for(self, event: TwinEvent, timeout_s: float) -> bool:
        with self._changed:
            self.host_wait_count += 1
            return self._await(event, timeout_s)

    def _await(self, event: TwinEvent, timeout_s: float) -> bool:
        gives_up_s = time.monotonic() + timeout_s
        while not self._demand(event):
            if not self._changed.wait(max(0.0, gives_up_s - time.monotonic())) and time.monotonic() >= gives_up_s:
                return False
        self._changed.notify_all()
        return True

    def order_before_compute(self, event: TwinEvent) -> None:
        with self._changed:
            if self._immediate:
                assert self._await(event, STUCK_S), "a side stream was held for ever"
            else:
                self.enqueue(self._compute_stream(event.stream.device), event)
