"""The chain of versions in a place, as a receiver needs it: the newest one, and those that lead to it.

Guarantee: an index is read once, unless another publisher has begun the place anew; then all are read again.
"""

from __future__ import annotations

from aiockpt.publish.form import CHAIN, FOLD, VersionIndex, version_folder
from aiockpt.publish.versions import Versions


class VersionChain:
    """Finds versions in *versions*; on one loop."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._known: dict[str, VersionIndex] = {}
        self._there: dict[str, list[int]] = {CHAIN: [], FOLD: []}

    async def newest(self) -> VersionIndex | None:
        """Return the newest version; None for an empty place."""
        self._there = await self._versions.list()
        newest = max(self._there[CHAIN], default=-1)
        # What had a higher number is gone: the place was begun anew.
        self._known = {folder: index for folder, index in self._known.items() if index.number <= newest}
        for number in self._there[CHAIN]:
            if (index := await self._read(CHAIN, number)) is not None:
                return index
        return None

    async def _read(self, prefix: str, number: int, attempt: str | None = None) -> VersionIndex | None:
        """Return an index, of the step's *attempt* where that is given."""
        folder = version_folder(number, prefix)
        known = self._known.get(folder)
        if known is None or attempt not in (None, known.notes.attempt):
            known = await self._versions.read(folder)
            if known is not None:
                self._known[folder] = known
        return known if known is not None and attempt in (None, known.notes.attempt) else None

    async def leading_to(self, target: VersionIndex, version: int) -> tuple[list[VersionIndex], list[VersionIndex]]:
        """Return the versions that lead to *target*, the newest first, and the folds of them.

        They go back to *version*, or to a full one, whichever is older; but not beyond a full one that is shorter to read
        than the deltas since *version*.
        """
        chain, folds = [target], []
        read_bytes = 0
        while True:
            index = chain[-1]
            if not index.is_full and index.number in self._there[FOLD]:
                fold = await self._read(FOLD, index.number, index.notes.attempt)
                folds += [fold] if fold is not None else []
            read_bytes += index.file_bytes
            if index.is_full or (folds and (index.number <= version + 1 or read_bytes > index.notes.weight_bytes)):
                break
            before = await self._read(CHAIN, index.number - 1, index.notes.parent)
            if before is None or before.notes.layout != target.notes.layout:
                break
            chain.append(before)
        return chain, folds

    def drop(self, below: int) -> None:
        """Forget the indexes of versions below a number."""
        self._known = {folder: index for folder, index in self._known.items() if index.number >= below}
