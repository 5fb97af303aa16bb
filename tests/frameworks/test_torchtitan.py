"""torchtitan's own trainer with our manager: what it resumes, and each option of torchtitan's manager.

Runs of one process are made here by ``Trainer.Config.build()``, as torchtitan's program does; what wants several ranks, or
a kill, runs that program.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]

import aiockpt
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks import proving
from tests.frameworks.proving import TORCHRUN, digest_of, environment, prove
from tests.frameworks.titan import config_registry
from tests.frameworks.titan.config_registry import ours, tiny, titans

PROGRAM = ["-m", "tests.frameworks.titan.train", "--module", "tests.frameworks.titan", "--config"]
AIOCKPT = Path("outputs/checkpoint")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder; torchtitan's trainer does not sleep at its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_registry.trainer.time, "sleep", lambda seconds: None)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def build(steps: int = 8, config: Any = None, **options: Any) -> Any:
    """Return a trainer; *options* are those of its checkpoints."""
    made = config or tiny()
    made.training.steps = steps
    for name, value in options.items():
        setattr(made.checkpoint, name, value)
    made.checkpoint.__post_init__()
    return made.build()


def train(steps: int = 8, config: Any = None, **options: Any) -> Any:
    """Return a trainer that has trained to the end, and is closed."""
    trainer = build(steps, config, **options)
    trainer.train()
    trainer.close()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the parameters."""
    return {name: whole(tensor).clone() for name, tensor in trainer.model_parts[0].named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    return torch.as_tensor(getattr(tensor, "full_tensor", lambda: tensor)().detach())


def everything(trainer: Any) -> dict[str, Any]:
    """Return what training goes on from: weights, optimizer, schedule, data, counters, random numbers."""
    optimizer = {
        name: whole(value).clone() if isinstance(value, torch.Tensor) else value
        for name, value in trainer.optimizers.state_dict().items()
    }
    return {
        **weights(trainer),
        **optimizer,
        "schedule": trainer.lr_schedulers.state_dict(),
        "data": trainer.dataloader.state_dict(),
        "counters": trainer.state_dict(),
        "random": torch.get_rng_state(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what is not bit by bit the same."""
    same = {
        name: torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one.keys() & other.keys()
    }
    return sorted([*(name for name in same if not same[name]), *(one.keys() ^ other.keys())])


def steps_in(place: Path | str = AIOCKPT) -> list[int]:
    """Return the steps of a place, the oldest first."""
    return proving.steps_in(place)


def names_in(place: Path | str, step: int | None = None) -> dict[str, str]:
    """Return the tensors of a checkpoint, with their dtypes."""
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        return {tensor.name: tensor.dtype for tensor in ckpt.describe(step).result().tensors}


def program(*arguments: str, ranks: int = 1, config: str = "tiny") -> subprocess.CompletedProcess[str]:
    """Run torchtitan's program, on one rank or by torchrun."""
    return subprocess.run(
        [*command(ranks, config), *arguments], check=False, env=environment(), capture_output=True, text=True
    )


def command(ranks: int = 1, config: str = "tiny") -> list[str]:
    start = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
    return [*start, *PROGRAM, config]


# ---------------------------------------------------------------------- the same run


class TestContract(IntegrationSuite):
    ATTACHES = False
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", *PROGRAM, "tiny")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        trainer = build(until, folder=str(place), interval=1, load_step=-1 if step is None else step)
        load, begun_at = trainer.checkpointer.load, []

        def note(*args: Any, **named: Any) -> Any:
            done = load(*args, **named)
            begun_at.append(int(trainer.step))
            return done

        trainer.checkpointer.load = note
        try:
            trainer.train()
        finally:
            trainer.close()
        return begun_at[0]


def test_killed_and_resumed_it_is_the_run_that_was_never_stopped() -> None:
    rows = prove(*command(), seed=3)
    assert all(name in rows for name in ("exp_avg_sq", "dataloader", "lr_scheduler", "train_state", "rng torch"))


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_resumed_run_ends_as_the_straight_one_in_every_mode(mode: str) -> None:
    straight = everything(train(8, async_mode=mode, folder="straight"))
    train(5, async_mode=mode, last_save_model_only=True)
    assert differences(straight, everything(train(8, async_mode=mode))) == []


def test_a_process_of_its_own_may_write() -> None:
    straight = everything(train(8, folder="straight"))
    train(4, worker="process")
    assert differences(straight, everything(train(8, worker="process"))) == []
    assert steps_in() == [2, 4, 6, 8]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'asynchronous' is none of disabled, async, async_with_pinned_mem"):
        build(async_mode="asynchronous")


def test_disabled_means_that_a_save_returns_when_it_is_committed() -> None:
    trainer = build(async_mode="disabled")
    trainer.step = 2
    trainer.optimizers.state_dict()  # which makes the state of an optimizer that has not stepped
    assert trainer.checkpointer.save(2)
    assert steps_in() == [2]
    trainer.close()


def test_two_ranks_go_on_as_one_and_one_as_two() -> None:
    done = program("--training.steps", "4", ranks=2)
    assert done.returncode == 0, done.stderr
    with aiockpt.Checkpointer(AIOCKPT, ranks=aiockpt.Ranks()) as ckpt:
        saved = ckpt.read(4, "model.layers.1.feed_forward.w2.weight").result()

    refused = build(6)
    with pytest.raises(aiockpt.StateMismatchError, match="saved by 2 data-parallel ranks") as caught:
        refused.train()
    assert any("exclude_from_loading" in note for note in caught.value.__notes__)
    refused.close()

    trainer = build(6, exclude_from_loading=["dataloader"])
    assert trainer.checkpointer.load()
    assert torch.equal(whole(trainer.model_parts[0].layers["1"].feed_forward.w2.weight), saved)
    assert (trainer.step, trainer.lr_schedulers.schedulers[0].last_epoch) == (4, 4)
    trainer.train()
    trainer.close()
    assert steps_in()[-1] == 6

    more = program("--training.steps", "8", "--checkpoint.exclude_from_loading", "dataloader", ranks=2)
    assert more.returncode == 0, more.stderr
    assert steps_in()[-1] == 8


def test_tensor_parallel_ranks_that_read_alike_go_on_as_one_rank() -> None:
    shape = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]
    done = program("--training.steps", "4", *shape, ranks=2, config="readers_that_differ")
    assert done.returncode == 0, done.stderr
    trainer = build(6)
    trainer.train()
    trainer.close()
    assert trainer.step == 6


def test_optimizer_state_is_made_without_a_step_of_the_optimizer() -> None:
    train(4)
    trainer = build(6)
    stepped: list[object] = []
    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(lambda *given: stepped.append(given))
    assert trainer.checkpointer.load()
    assert stepped == []
    state = trainer.optimizers.optimizers[0].state
    assert {float(of_one["step"]) for of_one in state.values()} == {4.0}
    trainer.close()


def test_a_run_without_a_checkpoint_finds_its_optimizers_untouched() -> None:
    trainer = build()
    assert not trainer.checkpointer.load()
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    trainer.close()


# ---------------------------------------------------------------------- options of torchtitan's manager


def test_the_newest_k_are_kept() -> None:
    train(10, keep_latest_k=2)
    assert steps_in() == [8, 10]
    train(12, keep_latest_k=0)
    assert steps_in() == [8, 10, 12]


def test_a_step_is_loaded_by_its_number() -> None:
    train(6)
    trainer = build(load_step=4)
    assert trainer.checkpointer.load(4)
    assert trainer.step == 4
    with pytest.raises(FileNotFoundError, match="3"):
        trainer.checkpointer.load(3)
    trainer.close()


def test_what_is_excluded_stays_as_it_is() -> None:
    train(4)
    trainer = build(exclude_from_loading=["optimizer", "lr_scheduler", "rng"])
    before = torch.get_rng_state()
    assert trainer.checkpointer.load()
    assert trainer.step == 4
    assert not trainer.optimizers.optimizers[0].state
    assert trainer.lr_schedulers.schedulers[0].last_epoch == 0
    assert torch.equal(before, torch.get_rng_state())
    trainer.close()
    with pytest.raises(ValueError, match="'optimiser' is none of train_state, model, optimizer"):
        build(exclude_from_loading=["optimiser"])


def test_the_first_step_is_saved_if_asked_for_and_load_only_saves_nothing() -> None:
    train(3, enable_first_step_checkpoint=True)
    assert steps_in() == [1, 2, 3]
    train(8, load_only=True)
    assert steps_in() == [1, 2, 3]


def test_a_manager_that_is_not_enabled_does_nothing() -> None:
    trainer = train(4, enable=False)
    assert not AIOCKPT.exists()
    trainer.checkpointer.maybe_wait_for_saving()
    assert not trainer.checkpointer.load()
    assert not trainer.checkpointer.save(4)


def test_the_last_save_is_an_export_that_no_resumed_run_takes_for_a_checkpoint() -> None:
    trained = train(6, last_save_model_only=True, export_dtype="bfloat16")
    assert steps_in() == [2, 4]
    exported = names_in("outputs/checkpoint-export", 6)
    assert exported["model.layers.0.attention.qkv_linear.wq.weight"] == "BF16"
    assert all(name.startswith("model.") for name in exported)

    again = train(8)  # goes on from step 4, with its optimizer
    assert steps_in() == [2, 4, 6, 8]
    assert again.step == 8
    bfloat = weights(trained)["norm.weight"].bfloat16()
    with aiockpt.Checkpointer("outputs/checkpoint-export", ranks=aiockpt.Ranks()) as ckpt:
        assert torch.equal(ckpt.read(6, "model.norm.weight").result(), bfloat)


@pytest.mark.parametrize("step", ["", "/step-00000004"], ids=["the newest", "a step"])
def test_a_run_begins_from_a_checkpoint_elsewhere(step: str) -> None:
    source = train(6, folder="source")
    path = f"{Path.cwd()}/outputs/source{step}"
    trainer = build(initial_load_path=path)
    assert trainer.checkpointer.load()
    assert trainer.step == 0
    assert not trainer.optimizers.optimizers[0].state
    assert (differences(weights(source), weights(trainer)) == []) == (step == "")
    trainer.close()

    trainer = build(initial_load_path=path, initial_load_model_only=False)
    assert trainer.checkpointer.load()
    assert trainer.step == (4 if step else 6)
    trainer.train()
    trainer.close()
    assert steps_in()[-1] == 8
    assert steps_in("outputs/source") == [2, 4, 6]


def test_a_run_begins_from_an_export() -> None:
    source = train(6, last_save_model_only=True, folder="source")
    trainer = build(initial_load_path=f"{Path.cwd()}/outputs/source-export")
    assert trainer.checkpointer.load()
    assert differences(weights(source), weights(trainer)) == []
    trainer.close()


def test_a_seed_is_the_model_alone() -> None:
    config = tiny()
    config.debug.seed = 11
    seeded = build(config=config, create_seed_checkpoint=True)
    assert seeded.checkpointer.save(curr_step=0, last_step=True)
    seeded.close()
    assert steps_in() == [0]

    trainer = build(4)
    assert trainer.checkpointer.load()
    assert trainer.step == 0
    assert not trainer.optimizers.optimizers[0].state
    assert differences(weights(seeded), weights(trainer)) == []
    trainer.train()
    trainer.close()
    assert steps_in() == [0, 2, 4]


def test_the_last_save_may_be_a_folder_of_hugging_face_and_a_run_begins_from_one() -> None:
    source = train(4, last_save_model_only=True, last_save_in_hf=True, folder="source")
    folder = Path.cwd() / "outputs/source/step-4"
    assert list(folder.glob("*.safetensors"))
    assert steps_in("outputs/source") == [2]
    trainer = build(initial_load_path=str(folder), initial_load_in_hf=True)
    assert trainer.checkpointer.load()
    assert differences(weights(source), weights(trainer)) == []
    trainer.close()


def test_hugging_face_without_an_adapter_is_refused_at_once() -> None:
    config = tiny()
    config.model_spec.state_dict_adapter = None
    with pytest.raises(ValueError, match="last_save_in_hf"):
        build(config=config, last_save_model_only=True, last_save_in_hf=True)


# ---------------------------------------------------------------------- what torchtitan has written, and broken places


def test_a_run_that_torchtitan_saved_goes_on_with_ours() -> None:
    train(8, titans(), folder="straight")
    straight = everything(train(8, titans(), folder="straight"))
    train(4, titans())
    there = sorted(path.name for path in AIOCKPT.iterdir())
    trainer = build(8)
    assert trainer.checkpointer.load()
    assert trainer.step == 4
    trainer.train()
    trainer.close()
    found = differences(straight, everything(trainer))
    assert "layers.0.feed_forward.w1.weight" in found  # torchtitan leaves the random generators out
    assert steps_in() == [6, 8]
    assert set(there) <= {path.name for path in AIOCKPT.iterdir()}
    assert train(10).step == 10  # from ours, now
    assert steps_in() == [6, 8, 10]


def test_a_folder_of_torchtitan_is_where_a_run_begins() -> None:
    source = train(4, titans(), folder="source")
    trainer = build(initial_load_path=f"{Path.cwd()}/outputs/source/step-4", initial_load_model_only=False)
    assert trainer.checkpointer.load()
    assert differences(everything(source) | {"random": 0}, everything(trainer) | {"random": 0}) == []
    trainer.close()


def test_where_every_step_is_damaged_nothing_begins_anew() -> None:
    train(2)
    for file in AIOCKPT.rglob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    trainer = build(4)
    with pytest.raises(aiockpt.NoValidCheckpointError):
        trainer.checkpointer.load()
    trainer.close()


def test_a_save_that_fails_is_told_by_the_next_one_and_at_the_end() -> None:
    trainer = build()
    assert not trainer.checkpointer.load()
    AIOCKPT.parent.mkdir(exist_ok=True)
    AIOCKPT.write_text("in the way")
    trainer.checkpointer.save(2)
    with pytest.raises(aiockpt.StorageError):
        trainer.checkpointer.maybe_wait_for_saving()
    trainer.checkpointer.save(4)
    assert trainer.checkpointer.save_future.exception() is not None
    trainer.checkpointer.save_future = None
    trainer.checkpointer.save(6)
    with pytest.raises(aiockpt.BackgroundSaveError, match="step 6"):
        trainer.close()


# ---------------------------------------------------------------------- other shapes of a model


def manager_of(parts: list[torch.nn.Module], patterns: list[str]) -> tuple[Any, Any]:
    """Return a manager of *parts* as of the stages of a pipeline, with a group of the optimizers for each pattern."""
    optimizer = config_registry.optimizer
    groups = [
        optimizer.ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.01, "fused": False})
        for pattern, name in zip(patterns, ["Adam", "AdamW"], strict=False)
    ]
    optimizers = optimizer.OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
        model_parts=parts
    )
    schedulers = optimizer.LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=9)
    manager = ours.AiockptManager.Config(enable=True, interval=1, folder="stages").build(
        dataloader=None,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(Path.cwd()),
    )
    return manager, optimizers


def stages(*names: str) -> list[torch.nn.Module]:
    """Return modules that have layers of one model: "ab" has its layers a and b."""
    parts = []
    for letters in names:
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleDict({letter: torch.nn.Linear(3, 3) for letter in letters})
        parts.append(part)
    return parts


@pytest.mark.parametrize("patterns", [[".*"], ["bias", ".*"]], ids=["one optimizer", "two kinds"])
def test_stages_of_a_pipeline_load_into_one_model_and_back(patterns: list[str]) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    parts = stages("ac", "b")
    manager, optimizers = manager_of(parts, patterns)
    for part in parts:
        layers: Any = part.layers
        torch.stack([layer(torch.ones(2, 3)).square().sum() for layer in layers.values()]).sum().backward()  # type: ignore[no-untyped-call]
    optimizers.step()
    manager.save(1)
    manager.close()
    saved = optimizers.state_dict()

    one = stages("abc")
    manager, optimizers = manager_of(one, patterns)
    assert manager.load()
    assert differences(saved, optimizers.state_dict()) == []
    assert torch.equal(one[0].layers["b"].weight, parts[1].layers["b"].weight)  # type: ignore[index, union-attr]
    manager.save(2)
    manager.close()

    parts = stages("a", "cb")
    manager, optimizers = manager_of(parts, patterns)
    assert manager.load()
    assert differences(saved, optimizers.state_dict()) == []
    manager.close()


def test_the_weights_are_called_as_those_of_the_module_that_is_not_fused() -> None:
    trainer = train(2)
    names = names_in(AIOCKPT)
    state = trainer.model_parts[0].state_dict()
    assert {name for name in names if name.startswith("model.")} == {f"model.{name}" for name in state}
    plain = {"model": {"norm": {"weight": torch.zeros(config_registry.WIDTH)}}}
    with aiockpt.Checkpointer(AIOCKPT, ranks=aiockpt.Ranks()) as ckpt:
        ckpt.load(plain, only=["model.norm"], strict=False).result()
    assert torch.equal(plain["model"]["norm"]["weight"], weights(trainer)["norm.weight"])


# ---------------------------------------------------------------------- upstream, and the page

UPSTREAM = {
    "torchtitan.components.checkpointer.base": "ce3a6ef8f1e5a6a4",
    "torchtitan.components.optimizer.utils": "ac70c7dbf8c0f42f",
    "torchtitan.components.dataloader": "be1d72585262f409",
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_what_is_relied_on_is_what_it_was_written_for(name: str) -> None:
    assert digest_of(name) == UPSTREAM[name]


def test_its_page_runs_as_it_stands() -> None:
    train(2)
    scope = {"config": titans(), "aiockpt": aiockpt}
    run_page("frameworks/torchtitan.md", scope)
    assert scope["config"].checkpoint.interval == 500
    assert scope["norm"].shape == (config_registry.WIDTH,)
    train(2, scope["config"], folder="as on the page", interval=2, last_save_model_only=False)
    assert steps_in("outputs/as on the page") == [2]
