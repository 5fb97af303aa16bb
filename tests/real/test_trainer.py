"""Trainers of others, killed and resumed: each is the run that was never stopped wherever the Trainer's own resume is."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.integrations.huggingface import attach, runs
from tests.real import small

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("trl")

from tests.real.trainers import BATCH, EPOCHS, SAMPLES, SCRIPTS, result  # noqa: E402  needs what was looked for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

KILLS = ("last of an epoch", "first of an epoch", "middle of an epoch")
Result = dict[str, torch.Tensor]


class Killed(Exception):  # noqa: N818  as those of the interpreter are called
    """The process ends here."""


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends it when a step is saved, while its callbacks run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def steps_of(trainer: Any) -> int:
    """Return how many steps an epoch has."""
    found: int = max(len(trainer.get_train_dataloader()) // trainer.args.gradient_accumulation_steps, 1)
    return found


def run(name: str, folder: Path, accumulation: int, *, switch: bool, kill: str = "", resume: bool = False) -> Result:
    """Train, up to the kill or to the end, as a process of its own would."""
    runs._finished.clear()
    save = {} if switch or kill or resume else {"save_strategy": "no"}
    trainer = SCRIPTS[name](folder, accumulation, **save)
    ckpt = attach(trainer, resume=True) if switch else None
    if kill:
        per_epoch = steps_of(trainer)
        trainer.add_callback(Kill(per_epoch + {KILLS[0]: 0, KILLS[1]: 1, KILLS[2]: per_epoch // 2}[kill]))
    try:
        trainer.train(**({"resume_from_checkpoint": True} if resume and not switch else {}))
    except Killed:
        return {}
    finally:
        if ckpt is not None:
            ckpt.close()
        gc.collect()
    return result(trainer)


@cache
def straight(name: str, folder: Path, accumulation: int) -> Result:
    return run(name, folder, accumulation, switch=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


def is_same(one: Result, other: Result) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_script_is_never_worse_than_without_us(name: str, accumulation: int, kill: str, root: Path) -> None:
    assert SAMPLES % (2 * BATCH) == 0
    assert EPOCHS == 2
    home = root / name
    home.mkdir(exist_ok=True)
    expected = straight(name, home / f"straight-{accumulation}", accumulation)
    same = {}
    for switch in (True, False):
        folder = home / f"{accumulation}-{kill.split()[0]}-{'ours' if switch else 'theirs'}"
        assert run(name, folder, accumulation, switch=switch, kill=kill) == {}
        same[switch] = is_same(run(name, folder, accumulation, switch=switch, resume=True), expected)
    small.compared[f"{name}, accumulation {accumulation}, {kill}"] = {"ours": same[True], "alone": same[False]}
    assert same[True] or not same[False], "worse than the Trainer alone"
    if not same[True]:
        pytest.xfail("another run after a resume, with and without")
    small.certified += 1


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 0), (0, 3)])
def test_the_stage_of_zero_may_change_at_a_resume(before: int, after: int, root: Path) -> None:
    from tests.real.trainers import zero

    SCRIPTS.setdefault("zero-0", zero(0))
    home = root / f"{before} to {after}"
    home.mkdir()
    expected = straight(f"zero-{before}", home / "straight", 1)
    assert run(f"zero-{before}", home / "run", 1, switch=True, kill=KILLS[2]) == {}
    found = run(f"zero-{after}", home / "run", 1, switch=True, resume=True)
    assert found.keys() == expected.keys()
    for name, one in found.items():  # stages sum in another order
        assert torch.allclose(one, expected[name], rtol=1e-5, atol=1e-5), name


def accelerated(folder: Path, stage: int, until: int, kill: int = 0) -> Result:
    """Train by a loop of accelerate's, with an engine of DeepSpeed in it, and return the weights."""
    from accelerate import Accelerator, DeepSpeedPlugin  # type: ignore[import-not-found]  # pyright: ignore
    from accelerate.state import AcceleratorState  # type: ignore[import-not-found]  # pyright: ignore

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    samples: Any = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=1.0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin if stage else None, project_dir=str(folder))
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
    if stage:
        plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    attach(accelerator)
    module, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state()
    while progress.step < until:
        for batch in loader:
            loss = module(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            accelerator.save_state(str(folder / f"at-{progress.step}"))
            if progress.step in (kill, until):
                break
        if progress.step == kill:
            break
    accelerator.end_training()
    found = accelerator.get_state_dict(module)
    return {name: one.detach().clone() for name, one in found.items()}


class Progress:
    """What a loop of accelerate's registers for checkpointing."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 3), (2, 3), (3, 0), (0, 2)])
def test_an_accelerator_with_deepspeed_goes_on_under_any_stage(before: int, after: int, tmp_path: Path) -> None:
    SCRIPTS["zero-1"](tmp_path / "x", 1)  # begins the process group
    expected = accelerated(tmp_path / "straight", before, 9)
    accelerated(tmp_path / "run", before, 9, kill=4)
    found = accelerated(tmp_path / "run", after, 9)
    for name, one in found.items():
        assert torch.allclose(one, expected[name], rtol=1e-5, atol=1e-5), name
        assert before != after or torch.equal(one, expected[name]), name
