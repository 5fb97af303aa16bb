"""Which slabs are being filled, and when are they full? In order, handed on when a device says so, lost when it never does.

Guarantees:

- A slab is delivered, or given back, only when nothing writes into it any more, whatever fails. If the device never
  answers, it is never used again.
- Slabs that are being filled are no reason to wait for ever: where none is free, they are waited for and handed on, so
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
    """A slab that is being filled; *marks* are those of its copies."""

    __slots__ = ("marks", "slab", "window")

    def __init__(self, window: Window, slab: Slab) -> None:
        self.window = window
        self.slab = slab
        self.marks: list[DeviceEvent] = []

    def done(self) -> bool:
        """Say whether it is full."""
        return all(mark.done() for mark in self.marks)


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
        self._under_way: deque[InFlightSlab] = deque()

    def begin(self, window: Window) -> InFlightSlab:
        """Return a free slab to fill for *window*. While there is none, wait for those under way, and hand them on."""
        while self._under_way:
            try:
                slab = self._pool.take(0)
                break
            except StorageTimeoutError:
                self._land_first()
        else:
            slab = self._pool.take(self._timeout_s)
        flight = InFlightSlab(window, slab)
        self._under_way.append(flight)
        return flight

    def hand_on(self) -> None:
        """Deliver what is full by now, as far as nothing before it is not."""
        while self._under_way and self._under_way[0].done():
            self._deliver_first()

    def fill(self, flight: InFlightSlab, *, anyway: bool) -> bool:
        """Return whether *flight* is full; wait for that when *anyway*."""
        if anyway and not all(map(self._wait, flight.marks)):
            raise StorageTimeoutError("a device did not fill a slab in time; the snapshot is given up")
        return flight.done()

    def wait(self) -> None:
        """Wait until all are full; they are not handed on yet."""
        for flight in self._under_way:
            self.fill(flight, anyway=True)

    def _land_first(self) -> None:
        self.fill(self._under_way[0], anyway=True)
        self._deliver_first()

    def _deliver_first(self) -> None:
        flight = self._under_way.popleft()
        self._deliver(flight.window, flight.slab)

    def __enter__(self) -> InFlightSlabs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while error is None and self._under_way:
                self._land_first()
        finally:
            while self._under_way:
                self._drop(self._under_way.popleft())

    def _wait(self, mark: DeviceEvent) -> bool:
        """Wait for *mark*, but for no other one after a device that did not answer."""
        reached = mark.wait(self._timeout_s)
        if not reached:
            self._timeout_s = 0.0
        return reached

    def _drop(self, flight: InFlightSlab) -> None:
        try:
            landed = all(map(self._wait, flight.marks))
        except RuntimeError:  # the device is broken, and what it still writes is unknown
            landed = False
        if landed:
            self._pool.give(flight.slab)
        else:
            self._pool.lose(flight.slab)
