"""Futures of saves, loads and other operations, and their results; `aiockpt.runtime.promise` resolves them.

Each can be awaited from any event loop (asyncio, trio), waited for with ``.result(timeout)``, given callbacks, or ignored.
Waiting never owns the work: a wait that is cancelled or timed out leaves the save running; only ``.cancel()`` cancels.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

import msgspec

from aiockpt.errors import BlockingCallError, SaveCancelledError, UsageError
from aiockpt.runtime.loop import holds_up_event_loop, refuse_in_event_loop
from aiockpt.runtime.promise import LoadPromise, Promise, SavePromise
from aiockpt.runtime.promise import SaveResult as SaveResult

T = TypeVar("T")


class LoadResult(msgspec.Struct, frozen=True):
    """A checkpoint that was loaded: what ``await load`` returns.

    Attributes:
        step, id, generation: which one; -1, "" and 0 of a foreign checkpoint, after which training begins at step 0.
        bytes: bytes of tensors that were filled; *read_bytes* were read from storage for it, *received_bytes* came from
            other ranks of the ``load_group``, which had read them.
        seconds: from the call to the last verified block.
        skipped: (step id, reason) of steps that were skipped on the way.
        url: the place it was read from. (Single blocks that were bad there may have come from another tier.)
        missing, unexpected: names that the checkpoint lacks, and that the state does not have (``strict=False``).
        differences: in words, what the load removed (plain values that only the state had) or replaced because it could
            not be filled; and with ``strict=False`` all that did not fit and was left as it was.
        left_out: names of the state that stay as they are, because they were left out of the checkpoint when it was saved
            (``save(…, only=…, exclude=…)``).
        saved_ns: when the step was saved, in nanoseconds since 1970, by the clock of the process that saved it; 0 for a
            foreign checkpoint.
        config_changes: what of ``Checkpointer(…, config=…)`` has changed since the step was saved, one line each.
        renamed: the effect of ``rename=`` on this rank: name in the checkpoint → name in the state.
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
    renamed: Mapping[str, str] = {}
    config_changes: tuple[str, ...] = ()
    saved_ns: int = 0


class Stage(Generic[T]):
    """A point that the work reaches once, with a value, or never, with an error."""

    _reached = "done"

    def __init__(self, promise: Promise[T]) -> None:
        self._promise = promise

    def done(self) -> bool:
        """Return whether the point was reached or the work has failed."""
        if self._promise.is_settled:
            self._promise.recheck()
        return self._promise.is_settled

    def result(self, timeout: float | None = None) -> T:
        """Wait up to *timeout* seconds (None: for ever) and return the value, or raise what went wrong.

        Raises:
            TimeoutError: it was not reached in time; the work goes on.
            BlockingCallError: this thread runs an event loop; ``await`` the future instead.
        """
        self._wait_here(timeout)
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait up to *timeout* seconds and return the error, or None."""
        self._wait_here(timeout)
        self._promise.retrieved = True
        return self._promise.error or self._promise.recheck()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self!r} is neither true nor false before it is waited for: write `.result()` or `await` for its value, "
            "`is not None` where there may be no future"
        )

    def _wait_here(self, timeout: float | None) -> None:
        promise = self._promise
        if promise.is_settled:
            return
        promise.expedite()
        refuse_in_event_loop(f"waiting for the {promise.what}", "await the future")
        if not promise.wait_anyway(timeout):
            raise TimeoutError(f"{promise.what}: not reached within {timeout} s; the work goes on")

    async def _wait(self) -> T:
        self._promise.expedite()
        await self._promise.settled()
        return self._value()

    def _value(self) -> T:
        return self._promise.retrieve()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._promise.what}: {self._progress()}>"

    def _progress(self) -> str:
        if not self._promise.is_settled:
            return "pending"
        error = self._promise.error
        return self._reached if error is None else f"failed, {error!r}"


class Future(Stage[T]):
    """The outcome of one operation."""

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call *callback* with this future when it is done, on the engine's thread, or at once when it is done already."""
        self._promise.when_settled(lambda: callback(self))

    def cancel(self) -> bool:
        """Ask the work to stop, from any thread; return False when it is done already."""
        return not self.done() and self._promise.cancel()

    def cancelled(self) -> bool:
        """Return whether the work ended because of ``cancel()``."""
        return self.done() and isinstance(self._promise.error, SaveCancelledError | asyncio.CancelledError)


class SaveFuture(Future[SaveResult]):
    """One save, through ``snapshotted`` → ``written`` → ``committed``. Awaiting the future means *committed*.

    Attributes:
        step: the step that is saved.
    """

    _reached = "committed"

    def __init__(self, promise: SavePromise) -> None:
        super().__init__(promise)
        self.step = promise.step
        self._save = promise

    def snapshotted(self) -> Stage[None]:
        """The tensors have been copied and may change. Nothing is promised about the disk."""
        return Stage(self._save.snapshotted)

    def written(self) -> Stage[None]:
        """This rank's data files and its receipt are flushed; the checkpoint is not visible yet."""
        return Stage(self._save.written)

    def in_memory(self) -> Stage[None]:
        """The checkpoint is whole in the memory tier, and would survive this process. Without one: it is committed."""
        return Stage(self._save.in_memory)

    def replicated(self) -> Stage[None]:
        """Every file is in the memory of as many other hosts as ``Tier("peer://…", copies=…)`` says. Else: it is committed.

        Raises:
            SaveSkippedError (through the stage): newer steps were copied before this one was.
        """
        return Stage(self._save.replicated)

    def committed(self, tier: object = None) -> Stage[SaveResult]:
        """The checkpoint is durable and visible: for None the same as the future itself, else in that *tier*.

        Args:
            tier: its path or URL, as it was given or as the backend writes it; or the backend.

        Raises:
            UsageError: the checkpointer has no such tier.
            SaveSkippedError (through the stage): the tier does not accept this step.
        """
        if tier is None:
            return self
        name, tiers = str(getattr(tier, "url", tier)), self._save.tiers
        if name not in tiers:
            have = ", ".join(tiers) or "none: give Checkpointer([Tier(…), …])"
            raise UsageError(f"{name!r} is not a tier of this checkpointer; it has {have}")
        return Stage(tiers[name])

    @property
    def delivered(self) -> bool:
        """Whether the outcome was retrieved, or a stage has raised the failure; then it is not reported again."""
        return self._save.delivered

    @property
    def stage(self) -> Literal["started", "snapshotted", "written", "committed", "failed"]:
        """The last stage that the save has reached."""
        if not self.done() and not self._save.written.is_settled:
            self.snapshotted().done()  # the caller may change the state after that
        return self._stage()

    def _stage(self) -> Literal["started", "snapshotted", "written", "committed", "failed"]:
        """The same, for display: it changes nothing."""
        if self._save.is_settled:
            return "committed" if self._save.error is None else "failed"
        if self._save.written.is_settled:
            return "written"
        return "snapshotted" if self._save.snapshotted.is_settled else "started"

    def _progress(self) -> str:
        return super()._progress() if self._save.is_settled else self._stage()


def promise_of(save: SaveFuture) -> SavePromise:
    """Return the promise of the engine, for observers beside the caller: it does not retrieve the outcome."""
    return save._save  # noqa: SLF001  both are of this module


class LoadFuture(Future[T]):
    """One load. Worker threads fill the tensors; objects are filled by the first wait, on its own thread.

    (Schedulers, lazily created optimizer state and plain values are Python objects of the training program: they must
    not change while it runs.) Without a wait the load stays incomplete: the future warns when it
    is dropped, and the checkpointer's next call, or its end, raises.
    """

    def __init__(self, promise: LoadPromise[T]) -> None:
        super().__init__(promise)
        self._load = promise

    def __del__(self) -> None:
        load = self.__dict__.get("_load")
        if load is not None and not (load.waited_for or load.refused):
            warnings.warn(
                f"the {load.what} {_FORGOTTEN}: call .result() on it, or await it",
                RuntimeWarning,
                stacklevel=2,
            )

    def cancel(self) -> bool:
        """Ask the load to stop, from any thread; return False when it is done already.

        The state may be partly overwritten: load again before it is used. The next load waits until this one has stopped.
        """
        asked = super().cancel()
        self._load.refused |= asked
        return asked

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait up to *timeout* seconds and return the error; None when the tensors are filled (objects are not yet)."""
        error = super().exception(timeout)
        self._load.waited_for |= error is not None
        return error

    def _wait_here(self, timeout: float | None) -> None:
        with self._noting_interrupt():
            try:
                super()._wait_here(timeout)
            except BlockingCallError:
                self._load.refused = True
                raise

    async def _wait(self) -> T:
        self._load.waited_for = True
        self._load.expedite()
        with self._noting_interrupt():
            await self._load.settled()
            if (agreed := self._load.finish()) is not None:  # other ranks may need this very loop to get there
                await agreed.settled()
        return self._value()

    def _value(self) -> T:
        self._load.waited_for = True
        with self._noting_interrupt():
            if (agreed := self._load.finish()) is not None:
                Stage(agreed).result()
        return self._load.retrieve()

    @contextmanager
    def _noting_interrupt(self) -> Iterator[None]:
        """Note that a wait is interrupted, or cancelled: a part of the state may be filled, and the next load fills it."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._load.waited_for, self._load.refused = False, True
            raise


_FORGOTTEN = "was never waited for, so the state is not complete"


def run_blocking_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because it waits by `wait_here` alone; return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits in another way")


async def wait_here(stage: Stage[T]) -> T:
    """Block until *stage* is reached; return its value."""
    return stage.result()


async def wait_in_loop(stage: Stage[T]) -> T:
    """Await *stage*; return its value."""
    return await stage


class StartedLoads:
    """The loads of one checkpointer that no caller has waited for yet."""

    def __init__(self) -> None:
        self._loads: list[LoadPromise[Any]] = []

    def add(self, load: LoadPromise[Any]) -> None:
        """Record a load that begins."""
        self._loads.append(load)

    def take_refused(self) -> list[LoadPromise[Any]]:
        """Return, and forget, those that a caller could not wait for, or cancelled: a new load replaces them."""
        refused = [load for load in self._loads if load.refused]
        self._loads = [load for load in self._loads if not load.refused]
        return refused

    def check(self, *, ending: bool = False) -> None:
        """Raise, once, for a load that was never waited for.

        A load of another thread may still be waited for, now or soon; only that thread's own next call checks it.

        Args:
            ending: whether no call follows, which could need the state of a load that was cancelled.

        Raises:
            UsageError: there is one.
        """
        if self._loads:
            self._check(ending)

    def _check(self, ending: bool) -> None:
        abandoned = [load for load in self._loads if load.is_abandoned and not (ending and load.refused)]
        self._loads = [load for load in self._loads if not load.waited_for and load not in abandoned]
        if abandoned:
            raise _refusal(abandoned[0])


def _refusal(abandoned: LoadPromise[Any]) -> UsageError:
    """Return why the state of a load that was never waited for must not be used."""
    load, waits_for_none = LoadFuture(abandoned), holds_up_event_loop()
    is_torn = load.cancelled() or (abandoned.refused and not waits_for_none)
    abandoned.refused = True  # the future just made must not warn of the same when it is dropped
    if is_torn:
        return UsageError(f"{load!r} may have overwritten a part of the state: load again before you use it")
    advice = "write `await ckpt.load(…)`" if waits_for_none else "call .result() on it, or await it"
    return UsageError(f"{load!r} {_FORGOTTEN}: {advice}")
