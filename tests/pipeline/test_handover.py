"""Full slabs between the snapshot and the writers: in order, several at once, none lost, none kept."""

import asyncio

from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import Window
from aiockpt.runtime.slabs import Slab, SlabPool

SLAB_BYTES = 4096


def full(pool: SlabPool, count: int) -> list[tuple[Window, Slab]]:
    return [(Window(0, index * SLAB_BYTES, SLAB_BYTES, ()), pool.acquire(1)) for index in range(count)]


async def test_waiting_windows_are_taken_together_and_in_order() -> None:
    pool = SlabPool(SLAB_BYTES, 8 * SLAB_BYTES)
    handover, windows = Handover(pool, 5), full(pool, 5)
    for window, slab in windows:
        handover.arrive(window, slab)
    assert await handover.wait()
    assert handover.next_batch(3) == windows[:3]
    assert await handover.wait()
    assert handover.next_batch(3) == windows[3:]
    assert not await handover.wait()


async def test_writers_end_when_others_took_the_last_window() -> None:
    pool = SlabPool(SLAB_BYTES, 8 * SLAB_BYTES)
    handover = Handover(pool, 3)
    taken: list[tuple[Window, Slab]] = []

    async def write() -> None:
        while await handover.wait():
            taken.extend(handover.next_batch(2))

    writers = [asyncio.ensure_future(write()) for _ in range(4)]
    await asyncio.sleep(0)
    windows = full(pool, 3)
    for window, slab in windows:
        handover.arrive(window, slab)
    async with asyncio.timeout(5):
        await asyncio.gather(*writers)
    assert taken == windows


async def test_what_nobody_takes_goes_back_to_the_pool() -> None:
    pool = SlabPool(SLAB_BYTES, 8 * SLAB_BYTES)
    handover, windows = Handover(pool, 3), full(pool, 3)
    handover.arrive(*windows[0])
    handover.arrive(*windows[1])
    handover.close()
    handover.arrive(*windows[2])
    assert pool.statistics().used_slabs == 0
