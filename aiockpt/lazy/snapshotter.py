"""Capture of states that are copied beside the program: in place, except for what may change there, or from a device copy.

An eager save inside a running event loop is captured here, too. If its copy would block the loop (a large state, or one
that must wait for something), a worker makes it; else the call does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import msgspec
import torch
import xxhash
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiockpt.adapters.tensors import byte_view
from aiockpt.engine.context import Engine
from aiockpt.engine.job import Capture, SaveGuard, SaveJob
from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.lazy.mutability import Mutability
from aiockpt.lazy.throttle import Pacing, Throttle
from aiockpt.lazy.version_check import VersionCheck
from aiockpt.options import MIB, Snapshot
from aiockpt.pipeline.device_copy import on_host
from aiockpt.runtime.loop import Mutex, holds_up_event_loop, refuse_on_loop_thread
from aiockpt.runtime.pending_copies import PendingCopies, PendingCopy, pending_copies
from aiockpt.state.shards import ShardedState, TensorShard

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
    """Order the step that the calling thread begins after all copies; block only for what the host still has to copy."""
    # Before the waits: the time until the state changes, by which later copies are paced, must not contain them.
    copies.note_change()
    for copy in copies.copying:
        refuse_on_loop_thread("an optimizer's step while a snapshot is being copied")
        copies.wait_for(copy, copy.host_copied)
        if copy.host_copied.is_settled:
            for event in copy.host_copied.value:
                event.order_before_compute()
    copies.recheck()


_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""The code of torch's wrapper around every optimizer's step, which calls the hooks, then the step."""


def in_optimizer_step() -> bool:
    """Return whether the calling thread is inside the step of an optimizer of torch: in its closure, or in a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


logger = logging.getLogger("aiockpt")


INLINE_COPY_BYTES = 16 * MIB
"""Inside a running event loop a larger state is copied on a worker: 16 MiB is about a millisecond."""
_NBYTES = attrgetter("data.nbytes")


class LazySnapshotter:
    """Captures states that are copied beside the program.

    Made with the checkpointer, not with its first lazy save: torch's hooks may be walked by another thread by then.

    Args:
        copies: the copies that a thread about to change the state waits for.
        busy_slabs: how many slabs keep all writers busy.
    """

    def __init__(self, engine: Engine, copies: PendingCopies, busy_slabs: int) -> None:
        install_hook()
        self._engine = engine
        self._copies = copies
        self._busy_slabs = busy_slabs
        lazy = engine.options.lazy
        self._mutability = Mutability(lazy.mutable, lazy.immutable, engine.accelerator)
        self._pacing = Pacing(engine.now_ns)

    def capture(
        self, walked: ShardedState, state: Mapping[str, Any], snapshot: Snapshot, *, busy: bool, waits: bool
    ) -> tuple[ShardedState, Capture]:
        """Copy what may change before the copy of the rest is made, and guard the rest."""
        engine, captured, reason = self._engine, walked, ""
        if snapshot == "device":
            captured, snapshot, reason = self._clone(walked, busy=busy)
        stepping = snapshot != "device" and in_optimizer_step()
        if stepping:
            snapshot, reason = "eager", "inside the step of an optimizer, which no longer waits for a copy"
        beside = snapshot != "eager" or (not stepping and _holds_loop_up(walked, waits=waits))
        copied_bytes, versions, throttle = 0, None, None
        if snapshot == "device":
            copied_bytes = _sum_bytes(captured)
        elif beside:
            split = self._mutability.split(walked, state, trusting=snapshot == "eager")
            captured = split.copy(walked, reuse=not busy)
            versions, copied_bytes = split.note_versions(), split.copied_bytes
        if snapshot == "lazy":
            throttle = self._pacing.begin(engine.pool, self._busy_slabs)
        return captured, Capture(
            snapshot=snapshot,
            reason=reason,
            copied_at_call_bytes=copied_bytes,
            beside=beside,
            is_temporary=snapshot == "device",
            after=engine.compute_events(walked),
            guard=self._guard(captured, versions, throttle),
        )

    def guard_in_call(self, state: ShardedState) -> StateGuard:
        """Return the guard that compares the digests of a state that the call copies."""
        return self._guard(state)

    def _guard(
        self, state: ShardedState, versions: VersionCheck | None = None, throttle: Throttle | None = None
    ) -> StateGuard:
        digests = DigestCheck(state.tensors) if self._engine.options.lazy.debug == "digest" else None
        return StateGuard(
            self._copies, self._mutability.distrust, versions=versions, digests=digests, throttle=throttle
        )

    # A snapshot on the devices copies whole states there, in the call, in the order of the compute streams; no optimizer
    # waits. There is one such copy at a time, and none where the device has no room beside the peak of training: training
    # keeps the memory that it needs. Then the snapshot is lazy, and the log says why. What is in host memory is copied in
    # the call as well; a state that lies entirely there is copied eagerly.

    def _clone(self, walked: ShardedState, *, busy: bool) -> tuple[ShardedState, Snapshot, str]:
        """Copy *walked* on its devices if possible; return the state to copy, the snapshot, and why it is not "device".

        Args:
            busy: whether the last such copy is still needed.
        """
        sizes, clone = self._engine.device_bytes(walked), self._engine.accelerator.clone
        if not sizes:
            return walked, "eager", "no tensor is on a device"
        reason = "the last copy on the device is still on its way to the host" if busy else self._why_not(sizes)
        if not reason:
            try:
                tensors = tuple(msgspec.structs.replace(shard, data=clone(shard.data)) for shard in walked.tensors)
                return msgspec.structs.replace(walked, tensors=tensors), "device", ""
            except torch.OutOfMemoryError as error:
                reason = f"the device has no memory for a copy: {str(error).partition('.')[0]}"
        logger.warning("the snapshot is lazy: %s", reason)
        return walked, "lazy", reason

    def _why_not(self, sizes: Mapping[torch.device, int]) -> str:
        for device, size_bytes in sizes.items():
            missing_bytes = self._engine.accelerator.lend(device, size_bytes)
            if missing_bytes:
                return f"{device} lacks {missing_bytes:,} of {size_bytes:,} bytes for a copy beside what training needs"
        return ""


def _holds_loop_up(walked: ShardedState, *, waits: bool) -> bool:
    """Return whether an eager copy in this call would hold up the event loop of its thread."""
    return holds_up_event_loop() and (waits or _sum_bytes(walked) > INLINE_COPY_BYTES)


def _sum_bytes(state: ShardedState) -> int:
    return sum(map(_NBYTES, state.tensors))


# Guard of the state of one save until it is copied: changes wait for the copy, and the state is compared when it is over.
#
# It is compared twice. Torch counts a change *after* its operation, which may have been under way at the first comparison,
# on the thread that copies; so there is a second one on a thread of the program, whose operations are over when it comes
# here. Once the second comparison is made the state may change.


class StateGuard(SaveGuard):
    """The guard of one save.

    Args:
        copies: the copies that a thread about to change the state waits for.
        note_torn: called with the names of tensors that changed while they were being copied.
        versions: counters and samples to compare; None where no tensor was left in place.
        digests: all bytes to compare, where ``debug="digest"`` asks for that.
        throttle: holds the copy back while nothing waits for it; None for one that goes as fast as it can.

    Attributes:
        compared: whether the first comparison found no difference.
    """

    def __init__(
        self,
        copies: PendingCopies,
        note_torn: Callable[[Sequence[str]], object],
        *,
        versions: VersionCheck | None = None,
        digests: DigestCheck | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._copies = copies
        self._note_torn = note_torn
        self._versions = versions
        self._digests = digests
        self.throttle = self._throttle = throttle
        self.compared = False
        self._torn: TornSnapshotError | None = None
        self._rechecking = Mutex()

    @property
    def compares_bytes(self) -> bool:
        return self._digests is not None

    @property
    def needs_check(self) -> bool:
        return self._versions is not None

    @property
    def needs_all_slabs(self) -> bool:
        return self._throttle is None or self._throttle.whole

    def begin(self, job: SaveJob) -> None:
        """Have each change of the state wait for the copy of *job*; a copy on the device needs no wait."""
        throttle = self._throttle
        if throttle is not None:
            for point in (job.promise.snapshotted, job.copied, job.host_copied):
                point.on_wait = throttle.end  # before another thread can find them
        if job.capture.snapshot == "device":
            job.promise.snapshotted.resolve(None)
        else:
            copy = PendingCopy(job.promise, job.stop, job.host_copied, job.recheck)
            self._copies.add(copy, None if throttle is None else throttle.stepped)

    def check_addresses(self) -> None:
        """Raise TornSnapshotError when a tensor that was left in place is not where it was."""
        if (versions := self._versions) is not None:
            versions.check_addresses()

    def compare(self) -> None:
        """Compare for the first time, when all is copied that the host copies, and no step may begin.

        Raises:
            TornSnapshotError: the state has changed; the tensors are named.
        """
        digests, self._digests = self._digests, None
        if digests is not None:
            digests.check()
        if (versions := self._versions) is not None:
            versions.check()
        self.compared = True

    def recheck(self) -> TornSnapshotError | None:
        """Make the second comparison, once, after the first; return the error if the copy is torn, else None.

        For a copy that is known to be torn, this finds what else has changed by now.
        """
        with self._rechecking:
            if self.compared or self._torn is not None:
                self._compare_last()
        return self._torn

    def expedite(self) -> None:
        if self._throttle is not None:
            self._throttle.end()

    def stopped(self, error: BaseException) -> None:
        """Release the tensors, unless the second comparison can still find what else has changed.

        Changes are noted also when another error ends the save: if the copies of several ranks are torn, the first error
        ends the save of all, and the other ranks would tear the next save again.
        """
        self._digests = None
        if isinstance(error, TornSnapshotError):
            self._tear(error)
        else:
            self._compare_last()

    def _compare_last(self) -> None:
        """Note what has changed by now, and release the tensors."""
        versions, self._versions = self._versions, None
        try:
            if versions is not None:
                versions.recheck()
        except TornSnapshotError as error:
            self._tear(error)

    def _tear(self, error: TornSnapshotError) -> None:
        if error is not self._torn:
            self._note_torn(error.tensors)
        self._torn = self._torn or error


class DigestCheck:
    """The digests of live tensors before their copy, compared with those after it, for ``debug="digest"``.

    What was changed and changed back in between is not noticed; everything else is. Costs two passes over the state.
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = shards
        self._digests = [_digest(shard.data) for shard in shards]

    def check(self) -> None:
        """Compare.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        torn = [
            shard.name
            for shard, digest in zip(self._shards, self._digests, strict=True)
            if _digest(shard.data) != digest
        ]
        if torn:
            raise TornSnapshotError(
                f"{list_names(torn)} changed while the snapshot was copied: nothing was published. Change the state inside "
                "`with ckpt.mutating():`, or name what other things than optimizers change in "
                "Checkpointer(lazy=Lazy(mutable=[…])).",
                torn,
            )


def _digest(tensor: torch.Tensor) -> int:
    """Return the digest of *tensor*'s bytes, read by address: ``numpy()`` would forbid resizing its storage for good."""
    dense = on_host(tensor)  # a copy must live as long as the view
    return xxhash.xxh3_64_intdigest(byte_view(dense))
