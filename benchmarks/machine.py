"""Facts of the machine that was measured, and the memory of a process and its children."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """The facts that a reader needs to judge a figure; no host name."""

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


def memory_bytes(pid: int) -> int:
    """Return the memory that *pid* and all its descendants use, shared pages counted once.

    Anonymous and shared memory only: pages of libraries and of mapped files can be dropped, and how they are divided
    among processes changes when an unrelated one starts.
    """
    total = 0
    with contextlib.suppress(OSError):  # the process may end meanwhile
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += memory_bytes(int(child))
    return total
