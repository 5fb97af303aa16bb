"""Files of foreign checkpoints: mapped parts of a folder, tensors joined from chunks, and damage as `CorruptionError`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath

import torch

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.errors import CheckpointError, CorruptionError, UsageError


@contextmanager
def reported_as_damage(file: Path) -> Iterator[None]:
    """Turn errors of the block, except our own, into a `CorruptionError` that names *file*."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CorruptionError(f"{file} is damaged: {error!r}") from error


def join_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[tuple[tuple[int, ...], torch.Tensor]], what: str
) -> torch.Tensor:
    """Return the tensor of *shape* whose *chunks* are given with the place of their first element; nothing is copied.

    Raises:
        CorruptionError: the chunks are incomplete, overlap, or lie outside of *shape*; the message names the tensor *what*.
    """
    # `Shards` refuses parts that overlap or lie outside: with the right number of elements, the chunks are complete.
    if sum(chunk.numel() for _, chunk in chunks) != torch.Size(shape).numel():
        raise CorruptionError(f"the chunks of {what} do not add up to its shape")
    if len(chunks) == 1 and tuple(chunks[0][1].shape) == shape:
        return chunks[0][1]
    try:
        return Shards(shape, chunks, dtype=dtype)
    except UsageError as error:
        raise CorruptionError(f"{what}: {error}") from error


class MappedFolder:
    """The files of a foreign checkpoint.

    Args:
        described_by: name of the file with the locations, for messages.
    """

    def __init__(self, path: Path, described_by: str) -> None:
        self._path = path
        self._described_by = described_by
        self._map = cache(self._map_file)

    def part(self, location: str, what: str, start: int = 0, end: int | None = None) -> memoryview:
        """Return bytes *start* to *end* of a file (None: to its end). Writes into them stay in this process.

        Args:
            location: relative to the folder.
            what: the content, in words, for messages.

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
