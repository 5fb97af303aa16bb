"""Small free functions composed of a backend's verbs, so that no wrapper can be bypassed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

import anyio

from aiockpt.errors import ManifestError, ObjectExistsError, ObjectNotFoundError, StorageError, StorageFullError
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend, GetsMany, Listing, PutsUnflushed, Space, Stat, works_when_full

# Several buffers as one run of bytes, without a copy. Pure.


def cut_views(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return the bytes [start, end) of *views*, as if these lay one after the other."""
    cut = []
    for view in views:
        low, high = max(start, 0), min(end, view.nbytes)
        if low < high:
            cut.append(view if (low, high) == (0, view.nbytes) else view.cast("B")[low:high])
        start -= view.nbytes
        end -= view.nbytes
    return cut


# Reads of many small objects: in one hop to a thread where the backend supports it, else several at once.


READS = 32
"""The number of objects that are read at once."""


async def get_many(backend: Backend, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
    """Return small objects whole, or their first *max_bytes*, in the order of *keys*; None for one that is not there."""
    if callable(getattr(backend, "get_many", None)):
        return await cast("GetsMany", backend).get_many(keys, max_bytes)
    found: list[bytes | None] = [None] * len(keys)

    async def get_left(left: Iterator[tuple[int, str]]) -> None:
        for place, key in left:
            try:
                found[place] = await backend.get(key, max_bytes)
            except ObjectNotFoundError:
                continue

    left = iter(enumerate(keys))
    async with open_tasks() as tasks:
        for _ in keys[:READS]:
            tasks.start_soon(get_left, left)
    return tuple(found)


RECORD_LIMIT_BYTES = 256 << 20
"""The longest manifest or receipt (docs/format.md#limits)."""


async def read_record(backend: Backend, key: str, limit_bytes: int = RECORD_LIMIT_BYTES) -> bytes:
    """Return a manifest, receipt or other small document whole.

    Raises:
        ObjectNotFoundError: there is no such object.
        ManifestError: it is longer than any such document can be, unreadable on its device, or not a file.
        StorageError: it cannot be read now, which proves nothing about it.
    """
    data = await read_start(backend, key, limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ManifestError(f"{key!r} is longer than {limit_bytes} bytes: it is no document of aiockpt", key=key)
    return data


async def read_start(backend: Backend, key: str, size_bytes: int) -> bytes:
    """Return the first *size_bytes* of a small document, or all of a shorter one; raises as `read_record`."""
    try:
        return await backend.get(key, size_bytes)
    except StorageError as error:
        if not error.damaged:
            raise
        raise ManifestError(str(error), key=key) from error


async def put_once(backend: Backend, key: str, data: bytes, limit_bytes: int = RECORD_LIMIT_BYTES) -> bool:
    """Create *key* with *data*; return False when it exists with other bytes. The same bytes are a success.

    The answer to a create can be lost after its effect, so a conflict is resolved by reading the object.

    Raises:
        ManifestError: as `read_record`, for the existing object.
    """
    try:
        await backend.put_new(key, data)
    except ObjectExistsError:
        return await read_record(backend, key, limit_bytes) == data
    return True


async def put_unflushed(backend: Backend, key: str, data: bytes, *, new: bool) -> None:
    """Do as ``put`` does, or with *new* as ``put_new``, without the flushes after which it survives a power cut."""
    if callable(getattr(backend, "put_unflushed", None)):
        await cast("PutsUnflushed", backend).put_unflushed(key, data, new=new)
    else:
        await (backend.put_new if new else backend.put)(key, data)


async def walk(backend: Backend, prefix: str) -> AsyncIterator[Stat]:
    """Yield every object below the folder *prefix*, folder by folder."""
    folders = [prefix]
    while folders:
        listing = await backend.list(folders.pop())
        for stat in listing.objects:
            yield stat
        folders.extend(reversed(listing.folders))


async def delete_below(backend: Backend, prefix: str) -> None:
    """Remove every object below the folder *prefix*, and all else there: a link (not its target), a pipe."""
    keys: list[str] = []
    folders = [prefix]
    while folders:
        folder = folders.pop()
        listing = await backend.list(folder)
        keys += [*(stat.key for stat in listing.objects), *listing.others]
        folders.extend(reversed(listing.folders))
        if folder != prefix and listing == Listing((), ()):
            keys.append(folder)  # on a file system an empty folder would keep its parents
    if keys:
        await backend.delete(keys)


async def space_for(backend: Backend, size: int) -> Space:
    """Return the space of a place; where *size* bytes do not fit, deleted bytes are first made to count as free."""
    space = await backend.space()
    full = space.free_bytes is not None and space.free_bytes < size
    if full and (files := works_when_full(backend)) is not None:
        await files.sync()
        space = await backend.space()
    return space


async def storage_now_ns(backend: Backend, nonce: str) -> int:
    """Return the time by the storage's own clock: write a probe, read its date, remove it.

    Where no probe fits, the root is dated instead. Local clocks are skewed, frozen or wrong; only the storage's clock
    decides what is old enough to be garbage (docs/format.md#deletion).
    """
    key = f".clock-{nonce}"
    try:
        await backend.put(key, b"")
    except StorageFullError:
        if (place := works_when_full(backend)) is None:
            raise
        return await place.now_ns()
    try:
        return (await backend.stat(key)).modified_ns
    finally:
        with anyio.move_on_after(10, shield=True):
            await backend.delete([key])
