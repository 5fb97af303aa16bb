"""Python programs that tests start, forked from a process that has imported torch and aiockpt: 20 ms in place of 1.3 s.

`WarmPopen` is a `subprocess.Popen`: the program has a process id, a session, files and an exit code of its own, and is a
child of the caller. It runs in a fork of `tests.warm.template`, so that two things are shared with its siblings: what
importing has done, and the seed of string hashes. In ``/proc`` it has its own environment, and the template's command.

A program is started as usual in a terminal, inside `cold`, when its command is not plain Python (``-c``, ``-m`` or a file,
after nothing but ``-P`` and ``-u``), when it looks at ``sys.modules``, and when a variable that is read at a start is not
the template's. What a program starts is started as usual, too, unless it is one of `tests.warm.template.LAUNCHERS`.
"""

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tests.warm.template import HEADER, ROOM, ROOM_BYTES

READ_AT_START = (
    *("PYTHON", "LD_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "CUDA_", "TORCH_"),
    *("LANG", "LC_", "TZ"),
)
"""How variables begin that are read before a program runs. One of OpenMP is read, too: a template has one thread."""
NO_MATTER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_REAL = subprocess.Popen


class _Template:
    """The template of this process; started when the first program is."""

    def __init__(self, requests: socket.socket | None = None) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._environment = _read_at_start(os.environ)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Say whether a program with this *environment* would find what it reads at its start."""
        return (
            self._owner == os.getpid()
            and _read_at_start(environment) == self._environment
            and environment.get("OMP_NUM_THREADS", "1") == "1"
            and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        )

    def start(self, asked: dict[str, Any], files: list[int]) -> int:
        """Start a program; return its process id."""
        message = json.dumps(asked).encode()
        with self._lock:
            if self._requests is None:
                self._requests = self._open()
            self._prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._requests, [HEADER.pack(len(message))], files)
                self._requests.sendall(message)
                answer = self._requests.recv(HEADER.size, socket.MSG_WAITALL)
            finally:
                self._prctl(_SUBREAPER, 0, 0, 0, 0)
        return int(HEADER.unpack(answer)[0])

    def close(self) -> None:
        """End the template, unless this is a fork of the process that has it."""
        if self._owner == os.getpid() and self._requests is not None:
            self._requests.close()
            if self._process is not None:
                self._process.wait()

    def _open(self) -> socket.socket:
        requests, its = socket.socketpair()
        with its:
            self._process = _REAL(
                [sys.executable, "-P", "-m", "tests.warm.template", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", ROOM: " " * ROOM_BYTES},
                pass_fds=[its.fileno()],
            )
        return requests


_template: _Template | None = None
_cold = threading.local()


def install(requests: socket.socket | None = None) -> None:
    """Have `subprocess` start programs from a template; from that at the other end of *requests*, if it is there."""
    global _template
    _template = _Template(requests)
    atexit.register(_template.close)
    subprocess.Popen = WarmPopen  # type: ignore[misc]


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start programs as usual, in this thread: they are about what importing does."""
    _cold.now = True
    try:
        yield
    finally:
        _cold.now = False


class WarmPopen(_REAL[Any]):
    """A `subprocess.Popen` that forks a template where that makes no difference."""

    def _execute_child(self, *given: Any) -> None:
        started = inspect.signature(_REAL._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        asked = _ask(started)
        ends = [started["p2cread"], started["c2pwrite"], started["errwrite"]]
        if asked is None or _template is None or any(end != -1 and os.isatty(end) for end in ends):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        try:
            self.pid = _template.start(asked, [*files, *asked["pass_fds"]])
            self._child_created = True
        finally:
            self._close_pipe_fds(*(started[pipe] for pipe in pipes))  # type: ignore[attr-defined]


def _ask(started: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request for what a `subprocess.Popen` was given, or None of what is started as usual."""
    usual = {
        "executable": None,
        "preexec_fn": None,
        "shell": False,
        "gid": None,
        "uid": None,
        "gids": None,
        "umask": -1,
    }
    command = started["args"]
    if getattr(_cold, "now", False) or _template is None or isinstance(command, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in command]
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (started["env"] or os.environ).items()}
    if (
        words[0] != sys.executable
        or any(started[name] != value for name, value in usual.items())
        or not _template.fits(environment)
    ):
        return None
    what = _understand(words[1:])
    if what is None:
        return None
    group = started["process_group"]
    return {
        **what,
        "command": words,
        "env": environment,
        "cwd": os.path.abspath(started["cwd"] or os.curdir),
        "pass_fds": sorted(started["pass_fds"]),
        "new_session": started["start_new_session"],
        "group": None if group == -1 else group,
    }


def _understand(words: list[str]) -> dict[str, Any] | None:
    """Return what Python would run for *words*, or None of what only Python understands."""
    options = {"safe_path": False, "unbuffered": False}
    names = {"-P": "safe_path", "-u": "unbuffered"}
    while words and words[0] in names:
        options[names[words.pop(0)]] = True
    if len(words) > 1 and words[0] == "-c" and ("sys.modules" in words[1] or "exec(eval(" in words[1]):
        return None  # it is about what importing does, or a worker of `pytest -n`
    if words[:2] == ["-m", "pytest"]:
        return None  # it rewrites what is not imported yet, and warns of what is
    if len(words) > 1 and words[0] in ("-c", "-m"):
        return {**options, "kind": words[0], "program": words[1], "arguments": words[2:]}
    if words and words[0].endswith(".py"):
        return {**options, "kind": "file", "program": words[0], "arguments": words[1:]}
    return None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and not name.startswith(NO_MATTER)
    }
    if "PYTHONPATH" in found:  # a folder that is named twice is looked into once
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(found["PYTHONPATH"].split(os.pathsep)))
    return found
