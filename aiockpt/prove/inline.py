"""Starts of a training function in this process: fast, for many small proofs. A kill is simulated.

Each start calls the function anew, so that it builds everything afresh, with random generators seeded from the operating
system like those of a new process. A kill raises an exception that must not be caught (`SimulatedKill`), and from then on
the storage accepts no call: unwritten data of a save is lost, as with SIGKILL. The limit of the simulation is state in
module globals: it survives here, and would not in a new process.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from aiockpt.errors import UsageError
from aiockpt.prove.assignment import KILLED, VARIABLE, ProofJob, write_job
from aiockpt.prove.recorder import Recorder, SimulatedKill
from aiockpt.prove.records import AnyRecord
from aiockpt.prove.session import Session, enter
from aiockpt.prove.starts import Start, read_start_ranks
from aiockpt.prove.training import Training

# Starts as processes. When one has killed itself, all others of that start are killed; writer processes are waited for
# (``worker="process"``). The processes of a start are found in ``/proc``, by the environment variable that names its job.
# Guarantees: no process of a start is left behind, also after an interruption; every wait ends.


POLL_S = 0.05
GRACE_S = 60.0
"""Seconds for a writer process to finish its pending work, and for a launcher to end after its ranks."""
TAIL_LINES = 15
_WRITER = b"aiockpt.worker"

Tick = Callable[[str, float, Path], object]
"""Called repeatedly with the name of the start, the seconds so far, and its folder."""


class ProcessRunner:
    """Starts a command.

    Args:
        command: run in this process's folder and environment.
        timeout_s: of each start.
        loss: finds printed losses: its group ``loss``, or the first one, is the text, ``step`` the number.
        tick: called with the progress.
    """

    method = "processes, killed by SIGKILL"

    def __init__(
        self, command: Sequence[str], timeout_s: float, loss: re.Pattern[str] | None, tick: Tick | None = None
    ) -> None:
        self.command = list(command)
        self._timeout_s = timeout_s
        self._loss = loss
        self._tick = tick or (lambda name, seconds, folder: None)

    def run(self, name: str, job: ProofJob, command: Sequence[str] | None = None) -> Start:
        """Return one start of the script when it is over.

        Args:
            command: runs instead of the usual one.

        Raises:
            UsageError: it cannot be started, or did not end in time; the message has its last lines.
        """
        path = write_job(job)
        folder, begun = Path(job.folder), time.monotonic()
        with (folder / "output.log").open("wb") as log:
            status = self._wait(name, path, command or self.command, log.fileno(), begun)
        output = (folder / "output.log").read_text(errors="replace")
        return Start(
            name=name,
            ranks=read_start_ranks(folder),
            seconds=time.monotonic() - begun,
            kill=job.kill,
            status=None if (folder / KILLED).exists() else status,
            tail="\n".join(output.splitlines()[-TAIL_LINES:]),
            printed=list(self._find_losses(output)),
        )

    def _wait(self, name: str, path: Path, command: Sequence[str], log: int, begun: float) -> int:
        folder = path.parent
        environment = {**os.environ, VARIABLE: str(path)}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error}; give a command as you would type it") from error
        with process:
            try:
                while (status := process.poll()) is None:
                    seconds = time.monotonic() - begun
                    if (folder / KILLED).exists():
                        self._end(path, process)
                        return process.wait(GRACE_S)
                    if seconds > self._timeout_s:
                        raise UsageError(self._too_long(name, folder))
                    self._tick(name, seconds, folder)
                    time.sleep(POLL_S)
            finally:
                self._end(path, process)
        return status

    def _too_long(self, name: str, folder: Path) -> str:
        lines = (folder / "output.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
        said = "\n".join(lines) or "(it printed nothing)"
        late = f"the {name} run did not end within {self._timeout_s:g} s"
        return f"{late}; raise --timeout, or train less. Its last lines:\n{said}"

    def _end(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        """Kill the processes left of a start; wait for writer processes to finish their work, then kill them too."""
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        # torchrun starts each rank in a session of its own, which killpg does not reach: /proc shows their environment.
        deadline = time.monotonic() + GRACE_S
        while found := list(_processes_of(path)):
            late = time.monotonic() > deadline
            for pid, is_writer in found:
                if late or not is_writer:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if late:
                return
            time.sleep(POLL_S)

    def _find_losses(self, output: str) -> Iterator[tuple[int | None, str]]:
        for match in self._loss.finditer(output) if self._loss is not None else ():
            groups = match.groupdict()
            step = groups.get("step")
            yield None if step is None else int(step), groups.get("loss") or match[1 if match.re.groups else 0]


def _processes_of(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield (process id, whether it is a writer) of each process whose job is *path*; without /proc nothing is found."""
    marker = f"{VARIABLE}={path}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or ended
            if marker not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield int(entry.name), _WRITER in (entry / "cmdline").read_bytes().split(b"\0")


class InlineRunner:
    """Starts *train*, a function without arguments that makes its own ``Checkpointer``."""

    method = "a function of one process, with a simulated kill"

    def __init__(self, train: Callable[[], object]) -> None:
        self._train = train
        self.command = [f"{getattr(train, '__module__', '')}.{getattr(train, '__qualname__', repr(train))}"]

    def run(self, name: str, job: ProofJob, command: Sequence[str] | None = None) -> Start:
        """Return one start when it is over."""
        if command is not None:
            raise UsageError("resume_with: a function has one world size; prove a command instead")
        write_job(job)
        seen: list[AnyRecord] = []
        recorder = Recorder(job, seen.append, 0, 1, kill=lambda: None)
        session = Session(recorder, Training(recorder))
        begun = time.monotonic()
        status: int | None = 0
        tail = ""
        enter(session)
        try:
            with _fresh_generators(), _quiet(recorder):
                self._train()
        except SimulatedKill:
            pass
        except Exception:  # noqa: BLE001  what goes wrong in the user's function is to be reported
            status, tail = 1, "\n".join(traceback.format_exc().splitlines()[-TAIL_LINES:])
        finally:
            session.close()  # pending saves are committed, as at the end of a process
            # After the close, which still commits: from here on a thread that the function has left changes nothing.
            recorder.retire()
            enter(None)
            session.training.close()
        return Start(
            name=name,
            ranks={0: seen} if seen else {},
            seconds=time.monotonic() - begun,
            kill=job.kill,
            status=None if recorder.killed else status,
            tail=tail,
        )


@contextmanager
def _quiet(recorder: Recorder) -> Iterator[None]:
    """Suppress the failures that a killed run logs: its process would be silent."""

    def lives(_: logging.LogRecord) -> bool:
        return not recorder.dead

    logger = logging.getLogger("aiockpt")
    logger.addFilter(lives)
    try:
        yield
    finally:
        logger.removeFilter(lives)


@contextmanager
def _fresh_generators() -> Iterator[None]:
    """Seed all generators as a new process does for the length of the block."""
    python, numbers, state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    mode = torch.get_deterministic_debug_mode()
    random.seed()
    np.random.seed()
    torch.seed()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(state)
        torch.set_deterministic_debug_mode(mode)
