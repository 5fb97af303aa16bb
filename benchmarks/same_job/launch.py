"""Processes of the job: started, watched while they save, killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.same_job.contenders import Contender

CHECKOUT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
WATCH_S = 0.002
GRACE_S = 3.0
"""Seconds for the other ranks to report their errors after one has failed."""


@dataclass(frozen=True)
class Size:
    """Size of the job's model, and the interval of its saves."""

    width: int
    layers: int
    steps: int
    every: int


class Job:
    """The ranks of one run of *script*, in *folder*. Their notes and logs are beside it."""

    def __init__(
        self, python: Path, script: str, folder: Path, size: Size, ranks: int = 2, digests: bool = True
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._notes, self._log = folder.with_suffix(".notes"), folder.with_suffix(".log")
        self._notes.unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(CHECKOUT)]).lstrip(os.pathsep),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "JOB_NOTES": str(self._notes),
            "JOB_DIGESTS": str(int(digests)),
            **{f"JOB_{name.upper()}": str(value) for name, value in vars(size).items()},
        }
        command = [str(python), str(CHECKOUT / f"benchmarks/same_job/scripts/{script}.py"), str(folder)]
        with self._log.open("wb") as log:
            self._ranks = [
                subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for rank in range(ranks)
            ]

    def notes(self) -> list[dict[str, Any]]:
        """Return the records of rank 0 so far, one for each step."""
        lines = self._notes.read_text().splitlines(keepends=True) if self._notes.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def runs(self) -> bool:
        """Return whether all ranks still run; one that failed leaves the others waiting."""
        return all(rank.poll() is None for rank in self._ranks)

    def wait(self) -> str:
        """Wait until all ranks have ended; return an empty text, or the line that explains a failure."""
        until = time.monotonic() + DEADLINE_S
        try:
            while any(rank.poll() is None for rank in self._ranks):
                if any(rank.poll() for rank in self._ranks) or time.monotonic() > until:
                    time.sleep(GRACE_S)
                    break
                time.sleep(0.05)
        finally:
            self.kill()
        return (self.error() or "a rank failed") if any(rank.returncode for rank in self._ranks) else ""

    def kill(self) -> None:
        """End all ranks and their child processes with SIGKILL."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()

    def error(self) -> str:
        """Return the last line of the log that names an error."""
        lines = self.log().splitlines()
        return next((line.strip() for line in reversed(lines) if "Error:" in line or "Exception:" in line), "")[:300]

    def log(self) -> str:
        """Return the output of all ranks."""
        return self._log.read_text(errors="replace")


def run(python: Path, script: str, folder: Path, size: Size, ranks: int = 2) -> tuple[list[dict[str, Any]], str, str]:
    """Run a job to its end; return its notes, the reason of a failure (empty: none), and its output."""
    job = Job(python, script, folder, size, ranks)
    failure = job.wait()
    return job.notes(), failure, job.log()


def marks(folder: Path, contender: Contender) -> set[Path]:
    """Return the marks of the complete checkpoints in *folder*."""
    # Path.glob of Python 3.11 raises when a folder, here of an older checkpoint, is deleted meanwhile.
    return {folder / found for found in glob(contender.mark, root_dir=folder)}


def flush(mark: Path, folder: Path) -> None:
    """Flush the files and the names of the checkpoint of *mark*; files that its library flushed cost nothing here."""
    step = folder / mark.relative_to(folder).parts[0]
    with suppress(FileNotFoundError):  # an older one that is being deleted
        for path in pages.files(step):
            pages.sync(path)
        pages.sync_folders(step)


def watch(job: Job, contender: Contender) -> list[float]:
    """Wait for the job's end; return the times when its checkpoints were complete and flushed, by the clock of its notes."""
    seen: set[Path] = set()
    durable = []
    runs = True
    while runs:
        runs = job.runs()  # before the look: the last checkpoint may come as the job ends
        for mark in sorted(marks(job.folder, contender) - seen):
            flush(mark, job.folder)
            durable.append(time.monotonic())
            seen.add(mark)
        time.sleep(WATCH_S)
    failure = job.wait()
    if failure:
        raise RuntimeError(f"{contender.name}: {failure}")
    return durable


def interpreter(contender: Contender) -> Path:
    """Return the interpreter of a contender; build its environment if it does not exist."""
    if not contender.environment:
        return Path(sys.executable)
    from tests.environments import build

    return build("same_job", contender.environment, Path(__file__).parent / f"requirements/{contender.environment}.txt")
