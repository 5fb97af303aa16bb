"""``LATEST``, the hint that names the step that was committed last, and the listing of a place that asks it.

Guarantees:

- A listing may be older than the last commit: a network file system answers from its cache, a store may list late or leave
  out. If the hint names a newer save than the listing shows, that save is looked for by its name, and the place is listed
  again. What exists is returned whether it is listed or not; no older step is taken in silence.
- The hint proves nothing: it may be absent, old, wrong or, after a power cut, torn. So it is written without a flush, and
  waited for only for `HINT_S`, for reads and writes.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio
import msgspec

from aiockpt.errors import CheckpointError, ObjectNotFoundError, StorageError
from aiockpt.format.names import LATEST_KEY, check_step_id, manifest_key
from aiockpt.pipeline.discover import Heads, StepEntry, is_news, list_step, scan
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import put_unflushed

logger = logging.getLogger("aiockpt")

HINT_S = 3.0
"""How long the hint is waited for: a place that throttles it for good delays neither a load nor the end of a run."""
_LIMIT_BYTES = 200


class Latest(msgspec.Struct, frozen=True):
    """The save that was committed last, as the hint names it."""

    id: str
    generation: int = 1

    def is_in(self, entry: StepEntry) -> bool:
        """Return whether a listing shows that save, or a later one of its step; or why its step cannot be read."""
        if entry.id != self.id:
            return False
        is_bad = entry.trouble is not None or any(passed.generation == 0 for passed in entry.passed)
        return is_bad or max(entry.generations, default=0) >= self.generation


async def write_latest(backend: Backend, latest: Latest) -> None:
    """Make the hint name *latest*; what fails is logged, and the hint stays as it is."""
    lines = [latest.id, *([f"{latest.generation}"] if latest.generation > 1 else [])]
    why: object = f"no answer within {HINT_S:g} s"
    with anyio.move_on_after(HINT_S):
        try:
            await put_unflushed(backend, LATEST_KEY, "".join(f"{line}\n" for line in lines).encode(), new=False)
            return
        except CheckpointError as error:  # another user's, or a bucket where nothing may be written over
            why = error
    if is_news(backend, f"{LATEST_KEY}: {why}"):
        logger.warning("%s in %s cannot be written, and stays as it is: %s", LATEST_KEY, backend.url, why)


async def read_latest(backend: Backend) -> Latest | None:
    """Return the save that the hint names; None where no hint can be read in time."""
    with anyio.move_on_after(HINT_S), suppress(CheckpointError, ValueError):
        named, *generation = (await backend.get(LATEST_KEY, _LIMIT_BYTES)).decode().split()
        return Latest(check_step_id(named), int("".join(generation) or 1))
    return None


async def remove_latest(backend: Backend, step_id: str) -> None:
    """Remove the hint where it names a step that was deleted on request."""
    latest = await read_latest(backend)
    if latest is not None and latest.id == step_id:
        with suppress(StorageError):
            await backend.delete([LATEST_KEY])


async def find_steps(backend: Backend, heads: Heads | None = None) -> list[StepEntry]:
    """Return every step below the root, the newest first, as `scan` does; and the one that the hint names, if it exists.

    Args:
        heads: as for `scan`.

    Raises:
        StorageError: the place cannot be listed; or the manifest of the hinted save exists, and its folder is not listed.
    """
    hints: list[Latest | None] = []

    async def ask() -> None:
        hints.append(await read_latest(backend))

    async with open_tasks() as tasks:
        tasks.start_soon(ask)
        entries = await scan(backend, heads)
    (latest,) = hints
    if latest is None or any(latest.is_in(entry) for entry in entries):
        return entries
    return await _find_hinted(backend, latest, entries, heads)


async def _find_hinted(
    backend: Backend, latest: Latest, entries: list[StepEntry], heads: Heads | None
) -> list[StepEntry]:
    """Return *entries* with the save that the hint names, which they lack; as they are where it does not exist."""
    hinted = await list_step(backend, latest.id, heads)
    if latest.is_in(hinted):
        entries = [entry for entry in await scan(backend, heads) if entry.id != latest.id]
        return sorted([*entries, hinted], key=lambda entry: entry.age_order, reverse=True)
    try:
        await backend.stat(manifest_key(latest.id, latest.generation))
    except ObjectNotFoundError:
        # Of hosts that are away the hint may know more than is there: that is no trouble of a listing.
        if backend.traits.scope != "hosts" and is_news(backend, f"{latest} is missing"):
            logger.warning(
                "%s in %s names %s, generation %d, which is not there. If you deleted it, all is well. If not, what this"
                " machine sees is older than the last save: wait until its cache has expired, and load again",
                *(LATEST_KEY, backend.url, latest.id, latest.generation),
            )
        return entries
    raise StorageError(
        f"{backend.url}: the listing is older than the last save. {manifest_key(latest.id, latest.generation)} is there, and"
        " its folder does not show it: try again in a minute, or look at the cache of the mount or of the store",
        key=latest.id,
        retryable=True,
    )
