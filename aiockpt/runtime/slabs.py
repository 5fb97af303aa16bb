"""Pool of slabs, in which copied bytes wait for the disk: bounded, faulted in once, and kept.

The first touch of new memory is up to twenty times slower than a copy into warm memory (benchmarks/README.md), so slabs
are touched when they are made and never freed before ``close``. Guarantees:

- The pool never holds more than its ceiling, and every slab it handed out comes back exactly once, in any order.
- ``acquire`` waits, oldest first; a save acquires one slab at a time and passes it on, so one slab is enough for any tensor.
- Slabs are page-aligned and lie in huge pages where the system has them (`aiockpt.runtime.host_memory`): O_DIRECT accepts
  them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Protocol

from aiockpt.errors import ClosedError, StorageTimeoutError
from aiockpt.events import PoolStatistics
from aiockpt.runtime.accelerator import Pins
from aiockpt.runtime.host_memory import Memory, Pages, PrivateMemory, address_of

logger = logging.getLogger("aiockpt")


class Pinning:
    """The pinned memory of one pool; empty before `use`. Thread-safe."""

    # Each piece is registered once, for as long as it lives: that costs milliseconds, too much for each save, and memory
    # that is freed while it is registered would leave the driver a mapping of something else.

    def __init__(self) -> None:
        self._lock = Lock()
        self._pins: Pins | None = None
        self._refused = False
        self._pinned: dict[int, Pins] = {}

    def use(self, pins: Pins) -> None:
        """Pin with *pins* from now on; the first call pins for all devices."""
        if self._pins is None:  # without the lock, which may be held for the milliseconds of a registration
            self._pins = pins

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin memory that is not pinned yet. Where that is refused, log it once, and go on with pageable memory."""
        with self._lock:
            if self._pins is None or self._refused or address in self._pinned:
                return
            try:
                self._pins.pin(address, size_bytes)
                self._pinned[address] = self._pins
            except RuntimeError as error:
                self._refused = True
                logger.warning("staging memory: cannot be pinned; copies from devices hold training longer: %s", error)

    def unpin(self, address: int) -> None:
        """Undo `pin`, if there was one."""
        pins = self._pinned.pop(address, None)
        if pins is not None:
            try:
                pins.unpin(address)
            except (
                RuntimeError
            ) as error:  # the driver ends before us at the interpreter's end, and its mappings with it
                logger.info("staging memory: could not be unpinned: %s", error)


class Slab:
    """A window of pre-faulted, page-aligned memory; *address* is that of its first byte, *number* its place in the pool."""

    __slots__ = ("address", "memory", "number")

    def __init__(self, pages: Pages, number: int) -> None:
        self.memory = memoryview(pages).cast("B")
        self.address = address_of(pages)
        self.number = number


class Lender(Protocol):
    """Where slabs go back to once they are written."""

    def release(self, slab: Slab, /) -> None:
        """Accept *slab* back; once for each time it was lent."""


class SlabPool:
    """Slabs for every save of one engine. Thread-safe.

    Args:
        slab_bytes: size of each slab.
        ceiling_bytes: the most the pool may hold; at least one slab. None lets it `fit` the states it gets.
        memory: where slabs are made; None for memory of this process alone.
    """

    def __init__(self, slab_bytes: int, ceiling_bytes: int | None, memory: Memory | None = None) -> None:
        self.slab_bytes = slab_bytes
        self._memory = memory or PrivateMemory()
        self._numbers = count()
        self._fits = ceiling_bytes is None
        self._ceiling = 1 if ceiling_bytes is None else max(1, ceiling_bytes // slab_bytes)
        self._free: list[Slab] = []
        self._allocated = 0
        self._used = 0
        self._peak_used = 0
        self._waiters: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pinning = Pinning()
        self._lost: list[Slab] = []
        self._new: list[Slab] = []

    @property
    def is_full(self) -> bool:
        """Whether `acquire` would have to wait now."""
        with self._changed:
            return not self._free and self._allocated >= self._ceiling

    def fit(self, slab_count: int, available_bytes: Callable[[], int]) -> None:
        """Raise the ceiling, when none was given, to *slab_count* slabs, at most a quarter of the memory to spare.

        A state grows once, when its optimizer makes its moments with the first step; the pool grows with it.
        """
        if self._fits and slab_count > self._ceiling:
            spare = available_bytes() // self.slab_bytes
            with self._changed:
                allowed = (spare + self._allocated) // 4
                self._ceiling = max(self._ceiling, min(slab_count, allowed))
                self._changed.notify_all()

    def warm_up(self, slab_count: int) -> None:
        """Allocate and touch *slab_count* slabs, as far as the ceiling goes."""
        while self._claim_new(min(slab_count, self._ceiling)):
            slab = self._make()
            self._pinning.pin(slab.address, self.slab_bytes)
            self._add(slab)

    def has(self, slab_count: int) -> bool:
        """Return whether a `warm_up` of so many slabs would make no slab."""
        return self._allocated >= min(slab_count, self._ceiling)

    def has_free(self, slab_count: int) -> bool:
        """Return whether so many slabs are made and free."""
        return len(self._free) >= slab_count

    def make_huge(self) -> None:
        """Move new slabs, in use or not, into huge pages if they are not there yet. Takes milliseconds for each."""
        with self._changed:
            new, self._new = self._new, []
        for slab in new:
            self._memory.make_huge(slab.address, self.slab_bytes)

    @property
    def is_huge(self) -> bool:
        """Whether `make_huge` has nothing to do."""
        return not self._new

    def pin_with(self, pins: Pins) -> None:
        """Pin every slab once from now on: a new one when it is made, an existing one when it is next acquired."""
        self._pinning.use(pins)

    def _claim_new(self, wanted: int) -> bool:
        with self._changed:
            if self._closed or self._allocated >= wanted:
                return False
            self._allocated += 1
            return True

    def _add(self, slab: Slab) -> None:
        with self._changed:
            self._free.append(slab)
            self._changed.notify_all()

    def acquire(self, timeout_s: float) -> Slab:
        """Return a free slab, a new one while the ceiling allows; wait up to *timeout_s* seconds, first come first served.

        Raises:
            StorageTimeoutError: none came free in time.
            ClosedError: the pool was closed meanwhile.
        """
        slab = self._acquire(timeout_s)
        self._pinning.pin(slab.address, self.slab_bytes)
        return slab

    def _acquire(self, timeout_s: float) -> Slab:
        with self._changed:
            waiter = object()
            self._waiters.append(waiter)
            try:
                if not self._changed.wait_for(lambda: self._may_acquire(waiter), timeout_s):
                    raise StorageTimeoutError(
                        f"no staging slab came free within {timeout_s:g} s ({self._used} in use): "
                        "the storage is slower than the saves. Save less often or give a larger IO(pool_bytes=…)."
                    )
                if self._closed:
                    raise ClosedError("the staging pool is closed")
                self._used += 1
                self._peak_used = max(self._peak_used, self._used)
                if self._free:
                    return self._free.pop()
                self._allocated += 1
            finally:
                # The next waiter is the first only from now on, and checks again only when it is notified.
                self._waiters.remove(waiter)
                self._changed.notify_all()
        return self._make_used()

    def _make_used(self) -> Slab:
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._used -= 1
                self._changed.notify_all()
            raise

    def _make(self) -> Slab:
        """Allocate a slab that is already counted, outside the lock: touching the pages takes milliseconds."""
        number = next(self._numbers)
        try:
            slab = Slab(self._memory.map(number, self.slab_bytes), number)
        except BaseException:
            with self._changed:
                self._allocated -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._new.append(slab)
        return slab

    def _may_acquire(self, waiter: object) -> bool:
        mine = self._waiters[0] is waiter
        return self._closed or (mine and (bool(self._free) or self._allocated < self._ceiling))

    def wait(self, enough: Callable[[int], bool], timeout_s: float) -> bool:
        """Wait until *enough* holds of the number of slabs in use, or the pool is closed; return False after *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or enough(self._used), timeout_s)

    def wake(self) -> None:
        """Have all callers of `wait` check again."""
        with self._changed:
            self._changed.notify_all()

    def release(self, slab: Slab) -> None:
        with self._changed:
            self._used -= 1
            if not self._closed:
                self._free.append(slab)
            self._changed.notify_all()
        if self._closed:
            self._pinning.unpin(slab.address)

    def lose(self, slab: Slab) -> None:
        """Keep *slab* out of use for ever: a device may still write into it."""
        with self._changed:
            self._lost.append(slab)

    def statistics(self) -> PoolStatistics:
        with self._changed:
            return PoolStatistics(
                self.slab_bytes,
                self._ceiling * self.slab_bytes,
                self._allocated * self.slab_bytes,
                self._used,
                self._peak_used,
                len(self._waiters),
            )

    def close(self) -> None:
        """Wake all waiting threads and free the memory. Idempotent."""
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
            self._new = []
            self._changed.notify_all()
        for slab in free:
            self._pinning.unpin(slab.address)
        self._memory.close()

    def __repr__(self) -> str:
        seen = self.statistics()
        slabs = seen.allocated_bytes // seen.slab_bytes
        return f"<SlabPool {seen.used_slabs} of {slabs} slabs used, {seen.waiting} waiting>"
