"""The bridge between training threads and the event loop, over which work crosses threads.

Each engine owns one loop thread (anyio's portal) and worker threads: two from the beginning, more when all are busy.
Guarantees:

- ``submit`` and ``call_soon`` may be called from any thread; re-entry that would deadlock raises instead.
- A forked child is refused by process id: a fork does not copy the threads.
- At interpreter exit ``on_exit`` runs while threads can still work, so that an unwaited save is not lost. Plain
  ``atexit`` is too late: by then the executors are shut down (tried on 3.11 to 3.13).
- ``close`` is idempotent and waits for both kinds of threads; one whose system call hangs is abandoned after a deadline,
  and does not keep the process from ending. If it was not called, and no reference is left, they end
  by themselves. The collector triggers this on any thread and at any point, even under locks of the interpreter: waiting
  for a thread there could block for ever, and with it every thread that begins or ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextvars
import ctypes
import inspect
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal

from aiockpt.errors import BlockingCallError, ClosedError, ForkedProcessError
from aiockpt.runtime.promise import Promise

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Ready = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, BlockingPortal]]
Submitted = concurrent.futures.Future[None]
"""Work that was submitted to a loop."""
Mutex = threading.RLock
"""For critical sections of a few milliseconds, never around a wait for the loop. It is reentrant: a signal handler must not
wait for the thread that it interrupts."""

MOST_WORKERS = 12
"""Worker threads of one engine, at most: four writes, four reads, two checksums, one snapshot, one to spare."""
ENDS_S = 120.0
"""For all threads to end at a close, their tasks' deadlines included."""
GONE_S = 1.0
"""For a system thread to end after its Python thread has: microseconds, on a busy machine milliseconds."""
FIRST_WORKERS = 2
"""Threads that exist from the beginning: they finish a save that was not waited for while the interpreter exits."""


def thread_id() -> int:
    return threading.get_ident()


class LoopThread:
    """One event loop on a background thread, and the worker threads of its blocking calls.

    Args:
        name: shown in thread names.
        on_exit: called once, on the main thread, when the interpreter exits and ``close`` was not called before.
    """

    def __init__(self, name: str, on_exit: Callable[[], object]) -> None:
        self._name = name
        self._pid = os.getpid()
        self._closed = False
        ready: Ready = concurrent.futures.Future()
        # Where threads inherit a context, anyio would mistake the caller's event loop for its own.
        context = contextvars.Context()
        self._thread = threading.Thread(target=context.run, args=(_run_loop, ready), name=f"{name}-loop", daemon=True)
        self._thread.start()
        self._loop, self._portal = ready.result()
        # Made before the workers: where these cannot be started, the loop thread ends all the same.
        self._dropped = weakref.finalize(self, _stop_soon, self._loop, self._portal, self._pid, self._thread)
        # The exit is the business of `_drain_all`: what `atexit` calls comes after the executors are shut down.
        self._dropped.atexit = False
        self._executor = _Workers(MOST_WORKERS, thread_name_prefix=f"{name}-worker")
        _start_first(self._executor)
        self._portal.call(self._set_up)
        self._on_exit = on_exit
        _open_loops.add(self)
        _register_exit_hook()

    def _set_up(self) -> None:
        self._loop.set_default_executor(self._executor)
        _here.is_loop = True
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())

    def cpu_s(self) -> float:
        """Return the processor seconds of the loop thread so far. Nearly all of them hold the interpreter's lock."""
        self.check()
        return time.clock_gettime(self._cpu_clock)

    def check(self) -> None:
        """Raise when this process or thread must not use the loop.

        Raises:
            ForkedProcessError: this is a child of the process that made it.
            ClosedError: the loop was closed.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this checkpointer belongs to process {self._pid} and this is its fork {os.getpid()}: "
                "a fork does not copy its threads. Make a new Checkpointer in the child."
            )
        if self._closed:
            raise ClosedError("this checkpointer is closed: make a new one")

    @property
    def usable(self) -> bool:
        """Whether this process may still submit work."""
        return not self._closed and os.getpid() == self._pid

    def submit(self, work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> concurrent.futures.Future[T]:
        """Start ``work(*args)`` as a task of the loop; cancelling the returned future cancels the task.

        Raises:
            BlockingCallError: this is a loop thread.
        """
        self.check()
        refuse_on_loop_thread("this call")
        return self._portal.start_task_soon(work, *args)

    def call_soon(self, work: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``work(*args)`` on the loop thread, soon; about 5 µs, never blocks."""
        self._loop.call_soon_threadsafe(work, *args)

    def in_worker(self, work: Callable[[*Ts], T], *args: *Ts) -> concurrent.futures.Future[T]:
        """Run ``work(*args)`` on a worker thread; never blocks."""
        self.check()
        return self._executor.submit(work, *args)

    def close(self, *, cancel: bool = False, patience_s: float = ENDS_S) -> None:
        """Stop both kinds of threads when their work is done. Idempotent; does nothing in a forked child.

        Args:
            cancel: the tasks of the loop, first.
            patience_s: after that time, threads that still run are left to the system.
        """
        if self.usable:
            refuse_in_event_loop("close()", "write `await ckpt.aclose()`")
            self._end(cancel, patience_s)

    def discard(self) -> None:
        """Stop a loop that was not used: takes a few milliseconds, inside an event loop too."""
        self._end(cancel=True)

    def _end(self, cancel: bool, patience_s: float = ENDS_S) -> None:
        self._closed = True
        _open_loops.discard(self)
        self._portal.call(self._portal.stop, cancel)
        until_s = time.monotonic() + patience_s
        # The loop first: what tasks clean up at their end still goes to the workers.
        left = [] if join_wholly(self._thread, patience_s) else [self._thread]
        workers = list(self._executor._threads)
        self._executor.shutdown(wait=False, cancel_futures=bool(left))
        left += [thread for thread in workers if not join_wholly(thread, max(0.1, until_s - time.monotonic()))]
        if left:
            names = ", ".join(thread.name for thread in left)
            logger.error("these threads are in a system call that does not return, and are abandoned: %s", names)
        # Last: a close that is interrupted before leaves the end to the collector.
        self._dropped.detach()

    def drain_at_exit(self) -> None:
        """Finish what is in flight while threads still work; see the module."""
        if self.usable:
            self._on_exit()

    def __repr__(self) -> str:
        return f"<LoopThread {self._name!r} {'closed' if self._closed else 'running'}>"


_here = threading.local()


def refuse_on_loop_thread(what: str) -> None:
    """Raise BlockingCallError on the loop thread of an engine, where *what* would wait for itself."""
    if getattr(_here, "is_loop", False):
        raise BlockingCallError(
            f"{what} cannot come from aiockpt's own thread, where callbacks of futures and observers run: it would wait "
            "for itself. Make it on a thread of yours"
        )


def refuse_in_event_loop(what: str, instead: str = "await it, or enter it with `async with`") -> None:
    """Raise BlockingCallError where *what* would block an event loop (`holds_up_event_loop`); *instead* is what to write."""
    refuse_on_loop_thread(what)
    if holds_up_event_loop():
        in_thread = "asyncio.to_thread" if asyncio._get_running_loop() else "trio.to_thread.run_sync"
        raise BlockingCallError(
            f"{what} would block the event loop of this thread: {instead}; or run the function that calls it in a thread, "
            f"`await {in_thread}(function)`"
        )


def runs_event_loop() -> bool:
    """Return whether this very thread is inside a running asyncio or trio loop."""
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:  # anyio.NoEventLoopError where anyio has it
        return False
    return True


WAITING = ("aiockpt.integrations.", "IPython.", "ipykernel.", "marimo.")
"""Packages that block their thread although a loop runs: trainers with our methods, and what runs cells of notebooks."""
_AWAITS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def holds_up_event_loop() -> bool:
    """Return whether a wait in this call would hold up an event loop that runs others meanwhile.

    The callers decide it, the nearest first. A coroutine can await instead. The cell of a notebook, a line of a console, an
    import and a trainer block their thread anyway, although a loop runs there; a wait in them cannot deadlock, because each
    engine has a loop of its own.
    """
    return runs_event_loop() and _may_others_run(sys._getframe(1))


def _may_others_run(frame: FrameType | None) -> bool:
    """Return whether a coroutine is nearer among the callers, from *frame* on, than what blocks its thread anyway."""
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        # The code of a cell is a coroutine if it awaits something. Some releases of IPython name it by its line.
        if module.startswith(WAITING) or code.co_name == "<module>" or code.co_name.startswith("<cell line"):
            return False
        if code.co_flags & _AWAITS:
            return True
        frame = frame.f_back
    return True


@contextmanager
def made_for_the_loop() -> Iterator[None]:
    """Make anyio's locks and events usable on a loop thread when made in the block, or in the decorated function.

    anyio makes them for the kind of event loop that the current thread runs: in a trio program they would be trio's,
    and nothing on our loop could wait for them.
    """
    sniffio = sys.modules.get("sniffio")  # how trio marks that it runs
    if sniffio is None:
        yield
        return
    runs, sniffio.thread_local.name = sniffio.thread_local.name, None
    token = sniffio.current_async_library_cvar.set(None)
    try:
        yield
    finally:
        sniffio.thread_local.name = runs
        sniffio.current_async_library_cvar.reset(token)


def ends_within(work: Submitted, seconds: float) -> bool:
    """Block until *work* has an outcome, or *seconds* have passed; return whether it has."""
    return bool(concurrent.futures.wait([work], seconds).done)


def join_wholly(thread: threading.Thread, timeout_s: float | None = None) -> bool:
    """Wait until *thread* has ended, and the system's thread below it; return whether it has.

    Before Python 3.13 `join` returns while the system's thread still releases its C++ thread-local objects. If the process
    ends at that moment, it can abort ("terminate called without an active exception").
    """
    thread.join(timeout_s)
    if thread.is_alive():
        return False
    own = f"/proc/self/task/{thread.native_id}"
    until_s = time.monotonic() + GONE_S
    while os.path.exists(own) and time.monotonic() < until_s:
        time.sleep(0.0002)
    return True


async def run_in_thread(what: str, work: Callable[[], T]) -> T:
    """Run *work* on a thread of its own, which ends with it; wait for it in any event loop, even when cancelled.

    Threads of anyio end by a callback of the program's main task. `nest_asyncio` stops a loop before that is called, and the
    interpreter then waits for them for ever.
    """
    done: Promise[T] = Promise(what)

    def run() -> None:
        try:
            done.resolve(work())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            done.fail(error)

    thread = threading.Thread(target=run, name="aiockpt-close")
    thread.start()
    with anyio.CancelScope(shield=True):
        await done.settled()
    join_wholly(thread)
    return done.value


class _Loop(asyncio.SelectorEventLoop):
    """A loop that ends without a thread of its own: from Python 3.12 on none can be started while the interpreter exits."""

    _workers: concurrent.futures.Executor | None = None

    def set_default_executor(self, executor: concurrent.futures.ThreadPoolExecutor) -> None:  # type: ignore[override]
        super().set_default_executor(executor)
        self._workers = executor

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Make the workers end when they are idle; all that was awaited is done by now."""
        if self._workers is not None:
            self._workers.shutdown(wait=False)


def _run_loop(ready: Ready) -> None:
    """Run an event loop on this thread until its portal is stopped."""

    async def serve() -> None:
        async with BlockingPortal() as portal:
            ready.set_result((asyncio.get_running_loop(), portal))
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend_options={"loop_factory": _Loop})
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


def _stop_soon(loop: asyncio.AbstractEventLoop, portal: BlockingPortal, pid: int, thread: threading.Thread) -> None:
    """Make an unreferenced loop and its workers end, without waiting for anything."""
    if os.getpid() == pid:
        _stopping.add(thread)
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(lambda: loop.create_task(portal.stop(cancel_remaining=True)))


class _Workers(concurrent.futures.ThreadPoolExecutor):
    """Starts a thread when all are busy, and continues with those it has when no other can be started.

    From Python 3.12 on no thread can be started while the interpreter exits; submitted work then waits in the queue. The
    interpreter waits for none of them at its end: `LoopThread.close` has, and a hanging system call ends never.
    """

    def _adjust_thread_count(self) -> None:
        caller = threading.current_thread()
        is_daemon, caller._daemonic = caller.daemon, True  # type: ignore[attr-defined]
        try:
            super()._adjust_thread_count()  # not public; a test keeps it in the library
        except RuntimeError:
            if not self._threads:
                raise
        finally:
            caller._daemonic = is_daemon  # type: ignore[attr-defined]
        for thread in self._threads:
            concurrent.futures.thread._threads_queues.pop(thread, None)  # type: ignore[attr-defined]


def _start_first(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    """Start the first threads now, as many as a program that only exits may need."""
    gate = threading.Event()
    # All of them wait at once: an executor starts no thread while another one is idle.
    waiting = [executor.submit(gate.wait) for _ in range(FIRST_WORKERS)]
    gate.set()
    concurrent.futures.wait(waiting)


_open_loops: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_stopping: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_STOP_S = 5.0
"""For an unreferenced loop to close its connections before the interpreter exits."""
_exit_hook = threading.Lock()
_exit_hook_registered = False


def _register_exit_hook() -> None:
    global _exit_hook_registered
    with _exit_hook:
        if not _exit_hook_registered:
            # These hooks run in reverse order: ours before that of concurrent.futures.thread, which stops the executors
            # and was registered when it was imported above.
            threading._register_atexit(_drain_all)  # type: ignore[attr-defined]
            _exit_hook_registered = True


def _drain_all() -> None:
    failed = False
    for loop in list(_open_loops):
        try:
            loop.drain_at_exit()
        except BaseException as error:  # noqa: BLE001  reported as one that ends the program, to whatever tracks such errors
            sys.excepthook(type(error), error, error.__traceback__)
            failed = True
    for thread in list(_stopping):
        thread.join(_STOP_S)
    if failed:
        _fail_exit()


def _fail_exit() -> None:
    """Make this process end with status 1, after all that anything else does at its end.

    Python has no way to say so: an error in a callback is printed only, and `os._exit` skips the callbacks of others.
    The C library's ``exit`` may be called by a callback of its own: it goes on with the others, and has the new status.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A child of it calls these hooks itself, and has status 1 where they raise; the hooks behind this one come first.
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        raise SystemExit(1)
    libc = ctypes.CDLL(None)
    register = libc["__cxa_atexit"]
    register(ctypes.cast(libc["exit"], ctypes.c_void_p), ctypes.c_void_p(1), None)
