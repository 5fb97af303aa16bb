"""Cancelled at any turn of the event loop: is the step whole or absent, is nothing leaked, and can one go on?

A case cancels one of two saves in flight, or a load, after a number of turns drawn at random.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from aiockpt.engine.ticket import Ticket
from aiockpt.errors import SaveCancelledError
from aiockpt.runtime.future import SaveFuture
from aiockpt.runtime.slabs import SlabPool
from aiockpt.testing.simulation import run_inline
from tests.campaigns.campaign import Campaign, Outcomes
from tests.campaigns.drawn_state import DrawnShape, disk_with, load_drawn, load_from
from tests.campaigns.failing_calls import check_nothing_leaked
from tests.inline_engine import local, make_engine, run_save

TURNS = 250
"""More than a save takes."""


async def turns(count: int) -> None:
    """Let the event loop go around *count* times."""
    for _ in range(count):
        await asyncio.sleep(0)


def cancel_a_save(shape: DrawnShape, after: int, seed: int) -> str:
    """Save steps 2 and 3 at once, over step 1, and cancel step 2; return what came of it."""
    files = disk_with(shape, [1.0])
    backend, world = local(files, seed)

    async def main() -> tuple[list[SaveFuture], SlabPool, float | None]:
        engine = make_engine(backend, world)
        tickets: list[Ticket] = []
        doomed = asyncio.ensure_future(run_save(engine, 2, shape.state(2.0), tickets.append))
        other = asyncio.ensure_future(run_save(engine, 3, shape.state(3.0)))
        await turns(after)
        for ticket in tickets:
            ticket.future.cancel()
        futures = [await doomed, await other]
        (await run_save(engine, 4, shape.state(4.0))).result()
        value = await load_drawn(engine, shape)
        await backend.close()
        return futures, engine.pool, value

    (doomed, other), pool, value = run_inline(main)
    check_nothing_leaked(files, pool)
    assert value == 4.0, "what was saved afterwards is not the newest"
    other.result()
    assert load_from(files, shape, 3) == 3.0, "the other save was harmed"
    failure = doomed.exception()
    if failure is None:
        assert load_from(files, shape, 2) == 2.0
        return "too late"
    assert isinstance(failure, SaveCancelledError), repr(failure)
    return "cancelled"


def cancel_a_load(shape: DrawnShape, after: int, seed: int) -> str:
    """Cancel a load, then load again; return what came of it."""
    files = disk_with(shape, [1.0, 2.0])
    backend, world = local(files, seed)

    async def main() -> tuple[bool, SlabPool]:
        engine = make_engine(backend, world)
        loading = asyncio.ensure_future(load_drawn(engine, shape))
        await turns(after)
        loading.cancel()
        done = await asyncio.gather(loading, return_exceptions=True)
        assert await load_drawn(engine, shape) == 2.0
        await backend.close()
        assert done[0] == 2.0 or isinstance(done[0], asyncio.CancelledError), repr(done[0])
        return done[0] == 2.0, engine.pool

    finished, pool = run_inline(main)
    check_nothing_leaked(files, pool)
    return "loaded, too late" if finished else "load cancelled"


def case(seed: int) -> Outcomes:
    dice = random.Random(seed)
    shape = DrawnShape.draw(dice)
    if dice.random() < 0.3:
        return Counter({cancel_a_load(shape, dice.randrange(TURNS // 4), seed): 1})
    return Counter({cancel_a_save(shape, dice.randrange(TURNS), seed): 1})


CAMPAIGN = Campaign(name="cancellations", counts="saves and loads", prepare=lambda: case, smoke_count=60)
