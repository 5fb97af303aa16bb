"""Safetensors files of this host, mapped into memory: the bytes of each tensor, and files that are to be filled."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from aiockpt.backends.local_tree import FALLBACKS
from aiockpt.format.safetensors import Entry, decode_header, header_size
from aiockpt.publish.frames import Bytes
from aiockpt.runtime.world import fallocate


class MappedTensor(msgspec.Struct, frozen=True):
    """A tensor, which is the bytes [start, end) of *file*."""

    file: str
    entry: Entry
    start: int
    end: int


class MappedTensors:
    """The tensors of mapped files; blocking, on worker threads.

    Attributes:
        tensors: by name.
        files: by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, MappedTensor] = {}
        self.files: dict[str, mmap.mmap] = {}

    def add(self, name: str, mapped: mmap.mmap) -> None:
        """Add the tensors of a file.

        Raises:
            CorruptionError: it is no safetensors file.
        """
        self.files[name] = mapped
        header = decode_header(mapped[: min(len(mapped), header_size(mapped[:8]))], len(mapped))
        for entry in header.entries:
            start, end = header.data_start + entry.start, header.data_start + entry.end
            self.tensors[entry.name] = MappedTensor(name, entry, start, end)

    def view(self, name: str) -> Bytes:
        """Return the bytes of a tensor, to read and, where its file is mapped so, to change."""
        found = self.tensors[name]
        return np.frombuffer(self.files[found.file], np.uint8, found.end - found.start, found.start)

    def close(self) -> None:
        """Give the files up. Views that are still in use stay valid."""
        self.tensors = {}
        files, self.files = self.files, {}
        for mapped in files.values():
            with suppress(BufferError):  # a view of a failed update; the collector closes it
                mapped.close()


def map_file(path: Path, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    """Map a file that is there.

    Raises:
        OSError, ValueError: it cannot be opened, or is empty.
    """
    with path.open("rb" if access == mmap.ACCESS_READ else "r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


def make_file(path: Path, size: int) -> mmap.mmap:
    """Make a file of *size* bytes, or replace it, and map it to be written."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        reserve(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def reserve(fd: int, size: int) -> None:
    """Give an open file *size* bytes: else a full disk would end the process in the middle of a write to memory."""
    os.ftruncate(fd, size)
    try:
        fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in FALLBACKS["fallocate"].absent:
            raise
