"""On what was it measured? Facts of the machine, and the memory of a process and its children."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """What a reader must know to judge a figure. It names no host."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    filesystem: str
    direct_io: bool
    python: str
    torch: str
    date: str


def facts(work: Path, direct_io: bool) -> Machine:
    """Return the facts of this machine; *work* is the folder that the checkpoints are written to."""
    from importlib.metadata import version

    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release().partition("-")[0],
        filesystem=_filesystem(work),
        direct_io=direct_io,
        python=platform.python_version(),
        torch=version("torch"),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(work: Path) -> str:
    """Return the type of the file system with the longest mount point that is a parent of *work*."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        if work.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def resident_bytes(pid: int) -> int:
    """Return the proportional resident memory of *pid* and all its descendants: a shared page counts once."""
    total = 0
    with contextlib.suppress(OSError):  # it may end while it is read
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += resident_bytes(int(child))
    return total


def start_peak() -> None:
    """Let this process's peak resident memory count from now on (Linux: 5 into ``clear_refs``)."""
    Path("/proc/self/clear_refs").write_text("5")


def own_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak since `start_peak`) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
