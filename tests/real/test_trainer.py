"""Trainers of others, killed and resumed: each is the run that was never stopped wherever the Trainer's own resume is."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.integrations.huggingface import attach, runs
from tests.real import small

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("trl")

from tests.real.trainers import BATCH, EPOCHS, SAMPLES, SCRIPTS, be_one_rank, plain, result, zero_settings  # noqa: E402  needs what was looked for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

KILLS = ("last of an epoch", "first of an epoch", "middle of an epoch")
Result = dict[str, torch.Tensor]


class Killed(Exception):  # noqa: N818  as those of the interpreter are called
    """The process ends here."""


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends it when a step is saved, while its callbacks run."""

    def __init__(self, step: int, *, by_signal: bool = False) -> None:
        self.step, self.by_signal = step, by_signal

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
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


@pytest.fixture(autouse=True)
def _the_next_test_is_another_process() -> Iterator[None]:
    """No Trainer finds the engine of an earlier one, nor is it a rank because that was one."""
    from accelerate.state import AcceleratorState  # type: ignore[import-not-found]  # pyright: ignore

    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()


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


VARIANTS: dict[str, dict[str, Any]] = {
    "workers": {"dataloader_num_workers": 2},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "no seedable sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "ZeRO, no seedable sampler": {"accelerator_config": {"use_seedable_sampler": False}, "deepspeed": zero_settings(1)},
}


def fit(folder: Path, accumulation: int, *, switch: bool, kill: int = 0, resume: bool = False, **more: Any) -> Any:
    """Train the plain one to the kill, 0 for none, or to the end; return what it has trained, and its result."""
    runs._finished.clear()
    if "deepspeed" in more:
        be_one_rank()
    trainer = plain(folder, accumulation, **more)
    ckpt = attach(trainer, resume=True) if switch else None
    trainer.add_callback(Kill(abs(kill), by_signal=kill < 0))
    try:
        trainer.train(**({"resume_from_checkpoint": True} if resume and not switch else {}))
    except Killed:
        pass
    finally:
        if ckpt is not None:
            ckpt.close()
        gc.collect()
    return trainer.trained, result(trainer)


def resumed(first: Any, again: Any, expected: Any) -> dict[str, Any]:
    """Compare the run of two parts with the one that was never stopped."""
    wanted, got = Counter(expected[0]), Counter([*first[0], *again[0]])
    lost, twice = (wanted - got).total(), (got - wanted).total()
    same = [*first[0], *again[0]] == expected[0] and is_same(again[1], expected[1])
    return {"equal": same, "lost": lost, "twice": twice}


@pytest.mark.parametrize("size", [BATCH, 2 * BATCH], ids=["the same size", "another size"])
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_trainer_is_never_worse_than_without_us(
    variant: str, accumulation: int, kill: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more, epoch = VARIANTS[variant], SAMPLES // BATCH // accumulation
    step = epoch + {KILLS[0]: 0, KILLS[1]: 1, KILLS[2]: epoch // 2}[kill]
    expected = fit(tmp_path / "straight", accumulation, switch=False, **more)
    found = {}
    for by in (True, False):
        first = fit(tmp_path / str(by), accumulation, switch=by, kill=step, **more)
        other = {"per_device_train_batch_size": size}
        again = fit(tmp_path / str(by), accumulation, switch=by, resume=True, **more, **other)
        found["ours" if by else "alone"] = resumed(first, again, expected)
    small.compared[f"{variant}, accumulation {accumulation}, {kill}, batches of {size}"] = found
    ours, alone = found["ours"], found["alone"]
    assert ours["equal"] or not alone["equal"], "worse than the Trainer alone"
    assert ours["lost"] <= alone["lost"] and ours["twice"] <= alone["twice"], "worse than the Trainer alone"  # noqa: PT018
    reordered = variant != "workers" and kill != KILLS[0]
    expected_logs = {"batches have": size != BATCH, "in another order": reordered and size == BATCH}
    assert ours["equal"] == (not any(expected_logs.values()))
    for words, expects in expected_logs.items():
        if size == BATCH or words == "batches have":  # with another size both may be true
            assert caplog.text.count(words) == expects, words
    small.certified += 1


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
def test_a_trainer_killed_by_a_signal_goes_on(ours: bool, tmp_path: Path) -> None:
    trained, weights = fit(tmp_path / "straight", 1, switch=False)
    call = f"fit(Path({str(tmp_path / 'run')!r}), 1, switch={ours}, kill=-12)"
    assert small.status_of("tests.real.test_trainer", call) == -signal.SIGKILL
    again, found = fit(tmp_path / "run", 1, switch=ours, resume=True)
    same = trained[len(trained) - len(again) :] == again and is_same(found, weights)
    small.compared.setdefault("killed by SIGKILL, middle of an epoch", {})["ours" if ours else "alone"] = same
    assert same
    small.certified += ours


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
    from accelerate.state import AcceleratorState  # pyright: ignore

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
