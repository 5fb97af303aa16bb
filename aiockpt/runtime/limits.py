"""Limits on concurrent work: named limiters for threads, a pace for bytes, and calls on worker threads;
and task groups that raise one plain error.

Guarantees:

- Waiting for a limit is fair (first come, first served) and cancellable; work that has begun is not: a thread that
  holds a slab, a file or a caller's buffer is never abandoned, so nothing is reused while it is in use.
- Work is started only after it has acquired its place, which is released in ``finally``.
- Work that does not return, since its system call hangs, fails what waits for it (`FileCalls`), and keeps what it holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import Event
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup

from aiockpt.errors import StorageError, StorageTimeoutError
from aiockpt.events import LimiterStatistics
from aiockpt.runtime.world import Clock

# Progress marks: transfers call `note_progress`; a waiter times out only when none comes.
#
# Successful calls and streams of bytes emit them; work that cannot be observed announces itself ahead of time. A
# listener receives those of its own task and of tasks begun in it.


OnProgress = Callable[[float], object]
"""Called on progress, with the seconds from now for which no further progress can be observed."""
_on_progress: ContextVar[OnProgress | None] = ContextVar("on_progress", default=None)


def note_progress(unseen_s: float = 0.0) -> None:
    """Report progress, or that progress cannot be observed for *unseen_s* seconds from now."""
    on_progress = _on_progress.get()
    if on_progress is not None:
        on_progress(unseen_s)


@contextmanager
def reporting_progress(on_progress: OnProgress) -> Iterator[None]:
    """Call *on_progress* for progress inside the block, and in tasks begun there."""
    token = _on_progress.set(on_progress)
    try:
        yield
    finally:
        _on_progress.reset(token)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


SLOWEST_BYTES_PER_S = 4 << 20
"""A call that moves bytes may take longer by this rate until it counts as hanging."""
doing: ContextVar[str] = ContextVar("doing", default="a call")
"""What the next call on a worker thread does, in words, for messages."""
_calls: ContextVar[tuple[FileCalls, Callable[[StorageError], object]] | None] = ContextVar("calls", default=None)


class FileCalls:
    """The calls of file systems of one checkpointer that are under way. On its event loop, but for `late`.

    A system call on a mount that does not answer never returns, and its thread, slab and descriptor stay with it. So the
    operation that waits for it fails, while its tasks go on waiting: if the mount answers again, all is returned.

    Args:
        limit_s: for one call to return; calls that move bytes get longer.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun_s: dict[object, tuple[float, str]] = {}
        self._now_s: Callable[[], float] = time.monotonic

    @contextmanager
    def failing(self, fail: Callable[[StorageError], object]) -> Iterator[None]:
        """Call *fail* when a call inside the block, or in tasks begun there, does not return in time."""
        token = _calls.set((self, fail))
        try:
            yield
        finally:
            _calls.reset(token)

    @contextmanager
    def watching(self, limiter: Limiter, moves_bytes: int, fail: Callable[[StorageError], object]) -> Iterator[None]:
        """Watch the call in the block, its wait for *limiter* included while no other call there returns."""
        loop, limit_s = asyncio.get_running_loop(), self._limit_s + moves_bytes / SLOWEST_BYTES_PER_S
        what, call, ended_count = doing.get(), object(), limiter.ended_count

        timer = loop.call_later(limit_s, lambda: check())

        def check() -> None:
            nonlocal timer, ended_count
            if limiter.ended_count != ended_count and limiter.is_full:
                ended_count, timer = limiter.ended_count, loop.call_later(limit_s, check)
                return
            fail(_hangs(f"{what} has not returned for {limit_s:.0f} s"))

        self._now_s = loop.time
        self._begun_s[call] = (loop.time(), what)
        try:
            yield
        finally:
            timer.cancel()
            del self._begun_s[call]

    def late(self, seconds: float | None = None) -> list[str]:
        """Return in words which calls have not returned for that long; for None, for longer than the limit."""
        limit_s, now_s = self._limit_s if seconds is None else seconds, self._now_s()
        begun = list(self._begun_s.values())
        return [f"{what} ({now_s - begun_s:.0f} s)" for begun_s, what in begun if now_s - begun_s >= limit_s]

    def refuse_while_late(self) -> None:
        """Raise StorageTimeoutError while a call hangs: another one would, too."""
        if late := self.late():
            raise _hangs(f"{late[0]} still hangs")


def _hangs(what: str) -> StorageTimeoutError:
    return StorageTimeoutError(
        f"{what}: its file system does not answer. Look at the mount (df, the kernel's log, its server). If the call ends"
        " later, what it was to do takes effect: do not use a state that it was to fill, and save again"
    )


class Limiter:
    """At most *limit* at once, by name. Use as ``async with limiter:`` on one event loop.

    Attributes:
        ended_count: how many have ended.
    """

    def __init__(self, name: str, limit: int, *, may_hang: bool = False) -> None:
        if limit < 1:
            raise ValueError(f"limiter {name!r}: the limit is {limit}, give at least 1")
        self.name = name
        self._limit = limit
        self._semaphore = anyio.Semaphore(limit, fast_acquire=True)  # a free place costs no turn of the loop
        self._peak = 0
        self.may_hang = may_hang
        self.ended_count = 0

    @property
    def is_full(self) -> bool:
        """Whether another one would have to wait."""
        return self._semaphore.value == 0

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self._peak = max(self._peak, self._limit - self._semaphore.value)

    async def __aexit__(self, *_: object) -> None:
        self.ended_count += 1
        self._semaphore.release()

    def statistics(self) -> LimiterStatistics:
        seen = self._semaphore.statistics()
        return LimiterStatistics(
            self.name, self._limit, self._limit - self._semaphore.value, seen.tasks_waiting, self._peak
        )

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"<Limiter {self.name!r} {seen.running}/{seen.limit} running, {seen.waiting} waiting>"


async def run_blocking(limiter: Limiter, work: Callable[[*Ts], T], *args: *Ts, moves_bytes: int = 0) -> T:
    """Run ``work(*args)`` on a worker thread of the running loop, under *limiter*, and return what it returns.

    A cancellation that comes while the thread runs is held back until the thread is done, then raised: whatever
    *work* holds is free when this returns. It uses the loop's default executor, which the engine starts beforehand
    (Python 3.12 and later cannot start threads while the interpreter exits).

    Args:
        moves_bytes: what the call moves, for the time that it may take where *limiter* is of calls that may hang.
    """
    watch = _calls.get() if limiter.may_hang else None
    watching = nullcontext() if watch is None else watch[0].watching(limiter, moves_bytes, watch[1])
    with watching:
        async with limiter:
            running = asyncio.get_running_loop().run_in_executor(None, work, *args)
            if running.done():  # a simulation does the work at once
                return running.result()
            # The shield holds back anyio's cancellations, and not those of asyncio itself (`Task.cancel`). `wait`, unlike
            # an await of the future, does not cancel what it waits for.
            with anyio.CancelScope(shield=True):
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError:
                    await _outwait(running)
                    raise
            return running.result()


Threads = ThreadPoolExecutor
"""The pool that `open_threads` yields."""


@contextmanager
def open_threads(count: int, name: str) -> Iterator[Threads | None]:
    """Yield *count* threads that share work with this one; None if *count* is 0, or not all can be started.

    They have ended when the block ends, whatever its outcome.
    """
    if not count:
        yield None
        return
    with ThreadPoolExecutor(count, name) as threads:
        started: Threads | None = threads
        all_there = Event()
        try:
            for _ in range(count):
                # Each call starts a thread, as those before it are waiting.
                threads.submit(all_there.wait)
        except RuntimeError:  # the interpreter ends, or the system gives no more
            started = None
        all_there.set()
        yield started


async def _outwait(running: asyncio.Future[T]) -> None:
    """Wait until *running* is done, even when this task is cancelled meanwhile."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # read, so that asyncio does not log it as never retrieved


class Pace:
    """Lets *bytes_per_s* through, evenly. Use on one event loop.

    Args:
        bytes_per_s: None lets everything through.
        clock: measures the time.
    """

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a pace of {bytes_per_s} bytes/s: give more than 0, or None")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_ns = 0

    async def throttle(self, size_bytes: int) -> None:
        """Wait until *size_bytes* may go."""
        if self._bytes_per_s is None:
            return
        now_ns = self._clock.monotonic_ns()
        begin_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = begin_ns + round(size_bytes / self._bytes_per_s * 1e9)
        wait_s = (begin_ns - now_ns) / 1e9
        # Announced: a transfer that waits for its turn is not a stalled one.
        note_progress(wait_s)
        await anyio.sleep(wait_s)


# Task groups that end together and raise one plain error.
#
# anyio's task group wraps every failure in an exception group. Callers of aiockpt never need ``except*``: here the first
# error that is not a cancellation is raised alone, with its own traceback.


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group; when it fails, raise its first error instead of the group."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = first_error(group)
        raise error from error.__cause__  # without the group, and with what the error itself was raised from


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of *group*, looking into groups inside it."""
    for error in group.exceptions:
        return first_error(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")
