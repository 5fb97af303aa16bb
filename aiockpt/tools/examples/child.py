"""One process of the demo: it trains, writes each event to standard output as a JSON line, and kills itself on cue.

A line (the rank and the event) is written by one call, before the process goes on, so no event is lost with it. The
arithmetic is reproducible bit by bit.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import distributed

from aiockpt.events import BarrierWaited, BytesWritten, Committed, DataWritten, Event, Loaded, SnapshotTaken
from aiockpt.tools.examples.gpt import GPTSize


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one process, or of each rank of one start.

    Attributes:
        url: where its checkpoints are.
        every: save every so many steps; None never saves.
        size: None for the trainer's own.
        settings: further arguments of the trainer.
        threads: of torch; the order of float additions depends on them.
        die_in_save_of: the step in whose save the last rank sends SIGKILL to itself; None: no kill.
        ranks: number that torchrun starts; None for a single process.
    """

    url: str
    steps: int
    every: int | None
    trainer: Literal["sync", "async", "elastic"] = "sync"
    size: GPTSize | None = None
    settings: dict[str, Any] = {}
    threads: int = 1
    die_in_save_of: int | None = None
    ranks: int | None = None


class StepDone(Event, frozen=True, tag=True):
    """The trainer took an optimizer step, *seconds* after the one before it (a save in between included)."""

    loss: float
    seconds: float


DemoEvent = StepDone | SnapshotTaken | BarrierWaited | BytesWritten | Committed | Loaded


class StepReporter:
    """Writes events as lines; it is the trainer's ``on_step`` and the checkpointer's observer.

    Args:
        pipe: or a file to append to.
        where: the rank, and what else each line begins with.
        kinds: of the events that are written.
    """

    def __init__(self, pipe: int, *where: int, kinds: tuple[type[Event], ...] = get_args(DemoEvent)) -> None:
        self._pipe, self._where, self._kinds = pipe, where, kinds
        self._last_ns = time.monotonic_ns()

    def on_step(self, step: int, loss: float) -> None:
        """Emit an optimizer step."""
        now_ns = time.monotonic_ns()
        self.on_event(StepDone(at_ns=now_ns, step=step, loss=loss, seconds=(now_ns - self._last_ns) / 1e9))
        self._last_ns = now_ns

    def on_event(self, event: Event) -> None:
        """Emit an event; a line is short enough for an atomic write to the pipe, with other writers too."""
        if isinstance(event, self._kinds):
            os.write(self._pipe, msgspec.json.encode((*self._where, event)) + b"\n")


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
    settings = job.settings if job.size is None else {**job.settings, "size": job.size}
    trainer = importlib.import_module(f"aiockpt.tools.examples.train_{job.trainer}")
    trained = trainer.train(
        job.url, steps=job.steps, every=job.every, **settings, on_step=reporter.on_step, observers=observers
    )
    if trained is not None:
        asyncio.run(trained)
    if job.ranks:
        distributed.destroy_process_group()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Job))
