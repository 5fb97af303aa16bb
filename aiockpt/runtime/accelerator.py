"""The contract for copies from a device while it computes: streams, events, pinned memory. No device is touched here.

A device runs the work that it is given in *streams*, each in order, beside each other and later than the call. The
program's own work is in its *compute stream*; copies of a snapshot are in a *side stream*, one of ours. *Events* express
what is later than what. Three orders make a snapshot right, and each has a test that fails without it:

- it follows the compute stream as of the call (`Accelerator.now`, `DeviceStream.follow`), or it copies too early;
- the compute stream waits for it before an optimizer steps (`DeviceEvent.order_before_compute`);
- the memory of a copy on the host is not read or reused before its event is *done*.

`aiockpt.runtime.cuda` is the real one, `tests.simulated.twin_accelerator` the twin that runs everything late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """A point in a stream. Any thread."""

    def done(self) -> bool:
        """Return whether the device has passed it. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until the device has passed it, at most *timeout_s* seconds; return whether it has."""
        ...

    def order_before_compute(self) -> None:
        """Make the compute stream of the calling thread wait for it. Does not block the thread."""
        ...


class Pins(Protocol):
    """Makes host memory reachable for a device, so that copies into it run beside everything else."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Register memory, which must stay where it is until `unpin`. Raises RuntimeError where that is refused."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy into that memory may be under way. Raises RuntimeError as `pin`."""
        ...


class DeviceStream(Pins, Protocol):
    """A stream of our own on one device. Any thread."""

    def follow(self, event: DeviceEvent) -> None:
        """Put everything that is enqueued from now on behind *event*."""
        ...

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Return uninitialised bytes on the device, for this stream alone; they may be dropped once its work is enqueued."""
        ...

    def enqueue(self, work: Callable[[], object]) -> DeviceEvent:
        """Enqueue the torch calls of *work* behind all that was enqueued before; return the event behind them.

        When this raises, nothing of *work* is under way.
        """
        ...


class Accelerator(Protocol):
    """The devices of one process. Any thread."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return where *tensor* is; None for host memory, and for devices that have no streams."""
        ...

    def stream(self, device: torch.device) -> DeviceStream:
        """Return the side stream of *device*, always the same."""
        ...

    def now(self, device: torch.device) -> DeviceEvent:
        """Return the event behind all that the calling thread's compute stream was given so far."""
        ...

    def clone(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of *tensor* where it is, made in the order of the compute stream; *into* is overwritten with it."""
        ...

    def lend(self, device: torch.device, size_bytes: int) -> int:
        """Return how many of *size_bytes* are missing for a clone beside what training needs; 0: it may be made now."""
        ...
