"""What is composed of a backend's verbs? Small free functions, so that no wrapper can be bypassed."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiockpt.errors import ObjectExistsError, StorageError
from aiockpt.storage.backend import Backend, Stat

RECORD_LIMIT_BYTES = 256 << 20
"""No manifest or receipt is longer (FORMAT §5)."""


async def read_record(backend: Backend, key: str) -> bytes:
    """Return a manifest, receipt or other small document whole.

    Raises:
        ObjectNotFoundError: there is none.
        StorageError: it is longer than any document of ours can be.
    """
    data = await backend.get(key, RECORD_LIMIT_BYTES + 1)
    if len(data) > RECORD_LIMIT_BYTES:
        raise StorageError(f"{key!r} is longer than {RECORD_LIMIT_BYTES} bytes: it is no document of aiockpt", key=key)
    return data


async def put_once(backend: Backend, key: str, data: bytes) -> bool:
    """Create *key* with *data*; return False when somebody else's bytes are there. Ours already there is a success.

    The answer to a create can be lost after its effect, so a conflict is decided by what is there (FORMAT §7).
    """
    try:
        await backend.put_new(key, data)
    except ObjectExistsError:
        return await read_record(backend, key) == data
    return True


async def walk(backend: Backend, prefix: str) -> AsyncIterator[Stat]:
    """Yield every object below the folder *prefix*, folder by folder."""
    folders = [prefix]
    while folders:
        listing = await backend.list(folders.pop())
        for stat in listing.objects:
            yield stat
        folders.extend(reversed(listing.folders))


async def delete_below(backend: Backend, prefix: str) -> None:
    """Remove every object below the folder *prefix*."""
    keys = [stat.key async for stat in walk(backend, prefix)]
    if keys:
        await backend.delete(keys)


async def storage_now_ns(backend: Backend, nonce: str) -> int:
    """Return the time by the storage's own clock: write a probe, look at its date, remove it.

    Local clocks are skewed, frozen or wrong; only the storage's decides what is old enough to be garbage (FORMAT §8).
    """
    key = f".clock-{nonce}"
    await backend.put(key, b"")
    try:
        return (await backend.stat(key)).modified_ns
    finally:
        await backend.delete([key])
