"""A loop that runs a whole `aiockpt.Checkpointer` on the caller's event loop: one thread, so that every run is the same.

Pass it to a checkpointer as ``World(…, make_loop=InlineLoop)``, inside a program that runs on one thread
(`tests.simulated.simulation.run_inline`, `tests.simulated.virtual_time`). Guarantees:

- Background work of the checkpointer runs as tasks of the running loop, while the program awaits, in an order that
  depends only on the program and its world.
- A task's error that is no ``Exception`` (a simulated crash of the process) is kept: `InlineLoop.idle` raises it.
- The loop has no shutdown: a simulated process ends like a killed one. Await `InlineLoop.idle` to finish its background
  work first, and close the backend. ``close`` and ``aclose`` would block the only thread, and are refused.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import anyio

from aiockpt.errors import BlockingCallError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class InlineLoop:
    """Stands in for the threads of one checkpointer (`aiockpt.runtime.world.Loop`); used inside a running event loop."""

    usable = True

    def __init__(self, name: str, on_exit: Callable[[], object]) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None

    def check(self) -> None:
        """Do nothing: the loop is used by one process and never ends."""

    def cpu_s(self) -> float:
        """Return the processor seconds of the one thread."""
        return time.thread_time()

    def submit(self, work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> concurrent.futures.Future[T]:
        """Start ``work(*args)`` as a task of the running loop; cancelling the returned future cancels the task.

        Raises:
            BlockingCallError: no event loop runs on this thread.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        task = _running_loop().create_task(self._run(future, work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _run(self, future: concurrent.futures.Future[T], work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> None:
        """Resolve *future* with the outcome of ``work(*args)``."""
        try:
            with anyio.CancelScope() as scope:
                future.add_done_callback(lambda settled: scope.cancel() if settled.cancelled() else None)
                result = await work(*args)
                if not future.cancelled():
                    future.set_result(result)
        except asyncio.CancelledError:  # with the event loop
            future.cancel()
            raise
        except BaseException as error:  # noqa: BLE001  the future carries it to the caller
            if not isinstance(error, Exception):
                self._crash = self._crash or error
            if not future.cancelled():
                future.set_exception(error)

    def call_soon(self, work: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``work(*args)`` in one of the next turns of the loop, in the order of the calls."""
        _running_loop().call_soon(work, *args)

    def in_worker(self, work: Callable[[*Ts], T], *args: *Ts) -> concurrent.futures.Future[T]:
        """Run ``work(*args)`` at once."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001  as a worker thread does
            future.set_exception(error)
        return future

    async def idle(self) -> None:
        """Wait until all submitted work has ended; raise the error of a simulated crash."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._crash is not None:
            raise self._crash

    def close(self, *, cancel: bool = False, patience_s: float = 0.0) -> None:
        """Do nothing: the program's event loop goes on."""

    def discard(self) -> None:
        """Cancel the running tasks."""
        for task in self._tasks:
            task.cancel()

    def __repr__(self) -> str:
        return f"<InlineLoop {self._name!r}, {len(self._tasks)} tasks>"


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise BlockingCallError(
            "this checkpointer runs on an InlineLoop: call it inside the event loop, on its thread; close() and aclose() "
            "need another thread, and are not supported"
        ) from None
