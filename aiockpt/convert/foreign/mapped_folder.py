"""Parts of the files of a folder, as memory: mapped at first use, and never outside of the folder."""

from __future__ import annotations

import mmap
from functools import cache
from pathlib import Path, PurePosixPath

from aiockpt.errors import CorruptionError


class MappedFolder:
    """The files of a foreign checkpoint.

    Args:
        described_by: the file that describes where things lie, as messages call it.
    """

    def __init__(self, path: Path, described_by: str) -> None:
        self._path = path
        self._described_by = described_by
        self._map = cache(self._map_file)

    def part(self, location: str, what: str, start: int = 0, end: int | None = None) -> memoryview:
        """Return bytes *start* to *end* of a file; to its end for None. What is written into them stays in this process.

        Args:
            location: relative to the folder.
            what: lies there, in words, for messages.

        Raises:
            CorruptionError: the file is missing, outside of the folder, or ends before *end*.
        """
        relative = PurePosixPath(location)
        if relative.is_absolute() or ".." in relative.parts:
            raise CorruptionError(f"{self._path}: {self._described_by} names a file outside of the folder: {location}")
        data = self._map(str(relative))
        if not 0 <= start <= (len(data) if end is None else end) <= len(data):
            raise CorruptionError(f"{self._path / relative} is cut short: {what} would lie behind its end")
        return data[start:end]

    def _map_file(self, relative: str) -> memoryview:
        try:
            with (self._path / relative).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise CorruptionError(f"{self._path / relative}: {error}") from error
