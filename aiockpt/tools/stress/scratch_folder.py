"""Scratch folder of a run: a folder of its own that goes with the run, so that nothing is harmed and nothing stays.

Guarantees:

- No key outside the folder is touched; its name was never used before.
- A place that cannot be cleaned is refused before anything large is written.
- The folder is emptied however the run ends, and listed to check that it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from aiockpt.errors import CheckpointError, ObjectNotFoundError, StorageError
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import walk

CLEANING_DEADLINE_S = 300.0
_SHOWN = 300


@asynccontextmanager
async def own_folder(backend: Backend, token: bytes, say: Callable[[str], object]) -> AsyncIterator[str]:
    """Lend a folder of *backend* for the length of the block; remove all that is in it afterwards.

    Args:
        token: random bytes that name it.
        say: called with where it is, and that it was removed.

    Raises:
        StorageError: what is written here cannot be removed, or was not all removed at the end.
    """
    prefix = f"aiockpt-bench-{token.hex()}"
    where = backend.url + ("" if backend.url.endswith("/") else "/") + prefix
    await _prove_cleanable(backend, prefix, where)
    say(f"everything goes below {where}, and is removed at the end")
    try:
        yield prefix
    finally:
        left = f"it was not done after {CLEANING_DEADLINE_S:g} s"
        with anyio.move_on_after(CLEANING_DEADLINE_S, shield=True):
            left = await _clean(backend, prefix)
        if left:
            raise StorageError(f"{where} could not be emptied: {left}. Remove it by hand.", key=prefix)
        say(f"removed all that was below {where}")


async def _prove_cleanable(backend: Backend, prefix: str, where: str) -> None:
    """Write one small object, see it, remove it, and see that it is gone."""
    key = f"{prefix}/may-be-removed"
    await backend.put(key, b"written by aiockpt bench")
    try:
        await backend.delete([key])
    except StorageError as error:
        raise StorageError(
            f"{where} is not measured, because what is written there cannot be removed: {error}. Give the right to delete;"
            f" one object of a few bytes is left: {key}",
            key=key,
        ) from error
    try:
        await backend.stat(key)
    except ObjectNotFoundError:
        return
    raise StorageError(
        f"{where} is not measured: {key} was removed and is there all the same. A store that keeps what is deleted (a"
        " versioned bucket with delete markers hidden, a cache in front of it) cannot be cleaned.",
        key=key,
    )


async def _clean(backend: Backend, prefix: str) -> str:
    """Remove everything below *prefix*, as far as that can be done; return what is wrong, or nothing."""
    problems: list[str] = []
    folders = [prefix]
    for folder in folders:
        try:
            listing = await backend.list(folder)
            folders.extend(listing.folders)
            await backend.delete([stat.key for stat in listing.objects])
        except CheckpointError as error:
            problems.append(_short(error))
    try:
        left = [stat.key async for stat in walk(backend, prefix)]
        if not left:
            await backend.delete(
                [f"{folder}/-" for folder in reversed(folders)]
            )  # removes empty folders where they exist
            return ""
    except CheckpointError as error:
        return _short(error)
    return "; ".join([*problems, f"{len(left)} objects are left, such as {left[0]}"])


def _short(error: CheckpointError) -> str:
    """Return the message of *error*, which may name a thousand keys, cut in its middle."""
    text = str(error)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
