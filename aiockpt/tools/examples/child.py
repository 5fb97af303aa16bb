"""One process of the demo: it trains, writes each event to standard output as a JSON line, and kills itself on cue.

The director (`demo`, `elastic`) starts it with a job, by itself or under torchrun. A line is the rank and the event: the
steps and losses that the trainer reports, and the engine's own events. A line is written by one call, before the next
thing happens, so no emitted event is lost with the process. The arithmetic is reproducible bit by bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch import distributed

from aiockpt import events
from aiockpt.events import BytesWritten, DataWritten, Event, SnapshotTaken
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
        threads: of torch; the order of float additions depends on it.
        die_in_save_of: the step whose save SIGKILL, sent by the last rank to itself, is to interrupt; None to live.
        ranks: how many torchrun starts; None for a process by itself.
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


Told = (
    StepDone | events.SaveStarted | SnapshotTaken | events.BarrierWaited | BytesWritten | DataWritten | events.Committed
    | events.SaveFailed | events.Loaded | events.StepSkipped | events.RolledForward
)  # fmt: skip


class StepTeller:
    """Writes what happens to a pipe; the trainer's ``on_step`` and the checkpointer's observer."""

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
        """Emit an event; a line is short enough for the pipe to accept it at once, whatever else writes to it."""
        if isinstance(event, Told):
            os.write(self._pipe, msgspec.json.encode((self._rank, event)) + b"\n")


class DieInSave:
    """Kills this process, as a power cut would, once the state is snapshotted and some of it is written."""

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
    """Train as *job* says; what the trainer prints goes to standard error."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(job.threads)
    if job.ranks:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if job.ranks else 0
    teller = StepTeller(pipe, rank)
    observers: list[StepTeller | DieInSave] = [teller]
    if job.die_in_save_of is not None and rank == (job.ranks or 1) - 1:
        observers.append(DieInSave(job.die_in_save_of))
    shared = {"size": job.size, "steps": job.steps, "every": job.every, **job.settings}
    trained = TRAINERS[job.trainer](job.url, **shared, on_step=teller.on_step, observers=observers)
    if trained is not None:
        asyncio.run(trained)
    if job.ranks:
        distributed.destroy_process_group()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Job))
