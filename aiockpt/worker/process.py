"""Start and end of a writer process: executed, never forked; in a session of its own; always reaped.

A fork would copy threads' locks, CUDA and the trainer's memory. What is executed here is this interpreter with the
trainer's module path, and it loads neither torch nor the training program.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from aiockpt.errors import UsageError, WriterLostError
from aiockpt.runtime.channel import Receiver, Sender, close_in_forks

MODULE = "aiockpt.worker"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end or warn all processes of a job: a writer ends with its trainer. It starts with them blocked, or one that
arrives meanwhile would end it."""
_left: list[subprocess.Popen[bytes]] = []
"""Writers that go on without this process; each `detach` reaps those that have ended. Python warns of unreferenced ones."""


class WriterProcess:
    """A writer that was started.

    Args:
        setup: the first frame.
        memory_fd: of the shared memory in which the slabs are.
        nice: added to its niceness, before its first thread starts.
        timeout_s: how long a message may wait until the writer reads those before it.

    Attributes:
        orders: to it; *answers*: from it.

    Raises:
        UsageError, WriterLostError: it cannot be started.
    """

    def __init__(self, setup: bytes, memory_fd: int, nice: int, timeout_s: float) -> None:
        if not sys.executable:
            raise UsageError("worker='process' needs sys.executable, the interpreter to start; use worker='thread'")
        orders, its_orders = socket.socketpair()
        answers, its_answers = socket.socketpair()
        for end in (its_orders, its_answers):  # a fork in this moment would keep them, and its death would not be seen
            close_in_forks(end)
        self.orders, self.answers = Sender(orders, timeout_s), Receiver(answers)
        with its_orders, its_answers:
            fds = (its_orders.fileno(), its_answers.fileno(), memory_fd)
            try:
                self._process = _execute(fds, nice)
            except OSError as error:
                self.orders.close()
                self.answers.close()
                raise WriterLostError(f"a writer process cannot be started: {error}") from error
        try:
            self.orders.send(lambda: [setup])
        except OSError as error:
            self.close()
            self.end(1.0)
            raise WriterLostError(f"the writer process {self.fate}, before it had begun: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def hang_up(self) -> None:
        """Send and receive nothing more: the writer finishes its saves, and ends. Idempotent, never waits."""
        self.orders.hang_up()
        self.answers.hang_up()

    def end(self, timeout_s: float) -> None:
        """Reap the writer when it has ended, by itself within *timeout_s* or by force; it then reads no slab. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def detach(self) -> None:
        """Let the writer go on although its exit status will not be read."""
        _left[:] = [process for process in (*_left, self._process) if process.poll() is None]

    def close(self) -> None:
        """Close the sockets, on the loop. Idempotent."""
        self.orders.close()
        self.answers.close()

    @property
    def fate(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode
        if code is None:
            return "does not answer"
        return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def ignore_signals() -> None:
    """Ignore the signals that end a job in order. In the writer, first of all."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _execute(fds: tuple[int, ...], nice: int) -> subprocess.Popen[bytes]:
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, IGNORED
    )  # a new process has the mask of the thread that starts it
    try:
        return _start(fds, nice)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(fds: tuple[int, ...], nice: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: without it -m puts the working directory in front of the trainer's module path.
        [sys.executable, "-P", "-m", MODULE, *map(str, (nice, *fds))],
        stdin=subprocess.DEVNULL,
        stdout=_find_stderr(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
        pass_fds=fds,
        start_new_session=True,
    )


def _find_stderr() -> int:
    """Return the descriptor for its output: that of its log, for a program may read the trainer's output."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
