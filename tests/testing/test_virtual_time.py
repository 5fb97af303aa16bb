"""The loop whose clock jumps: exact durations, at once, and no hang."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.testing.virtual_time import run_virtually


def test_hours_pass_at_once_and_exactly() -> None:
    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def wake(after_s: float, name: str) -> None:
            await anyio.sleep(after_s)
            order.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wake, 7200, "late")
            tasks.start_soon(wake, 3600, "early")
        return anyio.current_time(), order

    assert run_virtually(main) == (7200, ["early", "late"])


def test_a_deadline_ends_what_sleeps_longer() -> None:
    async def main() -> float:
        with anyio.move_on_after(5):
            await anyio.sleep(10)
        return anyio.current_time()

    assert run_virtually(main) == 5


def test_work_for_threads_is_done_on_the_spot() -> None:
    async def main() -> float:
        await run_blocking(Limiter("one", 1), time.monotonic)
        return anyio.current_time()

    assert run_virtually(main) == 0


def test_tasks_that_wait_for_each_other_raise() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="none of them will ever run again"):
        run_virtually(main)
