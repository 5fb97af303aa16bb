"""Damage on purpose to files in a simulated file system: look, compare, flip, replace."""

import os
from collections.abc import Iterator

import xxhash

from aiockpt.testing.faults import flip_bit
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulated_nodes import Folder
from tests.simulated.simulation import snapshot

ROOT = "/run"
"""Where checkpoints are saved in a simulated file system."""


def paths(files: SimulatedFiles, folder: str = ROOT) -> Iterator[str]:
    """Yield every file below *folder*."""
    for name in files.listdir(folder):
        path = f"{folder}/{name}"
        if files.lstat(path).st_mode & 0o040000:
            yield from paths(files, path)
        else:
            yield path


def fingerprint(disk: SimulatedFiles) -> bytes:
    """Return a digest of all names and bytes: crash states that differ in their past only are looked at once."""
    digest = xxhash.xxh3_128()

    def feed(folder: Folder) -> None:
        for name, node in sorted(folder.names.items()):
            digest.update(name.encode())
            if isinstance(node, Folder):
                digest.update(b"{")
                feed(node)
                digest.update(b"}")
            else:
                digest.update(len(node.content).to_bytes(8, "little") + bytes(node.content))

    feed(disk.root)
    return digest.digest()


def content(files: SimulatedFiles, path: str) -> bytearray:
    """Return the bytes of a file."""
    fd = files.open(path, os.O_RDONLY)
    data = bytearray(files.fstat(fd).st_size)
    if data:
        files.preadv(fd, [memoryview(data)], 0)
    files.close(fd)
    return data


def write(files: SimulatedFiles, path: str, data: bytes | bytearray) -> None:
    """Make *path* hold *data*, in place of what it held."""
    folder, _, name = path.rpartition("/")
    if name in files.listdir(folder):
        files.unlink(path)
    fd = files.open(path, os.O_CREAT | os.O_WRONLY)
    if data:
        files.pwrite(fd, memoryview(data), 0)
    files.close(fd)


def replaced(files: SimulatedFiles, path: str, data: bytes | bytearray) -> SimulatedFiles:
    """Return a copy of the file system in which *path* holds *data*."""
    copy = snapshot(files)
    write(copy, path, data)
    return copy


def flip(files: SimulatedFiles, path: str, bit: int) -> None:
    """Flip one bit of a file, counted from its start."""
    data = content(files, path)
    flip_bit(memoryview(data), bit)
    write(files, path, data)
