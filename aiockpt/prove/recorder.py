"""The observer inside a run under `aiockpt prove`: it records the training, and ends the run where its job says so.

The first ``Checkpointer`` of a process makes it. It keeps the place in the training (`aiockpt.prove.records`), receives the
observations of the hooks of `aiockpt.prove.training` and of each checkpointer's probe, and executes the `Kill` of its job:
SIGKILL in a separate process; an exception in a run that is a function of this process (`aiockpt.prove.inline`), whose
storage accepts no call from then on.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from aiockpt.errors import StorageError
from aiockpt.events import Committed, Event
from aiockpt.prove import records
from aiockpt.prove.assignment import KILLED, ProofJob
from aiockpt.prove.records import AnyRecord, encode
from aiockpt.runtime.loop import Mutex

COMMIT_DEADLINE_S = 60.0
"""Seconds that a kill waits for a step to resume from."""


class SimulatedKill(BaseException):
    """This run is over, as if its process had been killed. Must not be caught."""


class Recorder:
    """Records one process's part of one start of a script.

    Args:
        job: what to do.
        write: called with each record.
        rank, world_size: of this process.
        kill: ends the process; returns where the process is simulated.

    Attributes:
        dead: the run is over; *killed*: by its own kill.
    """

    def __init__(
        self,
        job: ProofJob,
        write: Callable[[AnyRecord], object],
        rank: int,
        world_size: int,
        kill: Callable[[], object],
    ) -> None:
        self.job = job
        self.rank, self.world_size = rank, world_size
        self.dead = False
        self.killed = False
        self._write, self._kill = write, kill
        self._pid = os.getpid()
        self._writing = Mutex()
        self._label: int | None = None
        self._count = 0
        self._since_load: int | None = None
        self._calls: Counter[int] = Counter()
        self._resumable = False
        self._saving: set[int] = set()

    # ------------------------------------------------------------------ what happens

    def write(self, kind: Callable[..., AnyRecord], *, at: int | None = None, **fields: Any) -> None:
        """Write a record with the current place, or that of optimizer step number *at*. Any thread.

        A forked child (a loader's worker) writes nothing.
        """
        if os.getpid() != self._pid or self.dead:
            return
        with self._writing:
            self._write(kind(label=self._label, count=self._count if at is None else at, **fields))

    def check(self) -> None:
        """End the training thread of a run whose kill was simulated on another thread."""
        if self.dead and os.getpid() == self._pid:
            raise SimulatedKill

    def begin_step(self) -> int:
        """Called when an optimizer is about to step; return which step since the label that is."""
        self._count += 1
        return self._count

    def end_step(self) -> None:
        """Called when the optimizer has stepped; the run ends here if this is the place of its kill."""
        self.check()
        kill, job = self.job.kill, self.job
        if kill is not None and kill.kind == "step":
            if (kill.label, kill.count) == (self._label, self._count):
                self._die_if_resumable()
            elif self._label is not None and kill.label is not None and self._label > kill.label:
                self._die_if_resumable(f"after step {self._label}, because that place was passed over")
        if self._since_load is not None:
            self._since_load += 1
            if job.stop_after is not None and self._since_load >= job.stop_after:
                self._die("enough was seen")

    def reach(self, step: int, *, saving: bool = False) -> None:
        """Called when the script has reached *step*, and may be *saving* it: places are counted from there.

        Executes a kill whose save is skipped this time (a `Cadence` may decide so) once its step is passed.
        """
        self._label, self._count = step, 0
        kill = self.job.kill
        if saving:
            self._saving.add(step)
        if kill is None or kill.kind == "step" or kill.label is None:
            return
        if step > kill.label and kill.label not in self._saving and self._resumable:
            self._die_if_resumable(f"at step {step}, because step {kill.label} was not saved this time")

    def loaded(self, step: int | None) -> None:
        """Called when the script goes on from *step*, or from nothing."""
        if step is not None:
            self.reach(step)
            self._since_load = 0
            self._resumable = True

    def saved(self, step: int) -> None:
        """Called when ``save(step)`` has returned."""
        kill = self.job.kill
        if kill is not None and kill.kind == "call" and kill.label == step:
            self._die_if_resumable()

    def on_event(self, event: Event) -> None:
        """Receive the outcome of a save. On the loop thread."""
        if isinstance(event, Committed) and not self.dead:
            self._resumable = True
            self.write(records.SaveDone, step=event.step, calls=self._calls[event.step])

    # ------------------------------------------------------------------ the end

    async def storage_call(self, step: int | None, wait: Callable[[float], Any]) -> None:
        """Called before a change in the folder of *step*; the run ends here if this is the place of its kill.

        Changes by a load, which finishes the commit of a dead start, belong to no save of this start.

        Args:
            wait: sleeps, on the event loop.

        Raises:
            StorageError: the run was already killed in simulation.
        """
        if self.dead:
            raise StorageError("the run was killed")
        if step is None or step not in self._saving:
            return
        kill, number = self.job.kill, self._calls[step]
        self._calls[step] += 1
        if kill is None or kill.kind != "save" or (kill.label, kill.rank) != (step, self.rank) or kill.call != number:
            return
        deadline = time.monotonic() + COMMIT_DEADLINE_S
        while not self._resumable and time.monotonic() < deadline:
            # On the event loop: the commit of an earlier step, which this waits for, goes on meanwhile.
            await wait(0.005)
        # Returns only in a simulation; the call then fails, so that nothing of this save is written any more.
        self._end(kill.explain())
        raise StorageError("the run was killed")

    def _die_if_resumable(self, where: str | None = None) -> None:
        """End the run once there is a step to resume from: a save may be under way."""
        kill = self.job.kill
        if kill is None or kill.rank != self.rank:
            return
        deadline = time.monotonic() + COMMIT_DEADLINE_S
        while not self._resumable and time.monotonic() < deadline:
            time.sleep(0.005)
        self._die(where or kill.explain())

    def _die(self, where: str) -> NoReturn:
        self._end(where)
        raise SimulatedKill

    def _end(self, where: str) -> None:
        # Before `dead`: from there on `write` drops every record.
        self.write(records.Died, where=where)
        self.dead = self.killed = True
        self._kill()

    def retire(self) -> None:
        """Write no more records, and refuse all storage calls: a simulated process has ended."""
        self.dead = True


class FileWriter:
    """Appends records to a file; each line is written at once, so that nothing is lost with the process."""

    def __init__(self, folder: Path, rank: int) -> None:
        # By the time of its begin, which orders the processes of a rank.
        path = folder / f"rank{rank:05d}-{time.time_ns():020d}-{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def __call__(self, record: AnyRecord) -> None:
        data = memoryview(encode(record))
        while data:
            data = data[os.write(self._fd, data) :]


def kill_this_process(folder: Path) -> Callable[[], None]:
    """Return a function that kills this process like `kill -9`, and notifies the process that ends the other ranks."""

    def kill() -> None:
        (folder / KILLED).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return kill
