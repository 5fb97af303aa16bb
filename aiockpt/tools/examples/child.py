"""The processes of the demo: their work, and how the demo starts them and records their events.

A process trains, writes each event to standard output as a JSON line (the rank and the event), and kills itself on cue. A
line is written by one call, before the process goes on, so no event is lost with it. The arithmetic is
reproducible bit by bit.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import distributed

from aiockpt import events
from aiockpt.events import (
    BarrierWaited,
    BytesWritten,
    Committed,
    DataWritten,
    Event,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
)
from aiockpt.runtime.signals import open_child
from aiockpt.tools.examples import train_async, train_elastic, train_sync
from aiockpt.tools.examples.gpt import GPTSize

TRAINERS: dict[str, Callable[..., Any]] = {
    "sync": train_sync.train,
    "async": train_async.train,
    "elastic": train_elastic.train,
}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one process, or of each rank of one start.

    Attributes:
        url: where its checkpoints are.
        every: save every so many steps; None never saves.
        settings: further arguments of the trainer.
        threads: of torch; the order of float additions depends on them.
        die_in_save_of: the step in whose save the last rank sends SIGKILL to itself; None: no kill.
        ranks: number that torchrun starts; None for a single process.
    """

    url: str
    steps: int
    every: int | None
    trainer: Literal["sync", "async", "elastic"] = "sync"
    size: GPTSize = GPTSize()
    settings: dict[str, Any] = {}
    threads: int = 1
    die_in_save_of: int | None = None
    ranks: int | None = None


class StepDone(Event, frozen=True, tag=True):
    """The trainer took an optimizer step, *seconds* after the one before it (a save in between included)."""

    loss: float
    seconds: float


DemoEvent = (
    StepDone | events.SaveStarted | SnapshotTaken | events.BarrierWaited | BytesWritten | DataWritten | events.Committed
    | events.SaveFailed | events.Loaded | events.StepSkipped | events.RolledForward
)  # fmt: skip


class StepReporter:
    """Writes events to a pipe; it is the trainer's ``on_step`` and the checkpointer's observer."""

    def __init__(self, pipe: int, rank: int = 0) -> None:
        self._pipe = pipe
        self._rank = rank
        self._last_ns = time.monotonic_ns()

    def on_step(self, step: int, loss: float) -> None:
        """Emit an optimizer step."""
        now_ns = time.monotonic_ns()
        self.on_event(StepDone(at_ns=now_ns, step=step, loss=loss, seconds=(now_ns - self._last_ns) / 1e9))
        self._last_ns = now_ns

    def on_event(self, event: Event) -> None:
        """Emit an event; a line is short enough for an atomic write to the pipe, with other writers too."""
        if isinstance(event, DemoEvent):
            os.write(self._pipe, msgspec.json.encode((self._rank, event)) + b"\n")


class DieInSave:
    """Kills this process, like a power cut, once the state is snapshotted and partly written."""

    def __init__(self, step: int, die: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL)) -> None:
        self._step, self._die = step, die
        self._snapshotted = self._written = False

    def on_event(self, event: Event) -> None:
        """Die when the save of the step is half-way."""
        if event.step == self._step:
            self._snapshotted |= isinstance(event, SnapshotTaken)
            self._written |= isinstance(event, BytesWritten | DataWritten)
            if self._snapshotted and self._written:
                self._die()


def run(job: Job) -> None:
    """Run *job*; the trainer's output goes to standard error."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(job.threads)
    if job.ranks:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if job.ranks else 0
    reporter = StepReporter(pipe, rank)
    observers: list[StepReporter | DieInSave] = [reporter]
    if job.die_in_save_of is not None and rank == (job.ranks or 1) - 1:
        observers.append(DieInSave(job.die_in_save_of))
    shared = {"size": job.size, "steps": job.steps, "every": job.every, **job.settings}
    trained = TRAINERS[job.trainer](job.url, **shared, on_step=reporter.on_step, observers=observers)
    if trained is not None:
        asyncio.run(trained)
    if job.ranks:
        distributed.destroy_process_group()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Job))


SILENCE_S = 300.0
"""Seconds without an event after which a process is ended."""
LOG_TAIL_CHARACTERS = 2000

E = TypeVar("E", bound=Event)


class DemoError(Exception):
    """The demo cannot run, or one of its processes failed; the message names the log to read."""


class RankRecord:
    """The events of one rank, by kind and step: ``record[Committed][step]``.

    Attributes:
        waits_s: how long the optimizer was held by the lazy snapshot of each save.
        written_bytes: bytes of each save that reached the storage.
    """

    def __init__(self) -> None:
        self._events: dict[type[Event], dict[int, Any]] = defaultdict(dict)
        self.waits_s: dict[int, float] = defaultdict(float)
        self.written_bytes: Counter[int] = Counter()

    def add(self, event: DemoEvent) -> None:
        """Add an event."""
        self._events[type(event)][event.step] = event
        if isinstance(event, BarrierWaited):
            self.waits_s[event.step] += event.seconds
        if isinstance(event, BytesWritten):
            self.written_bytes[event.step] += event.bytes

    def __getitem__(self, kind: type[E]) -> dict[int, E]:
        return self._events[kind]

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


def run_job(
    job: Job, name: str, folder: Path, on_recorded: Callable[[RankRecord, DemoEvent], object]
) -> dict[int, RankRecord]:
    """Run *job* to its end and return the record of each rank's events; *on_recorded* gets those of rank 0.

    The events go to ``<name>.jsonl`` in *folder* too, and the output to ``<name>.log``.

    Raises:
        DemoError: the processes did not end as the job requires: with status 0, or by SIGKILL.
    """
    records: dict[int, RankRecord] = defaultdict(RankRecord)
    decoder = msgspec.json.Decoder(tuple[int, DemoEvent])
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
            rank, event = decoder.decode(line)
            records[rank].add(event)
            if rank == 0:
                on_recorded(records[0], event)
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
    raise DemoError(f"no event for {SILENCE_S:g} s: the process was ended; see {log}")
