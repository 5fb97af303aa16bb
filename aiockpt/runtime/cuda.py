"""Copies beside training on a CUDA device (or ROCm, which torch calls by the same name), with torch.cuda alone.

All use of streams, events and pinning is in this module; CUDA is not initialised before a state has a tensor there.
What it handles, from torch 2.13's source:

- Worker threads begin on device 0. Each call enters ``torch.cuda.device`` first, which on leaving goes back to a device
  only where a context exists; ``torch.cuda.stream`` alone would set device 0 on leaving, and `cudaSetDevice` makes a
  context there (CUDA 12): some hundred MiB on a device that is another rank's.
- A copy to the host is asynchronous only into registered memory, and on the *current* stream of the source's device.
- A refused registration stays behind as the thread's last error, and the next kernel launch would raise it.
- In the capture of a graph nothing runs, so nothing needs to wait; a stream must not wait there for an event of outside.
  Replays call no hook: `Checkpointer.barrier` before them is the program's own duty. Our queries of events on other
  threads would end a capture in its default mode: capture with ``capture_error_mode="thread_local"`` while a save is
  under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch

from aiockpt.runtime.accelerator import DeviceEvent

POLL_S = 0.0002
"""Between polls of an event: the copy of a window of 16 MiB takes about 0.5 ms."""
RESERVE_BYTES = 512 << 20
"""Left free beside a clone and the peak of training, for fragments and for what others take of the device. Not measured."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class CudaEvent:
    """An event that was recorded in a stream of *device*."""

    __slots__ = ("_device", "event")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float) -> bool:
        gives_up_s = time.monotonic() + timeout_s
        # Polled: the event's own `synchronize` has no timeout.
        while not self.done():
            if time.monotonic() >= gives_up_s:
                return False
            time.sleep(POLL_S)
        return True

    def order_before_compute(self) -> None:
        with torch.cuda.device(self._device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaStream:
    """A side stream of *device*."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        with torch.cuda.device(self._device):
            self._stream.wait_event(event.event)

    def empty(self, size_bytes: int) -> torch.Tensor:
        with self._current():  # the allocator returns the memory of a stream to that stream, in its order
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def enqueue(self, work: Callable[[], object]) -> CudaEvent:
        with self._current():
            try:
                work()
            except BaseException:
                self._stream.synchronize()
                raise
            return CudaEvent(self._device, self._stream)

    @contextmanager
    def _current(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def pin(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):
            self._check("cudaHostRegister", _runtime().cudaHostRegister(address, size_bytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._check("cudaHostUnregister", _runtime().cudaHostUnregister(address))

    def _check(self, what: str, answer: Any) -> None:
        if int(answer):
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # the launch clears the thread's last error
            raise RuntimeError(f"{what} answered with error {int(answer)}")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Cuda:
    """The CUDA devices of this process."""

    def __init__(self) -> None:
        self._making = Lock()
        self._streams: dict[torch.device, CudaStream] = {}
        self._lent_bytes: dict[torch.device, int] = {}
        self._training_bytes: dict[torch.device, int] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return tensor.device if tensor.is_cuda else None

    def stream(self, device: torch.device) -> CudaStream:
        with self._making:
            if device not in self._streams:
                self._streams[device] = CudaStream(device)
            return self._streams[device]

    def now(self, device: torch.device) -> CudaEvent:
        with torch.cuda.device(device):
            return CudaEvent(device, torch.cuda.current_stream(device))

    def clone(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            return tensor.detach().clone()
        with torch.no_grad():
            return into.copy_(tensor)

    def lend(self, device: torch.device, size_bytes: int) -> int:
        """Return how many bytes are missing; 0: they may be allocated now, beside the peak of training so far.

        Memory that is free between two steps is not spare: the next forward needs it for activations. So the peak counts,
        less the clones that are in it.
        """
        with torch.cuda.device(device):
            free_bytes, _ = torch.cuda.mem_get_info(device)
            peak_bytes = torch.cuda.max_memory_allocated(device)
            room_bytes = free_bytes + torch.cuda.memory_reserved(device)
        lent_bytes = self._lent_bytes.get(device, 0)
        training_bytes = max(peak_bytes - lent_bytes, self._training_bytes.get(device, 0))
        self._training_bytes[device] = training_bytes
        missing_bytes = max(0, size_bytes + training_bytes + RESERVE_BYTES - room_bytes)
        if not missing_bytes:
            self._lent_bytes[device] = max(lent_bytes, size_bytes)
        return missing_bytes
