"""Starts of a script as real processes: run to their end, or until they have killed themselves by SIGKILL.

A job of several ranks is killed as a whole: when one process says that it has killed itself, all others of that start are
killed too; but for the writer processes (``worker="process"``), which are there to outlive it and are waited for. What
belongs to a start is found by the environment variable that names its job (where there is ``/proc``).

Guarantees: nothing that a start has started is left behind, also when `aiockpt prove` is interrupted; every wait ends.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from aiockpt.errors import UsageError
from aiockpt.prove.assignment import KILLED, VARIABLE, ProofJob, write_job
from aiockpt.prove.starts import Start, read_start_ranks

POLL_S = 0.05
GRACE_S = 60.0
"""How long a writer process may take to finish what it has, and a launcher to end when its ranks are gone."""
TAIL_LINES = 15
_WRITER = b"aiockpt.worker"

Tick = Callable[[str, float, Path], object]
"""Called with the name of the start, the seconds so far, and its folder; from time to time."""


class ProcessRunner:
    """Starts a command.

    Args:
        command: what to start, in this process's folder and environment.
        timeout_s: of each start.
        loss: finds losses in what is printed: its group ``loss``, or its first one, is the text, ``step`` the number.
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
            command: another one than usual.

        Raises:
            UsageError: it cannot be started, or did not end in time; with its last lines.
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
        return f"{late}; give --timeout more, or train less. It said:\n{said}"

    def _end(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of a start; wait for writer processes, which finish what they have, and then kill them too."""
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
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
    """Yield (process id, whether it is a writer) of each process whose job is *path*; none where there is no /proc."""
    marker = f"{VARIABLE}={path}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is another user's, or has ended
            if marker not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield int(entry.name), _WRITER in (entry / "cmdline").read_bytes().split(b"\0")
