"""In which order are steps tried, and what is passed over on the way? The one rule of loads and of who only looks.

Guarantees:

- The newest comes first, by the logical clock. A generation that is bad falls back to the one before it, which stands at
  its own place in the order.
- Whatever is bad is told. What may be well in a minute, and may be the newest, is raised.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from aiockpt.errors import CorruptionError, ManifestError, NewerFormatError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.discover import StepEntry, fall_back, read_generation
from aiockpt.planning.weights import has_weights_only
from aiockpt.storage.backend import Backend


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
    while left:
        one = left.pop(0)
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


def newness(listed: Listed) -> tuple[int, int]:
    """Sorts what is listed from the newest to the oldest."""
    sequence, step = listed.entry.age_order
    return (-sequence, -step)
