"""How does a writer process start, and how does it end? Executed, never forked; in a session of its own; always reaped.

A fork would bring threads' locks, CUDA and the trainer's memory along. What is executed here is this interpreter with the
trainer's module path, and it loads neither torch nor the training program.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from aiockpt.errors import UsageError
from aiockpt.runtime.channel import Line

MODULE = "aiockpt.worker"


class WriterProcess:
    """A writer that was started.

    Args:
        hello: the first frame.
        memory_fd: of the shared memory in which the slabs are.
        nice: added to its niceness, before its first thread starts.
        timeout_s: how long a message may wait until the writer takes those before it.

    Attributes:
        line: to it.
    """

    def __init__(self, hello: bytes, memory_fd: int, nice: int, timeout_s: float) -> None:
        if not sys.executable:
            raise UsageError("worker='process' needs sys.executable, the interpreter to start; use worker='thread'")
        ours, its = socket.socketpair()
        with its:
            fds = (its.fileno(), memory_fd)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, (*fds, nice))],
                stdin=subprocess.DEVNULL,
                stdout=_find_stderr(),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=fds,
                start_new_session=True,
            )
        self.line = Line(ours, timeout_s)
        self.line.send(lambda: [hello])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self, timeout_s: float) -> None:
        """Reap it when it has ended, by itself within *timeout_s* or by force: then it writes from no slab. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def fate(self) -> str:
        """What became of it, in words."""
        code = self._process.returncode
        if code is None:
            return "does not answer"
        return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def __repr__(self) -> str:
        return f"<WriterProcess {self.pid}>"


def _find_stderr() -> int:
    """Return where it may print: beside its log, for the trainer's output may be read by a program."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
