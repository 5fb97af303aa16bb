"""Copies states beside the program: where they are, but for what may change there; or from a copy on the device.

An eager save inside a running event loop is one of these, too: where its copy would hold the loop up (a large state, or one
that must wait for something) it is made on a worker, else in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import attrgetter, is_not

from aiockpt.engine.snapshotter import Capture, CaptureRequest
from aiockpt.lazy.barrier import in_optimizer_step, install_hook
from aiockpt.lazy.device import DeviceCloner, Taken
from aiockpt.lazy.digest_check import DigestCheck
from aiockpt.lazy.mutability import Mutability
from aiockpt.lazy.state_guard import StateGuard
from aiockpt.lazy.throttle import Pacing, Throttle
from aiockpt.lazy.version_check import VersionNotes
from aiockpt.options import MIB, Options
from aiockpt.pipeline.state_devices import StateDevices
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.loop import runs_event_loop
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.runtime.slabs import SlabPool
from aiockpt.state.shards import ShardedState

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
        copies: where those look who must wait for a copy.
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
        self._versions = VersionNotes(accelerator)
        self._pacing = Pacing(now_ns)

    def capture(self, request: CaptureRequest) -> Capture:
        """Copy what may change before the copy of the rest is made, and guard the rest."""
        taken = Taken(request.walked, request.snapshot)
        if request.snapshot == "device":
            taken = self._cloner.clone(request.walked, busy=request.busy)
        stepping = taken.snapshot != "device" and in_optimizer_step()
        if stepping:
            taken = Taken(request.walked, "eager", "inside the step of an optimizer, which no longer waits for a copy")
        walked, snapshot, versions = taken.state, taken.snapshot, None
        beside = snapshot != "eager" or (not stepping and _holds_loop_up(request))
        if beside and snapshot != "device":
            walked = self._mutability.copy_mutable(
                walked, request.state, trusting=snapshot == "eager", reuse=not request.busy
            )
            versions = self._versions.note(self._mutability.in_place)
        self._devices.pin(request.walked.tensors)
        after = self._devices.events(request.walked.tensors)
        return Capture(
            state=walked,
            snapshot=snapshot,
            reason=taken.reason,
            copied_at_call_bytes=_copied_bytes(request.walked, walked),
            beside=beside,
            is_temporary=snapshot == "device",
            after=after,
            guard=StateGuard(
                self._copies,
                self._mutability.distrust,
                versions=versions,
                digests=self._digest(walked),
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
        """Have slabs pinned for the devices of *walked*."""
        self._devices.pin(walked.tensors)

    def forget(self) -> None:
        """Let go of the last state."""
        self._devices.forget()
        self._mutability.forget()
        self._versions.forget()


def _holds_loop_up(request: CaptureRequest) -> bool:
    """Say whether an eager copy in this call would hold up the event loop of its thread."""
    return runs_event_loop() and (request.waits or sum(map(_NBYTES, request.walked.tensors)) > INLINE_COPY_BYTES)


def _copied_bytes(walked: ShardedState, captured: ShardedState) -> int:
    if captured is walked:
        return 0
    return sum(map(_NBYTES, compress(captured.tensors, map(is_not, captured.tensors, walked.tensors))))
