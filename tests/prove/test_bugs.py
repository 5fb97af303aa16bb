"""Bugs that well-known trainers shipped: a proof finds each, names what differs first, certifies the script without."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.errors import UsageError
from aiockpt.prove import Certificate, Proof, certify, record
from tests.prove import scripts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outcomes(found: Certificate) -> dict[str, str]:
    return {row.row: row.outcome for row in found.rows}


def went_on_from(found: Certificate) -> int:
    """Return the step that the start whose difference is told first went on from: the newest that was durable by then."""
    assert found.first is not None
    [start] = [start for start in found.starts if start.name == found.first.start]
    assert start.resumed_from is not None
    return start.resumed_from


@pytest.mark.parametrize("seed", range(3))
def test_the_script_without_a_bug_is_certified(seed: int) -> None:
    found = certify(scripts.train, Proof(seed=seed))
    found.check()
    rows = outcomes(found)
    assert {"model", "optimizer exp_avg", "scheduler", "ema", "epochs", "rng torch"} <= {
        row for row, outcome in rows.items() if outcome == "equal"
    }
    assert all(rows[f"training: {row}"] == "equal" for row in ("data", "loss", "gradients", "weights", "random torch"))
    assert [start.name for start in found.starts] == ["straight", "killed", "resumed 1", "resumed 2", "control"]
    killed = [start.killed or "" for start in found.starts[1:3]]
    assert killed[0].startswith("in the save of step ")
    assert killed[1].startswith("after the optimizer step of step ")
    assert not list(Path().glob("run*")), "the script's own place is not touched"


def test_aiockpts_own_loader_is_certified() -> None:
    found = certify(scripts.train_plainly)
    found.check()
    assert outcomes(found)["loader"] == outcomes(found)["training: data"] == "equal"


@pytest.mark.parametrize("bug", scripts.BUGS)
def test_each_bug_is_found_and_named(bug: str) -> None:
    found = certify(partial(scripts.train, bug))
    assert found.verdict == "differs"
    assert found.first is not None
    assert found.first.row.removeprefix("training: ") == scripts.BUGS[bug], found.explain()
    with pytest.raises(AssertionError, match="first difference"):
        found.check()


def test_data_of_another_place_is_told_with_that_place() -> None:
    found = certify(partial(scripts.train, "data one ahead"))
    assert found.first is not None
    step = went_on_from(found) + 1
    assert (found.first.at, found.first.note) == (
        f"at step {step}",
        f"the straight run was given that at step {step + 1}",
    )


def test_another_place_is_told_with_both() -> None:
    found = certify(partial(scripts.train, "another place"))
    assert found.first is not None
    assert "its load used another place" in found.first.note


def test_equal_seeds_kill_at_equal_places_and_others_elsewhere() -> None:
    killed = [
        [start.killed for start in certify(scripts.train, Proof(seed=seed, kills=3)).starts[1:4]] for seed in (5, 5, 6)
    ]
    assert killed[0] == killed[1] != killed[2]


def test_a_script_that_is_not_deterministic_is_not_blamed_on_the_resume() -> None:
    def train() -> None:
        scripts.train(noise=True)

    found = certify(train)
    assert found.verdict == "proves nothing"
    assert "not deterministic by itself" in found.reason
    assert "at step 0: loss" in found.reason or "at step 0: " in found.reason


def test_a_script_that_is_not_deterministic_can_be_judged_by_closeness() -> None:
    found = certify(partial(scripts.train, noise=True), Proof(close=0.2))
    assert found.certified, found.explain()
    assert outcomes(found)["training: loss"] == "close"
    found = certify(partial(scripts.train, "data one ahead", noise=True), Proof(close=0.2))
    assert found.first is not None
    assert found.first.row == "training: data"


def test_values_that_no_two_runs_agree_on_are_left_out_and_told() -> None:
    found = certify(partial(scripts.train, clock=True))
    assert found.certified, found.explain()
    assert outcomes(found)["metric tokens_per_s"] == "not reproducible"


def test_a_control_that_does_not_differ_proves_nothing() -> None:
    found = certify(partial(scripts.train_nothing, "run"))
    assert found.verdict == "proves nothing"
    assert "a control that restarted without the load came to the same" in found.reason


def test_a_row_can_be_ignored() -> None:
    found = certify(partial(scripts.train, "average dropped"), Proof(ignore=["em*"]))
    assert found.certified
    assert outcomes(found)["ema"] == "ignored"


@pytest.mark.parametrize("name", ["first", "numpy"])
def test_recorded_values_are_compared_also_those_that_are_called_as_an_idle_generator(name: str) -> None:
    found = certify(partial(scripts.train, "data one ahead", told=name))
    assert found.first is not None
    assert (found.first.row, found.first.at) == (f"record {name}", f"after step {went_on_from(found)}")
    record("nobody listens", 1)  # outside of a proof


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda: None, "without making an aiockpt.Checkpointer"),
        (partial(scripts.train, steps=0), "saved nothing"),
        (partial(scripts.train, steps=1), "too short to be killed"),
        (partial(scripts.train, "no such file"), "fails by itself.*FileNotFoundError"),
    ],
)
def test_what_cannot_be_proved_is_told_with_what_to_do(train: object, message: str) -> None:
    assert callable(train)
    with pytest.raises(UsageError, match=f"(?s){message}"):
        certify(train)


def test_a_script_that_fails_when_it_is_resumed_is_told_with_its_error() -> None:
    found = certify(partial(scripts.train, "fails at resume"))
    assert found.verdict == "differs"
    assert found.first is not None
    assert found.first.row == "resume"
    assert "KeyError" in found.first.note


def test_a_script_that_saves_at_other_steps_each_time_is_killed_all_the_same() -> None:
    found = certify(partial(scripts.train_nothing, at_odd_times=True), Proof(ignore=["training: random *"]))
    killed = [start.killed for start in found.starts if start.name.startswith(("killed", "resumed"))]
    assert all(killed[:-1]), "each start but the last was killed"
    assert found.verdict in ("proves nothing", "certified")


def test_a_script_with_two_checkpointers_is_certified() -> None:
    def train() -> None:
        with aiockpt.Checkpointer("best") as best:
            scripts.train(beside=best)

    certify(train).check()


def test_a_place_that_the_script_reads_is_left_as_it_is(tmp_path: Path) -> None:
    model = scripts.make_model()
    first = model[0]
    assert isinstance(first, torch.nn.Linear)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"model": model})

    def fine_tune() -> None:
        weights = torch.zeros(8, 6)
        with aiockpt.Checkpointer(tmp_path) as pretrained:
            pretrained.load({"model": {"0.weight": weights}}, strict=False).result()
        assert torch.equal(weights, first.weight)
        scripts.train()

    certify(fine_tune, Proof(as_is=[str(tmp_path)])).check()
    with pytest.raises(UsageError, match=r"(?s)fails by itself.*AssertionError"):
        certify(fine_tune)


def test_a_pattern_of_losses_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    script = "import tests.prove.scripts as s; s.train_plainly(); print('the loss is 3')"
    with pytest.raises(UsageError, match=r"(?s)--loss 'los=' matches nothing that the script prints:\n.*the loss is 3"):
        certify([sys.executable, "-c", script], Proof(loss="los="), folder=tmp_path)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="not empty"):
        certify(scripts.train, folder=tmp_path)


def test_hooks_are_gone_afterwards() -> None:
    def train() -> None:
        torch.use_deterministic_algorithms(True)
        scripts.train()

    backward = torch.Tensor.backward
    state = torch.get_rng_state()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        certify(train)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.Tensor.backward is backward
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
