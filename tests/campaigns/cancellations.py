"""Cancelled at any turn of the event loop: the step is whole or absent, nothing is leaked, and the next save works.

A case cancels one of two saves in flight, or a load, after a number of turns drawn at random.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress

from aiockpt import SaveFuture
from aiockpt.errors import SaveCancelledError
from tests.campaigns.campaign import Campaign, Outcomes
from tests.campaigns.drawn_state import NOWHERE, DrawnShape, disk_with, load_drawn, load_from
from tests.campaigns.failing_calls import check_nothing_leaked
from tests.inline_process import Process, local, states_equal
from tests.simulated.simulation import run_inline

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

    async def main() -> tuple[list[SaveFuture], Process, float | None]:
        process = Process(backend, world)
        begun: list[SaveFuture] = []
        doomed = asyncio.ensure_future(process.save(2, shape.state(2.0), begun.append))
        other = asyncio.ensure_future(process.save(3, shape.state(3.0)))
        await turns(after)
        for future in begun:
            future.cancel()
        futures = [await doomed, await other]
        (await process.save(4, shape.state(4.0))).result()
        value = await load_drawn(process, shape)
        await backend.close()
        return futures, process, value

    (doomed, other), process, value = run_inline(main)
    check_nothing_leaked(files, process)
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

    async def main() -> tuple[bool, Process]:
        process = Process(backend, world)
        state = shape.state(NOWHERE)
        loading = process.ckpt.load(state)
        await turns(after)
        loading.cancel()
        with suppress(SaveCancelledError):
            await loading
            assert states_equal(state, shape.state(2.0)), "the load was not cancelled, and has not filled the state"
        assert await load_drawn(process, shape) == 2.0
        await backend.close()
        return not loading.cancelled(), process

    finished, process = run_inline(main)
    check_nothing_leaked(files, process)
    return "loaded, too late" if finished else "load cancelled"


def case(seed: int) -> Outcomes:
    dice = random.Random(seed)
    shape = DrawnShape.draw(dice)
    if dice.random() < 0.3:
        return Counter({cancel_a_load(shape, dice.randrange(TURNS // 4), seed): 1})
    return Counter({cancel_a_save(shape, dice.randrange(TURNS), seed): 1})


CAMPAIGN = Campaign(name="cancellations", counts="saves and loads", prepare=lambda: case, smoke_count=60)
