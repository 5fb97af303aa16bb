"""Copies of a state that are made beside the program, and changes of a state by hand: each waits for the other.

A save whose call returns before its state is copied registers that copy here (`PendingCopies.add`). Loads, ``mutating()``
and ``barrier()`` wait for it; what else waits (`aiockpt.lazy.snapshotter`: optimizers) is built on this. Guarantees:

- Every wait is for the copies of all checkpointers of the process.
- A wait ends: a copy that is stuck fails its save, and training goes on. A torn snapshot is never published.
- No save begins while the state is changed by hand: it would have half of the change.
- A forked child does not wait for the threads of its parent, which a fork does not copy.
- A thread that enters here, and finds a copy that is over and not compared since, has it compared once more before going
  on. By then torch has counted all that this thread changed before; what it changes later cannot affect the copy.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from threading import Lock, RLock
from typing import Any

import msgspec

from aiockpt.errors import StorageTimeoutError, UsageError
from aiockpt.runtime.accelerator import DeviceEvent
from aiockpt.runtime.loop import refuse_in_event_loop, refuse_on_loop_thread
from aiockpt.runtime.promise import Promise, SavePromise

MOST_UNCHANGED = 4
"""The newest saves that are notified of the next change of the state: some programs never step an optimizer of torch."""
_changing_here: ContextVar[int] = ContextVar("changing", default=0)
"""How many blocks of `Mutating` this thread, or this task, is in; of any checkpointer."""


class PendingCopy(msgspec.Struct, eq=False):
    """A copy that is made beside the program.

    Attributes:
        save: of the copy; its *snapshotted* is resolved, or failed, when the copy is over.
        abandon: fails the save, when its copy is stuck.
        host_copied: resolved when only devices have something left to copy, with the events behind that; with *snapshotted*
            at the latest.
        recheck: compares the state once more, on the first thread of the program that enters here after *host_copied*; on
            several, when they enter at once.
    """

    save: SavePromise
    abandon: Callable[[BaseException], object]
    host_copied: Promise[Sequence[DeviceEvent]]
    recheck: Callable[[], object]


class PendingCopies:
    """The copies of one checkpointer, and the changes of its state by hand. Thread-safe.

    Args:
        timeout_s: how long one wait may last. A copy that is stuck for longer fails its save, and training goes on: the
            state is about to change under it.
        on_waited: called for each wait of a millisecond or more, with the save and the seconds. On the thread that waited.
    """

    def __init__(self, timeout_s: float, on_waited: Callable[[int, float], object] = lambda *_: None) -> None:
        self._timeout_s = timeout_s
        self._on_waited = on_waited
        self._pid = os.getpid()
        self._lock = Lock()
        self._copying: dict[Promise[None], PendingCopy] = {}
        self._unchecked: dict[Promise[None], PendingCopy] = {}
        self._on_change: tuple[Callable[[], object], ...] = ()
        self._changing = 0
        _register(self)

    def add(self, copy: PendingCopy, on_change: Callable[[], object] | None = None) -> None:
        """Make every thread that is about to change the state wait for *copy* from now on.

        Args:
            on_change: called when the state is about to change for the first time from now on, copied or not.
        """
        if on_change is not None:
            with self._lock:
                self._on_change = (*self._on_change, on_change)[-MOST_UNCHANGED:]
        snapshotted = copy.save.snapshotted
        self._copying[snapshotted] = self._unchecked[snapshotted] = copy
        # After the entry: of a copy that is over by now this removes it at once.
        snapshotted.when_settled(lambda: self._copying.pop(snapshotted, None))

    @property
    def copying(self) -> list[PendingCopy]:
        """The copies that are not over."""
        return list(self._copying.values())

    @property
    def is_ours(self) -> bool:
        """Whether it was made in this process, and not in the parent of this forked child."""
        return self._pid == os.getpid()

    def count_change(self, more: int) -> None:
        """Count a block that changes the state by hand."""
        with self._lock:
            self._changing += more

    def check_unchanging(self) -> None:
        """Raise UsageError when the state is being changed by hand: a snapshot would have half of it."""
        if self._changing or _changing_here.get():
            raise UsageError(
                "save() inside mutating(): the state is being changed there; save before the block or after"
            )

    def wait(self) -> None:
        """Block until nothing of this process is being copied.

        Raises:
            BlockingCallError: on a loop thread of ours, which copies depend on.
        """
        for copies, copy in _all_copying():
            refuse_on_loop_thread("waiting for a snapshot")
            copies.wait_for(copy, copy.save.snapshotted)
        _recheck_all()

    async def wait_async(self) -> None:
        """The same, for event loops."""
        for copies, copy in _all_copying():
            await copies.wait_for_async(copy)
        _recheck_all()

    def wait_for(self, copy: PendingCopy, point: Promise[Any]) -> None:
        """Block until *point* of one copy is reached, or the timeout has passed."""
        began_s = time.perf_counter()
        point.wait_anyway(self._timeout_s)
        self._end_wait(copy, point, time.perf_counter() - began_s)

    async def wait_for_async(self, copy: PendingCopy) -> None:
        """Wait until one copy is over, or the timeout has passed."""
        began_s = time.perf_counter()
        await copy.save.snapshotted.settled_within(self._timeout_s)
        self._end_wait(copy, copy.save.snapshotted, time.perf_counter() - began_s)

    def _end_wait(self, copy: PendingCopy, awaited: Promise[Any], seconds: float) -> None:
        if not awaited.is_settled:
            copy.abandon(
                StorageTimeoutError(f"the snapshot was not copied within {self._timeout_s:g} s; it is given up")
            )
        if seconds >= 0.001:
            self._on_waited(copy.save.step, seconds)

    def recheck(self) -> None:
        """Have what is copied compared once more, on a thread of the program."""
        for snapshotted, copy in list(self._unchecked.items()):
            if copy.host_copied.is_settled:
                copy.recheck()
                self._unchecked.pop(snapshotted, None)  # now: another thread that comes here must not go on before that

    def note_change(self) -> None:
        """Note that the state is about to change."""
        if self._on_change:
            with self._lock:
                callbacks, self._on_change = self._on_change, ()
            for on_change in callbacks:
                on_change()

    def close(self) -> None:
        """Block no thread any more. Idempotent."""
        _release(self)

    def __repr__(self) -> str:
        return f"<PendingCopies: {len(self._copying)} snapshots being copied>"


_registering = RLock()  # the collector may release one in the middle of registering another
_known: tuple[weakref.ref[PendingCopies], ...] = ()
"""Of this process. Replaced and never changed: optimizer steps read it on any thread."""


def _register(copies: PendingCopies) -> None:
    global _known
    with _registering:
        _known = (*_known, weakref.ref(copies, _release))


def _release(gone: object) -> None:
    """Remove an object, or the reference to one that was freed, from the list."""
    global _known
    with _registering:
        _known = tuple(known for known in _known if known is not gone and known() not in (gone, None))


def pending_copies() -> Iterator[PendingCopies]:
    """Yield those of all checkpointers of this process; in a forked child, without those of its parent."""
    for known in _known:
        copies = known()
        if copies is not None and copies.is_ours:
            yield copies


def _all_copying() -> Iterator[tuple[PendingCopies, PendingCopy]]:
    """Yield what is being copied in this process; note first that the state is about to change."""
    ours = list(pending_copies())
    for copies in ours:
        copies.note_change()
    for copies in ours:
        for copy in copies.copying:
            yield copies, copy


def _recheck_all() -> None:
    for copies in pending_copies():
        copies.recheck()


class Mutating:
    """The block in which the user changes the state by hand: ``with`` in a sync program, ``async with`` in an event loop.

    It begins when no snapshot is being copied, and no save may begin in it.
    """

    def __init__(self, copies: PendingCopies) -> None:
        self._copies = copies

    def __enter__(self) -> None:
        refuse_in_event_loop("a plain `with ckpt.mutating()`", "write `async with ckpt.mutating()`")
        self._count(1)
        try:
            self._copies.wait()
        except BaseException:
            self._count(-1)
            raise

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    async def __aenter__(self) -> None:
        self._count(1)
        try:
            await self._copies.wait_async()
        except BaseException:
            self._count(-1)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, more: int) -> None:
        self._copies.count_change(more)
        _changing_here.set(_changing_here.get() + more)
