"""Data files moved as the engine moves them: the same blocks, as many at once, without an engine around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anyio

from aiockpt.options import IO
from aiockpt.pipeline.upload import ABORT_DEADLINE_S, WINDOWS_PER_WRITE
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend, Reader, Seen, Upload

WINDOW_BYTES = IO().slab_bytes
READ_BYTES = IO().read_bytes

SeenFrom = Callable[[int], Seen]
"""Offset in the file → the callback for the bytes that begin there."""


async def write_file(backend: Backend, key: str, data: memoryview, seen_from: SeenFrom | None = None) -> None:
    """Make the data file *key* of *data*: create, write, finish, as `aiockpt.pipeline.upload` does with full slabs.

    Each write has up to four windows of 16 MiB; one more write is under way than the backend prefers. The file is durable
    when this returns; when it fails the upload is aborted.
    """
    upload = await backend.create(key, data.nbytes)
    offsets = iter(range(0, data.nbytes, WINDOW_BYTES * WINDOWS_PER_WRITE))
    try:
        async with open_tasks() as tasks:
            for _ in range(backend.traits.block_writes + 1):
                tasks.start_soon(_write, upload, data, offsets, seen_from)
        await upload.finish()
    except BaseException:
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            await upload.abort()
        raise


async def _write(upload: Upload, data: memoryview, offsets: Iterator[int], seen_from: SeenFrom | None) -> None:
    for offset in offsets:
        batch = data[offset : offset + WINDOW_BYTES * WINDOWS_PER_WRITE]
        runs = [batch[start : start + WINDOW_BYTES] for start in range(0, batch.nbytes, WINDOW_BYTES)]
        await upload.write(offset, runs, seen_from(offset) if seen_from else None)


async def read_file(backend: Backend, key: str, into: memoryview, seen_from: SeenFrom | None = None) -> None:
    """Fill *into* from the start of *key*: reads of 16 MiB, as many at once as the backend prefers."""
    reader = await backend.open(key)
    offsets = iter(range(0, into.nbytes, READ_BYTES))
    try:
        async with open_tasks() as tasks:
            for _ in range(backend.traits.block_reads):
                tasks.start_soon(_read, reader, into, offsets, seen_from)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def _read(reader: Reader, into: memoryview, offsets: Iterator[int], seen_from: SeenFrom | None) -> None:
    for offset in offsets:
        await reader.read(offset, [into[offset : offset + READ_BYTES]], seen_from(offset) if seen_from else None)
