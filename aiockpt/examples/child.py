"""How does one process of the demo train, tell what happens, and die on cue?

The director (`demo`) starts it with a job and a pipe. Everything that happens is one JSON line on the pipe: steps and
losses as the trainer reports them, and the engine's own events. Guarantees: a line is written whole before the next
thing happens, so that nothing told is lost with the process; the arithmetic is reproducible bit by bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from aiockpt.events import (
    BarrierWaited,
    BytesWritten,
    Committed,
    DataWritten,
    Event,
    Loaded,
    Observer,
    RolledForward,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
    StepSkipped,
)
from aiockpt.examples import train_async, train_sync
from aiockpt.examples.gpt import GPTSize
from aiockpt.options import Snapshot


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do.

    Attributes:
        url: where its checkpoints are.
        every: save every so many steps; None never saves.
        keep: how many steps retention keeps.
        snapshot: how states are copied.
        threads: of torch; the order of float additions depends on it.
        die_in_save_of: the step whose save is to be interrupted by SIGKILL; None to live.
    """

    url: str
    size: GPTSize
    steps: int
    every: int | None
    keep: int
    threads: int
    asynchronous: bool
    snapshot: Snapshot = "eager"
    die_in_save_of: int | None = None


class StepDone(Event, frozen=True, tag=True):
    """The trainer took an optimizer step, *seconds* after the one before it (a save in between included)."""

    loss: float
    seconds: float


Told = (
    StepDone | SaveStarted | SnapshotTaken | BarrierWaited | BytesWritten | DataWritten | Committed | SaveFailed
    | Loaded | StepSkipped | RolledForward
)  # fmt: skip


class Teller:
    """Writes what happens to a pipe; the trainer's ``on_step`` and the checkpointer's observer."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._last_ns = time.monotonic_ns()

    def on_step(self, step: int, loss: float) -> None:
        """Tell of an optimizer step."""
        now_ns = time.monotonic_ns()
        self.on_event(StepDone(at_ns=now_ns, step=step, loss=loss, seconds=(now_ns - self._last_ns) / 1e9))
        self._last_ns = now_ns

    def on_event(self, event: Event) -> None:
        """Tell of an event; a line is short enough for the pipe to take it at once."""
        if isinstance(event, Told):
            os.write(self._pipe, msgspec.json.encode(event) + b"\n")


class DieInSave:
    """Kills this process, as a power cut would, once the state is snapshotted and some of it is written."""

    def __init__(self, step: int, die: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL)) -> None:
        self._step = step
        self._die = die
        self._snapshotted = False
        self._written = False

    def on_event(self, event: Event) -> None:
        """Die when the save of the step is half-way."""
        if event.step != self._step:
            return
        self._snapshotted |= isinstance(event, SnapshotTaken)
        self._written |= isinstance(event, BytesWritten | DataWritten)
        if self._snapshotted and self._written:
            self._die()


def run(job: Job, pipe: int) -> None:
    """Train as *job* says and tell *pipe* about it."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(job.threads)
    teller = Teller(pipe)
    observers: list[Observer] = [teller]
    if job.die_in_save_of is not None:
        observers.append(DieInSave(job.die_in_save_of))
    settings: dict[str, Any] = {
        "size": job.size,
        "steps": job.steps,
        "every": job.every,
        "keep": job.keep,
        "snapshot": job.snapshot,
        "on_step": teller.on_step,
        "observers": observers,
    }
    if job.asynchronous:
        asyncio.run(train_async.train(job.url, **settings))
    else:
        train_sync.train(job.url, **settings)


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Job), pipe=int(sys.argv[2]))
