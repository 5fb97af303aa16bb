"""Detection of ended processes on this host, from the kernel's process table, also by a name that they gave something.

Guarantees: a process id that was reused meanwhile is not mistaken for the first process; a process on another host, in
another container, or where ``/proc`` is missing or hides the processes of others, is never reported as ended.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
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


def process_token() -> str:
    """Return a token of this process, which differs from that of a later one with its id and of a forked child.

    It begins with the milliseconds since 1970 when the process began, as far as that is known: else when it was drawn.
    """
    return _draw_token(os.getpid())


@cache
def _draw_token(pid: int) -> str:
    now_s = time.time()
    lived_s = 0.0
    with suppress(OSError, ValueError):
        started_s = int(_list_process(pid)[1]) / os.sysconf("SC_CLK_TCK")
        lived_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    return f"{int((now_s - lived_s) * 1000)}-{secrets.token_hex(8)}"


def has_ended(process: Process, here: Process) -> bool:
    """Return whether *process* is known to have ended, as seen from the process *here*. Reads files of the kernel."""
    if not process.host or process.host != here.host or _hides_others():
        return False
    try:
        state, started = _list_process(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process may open no more files
        return False
    return state in "ZX" or started != process.started


def _hides_others() -> bool:
    """Return whether the process table is of this user's processes alone (``hidepid``), or of another space of ids."""
    return not (_PROC / "1").exists() or os.readlink(_PROC / "self") != str(os.getpid())


_counter = itertools.count()
"""Of the names that this process has made, for all of its places."""


class ProcessNames:
    """Names of 12 hex digits that tell this very process: 6 of its host, 4 of it, and a count.

    They serve as random ones. Of a name of this host, whose process does not run any more, a
    later process can tell that. A random name, or one of another host, has the digits of this host once in 2**24.
    """

    def __init__(self) -> None:
        self._here = this_process()

    def make(self, taken: Collection[str] = ()) -> str | None:
        """Return a name that is not *taken*; None where processes cannot be told apart, or all names are taken."""
        if not self._here.host:
            return None
        own = f"{_digits(self._here.host, 6)}{_of_process(self._here.pid, self._here.started)}"
        names = (f"{own}{next(_counter) % 256:02x}" for _ in range(256))
        return next((name for name in names if name not in taken), None)

    def find_dead(self) -> Callable[[str], bool]:
        """Return the function that tells whether the process that made a name has ended; it reads the process table once."""
        alive: set[str] = set()

        def is_dead(name: str) -> bool:
            if not self._here.host or name[:6] != _digits(self._here.host, 6) or _hides_others():
                return False
            alive.update(() if alive else (_of_process(pid, started) for pid, started in _running()))
            return name[6:10] not in alive

        return is_dead


def _digits(text: str, count: int) -> str:
    return hashlib.blake2s(text.encode()).hexdigest()[:count]


def _of_process(pid: int, started: str) -> str:
    return _digits(f"{pid}/{started}", 4)


def _running() -> Iterator[tuple[int, str]]:
    """Yield the id of each process of this host, and when it began."""
    for name in os.listdir(_PROC):
        if name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                state, started = _list_process(int(name))
                if state not in "ZX":
                    yield int(name), started


def _list_process(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it began; its name may hold anything, brackets included."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    # Behind the name follows the third field of proc(5), the state; the 22nd is when the process began.
    return fields[0], fields[19]
