"""Test of the capabilities and the speed of a folder's file system.

Data are written and read by the local backend, as in a run. Guarantee: all tests use a temporary folder that is removed,
also after control-C.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import anyio
import msgspec
from rich.markup import escape

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_mounts import explain_bucket, find_mount
from aiockpt.errors import StorageAccessError, UsageError
from aiockpt.tools.cli import show

FLUSHES = 20
REPEATS = 3
SPEED_BYTES, BLOCK_BYTES = 64 << 20, 8 << 20
SLOW_FLUSH_MS = 50.0
COMMIT_FLUSHES = 14
"""Flushes of one small save, one after the other (13 to 15, counted): folders, data, receipt, decision, manifest."""

OnMoved = Callable[[int], object]
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
        write_bytes_per_s, read_bytes_per_s: medians of large files, past the page cache where *direct* says so.
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


def run_doctor(root: Path, as_json: bool) -> bool:
    """Examine *root*, print the diagnosis, and return whether commits there are unsafe; raises as `examine`."""
    with show.bytes_progress("writing and reading", 2 * REPEATS * SPEED_BYTES, as_json) as tick:
        found = examine(root, tick)
    show.json_or(as_json, found, lambda: show_diagnosis(found))
    return bool(found.problems)


def examine(root: Path, on_moved: OnMoved = lambda _: None) -> Diagnosis:
    """Test everything that a commit needs, and raw reads and writes, in a temporary folder below *root*.

    Raises:
        UsageError: there is no room for the file of the speed test.
        StorageAccessError: *root* is not writable.
    """
    mount, space = find_mount(str(root)), shutil.disk_usage(root)
    found = Diagnosis(str(root), "unknown" if mount is None else mount.kind, space.free, space.total)
    if (why := explain_bucket(str(root))) is not None:
        return msgspec.structs.replace(found, problems=(why,))
    if space.free < 2 * SPEED_BYTES:
        why = f"has {space.free >> 20} MiB free: too few for a test" if space.total else "has no size"
        raise UsageError(f"{root}: a file system that {why}; checkpoints cannot be kept there")
    try:
        return _examine(found, on_moved)
    except PermissionError as error:
        advice = "grant write access, or name another folder"
        raise StorageAccessError(f"{root}: cannot be written to ({error.strerror}); {advice}") from error


def _examine(found: Diagnosis, on_moved: OnMoved) -> Diagnosis:
    with TemporaryDirectory(dir=found.root, prefix=".doctor-") as name:
        folder = Path(name)
        (folder / "linked").touch()
        link = _refuses_a_second(lambda: os.link(folder / "linked", folder / "link"))
        exclusive = _refuses_a_second(lambda: os.close(os.open(folder / "once", os.O_CREAT | os.O_EXCL)))
        flushed = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT)
        file_ms = _flush_ms(flushed, lambda _: os.write(flushed, bytes(4096)))
        folder_ms = _flush_ms(os.open(folder, os.O_RDONLY), lambda number: (folder / f"name-{number}").touch())
        direct, writing, reading = anyio.run(_measure_speeds, LocalBackend(folder), on_moved)
    found = msgspec.structs.replace(
        found,
        direct=direct,
        link=link,
        exclusive_create=exclusive,
        file_flush_ms=median(file_ms),
        folder_flush_ms=median(folder_ms),
        slowest_flush_ms=max(file_ms + folder_ms),
        write_bytes_per_s=median(writing),
        read_bytes_per_s=median(reading),
        problems=() if link or exclusive else ("two writers could both commit here: neither link nor O_EXCL refuses",),
    )
    return msgspec.structs.replace(found, warnings=tuple(_warnings(found)))


async def _measure_speeds(backend: LocalBackend, on_moved: OnMoved) -> tuple[bool, list[float], list[float]]:
    """Return whether O_DIRECT works, and the bytes a second of writing some files and of reading them, block by block."""
    block = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # page-aligned
    block[:] = os.urandom(BLOCK_BYTES)
    writing, reading = [], []
    for number in range(REPEATS):
        key, began = f"speed-{number}", time.perf_counter()
        upload = await backend.create(key, SPEED_BYTES)
        for start in range(0, SPEED_BYTES, BLOCK_BYTES):
            await upload.write(start, [block])
            on_moved(BLOCK_BYTES)
        await upload.finish()
        writing.append(SPEED_BYTES / (time.perf_counter() - began))
        reader, began = await backend.open(key), time.perf_counter()
        for start in range(0, SPEED_BYTES, BLOCK_BYTES):
            await reader.read(start, [block])
            on_moved(BLOCK_BYTES)
        reading.append(SPEED_BYTES / (time.perf_counter() - began))
        await reader.close()
        await backend.delete([key])
    return bool(backend.statistics().direct), writing, reading


def _refuses_a_second(create: Callable[[], None]) -> bool:
    try:
        create()
        create()
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def _flush_ms(handle: int, change: Callable[[int], object]) -> list[float]:
    """Return how long each of some flushes of *handle* took, after a change."""
    taken_ms = []
    try:
        for number in range(FLUSHES):
            change(number)
            began = time.perf_counter()
            os.fsync(handle)
            taken_ms.append((time.perf_counter() - began) * 1e3)
    finally:
        os.close(handle)
    return taken_ms


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
