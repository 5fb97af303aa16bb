"""Ways to copy a state: `Eager` copies it in the call; `aiockpt.lazy` beside the program, or on its device.

A snapshotter receives a walked state and returns a `Capture`: the tensors to copy, whether that is done in the
call or beside the program, behind which device events, and the `SaveGuard` that makes others wait for the copy and compares
the state when it is over. Where the call copies, nothing can change meanwhile, and the guard is `Unguarded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aiockpt.errors import TornSnapshotError
from aiockpt.options import Snapshot
from aiockpt.pipeline.copy_guard import CopyGuard
from aiockpt.runtime.loop import runs_event_loop
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:  # a writer process copies no state, and need not load torch
    import torch

    from aiockpt.pipeline.device_copy import StateDevices
    from aiockpt.runtime.accelerator import DeviceEvent
    from aiockpt.runtime.promise import Promise, SavePromise


class Copying(Protocol):
    """The copy that a guard guards, as a `aiockpt.engine.job.SaveJob` has it."""

    snapshot: Snapshot
    promise: SavePromise
    copied: Promise[None]
    host_copied: Promise[Sequence[DeviceEvent]]

    def stop(self, error: BaseException) -> None: ...
    def recheck(self) -> BaseException | None: ...


class SaveGuard(CopyGuard, Protocol):
    """What guards the state of one save until it is copied."""

    @property
    def is_unsure(self) -> bool:
        """Whether it may still turn out that the state changed while it is, or was, copied."""
        ...

    @property
    def took_whole(self) -> bool:
        """Whether the copy wanted slabs for all of the state."""
        ...

    def begin(self, job: Copying) -> None:
        """Make each change of the state wait for the copy of *job*: its call returns before that."""

    def check_addresses(self) -> None:
        """Raise TornSnapshotError when a tensor is not where it was: nothing may be read from there."""

    def recheck(self) -> TornSnapshotError | None:
        """Compare once more, if the copy is over and not yet compared; return why it is torn, if it is. Any thread."""
        ...

    def hurry(self) -> None:
        """Expedite the copy: it is waited for, or not wanted any more. Any thread; idempotent."""

    def stopped(self, error: BaseException) -> None:
        """End, as the save did, with *error*: nothing needs to be compared, and nothing kept. Any thread."""


class Unguarded:
    """The guard of a state that is copied in the call, or that is never changed: nothing waits or is compared."""

    throttle = None
    compares_bytes = False
    is_unsure = False
    took_whole = True

    def begin(self, job: Copying) -> None: ...
    def check_addresses(self) -> None: ...
    def compare(self) -> None: ...
    def recheck(self) -> None: ...
    def hurry(self) -> None: ...
    def stopped(self, error: BaseException) -> None: ...


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A state as its copy will find it.

    Attributes:
        state: its tensors do not change until they are copied, or are copies of their own.
        snapshot: how it is copied: in the call, lazily, or from a copy on the devices.
        reason: why not as requested.
        copied_at_call_bytes: bytes of the tensors that were copied in the call already.
        beside: whether it is copied beside the program, after the call has returned.
        is_temporary: whether all tensors were made for this save, and the next one will have others.
        after: the devices, and what must have passed on each before its tensors are what they were at the call.
        guard: of the state, until it is copied.
    """

    state: ShardedState
    snapshot: Snapshot = "eager"
    reason: str = ""
    copied_at_call_bytes: int = 0
    beside: bool = False
    is_temporary: bool = False
    after: Sequence[tuple[torch.device, DeviceEvent]] = ()
    guard: SaveGuard = Unguarded()


class Snapshotter(Protocol):
    """Says how states are copied. On the threads of the program, one at a time."""

    def capture(
        self,
        walked: ShardedState,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        *,
        busy: bool = False,
        waits: bool = False,
    ) -> Capture:
        """Say how a state is copied; from here on it is as it was at the call, for the copy.

        Args:
            walked: its tensors, and its encoded values; *state* as the caller gave it.
            snapshot: how it is to be copied.
            busy: whether the last capture is still being copied.
            waits: whether the copy must wait for other saves, or for other ranks.
        """
        ...

    def warm_up(self, walked: ShardedState) -> None:
        """Make ready what the first copy of a state will need. Any thread."""

    def forget(self) -> None:
        """Let go of the last state."""


class Eager:
    """Copies every state in the call.

    Args:
        devices: where tensors may be.
        guard_of: returns what guards a state; by default nothing does.
    """

    def __init__(
        self, devices: StateDevices, guard_of: Callable[[ShardedState], SaveGuard] = lambda _: Unguarded()
    ) -> None:
        self._devices = devices
        self._guard_of = guard_of

    def capture(
        self,
        walked: ShardedState,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        *,
        busy: bool = False,
        waits: bool = False,
    ) -> Capture:
        """Leave the state where it is: the call copies it."""
        self._devices.pin(walked.tensors)
        return Capture(state=walked, after=self._devices.events(walked.tensors), guard=self._guard_of(walked))

    def warm_up(self, walked: ShardedState) -> None:
        """Have slabs pinned for the devices of *walked*."""
        self._devices.pin(walked.tensors)

    def forget(self) -> None:
        """Let go of the last state."""
        self._devices.forget()


class ByCall:
    """Chooses a snapshotter for each call: *eager* for an eager save outside of event loops, *beside* for all else."""

    def __init__(self, eager: Snapshotter, beside: Snapshotter) -> None:
        self._eager = eager
        self._beside = beside

    def capture(
        self,
        walked: ShardedState,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        *,
        busy: bool = False,
        waits: bool = False,
    ) -> Capture:
        """Capture the state with the right one."""
        chosen = self._eager if snapshot == "eager" and not runs_event_loop() else self._beside
        return chosen.capture(walked, state, snapshot, busy=busy, waits=waits)

    def warm_up(self, walked: ShardedState) -> None:
        """Make ready what any first copy will need."""
        self._eager.warm_up(walked)

    def forget(self) -> None:
        """Let go of the last state."""
        self._eager.forget()
        self._beside.forget()
