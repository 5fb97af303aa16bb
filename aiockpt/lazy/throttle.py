"""Throttle of a copy: a few slabs at a time for as long as nothing waits for it.

A copy beside the running program has time until the optimizer steps. If the bytes reach the storage before that, a few
slabs that circulate between the copy and the writers are enough, and no copy of the whole state is ever made
(DataStates-LLM copies all of it; here a block is hashed and written from the slab it was copied to, see
docs/decisions.md#copies-in-the-order-of-the-file). Slabs move in *batches*: a batch is filled, handed on together, and
written before the next one is filled, as long as the copy then ends in time. A thread that copies beside one that hashes,
and a loop that is woken for every slab, would cost training twice as much. Guarantees:

- The first wait for a snapshot ends its throttle at once: what is left is copied as fast as memory allows.
- It also ends by itself before the next step of an optimizer is expected, early enough to copy what is left; before the
  first observed step, a step is expected at any moment.
- It never outlasts the deadline for a slab: a stalled storage is reported as for any save.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aiockpt.runtime.slabs import SlabPool

BATCH = 8
"""Slabs of a batch. Measured with 16 MiB in a slab: with 4 a save takes a third more of training, with 16 as much."""
REMEMBERED = 4
"""Times from a save to the next step; the shortest of them is expected again."""
EARLY = 0.85
"""The fraction of the expected time that a copy may use."""
SLOWER = 2.0
"""How many times longer than at the measured rate a copy may take."""


class Pacing:
    """Records for how long a program leaves its state unchanged after a save, and the rate of its copies. Any thread.

    Args:
        now_ns: the monotonic time.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._quiet_s: deque[float] = deque(maxlen=REMEMBERED)
        self._bytes_per_s: float | None = None

    def begin(self, pool: SlabPool, busy_slabs: int) -> Throttle:
        """Return the throttle of a snapshot that begins now; *busy_slabs* slabs keep all its writers busy."""
        return Throttle(self, pool, busy_slabs, self._now_ns())

    def since_s(self, begun_ns: int) -> float:
        return (self._now_ns() - begun_ns) / 1e9

    def stepped(self, seconds: float) -> None:
        """Note that the state stayed unchanged for *seconds* after a save."""
        self._quiet_s.append(seconds)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Note that *size_bytes* were copied in *seconds*."""
        rate = size_bytes / max(seconds, 1e-6)
        self._bytes_per_s = rate if self._bytes_per_s is None else (3 * self._bytes_per_s + rate) / 4

    def spare_s(self, elapsed_s: float, left_bytes: int) -> float:
        """Return for how much longer *left_bytes* may wait, *elapsed_s* after the save began; 0 when nothing is known."""
        if not self._quiet_s or self._bytes_per_s is None:
            return 0.0
        return EARLY * min(self._quiet_s) - elapsed_s - SLOWER * left_bytes / self._bytes_per_s


class Throttle:
    """Holds the copy of one snapshot back while nothing waits for it.

    Attributes:
        whole: whether it has ended, so that slabs for the whole state may have been acquired at once.
    """

    def __init__(self, pacing: Pacing, pool: SlabPool, busy_slabs: int, begun_ns: int) -> None:
        self._pacing = pacing
        self._pool = pool
        # So many slabs and the next batch together keep all writers busy.
        self._more = max(BATCH, busy_slabs - BATCH)
        self._begun_ns = begun_ns
        self._left_of_batch = 0
        self._batch: tuple[float, int] | None = None
        self._bytes_per_s: float | None = None
        self.whole = False

    def stepped(self) -> None:
        """Note that the state is about to change, for the first time since the save. Any thread."""
        self._pacing.stepped(self._elapsed_s())

    def end(self) -> None:
        """End the throttle: a caller waits for the copy. Any thread; idempotent."""
        if not self.whole:
            self.whole = True
            self._pool.wake()

    @property
    def fills_more(self) -> bool:
        """Whether the next slab belongs to the same batch, so that those that are full can wait for it."""
        return self._left_of_batch > 0 and not self.whole

    def wait(self, left_bytes: int, timeout_s: float) -> None:
        """Wait until a slab is worth filling, *left_bytes* being left to copy; *timeout_s* seconds at most."""
        if self.whole:
            return
        if self._left_of_batch:
            self._left_of_batch -= 1
            return
        elapsed_s = self._elapsed_s()
        spare_s = self._pacing.spare_s(elapsed_s, left_bytes)
        most = 0 if self._ends_in(spare_s, left_bytes) else self._more
        if spare_s <= 0 or not self._pool.wait(lambda used: self.whole or used <= most, min(spare_s, timeout_s)):
            self.whole = True
            return
        self._begin_batch(left_bytes)

    def _begin_batch(self, left_bytes: int) -> None:
        now_s = self._elapsed_s()
        if self._batch is not None:
            begun_s, bytes_then = self._batch
            self._bytes_per_s = (bytes_then - left_bytes) / max(now_s - begun_s, 1e-6)
        self._batch = now_s, left_bytes
        self._left_of_batch = BATCH - 1

    def _ends_in(self, seconds: float, left_bytes: int) -> bool:
        """Return whether batch after batch writes *left_bytes* in *seconds*; True, for want of a rate, before the second."""
        return self._bytes_per_s is None or left_bytes <= seconds * self._bytes_per_s

    def _elapsed_s(self) -> float:
        return self._pacing.since_s(self._begun_ns)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Note that a slab of *size_bytes* was filled in *seconds*."""
        self._pacing.copied(size_bytes, seconds)
