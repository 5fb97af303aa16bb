"""Detection of ended processes on this host, from the kernel's process table.

Guarantees: a process id that was reused meanwhile is not mistaken for the first process; a process on another host, in
another container, or where there is no ``/proc``, is never reported as ended.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process: the host (one boot of one kernel, and the space of process ids there), its id, and when it began."""

    host: str
    pid: int
    started: str


def this_process() -> Process:
    """Return this very process. Reads files of the kernel."""
    pid = os.getpid()
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return Process(f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}", pid, _list_process(pid)[1])
    except OSError:
        return Process("", pid, "")


def has_ended(process: Process, here: Process) -> bool:
    """Return whether *process* is known to have ended, as seen from the process *here*. Reads files of the kernel."""
    if not process.host or process.host != here.host:
        return False
    try:
        state, started = _list_process(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process may open no more files
        return False
    return state in "ZX" or started != process.started


def _list_process(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it began; its name may hold anything, brackets included."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    # Behind the name follows the third field of proc(5), the state; the 22nd is when the process began.
    return fields[0], fields[19]
