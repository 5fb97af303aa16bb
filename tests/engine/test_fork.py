"""A run begun from a step of another run: loaded once, told in its manifests, and independent of it afterwards."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.monitor import TraceFile
from aiockpt.pipeline.step_info import StepInfo
from tests.ranks.crew import Crew
from tests.run_python import run_python

START = """
import sys, torch, aiockpt
own, other = sys.argv[1:]
state = {"w": torch.zeros(4)}
with aiockpt.Checkpointer(own) as ckpt:
    first = ckpt.resume(state, fork=other, step=2)
    print(first, int(state["w"][0]))
    state["w"] += 10
    ckpt.save(first, state).result()
"""


def save(root: Path, *steps: int) -> None:
    with aiockpt.Checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": torch.full((4,), float(step))}).result()


def start(*arguments: Path) -> list[int]:
    return [int(word) for word in run_python("-c", START, *arguments).stdout.split()]


def files(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_a_fork_begins_once_and_then_resumes(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, 1, 2, 3)
    before = files(a)
    assert start(b, a) == [3, 2]
    assert files(a) == before
    shutil.rmtree(a)
    assert start(b, a) == [4, 12]
    with aiockpt.Checkpointer(b) as ckpt:
        newest, oldest = ckpt.steps().result()
    assert oldest.parent == "step-00000002"
    assert newest.forked_from == oldest.forked_from
    assert oldest.forked_from is not None
    assert oldest.forked_from[0].endswith("/a")
    assert oldest.forked_from[1] == oldest.parent


@pytest.mark.parametrize("options", [{"worker": "process"}, {}], ids=["process", "thread"])
def test_a_fork_of_the_newest_step_is_told(tmp_path: Path, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    save(tmp_path / "a", 1, 2)
    state = {"w": torch.zeros(4)}
    with aiockpt.Checkpointer(tmp_path / "b", observers=[TraceFile()], **options) as ckpt:
        assert ckpt.resume(state, fork=tmp_path / "a") == 3
        ckpt.save(3, state).result()
    assert [record.message for record in caplog.records if record.message.startswith("forked from step 2")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for command in (["ls"], ["inspect"], ["report", "--text"]):
        wide = {**os.environ, "COLUMNS": "300"}
        told = run_python("-m", "aiockpt.tools.cli.main", *command, tmp_path / "b", env=wide).stdout
        assert f"forked from file://{tmp_path}/a step-00000002" in " ".join(told.split()), command


def test_what_an_address_has_in_it_cannot_move_the_cursor() -> None:
    info = StepInfo(step=1, id="step-00000001", generation=1, forked_from=("s3://b/\x1b[2J\nrun", "", ""))
    assert info.describe_origin() == "forked from s3://b/\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}run"


def test_a_fork_that_holds_nothing_is_no_new_beginning(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "b") as ckpt:
        with pytest.raises(aiockpt.StepNotFoundError, match="no checkpoint to begin from"):
            ckpt.resume({"w": torch.zeros(4)}, fork=tmp_path / "a")
        with pytest.raises(aiockpt.UsageError, match="fork"):
            ckpt.resume({"w": torch.zeros(4)}, step=2)


def resume_and_save(crew: Crew, other: Path) -> tuple[list[int], list[float]]:
    states = [{"w": torch.zeros(4)} for _ in range(2)]

    def work(rank: int, ckpt: aiockpt.Checkpointer) -> int:
        first = ckpt.resume(states[rank], fork=other)
        ckpt.save(first, states[rank]).result()
        return first

    return crew.on_all(work), [float(state["w"][0]) for state in states]


def test_ranks_and_tiers_fork_from_one_step(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, 2)
    for first in (3, 4):
        with Crew(2, tmp_path / "b") as crew:
            assert resume_and_save(crew, tmp_path / "a") == ([first] * 2, [2.0] * 2)
    state = {"w": torch.zeros(4)}
    with aiockpt.Checkpointer([f"memory://{tmp_path.name}-fork", tmp_path / "c"]) as ckpt:
        assert ckpt.resume(state, fork=tmp_path / "b") == 5
        ckpt.save(5, state).result()
        found = ckpt.steps().result()[0].forked_from
        assert found is not None
        assert found[0].endswith("/b")


def test_the_address_of_a_fork_is_kept_without_its_credentials(tmp_path: Path) -> None:
    state, other = {"w": torch.zeros(4)}, MemoryBackend("user:hunter2@fork")
    with aiockpt.Checkpointer(other) as ckpt:
        ckpt.save(1, state).result()
    with aiockpt.Checkpointer(tmp_path / "b") as ckpt:
        ckpt.resume(state, fork=other)
        ckpt.save(2, state).result()
        assert ckpt.steps().result()[0].forked_from is not None
    assert all(b"hunter2" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
