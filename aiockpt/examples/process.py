"""How does the director run one process of the demo, hear what happens in it, and know how it ended?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec

from aiockpt.examples.child import Job, Told
from aiockpt.examples.record import Record

LOG_TAIL_CHARACTERS = 2000
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the demo: control-C, a polite kill, and a terminal that is closed."""


class DemoError(Exception):
    """The demo cannot be run, or one of its processes did not do its part; the message says what to look at."""


class Interrupted(KeyboardInterrupt):
    """The demo was told to end, by the signal *number*; it ends as after control-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Interrupted` in the block when a signal ends the demo. On the main thread."""

    def end(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    with ExitStack() as restored:
        _handle(end, restored)
        yield


@contextmanager
def open_process(
    command: Sequence[str],
    end: Callable[[subprocess.Popen[bytes]], object],
    log: BinaryIO,
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that prints into *log*, and wait for it; where the block is left by an exception *end* ends it first.

    A signal that comes while it starts is held back until there is a process to be ended. On the main thread.
    """
    held_back: list[int] = []
    with ExitStack() as restored:
        _handle(lambda number, _: held_back.append(number), restored)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=pass_fds, env=env
        )
        with process:
            try:
                restored.close()
                for number in held_back:
                    signal.raise_signal(number)
                yield process
            except BaseException:
                end(process)
                raise


def _handle(handler: Callable[[int, FrameType | None], object], restored: ExitStack) -> None:
    for number in ENDING:
        restored.callback(signal.signal, number, signal.signal(number, handler))


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
        open_process(command, subprocess.Popen.kill, log, pass_fds=[tell]) as child,
    ):
        os.close(tell)  # the child has its own; while ours is open the pipe does not end
        for line in pipe:
            lines.write(line)
            told = decoder.decode(line)
            record.add(told)
            on_told(record, told)
    _check_end(job, name, folder, child.returncode)
    return record


def _check_end(job: Job, name: str, folder: Path, status: int) -> None:
    expected = 0 if job.die_in_save_of is None else -signal.SIGKILL
    if status != expected:
        log = folder / f"{name}.log"
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise DemoError(f"the {name} process ended with status {status} instead of {expected}. {log} says:\n{tail}")
