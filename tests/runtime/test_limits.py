"""Limits are fair, bounded, and never abandon a thread."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from aiockpt.runtime.limits import ByteBudget, Limiter, run_blocking


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
        assert go.wait(10)
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


async def test_the_budget_is_never_exceeded_and_first_come_is_first_served() -> None:
    budget = ByteBudget(10)
    order: list[int] = []
    release = anyio.Event()

    async def use(number: int, size: int) -> None:
        async with budget.take(size):
            order.append(number)
            assert budget.statistics().used_bytes <= 10
            if number == 0:
                await release.wait()

    async with anyio.create_task_group() as tasks:
        for number, size in enumerate([8, 4, 1, 1]):
            tasks.start_soon(use, number, size)
            await anyio.wait_all_tasks_blocked()
        assert order == [0]  # 1 and 1 would fit, but 4 came first
        assert budget.statistics().waiting == 3
        release.set()
    assert order == [0, 1, 2, 3]
    assert budget.statistics().used_bytes == 0
    assert budget.statistics().peak_bytes == 8


async def test_an_oversize_item_is_admitted_alone() -> None:
    budget = ByteBudget(10)
    async with budget.take(25):
        with anyio.move_on_after(0.01) as scope:
            async with budget.take(1):
                pytest.fail("it must wait")
        assert scope.cancelled_caught
    async with budget.take(1):
        assert budget.statistics().used_bytes == 1


async def test_a_cancelled_waiter_gives_up_its_turn() -> None:
    budget = ByteBudget(10)
    got = anyio.Event()

    async def small() -> None:
        async with budget.take(2):
            got.set()

    async with anyio.create_task_group() as tasks, budget.take(8):
        with anyio.move_on_after(0.01):
            async with budget.take(9):
                pytest.fail("it must wait")
        tasks.start_soon(small)
        with anyio.fail_after(5):
            await got.wait()


@pytest.mark.parametrize("make", [lambda: Limiter("x", 0), lambda: ByteBudget(0)])
def test_a_limit_below_one_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()  # type: ignore[operator]
