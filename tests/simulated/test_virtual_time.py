"""Virtual time moves to the next timer, in order and exactly, and a program that hangs ends."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from aiockpt.runtime.limits import Limiter, run_blocking
from tests.simulated.simulation import SimulatedClock
from tests.simulated.virtual_time import NothingCanHappenError, run_virtually


def test_timers_fire_in_order_at_their_times_and_a_year_is_short() -> None:
    clock = SimulatedClock()
    began_ns = clock.now_ns
    fired: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await anyio.sleep(seconds)
        fired.append((name, round((clock.now_ns - began_ns) / 1e9, 3)))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name, seconds in (("year", 365 * 86_400.0), ("now", 0.0), ("day", 86_400.0), ("ms", 0.001)):
                tasks.start_soon(wait, name, seconds)

    run_virtually(main, clock)
    assert fired == [("now", 0.0), ("ms", 0.001), ("day", 86_400.0), ("year", 365 * 86_400.0)]


def test_a_deadline_passes_where_nothing_else_happens() -> None:
    clock = SimulatedClock()
    began_ns = clock.now_ns

    async def main() -> bool:
        with anyio.move_on_after(600) as scope:
            await anyio.sleep_forever()
        return scope.cancelled_caught

    assert run_virtually(main, clock)
    assert run_virtually(main)
    assert (clock.now_ns - began_ns) / 1e9 == pytest.approx(600, abs=1e-3)


def test_time_that_work_takes_counts() -> None:
    clock = SimulatedClock()

    async def main() -> bool:
        with anyio.move_on_after(10) as scope:
            clock.advance(11)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    assert run_virtually(main, clock)


def test_work_for_threads_is_done_at_once() -> None:
    clock = SimulatedClock()
    assert run_virtually(lambda: run_blocking(Limiter("test", 1), lambda: 7), clock) == 7


def test_time_on_a_clock_of_its_own_begins_at_0_and_is_exact() -> None:
    async def main() -> float:
        with anyio.move_on_after(5):
            await anyio.sleep(10)
        await anyio.sleep(7200)
        return anyio.current_time()

    assert run_virtually(main) == 7205


@pytest.mark.parametrize("forever", [anyio.sleep_forever, lambda: asyncio.Event().wait()], ids=["timer", "event"])
def test_a_program_that_hangs_is_told_so(forever: Callable[[], Awaitable[object]]) -> None:
    async def main() -> None:
        await forever()

    with pytest.raises(NothingCanHappenError, match="hangs"):
        run_virtually(main, SimulatedClock())
