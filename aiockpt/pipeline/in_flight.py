"""The slabs that are being filled: delivered in order when their devices have copied, lost when a device never does.

Guarantees:

- A slab is delivered, or given back, only when nothing writes into it any more, whatever fails. If the device never
  answers, it is never used again.
- Slabs that are being filled are no reason to wait for ever: where none is free, they are waited for and delivered, so
  that one slab is enough for any state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from aiockpt.errors import StorageTimeoutError
from aiockpt.planning.write_plan import Window
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.slabs import Slab, SlabPool

Deliver = Callable[[Window, Slab], object]


class InFlightSlab:
    """A slab that is being filled; *events* are those behind its copies."""

    __slots__ = ("events", "slab", "window")

    def __init__(self, window: Window, slab: Slab) -> None:
        self.window = window
        self.slab = slab
        self.events: list[DeviceEvent] = []

    def done(self) -> bool:
        """Say whether it is full."""
        return all(event.done() for event in self.events)


class InFlightSlabs:
    """The slabs of one snapshot that are being filled; each is delivered when it is full, in order.

    Use it as ``with``: leaving waits until nothing is under way. After an error what is under way is not delivered.

    Args:
        timeout_s: how long to wait for a free slab, or for the device.
    """

    def __init__(self, pool: SlabPool, deliver: Deliver, timeout_s: float) -> None:
        self._pool = pool
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._filling: deque[InFlightSlab] = deque()

    def begin(self, window: Window) -> InFlightSlab:
        """Return a free slab to fill for *window*. While there is none, wait for those under way, and deliver them."""
        while self._filling:
            try:
                slab = self._pool.take(0)
                break
            except StorageTimeoutError:
                self._wait_for_first()
        else:
            slab = self._pool.take(self._timeout_s)
        filling = InFlightSlab(window, slab)
        self._filling.append(filling)
        return filling

    def deliver_full(self) -> None:
        """Deliver what is full by now, as far as nothing before it is not."""
        while self._filling and self._filling[0].done():
            self._deliver_first()

    def is_full(self, filling: InFlightSlab, *, wait: bool) -> bool:
        """Say whether *filling* is full; where *wait* says so, when it is."""
        if wait and not all(map(self._wait, filling.events)):
            raise StorageTimeoutError("a device did not fill a slab in time; the snapshot is given up")
        return filling.done()

    def wait(self) -> None:
        """Wait until all are full; they are not delivered yet."""
        for filling in self._filling:
            self.is_full(filling, wait=True)

    def _wait_for_first(self) -> None:
        self.is_full(self._filling[0], wait=True)
        self._deliver_first()

    def _deliver_first(self) -> None:
        full = self._filling.popleft()
        self._deliver(full.window, full.slab)

    def __enter__(self) -> InFlightSlabs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while error is None and self._filling:
                self._wait_for_first()
        finally:
            while self._filling:
                self._drop(self._filling.popleft())

    def _wait(self, event: DeviceEvent) -> bool:
        """Wait for *event*, but for no other one after a device that did not answer."""
        reached = event.wait(self._timeout_s)
        if not reached:
            self._timeout_s = 0.0
        return reached

    def _drop(self, left: InFlightSlab) -> None:
        try:
            copied = all(map(self._wait, left.events))
        except RuntimeError:  # the device is broken, and what it still writes is unknown
            copied = False
        if copied:
            self._pool.give(left.slab)
        else:
            self._pool.lose(left.slab)
