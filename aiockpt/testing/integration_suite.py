"""Conformance suite of integrations (`aiockpt.integrations.contract`): a test per guarantee. Subclass, and run pytest.

    class TestMine(IntegrationSuite):
        PROGRAM = (sys.executable, "train.py")

        def train(self, place, until, *, step=None, other=None):
            trainer = Trainer(…)                # made anew, with the same seed
            if other is not None:
                attach(trainer, other)
            attach(trainer, place)
            begun_at = trainer.resume(step)
            trainer.fit(until)                  # saves after each step
            return begun_at

Training is compared by what it has saved: all tensors of the newest step, bit by bit. It should draw random numbers, and
read shuffled data.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aiockpt.errors import CheckpointError
from aiockpt.runtime.world import Ranks
from aiockpt.session.checkpointer import Checkpointer


class IntegrationSuite:
    """The conformance suite. A subclass provides `train`.

    Attributes:
        PROGRAM: a command that trains, saves below its working directory, and resumes from there when it is started again;
            empty where nothing is to be killed.
        PROGRAM_ON_RANKS: the same on several ranks.
        ATTACHES: whether an object is attached, which may be attached again to another place.
        FALLS_BACK: whether the newest step that can be loaded is chosen; if not, a damaged one is an error.
        DAMAGE_ERROR: what is raised where nothing can be loaded.
        NAMES_STEPS: whether a run can resume from a step that is named.
        FIRST: the number of the step that is saved after the first step of the training.
    """

    PROGRAM: Sequence[str] = ()
    PROGRAM_ON_RANKS: Sequence[str] = ()
    ATTACHES = True
    FALLS_BACK = True
    DAMAGE_ERROR: type[BaseException] = CheckpointError
    NAMES_STEPS = True
    FIRST = 1

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        """Make a training, attach it to *place*, and train up to its step number *until*; it saves after each step.

        Args:
            step: the number of the saved step to resume from; None is the newest.
            other: a place that it is attached to before.

        Returns:
            how many steps it had trained when it began: 0 anew, else those of the step that it resumed from.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ save

    def test_all_steps_are_committed_when_it_ends(self, tmp_path: Path) -> None:
        assert self.train(tmp_path / "run", 3) == 0
        assert steps_of(tmp_path / "run") == [self.FIRST, self.FIRST + 1, self.FIRST + 2]

    def test_attached_again_it_saves_to_the_second_place_alone(self, tmp_path: Path) -> None:
        if not self.ATTACHES:
            pytest.skip("no object is attached")
        self.train(tmp_path / "straight", 2)
        assert self.train(tmp_path / "run", 2, other=tmp_path / "other") == 0
        assert not (tmp_path / "other").exists() or steps_of(tmp_path / "other") == []
        assert_same(tmp_path / "run", tmp_path / "straight")
        assert self.train(tmp_path / "run", 3, other=tmp_path / "other") == 2

    # ------------------------------------------------------------------ resume

    def test_from_the_newest_step_it_is_the_run_that_was_never_stopped(self, tmp_path: Path) -> None:
        self.train(tmp_path / "straight", 5)
        assert self.train(tmp_path / "run", 3) == 0
        assert self.train(tmp_path / "run", 5) == 3
        assert_same(tmp_path / "run", tmp_path / "straight")

    def test_from_a_step_that_is_named_it_is_the_run_that_was_never_stopped(self, tmp_path: Path) -> None:
        if not self.NAMES_STEPS:
            pytest.skip("no step is named")
        self.train(tmp_path / "straight", 4)
        self.train(tmp_path / "run", 3)
        assert self.train(tmp_path / "run", 4, step=self.FIRST + 1) == 2
        assert_same(tmp_path / "run", tmp_path / "straight")

    def test_a_damaged_newest_step_is_passed_over(self, tmp_path: Path) -> None:
        self.train(tmp_path / "straight", 4)
        self.train(tmp_path / "run", 3)
        damage(tmp_path / "run", self.FIRST + 2)
        if not self.FALLS_BACK:
            with pytest.raises(self.DAMAGE_ERROR):
                self.train(tmp_path / "run", 4)
            if not self.NAMES_STEPS:
                return
        assert self.train(tmp_path / "run", 4, step=None if self.FALLS_BACK else self.FIRST + 1) == 2
        assert_same(tmp_path / "run", tmp_path / "straight")

    def test_a_newest_step_that_was_never_committed_is_passed_over(self, tmp_path: Path) -> None:
        self.train(tmp_path / "straight", 4)
        self.train(tmp_path / "run", 3)
        undo_commit(tmp_path / "run", self.FIRST + 2)
        assert self.train(tmp_path / "run", 4) == 2
        assert_same(tmp_path / "run", tmp_path / "straight")

    def test_where_all_steps_are_damaged_nothing_begins_anew(self, tmp_path: Path) -> None:
        self.train(tmp_path / "run", 2)
        damage(tmp_path / "run", self.FIRST)
        damage(tmp_path / "run", self.FIRST + 1)
        with pytest.raises(self.DAMAGE_ERROR):
            self.train(tmp_path / "run", 3)
        assert steps_of(tmp_path / "run")[-1] == self.FIRST + 1

    # ------------------------------------------------------------------ kill

    def test_killed_and_started_again_it_is_the_run_that_was_never_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        prove(self.PROGRAM)

    def test_several_ranks_are_killed_and_started_again_as_the_same_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        prove(self.PROGRAM_ON_RANKS)


def prove(program: Sequence[str]) -> None:
    """Have a program killed twice by ``aiockpt prove``, and compare it with its run that was never stopped."""
    if not program:
        pytest.skip("no program")
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "prove", "--kills=2", "--seed=1", "--", *program]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    without = {name: value for name, value in os.environ.items() if name not in ranks}
    without["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=without, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps_of(place: Path) -> list[int]:
    """Return the committed steps of a place, the oldest first."""
    with Checkpointer(place, ranks=Ranks()) as ckpt:
        return sorted(info.step for info in ckpt.steps().result())


def assert_same(place: Path, other: Path) -> None:
    """Compare all tensors of the newest steps of two places, bit by bit."""
    found, expected = _newest(place), _newest(other)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def _newest(place: Path) -> dict[str, torch.Tensor]:
    with Checkpointer(place, ranks=Ranks()) as ckpt:
        saved = ckpt.describe().result()
        assert saved.tensors
        reading = {one.name: ckpt.read(saved.info.step, one.name) for one in saved.tensors}
        return {name: future.result() for name, future in reading.items()}


def damage(place: Path, step: int) -> None:
    """Change the last byte of each data file of a step."""
    files = [*place.glob(f"step-{step:08d}/**/*.safetensors")]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))


def undo_commit(place: Path, step: int) -> None:
    """Leave a step as a kill before its votes does: data files, and nothing that names them."""
    folder = place / f"step-{step:08d}"
    assert folder.is_dir()
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            path.unlink()
    (place / "LATEST").unlink(missing_ok=True)  # a hint, which is written after the commit
