"""In which order are steps tried, and what is passed over on the way? The one rule of loads and of who only looks.

Guarantees:

- The newest comes first, by the logical clock. A generation that is bad falls back to the one before it, which stands at
  its own place in the order.
- Whatever is bad is told. What may be well in a minute, and may be the newest, is raised.
- What is refused for good is passed over, and told, where the next one in the order proves that it is older.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from aiockpt.errors import CheckpointError, CorruptionError, ManifestError, NewerFormatError, StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import attempt_folder, manifest_key
from aiockpt.pipeline.discover import StepEntry, fall_back, read_generation
from aiockpt.planning.weights import has_weights_only
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import walk

DAY_NS = 86_400 * 10**9
"""Between the dates of two steps that prove which is older: far more than clocks differ, and than a save takes."""


class Listed(Protocol):
    """A step that a listing shows, and where."""

    @property
    def backend(self) -> Backend:
        """Where it is."""
        ...

    @property
    def entry(self) -> StepEntry:
        """What its listing and its heads tell."""
        ...

    def without(self: L, entry: StepEntry) -> L:
        """Return the same step with *entry* in place of what turned out bad in it."""
        ...


L = TypeVar("L", bound=Listed)


async def newest_first(
    listed: Sequence[L], pass_over: Callable[[L, CorruptionError], object]
) -> AsyncIterator[tuple[L, Manifest]]:
    """Yield the valid manifests of *listed* and, while the caller wants more, of their older generations: the newest first.

    Args:
        listed: sorted by `newness`.
        pass_over: told of each one that is bad.

    Raises:
        NewerFormatError, StorageError: the next one cannot be read by this version, or now: it may be the newest.
    """

    def tell_passed(one: L) -> None:
        for passed in one.entry.passed:
            pass_over(one, ManifestError(passed.reason, key=one.entry.id))

    for one in listed:
        tell_passed(one)
    left = [one for one in listed if one.entry.head is not None or one.entry.trouble is not None]
    told: set[str] = set()
    while left:
        one = left.pop(0)
        if await _put_behind_newer(one, left):
            if one.entry.id not in told:
                pass_over(one, ManifestError(str(one.entry.trouble), key=one.entry.id))
            told.add(one.entry.id)
            continue
        try:
            manifest = await _read(one)
        except NewerFormatError:
            raise
        except CorruptionError as error:
            pass_over(one, error)
        else:
            yield one, manifest
            if has_weights_only(manifest):
                continue
        older = one.without(await fall_back(one.backend, one.entry))  # whoever wants more has found its data damaged
        tell_passed(older)
        if older.entry.head is not None or older.entry.trouble is not None:
            insort(left, older, key=newness)


async def _read(listed: Listed) -> Manifest:
    """Return the manifest of a step that is listed."""
    entry = listed.entry
    if entry.head is None:
        assert entry.trouble is not None
        raise entry.trouble
    return await read_generation(listed.backend, entry.id, entry.head.generation)


async def _put_behind_newer(one: L, left: list[L]) -> bool:
    """Put a step that is refused for good behind the next one that can be read, if that proves to be newer; say whether.

    There it is the next again: when that newer one turns out damaged, this one may be the newest.
    """
    if not isinstance(one.entry.trouble, StorageError) or not one.entry.trouble.lasting:
        return False
    for at, other in enumerate(left):
        if other.entry.head is not None:
            proven = await _is_older(one, other)
            left[at + 1 : at + 1] = [one] * proven
            return proven
    return False


async def _is_older(refused: Listed, newer: Listed) -> bool:
    """Say whether *newer* proves that the step that is *refused* is older: its manifest names it, or their dates tell.

    A name alone is no proof: a step may be deleted, and saved anew as the same generation. So its manifest must be dated
    before all objects of the newer save and, since a copy of that may be late, before its creation.
    """
    generation = max(refused.entry.generations, default=0)
    try:
        manifest = await _read(newer)
        dated_ns = (await refused.backend.stat(manifest_key(refused.entry.id, generation))).modified_ns
        folder = attempt_folder(manifest.id, manifest.attempt)
        first_ns = min([manifest.created_ns, *[stat.modified_ns async for stat in walk(newer.backend, folder)]])
    except CheckpointError:  # nothing is proven: it is raised where its turn comes
        return False
    is_named = dict(manifest.older or ()).get(refused.entry.id, 0) >= generation
    return dated_ns + (0 if is_named else DAY_NS) < first_ns


def newness(listed: Listed) -> tuple[int, int]:
    """Sorts what is listed from the newest to the oldest."""
    sequence, step = listed.entry.age_order
    return (-sequence, -step)
