"""How does the director run one process of the demo, hear what happens in it, and know how it ended?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from aiockpt.examples.child import Job, Told
from aiockpt.examples.record import Record

LOG_TAIL_CHARACTERS = 2000


class DemoError(Exception):
    """The demo cannot be run, or one of its processes did not do its part; the message says what to look at."""


def make_work_folder(folder: Path | None) -> Path:
    """Return a folder that holds nothing yet: *folder*, made with its parents, or a new one in the current one for None.

    Raises:
        DemoError: it cannot be made, or holds something.
    """
    try:
        if folder is None:
            return Path(tempfile.mkdtemp(prefix="aiockpt-demo-", dir="."))
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return folder
    except OSError as error:
        raise DemoError(f"no folder to work in: {error}; give one with --dir") from error
    raise DemoError(f"{folder} is not empty: give --dir a new folder, so that nothing of yours is mixed in")


def run_job(job: Job, name: str, folder: Path, on_told: Callable[[Record, Told], object]) -> Record:
    """Run *job* in a process of its own and return the record of what it told when it is dead.

    What it tells goes to ``<name>.jsonl`` in *folder* too, and what it prints to ``<name>.log``.

    Raises:
        DemoError: it did not end as the job says: well, or by SIGKILL.
    """
    record = Record()
    decoder = msgspec.json.Decoder[Told](Told)
    hear, tell = os.pipe()
    command = [sys.executable, "-m", "aiockpt.examples.child", msgspec.json.encode(job).decode(), str(tell)]
    with (
        os.fdopen(hear, "rb") as pipe,
        (folder / f"{name}.jsonl").open("wb") as lines,
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen(command, pass_fds=[tell], stdin=subprocess.DEVNULL, stdout=log, stderr=log) as child,
    ):
        os.close(tell)  # the child has its own; while ours is open the pipe does not end
        try:
            for line in pipe:
                lines.write(line)
                told = decoder.decode(line)
                record.add(told)
                on_told(record, told)
        except BaseException:
            child.kill()
            raise
    _check_end(job, name, folder, child.returncode)
    return record


def _check_end(job: Job, name: str, folder: Path, status: int) -> None:
    expected = 0 if job.die_in_save_of is None else -signal.SIGKILL
    if status != expected:
        log = folder / f"{name}.log"
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise DemoError(f"the {name} process ended with status {status} instead of {expected}. {log} says:\n{tail}")
