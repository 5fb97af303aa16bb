"""Progress records: written by a trainer, read by its launcher."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from aiockpt import Checkpointer, Rewind
from aiockpt.events import Committed, NotFiniteFound
from aiockpt.launch.trainers import Trainers, find_place
from aiockpt.runtime import progress
from aiockpt.runtime.progress import FOLDER, ProgressReader, ProgressRecord, ProgressWriter, find_progress, rank_path
from tests.run_python import run_python
from tests.watch import until

CRASH = """
import sys
from aiockpt.runtime.progress import find_progress
sys.excepthook = lambda *of: print("mine")
find_progress()
raise ArithmeticError("no")
"""
WAITS = """
import threading
from aiockpt.runtime.progress import find_progress
marks = find_progress()
marks.mark("train", 3)
def wait_here():
    threading.Event().wait()
wait_here()
"""

BECOMES_ANOTHER = """
import os, sys
from aiockpt.runtime.progress import find_progress
find_progress().mark("train", 3)
os.execvp("sleep", ["sleep", "1000"])
"""

BUSY = """
import asyncio, json, threading, time
from aiockpt.runtime.progress import find_progress
def call(depth):
    return call(depth - 1) if depth else json.loads(json.dumps({"a": [1, 2]}))
async def acall(depth):
    await (acall(depth - 1) if depth else asyncio.sleep(0))
async def work():
    while True:
        call(30)
        await acall(10)
def train():
    find_progress().mark("train", 1)
    while True:
        time.sleep(0.01)
for _ in range(2):
    threading.Thread(target=asyncio.run, args=(work(),), daemon=True).start()
threading.Thread(target=train).start()
"""


@pytest.fixture
def hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.mark.usefixtures("hook")
def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    marks, reader = ProgressWriter(tmp_path, 3), ProgressReader(rank_path(tmp_path, 3))
    assert reader.read() is None
    marks.resume(4)
    first = reader.read()
    assert first is not None
    assert (first.step, first.steps, first.pid) == (4, 0, os.getpid())
    marks.mark("save", 5)
    marks.on_event(Committed(at_ns=0, step=5, bytes=1, seconds=0.1, generation=1))
    marks.mark("train")
    record = reader.read()
    assert record is not None
    assert (record.step, record.steps, record.stage, record.commits) == (5, 1, "train", 1)
    assert record.beside == "commit of step 5"
    assert record.thread == threading.get_native_id()
    assert record.mark_s >= record.step_s > 0
    reader.close()


@pytest.mark.usefixtures("hook")
def test_what_a_rewind_takes_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks, reader = ProgressWriter(tmp_path, 0), ProgressReader(rank_path(tmp_path, 0))
    monkeypatch.setattr(progress, "_progress", marks)
    state = {"x": torch.zeros(3)}
    with Checkpointer(tmp_path / "run", every=1, rewind=Rewind()) as ckpt:
        step, thrown_s, began_s = ckpt.resume(state), 0.0, time.monotonic()
        while step < 5:
            is_bad = step == 3 and not thrown_s
            if is_bad:
                time.sleep(0.05)
            step = ckpt.advance(step, state, metrics={"loss": float("nan") if is_bad else 1.0})
            if is_bad:
                record = reader.read()
                assert record is not None
                assert record.step == 2
                thrown_s = record.thrown_s
    assert 0.05 <= thrown_s <= time.monotonic() - began_s
    assert step == 5
    marks.rewind(3)  # to the last step but one: what came since then is in vain as well
    record = reader.read()
    assert record is not None
    assert record.thrown_s > thrown_s
    reader.close()


@pytest.mark.usefixtures("hook")
def test_what_people_should_know_is_passed_on_once(tmp_path: Path) -> None:
    marks, trainers = ProgressWriter(tmp_path, 0), Trainers(tmp_path, [0])
    marks.on_event(NotFiniteFound(at_ns=0, step=5, tensors={"model.w": 3}))
    assert list(trainers.notes()) == [(0, "step 5 has numbers that are not finite: model.w")]
    assert list(trainers.notes()) == []


def test_without_a_launcher_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(progress, "_progress", None)
    marks = find_progress()
    marks.mark("train", 1)
    assert marks.observers == ()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume({"a": 1}) == 0


def test_a_program_that_the_trainer_starts_leaves_its_record_alone(tmp_path: Path) -> None:
    rank_path(tmp_path, 0).with_suffix(".progress").write_bytes(b"")
    run_python(
        "-c", "from aiockpt.runtime.progress import find_progress as f; assert not f().observers", env=_env(tmp_path)
    )


def test_the_exception_that_ends_a_trainer_is_noted_and_its_hook_called(tmp_path: Path) -> None:
    done = run_python("-c", CRASH, status=1, env=_env(tmp_path))
    assert done.stdout == "mine\n"
    assert Trainers(tmp_path, [0]).first_crash([0]) == (0, "ArithmeticError", "<string>:6")


def test_the_stacks_of_a_trainer_show_its_training_thread(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], env=_env(tmp_path)) as trainer:
        trainers = Trainers(tmp_path, [0])

        def waits_here() -> bool:
            records = trainers.read()
            trainers.request_stacks(records)
            time.sleep(0.2)
            return any(
                frame.startswith("wait_here (") for each in trainers.sample(records).values() for frame in each.place
            )

        try:
            until(waits_here, "the stacks")
        finally:
            trainer.kill()
            trainers.close()


def test_a_look_at_a_busy_process_does_not_end_it(tmp_path: Path) -> None:
    """With the stacks of all threads it ends in a segmentation fault, after some 500 looks."""
    with subprocess.Popen([sys.executable, "-c", BUSY], env=_env(tmp_path)) as trainer:
        trainers = Trainers(tmp_path, [0])
        try:
            until(trainers.read, "the record")
            for _ in range(800):
                trainers.request_stacks(trainers.read())
                time.sleep(0.002)
            time.sleep(0.2)
            ((_, sample),) = trainers.sample(trainers.read()).items()
            assert trainer.poll() is None
            assert sample.place[0].startswith("train ("), sample.place
        finally:
            trainer.kill()
            trainers.close()


def test_a_process_that_has_become_another_program_is_not_looked_at(tmp_path: Path) -> None:
    """The signal of a look ends a program that does not handle it."""
    with subprocess.Popen([sys.executable, "-c", BECOMES_ANOTHER], env=_env(tmp_path)) as trainer:
        trainers = Trainers(tmp_path, [0])
        try:
            until(lambda: b"sleep" in Path(f"/proc/{trainer.pid}/cmdline").read_bytes()[:6], "the other program")
            records = trainers.read()
            assert records
            trainers.request_stacks(records)
            time.sleep(0.2)
            assert trainer.poll() is None
            assert trainers.sample(records)[0].gone
        finally:
            trainer.kill()
            trainers.close()


@pytest.mark.usefixtures("hook")
def test_a_trainer_goes_on_where_nothing_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    removed = tmp_path / "removed"
    removed.mkdir()
    marks = ProgressWriter(removed, 0)
    shutil.rmtree(removed)
    marks.on_event(NotFiniteFound(at_ns=0, step=5, tensors={"model.w": 3}))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(progress, "_progress", None)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert find_progress().observers == ()


def test_the_last_stack_counts() -> None:
    text = """Stack (most recent call first):
  File "/a/b.py", line 3 in old
Stack (most recent call first):
  File "/a/b.py", line 4 in wait
  File "/a/b.py", line 9 in <module>
"""
    assert find_place(text) == ("wait (/a/b.py:4)", "<module> (/a/b.py:9)")
    assert find_place("") == ()


def _env(folder: Path) -> dict[str, str]:
    return {**os.environ, FOLDER: str(folder), "RANK": "0"}


def test_a_process_that_does_not_answer_is_shown_as_the_kernel_sees_it(tmp_path: Path) -> None:
    record = ProgressRecord(pid=os.getpid(), thread=1)
    here = Trainers(tmp_path, (0,)).sample({0: record})[0].place
    gone = Trainers(tmp_path, (0,)).sample({0: msgspec.structs.replace(record, pid=2**22 + 1)})[0].place
    assert here[0].startswith("no answer; the kernel says ")
    assert here[0].endswith(")")
    assert gone == ("no answer; the kernel says gone",)
