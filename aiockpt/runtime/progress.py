"""Progress records: what a trainer tells the launcher that started it, in one page of shared memory for each rank.

Guarantees:

- Without the launcher (`FOLDER` is not set) nothing is written, opened or registered.
- A mark costs half a microsecond: no system call, no lock. The record outlives the process.
- A reader sees a record that was whole at some moment. Times are those of the host's monotonic clock, one for all processes.
- On the signal `STACKS` the training thread writes its stack to a file, whatever it is doing, also where C holds the
  interpreter. Only its own: to read that of a thread that runs meanwhile is a segmentation fault, sooner or later (after
  some 500 looks at two busy threads, CPython 3.11). On an exception that ends the program, its type and place are written.
  What a program has installed there stays in force.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from aiockpt.events import (
    Committed,
    Event,
    NotFiniteFound,
    Opened,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StageEnded,
    StragglerFound,
)
from aiockpt.format.document import described

FOLDER = "AIOCKPT_LAUNCH_FOLDER"
"""The environment variable in which the launcher names the folder of this attempt."""
STACKS = signal.SIGRTMIN + 7 if sys.platform == "linux" else 0
"""Nobody else's: frameworks and schedulers use SIGUSR1, SIGUSR2 and SIGTERM."""
STAGES = ("train", "save", "load", "closed")
# Each has its number at both ends: the training thread writes the one, the loop thread the other.
_TRAIN = struct.Struct("<QQQqQQdddQ")
_BESIDE = struct.Struct("<QQQQd48sQ")
_BESIDE_AT, _SIZE = 128, 4096
REMEMBERED_STEPS = 4096
"""Whose times are known, for a rewind."""
FIGURES = "figures.json"
_TRIES = 100
"""Reads of a record that is being written, at most: a write takes less than a microsecond."""


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has told.

    Attributes:
        pid: of the process.
        thread: the id of its training thread: that of the system, to which a signal can be sent.
        step: the last one, at first that which was loaded; -1 before the first.
        steps: how many steps this process has told of; each number counts when it changes.
        stage: of `STAGES`: what the training thread does.
        step_s: when the last step came.
        mark_s: when the training thread told anything.
        thrown_s: seconds of this process whose steps a rewind has taken back, with what it took itself.
        commits: how many saves have ended well, in this process.
        pending: how many may still, if it is told to end: those in flight, and one more unless all ranks save it together.
        disagreed: whether it was told to end, and the ranks could not agree: it starts no other save.
        beside: what the engine did last in the background, at *beside_s*.
    """

    pid: int
    thread: int
    step: int = -1
    steps: int = 0
    stage: str = "train"
    step_s: float = 0.0
    mark_s: float = 0.0
    thrown_s: float = 0.0
    commits: int = 0
    pending: int = 1
    disagreed: bool = False
    beside_s: float = 0.0
    beside: str = ""


class RestartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells its trainers of all starts on this node.

    Attributes:
        restarts: by what ended the attempt before.
        notice_s, decide_s: of the last restart, from the last progress to the notice and to the end of the processes.
        restart_s, first_step_s: from there to the new processes, and to the end of their first step.
        lost_steps, lost_s: what all restarts together have repeated.
        ettr: the time of steps that count ÷ all time.
    """

    restarts: dict[str, int]
    notice_s: float = 0.0
    decide_s: float = 0.0
    restart_s: float = 0.0
    first_step_s: float = 0.0
    lost_steps: int = 0
    lost_s: float = 0.0
    ettr: float = 0.0


def write_figures(folder: Path, figures: RestartFigures) -> None:
    """Tell the trainers, whose attempts have their folders in *folder*.

    Raises:
        OSError: it cannot be written to.
    """
    write_whole(folder / FIGURES, msgspec.json.encode(figures))


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file, whole or not at all; not durably.

    Raises:
        OSError: it cannot be written to.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def read_figures() -> RestartFigures | None:
    """Return what the launcher of this process tells; None without one, or before it tells anything."""
    if FOLDER in os.environ:
        with suppress(OSError, msgspec.DecodeError):
            return _figures.decode((Path(os.environ[FOLDER]).parent / FIGURES).read_bytes())
    return None


class ProgressWriter:
    """Marks of one trainer, on its training thread, and an observer of its engine, on the loop thread.

    Args:
        folder: of the launcher; None makes every method return at once.
        rank: among those that the launcher started.
    """

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self._memory: mmap.mmap | None = None
        self._number = self._steps = self._commits = self._events = 0
        self._step, self._step_s, self._thrown_s = -1, 0.0, 0.0
        self._saving: set[int] = set()
        self._together = self._disagreed = False
        self._reached: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_STEPS)
        if folder is None:
            return
        self._path, self._pid = rank_path(folder, rank), os.getpid()
        # Exclusively: a program that the trainer starts inherits its environment, and is no trainer.
        with self._path.with_suffix(".progress").open("x+b") as file:
            # A full file system refuses it here; a page of a hole would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        stacks = os.open(self._path.with_suffix(".stacks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        before = signal.getsignal(STACKS)
        # Chained only where there is something to go on with: the default of such a signal ends the process.
        chain = before not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(STACKS, stacks, all_threads=False, chain=chain)
        self._hook, sys.excepthook = sys.excepthook, self._note_crash

    @property
    def observers(self) -> tuple[ProgressWriter, ...]:
        """Itself, under a launcher."""
        return () if self._memory is None else (self,)

    def mark(self, stage: str, step: int = -1) -> None:
        """Tell that the training thread goes on, in *stage*; with *step*, 0 or more, that it has reached that step."""
        if self._memory is None:
            return
        now_s = time.monotonic()
        if step >= 0 and step != self._step:
            self._step, self._step_s = step, now_s
            self._steps += 1
            self._reached.append((step, now_s))
        self._number = number = self._number + 1
        where = self._pid, threading.get_native_id(), self._step, self._steps, STAGES.index(stage)
        what = *where, self._step_s, now_s, self._thrown_s
        _TRAIN.pack_into(self._memory, 0, number, *what, number)

    def resume(self, step: int) -> None:
        """Tell that training begins behind *step*, which was loaded; -1 for the beginning."""
        self._step = step
        if self._memory is not None:
            self._reached.append((step, time.monotonic()))
        self.mark("train")

    def rewind(self, step: int) -> None:
        """Tell that training goes on behind *step* again: what came after it was in vain."""
        since_s = self._step_s = time.monotonic()
        while self._reached and self._reached[-1][0] >= step:
            since_s = self._reached.pop()[1]
        self._thrown_s += self._step_s - since_s
        self.resume(step)

    def on_event(self, event: Event) -> None:
        """Tell what the engine has done; of what people should know, a line for the launcher."""
        match event:
            case Opened():
                self._append(".urls", "".join(f"{url}\n" for url in event.urls))
            case SaveStarted():
                self._saving.add(event.step)
                self._write_beside(f"save of step {event.step}")
            case SaveFailed() | SaveSkipped():
                self._saving.discard(event.step)
                self._write_beside(f"end of step {event.step}")
            case Committed():
                self._commits += 1
                self._saving.discard(event.step)
                self._write_beside(f"commit of step {event.step}")
            case StageEnded():
                self._write_beside(f"{event.operation} of step {event.step}: {event.stage}")
            case StragglerFound():
                self._append(".notes", f"rank {event.rank} is slow in {event.stage}: {event.cause}\n")
            case NotFiniteFound():
                names = ", ".join(event.tensors)[:200]
                self._append(".notes", f"step {event.step} has numbers that are not finite: {names}\n")

    def end_together(self) -> None:
        """Tell that this process, if it is told to end, saves with all ranks or not at all."""
        self._together = True
        self._write_beside("start")

    def note_disagreement(self) -> None:
        """Tell that this process was told to end, and starts no other save."""
        self._disagreed = True
        self._write_beside("no agreement with the other ranks")

    def _write_beside(self, text: str) -> None:
        self._events = number = self._events + 1
        if self._memory is not None:
            pending = len(self._saving) + (not self._together)
            what = self._commits, pending, self._disagreed, time.monotonic(), text.encode()[:48]
            _BESIDE.pack_into(self._memory, _BESIDE_AT, number, *what, number)

    def _append(self, suffix: str, text: str) -> None:
        # An observer that raises is called no more: the launcher would see no commit, and stop the run.
        with suppress(OSError), self._path.with_suffix(suffix).open("a") as file:
            file.write(text)

    def _note_crash(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:
            frames = traceback.extract_tb(trace)
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            with suppress(OSError):
                self._path.with_suffix(".crash").write_text(f"{kind.__qualname__}\n{where}\n{error}\n")
        self._hook(kind, error, trace)


_SILENT = ProgressWriter(None)
_progress: ProgressWriter | None = None


def find_progress() -> ProgressWriter:
    """Return the progress record of this process: one for all of its checkpointers; without a launcher, a silent one."""
    global _progress
    if _progress is None:
        folder = os.environ.get(FOLDER)
        try:
            _progress = ProgressWriter(Path(folder), int(os.environ.get("RANK", "0"))) if folder and STACKS else _SILENT
        except (OSError, ValueError):  # another process tells of this rank, or the launcher is gone
            _progress = _SILENT
    return _progress


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of what *rank* tells, without its suffix: progress, stacks, urls, notes, crash."""
    return folder / f"rank-{rank:05}"


class ProgressReader:
    """Reads the record of one rank, at *path*, as often as wanted."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".progress")
        self._memory: mmap.mmap | None = None

    def read(self) -> ProgressRecord | None:
        """Return the record; None before the trainer has begun one."""
        if self._memory is None:
            with suppress(OSError, ValueError), self._path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        train, beside = self._read(_TRAIN, 0), self._read(_BESIDE, _BESIDE_AT)
        if train is None or beside is None or not train[0]:
            return None
        _, pid, thread, step, steps, stage, step_s, mark_s, thrown_s, _ = train
        events, commits, pending, disagreed, beside_s, text, _ = beside
        return ProgressRecord(
            pid=pid,
            thread=thread,
            step=step,
            steps=steps,
            stage=STAGES[stage],
            step_s=step_s,
            mark_s=mark_s,
            thrown_s=thrown_s,
            commits=commits,
            pending=pending if events else 1,
            disagreed=bool(disagreed),
            beside_s=beside_s,
            beside=text.rstrip(b"\0").decode(errors="replace"),
        )

    def _read(self, form: struct.Struct, offset: int) -> tuple[Any, ...] | None:
        """Return a part that was whole, by its number at both ends."""
        if (memory := self._memory) is not None:
            for _ in range(_TRIES):
                values = form.unpack_from(memory, offset)
                if values[0] == values[-1] and values == form.unpack_from(memory, offset):
                    return values
        return None

    def close(self) -> None:
        """Release the record."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


_figures = msgspec.json.Decoder(described(RestartFigures))
