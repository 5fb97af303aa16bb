"""Ray Train on a cluster of this machine: what is reported, when, and what a run goes on from when a worker dies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aiockpt
from aiockpt.integrations.ray import HANDLE, RayHandle, read_handle, resume
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks import ray_job
from tests.frameworks.proving import prove, steps_in
from tests.frameworks.ray_job import fit, ray, train

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def a_cluster() -> Iterator[None]:
    ray_job.begin()
    yield
    ray.shutdown()


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "place")


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")


def notes(place: str) -> list[str]:
    return Path(place + ".notes").read_text().splitlines()


def weights(place: str) -> Any:
    with aiockpt.Checkpointer(place) as ckpt:
        names = [tensor.name for tensor in ckpt.describe().result().tensors]
        return {name: ckpt.read(None, name).result().tolist() for name in names}


class TestContract(IntegrationSuite):
    ATTACHES = FALLS_BACK = NAMES_STEPS = False
    DAMAGE_ERROR = Exception
    FIRST = 0

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        storage = place.parent / f"storage of {place.name}"
        fit({"place": str(place), "steps": until, "every": 1}, 1, str(storage), failures=0)
        return int(notes(str(place))[-1].split()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, a_cluster: None) -> tuple[str, Any]:
    """The place and the result of a run of one worker that nobody stopped; Ray and the place keep two steps."""
    folder = tmp_path_factory.mktemp("alone")
    place = str(folder / "place")
    return place, fit({"place": place, "keep": 2}, 1, str(folder / "storage"), keep=2)


def test_two_workers_report_handles_and_one_that_is_killed_changes_nothing(tmp_path: Path, storage: str) -> None:
    straight, killed = str(tmp_path / "straight"), str(tmp_path / "killed")
    result = fit({"place": straight}, 2, storage, name="straight")
    assert read_handle(result.checkpoint) == RayHandle(Path(straight).as_uri(), 8, "step-00000008")
    reported = [read_handle(checkpoint).step for checkpoint, _ in result.best_checkpoints]
    assert reported == [0, 2, 4, 6, 8]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == reported
    assert steps_in(straight) == [4, 6, 8]
    assert [path.name for path in Path(result.checkpoint.path).iterdir()] == [HANDLE]

    result = fit({"place": killed, "dies_at": 7, "dies_on": 1}, 2, storage, name="killed")
    assert notes(killed) == ["begins at 0", "begins at 7"]
    assert read_handle(result.checkpoint).step == 8
    assert weights(killed) == weights(straight)


def test_what_was_committed_and_not_reported_is_trained_again(tmp_path: Path, storage: str, alone: Any) -> None:
    straight, result = alone
    killed = str(tmp_path / "killed")
    assert [read_handle(checkpoint).step for checkpoint, _ in result.best_checkpoints] == [6, 8]
    assert steps_in(straight) == [6, 8]

    result = fit({"place": killed, "dies_at": 6, "dies_committed": True}, 1, storage, name="killed")
    assert notes(killed) == ["begins at 0", "begins at 5"]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 2, 4, 6, 8]
    assert weights(killed) == weights(straight)


def test_a_run_of_another_name_goes_on_from_the_place_and_a_step_that_is_gone_is_told(place: str, storage: str) -> None:
    fit({"place": place, "steps": 5}, 1, storage, name="one")
    fit({"place": place, "steps": 7}, 2, storage, name="two")
    assert notes(place) == ["begins at 0", "begins at 5"]
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.delete(6).result()
    with pytest.raises(train.TrainingFailedError, match=r"Ray's newest checkpoint is step 6 of file:.*/place"):
        fit({"place": place, "steps": 9}, 1, storage, name="two", failures=0)


def test_a_step_of_another_place_than_rays_checkpoint_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"value": 1}
    with aiockpt.Checkpointer(tmp_path / "here") as ckpt:
        url = ckpt.save(4, state).result().url
        for place in (url, "file:///there"):
            handle = RayHandle(place, 4, "step-00000004")
            (tmp_path / HANDLE).write_bytes(msgspec.json.encode(handle))
            monkeypatch.setattr(train, "get_checkpoint", lambda: train.Checkpoint.from_directory(tmp_path))
            assert resume(ckpt, state) == 5
            told = f"step 4 of {url}, but Ray's newest checkpoint is that step of {place}" in caplog.text
            assert told == (place != url)


def test_a_later_step_is_resumed_where_rays_own_was_deleted_before_that_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a worker that dies between the commit of a step, which deletes the one before, and its report."""
    state = {"value": 0}
    with aiockpt.Checkpointer(tmp_path / "here", retention=aiockpt.Retention(last=1)) as ckpt:
        for state["value"] in (4, 6):
            url = ckpt.save(state["value"], state).result().url
            ckpt.wait()
        (tmp_path / HANDLE).write_bytes(msgspec.json.encode(RayHandle(url, 4, "step-00000004")))
        monkeypatch.setattr(train, "get_checkpoint", lambda: train.Checkpoint.from_directory(tmp_path))
        assert [info.step for info in ckpt.steps().result()] == [6]
        assert (resume(ckpt, state), state["value"]) == (7, 6)
        assert "resumed from step 6: step 4 of Ray's newest checkpoint is deleted" in caplog.text
        (tmp_path / HANDLE).write_bytes(msgspec.json.encode(RayHandle("file:///there", 4, "step-00000004")))
        with pytest.raises(aiockpt.StepNotFoundError):
            resume(ckpt, state)


def test_a_checkpoint_of_somebody_else_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"has no aiockpt\.json"):
        read_handle(train.Checkpoint.from_directory(tmp_path))


def test_a_save_that_fails_ends_the_run(place: str, storage: str) -> None:
    Path(place).write_text("in the way")
    with pytest.raises(train.TrainingFailedError, match="place"):
        fit({"place": place, "steps": 5}, 1, storage, failures=0)


def test_its_page_runs_as_it_stands(place: str, storage: str, alone: Any) -> None:
    scope: dict[str, Any] = {"make_training": ray_job.make_training, "train_on": ray_job.train_on, "result": alone[1]}
    model: Any = ray_job.make_model()
    scope["model"] = model
    run_page("frameworks/ray.md", scope)
    assert weights(alone[0])["model.0.bias"] == model[0].bias.tolist()
    result = fit({"place": place}, 1, storage, loop=scope["train_loop"])
    assert read_handle(result.checkpoint).step == 22


def test_a_job_that_is_killed_and_started_again_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = prove(sys.executable, "-m", "tests.frameworks.ray_job", "--steps", "10")
    assert all(name in rows for name in ("exp_avg_sq", "loader", "rng torch"))
