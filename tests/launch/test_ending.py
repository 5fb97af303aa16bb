"""Trainers that are told to end: which of them the launcher kills before torch's agent does, and whose end is a failure."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aiockpt.launch import node_watch
from aiockpt.launch.node_watch import NodeWatch, say
from aiockpt.launch.trainers import NO_ANSWER, Trainers
from aiockpt.runtime.progress import FOLDER, ProgressRecord, rank_path
from tests.docs.pages import ROOT
from tests.watch import until

TRAINER = """
import random, signal, sys, threading, time
from aiockpt.events import Committed, SaveStarted
from aiockpt.runtime.progress import find_progress

def visit(depth):
    visit(depth - 1) if depth else time.sleep(0.01)

signal.signal(signal.SIGTERM, lambda *of: None)
marks = find_progress()
marks.mark("train", 3)
told = sys.argv[1:]
if "together" in told:
    marks.end_together()
if "saves" in told:
    marks.on_event(SaveStarted(at_ns=0, step=4, bytes=1, tensor_count=1))
if "saved" in told:
    marks.on_event(Committed(at_ns=0, step=4, bytes=1, seconds=0.0, generation=0))
if "disagrees" in told:
    marks.note_disagreement()

def stand():
    held.acquire()

def tell_when_it_stands():
    while "moves" not in told and (frame := sys._current_frames()[main]).f_lineno != stand.__code__.co_firstlineno + 1:
        time.sleep(0.01)
    print("ready", flush=True)

main, held = threading.get_ident(), threading.Lock()
held.acquire()
threading.Thread(target=tell_when_it_stands).start()
while "moves" in told:
    visit(random.randrange(50))
stand()
"""


SCRIPT = "sleep 1000 & echo $! > child; wait"
SAVES = """
import pathlib, signal, subprocess, time
from aiockpt.runtime.progress import find_progress
told = []  # an Event may be locked by the very call that the signal interrupts
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
worker = subprocess.Popen(["sleep", "1000"])
find_progress().mark("train", 3)
pathlib.Path("child").write_text(f"{worker.pid}\\n")
while not told:
    time.sleep(0.01)
assert worker.poll() is None
pathlib.Path("outlived").touch()
"""


@contextmanager
def told_to_end(
    folder: Path, told: str, timeout_s: float, *, failed: bool
) -> Iterator[tuple[NodeWatch, "subprocess.Popen[str]"]]:
    """End a trainer that does not end by itself."""
    watch = NodeWatch(folder / "run", "run", report=lambda _: None)
    watch.begin_attempt([0, 1], 2)
    command = [sys.executable, "-c", TRAINER, *told.split(", ")]
    with subprocess.Popen(command, env={**os.environ, "RANK": "0"}, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
            watch.end_trainers({0: trainer.pid, 1: 0x7FFFFFFF}, signal.SIGTERM, timeout_s, failed=failed)
            yield watch, trainer
        finally:
            trainer.kill()
    watch.end("ended")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "STANDS_S", 0.5)
    monkeypatch.setattr(node_watch, "LOOKS_APART_S", 0.1)


def test_the_stack_of_another_thread_is_no_answer(tmp_path: Path) -> None:
    stack = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in wait\n  File "b.py", line 9 in {}\n'
    for root, answer in (("_bootstrap", NO_ANSWER), ("<module>", "wait (a.py:3)")):
        rank_path(tmp_path, 0).with_suffix(".stacks").write_text(stack.format(root))
        trainers = Trainers(tmp_path, [0])
        place = trainers.sample({0: ProgressRecord(pid=os.getpid(), thread=os.getpid())})[0].place
        assert place[0].startswith(answer)


def is_there(pid: int) -> bool:
    """Return whether a process is there that has not ended."""
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.parametrize(
    ("command", "outlives"), [(["bash", "-c", SCRIPT], False), ([sys.executable, "-c", SAVES], True)]
)
def test_what_a_trainer_has_started_ends_with_it(tmp_path: Path, command: list[str], outlives: bool) -> None:
    """Below a script it may be the trainer; a trainer that has told of itself may need its workers until its end."""
    watch = NodeWatch(tmp_path / "run", "run", report=lambda _: None)
    watch.begin_attempt([0], 1)
    child = tmp_path / "child"
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "RANK": "0", "PYTHONPATH": str(ROOT)}, start_new_session=True
    ) as trainer:
        until(lambda: child.exists() and child.read_text().endswith("\n"), "the child")
        watch.end_trainers({0: trainer.pid}, signal.SIGTERM, 30, failed=True)
        assert trainer.poll() is not None
        until(lambda: not is_there(int(child.read_text())), "the end of the child")
    assert (tmp_path / "outlived").exists() == outlives
    watch.end("ended")


def test_a_rank_that_is_not_watched_may_be_at_work(tmp_path: Path) -> None:
    """Under a launcher below this one."""
    trainers = Trainers(tmp_path, [0])
    rank_path(tmp_path, 0).with_suffix(".progress").touch()
    assert not trainers.has_others()
    rank_path(tmp_path, 1).with_suffix(".progress").touch()
    assert trainers.has_others()


def test_a_start_whose_progress_cannot_be_told_is_one_all_the_same(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = NodeWatch(tmp_path / "run", "run", report=lines.append)
    watch.begin_attempt([0], 1)
    shutil.rmtree(Path(os.environ[FOLDER]).parent)
    watch.begin_attempt([0], 1)
    assert watch.poll() is None
    assert "the progress of the trainers is not seen" in lines[0]
    watch.end("ended")


def test_nobody_needs_to_read_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = os.pipe()
    os.close(there)
    with os.fdopen(here, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        say("told")
        say("told again")
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("told", "failed"), [("together", True), ("together, disagrees", False), ("together, saves, saved", True)]
)
def test_one_that_stands_and_can_save_nothing_is_killed(tmp_path: Path, told: str, failed: bool) -> None:
    with told_to_end(tmp_path, told, 60, failed=failed) as (watch, trainer):
        assert trainer.poll() == -signal.SIGKILL
    assert watch.describe_exits({0: -signal.SIGKILL, 1: 3}).rank == 1
    assert watch.describe_exits({0: 77, 1: 3}).kind == "exit status 3"


@pytest.mark.parametrize(
    ("told", "failed"),
    [
        ("together, saves", True),
        ("together, saves, disagrees", False),
        ("together, moves", True),
        ("together", False),
        ("alone", True),
    ],
)
def test_one_that_may_still_save_is_left_its_grace(tmp_path: Path, told: str, failed: bool) -> None:
    with told_to_end(tmp_path, told, 2, failed=failed) as (_, trainer):
        assert trainer.poll() is None
