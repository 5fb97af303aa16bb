"""Copies of states beside the program: where they are, but for what may change there; or from a copy on the device.

An eager save inside a running event loop is one of these, too: where its copy would hold the loop up (a large state, or one
that must wait for something) it is made on a worker, else in the call.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiockpt.engine.snapshotter import Capture
from aiockpt.lazy.mutability import Mutability
from aiockpt.lazy.state_guard import DigestCheck, StateGuard
from aiockpt.lazy.throttle import Pacing, Throttle
from aiockpt.options import MIB, Options, Snapshot
from aiockpt.pipeline.device_copy import StateDevices
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.loop import Mutex, refuse_on_loop_thread, runs_event_loop
from aiockpt.runtime.pending_copies import PendingCopies, pending_copies
from aiockpt.runtime.slabs import SlabPool
from aiockpt.state.shards import ShardedState

# The hook: while a snapshot is copied on another thread, every optimizer of the process waits until the *whole* state is
# copied. What devices copy by themselves blocks no thread: the compute stream waits for them instead. The hook stays for the
# life of the process: optimizers walk torch's hooks without a lock, and one that is added or removed meanwhile makes
# ``step()`` raise on another thread. While nothing is copied it costs a step less than a microsecond. A save inside a step
# (its closure, a hook of it) does not block that step: our hook has been passed, which the frames of the caller show.
# What else waits for a copy is in `aiockpt.runtime.pending_copies`.

_installing = Mutex()
_hook: RemovableHandle | None = None


def install_hook() -> None:
    """Have every step of every optimizer of this process wait for what is being copied. Idempotent."""
    global _hook
    with _installing:
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    for copies in pending_copies():
        _order_step(copies)


def _order_step(copies: PendingCopies) -> None:
    """Let no step that the calling thread begins now overtake a copy; block only for what the host has left to copy."""
    copies.tell_change()
    for copy in copies.copying:
        refuse_on_loop_thread("an optimizer's step while a snapshot is being copied")
        copies.wait_for(copy, copy.host_copied)
        if copy.host_copied.is_settled:
            for event in copy.host_copied.value:
                event.order_before_compute()
    copies.recheck()


_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""Of what torch wraps every optimizer's step in: it calls the hooks, then the step."""


def in_optimizer_step() -> bool:
    """Return whether the calling thread is inside the step of an optimizer of torch: in its closure, or in a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


logger = logging.getLogger("aiockpt")


class Taken(msgspec.Struct, frozen=True):
    """A snapshot as it can be had: of which state, how, and why not as it was asked for."""

    state: ShardedState
    snapshot: Snapshot
    reason: str = ""


class DeviceCloner:
    """Copies whole states on their devices, in the call, in the order of the compute streams; no optimizer waits."""

    # There is one such copy at a time, and none where the device has no room beside the peak of training: training keeps the
    # memory that it needs. Then the snapshot is lazy, and the log says why. What is in host memory is copied in the call as
    # well; a state that lies entirely there is copied eagerly.

    def __init__(self, accelerator: Accelerator, devices: StateDevices) -> None:
        self._accelerator = accelerator
        self._devices = devices

    def clone(self, walked: ShardedState, *, busy: bool) -> Taken:
        """Copy *walked* on its devices, if that is possible.

        Args:
            busy: whether the last such copy is still needed.
        """
        sizes = self._devices.sizes(walked.tensors)
        if not sizes:
            return Taken(walked, "eager", "no tensor is on a device")
        reason = "the last copy on the device is still on its way to the host" if busy else self._why_not(sizes)
        if not reason:
            try:
                return Taken(self._clone(walked), "device")
            except torch.OutOfMemoryError as error:
                reason = f"the device has no memory for a copy: {str(error).partition('.')[0]}"
        logger.warning("the snapshot is lazy: %s", reason)
        return Taken(walked, "lazy", reason)

    def _why_not(self, sizes: Mapping[torch.device, int]) -> str:
        for device, size_bytes in sizes.items():
            missing_bytes = self._accelerator.lend(device, size_bytes)
            if missing_bytes:
                return f"{device} lacks {missing_bytes:,} of {size_bytes:,} bytes for a copy beside what training needs"
        return ""

    def _clone(self, walked: ShardedState) -> ShardedState:
        clone = self._accelerator.clone
        tensors = tuple(msgspec.structs.replace(shard, data=clone(shard.data)) for shard in walked.tensors)
        return msgspec.structs.replace(walked, tensors=tensors)


INLINE_COPY_BYTES = 16 * MIB
"""Inside a running event loop a larger state is copied on a worker: 16 MiB is about a millisecond."""
_NBYTES = attrgetter("data.nbytes")


class LazySnapshotter:
    """Captures states that are copied beside the program.

    Made with the checkpointer, not with its first lazy save: torch's hooks may be walked by another thread by then.

    Args:
        options: what is ``mutable`` and ``immutable``, and whether digests are compared.
        accelerator: the devices of the process.
        devices: which of them states are on.
        copies: the copies that a thread about to change the state waits for.
        pool: the slabs that copies go to, and *busy_slabs* how many of them keep all writers busy.
        now_ns: the monotonic time.
    """

    def __init__(
        self,
        options: Options,
        accelerator: Accelerator,
        devices: StateDevices,
        copies: PendingCopies,
        pool: SlabPool,
        busy_slabs: int,
        now_ns: Callable[[], int],
    ) -> None:
        install_hook()
        self._digests = options.debug == "digest"
        self._devices = devices
        self._copies = copies
        self._pool = pool
        self._busy_slabs = busy_slabs
        self._cloner = DeviceCloner(accelerator, devices)
        self._mutability = Mutability(options.mutable, options.immutable, accelerator)
        self._pacing = Pacing(now_ns)

    def capture(
        self,
        walked: ShardedState,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        *,
        busy: bool = False,
        waits: bool = False,
    ) -> Capture:
        """Copy what may change before the copy of the rest is made, and guard the rest."""
        taken = self._cloner.clone(walked, busy=busy) if snapshot == "device" else Taken(walked, snapshot)
        stepping = taken.snapshot != "device" and in_optimizer_step()
        if stepping:
            taken = Taken(walked, "eager", "inside the step of an optimizer, which no longer waits for a copy")
        captured, snapshot, versions = taken.state, taken.snapshot, None
        beside = snapshot != "eager" or (not stepping and _holds_loop_up(walked, waits=waits))
        copied_bytes = 0
        if snapshot == "device":
            copied_bytes = _sum_bytes(captured)
        elif beside:
            captured = self._mutability.copy_mutable(captured, state, trusting=snapshot == "eager", reuse=not busy)
            versions, copied_bytes = self._mutability.note_versions(), self._mutability.copied_bytes
        self._devices.pin(walked.tensors)
        after = self._devices.events(walked.tensors)
        return Capture(
            state=captured,
            snapshot=snapshot,
            reason=taken.reason,
            copied_at_call_bytes=copied_bytes,
            beside=beside,
            is_temporary=snapshot == "device",
            after=after,
            guard=StateGuard(
                self._copies,
                self._mutability.distrust,
                versions=versions,
                digests=self._digest(captured),
                throttle=self._throttle() if snapshot == "lazy" else None,
            ),
        )

    def guard_in_call(self, state: ShardedState) -> StateGuard:
        """Return what compares the digests of a state that the call copies."""
        return StateGuard(self._copies, self._mutability.distrust, digests=self._digest(state))

    def _digest(self, state: ShardedState) -> DigestCheck | None:
        return DigestCheck(state.tensors) if self._digests else None

    def _throttle(self) -> Throttle:
        return self._pacing.begin(self._pool, self._busy_slabs)

    def warm_up(self, walked: ShardedState) -> None:
        self._devices.pin(walked.tensors)

    def forget(self) -> None:
        self._devices.forget()
        self._mutability.forget()


def _holds_loop_up(walked: ShardedState, *, waits: bool) -> bool:
    """Return whether an eager copy in this call would hold up the event loop of its thread."""
    return runs_event_loop() and (waits or _sum_bytes(walked) > INLINE_COPY_BYTES)


def _sum_bytes(state: ShardedState) -> int:
    return sum(map(_NBYTES, state.tensors))
