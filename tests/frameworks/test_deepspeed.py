"""DeepSpeed's own engine, saved under one ZeRO stage and number of ranks and loaded under others."""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import aiockpt
from aiockpt.convert.foreign import load as load_foreign
from aiockpt.convert.foreign import open_checkpoint
from aiockpt.integrations.deepspeed import attach
from aiockpt.testing.integration_suite import IntegrationSuite
from aiockpt.tools.cli.main import app
from tests.adapters.compiled import FusedAdam, FusedLion
from tests.docs.running import run_page
from tests.frameworks.ds.job import Job, Net, deepspeed, groups_of, start
from tests.frameworks.ds.ranks import CHECKS, SHAPES, WORLDS
from tests.frameworks.proving import TORCHRUN, assert_same, digest_of
from tests.ranks.forked import outcomes_of

CHECKOUT = Path(__file__).parents[2]
ZERO = "deepspeed.runtime.zero"
UPSTREAM = {
    "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": "c92409217281487c",
    "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": "5728d3dfa42a3d6c",
    "deepspeed.runtime.engine:DeepSpeedEngine._common_checkpoint_state": "55303ef952c4f664",
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": "97dd55246a14500c",
    f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.__init__": "faa9fe03f2209e81",
    f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params": "3cdce069e3c66082",
    f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.refresh_fp32_params": "9571f0189bd6fe49",
    f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer._optimizer_step": "d7e21affbbf9b696",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation": "db96601fe155bc96",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions": "2d22754c23f57f29",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._set_fp16_partitioned_groups_flat": "bb2ced7105e67dbf",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._rigid_load_state_dict": "4e33833d717fd28b",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._optimizer_step": "35f8511bba5ff760",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue": "01713a52e24b200e",
    f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue": "9b05d627407cb41c",
    f"{ZERO}.partition_parameters:Init._partition_param": "89aab0f80f1a80b3",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": "1d9d5c30cc4ec662",
}
"""What is replaced or relied on, with the digests of their sources."""

SGD, CPUAdam = partial(torch.optim.SGD, momentum=0.9), deepspeed.ops.adam.DeepSpeedCPUAdam
ADAMS = [torch.optim.AdamW, FusedAdam, CPUAdam]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """What each rank has found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    module = "tests.frameworks.ds.ranks"
    return {size: outcomes_of(module, size, folder / str(size), 550) for size in WORLDS}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_on_ranks(check: str, world_size: int, shape: str, outcomes: dict[int, list[dict[str, str]]]) -> None:
    for rank, found in enumerate(outcomes[world_size]):
        assert found.get(f"{check} {shape}") == "", f"rank {rank}: {found.get(f'{check} {shape}', 'never got there')}"


# ---------------------------------------------------------------------- one rank


class TestContract(IntegrationSuite):
    PROGRAM = (sys.executable, "-m", "tests.frameworks.ds.train")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", "-m", "tests.frameworks.ds.train", "stage=3")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        engine = (job := Job(dropout=0.1)).engine
        if other is not None:
            attach(engine, other).close()
        with attach(engine, place):
            engine.load_checkpoint("x", tag=None if step is None else f"global_step{step}")
            begun_at = int(engine.global_steps)
            for number in range(begun_at, until):
                job.step(number)
                engine.save_checkpoint("x")
        return begun_at


@pytest.fixture(scope="module", autouse=True)
def a_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    start(0, 1, str(tmp_path_factory.mktemp("store") / "store"))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and the log where pytest finds it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "place"


def saved(place: Path, job: Job, *numbers: int, **named: Any) -> list[float]:
    """Train, save, and return the losses of three steps after it."""
    with attach(job.engine, place):
        job.steps(*numbers)
        job.engine.save_checkpoint("x", **named)
        return job.steps(5, 6, 7)


def loaded(place: Path, job: Job, **named: Any) -> Any:
    """Load, and return what the engine returned."""
    with attach(job.engine, place):
        return job.engine.load_checkpoint("x", **named)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_before_the_first_step_is_loaded_as_one(place: Path, stage: int) -> None:
    straight = saved(place, Job(stage))
    other = Job(stage, seed=8)
    other.steps(0)  # has state, which goes
    loaded(place, other)
    assert not other.engine.optimizer.optimizer.state
    assert other.steps(5, 6, 7) == straight


def test_parameters_that_zero_keeps_whole_are_whole_after_a_load(place: Path) -> None:
    saved(place, Job(3), 0)
    other = Job(3, seed=8)
    other.step(0)
    whole = {name: one.shape for name, one in other.engine.module.named_parameters()}
    assert whole["first.weight"] == (7, 5)  # below stage3_param_persistence_threshold
    loaded(place, other)
    assert {name: one.shape for name, one in other.engine.module.named_parameters()} == whole
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        assert torch.equal(other.engine.module.first.weight, ckpt.read(None, "model.first.weight").result())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_another_optimizer_keeps_what_it_has(place: Path, stage: int) -> None:
    straight = saved(place, Job(stage, optimizer=SGD), 0, 1)
    other = Job(stage, optimizer=SGD, seed=8)
    loaded(place, other)
    assert other.steps(5, 6, 7) == straight


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [(SGD, torch.optim.AdamW), (CPUAdam, SGD), (SGD, FusedAdam), (CPUAdam, FusedLion), (FusedLion, CPUAdam)],
)
def test_an_optimizer_of_another_class_is_refused_by_both_names(
    place: Path, stage: int, source: Any, target: Any
) -> None:
    saved(place, Job(stage, optimizer=source), 0)
    job = Job(stage, optimizer=target, seed=8)
    before = job.weights()
    there, here = (getattr(cls, "func", cls).__name__ for cls in (source, target))
    with pytest.raises(aiockpt.StateMismatchError, match=f"{here} in the state.*{there} in the checkpoint"):
        loaded(place, job)
    assert_same(job.weights(), before)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(ADAMS, 2)])
@pytest.mark.parametrize("begun", [False, True])
def test_adams_go_on_from_each_other(place: Path, stage: int, source: Any, target: Any, begun: bool) -> None:
    straight = saved(place, Job(stage, optimizer=source), 0, 1)
    job = Job(stage, optimizer=target, seed=8)
    job.steps(*[2, 3, 4] * begun)
    loaded(place, job)
    assert job.steps(5, 6, 7) == pytest.approx(straight, rel=1e-5)


@pytest.mark.parametrize("source", [FusedAdam, CPUAdam])
def test_a_plain_adamw_goes_on_from_those_of_deepspeed(place: Path, source: Any) -> None:
    job = Job(1, optimizer=source)
    saved(place, job, 0, 1)
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.5)
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        ckpt.load({"model": module, "optimizer": optimizer}).result()
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}
    assert all(isinstance(entry["step"], torch.Tensor) for entry in optimizer.state.values())


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {"round_robin_gradients": True}),
        (2, {"round_robin_gradients": True, "parameter_alignment": True}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"sub_group_size": 40}),
        (3, {"stage3_param_persistence_threshold": 0}),
        (3, {"offload_optimizer": {"device": "cpu"}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_layouts_of_partitions(place: Path, stage: int, zero: dict[str, Any], precision: str) -> None:
    straight = saved(place, Job(stage, precision, zero=zero), 0, 1)
    plainly = Job(2, precision, seed=8)
    loaded(place, plainly)
    other = Job(stage, precision, zero=zero, seed=8)
    loaded(place, other)
    assert_same(other.weights(), plainly.weights())
    assert other.steps(5, 6, 7) == straight


def test_a_loss_scale_goes_on(place: Path) -> None:
    job = Job(2, "fp16")
    job.engine.optimizer.loss_scaler.scale_window = 2
    with attach(job.engine, place):
        job.steps(0, 1, 2)
        job.engine.optimizer.loss_scaler.update_scale(True)
        job.engine.save_checkpoint("x")
        job.steps(3, 4)
    other = Job(2, "fp16", seed=8)
    other.engine.optimizer.loss_scaler.scale_window = 2
    loaded(place, other)
    assert vars(other.engine.optimizer.loss_scaler)["cur_scale"] != 2**8
    other.steps(3, 4)
    assert vars(other.engine.optimizer.loss_scaler) == vars(job.engine.optimizer.loss_scaler)


def test_parts_are_left_out_as_deepspeed_does(place: Path) -> None:
    job = Job(2)
    saved(place, job, 0, 1, client_state={"epoch": 3})
    with aiockpt.Checkpointer(place) as ckpt:
        moment = ckpt.read(None, "optimizer.state.first\\.weight.exp_avg").result()
    assert moment.any()

    other = Job(2, seed=8)
    other.step(0)
    state = other.engine.optimizer.optimizer.state
    kept = [entry["exp_avg"].clone() for entry in state.values()]
    _, client = loaded(place, other, load_optimizer_states=False)
    assert client == {"epoch": 3}
    assert all(map(torch.equal, kept, (entry["exp_avg"] for entry in state.values())))
    assert other.engine.global_steps == 2

    other = Job(2, seed=8)
    other.step(0)
    lr = other.engine.get_lr()
    loaded(place, other, load_module_only=True)
    assert (other.engine.global_steps, other.engine.get_lr()) == (1, lr)
    with aiockpt.Checkpointer(place) as ckpt:
        assert torch.equal(other.weights()["first.weight"], ckpt.read(None, "model.first.weight").result())


def test_frozen_parameters_can_be_left_out(place: Path) -> None:
    saved(place, Job(2), 0, exclude_frozen_parameters=True)
    with aiockpt.Checkpointer(place) as ckpt:
        assert list(ckpt.describe().result().left_out) == ["model.frozen"]
    other = Job(2, seed=8)
    with torch.no_grad():
        other.engine.module.frozen.fill_(9)
    loaded(place, other)
    assert other.weights()["frozen"].tolist() == [9, 9, 9]


class Thawed(Net):
    """All of its parameters are trained; a job makes one group of them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_and_groups_that_differ_are_refused(place: Path, stage: int) -> None:
    saved(place / "groups", Job(stage, module=Net()), 0)
    other = Job(stage, module=Thawed())
    before = other.weights()
    with pytest.raises(aiockpt.StateMismatchError, match="the optimizer of the checkpoint has no parameter frozen"):
        loaded(place / "groups", other)
    assert_same(other.weights(), before)
    saved(place / "two groups", Job(stage), 0)
    with pytest.raises(aiockpt.StateMismatchError, match=r"weight_decay is .* for .* and .* for .* in the checkpoint"):
        loaded(place / "two groups", Job(stage, module=Net()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_state_begins_anew(place: Path, stage: int) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.3)
    module(torch.arange(8)).sum().backward()
    module.second.weight.grad = None
    optimizer.step()
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        ckpt.save(4, {"model": module, "optimizer": optimizer})
    other = Job(stage, seed=8)
    other.step(0)
    loaded(place, other)
    with attach(other.engine, place / "again"):
        other.engine.save_checkpoint("x")
    with aiockpt.Checkpointer(place / "again", ranks=aiockpt.Ranks()) as ckpt:
        for name, has_state in (("first", True), ("second", False)):
            assert ckpt.read(None, f"optimizer.state.{name}\\.weight.exp_avg").result().any() == has_state


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_differs_is_refused_and_not_strictly_loaded(place: Path, stage: int) -> None:
    saved(place, Job(stage), 0)
    other = Job(stage, seed=8)
    other.engine.module.register_buffer("more", torch.ones(2))
    before = other.weights()
    with pytest.raises(aiockpt.StateMismatchError, match=r"model\.more: in the state but not in the checkpoint"):
        loaded(place, other)
    assert_same(other.weights(), before)
    other.step(0)
    loaded(place, other, load_module_strict=False)
    assert not torch.equal(other.weights()["first.weight"], before["first.weight"])


# ---------------------------------------------------------------------- tags, and the calls


def test_tags_name_steps(place: Path) -> None:
    job = Job(2)
    with attach(job.engine, place) as ckpt:
        job.step(0)
        job.engine.save_checkpoint("x", "first")
        job.step(1)
        job.engine.save_checkpoint("x")
        job.engine.save_checkpoint("x", "second")
        job.step(2)
        job.engine.save_checkpoint("x", "aside", save_latest=False)
        ckpt.wait()
        assert [info.step for info in ckpt.steps().result()] == [3, 2, 1]
        for tag, step in ((None, 2), ("global_step2", 2), ("second", 2), ("first", 1), ("aside", 3)):
            path, _ = job.engine.load_checkpoint("x", tag)
            assert (path, job.engine.global_steps) == (f"x/{tag or 'second'}", step)
        with pytest.raises(aiockpt.StepNotFoundError, match="no step with the tag 'third'"):
            job.engine.load_checkpoint("x", "third")


def test_a_second_tag_of_a_step_that_is_not_the_latest_leaves_the_first_the_latest(place: Path) -> None:
    job = Job(2)
    job.step(0)
    with attach(job.engine, place):
        job.engine.save_checkpoint("x", "regular")
        for tag in ("best", "regular"):  # the file "latest" of DeepSpeed would still say "regular"
            job.engine.save_checkpoint("x", tag, save_latest=False)
    again = Job(2, seed=8)
    with attach(again.engine, place):
        for asked in (None, "best", "aside", None):
            assert again.engine.load_checkpoint("x", asked)[0] == f"x/{asked or 'regular'}"
            again.engine.save_checkpoint("x", "aside", save_latest=False)


def test_nothing_there_is_what_deepspeed_returns(place: Path) -> None:
    assert loaded(place, Job(2)) == (None, None)


def test_a_damaged_newest_step_is_passed_over(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    with attach(job.engine, place) as ckpt:
        for number in range(3):
            job.step(number)
            job.engine.save_checkpoint("x")
        ckpt.wait()
    for manifest in place.rglob("MANIFEST*"):
        if "step-00000003" in str(manifest):
            manifest.write_bytes(b"{")
    file = max(place.rglob("*.safetensors"), key=lambda path: ("step-00000002" in str(path), path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "aiockpt"):
        assert loaded(place, Job(2, seed=8))[0] == "x/global_step1"
    with pytest.raises(aiockpt.CorruptionError):
        loaded(place, Job(2, seed=8), tag="global_step2")


def test_where_every_step_is_damaged_nothing_begins_anew(place: Path) -> None:
    job = Job(2)
    with attach(job.engine, place):
        job.step(0)
        job.engine.save_checkpoint("x")
    for manifest in place.rglob("MANIFEST*"):
        manifest.write_bytes(b"{")
    with pytest.raises(aiockpt.NoValidCheckpointError):
        loaded(place, Job(2, seed=8))


def test_what_deepspeed_wrote_is_loaded_by_deepspeed(place: Path) -> None:
    job = Job(2)
    job.steps(0, 1)
    job.engine.save_checkpoint("theirs", client_state={"epoch": 3})
    straight = job.steps(2, 3)
    other = Job(2, seed=8)
    theirs = other.engine.load_checkpoint

    def load_checkpoint(load_dir: str, *, load_optimizer_states: bool = True) -> Any:  # with fewer arguments
        return theirs(load_dir, load_optimizer_states=load_optimizer_states)

    other.engine.load_checkpoint = load_checkpoint
    with attach(other.engine, place) as ckpt:
        path, client = other.engine.load_checkpoint("theirs", load_optimizer_states=True)
        assert client["epoch"] == 3
        assert "theirs" in path
        assert other.steps(2, 3) == straight
        other.engine.save_checkpoint("theirs")
        ckpt.wait()
        assert other.engine.load_checkpoint("theirs")[0] == "theirs/global_step4"


def test_a_run_that_went_on_without_aiockpt_is_loaded_from_where_it_came_to(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, folder = Job(2), str(place / "x")
    with attach(job.engine, place / "run"):
        job.step(0)
        job.engine.save_checkpoint(folder)
    plain = Job(2)
    plain.steps(0, 1)
    plain.engine.save_checkpoint(folder)
    straight = plain.steps(2, 3)
    again = Job(2, seed=8)
    with attach(again.engine, place / "run") as ckpt, caplog.at_level(logging.WARNING, "aiockpt"):
        assert "global_step2" in again.engine.load_checkpoint(folder)[0]
        assert again.steps(2, 3) == straight
        assert f"resumed from global_step2 of {folder}: " in caplog.text
        again.engine.save_checkpoint(folder)
        ckpt.wait()
        caplog.clear()
        assert again.engine.load_checkpoint(folder)[0] == f"{folder}/global_step4"
        assert not caplog.text
        os.utime(place / "x" / "latest")  # as a copy leaves it
        assert again.engine.load_checkpoint(folder)[0] == f"{folder}/global_step4"
        assert "resumed from step 4: " in caplog.text


def test_the_number_at_the_end_of_a_tag_or_the_time_says_which_is_newer(place: Path) -> None:
    job, folder = Job(2), str(place / "x")
    with attach(job.engine, place / "run") as ckpt:
        job.steps(0, 1)
        job.engine.save_checkpoint(folder)
        ckpt.wait()
    plain = Job(2)
    plain.step(0)
    plain.engine.save_checkpoint(folder, "best")
    again, latest, hour = Job(2, seed=8), Path(folder, "latest"), time.time() + 3600
    rows = [
        ("best", hour, "best"),
        ("best", 0, "step2"),
        ("global_step2", hour, "step2"),
        ("run7-step1", hour, "step2"),
    ]
    with attach(again.engine, place / "run"):
        for tag, written_s, newest in rows:
            latest.write_text(tag)
            os.utime(latest, (written_s, written_s))
            loaded, _ = again.engine.load_checkpoint(folder)
            assert newest in loaded.removeprefix(folder), tag
            assert again.engine.global_steps == (1 if newest == "best" else 2), tag


def commit_info(tag: str) -> Any:
    return deepspeed.runtime.checkpoint_engine.CheckpointCommitInfo(tag, "x", save_latest=True)


def test_a_commit_is_answered_when_it_is_durable(place: Path) -> None:
    job = Job(2)
    job.step(0)
    with attach(job.engine, place) as ckpt:
        commits = job.engine.checkpoint_engine
        assert commits.get_commit_info() is None
        future = job.engine.save_checkpoint("x", "one")
        assert commits.commit(commit_info("one"))
        assert future.stage == "committed"
        assert commits.get_commit_info() == commit_info("one")
        assert not commits.is_decoupled()
        assert [one.step for one in ckpt.steps().result()] == [1]
        assert job.engine.save_16bit_model("weights")
    assert set(torch.load("weights/pytorch_model.bin")) == set(job.weights())


def test_a_failed_save_is_raised_by_the_commit(place: Path) -> None:
    job = Job(2)
    place.write_text("a file in the way")
    attach(job.engine, place)
    job.engine.save_checkpoint("x", "one")
    for call in (job.engine.checkpoint_engine.cleanup, lambda: job.engine.checkpoint_engine.commit(commit_info("one"))):
        with pytest.raises(aiockpt.CheckpointError):
            call()
    assert job.engine.checkpoint_engine.get_commit_info() is None


def test_a_save_between_the_batches_of_a_step_is_warned_of(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2, gradient_accumulation_steps=2)
    with attach(job.engine, place), caplog.at_level(logging.WARNING, "aiockpt"):
        job.steps(0, 1)
        job.engine.save_checkpoint("x")
        assert "gradients" not in caplog.text
        job.step(2)
        job.engine.save_checkpoint("x", "inside")
        assert "their gradients are not saved" in caplog.text
    other = Job(2, gradient_accumulation_steps=2, seed=8)
    loaded(place, other, tag="inside")
    assert (other.engine.global_steps, other.engine.micro_steps) == (1, 2)


def test_more_state_goes_with_it_and_names_do_not_collide(place: Path) -> None:
    job = Job(2)
    for name in ("model", "lr_scheduler", "client_state"):
        with pytest.raises(aiockpt.UsageError, match=f"state= has {name}"):
            attach(job.engine, place, state={name: torch.zeros(1)})
    mean = torch.tensor([3.0])
    with attach(job.engine, place, state={"mean": mean}) as ckpt:
        job.engine.save_checkpoint("x")
        ckpt.wait()
        mean.zero_()
        job.engine.load_checkpoint("x")
    assert mean.tolist() == [3]


def test_what_a_plain_program_saved_is_loaded(place: Path) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.3)
    module(torch.arange(8)).sum().backward()
    optimizer.step()
    for form in ("objects", "dicts"):
        objects: dict[str, Any] = {"model": module, "optimizer": optimizer}
        with aiockpt.Checkpointer(place / form, ranks=aiockpt.Ranks()) as ckpt:
            ckpt.save(4, objects if form == "objects" else {name: one.state_dict() for name, one in objects.items()})
        for stage, precision in ((1, "fp32"), (2, "bf16"), (3, "bf16")):
            job = Job(stage, precision, seed=8)
            if form == "objects":
                assert loaded(place / form, job) == ("x/global_step4", {})
                assert job.engine.optimizer.param_groups[0]["lr"] == 0.3
            else:
                loaded(place / form, job, load_optimizer_states=False)
            assert_same(
                job.weights(), {name: one.to(job.weights()[name].dtype) for name, one in module.state_dict().items()}
            )


# ---------------------------------------------------------------------- universal checkpoints


def universal(stage: int, client_state: dict[str, Any]) -> tuple[Path, list[float]]:
    """Return a universal checkpoint that DeepSpeed has written and converted, and the losses after it."""
    job = Job(stage, "bf16")
    job.steps(0, 1)
    job.engine.save_checkpoint("theirs", "x", client_state=client_state)
    arguments: dict[str, Any] = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    arguments |= {"input_folder": "theirs/x", "output_folder": "theirs/universal", "strict": True}
    module = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    module.main(argparse.Namespace(**arguments, inject_missing_state=True))
    return Path("theirs/universal"), job.steps(5, 6, 7)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_goes_on_from_a_universal_checkpoint(place: Path, stage: int) -> None:
    folder, straight = universal(stage, {"epoch": 3})
    assert CliRunner().invoke(app, ["convert", str(folder), str(place), "--step", "2"]).exit_code == 0
    for other in (2, 3):
        job = Job(other, "bf16", seed=8)
        assert loaded(place, job) == ("x/global_step2", {"epoch": 3})
        assert job.engine.global_steps == 2
        assert job.steps(5, 6, 7) == straight


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_module_and_optimizer_take_a_universal_checkpoint(stage: int) -> None:
    folder, _ = universal(stage, {})
    module = Net()
    module.frozen.data = module.frozen.data.bfloat16()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.3)
    assert load_foreign(folder, {"model": module, "optimizer": optimizer}) == ()
    steps = {float(entry["step"]) for entry in optimizer.state.values()}
    assert (steps, optimizer.param_groups[0]["lr"] < 0.3) == ({2.0}, True)
    optimizer.step()


def test_a_universal_checkpoint_that_is_damaged_or_has_objects_is_refused() -> None:
    folder, _ = universal(3, {"own": argparse.Namespace()})
    with pytest.raises(aiockpt.UsageError, match=r"holds objects \(argparse\.Namespace\)"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, trust_pickle=True).state["client_state"] == {"own": argparse.Namespace()}
    file = folder / "zero" / "first.weight" / "exp_avg.pt"
    torch.save(torch.zeros(3), file)
    with pytest.raises(aiockpt.CorruptionError, match=r"exp_avg\.pt has 3 elements"):
        open_checkpoint(folder, trust_pickle=True)
    (file.parent / "fp32.pt").unlink()
    with pytest.raises(aiockpt.CorruptionError, match=r"no weights of first\.weight"):
        open_checkpoint(folder, trust_pickle=True)


# ---------------------------------------------------------------------- refused


def set_value(name: str, value: object) -> Callable[[Any], None]:
    return lambda engine: setattr(engine, name, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_value("has_moe_layers", True), "experts are spread"),
        (set_value("mp_world_size", 2), "the model is spread"),
        (lambda engine: setattr(engine.optimizer, "swap_optimizer", True), "offload to NVMe"),
        (lambda engine: setattr(engine.optimizer, "zenflow", True), "ZenFlow"),
        (lambda engine: setattr(engine.optimizer, "offloaded_states", {1}), "call engine.reload_states"),
        (
            lambda engine: setattr(engine, "optimizer", type("BF16", (), {"param_groups": []})()),
            "set zero_optimization.stage",
        ),
    ],
)
def test_what_keeps_its_state_otherwise_is_refused(place: Path, change: Callable[[Any], None], says: str) -> None:
    job = Job(3)
    change(job.engine)
    with pytest.raises(aiockpt.UsageError, match=says):
        attach(job.engine, place)


def test_state_that_is_not_spread_as_the_partition_is_refused(place: Path) -> None:
    job = Job(2)
    job.step(0)
    next(iter(job.engine.optimizer.optimizer.state.values()))["exp_avg"] = torch.zeros(3)
    with (
        attach(job.engine, place),
        pytest.raises(aiockpt.UsageError, match=r"optimizer state 'exp_avg' of shape \(3,\)"),
    ):
        job.engine.save_checkpoint("x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state.update(step=torch.tensor(9.0)),
            r"'step' is 1.0 for embed\.weight and 9.0 for first\.weight",
        ),
        (
            lambda state: state.update(exp_avg=state["exp_avg"].double()),
            r"'exp_avg' is torch\.float32 for embed\.weight and torch\.float64 for first\.weight",
        ),
        (
            lambda state: state.update(exp_avg=torch.zeros(3)),
            r"'exp_avg' has the shape \(3,\)",
        ),
        (
            lambda state: state.update(exp_avg=torch.tensor(3.0)),
            r"'exp_avg' has the shape \(\)",
        ),
        (
            lambda state: state.update(more=torch.zeros(7, 5)),
            r"'more' is there for first\.weight and not for embed\.weight",
        ),
        (lambda state: state.pop("exp_avg"), r"'exp_avg' is there for embed\.weight and not for first\.weight"),
    ],
    ids=["values", "dtypes", "shapes", "scalars", "one more", "one less"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_differs_within_a_partition_is_refused_before_anything_is_filled(
    place: Path, change: Callable[[Any], Any], says: str, stage: int
) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.3)
    module(torch.arange(8)).sum().backward()
    optimizer.step()
    change(optimizer.state[module.first.weight])
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        ckpt.save(4, {"model": module, "optimizer": optimizer})
    job = Job(stage, seed=8)
    job.step(0)

    def everything() -> tuple[dict[str, torch.Tensor], Any]:
        return job.weights(), copy.deepcopy([*job.engine.optimizer.optimizer.state.values()])

    weights, inner = everything()
    with pytest.raises(aiockpt.StateMismatchError, match=f"optimizer state {says}.*ZeRO has one for both"):
        loaded(place, job)
    assert_same(everything()[0], weights)
    assert str(everything()[1]) == str(inner)


# ---------------------------------------------------------------------- kills, the page, and what is relied on


def test_the_page_runs() -> None:
    job = Job(3, module=Thawed())
    scope = {"engine": job.engine, "train": lambda: job.step(1), "Net": Thawed, "steps": 3, "torch": torch}
    run_page("frameworks/deepspeed.md", scope)
    assert scope["moment"].shape == (7, 5)


def test_what_is_relied_on_is_as_it_was_read() -> None:
    assert {name: digest_of(name) for name in UPSTREAM} == UPSTREAM
    assert deepspeed.__version__.startswith("0.19.")
