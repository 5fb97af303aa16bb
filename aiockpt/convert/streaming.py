"""Streamed writing of a file from another source, window by window: filled, written, and reused.

Guarantees:

- No more memory is used than the windows given, whatever the size of the file.
- After an error the file is abandoned; it was whole at no time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from aiockpt.pipeline.copy import Windows
from aiockpt.runtime.slabs import Slab
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Seen, Upload

ABORT_DEADLINE_S = 60.0
Fill = Callable[[int, memoryview], Awaitable[object]]
"""Fills a window of the file that begins at an offset."""


async def write_file(
    target: Backend,
    key: str,
    size: int,
    windows: Windows,
    fill: Fill,
    *,
    seen_from: Callable[[int], Seen] | None = None,
    on_written: Callable[[int], object] = lambda _: None,
) -> None:
    """Create *key*, of *size* bytes; it is durable when this returns.

    Args:
        seen_from: returns the callback for the bytes of the window that begins at an offset.
        on_written: called with the bytes of each window.
    """
    upload = await target.create(key, size)

    async def move(window: Slab, offset: int) -> None:
        try:
            view = window.memory[: min(windows.window_bytes, size - offset)]
            await fill(offset, view)
            await upload.write(offset, [view], seen_from(offset) if seen_from else None)
        finally:
            with anyio.CancelScope(shield=True):
                await windows.give(window)
        on_written(len(view))

    try:
        async with open_tasks() as tasks:
            for offset in range(0, size, windows.window_bytes):
                tasks.start_soon(move, await windows.take(), offset)
        await upload.finish()
    except BaseException:
        await _give_up(upload)
        raise


async def _give_up(upload: Upload) -> None:
    with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
        await upload.abort()
