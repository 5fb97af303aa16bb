"""Limits are fair, bounded, and never abandon a thread."""

import asyncio
import errno
import threading

import anyio
import pytest

from aiockpt.errors import StorageError
from aiockpt.runtime.limits import Limiter, open_tasks, open_threads, run_blocking


async def test_no_more_run_at_once_than_the_limit_says() -> None:
    limiter = Limiter("write", 2)
    running = peak = 0

    async def work() -> None:
        nonlocal running, peak
        async with limiter:
            running += 1
            peak = max(peak, running)
            await anyio.lowlevel.checkpoint()
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(work)
    seen = limiter.statistics()
    assert (peak, seen.peak, seen.running, seen.waiting) == (2, 2, 0, 0)
    assert "write" in repr(limiter)


@pytest.mark.parametrize("native", [False, True])
async def test_a_cancelled_wait_returns_only_when_the_thread_is_done(native: bool) -> None:
    started, go, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert go.wait(250)
        finished.set()

    limiter = Limiter("x", 1)
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run_blocking(limiter, work))
    await loop.run_in_executor(None, started.wait, 10)
    if native:
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
        task.cancel()  # twice: neither may let go of the thread
    else:
        loop.call_soon(task.cancel)
    done, _ = await asyncio.wait([task], timeout=0.02)
    assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished.is_set()
    assert limiter.statistics().running == 0


async def test_the_error_of_blocking_work_reaches_the_caller() -> None:
    def work() -> None:
        raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        await run_blocking(Limiter("x", 1), work)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Limiter("x", 0)


def test_threads_that_share_a_work_are_there_and_end_with_it() -> None:
    before = set(threading.enumerate())
    with open_threads(2, "share") as threads:
        assert threads is not None
        there = set(threading.enumerate()) - before
        assert len(there) == 2
        assert threads.submit(threading.current_thread).result() in there
    assert not any(thread.is_alive() for thread in there)


@pytest.mark.parametrize("started", [0, 1])
def test_where_not_all_threads_can_be_started_there_are_none(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, seen = threading.Thread.start, list[threading.Thread]()

    def refuse(self: threading.Thread) -> None:
        if len(seen) == started:
            raise RuntimeError("can't start new thread")
        seen.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with open_threads(2, "share") as threads:
        assert threads is None
    assert not any(thread.is_alive() for thread in seen)
    with open_threads(0, "share") as threads:
        assert threads is None


async def test_an_error_of_a_task_keeps_what_it_was_raised_from() -> None:
    async def fail() -> None:
        raise StorageError("the disk failed") from OSError(errno.EIO, "Input/output error")

    with pytest.raises(StorageError) as raised:
        async with open_tasks() as tasks:
            tasks.start_soon(fail)
    assert isinstance(raised.value.__cause__, OSError)
