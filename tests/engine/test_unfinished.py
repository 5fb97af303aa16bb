"""The report of a load that a newer step is being written, or was begun by a job that died."""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.format.names import attempt_folder, failure_key, parse_attempt
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import Crew
from tests.small_run import small_checkpointer
from tests.watch import until

STATE = {"x": torch.zeros(5000)}
VOTE = Fault(do="hang", verb="put_new", match="step-00000002/*/r00000.json")


def save(root: Path, step: int) -> None:
    with small_checkpointer(root) as ckpt:
        ckpt.save(step, STATE).result()


@contextmanager
def writing(root: Path) -> Iterator[aiockpt.Checkpointer]:
    """Save step 2 up to the vote, and no further, for the length of the block."""
    held = FaultyBackend(LocalBackend(str(root)), [VOTE])
    with small_checkpointer(held, on_error="warn") as ckpt:
        future = ckpt.save(2, STATE)
        until(lambda: held.schedule.fired, "the vote", timeout_s=30)
        try:
            yield ckpt
        finally:
            future.cancel()


def loaded(place: object) -> int | None:
    with small_checkpointer(place) as ckpt:
        found = ckpt.load(STATE).result()
        return None if found is None else found.step


def told(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if "was begun" in r.getMessage() and r.levelno == level]


def written_ago_s(line: str) -> int:
    """Return what *line* says; a test has a minute."""
    found = re.search(r"last written (\d+) s ago", line)
    assert found is not None, line
    return int(found[1])


def test_a_newer_step_in_writing_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    with writing(tmp_path):
        assert loaded(tmp_path) == 1
    (line,) = told(caplog)
    assert line.startswith(f"step-00000002 in file://{tmp_path} was begun and is not committed")
    assert "it was not written completely, last written " in line
    assert 0 <= written_ago_s(line) < 60


def test_it_is_told_also_where_there_is_no_other_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with writing(tmp_path):
        assert loaded(tmp_path) is None
    assert len(told(caplog)) == 1


def test_a_job_that_died_long_ago_is_told_of_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiockpt")
    save(tmp_path, 1)
    with writing(tmp_path):
        for path in tmp_path.glob("step-00000002/**/*.safetensors"):
            os.utime(path, (time.time() - 5000, time.time() - 5000))
        assert loaded(tmp_path) == 1
    assert told(caplog) == []
    (line,) = told(caplog, logging.INFO)
    assert 5000 <= written_ago_s(line) < 5060


def test_the_votes_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(2, {"x": torch.arange(5000)}).result())
    (folder,) = tmp_path.glob("step-*")
    for gone in ("MANIFEST-1.json", "a-*/DECISION.json", "a-*/r/r00001.json"):
        (path,) = folder.glob(gone)
        path.unlink()
    assert loaded(tmp_path) is None
    (line,) = told(caplog)
    assert "1 of 2 ranks have voted" in line


def test_own_saves_and_older_steps_are_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiockpt")
    save(tmp_path, 1)
    with writing(tmp_path) as ckpt:
        found = ckpt.load(STATE).result()
        assert found is not None
        assert found.step == 1
        save(tmp_path, 3)
        assert loaded(tmp_path) == 3
    assert told(caplog) == told(caplog, logging.INFO) == []


def test_an_attempt_given_up_is_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of many ranks the others may be at work still, but nobody can commit it."""
    caplog.set_level("INFO", "aiockpt")
    save(tmp_path, 1)
    with writing(tmp_path):
        (folder,) = tmp_path.glob("step-00000002/a-*")
        attempt = parse_attempt(folder.name)
        assert attempt is not None
        record = tmp_path / failure_key("step-00000002", attempt, 3)
        record.parent.mkdir(exist_ok=True)
        record.write_text("{}")
        assert loaded(tmp_path) == 1
    assert told(caplog) == told(caplog, logging.INFO) == []


def test_an_attempt_of_which_nothing_is_left_is_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiockpt")
    save(tmp_path, 1)
    (tmp_path / attempt_folder("step-00000002", "3f9c21d07b44")).mkdir(parents=True)
    assert loaded(tmp_path) == 1
    assert told(caplog) == told(caplog, logging.INFO) == []


def test_who_only_looks_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    with writing(tmp_path), small_checkpointer(tmp_path) as ckpt:
        ckpt.verify().result()
        ckpt.steps().result()
    assert told(caplog) == []


def test_no_load_fails_of_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with writing(tmp_path):
        trouble = Fault(do="fail", verb="list", match="step-00000002/a-*", times=None)
        assert loaded(FaultyBackend(LocalBackend(str(tmp_path)), [trouble])) == 1
