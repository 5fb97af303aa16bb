"""The Trainer of Hugging Face, continued as the same run, with the folders and options that its users know."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import CorruptionError, UsageError
from aiockpt.integrations.huggingface import attach, renames, runs
from aiockpt.integrations.huggingface.folders import is_pending
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks.proving import TORCHRUN, assert_same, digest_of, output_of, prove
from tests.gates import Gate
from tests.notebooks import Notebook, notebook

transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

__all__ = ["notebook"]
HERE = Path(__file__).parent
SCRIPT = HERE / "hf_script.py"
KINDS = {
    "workers": ["dataloader_num_workers=2"],
    "no accumulation, whole epochs": ["gradient_accumulation_steps=1", "save_strategy='epoch'"],
    "bf16": ["bf16=True"],
    "lora": ["lora"],
}
UPSTREAM = {
    "_save_checkpoint": "a9111e30faa99339",
    "_load_from_checkpoint": "a2804e8d93a297e3",
    "_load_optimizer_and_scheduler": "741032f57d6fb802",
    "_load_scaler": "c0695f79116426e2",
    "_load_rng_state": "d5ebdfc0a0884c4b",
    "_load_best_model": "0e183d55a9db7414",
    "_init_training_state": "8fbd17ebb7d3793d",
    "_prepare_for_training": "f55950593d7e10c0",
}
"""The Trainer's methods that are replaced, and those that call them, with the digests of their sources."""


def make(folder: Path, kind: str = "plain", **settings: Any) -> Any:
    from tests.frameworks.hf_script import make as make_trainer

    return make_trainer(str(folder), kind, **settings)


def in_a_new_process() -> None:
    """Have what follows be done as after a restart: nothing has been trained by this process yet."""
    runs._finished.clear()


def ready(folder: Path, *callbacks: Any, place: Any = None, resume: bool = False, **settings: Any) -> Any:
    """Return a Trainer of ours that has trained nothing: as after a restart where it is to *resume*."""
    if resume:
        in_a_new_process()
    trainer = make(folder, **settings)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.ckpt = attach(trainer, place, resume=resume)
    return trainer


def ran(folder: Path, *callbacks: Any, at: Any = None, **how: Any) -> Any:
    """Return a Trainer that was `ready` and has trained to its end, from the folder *at* which it is to begin."""
    trainer = ready(folder, *callbacks, **how)
    trainer.train(**({} if at is None else {"resume_from_checkpoint": at}))
    return trainer


def unstopped(folder: Path) -> Any:
    """Return a Trainer that is not ours, and has trained to its end."""
    trainer = make(folder, save_strategy="no")
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*checkpoint-*"))


def losses(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class StopsAt(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends a training at a step, so that its schedule is that of a longer one; notes where it began."""

    def __init__(self, step: int) -> None:
        self.step, self.begun_at = step, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.begun_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class TestContract(IntegrationSuite):
    PROGRAM = (sys.executable, str(SCRIPT), "out")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", str(SCRIPT), "out")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        in_a_new_process()
        folder, stops = place.parent / f"output of {place.name}", StopsAt(until)
        trainer = make(folder, save_steps=1, max_steps=20)
        trainer.add_callback(stops)
        if other is not None:
            attach(trainer, other, resume=True)
        with attach(trainer, place, resume=True):
            trainer.train(**({} if step is None else {"resume_from_checkpoint": str(folder / f"checkpoint-{step}")}))
        return stops.begun_at


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_script_goes_on_as_the_same_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prove(sys.executable, str(SCRIPT), str(tmp_path / "out"), *KINDS[kind])


class Interrupting(transformers.TrainerCallback):  # type: ignore[misc]
    """Presses the button of a notebook once."""

    def __init__(self) -> None:
        self.steps = [5]

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step in self.steps:
            self.steps.remove(state.global_step)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_a_notebook_is_interrupted_and_goes_on(kind: str, notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
import os
os.chdir({str(tmp_path)!r})
from tests.frameworks.test_huggingface import attach, Interrupting, assert_same, make, weights
alone = make("alone", {kind!r}, save_strategy="no")
alone.train()
trainer = make("out", {kind!r})
""")
    cell = "ckpt = attach(trainer, resume=True)\ntrainer.train()"
    assert notebook.fail("trainer.add_callback(Interrupting())\n" + cell).startswith("KeyboardInterrupt")
    notebook.run(cell + "\nassert_same(weights(trainer), weights(alone))")
    notebook.run("assert os.path.exists('out/checkpoint-20') and ckpt.latest().result() == 20")
    notebook.run("""
async def in_a_coroutine():
    trainer = make("other", max_steps=2, save_steps=1)
    attach(trainer)
    trainer.train()
    return trainer.state.global_step
assert await in_a_coroutine() == 2
""")


async def test_a_coroutine_trains_and_resumes(tmp_path: Path) -> None:
    ran(tmp_path, max_steps=2, save_steps=1)
    assert ran(tmp_path, max_steps=3, save_steps=1, resume=True).state.global_step == 3


class ByName(transformers.Trainer):  # type: ignore[misc]
    """Methods with fewer arguments than the Trainer's, passed on by name."""

    def train(self, resume_from_checkpoint: Any = None, **named: Any) -> Any:
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model=model, trial=trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint=resume_from_checkpoint, model=model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint=checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        super()._load_rng_state(checkpoint=checkpoint)

    def _load_scaler(self, checkpoint: Any) -> None:
        super()._load_scaler(checkpoint=checkpoint)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> Any:
        return super()._init_training_state(
            max_steps=max_steps,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            num_train_epochs=num_train_epochs,
            resume_from_checkpoint=resume_from_checkpoint,
            trial=trial,
        )


class Positional(transformers.Trainer):  # type: ignore[misc]
    def train(self, *args: Any, **named: Any) -> Any:
        return super().train(*args, **named)


class Keyword(transformers.Trainer):  # type: ignore[misc]
    def train(self, *, resume_from_checkpoint: Any = None) -> Any:
        return super().train(resume_from_checkpoint)


class Nothing(transformers.Trainer):  # type: ignore[misc]
    def train(self) -> Any:
        return super().train()


@pytest.mark.parametrize("resume", ["by the switch", "by name", "by position"])
@pytest.mark.parametrize("kind", [ByName, Positional, Keyword, Nothing])
def test_a_method_may_have_a_signature_of_its_own(kind: Any, resume: str, tmp_path: Path) -> None:
    for steps in (2, 3):
        in_a_new_process()
        trainer = make(tmp_path, max_steps=steps, save_steps=1)
        trainer.__class__ = kind
        attach(trainer, resume=resume == "by the switch")
        begun: list[int] = []
        trainer.add_callback(Beginning(begun))
        named = {"resume_from_checkpoint": True} if resume == "by name" and kind is not Nothing else {}
        positional = (True,) if resume == "by position" and kind in (ByName, Positional) else ()
        if steps == 3 and (named or positional):
            trainer.train(*positional, **named)
        else:
            trainer.train()
        resumes = steps == 3 and (named or positional or resume == "by the switch")
        assert begun == [2 if resumes else 0]


class Beginning(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, begun: list[int]) -> None:
        self.begun = begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.begun.append(state.global_step)


def test_what_was_set_on_the_trainer_stays_when_it_is_attached_again(tmp_path: Path) -> None:
    trainer, calls = make(tmp_path, max_steps=1), []
    theirs = trainer.train

    def train(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return theirs(*args, **named)

    trainer.train = train
    for place in ("one", "two"):
        attach(trainer, tmp_path / place)
    trainer.train()
    assert calls == [()]
    assert aiockpt.Checkpointer(tmp_path / "two").latest().result() == 1


ON_A_NODE = """
import json, sys
from tests.frameworks.hf_script import make
from aiockpt.errors import UsageError
from aiockpt.integrations.huggingface import attach

folder, place, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
trainer = make(folder, **settings)
attach(trainer, place, resume=True)
try:
    trainer.train()
except UsageError as error:
    print(error)
else:
    print([entry["step"] for entry in trainer.state.log_history], float(sum(p.sum() for p in trainer.model.parameters())))
"""


def on_two_nodes(root: Path, **settings: Any) -> list[str]:
    """Run a script on two nodes of a rank each, with a folder each and one place; return what each has printed last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(HERE.parents[1])}
        command = [sys.executable, "-c", ON_A_NODE, str(root / rank), str(root / "place"), json.dumps(settings)]
        processes.append(
            subprocess.Popen(command, env={**os.environ, **own, **shared}, stdout=subprocess.PIPE, text=True)
        )
    return [process.communicate(timeout=300)[0].strip().splitlines()[-1] for process in processes]


def test_nodes_that_see_no_common_folder_have_one_each(tmp_path: Path) -> None:
    settings = {"save_on_each_node": True, "save_total_limit": 2, "gradient_accumulation_steps": 1}
    on_two_nodes(tmp_path, max_steps=8, **settings)
    for rank in ("0", "1"):
        assert folders(tmp_path / rank) == ["checkpoint-6", "checkpoint-8"]
    first, second = on_two_nodes(tmp_path, max_steps=11, **settings)
    assert first == second
    assert json.loads(first.partition("]")[0] + "]")[:11] == [*range(1, 12)]  # what was logged before is known again
    for rank in ("0", "1"):
        assert folders(tmp_path / rank) == ["checkpoint-11", "checkpoint-9"]
    with aiockpt.Checkpointer(tmp_path / "place") as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [11, 9]


def test_nodes_that_do_not_see_the_folder_are_told_so(tmp_path: Path) -> None:
    on_two_nodes(tmp_path, max_steps=3)
    for said in on_two_nodes(tmp_path, max_steps=6):
        assert said.startswith(f"rank 1: checkpoint-3 is not in {tmp_path}")
        assert "save_on_each_node=True" in said


def test_folders_appear_for_what_is_committed_and_are_kept_as_the_trainer_keeps_them(tmp_path: Path) -> None:
    trainer = ran(tmp_path, save_total_limit=2)
    assert trainer.state.global_step == 20
    assert folders(tmp_path) == ["checkpoint-18", "checkpoint-20"]
    assert [info.step for info in trainer.ckpt.steps().result()] == [20, 18]
    assert json.loads((tmp_path / "checkpoint-20" / "trainer_state.json").read_text())["global_step"] == 20
    assert (tmp_path / "checkpoint-20" / "config.json").exists()
    trainer.ckpt.close()


@pytest.mark.parametrize("how", ["True", "path"])
def test_what_the_trainer_calls_a_checkpoint_is_resumed_from(how: str, tmp_path: Path) -> None:
    straight = unstopped(tmp_path / "straight")
    ran(tmp_path / "run")
    again = ready(tmp_path / "run")
    if how == "True":
        again.ckpt.delete(20).result()
        again.ckpt.delete(18).result()
    again.train(resume_from_checkpoint=True if how == "True" else str(tmp_path / "run" / "checkpoint-15"))
    assert again.state.global_step == 20
    assert_same(weights(again), weights(straight))
    assert losses(again) == losses(straight)


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path) -> None:
    first = ran(tmp_path)
    for file in (tmp_path / "aiockpt" / "step-00000020").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    again = ran(tmp_path, at=True)
    assert_same(weights(again), weights(first))
    assert losses(again) == losses(first)
    third = ready(tmp_path)
    for file in (tmp_path / "aiockpt" / "step-00000018").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))


def test_nothing_to_resume_from_begins_anew(tmp_path: Path) -> None:
    trainer = ran(tmp_path, max_steps=2, save_steps=1, resume=True)
    assert trainer.state.global_step == 2
    other = ready(tmp_path / "none", max_steps=2)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        other.train(resume_from_checkpoint=True)


def test_where_every_step_is_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    ran(tmp_path, max_steps=6)
    for manifest in (tmp_path / "aiockpt").rglob("MANIFEST-1.json"):
        manifest.write_text("{}")
    again = ready(tmp_path, resume=True)
    with pytest.raises(aiockpt.NoValidCheckpointError):
        again.train()


def test_what_the_trainer_wrote_before_is_resumed_from(tmp_path: Path) -> None:
    old = make(tmp_path / "run", max_steps=9, num_train_epochs=1)
    old.args.max_steps = 9
    old.train()
    again = ran(tmp_path / "run", at=str(tmp_path / "run" / "checkpoint-9"))
    assert again.state.global_step == 20
    assert "aiockpt.json" in os.listdir(tmp_path / "run" / "checkpoint-20")


def test_resume_takes_what_the_trainer_wrote_where_that_is_newer_and_leaves_it_there(tmp_path: Path) -> None:
    old = make(tmp_path, save_steps=9)
    old.train()
    again = ran(tmp_path, resume=True)
    assert {entry["step"] for entry in again.state.log_history if "loss" in entry} == set(range(1, 21))
    assert again.state.log_history[0] == old.state.log_history[0]  # it went on from step 20, and trained nothing
    shutil.rmtree(tmp_path / "checkpoint-20")
    ran(tmp_path, resume=True)
    assert folders(tmp_path) == ["checkpoint-18", "checkpoint-20", "checkpoint-9"]
    assert (tmp_path / "checkpoint-20" / "aiockpt.json").exists()
    assert not (tmp_path / "checkpoint-9" / "aiockpt.json").exists()
    again = ran(tmp_path, at=str(tmp_path / "checkpoint-9"))
    assert "checkpoint-18" in folders(tmp_path)
    ran(tmp_path, save_steps=9)
    assert "before-aiockpt-1.checkpoint-9" in folders(tmp_path)


def test_of_what_the_trainer_wrote_and_a_step_the_later_with_the_larger_number_is_resumed_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, max_steps=3).train()
    ran(tmp_path, max_steps=9, resume=True)
    assert "which aiockpt did not write" not in caplog.text
    os.utime(tmp_path / "checkpoint-3" / "trainer_state.json")  # as a copy does
    assert ran(tmp_path, max_steps=9, resume=True).state.global_step == 9
    assert "all 9 steps of this run are trained" in caplog.text
    assert f"resumed from {tmp_path}/checkpoint-9: {tmp_path}/checkpoint-3, which" in caplog.text
    assert "has no larger number and a later time" in caplog.text
    assert f"resume_from_checkpoint='{tmp_path}/checkpoint-3'" in caplog.text
    without = make(tmp_path, max_steps=12, save_steps=12)
    without.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    caplog.clear()
    again = ran(tmp_path, max_steps=12, resume=True)
    assert f"resumed from {tmp_path}/checkpoint-12: " in caplog.text
    assert f"resume_from_checkpoint='{tmp_path}/checkpoint-9'" in caplog.text
    assert_same(weights(again), weights(without))
    ran(tmp_path, max_steps=6, at=str(tmp_path / "checkpoint-3"))  # back, with aiockpt
    caplog.clear()
    assert ran(tmp_path, max_steps=6, resume=True).state.global_step == 6
    assert f"resumed from {tmp_path}/checkpoint-6: {tmp_path}/checkpoint-12, which" in caplog.text
    assert "has a larger number and an earlier time" in caplog.text


def test_of_what_the_trainer_wrote_alone_the_largest_number_is_resumed_from(tmp_path: Path) -> None:
    make(tmp_path, max_steps=6).train()
    os.utime(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert losses(ran(tmp_path, max_steps=7, resume=True)).keys() == {*range(1, 8)}
    assert not list(tmp_path.glob("aiockpt/step-00000006"))


def test_a_run_that_went_back_keeps_what_it_saved_last(tmp_path: Path) -> None:
    ran(tmp_path)
    again = ran(tmp_path, save_total_limit=2, max_steps=12, at=str(tmp_path / "checkpoint-6"))
    assert folders(tmp_path) == ["checkpoint-12", "checkpoint-9"]
    assert [info.step for info in again.ckpt.steps().result()] == [12, 9]


@pytest.mark.parametrize("went_back", [False, True])
def test_folders_whose_times_a_copy_has_lost_are_deleted_in_the_order_of_their_commits(
    went_back: bool, tmp_path: Path
) -> None:
    ran(tmp_path)
    if went_back:
        ran(tmp_path, max_steps=12, at=str(tmp_path / "checkpoint-6"))
    newest = [9, 12] if went_back else [18, 20]
    for number, step in enumerate([*reversed(newest), 3, 15, 6]):
        os.utime(tmp_path / f"checkpoint-{step}" / "aiockpt.json", ns=(number, number))
    again = ran(tmp_path, max_steps=newest[-1], save_total_limit=2, resume=True)
    assert folders(tmp_path) == sorted(f"checkpoint-{step}" for step in newest)
    assert [info.step for info in again.ckpt.steps().result()] == newest[::-1]


def test_a_step_that_is_gone_already_is_no_reason_to_fail(tmp_path: Path) -> None:
    first = ran(tmp_path, max_steps=6)
    first.ckpt.delete(3).result()  # as another node does that has a folder of its own for it
    ran(tmp_path, save_total_limit=1, max_steps=9, resume=True)
    assert folders(tmp_path) == ["checkpoint-9"]


@pytest.mark.parametrize("left", ["staged", "torn", "nothing"])
def test_the_folder_of_a_committed_step_is_made_whole(left: str, tmp_path: Path) -> None:
    first = ran(tmp_path)
    newest = tmp_path / "checkpoint-20"
    if left == "staged":
        (newest / "aiockpt.json").unlink()
        newest.rename(tmp_path / ".checkpoint-20.20.aiockpt")
    elif left == "torn":
        (newest / "trainer_state.json").write_text("")
    else:
        shutil.rmtree(newest)
    again = ran(tmp_path, resume=True)
    assert again.state.global_step == 20
    assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == 20
    assert (newest / "config.json").exists() == (left != "nothing")
    assert_same(weights(again), weights(first))


def save_by_a_loop(trainer: Any, place: Path, step: int) -> torch.optim.Optimizer:
    """Save the model of a Trainer as a loop with torch's own optimizer does, at a step."""
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.125)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.save(step, {"model": trainer.model, "optimizer": optimizer}).result()
    return optimizer


def test_what_a_loop_has_saved_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looped = make(tmp_path / "looped")
    optimizer = save_by_a_loop(looped, tmp_path / "place", 7)
    trainer = make(tmp_path / "out", max_steps=9)
    begun: dict[str, Any] = {}

    class Beginning(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            begun["step"], begun["weights"] = state.global_step, weights(trainer)
            states = trainer.optimizer.state
            named_parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            begun["moments"] = {name: states[one]["exp_avg"].clone() for name, one in named_parameters}
            begun["rate"] = trainer.optimizer.param_groups[0]["lr"]

    trainer.add_callback(Beginning)
    attach(trainer, tmp_path / "place", resume=True)
    with caplog.at_level("WARNING", logger="aiockpt"):
        trainer.train()
    assert "step 7 was not saved by a Trainer and has no rng" in caplog.text
    assert "do not match" not in caplog.text
    assert (begun["step"], begun["rate"], trainer.state.global_step) == (7, 0.125, 9)
    assert_same(begun["weights"], weights(looped))
    moments = {name: optimizer.state[one]["exp_avg"] for name, one in looped.model.named_parameters()}
    assert_same(begun["moments"], moments)
    assert trainer.lr_scheduler.last_epoch == 9
    assert list(losses(trainer)) == [8, 9]


def test_a_step_without_a_model_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=9)
    with aiockpt.Checkpointer(tmp_path / "place") as ckpt:
        ckpt.save(7, {"net": trainer.model}).result()
    attach(trainer, tmp_path / "place", resume=True)
    with pytest.raises(UsageError, match="step 7 has no 'model'"):
        trainer.train()


def test_the_best_model_is_loaded_at_the_end_and_kept(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    theirs = make(tmp_path / "theirs", learning_rate=0.3, **best)
    theirs.train()
    ours = ran(tmp_path / "ours", learning_rate=0.3, **best)
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert_same(weights(ours), weights(theirs))
    assert folders(tmp_path / "ours") == folders(tmp_path / "theirs")


# ---------------------------------------------------------------------- files of the program's own


class Ema(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps a file of its own in each checkpoint, as a callback does that averages weights."""

    def __init__(self) -> None:
        self.average = 0.0
        self.seen: list[list[str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step:
            self.average = torch.load(f"{args.output_dir}/checkpoint-{state.global_step}/ema.pt")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.average = 0.5 * self.average + float(next(model.parameters()).sum())

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        self.seen.append(sorted(os.listdir(folder)))
        torch.save(self.average, f"{folder}/ema.pt")


class Writing(transformers.Trainer):  # type: ignore[misc]
    """Overrides what writes and reads a checkpoint, each method with a file of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(exist_ok=True)
        (folder / "before.txt").write_text(str(self.state.global_step))
        super()._save_checkpoint(model, trial)
        (folder / "after.txt").write_text(str(self.state.global_step))

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        (Path(output_dir) / "model.txt").write_text("")

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir) / "projector.txt").write_text("")

    def _save_rng_state(self, output_dir: Any) -> None:
        super()._save_rng_state(output_dir)
        (Path(output_dir) / "stream.txt").write_text(str(self.state.global_step))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.read_back = {path.name for path in Path(checkpoint).glob("*.txt")}


FILES = {"before.txt", "after.txt", "model.txt", "projector.txt", "stream.txt"}


def make_of(cls: type, folder: Path, **settings: Any) -> Any:
    trainer = make(folder, **settings)
    trainer.__class__ = cls
    trainer.add_callback(Ema())
    return trainer


@pytest.mark.parametrize("switch", [False, True], ids=["without", "with"])
def test_what_callbacks_and_overrides_write_is_kept_and_found_again(switch: bool, tmp_path: Path) -> None:
    in_a_new_process()
    straight = make_of(Writing, tmp_path / "straight", save_strategy="no")
    straight.train()
    trainer = make_of(Writing, tmp_path / "run", save_total_limit=3)
    trainer.add_callback(Interruption(17))
    ckpt = attach(trainer, resume=True) if switch else None
    if switch:
        trainer.add_callback(Ema())  # one that comes after the switch
    with pytest.raises(Stopped):
        trainer.train()
    if ckpt is not None:
        ckpt.wait()
    ema = [one for one in trainer.callback_handler.callbacks if isinstance(one, Ema)]
    assert all("trainer_state.json" in names for one in ema for names in one.seen)
    assert len(ema[0].seen) == 5
    in_a_new_process()
    again = make_of(Writing, tmp_path / "run", save_total_limit=3)
    if switch:
        attach(again, resume=True)
    again.train(**({} if switch else {"resume_from_checkpoint": True}))
    assert_same(weights(again), weights(straight))
    (of_again, of_straight) = (
        next(one for one in trainer.callback_handler.callbacks if isinstance(one, Ema)) for trainer in (again, straight)
    )
    assert of_again.average == of_straight.average
    assert again.read_back == FILES
    names = set(os.listdir(tmp_path / "run" / "checkpoint-20"))
    assert {"ema.pt", "trainer_state.json", *FILES} <= names
    assert "model.safetensors" not in names or not switch
    assert folders(tmp_path / "run")[-3:] == ["checkpoint-15", "checkpoint-18", "checkpoint-20"]
    again.save_model(str(tmp_path / "end"))
    assert {"model.safetensors", "model.txt", "projector.txt"} <= set(os.listdir(tmp_path / "end"))


class Alone(transformers.Trainer):  # type: ignore[misc]
    """Overrides methods without their ``super()``."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir()
        (folder / "projector.txt").write_text("")
        self._save_rng_state(str(folder))

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        raise AssertionError

    def _save_rng_state(self, output_dir: Any) -> None:
        (Path(output_dir) / "rng.txt").write_text(str(self.state.global_step))

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        raise AssertionError

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self.read_back = (Path(checkpoint) / "rng.txt").read_text()


def test_overrides_without_super_are_named_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_new_process()
    straight = unstopped(tmp_path / "straight")
    trainer = make_of(Alone, tmp_path / "run")
    trainer.add_callback(Interruption(10))
    ckpt = attach(trainer, resume=True)
    assert "Alone._save, Alone._load_from_checkpoint, Alone._load_rng_state: overridden without super()" in caplog.text
    with pytest.raises(Stopped):
        trainer.train()
    ckpt.wait()
    in_a_new_process()
    again = make_of(Alone, tmp_path / "run")
    attach(again, resume=True)
    again.train()
    assert again.read_back == "9"
    assert_same(weights(again), weights(straight))
    assert {"projector.txt", "rng.txt", "ema.pt", "aiockpt.json"} <= set(os.listdir(tmp_path / "run" / "checkpoint-9"))


class Uploading(transformers.TrainerCallback):  # type: ignore[misc]
    """Reads and writes the folder of a save in a thread that begins when the callbacks of the save are through."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.seen: list[list[str]] = []
        self.saved = threading.Event()

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.saved.clear()
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.threads.append(threading.Thread(target=self.upload, args=(folder,)))
        self.threads[-1].start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.saved.set()

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.saved.set()

    def upload(self, folder: Path) -> None:
        self.saved.wait(250)
        self.seen.append(sorted(os.listdir(folder)))
        (folder / "uploaded.txt").write_text("")


@pytest.mark.parametrize("switch", [False, True], ids=["without", "with"])
def test_a_thread_of_a_callback_writes_into_the_folder_after_the_callback(switch: bool, tmp_path: Path) -> None:
    in_a_new_process()
    trainer, uploading = make(tmp_path), Uploading()
    trainer.add_callback(uploading)
    if switch:
        attach(trainer, safetensors=True)
    trainer.train()
    for thread in uploading.threads:
        thread.join(250)
    assert len(uploading.seen) == len(uploading.threads) > 1
    assert all("trainer_state.json" in seen for seen in uploading.seen)
    folders = list(tmp_path.glob("checkpoint-*"))
    assert folders
    for folder in folders:
        assert {"uploaded.txt", "model.safetensors"} <= set(os.listdir(folder))


class Killed(transformers.TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 9:
            raise Stopped


@pytest.mark.parametrize("how", ["resume", "path"])
def test_a_folder_whose_save_was_never_committed_is_not_resumed_from(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = unstopped(tmp_path / "straight")
    trainer = ready(tmp_path / "run", Killed(), resume=True)
    with pytest.raises(Stopped):
        trainer.train()
    trainer.ckpt.wait()
    trainer.ckpt.delete(9).result()  # as if it had never come to its commit
    last = transformers.trainer_utils.get_last_checkpoint(str(tmp_path / "run"))
    assert last.endswith("checkpoint-9")
    in_a_new_process()
    again = make(tmp_path / "run")
    attach(again, resume=how == "resume")
    again.train(*([] if how == "resume" else [last]))
    assert ("never committed; resumed from" in caplog.text) == (how == "path")
    assert_same(weights(again), weights(straight))
    assert losses(again) == losses(straight)


def test_a_folder_whose_save_is_in_flight_is_resumed_from_when_it_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = unstopped(tmp_path / "straight")
    gate = Gate(LocalBackend(str(tmp_path / "place")), "put_new", "step-00000009/MANIFEST-*")
    trainer = ready(tmp_path / "run", Killed(), place=gate)
    with pytest.raises(Stopped):
        trainer.train()
    folder = tmp_path / "run" / "checkpoint-9"
    assert is_pending(folder)
    trainer.pop_callback(Killed)
    wait = trainer.ckpt.wait

    def commit_and_wait(*args: Any) -> None:
        gate.open_up()
        wait(*args)

    monkeypatch.setattr(trainer.ckpt, "wait", commit_and_wait)
    trainer.train(resume_from_checkpoint=str(folder))
    assert "never committed" not in caplog.text
    assert losses(trainer) == losses(straight)
    assert_same(weights(trainer), weights(straight))


class Taking(transformers.TrainerCallback):  # type: ignore[misc]
    """Copies the folder of each save, or takes it away, as one does that uploads it."""

    def __init__(self, take: Any) -> None:
        self.take = take

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.take(str(folder), str(folder.parents[1] / "taken" / folder.name))


@pytest.mark.parametrize("take", [shutil.move, shutil.copytree])
def test_a_folder_that_a_callback_takes_is_resumed_from(take: Any, tmp_path: Path) -> None:
    straight = unstopped(tmp_path / "straight")
    (tmp_path / "taken").mkdir()
    trainer = make(tmp_path / "run")
    trainer.add_callback(Taking(take))
    ckpt = attach(trainer, safetensors=True)
    trainer.train()
    assert [info.step for info in ckpt.steps().result()] == [20, 18, 15, 12, 9, 6, 3]
    assert len(folders(tmp_path / "run")) == (0 if take is shutil.move else 7)
    again = ran(tmp_path / "run", at=str(tmp_path / "taken" / "checkpoint-6"), save_strategy="no")
    assert_same(weights(again), weights(straight))
    assert losses(again) == losses(straight)


@pytest.mark.parametrize(("setting", "told"), [("checkpoint", 1), ("end", 0), ("false", 0)])
def test_a_callback_that_uploads_checkpoints_is_named_once(
    setting: str, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside = "transformers.integrations.integration_utils"
    body = {"__module__": inside, "_log_model": setting, "on_save": lambda *_, **__: None}
    ran(tmp_path, type("WandbCallback", (transformers.TrainerCallback,), body)(), max_steps=6)
    assert caplog.text.count("WandbCallback: uploads each checkpoint-N without weights") == told


class Ending(transformers.TrainerCallback):  # type: ignore[misc]
    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.last = transformers.trainer_utils.get_last_checkpoint(args.output_dir)


def test_at_the_end_of_a_training_callbacks_find_the_last_folder(tmp_path: Path) -> None:
    ending, gate = Ending(), Gate(LocalBackend(str(tmp_path / "place")), "put_new", "step-00000006/MANIFEST-*")
    trainer = ready(tmp_path / "run", ending, place=gate, max_steps=6)
    threading.Timer(0.2, gate.open_up).start()
    trainer.train()
    assert ending.last == str(tmp_path / "run" / "checkpoint-6")


def test_a_folder_that_the_trainer_itself_deletes_at_the_end_is_no_reason_to_fail(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    for name in ("theirs", "ours"):
        trainer = make(
            tmp_path / name, max_steps=9, save_total_limit=1, learning_rate=0.05, greater_is_better=True, **settings
        )
        trainer.add_callback(Ema())
        if name == "ours":
            attach(trainer)
        trainer.train()
        assert trainer.state.best_global_step < 9
    assert folders(tmp_path / "ours") == folders(tmp_path / "theirs")


@pytest.mark.parametrize("shown", [False, True])
def test_files_of_the_user_stay_in_a_folder_that_is_saved_to_again(shown: bool, tmp_path: Path) -> None:
    for number in range(3):
        in_a_new_process()
        trainer = make(tmp_path, max_steps=3)
        if shown:
            trainer.add_callback(Ema())
        attach(trainer, safetensors=number < 2)
        trainer.train()
        if number == 0:
            (tmp_path / "checkpoint-3" / "mine").mkdir()
            (tmp_path / "checkpoint-3" / "mine" / "scores.txt").touch()
        assert (tmp_path / "checkpoint-3" / "mine" / "scores.txt").exists()
        # Old weights must not pass for those of the newer save.
        assert (tmp_path / "checkpoint-3" / "model.safetensors").exists() == (number < 2)


def test_a_step_that_was_saved_again_has_its_own_state_where_a_kill_left_the_old_folder(tmp_path: Path) -> None:
    ran(tmp_path, max_steps=6)
    shutil.copytree(tmp_path / "checkpoint-6", tmp_path / "old")
    again = ran(tmp_path, max_steps=6, learning_rate=0.3)
    (tmp_path / "checkpoint-6").rename(tmp_path / ".checkpoint-6.6.aiockpt")
    (tmp_path / "old").rename(tmp_path / "checkpoint-6")
    assert losses(ran(tmp_path, max_steps=6, resume=True)) == losses(again)


def test_what_the_trainer_wrote_over_a_folder_of_ours_is_the_trainers(tmp_path: Path) -> None:
    ran(tmp_path, max_steps=6, learning_rate=0.3)
    without = make(tmp_path, max_steps=6)
    without.train()
    again = ran(tmp_path, max_steps=9, resume=True)
    assert {step: losses(again)[step] for step in range(1, 7)} == losses(without)
    for _ in range(2):
        make(tmp_path, max_steps=9, save_steps=9).train()
        ran(tmp_path, max_steps=9, save_steps=9)
    assert folders(tmp_path)[:2] == ["before-aiockpt-1.checkpoint-9", "before-aiockpt-2.checkpoint-9"]


def test_a_step_that_cannot_be_deleted_stays_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ready(tmp_path, max_steps=9, save_total_limit=1)
    delete = trainer.ckpt.delete

    def refuse(step: int) -> Any:
        if step == 3:
            raise aiockpt.StorageAccessError("the bucket's policy denies it")
        return delete(step)

    monkeypatch.setattr(trainer.ckpt, "delete", refuse)
    trainer.train()
    assert "step 3 stays, because it cannot be deleted: the bucket's policy" in caplog.text
    assert folders(tmp_path) == ["checkpoint-3", "checkpoint-9"]


ON_A_RANK = """
import sys
from tests.frameworks.test_huggingface import Ema, attach, make

trainer = make(sys.argv[1], max_steps=6)
if trainer.args.process_index == int(sys.argv[2]):
    trainer.add_callback(Ema())
attach(trainer)
trainer.train()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_that_one_rank_has_alone_finds_the_folder(rank: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ON_A_RANK)
    output_of(*TORCHRUN, "2", str(tmp_path / "script.py"), str(tmp_path / "run"), str(rank))
    for step in (3, 6):
        assert {"ema.pt", "aiockpt.json"} <= set(os.listdir(tmp_path / "run" / f"checkpoint-{step}"))


# ---------------------------------------------------------------------- several runs of one process


def fold(root: Path, number: int, *, switch: bool = True, stop_at: int = 0) -> Any:
    """Train one fold of a cross-validation, which may be interrupted at a step."""
    trainer = make(root, save_steps=2)
    trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(number, 36, 3))
    trainer.add_callback(Interruption(stop_at))
    ckpt = attach(trainer, resume=True) if switch else None
    try:
        trainer.train()
    finally:
        if ckpt is not None:
            ckpt.close()  # waits for what is under way, as no restarted process has to
    return trainer


class Stopped(Exception):  # noqa: N818  as those of the interpreter are called
    """What was trained ends here, as by a kill."""


class Interruption(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops the program at a step, once; counts those that were trained."""

    def __init__(self, step: int) -> None:
        self.step, self.trained = step, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.trained += 1
        if state.global_step == self.step:
            self.step = 0
            raise Stopped


def trained(trainer: Any) -> int:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, Interruption)).trained


@pytest.mark.parametrize("stopped_in", [0, 1, 2])
def test_folds_of_one_process_are_runs_of_their_own_and_each_goes_on_after_a_restart(
    stopped_in: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_new_process()
    straight = [fold(tmp_path / "straight", number, switch=False) for number in range(3)]
    for number in range(stopped_in):
        fold(tmp_path / "run", number)
    with pytest.raises(Stopped):
        fold(tmp_path / "run", stopped_in, stop_at=3)
    in_a_new_process()
    again = [fold(tmp_path / "run", number) for number in range(3)]
    for one, other in zip(again, straight, strict=True):
        assert_same(weights(one), weights(other))
        assert one.state.global_step == other.state.global_step == 6
    begun_at = [6 if number < stopped_in else 2 if number == stopped_in else 0 for number in range(3)]
    assert [trained(one) for one in again] == [6 - begun for begun in begun_at]
    assert caplog.text.count("nothing is left to do") == stopped_in


def test_a_second_training_of_one_trainer_is_what_it_is_without_us(tmp_path: Path) -> None:
    in_a_new_process()
    expected = twice(make(tmp_path / "theirs", max_steps=5))
    for _ in range(2):
        assert_same(twice(ready(tmp_path / "ours", max_steps=5, resume=True)), expected)


def twice(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 5
    return weights(trainer)


def test_a_training_that_was_interrupted_goes_on_in_the_same_process(tmp_path: Path) -> None:
    in_a_new_process()
    with pytest.raises(Stopped):
        fold(tmp_path, 0, stop_at=3)
    assert trained(fold(tmp_path, 0)) == 4
    trainer = ready(tmp_path / "same", Interruption(3), max_steps=5, save_steps=1, resume=True)
    with pytest.raises(Stopped):
        trainer.train()
    trainer.train()
    assert trained(trainer) == 3 + 3  # the third one twice


def test_a_resume_that_leaves_nothing_to_train_says_so_and_trains_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ran(tmp_path, max_steps=5, resume=True)  # in the middle of an epoch
    again = ran(tmp_path, max_steps=5, resume=True)
    assert "checkpoint-5: all 5 steps of this run are trained" in caplog.text
    assert again.state.global_step == 5
    assert_same(weights(again), weights(first))


@pytest.mark.parametrize("switch", [False, True], ids=["without", "with"])
def test_a_folder_of_another_output_dir_is_begun_from(switch: bool, tmp_path: Path) -> None:
    expected = make(tmp_path / "straight", max_steps=8, save_strategy="no")
    expected.train()
    both: dict[str, dict[str, Any]] = {"first": {}, "second": {"seed": 11, "learning_rate": 0.3}}
    for name, settings in both.items():
        trainer = make(tmp_path / name, max_steps=8, **settings)
        if switch:
            attach(trainer)
        trainer.train()  # the second has steps of the same numbers
    in_a_new_process()
    again = make(tmp_path / "second", max_steps=8)
    ckpt = attach(again, resume=True) if switch else None
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-6"))
    assert_same(weights(again), weights(expected))
    assert losses(again) == losses(expected)
    assert folders(tmp_path / "second")[-1] == "checkpoint-8"
    if ckpt is not None:
        loaded = make(tmp_path / "loaded")
        ckpt.load({"model": loaded.model}, 8).result()
        assert_same(weights(loaded), weights(expected))


def test_a_folder_whose_step_is_nowhere_is_refused(tmp_path: Path) -> None:
    ran(tmp_path / "first", max_steps=6)
    shutil.copytree(tmp_path / "first" / "checkpoint-6", tmp_path / "copied" / "checkpoint-6")
    for max_steps in (3, 6):  # then one that has a step of that number
        trainer = ran(tmp_path / "second", max_steps=max_steps, seed=11)
        with pytest.raises(UsageError, match=r"checkpoint-6 has no weights of its own: .*second.* does not have; copy"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "copied" / "checkpoint-6"))
    trainer = ran(tmp_path / "copied", max_steps=3, seed=11)  # into the run itself
    with pytest.raises(UsageError, match="checkpoint-6 has no weights of its own"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "copied" / "checkpoint-6"))
    shutil.rmtree(tmp_path / "copied" / "aiockpt")
    shutil.copytree(tmp_path / "first" / "aiockpt", tmp_path / "copied" / "aiockpt")
    trainer.train(resume_from_checkpoint=str(tmp_path / "copied" / "checkpoint-6"))


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "True"])
@pytest.mark.parametrize("native", [0, 1, 5])
def test_folders_whose_steps_are_nowhere_do_not_begin_anew(native: int, resume: bool, tmp_path: Path) -> None:
    ran(tmp_path, max_steps=3)
    if native:  # an older one of the Trainer itself, or a newer one
        make(tmp_path, max_steps=native).train()
    in_a_new_process()
    trainer = ready(tmp_path, place=tmp_path / "typo", max_steps=6, resume=resume)
    argument = {} if resume else {"resume_from_checkpoint": True}
    if native < 3:
        with pytest.raises(
            UsageError, match=r"checkpoint-3 has its weights in a step, but .*typo.* has no step at all"
        ) as raised:
            trainer.train(**argument)
        assert ("checkpoint-1') resumes from what is older" in str(raised.value)) == bool(native)
        assert trainer.state.global_step == 0
        for folder in tmp_path.glob("checkpoint-*"):
            shutil.rmtree(folder)
        argument = {}
    trainer.train(**argument)
    assert len(losses(trainer)) == 6


def test_an_older_step_is_resumed_with_a_warning_where_that_of_the_newest_folder_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran(tmp_path, max_steps=6).ckpt.delete(6).result()
    assert "does not have" not in caplog.text
    ran(tmp_path, resume=True, max_steps=9)
    assert re.search(r"resumed from .*checkpoint-3: the weights of .*checkpoint-6 are in step 6, which", caplog.text)


def test_runs_of_one_process_in_places_of_their_own_may_share_a_folder(tmp_path: Path) -> None:
    for place in ("first", "second"):
        trainer = make(tmp_path / "out", max_steps=3)
        attach(trainer, tmp_path / place, resume=True)
        trainer.train()
        assert len(losses(trainer)) == 3


def test_a_trial_of_a_search_resumes_nothing_and_one_that_saves_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.integrations, "hp_params", dict)  # its own wants Optuna or Ray
    first = ran(tmp_path, max_steps=4)
    counted = Interruption(0)
    trainer = ready(tmp_path, counted, max_steps=4, save_strategy="no", resume=True)
    trainer.train(trial={"learning_rate": 1})
    assert counted.trained == 4
    assert_same(weights(trainer), weights(first))
    trainer.args.save_strategy = "steps"
    with pytest.raises(UsageError, match="save_strategy='no'"):
        trainer.train(trial={"learning_rate": 1})
    assert counted.trained == 4


@pytest.mark.parametrize(
    ("settings", "at", "logged"),
    [
        (
            {"train_sampling_strategy": "group_by_length"},
            15,
            "the order of a LengthGroupedSampler is not drawn by the number of the epoch",
        ),
        (
            {"accelerator_config": {"use_seedable_sampler": False}},
            15,
            "the rest of this epoch may come in another order",
        ),
        ({"accelerator_config": {"use_seedable_sampler": False}, "train_sampling_strategy": "sequential"}, 15, ""),
        ({"train_sampling_strategy": "group_by_length"}, 9, ""),
        ({"per_device_train_batch_size": 1}, 9, "batches have 1 samples, and had 2 when it was saved"),
        ({"gradient_accumulation_steps": 4}, 7, "saved at epoch 0.78, and is resumed at epoch 1.40"),
        ({"gradient_accumulation_steps": 4}, 12, "saved at epoch 1.33, and is resumed at epoch 2.40"),
        ({"gradient_accumulation_steps": 4, "ignore_data_skip": True}, 7, ""),
        ({}, 15, ""),
    ],
)
def test_where_a_resume_is_only_as_good_as_the_trainers_own_it_is_logged_once(
    settings: dict[str, Any], at: int, logged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    first = {name: value for name, value in settings.items() if name not in changed}
    for more, start in ((first, None), (settings, str(tmp_path / f"checkpoint-{at}"))):
        trainer = make(tmp_path, max_steps=at + 1, save_steps=at, **more)
        trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(36))  # iterable to its end
        attach(trainer)
        assert not caplog.text
        trainer.train(resume_from_checkpoint=start)
    assert [record.name for record in caplog.records if record.name == "aiockpt"] == ["aiockpt"] * bool(logged)
    assert logged in caplog.text


class Counted(torch.utils.data.RandomSampler):
    """An order by the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(epoch)


def own_loader(trainer: Any, **named: Any) -> Any:
    return torch.utils.data.DataLoader(trainer.train_dataset, 2, collate_fn=trainer.data_collator, **named)


OVERRIDES: dict[str, tuple[str, Any]] = {
    "weights": ("_get_train_sampler", lambda trainer: torch.utils.data.WeightedRandomSampler([1.0] * 36, 36)),
    "a sampler by the epoch": ("_get_train_sampler", lambda trainer: Counted(trainer.train_dataset)),
    "a loader": ("get_train_dataloader", lambda trainer: own_loader(trainer, shuffle=True)),
    "a prepared loader": (
        "get_train_dataloader",
        lambda trainer: trainer.accelerator.prepare(own_loader(trainer, shuffle=True)),
    ),
    "no loader": ("get_train_dataloader", lambda trainer: list(own_loader(trainer))),
    "a loader in order": ("get_train_dataloader", own_loader),
    "a loader with a generator": (
        "get_train_dataloader",
        lambda trainer: own_loader(trainer, shuffle=True, generator=torch.Generator().manual_seed(1)),
    ),
}


@pytest.mark.parametrize("at", [9, 15], ids=["end of an epoch", "in an epoch"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_overridden_data_that_resume_in_another_order_are_told(
    name: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if (name, at) == ("no loader", 15):
        pytest.skip("the Trainer itself cannot skip batches of it")
    method, made = OVERRIDES[name]
    steps = []
    for start in (None, str(tmp_path / f"checkpoint-{at}")):
        trainer = make(tmp_path, max_steps=at + 1, save_steps=at)
        trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(36))
        setattr(trainer, method, lambda *_, trainer=trainer: made(trainer))
        attach(trainer)
        trainer.train(resume_from_checkpoint=start)
        steps.append(losses(trainer)[at + 1])
    assert caplog.text.count("in another order") == (steps[0] != steps[1])


@pytest.mark.parametrize("max_steps", [6, 12])
def test_the_position_in_data_without_a_length_is_not_compared(
    max_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (6, max_steps):
        trainer = make(tmp_path, max_steps=steps)
        source = trainer.train_dataset

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self, source: Any = source) -> Any:
                return (source[index] for index in range(38))

        trainer.train_dataset = Stream()
        attach(trainer)
        trainer.train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-3") if (tmp_path / "checkpoint-3").exists() else None
        )
    assert "counts its position" not in caplog.text


def test_only_the_model_may_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = ran(tmp_path, save_only_model=True)
    (names,) = [{tensor.name.split(".")[0] for tensor in trainer.ckpt.describe().result().tensors}]
    assert names == {"model"}
    again = ran(tmp_path, at=str(tmp_path / "checkpoint-18"))
    assert again.state.global_step == 20
    assert caplog.text.count("step 18 has no optimizer, scheduler, rng (save_only_model=True): begun anew") == 1
    caplog.clear()
    ran(tmp_path, at=str(tmp_path / "checkpoint-20"))  # that one has them
    assert "begun anew" not in caplog.text


def test_without_a_known_base_frozen_weights_are_saved_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("", "not/here"):
        root = tmp_path / (name or "none")
        in_a_new_process()
        trainer = make(root, "lora", max_steps=3)
        trainer.model.peft_config["default"].base_model_name_or_path = name
        attach(trainer, resume=True)
        trainer.train()
        (told,) = [one for one in caplog.messages if one.startswith("no base is known for this model")]
        assert "KiB in each step" in told
        assert ("'not/here' is not on this machine" in told) == bool(name)
        trained = weights(trainer)
        in_a_new_process()
        again = make(root, "lora", max_steps=3)
        again.model.peft_config["default"].base_model_name_or_path = name
        for one in again.model.parameters():
            torch.nn.init.ones_(one)
        attach(again, resume=True)
        again.train()
        assert_same(weights(again), trained)
        caplog.clear()


def with_two_adapters(base: Path, root: Path, seed: int, **settings: Any) -> Any:
    """A Trainer of the second stage: an adapter of the first one, a new one, and words that the base does not have."""
    import peft  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    trainer = make(root, **settings)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    model.resize_token_embeddings(40)
    adapter = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**adapter), adapter_name="first")
    model.add_adapter("task", peft.LoraConfig(**adapter | {"modules_to_save": ["norm"]}))
    model.set_adapter("task")
    return transformers.Trainer(model, trainer.args, train_dataset=trainer.train_dataset)


@pytest.mark.parametrize("only", ["default", "trainable"])
def test_what_is_not_in_the_base_is_saved_trained_or_not(
    only: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_new_process()
    make(tmp_path / "x").model.save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"only": aiockpt.trainable()} if only == "trainable" else {}
    first = with_two_adapters(tmp_path / "base", tmp_path / "run", 1, max_steps=3)
    ckpt = attach(first, resume=True, **options)
    first.train()
    assert ("leaves out 4 frozen parameters" in caplog.text) == (only == "trainable")
    assert (".lora_A.first.weight" in caplog.text) == (only == "trainable")
    in_a_new_process()
    again = with_two_adapters(tmp_path / "base", tmp_path / "run", 2, max_steps=3)
    attach(again, resume=True, **options)
    again.train()
    if only == "default":
        assert_same(weights(again), weights(first))
        saved = {tensor.name for tensor in ckpt.describe().result().tensors}
        assert not any("base_layer" in name or "mlp" in name for name in saved)


@pytest.mark.parametrize("linked", [True, False])
def test_the_weights_may_be_given_to_from_pretrained(linked: bool, tmp_path: Path) -> None:
    trainer = make(tmp_path, save_total_limit=1)
    ckpt = attach(trainer, *([] if linked else ["memory://weights"]), safetensors=True)
    trainer.train()
    ckpt.close()
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    assert_same(dict(found.state_dict()), weights(trainer))
    of_the_step = {path.stat().st_ino for path in tmp_path.glob("aiockpt/step-00000020/a-*/d/*")}
    assert ((tmp_path / "checkpoint-20" / "model.safetensors").stat().st_ino in of_the_step) == linked


def test_a_model_that_is_cut_by_its_own_plan_is_loaded_whole_and_cut(tmp_path: Path) -> None:
    assert "14 parameters were cut" in output_of(*TORCHRUN, "2", str(HERE / "hf_tp.py"), str(tmp_path))


def test_a_failed_save_is_told(tmp_path: Path) -> None:
    trainer = ready(tmp_path, place=tmp_path / "file" / "runs")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(aiockpt.CheckpointError):
        trainer.train()
    assert folders(tmp_path) == []


def test_what_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.args.push_to_hub = True
    with pytest.raises(UsageError, match="push_to_hub"):
        attach(trainer)
    trainer.args.push_to_hub = False
    attach(trainer)
    with pytest.raises(UsageError, match="hyperparameters"):
        trainer._save_checkpoint(trainer.model, trial={"learning_rate": 1})
    with pytest.raises(UsageError, match="adapters alone"):
        attach(make(tmp_path, "lora"), safetensors=True)
    trainer = make(tmp_path)
    trainer.is_fsdp_xla_enabled = True
    with pytest.raises(UsageError, match="XLA"):
        attach(trainer)


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_is_what_it_was_when_this_was_written(name: str) -> None:
    assert digest_of(f"transformers:Trainer.{name}") == UPSTREAM[name]


def small_llava(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=32)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


def with_old_names(model: Any) -> torch.nn.Module:
    """Return the same parameters in the modules that transformers 4.51 had for this model."""
    old = torch.nn.Module()
    old.vision_tower, old.language_model = torch.nn.Module(), torch.nn.Module()
    old.vision_tower.vision_model = model.model.vision_tower
    old.multi_modal_projector = model.model.multi_modal_projector
    old.language_model.model, old.language_model.lm_head = model.model.language_model, model.lm_head
    return old


def after_one_step(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_a_run_goes_on_after_the_library_has_renamed_its_weights(tmp_path: Path) -> None:
    model = small_llava(1)
    old = with_old_names(model)
    optimizer = after_one_step(old)
    of_parameter = {id(parameter): optimizer.state[parameter]["exp_avg"] for parameter in old.parameters()}
    new = small_llava(2)
    new_optimizer = torch.optim.AdamW(new.parameters(), lr=0.1)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": old, "optimizer": optimizer}).result()
        for _ in range(2):  # the second time from what has the new names already
            loaded = ckpt.load({"model": new, "optimizer": new_optimizer}, rename=renames(new)).result()
            assert_same(dict(new.named_parameters()), dict(model.named_parameters()))
            for (name, here), there in zip(new.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(new_optimizer.state[here]["exp_avg"], of_parameter[id(there)]), name
            assert loaded is not None
            assert bool(loaded.renamed) == (loaded.step == 1)
            ckpt.save(2, {"model": new, "optimizer": new_optimizer}).result()
            after_one_step(new)


def test_a_trainer_asks_for_the_names_of_older_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(tmp_path, max_steps=2, save_steps=1)
    again = ready(tmp_path, max_steps=3, save_steps=1)
    trainers: Any = sys.modules["aiockpt.integrations.huggingface.trainer"]
    asked: list[Any] = []

    def note(model: Any) -> Any:
        def same_name(name: str) -> str:
            asked.append((model, name))
            return name

        return same_name

    monkeypatch.setattr(trainers, "renames", note)
    again.train(resume_from_checkpoint=True)
    assert {model for model, _ in asked} == {again.model}
    assert {f"model.{name}" for name in weights(again)} <= {name for _, name in asked}


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(tmp_path / "out", max_steps=2, save_steps=1)
    named = {
        "Model": transformers.LlamaForCausalLM,
        "model": trainer.model,
        "args": trainer.args,
        "data": trainer.train_dataset,
        "Trainer": transformers.Trainer,
    }
    with aiockpt.Checkpointer(tmp_path / "own") as ckpt:
        ckpt.save(1, {"model": trainer.model}).result()
        scope: dict[str, Any] = named | {"ckpt": ckpt}
        run_page("frameworks/huggingface.md", scope)
    with aiockpt.Checkpointer(tmp_path / "out" / "aiockpt") as ckpt:
        ckpt.load({"model": trainer.model}).result()
    assert_same(dict(scope["served"].state_dict()), weights(trainer))
