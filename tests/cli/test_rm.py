"""``aiockpt rm``: one step or the run goes, after a question, and nothing that is not ours."""

import os
import uuid
from pathlib import Path

import anyio
import pytest
import torch

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.shm import SHARED_MEMORY
from aiockpt.pipeline.collect import plan_removal, remove
from tests.cli.small_checkpoints import Command, snapshot_of
from tests.small_run import small_checkpointer, steps


class Person:
    """Somebody at a terminal."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.answer + "\n"


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", Person(text))


def test_the_question_is_asked_and_the_newest_step_is_named(
    aiockpt_command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot_of(root)
    answer(monkeypatch, "")
    said = aiockpt_command("rm", root, "step-00000300")
    assert said.status == 0
    assert "this is the newest step" in said.out
    assert "remove step-00000300" in said.err
    assert "nothing was removed" in said.out
    assert snapshot_of(root) == before
    answer(monkeypatch, "y")
    assert "removed step-00000300" in aiockpt_command("rm", root, 300).out
    assert steps(root) == [200, 100]


@pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason=f"this host has no {SHARED_MEMORY}")
def test_what_a_job_left_in_shared_memory_is_removed(aiockpt_command: Command) -> None:
    name = f"test-{uuid.uuid4().hex}"
    with small_checkpointer(f"shm://{name}") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.ones(5)}).result()
    assert aiockpt_command("rm", f"shm://{name}", 1, "-y").status == 0
    assert steps(f"shm://{name}") == [2]
    assert aiockpt_command("rm", f"shm://{name}", "--all", "-y").status == 0
    folder = Path(SHARED_MEMORY, f"aiockpt-{os.geteuid()}", name)
    assert not folder.exists() or not list(folder.iterdir())


def test_a_removal_that_is_interrupted_leaves_the_newest_steps(root: Path) -> None:
    class Stopped(Exception):  # noqa: N818
        pass

    def stop(step_id: str) -> None:
        raise Stopped(step_id)

    async def main() -> None:
        backend = LocalBackend(str(root))
        with pytest.raises(Stopped, match="step-00000100"):
            await remove(backend, await plan_removal(backend, None), stop)

    anyio.run(main)
    assert steps(root) == [300, 200]
