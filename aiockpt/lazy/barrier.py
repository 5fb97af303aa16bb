"""Who keeps the optimizer from changing what is still being copied? A barrier that cannot be forgotten.

While a snapshot is being copied on another thread, a global optimizer-step pre-hook holds every optimizer of the process
until the *whole* state is copied. Guarantees:

- A snapshot is guarded before ``save()`` returns.
- What devices will copy by themselves holds no optimizer on the host: its compute stream waits for them, in its place.
- The hook comes with the first barrier of the process and stays: optimizers walk torch's hooks without a lock, and one
  that is added or removed meanwhile, by whoever finishes a copy, makes ``step()`` raise on another thread. While nothing
  is copied it costs a step less than a microsecond.
- A save that begins inside an optimizer's step, in its closure or in a hook of it, does not hold it: the hook has been
  passed. `in_optimizer_step` tells, by the frames of the caller, which no exception can leave behind.
- Whoever waits waits for the copies of all checkpointers of the process, as optimizers do.
- A wait ends: a copy that is stuck fails its save, and training goes on. A torn snapshot is never published.
- A forked child, whose copy of the hook waits for threads that did not come along, is not held.
- Whoever comes here, and finds a snapshot copied that nobody has looked at since, lets it be compared once more before going
  on: whatever this thread has changed without us is done, and counted by torch, and nothing it changes now can matter.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from threading import Lock, RLock
from types import FrameType, TracebackType
from typing import Any

import msgspec
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiockpt.errors import StorageTimeoutError, UsageError
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.loop import refuse_in_event_loop, refuse_on_loop_thread
from aiockpt.runtime.promise import Promise, SavePromise

MOST_UNSTEPPED = 4
"""Saves whose next step is waited for, the newest: some programs step no optimizer of torch at all."""
GiveUp = Callable[[BaseException], object]
_mutating_here: ContextVar[int] = ContextVar("mutating", default=0)
"""How many blocks of `Mutating` this thread, or this task, is in; of whatever checkpointer."""


class Guarded(msgspec.Struct, eq=False):
    """A snapshot that is being copied: whose, how to fail it when its copy is stuck, the marks of what is left to devices,
    once nothing else is, and what compares it with the state from then on."""

    save: SavePromise
    give_up: GiveUp
    enqueued: Promise[Sequence[DeviceEvent]]
    look_again: Callable[[], object]


class MutationBarrier:
    """Holds whoever is about to change the state until it is copied. Thread-safe.

    Args:
        timeout_s: how long one wait may last. A copy that is stuck for longer fails its save, and training goes on: the
            state is about to change under it.
        on_waited: told each wait of a millisecond or more: for which save, and how many seconds. On the thread that waited.
    """

    def __init__(self, timeout_s: float, on_waited: Callable[[int, float], object] = lambda *_: None) -> None:
        self._timeout_s = timeout_s
        self._on_waited = on_waited
        self._pid = os.getpid()
        self._lock = Lock()
        self._copying: dict[Promise[None], Guarded] = {}
        self._unsure: dict[Promise[None], Guarded] = {}
        self._unstepped: tuple[Callable[[], object], ...] = ()
        self._mutating = 0
        _register(self)

    def guard(
        self,
        save: SavePromise,
        give_up: GiveUp,
        enqueued: Promise[Sequence[DeviceEvent]],
        on_step: Callable[[], object] | None = None,
        look_again: Callable[[], object] = lambda: None,
    ) -> None:
        """Hold optimizers from now until *save* is snapshotted.

        Args:
            give_up: fails the save when its copy is stuck.
            enqueued: from when on it is enough that the compute streams wait for its marks; settled with the snapshot at
                the latest.
            look_again: called on the first thread that comes here after *enqueued*; on several, when they come at once.
            on_step: told when the state is about to change for the first time from now on, copied or not.
        """
        if on_step is not None:
            with self._lock:
                self._unstepped = (*self._unstepped, on_step)[-MOST_UNSTEPPED:]
        snapshotted = save.snapshotted
        self._copying[snapshotted] = self._unsure[snapshotted] = Guarded(save, give_up, enqueued, look_again)
        snapshotted.when_settled(lambda: self._copying.pop(snapshotted, None))

    @property
    def copying(self) -> list[Guarded]:
        """The snapshots that are being copied."""
        return list(self._copying.values())

    @property
    def is_ours(self) -> bool:
        """Whether it is of this process, and no forked child's copy of its parent's."""
        return self._pid == os.getpid()

    def count_mutating(self, more: int) -> None:
        """Count who is changing the state by hand."""
        with self._lock:
            self._mutating += more

    def check_still(self) -> None:
        """Raise UsageError when the state is being changed by hand: a snapshot would have half of it."""
        if self._mutating or _mutating_here.get():
            raise UsageError(
                "save() inside mutating(): the state is being changed there; save before the block or after"
            )

    def wait(self) -> None:
        """Block until no snapshot of this process is being copied.

        Raises:
            BlockingCallError: on a loop thread of ours, which copies depend on.
        """
        for barrier, guarded in _all_copying():
            refuse_on_loop_thread("waiting for a snapshot")
            barrier.wait_for(guarded, guarded.save.snapshotted)
        _look_again()

    async def wait_async(self) -> None:
        """The same, for event loops."""
        for barrier, guarded in _all_copying():
            await barrier.wait_for_async(guarded)
        _look_again()

    def wait_for(self, guarded: Guarded, point: Promise[Any]) -> None:
        """Block until *point* of one snapshot is reached, or the time is over."""
        began_s = time.perf_counter()
        point.wait_anyway(self._timeout_s)
        self._end_wait(guarded, point, time.perf_counter() - began_s)

    async def wait_for_async(self, guarded: Guarded) -> None:
        """Wait until one snapshot is copied, or the time is over."""
        began_s = time.perf_counter()
        await guarded.save.snapshotted.settled_within(self._timeout_s)
        self._end_wait(guarded, guarded.save.snapshotted, time.perf_counter() - began_s)

    def order_step(self) -> None:
        """Let no optimizer step that the calling thread begins now overtake a copy; block only for what is not enqueued."""
        self.tell_step()
        for guarded in self.copying:
            refuse_on_loop_thread("an optimizer's step while a snapshot is being copied")
            self.wait_for(guarded, guarded.enqueued)
            if guarded.enqueued.is_settled:
                for mark in guarded.enqueued.value:
                    mark.order_before_compute()
        self.look_again()

    def look_again(self) -> None:
        """Let what is copied be compared once more, on a thread of the program."""
        for snapshotted, guarded in list(self._unsure.items()):
            if guarded.enqueued.is_settled:
                guarded.look_again()
                self._unsure.pop(snapshotted, None)  # now: another thread that comes here must not go on before that

    def tell_step(self) -> None:
        """Say that the state is about to change."""
        if self._unstepped:
            with self._lock:
                told, self._unstepped = self._unstepped, ()
            for on_step in told:
                on_step()

    def _end_wait(self, guarded: Guarded, awaited: Promise[Any], seconds: float) -> None:
        if not awaited.is_settled:
            guarded.give_up(
                StorageTimeoutError(f"the snapshot was not copied within {self._timeout_s:g} s; it is given up")
            )
        if seconds >= 0.001:
            self._on_waited(guarded.save.step, seconds)

    def close(self) -> None:
        """Hold nobody any more. Idempotent."""
        _forget(self)

    def __repr__(self) -> str:
        return f"<MutationBarrier {len(self._copying)} snapshots being copied>"


_registering = RLock()  # the collector may forget one barrier in the middle of registering another
_barriers: tuple[weakref.ref[MutationBarrier], ...] = ()
"""Of this process. Replaced and never changed: steps read it on any thread."""
_hook: RemovableHandle | None = None


def _register(barrier: MutationBarrier) -> None:
    global _barriers, _hook
    with _registering:
        _barriers = (*_barriers, weakref.ref(barrier, _forget))
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _forget(gone: object) -> None:
    """Take a barrier, or a reference to one that is no more, from the list."""
    global _barriers
    with _registering:
        _barriers = tuple(known for known in _barriers if known is not gone and known() not in (gone, None))


def _living() -> Iterator[MutationBarrier]:
    """Yield the barriers of this process; those of its parent are not a forked child's."""
    for known in _barriers:
        barrier = known()
        if barrier is not None and barrier.is_ours:
            yield barrier


def _before_step(*_: Any) -> None:
    for barrier in _living():
        barrier.order_step()


def _all_copying() -> Iterator[tuple[MutationBarrier, Guarded]]:
    """Yield what is being copied in this process; say first that the state is about to change."""
    ours = list(_living())
    for barrier in ours:
        barrier.tell_step()
    for barrier in ours:
        for guarded in barrier.copying:
            yield barrier, guarded


def _look_again() -> None:
    for barrier in _living():
        barrier.look_again()


_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""Of what torch wraps every optimizer's step in: it calls the hooks, then the step."""


def in_optimizer_step() -> bool:
    """Say whether the calling thread is inside the step of an optimizer of torch: in its closure, or in a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


class Mutating:
    """The block in which somebody changes the state by hand: ``with`` in a sync program, ``async with`` in an event loop.

    It begins when no snapshot is being copied, and no save may begin in it.
    """

    def __init__(self, barrier: MutationBarrier) -> None:
        self._barrier = barrier

    def __enter__(self) -> None:
        refuse_in_event_loop("a plain `with ckpt.mutating()`", "write `async with ckpt.mutating()`")
        self._count(1)
        try:
            self._barrier.wait()
        except BaseException:
            self._count(-1)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._count(-1)

    async def __aenter__(self) -> None:
        self._count(1)
        try:
            await self._barrier.wait_async()
        except BaseException:
            self._count(-1)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._count(-1)

    def _count(self, more: int) -> None:
        self._barrier.count_mutating(more)
        _mutating_here.set(_mutating_here.get() + more)
