"""The engine's side of a future: a promise is resolved or failed once, from any thread.

Callers hold the futures of `aiockpt.futures`, each of which reads one promise. A second outcome is ignored. Waits of engine
code (`Promise.settled`, `Promise.wait_anyway`) retrieve nothing: an outcome counts as retrieved only when a caller asks a
future for its value, or its error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Lock, current_thread
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import msgspec

from aiockpt.errors import SaveCancelledError
from aiockpt.runtime.world import Loop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Promise(Generic[T]):
    """A point that some work reaches once, with a value, or never, with an error. Thread-safe.

    Attributes:
        what: the point, in words.
        retrieved: whether a caller has received the value or the error.
        on_wait: called whenever a wait for it begins, on the thread that waits.
        on_retrieve: called whenever a caller is about to receive the value; returns an error found since then, if any.
        cancel_work: asks the work to stop; None where it cannot be stopped, or has not begun.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.retrieved = False
        self.on_wait: Callable[[], object] | None = None
        self.on_retrieve: Callable[[], BaseException | None] | None = None
        self.cancel_work: Callable[[], object] | None = None
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._late_error: BaseException | None = None

    # ------------------------------------------------------------------ the outcome

    def resolve(self, value: T) -> None:
        """Note that the point is reached."""
        with suppress(concurrent.futures.InvalidStateError):  # done already, perhaps by another thread this instant
            self._inner.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Note that the point will never be reached, because of *error*."""
        with suppress(concurrent.futures.InvalidStateError):
            self._inner.set_exception(error)

    def run(self, loop: Loop, work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> None:
        """Run ``work(*args)`` on *loop*, and adopt its outcome; a cancelled one has its outcome when it has ended, too."""

        async def run() -> None:
            try:
                self.resolve(await work(*args))
            except BaseException as error:
                is_cancelled = isinstance(error, asyncio.CancelledError)
                self.fail(SaveCancelledError(f"{self.what} was cancelled") if is_cancelled else error)
                if not isinstance(error, Exception):
                    raise

        self.cancel_work = loop.submit(run).cancel

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call *callback* when the promise is resolved or failed, on the thread that does so; at once if it already is."""
        self._inner.add_done_callback(lambda _: callback())

    def cancel(self) -> bool:
        """Ask the work to stop, from any thread; return False when the outcome is there already."""
        if self.is_settled:
            return False
        if self.cancel_work is not None:
            self.cancel_work()
        return True

    @property
    def is_settled(self) -> bool:
        """Whether the point was reached or never will be."""
        return self._inner.done()

    @property
    def error(self) -> BaseException | None:
        """The error it failed with; None while it has no outcome, and when it was resolved."""
        return self._inner.exception() if self._inner.done() else None

    @property
    def has_failed(self) -> bool:
        """Whether it failed, or was found invalid afterwards."""
        return (self.error or self._late_error) is not None

    @property
    def value(self) -> T:
        """The value it was resolved with, once it has an outcome. Raises its error."""
        return self._inner.result(0)

    # ------------------------------------------------------------------ waiting

    def expedite(self) -> None:
        """Make the work go faster, where it can: a caller waits now."""
        if self.on_wait is not None and not self._inner.done():
            self.on_wait()

    async def settled(self) -> None:
        """Wait until it has an outcome, without expediting the work. In any event loop."""
        if not self._inner.done():
            reached = anyio.Event()
            wake = _waker(reached)
            self._inner.add_done_callback(lambda _: wake())
            await reached.wait()

    async def settled_within(self, seconds: float) -> None:
        """Wait until it has an outcome, or *seconds* have passed."""
        self.expedite()
        with anyio.move_on_after(seconds):
            await self.settled()

    def wait_anyway(self, timeout_s: float | None) -> bool:
        """Block until it has an outcome, even on a thread with an event loop; return whether it has.

        For the barrier, whose copy runs on another thread; and for futures, which have refused such threads before.
        """
        self.expedite()
        return bool(concurrent.futures.wait([self._inner], timeout_s).done)

    # ------------------------------------------------------------------ retrieval, by futures

    def recheck(self) -> BaseException | None:
        """Return the error that was found after the point was reached, if any."""
        if self._late_error is None and self.on_retrieve is not None:
            self._late_error = self.on_retrieve()
        return self._late_error

    def retrieve(self) -> T:
        """Return the value to a caller, or raise the error."""
        self.retrieved = True
        value, error = self._inner.result(), self.recheck()
        if error is not None:
            raise error
        return value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.what}: {'settled' if self.is_settled else 'pending'}>"


def _waker(reached: anyio.Event) -> Callable[[], None]:
    """Return a function that sets *reached* from any thread, whatever kind of loop is running here."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio

        token = trio.lowlevel.current_trio_token()

        def wake_trio() -> None:
            with suppress(trio.RunFinishedError):  # the loop that waited is gone; nothing is left to wake
                token.run_sync_soon(reached.set)

        return wake_trio

    def wake() -> None:
        with suppress(RuntimeError):  # the loop that waited is closed; nothing is left to wake
            loop.call_soon_threadsafe(reached.set)

    return wake


class SaveResult(msgspec.Struct, frozen=True):
    """A committed checkpoint: what ``await save`` returns.

    Attributes:
        step, id, generation: which one; *id* is its folder below the root.
        bytes: bytes of the data files that this rank wrote.
        seconds: from the call of ``save()`` to *committed*.
        existed: True when the step was committed before and ``on_exists="skip"`` left it.
        url: the place.
        durable: whether it outlives this host and a power cut; a memory tier's copy does not, nor one where no folder can
            be flushed.
    """

    step: int
    id: str
    generation: int
    bytes: int
    seconds: float
    existed: bool = False
    url: str = ""
    durable: bool = True


class SavePromise(Promise[SaveResult]):
    """The promise of one save, ``snapshotted`` → ``written`` → ``in_memory`` → ``committed``; resolved when it is committed.

    Attributes:
        step: the step that is saved.
        snapshotted, written, in_memory: the points on the way; *replicated* is one that the save does not wait for.
        is_copied: whether copies in other hosts' memory are made, which then resolve *replicated*.
        tiers: one for each place, by every name of the place; empty if there is one place only.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"save of step {step}")
        self.step = step
        self.snapshotted: Promise[None] = Promise(f"save of step {step}, snapshotted")
        self.written: Promise[None] = Promise(f"save of step {step}, written")
        self.in_memory: Promise[None] = Promise(f"save of step {step}, in memory")
        self.replicated: Promise[None] = Promise(f"save of step {step}, replicated")
        self.is_copied = False
        self.tiers: dict[str, Promise[SaveResult]] = {}

    def _points(self) -> list[Promise[Any]]:
        return [self.snapshotted, self.written, self.in_memory, self.replicated, *self.tiers.values()]

    @property
    def delivered(self) -> bool:
        """Whether a caller has received the outcome, or the failure at a point on the way."""
        return self.retrieved or any(point.retrieved and point.has_failed for point in self._points())

    def fail(self, error: BaseException) -> None:
        """Note that the save failed: whatever was not reached never will be."""
        for point in self._points():
            point.fail(error)
        super().fail(error)

    def reach(self, point: Promise[None]) -> None:
        """Resolve *point*, after the points before it, whose own reports may be late."""
        for one in (self.snapshotted, self.written, self.in_memory):
            one.resolve(None)
            if one is point:
                return

    def resolve(self, value: SaveResult) -> None:
        """Note that the save is committed."""
        self.reach(self.in_memory)
        if not self.is_copied:
            self.replicated.resolve(None)
        super().resolve(value)


class LoadPromise(Promise[T]):
    """The promise of one load: resolved when the tensors are filled. Objects are filled by `finish`.

    Attributes:
        on_finish: fills the objects, and returns the result then; None where there is nothing to fill.
        agree: reports the outcome of that to all ranks; returns the promise of their agreement. None where it is not needed.
        waited_for: whether a caller has waited for it to the end.
        refused: whether a caller tried to wait inside an event loop, cancelled it, or was interrupted while it waited; the
            next load then replaces it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.on_finish: Callable[[], T | None] | None = None
        self.agree: Callable[[Exception | None], Promise[None]] | None = None
        self.waited_for = False
        self.refused = False
        self._caller = current_thread()
        self._finished: T | None = None
        self._agreed: Promise[None] | None = None
        self._finishing = Lock()

    @property
    def is_abandoned(self) -> bool:
        """Whether no caller has waited for it, and the thread that began it is this one or has ended."""
        return not self.waited_for and (self._caller is current_thread() or not self._caller.is_alive())

    def finish(self) -> Promise[None] | None:
        """Fill the objects, once, on the first thread that waits; do nothing for a load that failed.

        Returns:
            The promise that the other ranks have filled theirs, too, where ranks must agree.
        """
        with self._finishing:
            if self.on_finish is None or self.has_failed:
                return self._agreed
            error: Exception | None = None
            try:
                self._finished = self.on_finish()
            except Exception as raised:
                if self.agree is None:
                    raise
                error = raised
            self.on_finish = None
            if self.agree is not None:
                self._agreed = self.agree(error)
            return self._agreed

    def retrieve(self) -> T:
        """Return the result to a caller, with what the objects added to it."""
        value = super().retrieve()
        return value if self._finished is None else self._finished
