"""What does a caller hold while the work goes on? Futures that any thread and any event loop can wait for.

Guarantees:

- A future can be awaited on any asyncio or trio loop, waited for with ``result(timeout)``, given callbacks, or ignored.
- Waiting never owns the work: a cancelled or timed-out wait leaves it running. Only ``cancel()`` cancels.
- Every stage settles exactly once, in order; when the work fails, all stages that were not reached fail with that error.
- A blocking wait on a thread that runs an event loop raises instead of stopping the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, Literal, TypeVar

import anyio
import msgspec

from aiockpt.errors import BlockingCallError, SaveCancelledError, UsageError
from aiockpt.runtime.loop import refuse_in_event_loop

T = TypeVar("T")
_Inner = concurrent.futures.Future


def _do_nothing() -> None:
    """Nobody minds."""


def _find_nothing() -> None:
    """What was reached was reached."""


class Stage(Generic[T]):
    """A point that the work reaches once, with a value, or never, with an error.

    ``_on_wait`` is called whenever somebody begins to wait for it, on the thread that waits; ``_on_told`` whenever somebody
    is about to hear that it was reached, and returns what went wrong all the same.
    """

    _reached = "done"

    def __init__(self, what: str) -> None:
        self._what = what
        self._inner: _Inner[T] = _Inner()
        self._told = False
        self._on_wait: Callable[[], object] = _do_nothing
        self._on_told: Callable[[], BaseException | None] = _find_nothing
        self._late_error: BaseException | None = None

    def done(self) -> bool:
        """Say whether the point was reached or the work has failed."""
        done = self._inner.done()
        if done:
            self._look_again()
        return done

    def result(self, timeout: float | None = None) -> T:
        """Wait up to *timeout* seconds (None: for ever) and return the value, or raise what went wrong.

        Raises:
            TimeoutError: it was not reached in time; the work goes on.
            BlockingCallError: this thread runs an event loop; ``await`` the future instead.
        """
        self._wait_here(timeout)
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait up to *timeout* seconds and return what went wrong, or None."""
        self._wait_here(timeout)
        self._told = True
        return self._inner.exception() or self._look_again()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def _wait_here(self, timeout: float | None) -> None:
        if self._inner.done():
            return
        self._hurry()
        refuse_in_event_loop(f"waiting for the {self._what}", "await the future")
        try:
            self._inner.exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"{self._what}: not reached within {timeout} s; the work goes on") from None

    async def _wait(self) -> T:
        self._hurry()
        await self._settled()
        return self._value()

    async def _settled(self) -> None:
        """Wait until it is settled, take nothing from it, and hurry nobody."""
        if not self._inner.done():
            reached = anyio.Event()
            wake = _waker(reached)
            self._inner.add_done_callback(lambda _: wake())
            await reached.wait()

    async def _settled_within(self, seconds: float) -> None:
        """Wait until it is settled, or *seconds* have passed."""
        self._hurry()
        with anyio.move_on_after(seconds):
            await self._settled()

    def _hurry(self) -> None:
        """Say that somebody waits now."""
        if not self._inner.done():
            self._on_wait()

    def _value(self) -> T:
        self._told = True
        value, error = self._inner.result(), self._look_again()
        if error is not None:
            raise error
        return value

    def _look_again(self) -> BaseException | None:
        """Return what went wrong although the point was reached."""
        self._late_error = self._late_error or self._on_told()
        return self._late_error

    def _wait_anyway(self, timeout_s: float) -> None:
        """Block until it is settled, even on a thread with an event loop: for the barrier, whose copy runs elsewhere."""
        self._hurry()
        concurrent.futures.wait([self._inner], timeout_s)

    @property
    def _failed(self) -> bool:
        return self._inner.done() and (self._inner.exception() or self._late_error) is not None

    def _resolve(self, value: T) -> None:
        with suppress(concurrent.futures.InvalidStateError):  # settled already, perhaps by another thread this instant
            self._inner.set_result(value)

    def _fail(self, error: BaseException) -> None:
        with suppress(concurrent.futures.InvalidStateError):
            self._inner.set_exception(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._what}: {self._progress()}>"

    def _progress(self) -> str:
        if not self._inner.done():
            return "pending"
        error = self._inner.exception()
        return self._reached if error is None else f"failed, {error!r}"


def _waker(reached: anyio.Event) -> Callable[[], None]:
    """Return a function that sets *reached* from any thread, whatever kind of loop is running here."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio

        token = trio.lowlevel.current_trio_token()

        def wake_trio() -> None:
            with suppress(trio.RunFinishedError):  # the loop that waited is gone; nobody is left to wake
                token.run_sync_soon(reached.set)

        return wake_trio

    def wake() -> None:
        with suppress(RuntimeError):  # the loop that waited is closed; nobody is left to wake
            loop.call_soon_threadsafe(reached.set)

    return wake


class Future(Stage[T]):
    """The outcome of one operation."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._cancel: Callable[[], object] | None = None

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call *callback* with this future when it is done, on the engine's thread, or at once when it is done already."""
        self._inner.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        """Ask the work to stop, from any thread; return False when it is done already."""
        if self.done():
            return False
        if self._cancel is not None:
            self._cancel()
        return True

    def cancelled(self) -> bool:
        """Say whether the work ended because of ``cancel()``."""
        return self.done() and isinstance(self._inner.exception(), SaveCancelledError | asyncio.CancelledError)


class SaveResult(msgspec.Struct, frozen=True):
    """A committed checkpoint: what ``await save`` returns.

    Attributes:
        step, id, generation: which one; *id* is its folder below the root.
        bytes: bytes of the data files that this rank wrote.
        seconds: from the call of ``save()`` to *committed*.
        existed: True when the step was committed before and ``on_exists="skip"`` left it.
        url: the place.
        durable: whether it outlives this host; a memory tier's copy does not.
    """

    step: int
    id: str
    generation: int
    bytes: int
    seconds: float
    existed: bool = False
    url: str = ""
    durable: bool = True


class LoadResult(msgspec.Struct, frozen=True):
    """A checkpoint that was loaded: what ``await load`` returns.

    Attributes:
        step, id, generation: which one.
        bytes: bytes of tensors that were filled; *read_bytes* were read from storage for it, *received_bytes* came from
            other ranks of the ``load_group``, which had read them.
        seconds: from the call to the last verified block.
        skipped: (step id, reason) of newer steps that were not taken.
        url: the place it was read from. (Single blocks that were bad there may have come from another tier.)
        missing, unexpected: names that the checkpoint lacks, and that nobody wanted (``strict=False``).
        differences: in words, what the load removed (plain values that only the state had) or replaced because it could
            not be filled; and with ``strict=False`` all that did not fit and was left as it was.
        left_out: names of the state that stay as they are, because they were left out of the checkpoint when it was saved
            (``save(…, only=…, exclude=…)``).
    """

    step: int
    id: str
    generation: int
    bytes: int
    read_bytes: int
    seconds: float
    received_bytes: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    url: str = ""
    left_out: tuple[str, ...] = ()


class SaveFuture(Future[SaveResult]):
    """One save, through ``snapshotted`` → ``written`` → ``committed``. Awaiting the future means *committed*.

    Attributes:
        step: the step that is saved.
    """

    _reached = "committed"

    def __init__(self, step: int) -> None:
        super().__init__(f"save of step {step}")
        self.step = step
        self._snapshotted: Stage[None] = Stage(f"save of step {step}, snapshotted")
        self._written: Stage[None] = Stage(f"save of step {step}, written")
        self._in_memory: Stage[None] = Stage(f"save of step {step}, in memory")
        self._tiers: dict[str, Stage[SaveResult]] = {}

    def snapshotted(self) -> Stage[None]:
        """The tensors have been copied and may change. Nothing is promised about the disk."""
        return self._snapshotted

    def written(self) -> Stage[None]:
        """This rank's data files and its receipt are flushed; the checkpoint is not visible yet."""
        return self._written

    def in_memory(self) -> Stage[None]:
        """The checkpoint is whole in the memory tier, and would survive this process. Without one: it is committed."""
        return self._in_memory

    def committed(self, tier: object = None) -> Stage[SaveResult]:
        """The checkpoint is durable and visible: for None the same as the future itself, else in that *tier*.

        Args:
            tier: its path or URL, as it was given or as the backend writes it; or the backend.

        Raises:
            UsageError: the checkpointer has no such tier.
            SaveSkippedError (through the stage): the tier does not take this step.
        """
        if tier is None:
            return self
        name = str(getattr(tier, "url", tier))
        if name not in self._tiers:
            have = ", ".join(self._tiers) or "none: give Checkpointer([Tier(…), …])"
            raise UsageError(f"{name!r} is not a tier of this checkpointer; it has {have}")
        return self._tiers[name]

    @property
    def delivered(self) -> bool:
        """Whether somebody has taken the outcome, or was told of the failure by a stage; then nobody is told again."""
        stages: list[Stage[Any]] = [self._snapshotted, self._written, self._in_memory, *self._tiers.values()]
        return self._told or any(stage._told and stage._failed for stage in stages)

    @property
    def stage(self) -> Literal["started", "snapshotted", "written", "committed", "failed"]:
        """How far it is."""
        if not self.done() and not self._written.done():
            self._snapshotted.done()  # who hears of that may change the state
        return self._stage()

    def _stage(self) -> Literal["started", "snapshotted", "written", "committed", "failed"]:
        """The same for people, who change nothing."""
        if self.done():
            return "committed" if self._inner.exception() is None else "failed"
        if self._written.done():
            return "written"
        return "snapshotted" if self._snapshotted._inner.done() else "started"

    def _fail(self, error: BaseException) -> None:
        self._snapshotted._fail(error)
        self._written._fail(error)
        self._in_memory._fail(error)
        for tier in self._tiers.values():
            tier._fail(error)
        super()._fail(error)

    def _reach(self, stage: Stage[None]) -> None:
        """Settle *stage*, and before it those that come first: what tells of them may be late."""
        for one in (self._snapshotted, self._written, self._in_memory):
            one._resolve(None)
            if one is stage:
                return

    def _resolve(self, value: SaveResult) -> None:
        self._reach(self._in_memory)
        super()._resolve(value)

    def _progress(self) -> str:
        return self._stage() if not self.done() else super()._progress()


class LoadFuture(Future[T]):
    """One load. Worker threads fill the tensors; objects are filled by whoever waits first, on that very thread.

    (Schedulers, lazily created optimizer state and plain values are Python objects of the training program: they must
    not change under its feet.) Until somebody waits, the load is not complete: the engine's next call says so.

    Attributes:
        waited_for: whether somebody has waited for it to the end.
        refused: whether somebody tried to, with ``.result()`` inside an event loop; the next load then takes its place.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._finish: Callable[[], T | None] | None = None
        self._finished: T | None = None
        self._agree: Callable[[Exception | None], Stage[None]] | None = None
        self._end: Stage[None] | None = None
        self._finishing = Lock()
        self.waited_for = False
        self.refused = False

    def _wait_here(self, timeout: float | None) -> None:
        try:
            super()._wait_here(timeout)
        except BlockingCallError:
            self.refused = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait up to *timeout* seconds and return what went wrong; None when the tensors are filled, objects not yet."""
        error = super().exception(timeout)
        self.waited_for |= error is not None
        return error

    def _value(self) -> T:
        self.waited_for = True
        value = super()._value()
        end = self._apply()
        if end is not None:
            end.result()
        return value if self._finished is None else self._finished

    async def _wait(self) -> T:
        self.waited_for = True
        self._hurry()
        await self._settled()
        end = None if self._failed else self._apply()
        if end is not None:  # other ranks may need this very loop to get there
            await end._settled()
        return self._value()

    def _apply(self) -> Stage[None] | None:
        """Fill the objects, once; return what is settled when other ranks have done so too, where they must agree."""
        with self._finishing:
            if self._finish is None:
                return self._end
            error: Exception | None = None
            try:
                self._finished = self._finish()
            except Exception as raised:
                if self._agree is None:
                    raise
                error = raised
            self._finish = None
            if self._agree is not None:
                self._end = self._agree(error)
            return self._end
