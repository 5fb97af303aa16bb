"""Test of the capabilities and the speed of a folder's file system.

Guarantee: all tests use a temporary folder that is removed, also after control-C; the large files never have a name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich.markup import escape

from aiockpt.backends.local_mounts import explain_bucket, find_mount
from aiockpt.testing.disk import OnMoved, measure_disk
from aiockpt.tools.cli import show

FLUSHES = 20
REPEATS = 3
SLOW_FLUSH_MS = 50.0
COMMIT_FLUSHES = 14
"""Flushes of one small save, one after the other (13 to 15, counted): folders, data, receipt, decision, manifest."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "gpfs", "beegfs"}


class Diagnosis(msgspec.Struct, frozen=True):
    """Capabilities of a folder's file system.

    Attributes:
        direct: O_DIRECT reads and writes work.
        link: hard links work and refuse a name that exists; commits are exclusive through them.
        exclusive_create: O_EXCL refuses a name that exists.
        file_flush_ms, folder_flush_ms: medians of a flush after 4 KiB, and of a folder after a new name.
        slowest_flush_ms: of either.
        write_bytes_per_s, read_bytes_per_s: medians of one large file, past the page cache where *direct* says so.
        problems: reasons why commits here are unsafe; empty when they are safe.
        warnings: facts that an operator should know before using it for a run.
    """

    root: str
    file_system: str
    free_bytes: int
    total_bytes: int
    direct: bool = False
    link: bool = False
    exclusive_create: bool = False
    file_flush_ms: float = 0.0
    folder_flush_ms: float = 0.0
    slowest_flush_ms: float = 0.0
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def survives_reboot(self) -> bool:
        """Whether flushed data survives switching the machine off."""
        return self.file_system not in _IN_MEMORY

    @property
    def commit_ms(self) -> float:
        """About how long a commit takes."""
        return COMMIT_FLUSHES * max(self.file_flush_ms, self.folder_flush_ms)


def examine(root: Path, size_bytes: int, on_moved: OnMoved = lambda _: None) -> Diagnosis:
    """Test everything that a commit needs in a temporary folder below *root*; measure raw I/O on files of *size_bytes*.

    Args:
        on_moved: called with the bytes of each block; in all they are ``2 * REPEATS`` such files.

    Raises:
        OSError: *root* is not writable, or has too little space.
    """
    space = os.statvfs(root)
    free_bytes, total_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    if (why := explain_bucket(str(root))) is not None:
        return Diagnosis(str(root), _kind(root), free_bytes, total_bytes, problems=(why,))
    with TemporaryDirectory(dir=root, prefix=".doctor-") as name:
        folder = Path(name)
        link, exclusive = _works(lambda: _refuses_second_link(folder)), _works(lambda: _refuses_second_file(folder))
        file_ms = list(_flush_file_ms(folder / "flushed"))
        folder_ms = list(_flush_folder_ms(folder))
        writing = measure_disk(folder, size_bytes, REPEATS, on_moved=on_moved)
        reading = measure_disk(folder, size_bytes, REPEATS, kind="read", on_moved=on_moved)
    found = Diagnosis(
        root=str(root),
        file_system=_kind(root),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        direct=writing.direct,
        link=link,
        exclusive_create=exclusive,
        file_flush_ms=median(file_ms),
        folder_flush_ms=median(folder_ms),
        slowest_flush_ms=max(file_ms + folder_ms),
        write_bytes_per_s=median(writing.bytes_per_s),
        read_bytes_per_s=median(reading.bytes_per_s),
        problems=() if link or exclusive else ("two writers could both commit here: neither link nor O_EXCL refuses",),
    )
    return msgspec.structs.replace(found, warnings=tuple(_warnings(found)))


def _kind(root: Path) -> str:
    return "unknown" if (mount := find_mount(str(root))) is None else mount.kind


def _works(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except OSError:
        return False


def _refuses_second_link(folder: Path) -> bool:
    (folder / "one").write_bytes(b"")
    os.link(folder / "one", folder / "two")
    try:
        os.link(folder / "one", folder / "two")
    except FileExistsError:
        return True
    return False


def _refuses_second_file(folder: Path) -> bool:
    for _ in range(2):
        try:
            os.close(os.open(folder / "once", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
    return False


def _flush_file_ms(path: Path) -> Iterator[float]:
    with path.open("wb", buffering=0) as file:
        for _ in range(FLUSHES):
            file.write(bytes(4096))
            yield _time_flush(file.fileno())


def _flush_folder_ms(folder: Path) -> Iterator[float]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        for number in range(FLUSHES):
            (folder / f"name-{number}").touch()
            yield _time_flush(handle)
    finally:
        os.close(handle)


def _time_flush(handle: int) -> float:
    began = time.perf_counter()
    os.fsync(handle)
    return (time.perf_counter() - began) * 1e3


def _warnings(found: Diagnosis) -> Iterator[str]:
    if not found.survives_reboot:
        yield f"{found.file_system} is memory: nothing here survives a reboot, whatever is flushed"
    if found.file_system in _NETWORK:
        yield f"{found.file_system} is a network file system: a commit is as durable as its server's flush"
    if not found.direct:
        yield "no O_DIRECT: writes go through the page cache, at a third of the speed or less"
    if not found.link:
        yield "no hard links: a manifest is created in place, and a crash can leave a torn one (which readers refuse)"
    if max(found.file_flush_ms, found.folder_flush_ms) > SLOW_FLUSH_MS:
        yield f"flushes are slow: a save takes {found.commit_ms / 1e3:.1f} s or more, however small it is"
    if found.free_bytes < found.total_bytes / 20:
        yield f"{1 - found.free_bytes / found.total_bytes:.0%} of the space is used"


def show_diagnosis(found: Diagnosis) -> None:
    """Print the capabilities of a place."""
    cached = "" if found.direct else "through the page cache"
    free = f"{show.size(found.free_bytes)} of {show.size(found.total_bytes)}"
    rows = [
        ("free", free, f"{found.free_bytes / found.total_bytes:.0%}" if found.total_bytes else ""),
        ("O_DIRECT", _yes(found.direct), "data bypasses the page cache" if found.direct else ""),
        ("hard links", _yes(found.link), "commits are exclusive" if found.link else ""),
        ("exclusive create", _yes(found.exclusive_create), ""),
        ("flush of a file", f"{found.file_flush_ms:.2f} ms", f"the slowest flush took {found.slowest_flush_ms:.2f} ms"),
        ("flush of a folder", f"{found.folder_flush_ms:.2f} ms", f"so a commit costs about {found.commit_ms:.0f} ms"),
        ("write", show.speed(found.write_bytes_per_s), cached),
        ("read", show.speed(found.read_bytes_per_s), cached),
    ]
    show.title(found.root, found.file_system)
    rows = [(name, value, f"[dim]{note}[/]") for name, value, note in rows]
    show.print_table(("", " ", "  "), rows, folds="  ", gap=False)
    for line in found.warnings:
        show.say(f"[yellow]![/] {escape(line)}")
    for line in found.problems:
        show.say(f"{show.mark(False)} {escape(line)}")
    if not found.problems:
        safe = "safe for checkpoints" if found.survives_reboot else "safe for checkpoints while the machine is up"
        show.say(
            f"{show.mark(True)} {safe}: of concurrent commits exactly one succeeds, and flushed data is visible to all"
        )


def _yes(works: bool) -> str:
    return "[green]yes[/]" if works else "[red]no[/]"
