"""One run from start to end: a folder of its own, floors, checks, data files, small objects, the soak, and a clean place."""

from __future__ import annotations

from collections.abc import Callable

from aiockpt.errors import UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.tools.stress.checks import check_place
from aiockpt.tools.stress.files import measure_files
from aiockpt.tools.stress.floors import measure_floors
from aiockpt.tools.stress.lab import Lab, Watch
from aiockpt.tools.stress.objects import measure_objects
from aiockpt.tools.stress.payload import Payload
from aiockpt.tools.stress.plan import BLOCK_BYTES, StressPlan
from aiockpt.tools.stress.report import StressReport
from aiockpt.tools.stress.scratch_folder import own_folder
from aiockpt.tools.stress.soak import soak

_ROOM = 1.1
"""Files take a little more than their bytes."""


async def measure(
    backend: Backend,
    plan: StressPlan,
    *,
    world: World | None = None,
    watch: Watch = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> StressReport:
    """Measure *backend* as *plan* says, and return the report; all that was written is removed.

    Args:
        world: its clock and random bytes.
        watch: called with what begins, point by point.
        say: called with where it is measured, how long that will take, and that it was removed.

    Raises:
        UsageError: the place has no room for the plan.
        StorageError: the place cannot be written to, or cannot be cleaned.
    """
    world = world or World()
    await _check_room(backend, plan)
    traits = backend.traits
    async with own_folder(backend, world.token(6), say) as prefix:
        say(plan.announce())
        report = StressReport(
            url=backend.url,
            backend=repr(backend),
            prefix=prefix,
            scope=traits.scope,
            durable=traits.durable,
            plan=plan,
        )
        lab = Lab(
            backend=backend,
            prefix=prefix,
            plan=plan,
            clock=world.clock,
            content=Payload(plan.seed, BLOCK_BYTES),
            report=report,
            watch=watch,
        )
        await measure_floors(lab)
        await check_place(lab)
        await measure_files(lab)
        await measure_objects(lab)
        if plan.soak_s:
            await soak(lab)
        else:
            lab.skip("soak", "not asked for: --soak SECONDS")
    return report


async def _check_room(backend: Backend, plan: StressPlan) -> None:
    """Refuse a plan that does not fit; a place that does not report its free space is accepted."""
    free_bytes = (await backend.space()).free_bytes
    if free_bytes is not None and free_bytes < plan.most_bytes * _ROOM:
        raise UsageError(
            f"{backend.url} has {free_bytes >> 20} MiB free, and up to {plan.most_bytes >> 20} MiB would lie there at once:"
            " lower --bytes (and --sizes)"
        )
