"""Copies live tensors into slabs, and blocks training for as short a time as it can.

Guarantees:

- When `CopyProgram.run` returns, every byte was copied: the state may change. The last window is handed on only when no
  tensor has moved meanwhile, so that a torn snapshot is never written whole. Nor is a window copied from where a tensor is
  no more, unless it moves in the middle of that.
- It copies in file order and hands each window on as soon as it is full, so that writing starts while the copy still
  runs, and one slab is enough to drain any state.
- Its cost beside the copy itself is about half a microsecond a tensor: addresses are computed once for as long as the
  state stays where it is, and the loop does nothing but ``memmove``.
- The GIL is let go during the largest move of every fourth window, not with every tensor: getting it back from the
  writers after each of hundreds of moves made the pause 1.5 × a plain copy; never letting it go kept the disk idle.
- Beside the running program (a lazy snapshot) the GIL is let go during every move of 256 KiB and more.
- What is on a device is copied from there into the slabs (`aiockpt.pipeline.device_copy`), beside what the host copies.
- A program refers to its tensors and their storages: their memory cannot be freed while it may be copied, unless somebody
  resizes a storage, which is noticed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from aiockpt.pipeline.address_check import AddressCheck
from aiockpt.pipeline.copy_guard import CopyGuard
from aiockpt.pipeline.device_copy import DeviceCopies, is_row_major, on_host
from aiockpt.pipeline.in_flight import Deliver, InFlightSlabs
from aiockpt.planning.write_plan import HEADER, Copy, FilePlan, SavePlan, Window
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.slabs import SlabPool
from aiockpt.state.shards import TensorShard, are_same

YIELD_FIRST, YIELD_EVERY = 8, 8
"""The GIL is let go in each of the first windows, so that writing starts, and in every eighth from there on. Measured
with 16 MiB windows on 2 cores: more often gains less on the disk than it costs training (benchmarks/README.md)."""
LONG_MOVE_BYTES = 256 << 10
"""What takes longer than getting the GIL back."""
Moves = list[tuple[int, int, int]]
"""(offset in the window, address, bytes) of each copy."""


_gil_memmove = ctypes.PyDLL(None).memmove  # PyDLL keeps the GIL, here for less than a window
_gil_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_gil_memmove.restype = None


class CopyProgram:
    """The copies of one plan, with the addresses of one set of tensors.

    Args:
        plan: what goes where.
        shards: the tensors, in the plan's order. One in host memory that is not row-major is copied there now; such a
            program serves one save only.
        accelerator: knows which tensors are on a device.
    """

    def __init__(self, plan: SavePlan, shards: Sequence[TensorShard], accelerator: Accelerator) -> None:
        self._shards: Sequence[TensorShard] = shards
        devices = [accelerator.device_of(shard.data) for shard in shards]
        self._dense = [
            _dense(shard.data) if device is None else shard.data for shard, device in zip(shards, devices, strict=True)
        ]
        self._headers = [ctypes.create_string_buffer(file.header, len(file.header)) for file in plan.files]
        addresses = [tensor.data_ptr() for tensor in self._dense]
        self._addresses = AddressCheck(shards, self._dense)
        self._in_place = all(dense is shard.data for dense, shard in zip(self._dense, shards, strict=True))
        self._windows: list[tuple[Window, Moves]] = []
        for file, header in zip(plan.files, self._headers, strict=True):
            self._windows += _moves(file, [*addresses, ctypes.addressof(header)], [*devices, None])
        self._sources = [sorted({copy.source for copy in window.copies} - {HEADER}) for window, _ in self._windows]
        self._devices = DeviceCopies(accelerator, plan, self._dense, devices)

    def serves(self, shards: Sequence[TensorShard]) -> bool:
        """Say whether a walk found the very same tensors where they were (see `StateWalker`), with nothing copied aside."""
        return self._in_place and are_same(shards, self._shards)

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

        Blocks the calling thread for the length of the copy. Stops early, without an error, when *wanted* says False: the
        save has failed or was cancelled, and nobody needs the rest.

        Args:
            beside: whether the program runs on meanwhile, and needs the GIL.
            after: how far the compute stream of each device was at the call: copies there begin behind that.
            guard: has the copy wait where nobody waits for it, and compares the state before the last window is delivered.
            begun: what else devices read of the state: the events behind that.
            host_copied: called once nothing is left but what devices will do by themselves, with the events behind that;
                not where no device has a part.

        Raises:
            StorageTimeoutError: no slab came free within *timeout_s* seconds, or a device did not answer.
            TornSnapshotError: a tensor was moved or resized meanwhile; or *guard* has found another change.
        """
        throttle = guard.throttle
        copy = _copy_beside if beside else _copy_fast
        on_devices = self._devices.begin(after)
        last_events = dict(begun)
        left_bytes = sum(window.size for window, _ in self._windows)
        with InFlightSlabs(pool, deliver, timeout_s) as in_flight:
            for number, (window, moves) in enumerate(self._windows):
                if throttle is not None:
                    throttle.wait(left_bytes, timeout_s)
                if not wanted():
                    return
                filling = in_flight.begin(window)
                began_ns = time.perf_counter_ns()
                self._addresses.check(self._sources[number])
                for device, event in on_devices.enqueue(number, filling.slab):
                    filling.events.append(event)
                    last_events[device] = event
                copy(filling.slab.address, moves, number)
                left_bytes -= window.size
                if throttle is not None and in_flight.is_full(filling, wait=not throttle.whole):
                    throttle.copied(window.size, (time.perf_counter_ns() - began_ns) / 1e9)
                if not left_bytes:
                    if guard.compares_bytes:
                        in_flight.wait()
                    self._addresses.check()
                    guard.compare()
                if throttle is None or not throttle.fills_more or not left_bytes:
                    in_flight.deliver_full()
            if last_events:
                host_copied(list(last_events.values()))

    def forget(self) -> None:
        """Let go of the tensors, whoever still holds this program: the traceback of a copy that failed does."""
        self._shards, self._dense, self._windows = (), [], []
        self._addresses.forget()
        self._devices.forget()


def _copy_fast(base: int, moves: Moves, number: int) -> None:
    """Copy one window while training is blocked."""
    if not moves:
        return
    for offset, source, size in moves[:-1]:
        _gil_memmove(base + offset, source, size)
    lets_go = number < YIELD_FIRST or number % YIELD_EVERY == 0
    last_move = ctypes.memmove if lets_go else _gil_memmove
    offset, source, size = moves[-1]
    last_move(base + offset, source, size)


def _copy_beside(base: int, moves: Moves, _: int) -> None:
    """Copy one window while training runs."""
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
    """Return the tensor itself where its memory is what is written, else a host copy in row-major order."""
    if tensor.device.type == "cpu" and is_row_major(tensor):
        return tensor
    return on_host(tensor)
