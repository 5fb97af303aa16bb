"""Copies of one step, in windows of a few blocks."""

from typing import Any

from aiockpt.format.manifest import Manifest
from aiockpt.options import Content
from aiockpt.pipeline.copy import CopySource, Windows, copy_step, open_copy_source
from aiockpt.pipeline.discover import StepCopy, list_step, newest_manifest
from aiockpt.runtime.limits import Pace
from aiockpt.runtime.world import OsClock, World
from aiockpt.storage.backend import Backend
from tests.small_run import SMALL

STEP = "step-00000001"
FREE = Pace(None, OsClock())


def windows() -> Windows:
    return Windows(2, SMALL.read_bytes)


async def copy_of(place: Backend) -> StepCopy:
    return StepCopy(place, await newest_manifest(place, await list_step(place, STEP)))


async def open_source(*sources: Backend, content: Content = "full") -> CopySource:
    copies = [await copy_of(source) for source in sources]
    return await open_copy_source(copies, content, window_bytes=SMALL.read_bytes, file_bytes=1 << 20)


async def copy(sources: list[Backend], target: Backend, content: Content = "full", **options: Any) -> Manifest:
    what = await open_source(*sources, content=content)
    return await copy_step(what, target, World(), windows=windows(), **{"pace": FREE, **options})
