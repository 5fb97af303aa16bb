"""The copy of live tensors into slabs, which blocks training for as short a time as it can.

Guarantees:

- When `CopyProgram.run` returns, every byte was copied, if it was *wanted* to the end: the state may change. The last window
  is delivered only when no tensor has moved meanwhile, so a torn snapshot is never written whole; nor is one copied from
  the old address of a tensor, unless the tensor moves during that very copy.
- It copies in file order and delivers each window as soon as it is full, so that writing starts while the copy still
  runs, and one slab is enough to drain any state.
- Where the caller waits, the state is large and on the host, its slabs are free and there are several processors, some
  threads share the copy, and the windows are delivered when all are full: a copy of 512 MiB beside its writers took 1.5 ×
  a `memmove` on two processors that are threads of one core, a shared one 0.8 to 1.0 ×. (Not torch's threads: those of a
  forked process hang, and under a mode of fake tensors torch copies nothing.)
- The overhead is about half a microsecond a tensor: addresses are computed once for as long as no tensor moves, and the
  loop does nothing but ``memmove``.
- The GIL is released during the largest move of the first 8 windows and every eighth, not with every tensor: reacquiring
  it from the writers after each of hundreds of moves made the pause 1.5 × a plain copy; never releasing it idled the disk.
- Beside the running program (a lazy snapshot) the GIL is released during every move of 256 KiB and more.
- A tensor on a device is copied from there into the slabs (`aiockpt.pipeline.device_copy`), beside the host's copies.
- A program refers to its tensors and their storages: their memory cannot be freed while it may be copied, unless a
  storage is resized, which is noticed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import ne

import torch

from aiockpt.errors import StorageTimeoutError, TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.pipeline.copy_guard import CopyGuard
from aiockpt.pipeline.device_copy import DeviceCopies, is_row_major, on_host
from aiockpt.planning.write_plan import HEADER, Copy, FilePlan, SavePlan, Window
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.limits import Threads, open_threads
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.state.shards import TensorShard

# The slabs that are being filled: delivered in order when their devices have copied, lost when a device never answers.
#
# Guarantees:
#
# - A slab is delivered, or returned, only when nothing writes into it any more, whatever fails. If the device never
#   answers, the slab is never used again.
# - Slabs that are being filled cause no deadlock: where no slab is free, they are waited for and delivered, so that one
#   slab is enough for any state.


Deliver = Callable[[Window, Slab], object]


class InFlightSlab:
    """A slab that is being filled; *events* are those behind its copies."""

    __slots__ = ("events", "slab", "window")

    def __init__(self, window: Window, slab: Slab) -> None:
        self.window = window
        self.slab = slab
        self.events: list[DeviceEvent] = []

    def done(self) -> bool:
        """Return whether it is full."""
        return all(event.done() for event in self.events)


class InFlightSlabs:
    """The slabs of one snapshot that are being filled; each is delivered when it is full, in order.

    Use it as ``with``: the exit waits until nothing is under way. After an error the slabs under way are not delivered.

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
                slab = self._pool.acquire(0)
                break
            except StorageTimeoutError:
                self._wait_for_first()
        else:
            slab = self._pool.acquire(self._timeout_s)
        filling = InFlightSlab(window, slab)
        self._filling.append(filling)
        return filling

    def deliver_full(self) -> None:
        """Deliver the slabs that are full by now, up to the first that is not."""
        while self._filling and self._filling[0].done():
            self._deliver_first()

    def is_full(self, filling: InFlightSlab, *, wait: bool) -> bool:
        """Return whether *filling* is full; with *wait*, wait until it is."""
        if wait and not all(map(self._wait, filling.events)):
            raise StorageTimeoutError("a device did not fill a slab in time; the snapshot was aborted")
        return filling.done()

    def wait(self) -> None:
        """Wait until all are full; they are not delivered yet."""
        for filling in self._filling:
            self.is_full(filling, wait=True)

    def _wait_for_first(self) -> None:
        self.is_full(self._filling[0], wait=True)
        self._deliver_first()

    def _deliver_first(self) -> None:
        # Taken out first: when `deliver` raises, the slab may be in use elsewhere, and `__exit__` must not return it.
        full = self._filling.popleft()
        self._deliver(full.window, full.slab)

    def __enter__(self) -> InFlightSlabs:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            while failed is None and self._filling:
                self._wait_for_first()
        finally:
            while self._filling:
                self._drop(self._filling.popleft())

    def _wait(self, event: DeviceEvent) -> bool:
        """Wait for *event*; once a device did not answer in time, no later event is waited for."""
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
            self._pool.release(left.slab)
        else:
            self._pool.lose(left.slab)


# Comparison of the addresses of tensors: a storage that was resized lies elsewhere, and so does a tensor that was moved.
#
# A storage that is freed and allocated again at the same address is not detected. A check costs some ten nanoseconds a
# tensor (all loops are C code).


_pointer = torch.Tensor.data_ptr


class AddressCheck:
    """Stores the addresses of tensors, and refers to these and their storages, so that no other tensor can be there.

    Args:
        shards: supply the names.
        tensors: those with the bytes; None uses the data of *shards*.
    """

    def __init__(self, shards: Sequence[TensorShard], tensors: Sequence[torch.Tensor] | None = None) -> None:
        self._names = [shard.name for shard in shards]
        self._tensors = [shard.data for shard in shards] if tensors is None else tensors
        self._pointers = list(map(_pointer, self._tensors))

    def check(self, some: Sequence[int] | None = None) -> None:
        """Compare the addresses of *some* by their numbers, or of all.

        Raises:
            TornSnapshotError: tensors have moved; they are named.
        """
        if some is None:
            if list(map(_pointer, self._tensors)) == self._pointers:
                return
            some = range(len(self._tensors))
        found, known = map(_pointer, map(self._tensors.__getitem__, some)), map(self._pointers.__getitem__, some)
        moved = list(compress(some, map(ne, found, known)))
        if not moved:
            return
        names = [self._names[number] for number in moved]
        raise TornSnapshotError(
            f"{list_names(names)} moved, or changed in size, while the snapshot was copied: nothing was published. Change "
            "tensors inside `with ckpt.mutating():`, or save with snapshot='eager'.",
            names,
        )


YIELD_FIRST, YIELD_EVERY = 8, 8
"""The GIL is released in each of the first windows, so that writing starts, and in every eighth from there on. Measured
with 16 MiB windows on 2 cores: more releases gain less on the disk than they cost training (benchmarks/README.md)."""
COPY_THREADS = 4
"""The most threads that share a copy: so many use the whole bandwidth of the memory."""
SHARED_BYTES = 32 << 20
"""A copy of less is not worth starting threads for: it takes 5 ms."""
PAGE_BYTES = 4096
LONG_MOVE_BYTES = 256 << 10
"""A larger move takes longer than reacquiring the GIL."""
Moves = list[tuple[int, int, int]]
"""(offset in the window, address, bytes) of each copy."""


_gil_memmove = ctypes.PyDLL(None).memmove  # PyDLL keeps the GIL, here for less than a window
_gil_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_gil_memmove.restype = None


class CopyProgram:
    """The copies of one plan, with the addresses of one set of tensors.

    Args:
        plan: what goes where.
        shards: the tensors, in the plan's order. One in host memory that is not row-major is copied there now.
        accelerator: knows which tensors are on a device.

    Attributes:
        in_place: whether no tensor was copied first, so that the next save of the very same shards may reuse the program.
    """

    def __init__(self, plan: SavePlan, shards: Sequence[TensorShard], accelerator: Accelerator) -> None:
        self.plan = plan
        devices = [accelerator.device_of(shard.data) for shard in shards]
        self._dense = [
            _dense(shard.data) if device is None else shard.data for shard, device in zip(shards, devices, strict=True)
        ]
        # Kept, and of the header's very length (no NUL is added): the copies read them by address.
        self._headers = [ctypes.create_string_buffer(file.header, len(file.header)) for file in plan.files]
        addresses = [tensor.data_ptr() for tensor in self._dense]
        self._addresses = AddressCheck(shards, self._dense)
        self.in_place = all(dense is shard.data for dense, shard in zip(self._dense, shards, strict=True))
        self._windows: list[tuple[Window, Moves]] = []
        for file, header in zip(plan.files, self._headers, strict=True):
            self._windows += _moves(file, [*addresses, ctypes.addressof(header)], [*devices, None])
        self._sources = [sorted({copy.source for copy in window.copies} - {HEADER}) for window, _ in self._windows]
        self._devices = DeviceCopies(accelerator, plan, self._dense, devices) if any(devices) else None

    @cached_property
    def _shares(self) -> list[list[Moves]]:
        """The copies of each window, a list for each thread that may share them."""
        return [_share(moves, min(COPY_THREADS, _processor_count())) for _, moves in self._windows]

    def run(
        self,
        pool: SlabPool,
        deliver: Deliver,
        *,
        wanted: Callable[[], bool],
        timeout_s: float,
        beside: bool = False,
        after: Sequence[tuple[torch.device, DeviceEvent]] = (),
        guard: CopyGuard,
        begun: Mapping[torch.device, DeviceEvent] = {},
        host_copied: Callable[[Sequence[DeviceEvent]], object] = lambda _: None,
    ) -> None:
        """Copy window after window into slabs of *pool*, and *deliver* each full one.

        Blocks the calling thread for the length of the copy. Stops early, without an error, when *wanted* returns False:
        the save has failed or was cancelled, and the rest is not needed.

        Args:
            beside: whether the program runs on meanwhile, and needs the GIL.
            after: the position of each device's compute stream at the call: copies there begin behind it.
            guard: throttles a copy that no caller waits for; compares the state before the last window is delivered.
            begun: the events behind all other reads of the state by devices.
            host_copied: called when only enqueued work of devices is left, with the events behind that; not called where
                no device has a part.

        Raises:
            StorageTimeoutError: no slab became free within *timeout_s* seconds, or a device did not answer.
            TornSnapshotError: a tensor was moved or resized meanwhile; or *guard* has found another change.
        """
        throttle = guard.throttle
        on_devices = None if self._devices is None else self._devices.begin(after)
        last_events = dict(begun)
        left_bytes = sum(window.size for window, _ in self._windows)
        alone = not beside and on_devices is None and left_bytes >= SHARED_BYTES and pool.has_free(len(self._windows))
        helpers = min(COPY_THREADS, _processor_count()) - 1 if alone else 0
        with InFlightSlabs(pool, deliver, timeout_s) as in_flight, open_threads(helpers, "aiockpt-copy") as threads:
            for number, (window, moves) in enumerate(self._windows):
                if throttle is not None:
                    throttle.wait(left_bytes, timeout_s)
                # After that wait, in which the save may have ended.
                if not wanted():
                    return
                filling = in_flight.begin(window)
                # Not before the wait for a slab: the throttle needs the rate of the copy itself.
                began_ns = time.perf_counter_ns()
                # After all waits, directly before the reads: tensors may have moved meanwhile.
                self._addresses.check(self._sources[number])
                # Devices first: they copy while the host does.
                for device, event in () if on_devices is None else on_devices.enqueue(number, filling.slab):
                    filling.events.append(event)
                    last_events[device] = event
                if beside:
                    _copy_beside(filling.slab.address, moves, number)
                elif threads is not None:
                    _copy_together(threads, filling.slab.address, self._shares[number])
                else:
                    _copy_fast(filling.slab.address, moves, number)
                left_bytes -= window.size
                # While throttled, devices are waited for: else the time would be that of enqueuing their copies.
                if throttle is not None and in_flight.is_full(filling, wait=not throttle.whole):
                    throttle.copied(window.size, (time.perf_counter_ns() - began_ns) / 1e9)
                if not left_bytes:
                    if guard.compares_bytes:
                        in_flight.wait()
                    self._addresses.check()
                    guard.compare()
                if not left_bytes or not (threads or (throttle is not None and throttle.fills_more)):
                    in_flight.deliver_full()
            # Before the exit, which waits for devices: a step only has to be ordered behind these events.
            if last_events:
                host_copied(list(last_events.values()))


def _processor_count() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _copy_together(threads: Threads, base: int, shares: Sequence[Moves]) -> None:
    """Copy one window while training is blocked and no window is being written, a share on each thread."""
    others = [threads.submit(_copy_beside, base, share, 0) for share in shares[1:]]
    _copy_beside(base, shares[0], 0)
    for one in others:
        one.result()


def _share(moves: Moves, count: int) -> list[Moves]:
    """Cut *moves* into *count* lists of about as many bytes; a long one between two of its pages."""
    whole = sum(size for _, _, size in moves)
    shares: list[Moves] = [[]]
    done = 0
    for offset, source, size in moves:
        taken = 0
        while taken < size:
            left = max(whole * len(shares) // count - done, 0)
            part = size - taken if len(shares) == count else min(size - taken, left // PAGE_BYTES * PAGE_BYTES)
            if part:
                shares[-1].append((offset + taken, source + taken, part))
            taken, done = taken + part, done + part
            if taken < size:
                shares.append([])
    return shares


def _copy_fast(base: int, moves: Moves, number: int) -> None:
    """Copy one window while training is blocked and other windows are being written."""
    if not moves:
        return
    for offset, source, size in moves[:-1]:
        _gil_memmove(base + offset, source, size)
    lets_go = number < YIELD_FIRST or number % YIELD_EVERY == 0
    last_move = ctypes.memmove if lets_go else _gil_memmove
    offset, source, size = moves[-1]
    last_move(base + offset, source, size)


def _copy_beside(base: int, moves: Moves, _: int) -> None:
    """Copy one window, or a share of it, while training or another thread runs."""
    for offset, source, size in moves:
        (_gil_memmove if size < LONG_MOVE_BYTES else ctypes.memmove)(base + offset, source, size)


def _moves(
    file: FilePlan, addresses: Sequence[int], devices: Sequence[torch.device | None]
) -> list[tuple[Window, Moves]]:
    """Return the host's copies of one file, the largest of each window last; the header is the last source (−1)."""
    assert HEADER == -1
    return [
        (
            window,
            [
                (copy.window_offset, addresses[copy.source] + copy.source_offset, copy.size)
                for copy in sorted(window.copies, key=_size)
                if devices[copy.source] is None
            ],
        )
        for window in file.windows
    ]


def _size(copy: Copy) -> int:
    return copy.size


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself where its memory is row-major, else a host copy in row-major order."""
    if tensor.device.type == "cpu" and is_row_major(tensor):
        return tensor
    return on_host(tensor)
