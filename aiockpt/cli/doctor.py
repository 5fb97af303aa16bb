"""What can this place do, and how fast is it? Asked before a run is trusted to it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from aiockpt.examples.disk import BLOCK_BYTES, measure_disk

FLUSHES = 20


class Diagnosis(msgspec.Struct, frozen=True):
    """What a folder's file system can do.

    Attributes:
        direct: O_DIRECT reads and writes work.
        link: hard links work; commits are exclusive through them.
        exclusive_create: O_EXCL refuses a name that is taken.
        file_flush_ms, folder_flush_ms: median of an fdatasync of 4 KiB, and of an fsync of a directory.
        write_bytes_per_s, read_bytes_per_s: one large file, past the page cache where *direct* says so.
        problems: what makes commits here unsafe; empty when all is well.
    """

    root: str
    file_system: str
    free_bytes: int
    total_bytes: int
    direct: bool
    link: bool
    exclusive_create: bool
    file_flush_ms: float
    folder_flush_ms: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    problems: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Return what is shown to people."""
        gib = 1 << 30
        return [
            ("file system", self.file_system),
            ("free", f"{self.free_bytes / gib:.1f} of {self.total_bytes / gib:.1f} GiB"),
            ("O_DIRECT", "yes" if self.direct else "no: buffered writes, about a third of the speed"),
            ("hard links", "yes" if self.link else "no: exclusive creation is used instead"),
            ("exclusive create", "yes" if self.exclusive_create else "NO"),
            ("flush of a file", f"{self.file_flush_ms:.2f} ms"),
            ("flush of a folder", f"{self.folder_flush_ms:.2f} ms"),
            ("write", f"{self.write_bytes_per_s / 1e9:.2f} GB/s"),
            ("read", f"{self.read_bytes_per_s / 1e9:.2f} GB/s"),
        ]


def examine(root: str, size_bytes: int) -> Diagnosis:
    """Try everything a commit needs in a temporary folder below *root*, and measure *size_bytes* of raw I/O.

    Raises:
        OSError: *root* is no folder, or nothing can be written there.
    """
    space = os.statvfs(root)
    with TemporaryDirectory(dir=root, prefix=".doctor-") as name:
        folder = Path(name)
        speed = measure_disk(folder, size_bytes, repeats=3)
        link, exclusive = _works(lambda: _link(folder)), _works(lambda: _create_twice(folder))
        return Diagnosis(
            root=root,
            file_system=_file_system(root),
            free_bytes=space.f_bavail * space.f_frsize,
            total_bytes=space.f_blocks * space.f_frsize,
            direct=speed.direct,
            link=link,
            exclusive_create=exclusive,
            file_flush_ms=_flush_ms(folder / "flushed", os.O_RDWR | os.O_CREAT),
            folder_flush_ms=_flush_ms(folder, os.O_RDONLY),
            write_bytes_per_s=median(speed.bytes_per_s),
            read_bytes_per_s=_read_speed(folder / "read", size_bytes, speed.direct),
            problems=() if link or exclusive else ("two writers could both commit here: no link(2) and no O_EXCL",),
        )


def _works(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except OSError:
        return False


def _link(folder: Path) -> bool:
    (folder / "one").write_bytes(b"")
    os.link(folder / "one", folder / "two")
    try:
        os.link(folder / "one", folder / "two")
    except FileExistsError:
        return True
    return False


def _create_twice(folder: Path) -> bool:
    os.close(os.open(folder / "once", os.O_CREAT | os.O_EXCL))
    try:
        os.close(os.open(folder / "once", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False


def _flush_ms(path: Path, flags: int) -> float:
    handle = os.open(path, flags)
    try:
        taken = []
        for number in range(FLUSHES):
            if path.is_dir():
                (path / f"name-{number}").touch()
            else:
                os.pwrite(handle, b"x" * 4096, number * 4096)
            begun = time.perf_counter()
            os.fsync(handle)
            taken.append((time.perf_counter() - begun) * 1e3)
        return median(taken)
    finally:
        os.close(handle)


def _read_speed(path: Path, size_bytes: int, direct: bool) -> float:
    """Write a file, drop its pages, and return the bytes a second of reading it in large blocks."""
    blocks = max(1, size_bytes // BLOCK_BYTES)
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        try:
            for index in range(blocks):
                os.pwrite(handle, block, index * BLOCK_BYTES)
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            for index in range(blocks):
                os.preadv(handle, [block], index * BLOCK_BYTES)
            return blocks * BLOCK_BYTES / (time.perf_counter() - begun)
        finally:
            os.close(handle)


def _file_system(root: str) -> str:
    """Return the type of the file system that holds *root*, as the kernel's mount table names it."""
    path = os.path.realpath(root)
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, mount, name, *_ = line.split()
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind
