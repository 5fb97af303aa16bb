"""Processes of one start of the demo: run, with their events recorded, and their ends checked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aiockpt.events import BarrierWaited, BytesWritten, Committed, Event, SaveFailed, SaveStarted
from aiockpt.runtime.signals import open_child
from aiockpt.tools.examples.child import Job, StepDone, Told

SILENCE_S = 300.0
"""A process that emits nothing for so long is ended."""
LOG_TAIL_CHARACTERS = 2000

E = TypeVar("E", bound=Event)


class DemoError(Exception):
    """The demo cannot be run, or one of its processes did not do its part; the message names what to read."""


class RankRecord:
    """The events of one rank, by kind and step: ``record[Committed][step]``.

    Attributes:
        waits_s: how long the optimizer was held by the lazy snapshot of each save.
        written_bytes: bytes of each save that reached the storage.
    """

    def __init__(self) -> None:
        self._told: dict[type[Event], dict[int, Any]] = defaultdict(dict)
        self.waits_s: dict[int, float] = defaultdict(float)
        self.written_bytes: Counter[int] = Counter()

    def add(self, told: Told) -> None:
        """Add an event."""
        self._told[type(told)][told.step] = told
        if isinstance(told, BarrierWaited):
            self.waits_s[told.step] += told.seconds
        if isinstance(told, BytesWritten):
            self.written_bytes[told.step] += told.bytes

    def __getitem__(self, kind: type[E]) -> dict[int, E]:
        return self._told[kind]

    def newest(self, kind: type[E]) -> E | None:
        """Return the last event of this kind, if any."""
        return next(reversed(self[kind].values()), None)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        return {step: done.loss for step, done in self[StepDone].items()}

    @property
    def in_flight(self) -> int:
        """Number of saves that have started and not ended."""
        return len(self[SaveStarted]) - len(self[Committed]) - len(self[SaveFailed])


def run_job(job: Job, name: str, folder: Path, on_told: Callable[[RankRecord, Told], object]) -> dict[int, RankRecord]:
    """Run *job* and return, when its processes are dead, the record of each rank's events; *on_told* gets those of rank 0.

    The events go to ``<name>.jsonl`` in *folder* too, and the output to ``<name>.log``.

    Raises:
        DemoError: they did not end as the job requires: well, or by SIGKILL.
    """
    records: dict[int, RankRecord] = defaultdict(RankRecord)
    decoder = msgspec.json.Decoder(tuple[int, Told])
    command, env = (
        [sys.executable, "-m", "aiockpt.tools.examples.child", msgspec.json.encode(job).decode()],
        {**os.environ},
    )
    if job.ranks:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        env |= {"OMP_NUM_THREADS": str(job.threads), "GLOO_SOCKET_IFNAME": "lo"}
    log = folder / f"{name}.log"
    with (
        (folder / f"{name}.jsonl").open("wb") as copy,
        log.open("wb") as errors,
        open_child(command, errors, env) as child,
    ):
        for line in _lines(child, log):
            copy.write(line + b"\n")
            rank, told = decoder.decode(line)
            records[rank].add(told)
            if rank == 0:
                on_told(records[0], told)
    status = child.returncode
    expected = 0 if job.die_in_save_of is None else 1 if job.ranks else -signal.SIGKILL  # 1: torchrun's, of a dead rank
    if status != expected:
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise DemoError(f"the {name} process ended with status {status} instead of {expected}. {log} says:\n{tail}")
    return records


def _lines(child: subprocess.Popen[bytes], log: Path) -> Iterator[bytes]:
    """Yield the whole lines that *child* writes; a kill may cut the last one."""
    assert child.stdout is not None
    pipe, rest = child.stdout.fileno(), b""
    while select.select([pipe], [], [], SILENCE_S)[0]:
        if not (read := os.read(pipe, 1 << 16)):
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from lines
    raise DemoError(f"it told nothing for {SILENCE_S:g} s and was ended; see {log}")
