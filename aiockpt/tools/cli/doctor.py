"""Probe of what a place can do, and how fast it is, before a run is trusted to it.

Guarantee: what is tried is tried in a folder of its own that is removed, also after control-C; the large files have no
name from the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from aiockpt.backends.local_mounts import explain_bucket, find_mount
from aiockpt.testing.disk import OnMoved, measure_disk

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
        problems: what makes commits here unsafe; empty when all is well.
        warnings: what an operator should know before a run is trusted to it.
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
        """Whether what is flushed here is there after the machine was switched off."""
        return self.file_system not in _IN_MEMORY


def examine(root: Path, size_bytes: int, on_moved: OnMoved = lambda _: None) -> Diagnosis:
    """Try everything a commit needs in a temporary folder below *root*, and measure raw I/O on files of *size_bytes*.

    Args:
        on_moved: called with the bytes of each block; in all they are ``2 * REPEATS`` such files.

    Raises:
        OSError: nothing can be written there, or there is no room.
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
    commit_ms = COMMIT_FLUSHES * max(found.file_flush_ms, found.folder_flush_ms)
    if max(found.file_flush_ms, found.folder_flush_ms) > SLOW_FLUSH_MS:
        yield f"flushes are slow: a save takes {commit_ms / 1e3:.1f} s or more, however small it is"
    if found.free_bytes < found.total_bytes / 20:
        yield f"{1 - found.free_bytes / found.total_bytes:.0%} of the space is used"
