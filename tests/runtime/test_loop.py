"""Threads meet the loop without deadlock, fork or exit surprises."""

import contextvars
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from aiockpt.errors import BlockingCallError, ClosedError, ForkedProcessError
from aiockpt.runtime.loop import (
    FIRST_WORKERS,
    MOST_WORKERS,
    LoopThread,
    holds_up_event_loop,
    refuse_in_event_loop,
    runs_event_loop,
)
from tests.run_python import run_python


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test", on_exit=lambda: None)
    yield loop
    loop.close()


async def _name() -> str:
    await anyio.lowlevel.checkpoint()
    return threading.current_thread().name


def test_work_runs_on_the_loop_thread(loop: LoopThread) -> None:
    assert loop.submit(_name).result() == "test-loop"
    assert loop.in_worker(lambda: threading.current_thread().name).result().startswith("test-worker")


def test_call_soon_keeps_the_order(loop: LoopThread) -> None:
    seen: list[int] = []
    done = threading.Event()
    for number in range(100):
        loop.call_soon(seen.append, number)
    loop.call_soon(done.set)
    assert done.wait(250)
    assert seen == list(range(100))


def test_cancelling_the_future_cancels_the_task(loop: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    future = loop.submit(work)
    assert started.wait(250)
    assert future.cancel()
    assert ended.wait(250)


def test_after_close_it_refuses_and_close_is_idempotent(loop: LoopThread) -> None:
    loop.close()
    loop.close()
    with pytest.raises(ClosedError, match="make a new one"):
        loop.submit(_name)
    assert "closed" in repr(loop)


async def test_a_blocking_call_inside_an_event_loop_is_refused(loop: LoopThread) -> None:
    assert runs_event_loop()
    with pytest.raises(BlockingCallError, match=r"write `await ckpt\.aclose"):
        loop.close()
    assert not await anyio.to_thread.run_sync(runs_event_loop)


def test_a_blocking_call_elsewhere_is_allowed() -> None:
    assert not runs_event_loop()
    refuse_in_event_loop("x")


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """Return what *work* returns in a forked child."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write_end, work())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(read_end, 1000)
    os.close(read_end)
    os.close(write_end)
    return answer


CALLERS = """
from aiockpt.runtime.loop import holds_up_event_loop

def function(ask=holds_up_event_loop): return ask()
async def coroutine(ask=holds_up_event_loop): return ask()
async def generator(ask=holds_up_event_loop): yield ask()
imported = holds_up_event_loop()
"""


def callers(module: str) -> dict[str, Any]:
    """Return the functions of a module of this name, which is imported here."""
    scope: dict[str, Any] = {"__name__": module}
    exec(CALLERS, scope)
    return scope


async def check_callers() -> None:
    user, trainer, cell = map(callers, ("train", "aiockpt.integrations.some", "IPython.core.interactiveshell"))
    assert user["function"]()
    assert await user["coroutine"]()
    assert [held async for held in user["generator"]()] == [True]
    assert not user["imported"]
    assert not trainer["function"]()
    assert not trainer["function"](user["function"])
    # A coroutine within a trainer, or within what a cell has called, can await.
    with pytest.raises(StopIteration) as stop:
        trainer["function"](lambda: user["coroutine"]().send(None))
    assert stop.value.value is True
    assert not await cell["coroutine"]()
    assert not await cell["coroutine"](user["function"])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_who_calls_decides_whether_a_loop_is_held_up(backend: str) -> None:
    assert not holds_up_event_loop()
    anyio.run(check_callers, backend=backend)


def test_the_refusal_names_what_can_be_written_there() -> None:
    async def refuse() -> str:
        with pytest.raises(BlockingCallError) as refused:
            refuse_in_event_loop("x", "await y")
        return str(refused.value)

    for backend, in_thread in (("asyncio", "asyncio.to_thread"), ("trio", "trio.to_thread.run_sync")):
        message = anyio.run(refuse, backend=backend)
        assert message.endswith(
            f"await y; or run the function that calls it in a thread, `await {in_thread}(function)`"
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_may_close_harmlessly(loop: LoopThread) -> None:
    def submit_and_close() -> bytes:
        try:
            loop.submit(_name)
            answer = b"accepted"
        except ForkedProcessError as error:
            answer = str(error).encode()
        loop.close()
        return answer

    assert b"Make a new Checkpointer in the child" in in_a_fork(submit_and_close)


def test_the_exit_hook_runs_while_threads_still_work() -> None:
    script = """
from aiockpt.runtime.loop import LoopThread
from aiockpt.runtime.limits import Limiter, run_blocking
async def work():
    return await run_blocking(Limiter("x", 1), lambda: "flushed at exit")
def drain():
    print(loop.submit(work).result(), flush=True)
    loop.close()
loop = LoopThread("test", on_exit=drain)
"""
    run = run_python("-c", script)
    assert (run.stdout, run.stderr) == ("flushed at exit\n", "")


def test_a_drain_that_fails_at_the_exit_keeps_no_other_loop_from_its_own() -> None:
    script = """
from aiockpt.runtime.loop import LoopThread
def drain(number):
    print(number, flush=True)
    loops[number].close()
    raise TimeoutError("this one is late")
loops = [LoopThread(f"test-{number}", on_exit=lambda number=number: drain(number)) for number in range(3)]
"""
    run = run_python("-c", script, status=None)
    assert sorted(run.stdout.split()) == ["0", "1", "2"]
    assert "this one is late" in run.stderr


def test_a_dropped_checkpointer_is_collected_while_the_interpreter_begins_or_ends_a_thread() -> None:
    """The collector runs where it likes, under locks that every thread needs when it begins or ends."""
    script = """
import contextlib, gc, sys, tempfile, threading, time
import aiockpt
with tempfile.TemporaryDirectory() as root:
    gc.disable()
    ckpt = aiockpt.Checkpointer(root)
    ckpt.save(1, {"value": 1}).result()
    del ckpt
    until = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < until:
        with contextlib.ExitStack() as locks:
            for name in ("_active_limbo_lock", "_shutdown_locks_lock"):  # 3.13 has only the first
                locks.enter_context(getattr(threading, name, contextlib.nullcontext()))
            gc.collect()
        time.sleep(0.01)
    print([thread.name for thread in threading.enumerate()])
"""
    run = run_python("-c", script)
    assert (run.stdout, run.stderr) == ("['MainThread']\n", "")


def test_a_dropped_checkpointer_of_the_parent_is_left_alone_in_a_fork(loop: LoopThread) -> None:
    def drop() -> bytes:  # the copy of the loop, whose wake-up socket is the parent's
        asked: list[object] = []
        loop._loop.call_soon_threadsafe = lambda callback, *_, **__: asked.append(callback)  # type: ignore[assignment]
        loop._dropped()
        return b"woken" if asked else b"left alone"

    assert in_a_fork(drop) == b"left alone"


def test_a_loop_is_made_inside_an_event_loop_also_where_threads_inherit_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Inheriting(threading.Thread):
        """As threads of a Python without the GIL are."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._inherited = contextvars.copy_context()

        def run(self) -> None:
            self._inherited.run(super().run)

    async def make() -> LoopThread:
        with monkeypatch.context() as patch:
            patch.setattr("aiockpt.runtime.loop.threading.Thread", Inheriting)
            return LoopThread("inheriting", on_exit=lambda: None)

    loop = anyio.run(make)
    assert loop.submit(_name).result() == "inheriting-loop"
    loop.close()


def test_a_loop_that_cannot_be_made_says_so_to_whoever_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("aiockpt.runtime.loop._Loop", refuse)
    with pytest.raises(OSError, match="too many open files"):
        LoopThread("test", on_exit=lambda: None)


def test_a_loop_whose_workers_cannot_be_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("aiockpt.runtime.loop._start_first", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        LoopThread("short", on_exit=lambda: None)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "short-loop":
            thread.join(250)
            assert not thread.is_alive()


def test_what_the_loop_thread_computes_is_counted(loop: LoopThread) -> None:
    before_s = loop.cpu_s()
    loop._portal.call(sum, range(3_000_000))
    assert 0.005 < loop.cpu_s() - before_s < 5


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-worker")]


def test_workers_are_started_when_they_are_needed(loop: LoopThread) -> None:
    assert len(workers()) == FIRST_WORKERS
    gate = threading.Event()
    waiting = [loop.in_worker(gate.wait) for _ in range(MOST_WORKERS + 5)]
    assert len(workers()) == MOST_WORKERS
    gate.set()
    assert all(one.result() for one in waiting)


def test_where_no_thread_can_be_started_any_more_those_that_are_there_do_the_work(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gate = threading.Event()
    waiting = [loop.in_worker(gate.wait) for _ in range(3 * FIRST_WORKERS)]
    gate.set()
    assert all(one.result() for one in waiting)
    assert len(workers()) == FIRST_WORKERS
