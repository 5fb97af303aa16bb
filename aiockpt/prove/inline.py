"""Starts of a training function in this process: fast, for many small proofs. A kill is simulated.

Each start calls the function anew, so that it builds everything afresh, with random generators seeded from the operating
system as those of a new process are. A kill raises an exception that must not be caught (`SimulatedKill`), and from that
moment on the storage accepts no call: what a save had not written is lost, as with SIGKILL. What it cannot show is state
that a module keeps in globals: that survives here, and would not in a new process.
"""

from __future__ import annotations

import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aiockpt.errors import UsageError
from aiockpt.prove.assignment import ProofJob, write_job
from aiockpt.prove.recorder import Recorder, SimulatedKill
from aiockpt.prove.records import AnyRecord
from aiockpt.prove.script_process import TAIL_LINES
from aiockpt.prove.session import Session, enter
from aiockpt.prove.starts import Start
from aiockpt.prove.training import Training


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
        told: list[AnyRecord] = []
        recorder = Recorder(job, told.append, 0, 1, kill=lambda: None)
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
            recorder.retire()
            enter(None)
            session.training.close()
        return Start(
            name=name,
            ranks={0: told} if told else {},
            seconds=time.monotonic() - begun,
            kill=job.kill,
            status=None if recorder.killed else status,
            tail=tail,
        )


@contextmanager
def _quiet(recorder: Recorder) -> Iterator[None]:
    """Suppress the log of what fails in a run that is dead: its process would be silent."""

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
    mode: Any = torch.are_deterministic_algorithms_enabled()
    random.seed()
    np.random.seed()
    torch.seed()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(state)
        torch.use_deterministic_algorithms(mode)
