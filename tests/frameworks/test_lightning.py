"""Lightning's own trainer with our callback: what it resumes, on one rank and on several, and each option."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import aiockpt
from aiockpt.integrations.indices import Indices
from aiockpt.prove import Proof, certify
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks import proving
from tests.frameworks.lit import train
from tests.frameworks.proving import TORCHRUN, digest_of, environment, output_of, prove
from tests.notebooks import Notebook, notebook

__all__ = ["notebook"]
PROGRAM = [sys.executable, "-m", "tests.frameworks.lit.train"]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)


def fit(*arguments: str) -> Any:
    """Return a trainer that has trained to the end."""
    return train.main(train.options(*arguments))


def program(*arguments: str, check: bool = True) -> str:
    """Run the program in processes of its own; return what it said."""
    return output_of(*PROGRAM, *arguments, check=check)


def steps_in(place: Path | str = "ckpt") -> list[int]:
    """Return the steps of a place, the oldest first."""
    return proving.steps_in(place)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the module's parameters and buffers."""
    return {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])] == []


# ---------------------------------------------------------------------- the same run


class TestContract(IntegrationSuite):
    ATTACHES = False
    PROGRAM = (*PROGRAM, "--every-steps=4")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", *PROGRAM[1:], "--ranks=2", "--strategy=ddp", "--every-steps=2")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        options = train.options(f"--dir={place}", "--every-steps=1", f"--max-steps={until}", "--epochs=-1")
        of_fit: Any = {} if step is None else {"ckpt_path": f"{place}/step-{step:08d}"}
        trainer = train.main(options, **of_fit)
        return int(min(trainer.lightning_module.logged))


def test_a_notebook_trains_and_resumes(notebook: Notebook) -> None:
    notebook.run(f"""
import os
os.chdir({str(Path.cwd())!r})
import torch
import aiockpt
from lightning import Fabric
from tests.frameworks.test_lightning import assert_equal, fit, steps_in, weights
alone = fit("--dir=alone", "--every-epochs=3")
fit("--every-steps=4", "--max-steps=10", "--epochs=-1")
""")
    notebook.run("assert_equal(weights(fit('--every-steps=4')), weights(alone))")
    notebook.run("assert fit('--dir=plugin', '--plugin=ours').global_step")
    notebook.run("""
async def in_a_coroutine():
    fit("--dir=other", "--every-steps=1", "--max-steps=2", "--epochs=-1")
await in_a_coroutine()
assert steps_in("other")
""")
    notebook.run("""
fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
state = {"model": model, "optimizer": optimizer}
with aiockpt.Checkpointer("fabric") as ckpt:
    for step in range(ckpt.resume(state), 3):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        ckpt.save(step, state)
    ckpt.wait()
    assert ckpt.resume(state) == 3
""")


async def test_a_coroutine_trains_and_resumes() -> None:
    fit("--every-steps=4", "--max-steps=4", "--epochs=-1")
    assert fit("--every-steps=4", "--max-steps=8", "--epochs=-1").global_step == 8


def test_killed_and_resumed_it_is_the_run_that_was_never_stopped() -> None:
    prove(*PROGRAM, "--every-epochs=1", seed=3)


@pytest.mark.parametrize("options", [["--every-steps=1"], ["--every-epochs=1"]], ids=["steps", "epochs"])
@pytest.mark.parametrize("loader", ["shuffled", "generator", "own", "stateful", "ours", "streamed", "two"])
def test_every_kind_of_loader_goes_on_with_the_very_next_batch(loader: str, options: list[str]) -> None:
    certify(lambda: fit("--loader", loader, *options), Proof(kills=2, seed=5)).check()


@pytest.mark.parametrize(
    "options",
    [
        ["--every-steps=3", "--snapshot=lazy"],
        ["--every-steps=2", "--accumulate=5"],
        ["--every-steps=3", "--max-steps=16", "--epochs=-1"],
        ["--every-epochs=1", "--max-steps=12", "--epochs=-1"],
        ["--every-steps=5", "--package=pytorch_lightning"],
    ],
    ids=" ".join,
)
def test_a_resumed_run_is_the_same_with(options: list[str]) -> None:
    if "--package=pytorch_lightning" in options:
        prove(*PROGRAM, *options, kills=1, seed=0)
    else:
        certify(lambda: fit(*options), Proof(kills=2, seed=2)).check()


def test_a_generator_that_cannot_be_saved_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.zeros(4))
    sampler = RandomSampler(data, generator=torch.Generator())
    sampler.dice = random.SystemRandom()  # type: ignore[attr-defined]
    indices = Indices.put_into(DataLoader(data, sampler=sampler))
    assert indices.own().keys() == indices.own().keys() == {"sampler.generator"}
    assert caplog.text.count("random generator sampler.dice of the training data cannot be saved") == 1
    indices.write_own({"sampler.generator": "of another kind"})
    assert "sampler.generator of the training data has no state in the checkpoint" in caplog.text


def numbers(*arguments: str) -> list[int]:
    """Train; return the numbers of the samples that were read."""
    return list(
        fit(
            "--accumulate=1", "--every-steps=5", "--val-every=4", "--norm=layer", *arguments
        ).train_dataloader.dataset.numbers
    )


@pytest.mark.parametrize("loader", ["shuffled", "generator", "in-order"])
@pytest.mark.parametrize("batch", [3, 6, 7, 12])
def test_with_another_batch_size_the_rest_of_the_epoch_is_the_rest(batch: int, loader: str) -> None:
    before = numbers("--epochs=1", "--max-steps=5", f"--loader={loader}")
    between = numbers("--epochs=1", "--max-steps=10", f"--batch={batch}", f"--loader={loader}")
    after = numbers("--epochs=1", f"--loader={loader}") if len(before + between) < 96 else []
    assert sorted(before + between + after) == list(range(96))


def test_data_that_have_grown_go_on_where_they_are_read_in_order_and_are_told_of_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = numbers("--epochs=1", "--max-steps=5", "--loader=in-order")
    assert before + numbers("--epochs=1", "--samples=120", "--loader=in-order") == list(range(120))
    numbers("--dir=other", "--epochs=1", "--max-steps=5")
    numbers("--dir=other", "--epochs=1", "--samples=120")
    assert "the data have 120 samples, and had 96" in caplog.text


LOOKS = ["--one-cycle", "--looks=setup", "--looks=setup-of-callback", "--looks=configure", "--looks=on-fit-start"]


@pytest.mark.parametrize("loader", ["shuffled", "stateful", "ours", "streamed"])
@pytest.mark.parametrize("looks", LOOKS)
def test_a_loader_that_is_looked_at_before_the_fit_goes_on(looks: str, loader: str) -> None:
    if loader == "streamed" and "one-cycle" in looks:
        pytest.skip("a loader without a length has no number of steps")
    certify(lambda: fit("--loader", loader, "--every-steps=3", "--epochs=2", looks), Proof(kills=2, seed=4)).check()


@pytest.mark.parametrize("finds", ["--finds=rate", "--finds=batch"])
def test_a_search_for_the_rate_or_the_batch_size_saves_nothing_and_the_run_goes_on(finds: str) -> None:
    straight = weights(fit("--dir", "straight", "--every-steps=3", "--epochs=2", "--datamodule", finds))
    fit("--every-steps=3", "--max-steps=7", "--no-last", "--epochs=2", "--datamodule", finds)
    assert steps_in() == [3, 6]
    assert_equal(straight, weights(fit("--every-steps=3", "--epochs=2", "--datamodule", finds)))


@pytest.mark.parametrize("saves", ["--every-steps=1", "--every-epochs=1"])
@pytest.mark.parametrize("changes", ["--changes=finetuning", "--changes=averaging", "--changes=accumulation"])
def test_a_callback_that_changes_optimizer_schedule_or_accumulation_goes_on(changes: str, saves: str) -> None:
    certify(lambda: fit(saves, "--epochs=4", "--norm=layer", changes), Proof(kills=3, seed=4)).check()


@pytest.mark.parametrize("saves", ["--every-steps=1", "--every-epochs=1"])
@pytest.mark.parametrize("changes", ["--changes=pruning", "--changes=pruning for good"])
def test_a_pruned_model_goes_on(changes: str, saves: str) -> None:
    certify(lambda: fit(saves, "--epochs=4", "--norm=layer", changes), Proof(kills=3, seed=4)).check()


def test_a_pruned_model_is_resumed_with_its_masks_and_validated() -> None:
    options = ["--every-epochs=1", "--norm=layer", "--changes=pruning"]
    straight = fit("--dir=straight", *options)
    before = weights(fit(*options, "--epochs=2"))
    again = fit(*options)
    assert_equal(weights(again), weights(straight))
    assert float((weights(again)["net.0.weight_mask"] == 0).float().mean()) > 0.5
    again.validate(again.lightning_module, again.val_dataloaders, ckpt_path="ckpt/step-00000012")
    assert_equal(weights(again), before)


@pytest.mark.parametrize("first", ["--max-steps=7", "--epochs=2"])
def test_a_run_that_came_to_its_end_goes_on_with_more_steps(first: str, caplog: pytest.LogCaptureFixture) -> None:
    straight = weights(fit("--dir", "straight", "--every-steps=6"))
    fit(first, "--every-steps=6")
    assert_equal(straight, weights(fit("--every-steps=6")))
    assert "nothing is left" not in caplog.text


RATE = lambda trainer: trainer.optimizers[0].param_groups[0]["lr"]  # noqa: E731
KEPT: dict[str, tuple[list[str], Any]] = {
    "a look at the loaders": (["--looks=setup", "--max-steps=7"], lambda trainer: trainer.current_epoch),
    "a look of another callback": (["--looks=setup-of-callback", "--max-steps=7"], RATE),
    "what was unfrozen": (
        ["--changes=finetuning", "--epochs=2"],
        lambda trainer: [len(group["params"]) for group in trainer.optimizers[0].param_groups],
    ),
    "averaged weights": (["--changes=averaging", "--norm=layer", "--epochs=2"], RATE),
    "a search for the rate": (["--finds=rate", "--datamodule", "--max-steps=7"], lambda trainer: trainer.current_epoch),
    "a finished run with more epochs": (["--epochs=2"], lambda trainer: (trainer.global_step, trainer.current_epoch)),
}


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
@pytest.mark.parametrize("row", KEPT)
def test_what_the_own_resume_of_lightning_keeps_is_kept(row: str, ours: bool) -> None:
    options, what = KEPT[row]
    by = ["--every-steps=1"] if ours else ["--every-steps=1", "--plugin=theirs"]
    of_fit: Any = {} if ours else {"ckpt_path": "last", "weights_only": False}
    lasting = [one for one in options if not one.startswith(("--max-steps", "--epochs"))]
    straight = fit("--dir=straight", *by, *lasting)
    fit(*by, *options)
    again = train.main(train.options(*by, *lasting), **of_fit)
    assert "on_load_checkpoint" in again.lightning_module.hooks
    assert what(again) == what(straight)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
def test_a_trainer_fits_twice_in_one_process(ours: bool) -> None:
    trainer = fit("--every-steps=3", "--epochs=1", *([] if ours else ["--plugin=theirs"]))
    assert trainer.global_step == 6
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)
    assert trainer.global_step == 12


@pytest.mark.parametrize("options", [["--max-steps=8"], ["--epochs=1"], ["--epochs=2", "--no-last"]], ids=" ".join)
@pytest.mark.parametrize("saves", ["--every-steps=4", "--every-steps=6", "--every-epochs=1"])
def test_a_fit_that_a_resume_leaves_nothing_to_train_says_so(
    saves: str, options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = fit(saves, *options)
    assert "nothing is left to do" not in caplog.text
    again = fit(saves, *options)
    assert caplog.text.count("nothing is left to do") == 1
    assert again.global_step == first.global_step
    assert_equal(weights(again), weights(first))


def test_a_fold_in_the_folder_of_a_finished_one_is_refused_with_the_line() -> None:
    fit("--every-steps=4", "--epochs=1")
    fold = ["--every-steps=4", "--epochs=2", "--same-process"]
    with pytest.raises(aiockpt.UsageError, match=r"AsyncCheckpoint\('ckpt/fold-2'\), or resume=False"):
        fit(*fold)
    assert fit(*fold, "--dir=ckpt/fold-2").global_step == 12
    assert train.main(train.options(*fold), ckpt_path="ckpt").global_step == 12
    assert fit(*fold, "--anew").current_epoch == 2


def test_a_fit_that_was_interrupted_goes_on_in_its_process() -> None:
    with pytest.raises(RuntimeError):
        fit("--every-steps=4", "--raise=RuntimeError")
    assert fit("--every-steps=4", "--max-steps=9", "--same-process").global_step == 9


BY_HAND = {
    **{kind: [5, 10, 12, 15, 20, 24] for kind in train.STANDS[:4]},
    "accumulates by hand": [3, 5, 6],
    "unseen in the data": [12, 24],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_where_steps_stand_still_batches_are_saved_and_go_on(kind: str) -> None:
    options = [f"--stands-still={kind}", "--every-steps=5", "--accumulate=1"]
    straight = fit("--dir=straight", *options, "--epochs=2")
    fit(*options, "--epochs=1")
    again = fit(*options, "--epochs=2")
    assert steps_in() == BY_HAND[kind]
    assert again.global_step == straight.global_step
    assert_equal(weights(again), weights(straight))


def test_a_fit_that_saved_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fit("--every-steps=50", "--epochs=1", "--no-last")
    assert caplog.text.count("nothing was saved in this fit") == 1
    fit("--every-steps=5", "--epochs=1", "--no-last")
    assert caplog.text.count("nothing was saved in this fit") == 1


def test_what_was_logged_last_goes_on_and_means_of_an_epoch_are_those_of_its_rest() -> None:
    options = ["--every-steps=4", "--epochs=2", "--means"]
    straight = fit("--dir=straight", *options)
    fit(*options, "--max-steps=8")
    again = fit(*options)
    assert_equal(weights(again), weights(straight))
    assert again.lightning_module.logged[8]["val_loss"] == straight.lightning_module.logged[8]["val_loss"]
    assert again.callback_metrics["train_loss_epoch"] != straight.callback_metrics["train_loss_epoch"]


# ---------------------------------------------------------------------- ranks


def test_two_ranks_are_killed_and_resumed() -> None:
    prove(*on_ranks(2, "fsdp2", "--every-steps=2"))


def on_ranks(count: int, strategy: str, *arguments: str) -> list[str]:
    torchrun = [*TORCHRUN, str(count), "-m", "tests.frameworks.lit.train"]
    return [*torchrun, f"--ranks={count}", f"--strategy={strategy}", *arguments]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_go_on_as_one_in_the_middle_of_an_epoch_and_one_as_two(strategy: str) -> None:
    output_of(*on_ranks(2, strategy, "--every-steps=1", "--max-steps=5"))
    with aiockpt.Checkpointer("ckpt", ranks=aiockpt.Ranks()) as ckpt:
        saved = ckpt.read(5, "model.net.0.weight").result()
        ckpt.copy(5, "five").result()
    trainer = fit("--dir=five", "--every-steps=1", "--max-steps=5", "--norm=layer")
    assert trainer.global_step == 5
    assert torch.equal(trainer.lightning_module.net[0].weight, saved)
    one = fit(
        "--every-steps=50", "--epochs=2", "--norm=layer"
    )  # two global batches of eight had been trained in the second epoch
    assert one.global_step == 5 + (12 - 8 + 1) // 2
    output_of(*on_ranks(2, strategy, "--every-steps=50", "--epochs=3"))
    assert steps_in()[-1] == one.global_step + 3


# ---------------------------------------------------------------------- options


def test_the_newest_stay_and_the_best_by_a_metric() -> None:
    trainer = fit("--every-steps=2", "--keep-last=2", "--monitor=val_loss", "--val-every=4")
    callback = trainer.checkpoint_callback
    with aiockpt.Checkpointer("ckpt") as ckpt:
        scores = {info.step: info.metrics.get("val_loss") for info in ckpt.steps().result()}
    best = int(callback.best_model_path[-8:])
    assert len(scores) in (2, 3)
    assert {best, 16, 18} == set(scores)
    assert float(callback.best_model_score) == pytest.approx(scores[best])
    assert callback.best_model_path == "ckpt/step-" + f"{best:08d}"


def test_what_was_the_best_is_known_after_a_resume() -> None:
    options = ["--every-steps=2", "--monitor=val_loss", "--keep-last=9", "--max-steps=10"]
    first, again = fit(*options).checkpoint_callback, fit(*options).checkpoint_callback
    assert first.best_model_path == again.best_model_path != ""


def test_of_equal_scores_the_best_is_the_oldest_after_a_resume_too() -> None:
    options = ["--every-steps=1", "--monitor=slot", "--rolling", "--keep-last=1"]
    first = fit(*options, "--max-steps=5").checkpoint_callback.best_model_path
    again = fit(*options, "--max-steps=5").checkpoint_callback.best_model_path
    later = fit(*options, "--max-steps=8").checkpoint_callback.best_model_path
    assert [first, again, later] == ["ckpt/step-00000001"] * 3
    assert steps_in() == [1, 8]


def test_the_best_is_of_this_run_and_not_of_one_before() -> None:
    options = ["--monitor=train_loss", "--keep-last=99"]
    best = fit("--every-steps=1", *options).checkpoint_callback.best_model_path
    with aiockpt.Checkpointer("ckpt") as ckpt:
        losses = {info.step: info.metrics["train_loss"] or 0.0 for info in ckpt.steps().result()}
    assert best == f"ckpt/step-{min(losses, key=losses.__getitem__):08d}" != "ckpt/step-00000001"
    before = {step: loss for step, loss in losses.items() if step < int(best[-8:])}
    path = str(Path(f"ckpt/step-{max(before):08d}").absolute())
    back = train.main(train.options("--every-steps=1", f"--max-steps={max(before)}", *options), ckpt_path=path)
    assert back.checkpoint_callback.best_model_path == f"ckpt/step-{min(before, key=before.__getitem__):08d}"
    anew = fit("--every-steps=1", "--max-steps=1", *options, "--anew").checkpoint_callback
    assert anew.best_model_path == "ckpt/step-00000001"


def test_a_step_is_named_by_its_folder_and_the_newest_by_nothing_or_by_the_place() -> None:
    straight = weights(fit("--dir=straight", "--every-steps=4"))
    fit("--every-steps=4", "--max-steps=10")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        saved = ckpt.read(4, "model.net.0.weight").result()
    trainer = train.main(train.options("--every-steps=4", "--max-steps=4"), ckpt_path="ckpt/step-00000004")
    assert torch.equal(trainer.lightning_module.net[0].weight, saved)
    assert trainer.ckpt_path.endswith("ckpt/step-00000004")
    assert_equal(straight, weights(train.main(train.options("--every-steps=4"), ckpt_path="ckpt")))
    assert_equal(
        straight, weights(train.main(train.options("--dir=other", "--every-steps=4"), ckpt_path="ckpt/step-00000008"))
    )
    assert steps_in("other") == [12, 16, 18]
    with pytest.raises(aiockpt.StepNotFoundError):
        train.main(train.options("--every-steps=4"), ckpt_path="ckpt/step-00000005")


@pytest.mark.parametrize("path", ["best", "ckpt/step-00000004"])
def test_a_checkpoint_is_validated(path: str) -> None:
    trainer = fit("--every-steps=4", "--monitor=val_loss", "--keep-last=9")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        step = int(trainer.checkpoint_callback.best_model_path[-8:]) if path == "best" else 4
        saved = ckpt.read(step, "model.net.0.weight").result()
    with torch.no_grad():
        trainer.lightning_module.net[0].weight.zero_()
    trainer.validate(trainer.lightning_module, trainer.val_dataloaders, ckpt_path=path)
    assert torch.equal(trainer.lightning_module.net[0].weight, saved)


def test_there_is_nothing_to_validate_in_an_empty_place() -> None:
    trainer = fit("--every-steps=4", "--max-steps=4", "--dir=full")
    trainer.checkpoint_callback.dir = "empty"
    with pytest.raises(aiockpt.StepNotFoundError, match="empty has no checkpoint"):
        trainer.validate(trainer.lightning_module, trainer.val_dataloaders, ckpt_path="empty")


def test_a_monitor_that_is_never_logged_ends_the_first_epoch_after_its_save(caplog: pytest.LogCaptureFixture) -> None:
    options = ["--every-steps=1", "--val-every=4", "--keep-last=9"]
    with pytest.raises(aiockpt.UsageError, match=r"monitor='val_los' was not logged.*train_loss, .*val_loss\. Correct"):
        fit(*options, "--monitor=val_los")
    assert steps_in() == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("monitor='val_los' was not logged so far") == 1  # although steps 2 to 6 lack it
    caplog.clear()
    assert fit(*options, "--monitor=val_loss").global_step == 18
    assert fit(*options, "--dir=epochs", "--means", "--monitor=train_loss_epoch").checkpoint_callback.best_model_path
    assert caplog.text.count("was not logged so far") == 1  # 'train_loss_epoch', until the first epoch has ended


def test_a_monitor_that_is_never_logged_is_a_warning_without_a_validation(caplog: pytest.LogCaptureFixture) -> None:
    fit("--every-steps=3", "--monitor=val_loss", "--no-validation")
    assert caplog.text.count("monitor='val_loss' was not logged so far") == 1


def test_a_score_that_is_no_number_is_not_the_best() -> None:
    trainer = fit("--every-steps=2", "--monitor=val_loss", "--max-steps=10")
    callback, best = trainer.checkpoint_callback, trainer.checkpoint_callback.best_model_path
    callback._scores = {1: float("nan"), **callback._scores}
    assert callback.best_model_path == best


def test_a_file_of_lightning_is_loaded_as_ever_and_saved_by_ours() -> None:
    straight = fit("--dir=straight", "--every-steps=4", "--max-steps=6")
    straight.save_checkpoint("theirs.ckpt", weights_only=False)
    trainer = train.main(train.options("--every-steps=4"), ckpt_path="theirs.ckpt", weights_only=False)
    assert trainer.global_step == 18
    assert steps_in()[-1] == 18
    with torch.no_grad():
        straight.lightning_module.net[0].weight.zero_()
    straight.save_checkpoint("zeros.ckpt", weights_only=False)
    there = train.main(train.options("--every-steps=4", "--max-steps=6"), ckpt_path="zeros.ckpt", weights_only=False)
    assert not there.lightning_module.net[0].weight.any()  # and not the newest of ours


def test_nothing_is_resumed_where_it_is_not_wanted() -> None:
    fit("--every-steps=4", "--max-steps=4")
    assert fit("--every-steps=2", "--max-steps=2", "--anew").global_step == 2
    assert steps_in() == [2, 4]
    asked = train.main(train.options("--every-steps=9", "--max-steps=2", "--anew"), ckpt_path="ckpt/step-00000004")
    assert asked.global_step == 4


def test_a_step_that_ends_an_epoch_too_is_saved_once() -> None:
    fit("--every-steps=6", "--every-epochs=1", "--epochs=2")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        assert [(info.step, info.generation) for info in ckpt.steps().result()] == [(12, 1), (6, 1)]


def test_the_end_is_not_saved_where_it_is_not_wanted() -> None:
    fit("--every-steps=4", "--max-steps=6", "--no-last")
    assert steps_in() == [4]


def test_a_fast_run_for_developers_neither_saves_nor_loads() -> None:
    fit("--every-steps=1", "--fast")
    assert not Path("ckpt").exists()


@pytest.mark.parametrize(
    ("options", "saved"),
    [(["--sigterm-at=7"], [7]), (["--sigterm-at=6"], [6]), (["--sigterm-at=7", "--sigterm-within"], [])],
    ids=["in an epoch", "after an epoch", "between the batches of a step"],
)
def test_sigterm_is_saved_where_it_came(options: list[str], saved: list[int]) -> None:
    with pytest.raises(BaseException, match="") as caught:
        fit("--every-steps=50", *options)
    assert type(caught.value).__name__ in ("SIGTERMException", "SystemExit")
    assert steps_in() == saved
    assert_equal(weights(fit("--dir=straight", "--every-steps=50")), weights(fit("--every-steps=50")))


@pytest.mark.parametrize("to", ["group", "workers"])
def test_sigterm_is_saved_where_it_reaches_the_workers_too(to: str) -> None:
    command = [*PROGRAM, "--every-epochs=9", "--sigterm-at=4", "--workers=2", f"--sigterm-to={to}"]
    done = subprocess.run(
        command, check=False, env=environment(), capture_output=True, text=True, timeout=250, process_group=0
    )
    assert steps_in() == [4], done.stderr


@pytest.mark.parametrize(("last", "saved"), [(33, [2]), (25, [])], ids=["between steps", "within a step"])
def test_sigterm_that_ends_a_fetch_is_saved_between_two_steps(last: int, saved: list[int]) -> None:
    program("--every-epochs=9", f"--last-sample={last}", check=False)
    assert steps_in() == saved


def test_a_save_that_failed_is_told() -> None:
    Path("ckpt").write_text("in the way")
    with pytest.raises(aiockpt.CheckpointError):
        fit("--every-steps=4")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_was_saved_before_an_error_is_committed(error: type[BaseException]) -> None:
    threads = threading.active_count()
    with pytest.raises((error, SystemExit)):
        fit("--every-steps=4", f"--raise={error.__name__}")
    assert threading.active_count() == threads
    assert steps_in() == [4, 8]


def test_the_trainer_has_its_own_methods_again() -> None:
    trainer = fit("--every-steps=9")
    assert not [name for name in vars(trainer.fit_loop) if name.startswith("on_")]
    assert not [name for name in vars(trainer.fit_loop.epoch_loop) if name.startswith("on_")]
    assert "resume_start" not in vars(trainer._checkpoint_connector)


def test_a_trainer_that_failed_has_its_own_methods_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = train.make_trainer

    def note(*given: Any) -> Any:
        made.append(make(*given))
        return made[0]

    monkeypatch.setattr(train, "make_trainer", note)
    with pytest.raises(RuntimeError):
        fit("--every-steps=4", "--raise=RuntimeError")
    assert not [name for name in vars(made[0].fit_loop) if name.startswith("on_")]


def test_averaged_weights_go_on() -> None:
    straight = fit("--dir=straight", "--every-steps=4", "--average")
    fit("--every-steps=4", "--average", "--max-steps=8")
    again = fit("--every-steps=4", "--average")
    assert_equal(weights(straight), weights(again))


def test_what_is_restored_by_lightning_has_no_second_set_of_the_weights() -> None:
    fit("--every-steps=4", "--max-steps=4")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        values: Any = ckpt.describe().result().values
        names = [tensor.name for tensor in ckpt.describe().result().tensors]
    assert "model.net.0.weight" in names
    assert "state_dict" not in values["lightning"]


def test_hyper_parameters_are_kept_and_those_for_pickle_are_text() -> None:
    fit("--every-steps=4", "--max-steps=4")
    fit("--every-steps=4", "--max-steps=4", "--plugin=ours", "--dir=plugin")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        state: dict[str, Any] = {"lightning": None}
        ckpt.load(state).result()
    for checkpoint in (state["lightning"], plug_in().load_checkpoint("plugin/last.ckpt")):
        kept = checkpoint["hyper_parameters"]
        assert (kept["width"], kept["layers"], kept["scale"]) == (32, [12, {"out": 1}], 0.5)
        assert kept["activation"] == repr(torch.nn.ReLU)
        assert kept["loss"].startswith("<function mse_loss")
        assert kept["metric"] == "<Metric.MEAN: 1>"


@pytest.mark.parametrize("average", [[], ["--average"]], ids=["trained", "averaged"])
@pytest.mark.parametrize("hook", [*train.HOOKS, "callback"])
def test_hooks_of_load_change_the_weights_as_by_lightning_alone(hook: str, average: list[str]) -> None:
    if hook == "current" and not average:
        pytest.skip("only averaging has a second set of weights")
    begun = []
    for by, of_fit in {"ours": {}, "theirs": {"ckpt_path": "last", "weights_only": False}}.items():
        options = [f"--dir={by}", "--every-steps=2", "--norm=layer", *average, *(["--plugin=theirs"] if of_fit else [])]
        trained = fit(*options, "--max-steps=4")
        again = train.main(train.options(*options, "--max-steps=5", f"--hook-of-load={hook}"), **of_fit)
        begun.append(again.lightning_module.begun)
        assert again.global_step == trained.global_step + 1 == 5
    assert_equal(*begun)


def test_a_hook_that_reads_states_of_optimizers_is_told_where() -> None:
    fit("--every-steps=4", "--max-steps=4")
    with pytest.raises(aiockpt.UsageError, match=r"on_train_start, or begin them anew by checkpoint\['lr_"):
        fit("--every-steps=4", "--max-steps=5", "--hook-of-load=read")


def test_what_a_callback_changes_in_a_sharded_model_stays() -> None:
    program("--strategy=fsdp2", "--every-steps=4", "--max-steps=4")
    program("--strategy=fsdp2", "--every-steps=5", "--max-steps=5", "--hook-of-load=callback")
    with aiockpt.Checkpointer("ckpt", ranks=aiockpt.Ranks()) as ckpt:
        before, after = (ckpt.read(step, "model.net.0.weight").result() for step in (4, 5))
    assert (after - before / 2).abs().max() < 0.02  # one step from the half of it


def test_the_hook_of_load_comes_before_the_optimizers_are_made() -> None:
    fit("--every-steps=4", "--max-steps=4")
    again = fit("--every-steps=4", "--max-steps=6")
    assert again.lightning_module.hooks == ["on_load_checkpoint", "configure_optimizers"]


def test_the_states_of_the_datamodule_and_of_the_precision_go_on() -> None:
    options = ["--every-steps=4", "--datamodule", "--counting-precision"]
    assert fit(*options, "--max-steps=8").datamodule.saves == 2
    again = fit(*options, "--max-steps=12")
    assert again.datamodule.saves == 3
    assert (again.precision_plugin.scale, again.precision_plugin.note) == (8, 3)


def test_the_position_of_a_loader_is_that_of_each_rank() -> None:
    fit("--every-steps=4", "--max-steps=4", "--loader=stateful")
    with aiockpt.Checkpointer("ckpt") as ckpt:
        values: Any = ckpt.describe().result().values
    assert "combined_loader" not in values["lightning"]["loops"]["fit_loop"]["state_dict"]


def test_a_place_where_every_step_is_damaged_does_not_begin_anew() -> None:
    fit("--every-steps=4", "--max-steps=4")
    for file in Path("ckpt").rglob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(aiockpt.NoValidCheckpointError):
        fit("--every-steps=4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps=0"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"retention": aiockpt.Retention(last=1), "keep_last": 2}, "retention="),
        ({"monitor": "loss", "mode": "minimum"}, "mode"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(aiockpt.UsageError, match=said):
        import_module("aiockpt.integrations.lightning").AsyncCheckpoint("ckpt", **options)


@pytest.mark.parametrize("loader", ["unwrapped", "unsized", "mixed"])
def test_loaders_that_cannot_go_on_are_refused(loader: str) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"aiockpt\.Loader|__len__"):
        fit("--loader", loader, "--every-steps=4")


def test_a_trainer_of_the_other_name_is_refused() -> None:
    said = program("--package=pytorch_lightning", "--imported-first=lightning.pytorch", "--every-steps=4", check=False)
    assert "write `import pytorch_lightning` before" in said


# ---------------------------------------------------------------------- the plug-in


def test_model_checkpoint_keeps_what_it_keeps_and_resumes_the_same_with_our_plug_in() -> None:
    ends = {}
    for plugin in ("theirs", "ours"):
        fit(f"--plugin={plugin}", f"--dir={plugin}", "--every-steps=2", "--max-steps=9")
        there = sorted(path.name for path in Path(plugin).iterdir())
        assert len(there) == 3
        again = train.main(
            train.options(f"--plugin={plugin}", f"--dir={plugin}", "--every-steps=2"),
            ckpt_path="last",
            weights_only=False,
        )
        ends[plugin] = (there, sorted(path.name for path in Path(plugin).iterdir()), weights(again))
    assert ends["ours"][:2] == ends["theirs"][:2]
    assert_equal(ends["ours"][2], ends["theirs"][2])
    assert all(path.is_dir() for path in Path("ours").iterdir())


def test_a_name_that_comes_again_while_its_old_checkpoint_is_still_to_go_holds_the_new_one() -> None:
    ends = {}
    for plugin in ("theirs", "ours"):
        trainer = fit(f"--plugin={plugin}", f"--dir={plugin}", "--rolling", "--every-steps=2", "--max-steps=12")
        ends[plugin] = [path.name for path in Path(plugin).iterdir()]
        assert Path(trainer.checkpoint_callback.best_model_path).name in ends[plugin]
    assert ends["ours"] == ends["theirs"]
    [name] = ends["ours"]
    assert plug_in().load_checkpoint(f"ours/{name}")["global_step"] == 12


SLOW = aiockpt.Limits(io=aiockpt.IO(bandwidth=4e6))


def plug_in(**options: Any) -> Any:
    return import_module("aiockpt.integrations.lightning").AiockptCheckpointIO(**options)


def test_a_removal_that_waits_leaves_what_was_saved_there_since() -> None:
    plugin = plug_in(limits=SLOW)
    plugin.save_checkpoint({"global_step": 1}, "a.ckpt")
    plugin.save_checkpoint({"global_step": 2, "weight": torch.zeros(1 << 20)}, "b.ckpt")  # takes a second
    plugin.remove_checkpoint("a.ckpt")
    plugin.save_checkpoint({"global_step": 3}, Path("a.ckpt").absolute())
    plugin.teardown()
    assert [steps_in("a.ckpt"), steps_in("b.ckpt")] == [[3], [2]]


def test_our_plug_in_saves_under_ddp() -> None:
    output_of(*on_ranks(2, "ddp", "--plugin=ours", "--every-steps=2", "--max-steps=5"))
    assert plug_in().load_checkpoint("ckpt/last.ckpt")["global_step"] == 4


def replace(plugin: Any) -> None:
    """Save a checkpoint, and delete the one before, as ``ModelCheckpoint`` does."""
    plugin.save_checkpoint({"global_step": 2, "weight": torch.zeros(3)}, "new.ckpt")
    plugin.remove_checkpoint("old.ckpt")
    plugin.teardown()


def test_an_old_checkpoint_stays_when_the_newer_one_fails() -> None:
    plug_in().save_checkpoint({"global_step": 1, "weight": torch.ones(3)}, "old.ckpt")
    plugin = plug_in(limits=SLOW)
    plugin.save_checkpoint({"global_step": 2, "weight": torch.zeros(4 << 20)}, "new.ckpt")  # takes seconds
    plugin.remove_checkpoint("old.ckpt")
    while not list(Path("new.ckpt").rglob("*.safetensors")):
        time.sleep(0.01)
    Path("new.ckpt").rename("aside")  # at once, where rmtree would meet what is being written
    Path("new.ckpt").write_text("in the way")
    with pytest.raises(aiockpt.BackgroundSaveError):
        plugin.teardown()
    assert torch.equal(plug_in().load_checkpoint("old.ckpt")["weight"], torch.ones(3))


def test_a_checkpoint_is_loaded_that_is_still_being_written_and_a_folder_has_one() -> None:
    plugin = plug_in(limits=SLOW)
    plugin.save_checkpoint({"global_step": 1, "weight": torch.zeros(3)}, "last.ckpt")
    plugin.save_checkpoint({"global_step": 2, "weight": torch.ones(1 << 20)}, "last.ckpt")
    assert plugin.load_checkpoint("last.ckpt")["global_step"] == 2
    plugin.teardown()
    assert steps_in("last.ckpt") == [2]


def test_an_old_checkpoint_goes_when_the_newer_one_is_committed() -> None:
    plugin = plug_in()
    plugin.save_checkpoint({"global_step": 1, "weight": torch.ones(3)}, "old.ckpt")
    replace(plugin)
    assert not Path("old.ckpt").exists()
    assert torch.equal(plugin.load_checkpoint("new.ckpt")["weight"], torch.zeros(3))


def test_the_plug_in_loads_files_of_lightning_and_refuses_what_it_cannot_do() -> None:
    torch.save({"epoch": 3}, "theirs.ckpt")
    assert plug_in().load_checkpoint("theirs.ckpt") == {"epoch": 3}
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plug_in().load_checkpoint("nowhere.ckpt")
    with pytest.raises(aiockpt.UsageError, match="storage_options"):
        plug_in().save_checkpoint({}, "one.ckpt", {"option": 1})
    threads = threading.active_count()
    with pytest.raises(aiockpt.UnsupportedStateError, match="activation"):
        plug_in().save_checkpoint({"activation": torch.nn.ReLU}, "one.ckpt")
    assert threading.active_count() == threads


# ---------------------------------------------------------------------- upstream, and the page

UPSTREAM = {
    "loops.fit_loop": "4d81b504ef676bee",
    "loops.training_epoch_loop": "03edaf990ff7f3a0",
    "loops.fetchers": "a0b6f80d7acf42f4",
    "loops.progress": "bd9064d12d0f0447",
    "trainer.connectors.checkpoint_connector": "0d23fa6105599764",
    "trainer.connectors.logger_connector.logger_connector": "5011375abd51a92a",
    "trainer.call": "e5d448f69a181079",
    "callbacks.finetuning": "e61d2b8ff69adff6",
    "callbacks.stochastic_weight_avg": "bb03342ad874816e",
    "utilities.combined_loader": "b598e43331c4f6e1",
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_what_is_relied_on_is_what_it_was_written_for(name: str) -> None:
    assert digest_of(f"lightning.pytorch.{name}") == UPSTREAM[name]


def test_its_page_runs_as_it_stands() -> None:
    package = import_module("lightning.pytorch")
    fit("--dir=runs/7", "--every-steps=4", "--monitor=val_loss", "--keep-last=3")
    import_module("aiockpt.integrations.lightning.callback")._finished.clear()
    arguments = train.options()
    module = train.make_module(package, arguments)
    data = TensorDataset(torch.randn(32, 12), torch.randn(32, 1))
    scope: dict[str, Any] = {
        "aiockpt": aiockpt,
        "model": module,
        "dataset": data,
        "train_loader": DataLoader(data, batch_size=8),
        "quiet": {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 4},
    }
    run_page("frameworks/lightning.md", scope)
