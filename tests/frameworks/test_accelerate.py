"""Loops of accelerate, continued as the same run, with the folders, hooks and settings that its users know."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import BackgroundSaveError, CheckpointError, CorruptionError, UsageError
from aiockpt.events import Event, SaveFailed
from aiockpt.integrations.huggingface import attach
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks.proving import TORCHRUN, digest_of, output_of, prove, steps_in
from tests.gates import Gate
from tests.notebooks import Notebook, notebook

accelerate: Any = pytest.importorskip("accelerate")
from tests.frameworks import published  # noqa: E402  it needs accelerate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

__all__ = ["notebook"]
HERE = Path(__file__).parent
SCRIPT = HERE / "accelerate_script.py"
KINDS = (
    "plain",
    "workers",
    "seedable",
    "stream",
    "dispatched",
    "stateful",
    "stateful stream",
    "two batches a step",
    "skips by itself",
    "named folders",
)
UPSTREAM = {
    "accelerate.accelerator:Accelerator.save_state": "5a5c62cbfb58ea77",
    "accelerate.accelerator:Accelerator.load_state": "05e3e0446edda6ff",
    "accelerate.accelerator:Accelerator.prepare_data_loader": "9abc7f4359cf0196",
    "accelerate.accelerator:Accelerator.skip_first_batches": "32b19b89c08ddec2",
    "accelerate.accelerator:Accelerator.end_training": "2a6e0e8b4f282616",
    "accelerate.accelerator:Accelerator._do_sync": "1d1d1041e2ec802d",
    "accelerate.checkpointing:save_accelerator_state": "e86f59e332f00f07",
    "accelerate.checkpointing:load_accelerator_state": "6ba6f2509ab6668c",
    "accelerate.data_loader:DataLoaderShard.__iter__": "77b896b76f3c73e9",
    "accelerate.data_loader:DataLoaderShard.set_epoch": "07cce703acb8d151",
    "accelerate.data_loader:DataLoaderDispatcher.__iter__": "7213231277a21320",
    "accelerate.data_loader:DataLoaderDispatcher._fetch_batches": "998a46bb72c62c0a",
    "accelerate.data_loader:DataLoaderAdapter.__init__": "e7b9d5a65fd5cc29",
    "accelerate.data_loader:DataLoaderStateMixin": "cc39942a3fffe3f5",
    "accelerate.data_loader:SeedableRandomSampler": "ef1f0df1cdfc4014",
    "accelerate.data_loader:SkipBatchSampler": "9040bbf0ebb1f6b9",
    "accelerate.data_loader:get_sampler": "52da96e5493ab62d",
    "accelerate.data_loader:skip_first_batches": "c3e05a215cb63cad",
}
"""What is replaced, and what calls it or is relied on, with the digests of their sources."""


OPEN: weakref.WeakSet[aiockpt.Checkpointer] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def one_accelerator_after_the_other() -> Iterator[None]:
    """Close what a test left open as well: the memory of each is kept until then, 11 GB over this file."""
    yield
    for ckpt in list(OPEN):
        with suppress(CheckpointError):
            ckpt.close()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make(folder: Path | None, kind: str = "plain", **named: Any) -> Any:
    from tests.frameworks.accelerate_script import Run

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return Run(folder, kind, **named)


def go_on(folder: Path, kind: str = "plain", *, at: Path | None = None, **named: Any) -> Any:
    """Return a run of a new start that has loaded what is newest, or the folder *at* which it is to begin."""
    run = attached(folder, kind, **named)
    run.accelerator.load_state(at)
    return run


def straight(folder: Path, kind: str = "plain") -> Any:
    """Return a run that nothing has stopped, and that is not ours."""
    run = make(folder, kind)
    run.loop(every=1000)
    return run


def attached(folder: Path, kind: str = "plain", **named: Any) -> Any:
    """Return a run of ours that has neither loaded nor trained."""
    run = make(folder, kind, **named)
    run.ckpt = attach(run.accelerator)
    OPEN.add(run.ckpt)
    return run


def trained(folder: Path, kind: str = "plain", stop: int | None = None, every: int = 3, **named: Any) -> Any:
    """Return a run of ours that has ended: after so many batches, or all of them."""
    run = attached(folder, kind, **named)
    run.loop(stop, every)
    run.accelerator.end_training()
    return run


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != "aiockpt")


def assert_same(found: Any, expected: Any) -> None:
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    assert found.losses == expected.losses[len(expected.losses) - len(found.losses) :]


# ------------------------------------------------------------------ the same run


class TestContract(IntegrationSuite):
    FIRST = 0
    PROGRAM = (sys.executable, str(SCRIPT), "out")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", str(SCRIPT), "out")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        project = place.parent / f"project of {place.name}"
        run = make(project)
        for one in (other, place):
            if one is not None:
                OPEN.add(attach(run.accelerator, one))
        run.accelerator.load_state(None if step is None else str(project / "checkpoints" / f"checkpoint_{step}"))
        begun_at = int(run.progress.batches)
        run.loop(until, 1)
        run.accelerator.end_training()
        return begun_at


def test_a_notebook_is_interrupted_and_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
from pathlib import Path
root = Path({str(tmp_path)!r})
from tests.frameworks.test_accelerate import assert_same, attached, go_on, straight
alone = straight(root / "alone")
run = attached(root / "ours")
train = run.train
def interrupted(*args, **named):
    if run.progress.batches == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return train(*args, **named)
run.train = interrupted
""")
    assert notebook.fail("run.loop(every=3)").startswith("KeyboardInterrupt")
    notebook.run("""
run = go_on(root / "ours")
run.loop(every=3)
run.accelerator.end_training()
assert_same(run, alone)
""")
    notebook.run("""
async def in_a_coroutine():
    run = go_on(root / "ours")
    run.save_and_end()
await in_a_coroutine()
""")


async def test_a_coroutine_trains_and_resumes(tmp_path: Path) -> None:
    trained(tmp_path, stop=4, every=2)
    assert go_on(tmp_path).progress.batches == 4


class WithOthers(accelerate.Accelerator):  # type: ignore[misc]
    """Methods with other arguments than accelerate's."""

    def load_state(self, input_dir: Any = None, **named: Any) -> Any:
        return super().load_state(input_dir, **named)

    def skip_first_batches(self, *, dataloader: Any, num_batches: int = 0) -> Any:
        return super().skip_first_batches(dataloader, num_batches)

    def end_training(self, *, message: str = "") -> str:
        super().end_training()
        return message


class Adding(accelerate.Accelerator):  # type: ignore[misc]
    """Saves and loads a file of its own beside accelerate's."""

    note = "none"

    def save_state(self, output_dir: Any = None, **named: Any) -> Any:
        folder = super().save_state(output_dir, **named)
        (Path(output_dir) / "note.txt").write_text(self.note)
        return folder

    def load_state(self, input_dir: Any = None, **named: Any) -> None:
        super().load_state(input_dir, **named)
        self.note = (Path(input_dir) / "note.txt").read_text()


class Instead(accelerate.Accelerator):  # type: ignore[misc]
    """Saves in a way of its own, without accelerate's."""

    def save_state(self, output_dir: Any = None, **named: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
def test_what_a_subclass_saves_and_loads_beside_is_kept(ours: bool, tmp_path: Path) -> None:
    weight = torch.zeros(1, 2)
    for note in ("first", "second"):
        accelerator, model = Adding(cpu=True), torch.nn.Linear(2, 1)
        model = accelerator.prepare(model)
        if ours:
            OPEN.add(attach(accelerator, tmp_path / "place"))
        if note == "second":
            accelerator.load_state(tmp_path / "first")
            assert accelerator.note == "first"
            assert torch.equal(model.weight, weight)
            accelerator.load_state(str(tmp_path / "first"))
        accelerator.note, weight = note, model.weight.detach().clone()
        accelerator.save_state(tmp_path / note)
        accelerator.end_training()
    assert (tmp_path / "second" / "note.txt").read_text() == "second"
    assert ours == (not (tmp_path / "second" / "model.safetensors").exists())


def test_methods_that_do_not_lead_to_accelerates_are_named_and_ours_take_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_a_class, of_the_object = Instead(cpu=True), accelerate.Accelerator(cpu=True)
    seen: list[Any] = []

    def wrap(method: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            seen.append(args)
            return method(*args, **named)

        return wrapped

    of_the_object.save_state = wrap(of_the_object.save_state)
    for number, accelerator in enumerate((of_a_class, of_the_object)):
        OPEN.add(attach(accelerator, tmp_path / f"place {number}"))
        accelerator.save_state(tmp_path / f"folder {number}")
        accelerator.end_training()
        assert steps_in(tmp_path / f"place {number}") == [0]
    assert "Instead.save_state: overridden without super()" in caplog.text
    assert "Accelerator.save_state: overridden without super(), or set on the object" in caplog.text
    of_the_object.save_state = wrap(of_the_object.save_state)
    of_the_object.save_state(tmp_path / "wrapped afterwards")
    of_the_object.end_training()
    assert (len(seen), steps_in(tmp_path / "place 1")) == (1, [0, 1])


def test_an_accelerator_that_is_attached_again_saves_to_the_new_place_alone(tmp_path: Path) -> None:
    run = attached(tmp_path)
    OPEN.add(attach(run.accelerator, tmp_path / "other"))
    run.loop(7, 3)
    run.accelerator.end_training()
    assert (steps_in(tmp_path / "aiockpt"), steps_in(tmp_path / "other")) == ([], [0, 1])
    again = make(tmp_path)
    OPEN.add(attach(again.accelerator, tmp_path / "other"))
    again.accelerator.load_state()
    again.loop()
    assert_same(again, straight(tmp_path / "straight"))


def test_a_method_may_have_a_signature_of_its_own(tmp_path: Path) -> None:
    accelerate.Accelerator(cpu=True).save_state(tmp_path / "theirs")
    accelerator = WithOthers(cpu=True)
    OPEN.add(attach(accelerator, tmp_path / "place"))
    accelerator.load_state(tmp_path / "theirs")
    loader: Any = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
    assert len(list(accelerator.skip_first_batches(dataloader=loader, num_batches=1))) == 3
    assert accelerator.end_training(message="done") == "done"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_killed_loop_goes_on_as_the_same_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prove(sys.executable, str(SCRIPT), str(tmp_path / "out"), kind)


@pytest.mark.parametrize("kind", ["dispatched", "two batches a step"])
def test_two_ranks_go_on_as_the_same_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prove(*TORCHRUN, "2", str(SCRIPT), str(tmp_path / "out"), kind)


OURS = ("stateful stream", "stateful", "skips by itself, seedable", "skips a stream by itself")
THEIRS = (
    "plain",
    "generator",
    "order of its own",
    "seedable",
    "stream",
    "stream of its own",
    "dispatched",
    "two batches a step",
    "skips by itself",
)


MAIN_ALONE = """
import sys, aiockpt
from tests.frameworks.accelerate_script import Run, attach

folder, kind, batches, how = sys.argv[1:]
run = Run(folder, kind, automatic_checkpoint_naming=False)
ckpt = attach(run.accelerator, **({"ranks": aiockpt.Ranks()} if how == "alone" else {}))
for _ in range(2):
    for batch in run.loader:
        run.train(batch)
        run.progress.batches += 1
        if how == "later" and run.progress.batches == 1:
            run.accelerator.save_state(f"{folder}/first")
        if run.progress.batches == int(batches) and run.accelerator.is_main_process:
            run.accelerator.save_state(f"{folder}/last")
run.accelerator.end_training()
if run.accelerator.is_main_process:
    print("ended with", [info.step for info in ckpt.steps().result()])
"""


def test_a_save_by_the_main_process_alone_may_be_made_by_it_alone(tmp_path: Path) -> None:
    """In the middle of an epoch, and at its last batch, after which ranks meet to begin the next one."""
    script = tmp_path / "script.py"
    script.write_text(MAIN_ALONE)
    for batches in ("2", "4"):
        out = tmp_path / f"after {batches}"
        said = output_of(*TORCHRUN, "2", str(script), str(out), "hook on the first rank", batches, "alone")
        assert "ended with [0]" in said


def test_a_later_save_by_the_main_process_alone_names_the_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN_ALONE)
    said = output_of(*TORCHRUN, "2", str(script), str(tmp_path / "out"), "named folders", "3", "later", check=False)
    assert "If save_state() was called on the main process alone: call it on every process" in said


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("kind", [*THEIRS, *OURS])
def test_it_goes_on_after_any_batch(kind: str, every: int, tmp_path: Path) -> None:
    """Of 7 batches an epoch: in the middle, before the last one, and after it."""
    expected = (trained if kind in OURS else straight)(tmp_path / "straight", kind)
    stops = (6, 7, 8, 12) if every == 1 else (7, 14)
    for stop in stops:
        trained(tmp_path / f"run {stop}", kind, stop=stop, every=every)
        again = go_on(tmp_path / f"run {stop}", kind)
        assert again.progress.batches == stop
        again.loop(every=every)
        assert again.progress.batches == 21
        assert again.loader.iteration == 3
        assert_same(again, expected)


def test_another_number_of_ranks_begins_the_epoch_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output_of(*TORCHRUN, "2", str(SCRIPT), str(tmp_path / "out"), "plain")
    again = go_on(tmp_path / "out")
    assert "saved by 2 ranks: the epoch begins anew" in caplog.text
    assert again.progress.batches > 0
    assert len(list(again.loader)) == 7
    again.save_and_end()
    output_of(*TORCHRUN, "2", str(SCRIPT), str(tmp_path / "out"), "plain")  # and back


def test_what_the_script_does_before_the_loop_goes_on_is_of_no_matter(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight")
    trained(tmp_path / "run", stop=9)
    again = go_on(tmp_path / "run")
    torch.manual_seed(99)
    again.loop()
    assert_same(again, expected)


@pytest.mark.parametrize("kind", ["plain", "seedable", "stream", "dispatched", "stateful", "stateful stream"])
def test_what_was_loaded_and_saved_again_is_gone_on_with(kind: str, tmp_path: Path) -> None:
    """A loop that has not begun since the load is saved as it was loaded; a seed of this start does not count."""
    expected = trained(tmp_path / "straight", kind)
    trained(tmp_path / "run", kind, stop=9)
    between = go_on(tmp_path / "run", kind)
    between.save_and_end()
    again = make(tmp_path / "run", kind)
    if kind == "seedable":
        again.loader.get_sampler().initial_seed = 99
    attach(again.accelerator)
    again.accelerator.load_state()
    again.loop(every=1000)
    assert again.progress.batches == 21
    assert_same(again, expected)


def test_a_load_forgets_the_loop_and_the_load_before(tmp_path: Path) -> None:
    run = attached(tmp_path)
    run.accelerator.save_state()
    run.loop(3)
    run.accelerator.load_state()
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    batches = iter(run.loader)
    assert len(list(batches)) == 7
    batches = iter(run.loader)
    next(batches)
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    run.save_and_end()
    assert len(list(go_on(tmp_path).loader)) == 7


def test_a_loop_that_was_broken_off_is_not_gone_on_with(tmp_path: Path) -> None:
    run = attached(tmp_path)
    run.loop(7, every=1000)  # leaves its loop after the last batch
    run.save_and_end()
    again = go_on(tmp_path)
    assert len(list(again.loader)) == 7


def test_a_loader_that_was_prepared_later_is_known_too(tmp_path: Path) -> None:
    from tests.frameworks.accelerate_script import Rows

    def prepared(load: bool) -> tuple[Any, Any]:
        run = attached(tmp_path)
        later = run.accelerator.prepare(torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True))
        if load:
            run.accelerator.load_state()
        return run, later

    run, later = prepared(load=False)
    batches = iter(later)
    next(batches)
    run.save_and_end()
    rest = list(batches)
    _, again = prepared(load=True)
    found = list(again)
    assert len(found) == len(rest) == 12
    assert all(torch.equal(one, other) for one, other in zip(found, rest, strict=True))


def test_batches_read_in_an_unseen_way_are_refused(tmp_path: Path) -> None:
    run = attached(tmp_path)
    batches = iter(accelerate.data_loader.DataLoaderShard(run.loader.dataset, batch_size=4))
    next(batches)
    with pytest.raises(UsageError, match=r"accelerator\.prepare\(…\), or accelerator\.skip_first_batches"):
        run.accelerator.save_state()


# ------------------------------------------------------------------ the habits of scripts


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("killed", [8, 11, 14])
@pytest.mark.parametrize("script", published.SCRIPTS)
def test_a_published_script_goes_on_as_the_run_that_was_never_stopped(
    script: str, killed: int, accumulate: int
) -> None:
    """Killed at the first, a middle and the last batch of its second epoch; whether it skips, and how, is of no matter."""
    found = published.certify(published.Variant(script, killed, accumulate, seedable=killed == 11))
    assert not found["worse"]
    assert found["aiockpt"]["lost"] == found["aiockpt"]["twice"] == 0
    # What draws random numbers at the end of an epoch is not done again: so two of them go on with other ones.
    assert found["aiockpt"]["equal"] or (killed == 14 and script in ("complete_nlp", "checkpointing"))


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
def test_a_published_script_killed_by_a_signal_goes_on(ours: bool, tmp_path: Path) -> None:
    variant = published.Variant("complete_nlp", 11)
    straight = published.run(tmp_path / "straight", variant, ours=False, stop=None)
    call = f"run(Path({str(tmp_path / 'run')!r}), Variant('complete_nlp', 11), ours={ours}, stop=11)"
    script = f"from tests.frameworks.published import *\n{call}"
    told = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PUBLISHED_SIGKILL": "1"})
    assert told.returncode == -signal.SIGKILL
    there = max((int(one.name[5:]) for one in (tmp_path / "run").glob("step_*")), default=0)
    assert there
    again = published.run(tmp_path / "run", variant, ours=ours, stop=None, resume=f"step_{there}")
    same = straight.trained[there:] == again.trained
    assert same == ours  # accelerate alone goes on in another order
    weights = zip(straight.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert not ours or all(torch.equal(one, other) for one, other in weights)


@pytest.mark.parametrize("killed", [8, 11, 14])
@pytest.mark.parametrize("script", published.SCRIPTS)
def test_with_another_batch_size_the_rest_of_the_epoch_is_the_rest(
    script: str, killed: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = published.certify(published.Variant(script, killed, other_size=True))
    assert not found["worse"]
    assert found["aiockpt"]["twice"] == 0
    # Scripts of diffusers end at a number of steps.
    assert found["aiockpt"]["lost"] == 0 or script in ("unconditional", "text_to_image", "lora") or killed == 14
    assert caplog.text.count("batches have 7 samples, and had 4 when the checkpoint was made") == 1


@pytest.mark.parametrize("trains", [True, False])
def test_between_epochs_another_batch_size_of_training_is_told(
    trains: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = attached(tmp_path)
    for batch in run.loader:
        run.train(batch) if trains else run.model(batch)
    run.save_and_end()
    assert len(list(go_on(tmp_path, batch_size=5).loader)) == 6
    assert caplog.text.count("batches have 5 samples, and had 4") == trains


def by_hand(run: Any, stop: int | None = None, *, fetch: int = 1, epochs: int = 2) -> list[Any]:
    """Train from the place that the run itself keeps (its registered progress), and skip up to there by hand; *fetch*
    batches are taken for each step. Return what was trained."""
    trained: list[Any] = []
    first, passed = divmod(max(run.progress.batches - 1, 0), 7)
    for epoch in range(first, epochs):
        batches = iter(run.loader)
        for step, batch in enumerate(batches):
            if run.progress.batches and fetch == 1 and epoch == first and step <= passed:
                continue
            for one in [batch, *itertools.islice(batches, fetch - 1)]:
                run.train(one)
                run.progress.batches += 1
                trained.append(one)
            if stop is not None:
                run.accelerator.save_state()
            if run.progress.batches == stop:
                return trained
    return trained


@pytest.mark.parametrize("kind", ["plain", "seedable", "stream", "dispatched", "stateful stream", "generator"])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_whole_epoch_too_may_be_skipped_by_hand(stop: int, kind: str, tmp_path: Path) -> None:
    expected = by_hand(make(tmp_path, kind))
    first = attached(tmp_path, kind)
    by_hand(first, stop)
    first.accelerator.end_training()
    again = go_on(tmp_path, kind)
    rest = by_hand(again)
    assert len(rest) == 14 - stop
    assert all(torch.equal(one, other) for one, other in zip(rest, expected[stop:], strict=True))
    assert again.loader.iteration == 2


@pytest.mark.parametrize("kind", ["plain", "stream", "stateful stream", "stateful stream of its own"])
def test_a_whole_epoch_may_be_skipped_by_the_way_of_accelerate(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.frameworks.accelerate_script import KINDS, OwnStream, StatefulStream

    both = type("Both", (StatefulStream, OwnStream), {})
    monkeypatch.setitem(KINDS, "stateful stream of its own", (KINDS["stateful stream"][0], both, {}))
    expected = trained(tmp_path / "straight", kind)
    trained(tmp_path / "run", kind, stop=7, every=7)
    again = go_on(tmp_path / "run", kind)
    assert not list(again.accelerator.skip_first_batches(again.loader, 7))
    again.loop()
    assert again.progress.batches == 21
    assert_same(again, expected)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_loop_that_collects_batches_for_each_step_is_not_taken_for_one_that_skips(stop: int, tmp_path: Path) -> None:
    expected = by_hand(make(tmp_path), fetch=2, epochs=1)
    first = attached(tmp_path)
    by_hand(first, stop, fetch=2)
    first.accelerator.end_training()
    rest = by_hand(go_on(tmp_path), fetch=2, epochs=1)
    assert all(torch.equal(one, other) for one, other in zip(rest, expected[stop:], strict=True))


def test_a_batch_that_was_looked_at_and_dropped_is_not_given_again(tmp_path: Path) -> None:
    trained(tmp_path, stop=3)
    again = go_on(tmp_path)
    batches = iter(again.loader)
    again.model(next(batches))  # and no gradient: it was no number, say
    assert len(list(batches)) == 3
    assert not again.model._forward_pre_hooks


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        (lambda run: run.loader, "no skipping"),
        (lambda run: run.accelerator.skip_first_batches(run.loader, 3), "skip_first_batches"),
        (lambda run: accelerate.skip_first_batches(run.loader, 3), "skip_first_batches"),
    ],
)
def test_how_a_script_skips_is_logged_once(
    skip: Callable[[Any], Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiockpt")
    trained(tmp_path, stop=3)
    again = go_on(tmp_path)
    for batch in skip(again):
        again.train(batch)
    for batch in again.loader:
        again.train(batch)
    told = [record.getMessage() for record in caplog.records if "skipping seen" in record.getMessage()]
    assert [one.rpartition(": ")[2] for one in told] == [said]


def test_a_script_that_skips_another_number_of_batches_is_told_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, stop=3)
    again = go_on(tmp_path)
    assert len(list(again.accelerator.skip_first_batches(again.loader, 5))) == 2
    assert "skip_first_batches(…, 5): 3 batches of this epoch were trained" in caplog.text


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_that_have_grown_are_told_with_both_numbers_where_the_order_is_another_one(
    shuffle: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def started(count: int) -> Any:
        run = make(tmp_path)
        run.accelerator._dataloaders.clear()
        rows: Any = torch.arange(count)
        run.loader = run.accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=shuffle))
        attach(run.accelerator)
        return run

    run = started(26)
    batches = iter(run.loader)
    next(batches)
    run.save_and_end()
    again = started(30)
    again.accelerator.load_state()
    rest = torch.cat(list(again.loader)).tolist()
    assert len(rest) == 26
    assert ("the data have 30 samples, and had 26" in caplog.text) == shuffle
    assert shuffle or rest == list(range(4, 30))


def trained_samples(run: Any) -> int:
    return sum(len(batch) for batch in run.loader if run.train(batch) is None)


@pytest.mark.parametrize("kind", ["stream", "dispatched"])
def test_a_stream_goes_on_at_whole_batches_of_the_new_size_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, kind, stop=3)
    again = go_on(tmp_path, kind, batch_size=5)
    assert trained_samples(again) == 16
    assert "batches have 5 samples, and had 4 when 12 samples of this epoch were trained" in caplog.text


def test_another_size_and_then_the_same_again_go_on_in_the_same_epoch(tmp_path: Path) -> None:
    first = attached(tmp_path)
    batches = iter(first.loader)
    seen = [next(batches) for _ in range(3) if first.train(torch.ones(1, 4)) is None]
    first.save_and_end()
    for _ in range(2):
        again = go_on(tmp_path, batch_size=5)
        batches = iter(again.loader)
        seen.append(next(batches))
        again.train(seen[-1])
        again.save_and_end()
    assert len({tuple(row) for row in torch.cat(seen).tolist()}) == 22
    again = go_on(tmp_path, batch_size=5)
    assert trained_samples(again) == 4


def test_gradients_between_the_batches_of_a_step_are_kept(tmp_path: Path) -> None:
    run = trained(tmp_path, "two batches a step", stop=3)
    gradients = [one.grad.clone() for one in run.model.parameters()]
    again = go_on(tmp_path, "two batches a step")
    assert all(torch.equal(one.grad, other) for one, other in zip(again.model.parameters(), gradients, strict=True))
    assert again.accelerator.step == 3
    assert not again.accelerator.sync_gradients


def test_gradients_that_a_step_has_used_and_those_that_are_none_are_not_kept(tmp_path: Path) -> None:
    def frozen() -> Any:
        run = make(tmp_path, "two batches a step")
        run.model[0].bias.requires_grad_(False)
        return run

    run = frozen()
    ckpt = attach(run.accelerator)
    run.accelerator.backward(run.model(torch.ones(4, 4)).sum())
    run.accelerator.save_state()
    ckpt.wait()
    assert not any("gradients" in tensor.name for tensor in ckpt.describe(0).result().tensors)
    run.optimizer.zero_grad()
    run.train(torch.ones(4, 4))
    run.save_and_end()
    again = frozen()
    attach(again.accelerator)
    again.accelerator.load_state()
    without = {name for name, one in again.model.named_parameters() if one.grad is None}
    assert without == {"0.bias"}
    assert torch.equal(again.model[2].bias.grad, run.model[2].bias.grad)


def test_gradients_from_before_a_load_are_dropped(tmp_path: Path) -> None:
    run = attached(tmp_path, "two batches a step")
    run.accelerator.save_state()
    run.train(torch.ones(4, 4))
    assert run.model[0].weight.grad is not None
    run.accelerator.load_state()
    run.accelerator.end_training()
    assert all(one.grad is None for one in run.model.parameters())


def test_a_loader_that_was_freed_is_let_go(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    run.loop(3)
    gone, run.loader = weakref.ref(run.loader), None
    run.accelerator.free_memory()
    run.save_and_end(tmp_path / "later")
    gc.collect()
    assert gone() is None


def test_gradients_of_fsdp_are_not_kept_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = attached(tmp_path, "two batches a step")
    run.loop(1, every=9)
    monkeypatch.setattr(run.accelerator.state, "distributed_type", accelerate.DistributedType.FSDP)
    run.save_and_end()
    assert "not saved under FSDP" in caplog.text
    assert all(one.grad is None for one in go_on(tmp_path, "two batches a step").model.parameters())


def test_the_scale_of_the_loss_goes_on_and_begins_anew_where_none_was_saved(tmp_path: Path) -> None:
    def scaled(scale: float | None) -> Any:
        run = make(tmp_path)
        run.accelerator.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        attach(run.accelerator)
        return run

    for saved, expected in ((8.0, 8.0), (None, 2.0)):
        run = scaled(saved)
        run.accelerator.load_state()
        run.save_and_end()
        again = scaled(2.0)
        again.accelerator.load_state()
        assert again.accelerator.scaler.get_scale() == expected


# ------------------------------------------------------------------ folders


def test_folders_are_named_and_limited_as_accelerate_does(tmp_path: Path) -> None:
    run = trained(tmp_path, total_limit=2)
    assert folders(tmp_path / "checkpoints") == ["checkpoint_5", "checkpoint_6"]
    assert [info.step for info in run.ckpt.steps().result()] == [6, 5]
    assert json.loads((tmp_path / "checkpoints" / "checkpoint_6" / "aiockpt.json").read_text())["step"] == 6
    assert run.accelerator.project_configuration.iteration == 7


@pytest.mark.parametrize(("limit", "stay"), [(2, [3, 2]), (0, [3])])
def test_the_limit_holds_for_folders_of_an_earlier_start_and_the_newest_stays(
    limit: int, stay: list[int], tmp_path: Path
) -> None:
    trained(tmp_path, stop=9)
    again = go_on(tmp_path, total_limit=limit)
    again.save_and_end()
    assert [info.step for info in again.ckpt.steps().result()] == stay
    assert folders(tmp_path / "checkpoints") == [f"checkpoint_{step}" for step in reversed(stay)]


def test_a_step_that_a_rule_of_the_checkpointer_has_deleted_is_no_reason_to_fail(tmp_path: Path) -> None:
    run = make(tmp_path, total_limit=2)
    ckpt = attach(run.accelerator, retention=aiockpt.Retention(last=1))
    run.loop(12)
    run.accelerator.end_training()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert [info.step for info in ckpt.steps().result()] == [3]


def test_a_run_that_went_back_keeps_what_it_saved_last(tmp_path: Path) -> None:
    trained(tmp_path, stop=9)
    again = go_on(tmp_path, total_limit=1, at=tmp_path / "checkpoints" / "checkpoint_0")
    assert again.accelerator.save_state().name == "checkpoint_1"
    again.accelerator.end_training()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_1"]
    again.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert again.progress.batches == 3


def test_the_limit_holds_for_relative_folders_and_for_more_than_were_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Path("run"), stop=12, every=1, total_limit=12)
    again = go_on(Path("run"), total_limit=2)
    assert again.accelerator.save_state() == Path("run/checkpoints/checkpoint_12")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again.ckpt.wait()
    again.train(torch.ones(4, 4))
    monkeypatch.chdir(tmp_path)
    again.accelerator.end_training()
    assert [info.step for info in again.ckpt.steps().result()] == [12, 11]
    assert folders(tmp_path / "run" / "checkpoints") == ["checkpoint_11", "checkpoint_12"]


def test_the_old_step_of_a_folder_goes_although_many_were_saved_since(tmp_path: Path) -> None:
    trained(tmp_path, "named folders", stop=10, every=1)
    again = attached(tmp_path, "named folders")
    again.save_and_end(tmp_path / "step_1")
    assert [info.step for info in again.ckpt.steps().result()] == list(range(10, 0, -1))


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_limit_keeps_the_newest_also_after_a_copy_that_changed_times(is_elsewhere: bool, tmp_path: Path) -> None:
    trained(tmp_path, stop=9)
    for number in range(3):
        mark = tmp_path / "checkpoints" / f"checkpoint_{number}" / "aiockpt.json"
        os.utime(mark, (4e9 - number, 4e9 - number))  # from front to back
    again = make(tmp_path, total_limit=2)
    ckpt = attach(again.accelerator, tmp_path / "other" if is_elsewhere else None)
    OPEN.add(ckpt)
    if is_elsewhere:
        again.accelerator.project_configuration.iteration = 3
    else:
        again.accelerator.load_state()
    again.save_and_end()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert [info.step for info in ckpt.steps().result()] == ([0] if is_elsewhere else [3, 2])


def test_a_run_that_went_back_leaves_the_folders_of_later_steps(tmp_path: Path) -> None:
    first = attached(tmp_path, "named folders")
    for epoch in range(5):
        first.progress.batches = epoch
        first.save_and_end(tmp_path / f"epoch_{epoch}")
    again = go_on(tmp_path, "named folders", at=tmp_path / "epoch_1")
    for number, name in enumerate(("other_2", "other_3", "epoch_4"), 10):
        again.progress.batches = number
        again.save_and_end(tmp_path / name)
    found = {}
    for name in folders(tmp_path):
        again.accelerator.load_state(tmp_path / name)
        found[name] = again.progress.batches
    assert found == {
        "epoch_0": 0,
        "epoch_1": 1,
        "epoch_2": 2,
        "epoch_3": 3,
        "epoch_4": 12,
        "other_2": 10,
        "other_3": 11,
    }
    assert [info.step for info in again.ckpt.steps().result()] == [7, 6, 5, 3, 2, 1, 0]  # 4 went with its folder
    assert go_on(tmp_path, "named folders").progress.batches == 12


def test_the_number_of_the_next_folder_is_gone_on_with(tmp_path: Path) -> None:
    trained(tmp_path, stop=6)
    again = go_on(tmp_path)
    assert again.accelerator.project_configuration.iteration == 2
    fresh = attached(tmp_path)
    with pytest.raises(ValueError, match="resume from it by load_state"):
        fresh.accelerator.save_state()
    fresh.accelerator.project_configuration.iteration = 7
    fresh.save_and_end()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_7"]


def test_a_folder_that_is_named_is_loaded(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight")
    trained(tmp_path / "run", "named folders")
    assert folders(tmp_path / "run") == sorted(f"step_{number}" for number in range(3, 22, 3))
    again = go_on(tmp_path / "run", "named folders", at=tmp_path / "run" / "step_9")
    assert again.progress.batches == 9
    again.loop()
    assert_same(again, expected)
    with pytest.raises(ValueError, match="does not exist"):
        again.accelerator.load_state(tmp_path / "none")


def test_a_folder_of_another_run_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    for name in ("one", "other"):
        run = trained(tmp_path / name, "named folders", stop=3)
    with pytest.raises(UsageError, match="step_3 has no weights of its own"):
        run.accelerator.load_state(tmp_path / "one" / "step_3")
    trained(tmp_path / "longer", "named folders", stop=6)
    with pytest.raises(UsageError, match="step_6 has no weights of its own"):  # no step of this number is there
        run.accelerator.load_state(tmp_path / "longer" / "step_6")
    (tmp_path / "empty").mkdir()
    for cut in (None, '{"step": 0', '{"step": 0}', "[]"):
        if cut is not None:
            (tmp_path / "empty" / "aiockpt.json").write_text(cut)
        with pytest.raises(UsageError, match="was made neither"):
            run.accelerator.load_state(tmp_path / "empty")


def test_a_folder_that_is_saved_to_again_has_the_newer_step_alone(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    for _ in range(3):
        assert run.accelerator.save_state(tmp_path / "last") == tmp_path / "last"
        run.ckpt.wait()
    run.accelerator.end_training()
    assert [info.step for info in run.ckpt.steps().result()] == [2]
    assert json.loads((tmp_path / "last" / "aiockpt.json").read_text())["step"] == 2


def test_a_folder_may_be_saved_to_again_before_the_first_save_is_committed(tmp_path: Path) -> None:
    run = make(tmp_path, "named folders")
    run.accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: (Path(folder) / f"hook_{run.progress.batches}").touch()
    )
    gate = Gate(LocalBackend(str(tmp_path / "aiockpt")), "put_new", "*/MANIFEST-1.json")
    ckpt = attach(run.accelerator, gate)
    OPEN.add(ckpt)
    for run.progress.batches in (1, 2):
        run.accelerator.save_state(tmp_path / "latest")
    assert folders(tmp_path) == [".latest.0.aiockpt", ".latest.1.aiockpt"]
    gate.open_up()
    ckpt.wait()
    run.train(torch.ones(4, 4))
    assert folders(tmp_path) == ["latest"]
    assert sorted(path.name for path in (tmp_path / "latest").iterdir()) == ["aiockpt.json", "hook_1", "hook_2"]
    run.accelerator.load_state(tmp_path / "latest")
    assert run.progress.batches == 2
    run.accelerator.end_training()
    assert [info.step for info in ckpt.steps().result()] == [1]


def test_of_two_saves_to_a_folder_that_a_kill_left_the_newer_one_appears(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    for run.progress.batches in (1, 2):
        run.accelerator.save_state(tmp_path / "latest")
        run.ckpt.wait()
        run.train(torch.ones(4, 4))
        shutil.copytree(tmp_path / "latest", tmp_path / f"kept {run.progress.batches - 1}")
    shutil.rmtree(tmp_path / "latest")
    for step in (0, 1):
        (tmp_path / f"kept {step}").rename(tmp_path / f".latest.{step}.aiockpt")
    again = attached(tmp_path, "named folders")
    assert folders(tmp_path) == ["latest"]
    again.accelerator.load_state(tmp_path / "latest")
    assert again.progress.batches == 2


def test_a_folder_that_was_removed_before_its_step_was_committed_does_not_appear(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    run.accelerator.save_state(tmp_path / "step_1")
    shutil.rmtree(tmp_path / ".step_1.0.aiockpt")
    run.accelerator.end_training()
    assert folders(tmp_path) == []
    assert steps_in(tmp_path / "aiockpt") == [0]


def test_the_mark_of_a_folder_is_flushed_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def note(file: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{file}").readlink().as_posix())
        fsync(file)

    run = attached(tmp_path, "named folders")
    monkeypatch.setattr(os, "fsync", note)
    run.save_and_end(tmp_path / "step_1")
    assert str(tmp_path / ".step_1.0.aiockpt" / ".aiockpt.json.new") in flushed


def test_what_is_written_into_a_folder_meanwhile_stays(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("of the user")
    run.save_and_end(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "of the user"
    assert (tmp_path / "mine" / "aiockpt.json").exists()


@pytest.mark.parametrize("ours", [False, True])
def test_files_of_the_user_stay_in_a_folder_that_is_saved_to_again(ours: bool, tmp_path: Path) -> None:
    run, last = make(tmp_path, "named folders"), tmp_path / "last"
    written = last / "unet"

    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "unet").mkdir(exist_ok=True)
        (Path(folder) / "unet" / "of_the_hook.txt").write_text(str(run.progress.batches))

    run.accelerator.register_save_state_pre_hook(write)
    if ours:
        OPEN.add(attach(run.accelerator))
    written.mkdir(parents=True)
    (written / "once.txt").touch()
    for run.progress.batches in (1, 2, 3):
        (last / "each.txt").write_text(str(run.progress.batches))
        run.accelerator.save_state(last)
        run.train(torch.ones(4, 4))
    run.accelerator.end_training()
    assert {"each.txt", "unet"} <= set(os.listdir(last))
    assert {path.name: path.read_text() for path in written.iterdir()} == {"of_the_hook.txt": "3", "once.txt": ""}


def test_a_folder_that_accelerate_wrote_after_us_is_accelerates_and_set_aside_each_time(tmp_path: Path) -> None:
    last = tmp_path / "last"
    for number in (1, 2):
        for again in (attached(tmp_path, "named folders"), make(tmp_path, "named folders")):
            again.progress.batches = 10 * number + (not hasattr(again, "ckpt"))
            again.save_and_end(last)
        loaded = go_on(tmp_path, "named folders", at=last)
        assert loaded.progress.batches == 10 * number + 1
    assert folders(tmp_path) == ["before-aiockpt-1.last", "last"]


@pytest.mark.parametrize("deletes", [False, True])
def test_a_step_goes_with_its_folder_where_that_is_wanted(deletes: bool, tmp_path: Path) -> None:
    run = make(tmp_path, "named folders")
    ckpt = attach(run.accelerator, delete_with_folder=deletes)
    run.loop(6)
    ckpt.wait()
    run.accelerator.load_state(tmp_path / "step_6")
    shutil.rmtree(tmp_path / "step_3")
    run.save_and_end(tmp_path / "step_7")
    assert [info.step for info in ckpt.steps().result()] == ([2, 1] if deletes else [2, 1, 0])


def test_the_folder_of_a_committed_step_appears_with_the_next_batch(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    run.loop(3)
    run.ckpt.wait()
    run.train(torch.ones(4, 4))
    assert folders(tmp_path) == ["step_3"]


def test_the_folder_of_a_committed_step_appears_after_a_kill(tmp_path: Path) -> None:
    trained(tmp_path, "named folders", stop=6)
    (tmp_path / "step_6").rename(tmp_path / ".step_6.1.aiockpt")  # as the kill left it
    again = attached(tmp_path, "named folders")
    assert folders(tmp_path) == ["step_3", "step_6"]
    again.accelerator.load_state(tmp_path / "step_6")
    assert again.progress.batches == 6


def test_a_save_that_failed_is_told_and_has_no_folder(tmp_path: Path) -> None:
    run = make(tmp_path, "named folders")
    attach(run.accelerator, tmp_path / "file" / "runs")
    (tmp_path / "file").write_text("in the way")
    run.accelerator.save_state(tmp_path / "step_1")
    with pytest.raises(CheckpointError):
        run.accelerator.end_training()
    assert folders(tmp_path) == []


def test_a_save_after_one_that_failed_is_made_and_tells_of_it(tmp_path: Path) -> None:
    failed = threading.Event()

    class Watch:
        def on_event(self, event: Event) -> None:
            if isinstance(event, SaveFailed):
                failed.set()

    run = make(tmp_path, "named folders")
    ckpt = attach(run.accelerator, tmp_path / "file" / "runs", observers=[Watch()])
    (tmp_path / "file").write_text("in the way")
    run.accelerator.save_state(tmp_path / "step_1")
    assert failed.wait(250)
    (tmp_path / "file").unlink()
    with pytest.raises(BackgroundSaveError):
        run.accelerator.save_state(tmp_path / "step_2")
    run.save_and_end(tmp_path / "step_3")
    assert folders(tmp_path) == ["file", "step_2", "step_3"]
    assert [info.step for info in ckpt.steps().result()] == [2, 1]


def test_the_end_of_training_is_that_of_accelerate_too(tmp_path: Path) -> None:
    run = attached(tmp_path)
    finished: list[str] = []
    run.accelerator.trackers = [SimpleNamespace(finish=lambda: finished.append("once"))]
    run.accelerator.end_training()
    assert finished == ["once"]


def test_the_folder_of_the_last_save_appears_although_nobody_ends_the_training(tmp_path: Path) -> None:
    program = f"""
from tests.frameworks.accelerate_script import Run, attach
run = Run({str(tmp_path)!r}, "named folders")
attach(run.accelerator)
run.accelerator.save_state({str(tmp_path / "last")!r})
"""
    output_of(sys.executable, "-c", program)
    assert folders(tmp_path) == ["last"]


def test_a_folder_whose_step_is_gone_is_no_reason_to_refuse_a_save(tmp_path: Path) -> None:
    for _ in range(2):
        run = attached(tmp_path)
        run.save_and_end()
        shutil.rmtree(tmp_path / "aiockpt")


def test_ranks_meet_when_the_folders_of_the_first_one_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[list[str]] = []

    def note() -> None:
        met.append(sorted(path.name for path in tmp_path.iterdir() if "step" in path.name))

    def hooked() -> Any:
        run = make(tmp_path, "named folders")
        run.accelerator.register_save_state_pre_hook(lambda *_: met.append(["hook"]))
        monkeypatch.setattr(run.accelerator, "wait_for_everyone", note)
        return run

    run = hooked()
    ckpt = attach(run.accelerator)
    run.accelerator.save_state(tmp_path / "step_1")
    ckpt.wait()
    run.accelerator.load_state()
    assert met == [[], [".step_1.0.aiockpt"], ["hook"], ["step_1"]]
    (tmp_path / "step_1").rename(tmp_path / ".step_1.0.aiockpt")  # as a kill can leave it
    attach(hooked().accelerator)
    assert met[4:] == [["step_1"]]


def test_what_a_kill_left_of_a_folder_is_not_taken_into_the_next_one(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    (tmp_path / ".step_1.0.aiockpt").mkdir()
    (tmp_path / ".step_1.0.aiockpt" / "of_a_hook.txt").touch()
    for name in (".step_1.7.aiockpt", ".step_1.5.7.aiockpt"):  # the second is that of the folder step_1.5
        (tmp_path / name).mkdir()
    run.save_and_end(tmp_path / "step_1")
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["aiockpt.json"]
    assert folders(tmp_path) == [".step_1.5.7.aiockpt", "step_1"]


def test_what_a_kill_left_of_a_save_to_the_same_folder_does_not_take_its_place(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    run.save_and_end(tmp_path / "last")
    (tmp_path / ".last.0.aiockpt").mkdir()
    (tmp_path / ".last.0.aiockpt" / "aiockpt.json").write_text('{"step": 0, "key": "not committed"}')
    go_on(tmp_path, "named folders", at=tmp_path / "last")


def test_a_step_stays_whose_folder_was_copied_and_the_copy_is_saved_to(tmp_path: Path) -> None:
    run = attached(tmp_path, "named folders")
    run.loop(3)
    run.accelerator.load_state()  # waits for the folder
    shutil.copytree(tmp_path / "step_3", tmp_path / "best")
    run.save_and_end(tmp_path / "best")
    run.accelerator.load_state(tmp_path / "step_3")


def test_processes_beside_the_first_one_leave_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, total_limit=9, stop=9)
    (tmp_path / "checkpoints" / "checkpoint_2").rename(tmp_path / "checkpoints" / ".checkpoint_2.2.aiockpt")
    second = make(tmp_path, total_limit=1)
    monkeypatch.setattr(accelerate.state.PartialState(), "process_index", 1)
    assert not second.accelerator.is_main_process
    ckpt = attach(second.accelerator)
    second.accelerator.load_state()
    second.save_and_end()
    assert [info.step for info in ckpt.steps().result()] == [3, 2, 1, 0]
    assert folders(tmp_path / "checkpoints") == [".checkpoint_2.2.aiockpt", "checkpoint_0", "checkpoint_1"]


def test_a_step_that_something_else_has_saved_is_told_as_such(tmp_path: Path) -> None:
    run = make(tmp_path)
    with aiockpt.Checkpointer(tmp_path / "aiockpt") as ckpt:
        ckpt.save(0, {"model": run.model})
    attach(run.accelerator)
    with pytest.raises(UsageError, match=r"step 0 .* was not saved by save_state"):
        run.accelerator.load_state()
    run.accelerator.save_state()
    run.accelerator.load_state()
    run.accelerator.end_training()


def test_a_run_that_begins_anew_does_not_save_over_the_steps_of_another(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = attached(tmp_path, "named folders")
        run.save_and_end(tmp_path / name)
    assert [(info.step, info.generation) for info in run.ckpt.steps().result()] == [(1, 1), (0, 1)]
    for name in ("first", "second"):
        run.accelerator.load_state(tmp_path / name)


# ------------------------------------------------------------------ loading


def damage(step: Path) -> None:
    for file in step.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight")
    trained(tmp_path / "run")
    damage(tmp_path / "run" / "aiockpt" / "step-00000006")
    again = go_on(tmp_path / "run")
    assert again.progress.batches == 18
    again.loop()
    assert_same(again, expected)
    again.accelerator.end_training()
    damage(tmp_path / "run" / "aiockpt" / "step-00000007")  # it has taken the place of the damaged one
    with pytest.raises(CorruptionError):
        again.accelerator.load_state(tmp_path / "run" / "checkpoints" / "checkpoint_6")


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_newest_step_whose_manifest_is_damaged_is_passed_over(is_torn: bool, tmp_path: Path) -> None:
    trained(tmp_path, stop=6)
    manifest = tmp_path / "aiockpt" / "step-00000001" / "MANIFEST-1.json"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(b"{" if is_torn else data)
    assert go_on(tmp_path).progress.batches == 3


@pytest.mark.parametrize("manifests", [[], [1], [0, 1]], ids=["data", "data and a manifest", "manifests"])
def test_where_every_step_is_damaged_nothing_begins_anew(manifests: list[int], tmp_path: Path) -> None:
    trained(tmp_path, stop=6)
    for step in (0, 1):
        damage(tmp_path / "aiockpt" / f"step-0000000{step}")
    for step in manifests:
        (tmp_path / "aiockpt" / f"step-0000000{step}" / "MANIFEST-1.json").write_text("{}")
    with pytest.raises(CorruptionError):
        go_on(tmp_path)


def test_folders_whose_steps_are_nowhere_do_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, stop=6)
    shutil.rmtree(tmp_path / "aiockpt")
    with pytest.raises(UsageError, match=r"checkpoint_1 has no weights of its own: .* does not have; attach"):
        go_on(tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(folder)
    assert go_on(tmp_path).progress.batches == 0


def test_an_older_step_is_loaded_with_a_warning_where_that_of_the_newest_folder_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, stop=9)
    assert "checkpoint_2" not in caplog.text
    run.ckpt.delete(2).result()
    assert go_on(tmp_path).progress.batches == 6
    assert re.search(r"loads step 1: .*checkpoint_2 has no weights of its own", caplog.text)


def test_nothing_to_load_begins_anew(tmp_path: Path) -> None:
    run = go_on(tmp_path)
    run.loop(3)
    assert run.progress.batches == 3


def test_what_accelerate_wrote_before_is_loaded(tmp_path: Path) -> None:
    old = make(tmp_path)
    old.accelerator.skip_first_batches = accelerate.skip_first_batches
    old.loop(7, every=7)
    again = go_on(tmp_path)
    assert again.progress.batches == 7
    assert_same_weights(again, old)
    again.save_and_end()
    third = go_on(tmp_path)
    assert third.accelerator.project_configuration.iteration == 2


@pytest.mark.parametrize("number", [None, 1, 4], ids=["newest", "in between", "ours"])
def test_what_is_saved_after_a_load_is_newer_than_what_accelerate_wrote(number: int | None, tmp_path: Path) -> None:
    if number == 4:
        trained(tmp_path, total_limit=9, stop=15)
    old = make(tmp_path, total_limit=9)
    old.accelerator.project_configuration.iteration = 5 if number == 4 else 0
    old.loop(9)
    again = go_on(
        tmp_path, total_limit=9, at=None if number is None else tmp_path / "checkpoints" / f"checkpoint_{number}"
    )
    there = folders(tmp_path / "checkpoints")
    again.progress.batches = 50
    again.save_and_end()
    assert go_on(tmp_path, total_limit=9).progress.batches == 50
    assert set(folders(tmp_path / "checkpoints")) > set(there)


def test_a_folder_that_accelerate_wrote_is_loaded_by_name_and_set_aside_by_a_save(tmp_path: Path) -> None:
    old = make(tmp_path, "named folders")
    old.loop(3)
    again = attached(tmp_path, "named folders")
    folder = tmp_path / "step_3"
    again.accelerator.load_state(folder)
    assert again.progress.batches == 3
    assert_same_weights(again, old)
    again.save_and_end(folder)
    assert folders(tmp_path) == ["before-aiockpt-1.step_3", "step_3"]
    third = go_on(tmp_path, "named folders", at=folder)
    assert third.progress.batches == 3


def assert_same_weights(found: Any, expected: Any) -> None:
    assert all(
        torch.equal(one, other)
        for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True)
    )


def test_other_objects_than_were_registered_are_refused(tmp_path: Path) -> None:
    run = attached(tmp_path)
    run.save_and_end()
    again = attached(tmp_path)
    again.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="1 objects were registered"):
        again.accelerator.load_state()


def test_a_model_may_lack_a_part_where_strict_is_false(tmp_path: Path) -> None:
    run = attached(tmp_path)
    run.save_and_end()
    again = make(tmp_path)
    again.accelerator._models[0].append(torch.nn.Linear(1, 1))
    attach(again.accelerator)
    with pytest.raises(aiockpt.StateMismatchError):
        again.accelerator.load_state()
    again.accelerator.load_state(strict=False)
    assert_same_weights(torch.nn.ModuleDict({"model": again.model[:3]}), run)


@pytest.mark.parametrize("is_first", [False, True])
def test_loaders_that_were_not_prepared_before_begin_at_their_beginning(
    is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where an evaluation is added to a script; there may also be fewer loaders again."""
    expected = straight(tmp_path / "straight")
    trained(tmp_path / "run", stop=9)
    more = attached(tmp_path / "run")
    added = more.accelerator.prepare(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(10, 4)), batch_size=5)
    )
    if is_first:
        more.accelerator._dataloaders.reverse()
    more.accelerator.load_state()
    assert "1 loaders were prepared when the checkpoint was made, and here are 2" in caplog.text
    more.loop(12)
    assert len(list(added)) == 2
    more.accelerator.end_training()
    fewer = go_on(tmp_path / "run")
    fewer.loop()
    assert_same(fewer, expected)


# ------------------------------------------------------------------ hooks


def test_hooks_write_into_the_folder_and_may_take_models_out(tmp_path: Path) -> None:
    def hooked() -> Any:
        run = make(tmp_path, "named folders")
        run.accelerator.register_save_state_pre_hook(write)
        run.accelerator.register_load_state_pre_hook(read)
        return run

    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(), Path(folder) / "of_the_hook.pt")

    def read(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "of_the_hook.pt"))

    run = hooked()
    ckpt = attach(run.accelerator)
    run.loop(3)
    run.accelerator.end_training()
    description = ckpt.describe(0).result()
    assert not any(tensor.name.startswith("model.") for tensor in description.tensors)
    again = hooked()
    attach(again.accelerator)
    again.accelerator.load_state(tmp_path / "step_3")
    assert_same_weights(again, run)
    assert again.optimizer.state_dict()["state"][0]["step"] == 3


def test_weights_that_a_hook_replaces_are_saved_whole(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.__setitem__(0, {}))
    OPEN.add(attach(run.accelerator))
    run.loop(3)
    run.accelerator.end_training()
    assert_same_weights(go_on(tmp_path), run)


def test_a_model_that_a_hook_has_removed_must_be_loaded_by_a_hook(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
    OPEN.add(attach(run.accelerator))
    run.loop(3)
    run.accelerator.end_training()
    again = attached(tmp_path)
    with pytest.raises(UsageError, match="a hook of save has removed model from the weights of step 0"):
        again.accelerator.load_state()
    again.accelerator.load_state(strict=False)
    assert again.progress.batches == 3


@pytest.mark.parametrize("kind", ["plain", "named folders"])
def test_hooks_of_a_copied_project_read_its_own_folder(kind: str, tmp_path: Path) -> None:
    run = attached(tmp_path / "one", kind)
    run.accelerator.register_save_state_pre_hook(lambda *hooked: (Path(hooked[2]) / "ema.txt").touch())
    run.save_and_end(None if kind == "plain" else tmp_path / "one" / "by name" / "last")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    found: list[str] = []
    for name in ("one", "copy"):
        again = attached(tmp_path / name, kind)
        again.accelerator.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        again.accelerator.load_state()
    inner = "checkpoints/checkpoint_0" if kind == "plain" else "by name/last"
    assert found == [str(tmp_path / name / inner) for name in ("one", "copy")]


def test_what_a_hook_takes_out_on_the_first_rank_alone_is_not_saved_by_the_others(tmp_path: Path) -> None:
    output_of(*TORCHRUN, "2", str(SCRIPT), str(tmp_path / "out"), "hook on the first rank")
    with aiockpt.Checkpointer(tmp_path / "out" / "aiockpt") as ckpt:
        names = [tensor.name for tensor in ckpt.describe().result().tensors]
    assert any(name.startswith("optimizer.") for name in names)
    assert not [name for name in names if name.startswith("model.")]


def test_without_hooks_no_weights_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attached(tmp_path)
    asked: list[Any] = []

    def gather(*models: Any, **_: Any) -> dict[str, Any]:
        asked.append(models)
        return {}

    monkeypatch.setattr(run.accelerator, "get_state_dict", gather)
    run.accelerator.save_state()
    assert not asked
    run.accelerator.register_save_state_pre_hook(lambda *_: None)
    run.accelerator.save_state()
    assert len(asked) == 1
    run.accelerator.end_training()


def test_what_a_hook_of_load_takes_out_is_left_as_it_is(tmp_path: Path) -> None:
    trained(tmp_path, stop=3)
    again = make(tmp_path)
    again.accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
    attach(again.accelerator)
    again.accelerator.load_state()
    assert again.progress.batches == 3
    assert_same_weights(again, make(None))


def test_several_of_each_kind_are_saved(tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any, Any]:
        run = make(tmp_path)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = run.accelerator.prepare(model, optimizer)
        return run, model, optimizer

    run, model, optimizer = prepared()
    ckpt = attach(run.accelerator)
    model(torch.ones(3)).backward()
    optimizer.step()
    run.save_and_end()
    names = {tensor.name for tensor in ckpt.describe().result().tensors}
    assert {"model.0.weight", "model_1.weight"} <= names
    again, other_model, other_optimizer = prepared()
    attach(again.accelerator)
    again.accelerator.load_state()
    assert torch.equal(other_model.weight, model.weight)
    assert torch.equal(
        other_optimizer.state_dict()["state"][0]["momentum_buffer"],
        optimizer.state_dict()["state"][0]["momentum_buffer"],
    )


# ------------------------------------------------------------------ what cannot be


def test_what_cannot_be_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(None, "named folders")
    with pytest.raises(UsageError, match="name a place"):
        attach(run.accelerator)
    attach(run.accelerator, tmp_path / "place")
    with pytest.raises(UsageError, match="name a folder"):
        run.accelerator.save_state()
    with pytest.raises(UsageError, match="exclude_frozen_parameters"):
        run.accelerator.save_state(tmp_path / "x", exclude_frozen_parameters=True)
    monkeypatch.setattr(run.accelerator.state, "distributed_type", accelerate.DistributedType.MEGATRON_LM)
    with pytest.raises(UsageError, match="Megatron-LM"):
        attach(run.accelerator, tmp_path / "place")


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_is_what_it_was_when_this_was_written(name: str) -> None:
    assert digest_of(name) == UPSTREAM[name]


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "out")
    named = {
        "accelerator": run.accelerator,
        "loader": run.loader,
        "train": run.train,
        "epochs": 1,
        "attach": attach,
        "skipped": 2,
    }
    run_page("frameworks/accelerate.md", named)
