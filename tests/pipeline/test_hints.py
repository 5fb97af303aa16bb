"""A place without a step says what may have been meant, and a load from nothing says it too."""

import logging
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import UsageError
from aiockpt.pipeline import wrong_places
from aiockpt.pipeline.wrong_places import Hints, find_hints
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.tools.cli.survey import open_place
from tests.small_run import small_checkpointer

STATE = {"x": torch.arange(100)}


def look(backend: Backend) -> Hints:
    return anyio.run(find_hints, backend)


def make_run(root: Path) -> None:
    with small_checkpointer(root) as ckpt:
        ckpt.save(3, STATE).result()


def test_the_folder_of_a_step_is_told_from_the_place_of_steps(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert look(LocalBackend(str(tmp_path))) == Hints()
    step = tmp_path / "step-00000003"
    (attempt,) = step.glob("a-*")
    named = re.escape(f"give the folder above it, and the step: {tmp_path} 3")
    for place in (
        step,
        f"{step}/",
        attempt,
        attempt / "d",
        step / "of mine",
        f"file://{step}",
        [tmp_path / "near", step],
    ):
        with pytest.raises(UsageError, match=named):
            aiockpt.Checkpointer(place)
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(UsageError, match=named):
        ckpt.copy(3, step).result()
    (tmp_path / "step-00000007").mkdir()
    with aiockpt.Checkpointer(tmp_path / "step-00000007") as ckpt:  # of that name, and no step
        assert ckpt.resume(STATE) == 0
        ckpt.save(1, STATE).result()


def test_a_link_into_a_step_is_told_from_a_link_to_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for name, target in (("latest", "run/step-00000003"), ("above", "run"), ("again", "latest")):
        (tmp_path / name).symlink_to(target)
    named = re.escape(f" leads to {tmp_path}/run/step-00000003")
    for place in (
        tmp_path / "latest",
        tmp_path / "again",
        f"file://{tmp_path}/latest/",
        tmp_path / "latest" / "of mine",
    ):
        with pytest.raises(UsageError, match=f"{named}.*, and the step: {tmp_path}/run 3"):
            aiockpt.Checkpointer(place)
    with pytest.raises(UsageError, match=named):
        open_place(tmp_path / "latest")
    (tmp_path / "run" / "latest").symlink_to("step-00000003")
    for place in (tmp_path / "above", tmp_path / "run"):
        with aiockpt.Checkpointer(place) as ckpt:
            assert ckpt.latest().result() == 3
    (tmp_path / "empty").symlink_to("run/step-00000099")
    with aiockpt.Checkpointer(tmp_path / "run" / "step-00000099") as ckpt:
        assert ckpt.latest().result() is None


def test_a_checkpoint_of_dcp_is_no_place_unless_steps_lie_beside_it(tmp_path: Path) -> None:
    make_run(tmp_path / "both")
    for folder in ("old", "both"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / ".metadata").write_bytes(b"")
    (tmp_path / "latest").symlink_to("old")
    for place in (tmp_path / "old", tmp_path / "latest"):
        advice = re.escape(f"resume(state, fork='dcp://{place}'); aiockpt convert dcp://{place} RUN")
        with pytest.raises(UsageError, match=f"{place} is a checkpoint of torch.distributed.checkpoint.*{advice}"):
            aiockpt.Checkpointer(place)
        with pytest.raises(UsageError, match=advice):
            open_place(place)
    with aiockpt.Checkpointer(tmp_path / "both") as ckpt:
        assert ckpt.latest().result() == 3
        with pytest.raises(UsageError, match="no place for steps"):
            ckpt.copy(3, tmp_path / "old").result()


def test_the_folder_of_a_step_elsewhere_is_found_out_by_the_first_look() -> None:
    place = f"memory://{uuid.uuid4()}"
    anyio.run(open_backend(f"{place}/step-00000003").put, "MANIFEST-1.json", b"{}")
    calls: list[Callable[[aiockpt.Checkpointer], aiockpt.Future[Any]]]
    calls = [lambda ckpt: ckpt.load(STATE), lambda ckpt: ckpt.save(4, STATE)]
    for call in calls:
        with (
            pytest.raises(UsageError, match=f"is one step; give the folder above it, and the step: {place} 3"),
            aiockpt.Checkpointer(f"{place}/step-00000003") as ckpt,
        ):
            call(ckpt).result()
    with pytest.raises(UsageError, match=r"in the folder of one step.* s3://bucket/run 3"):
        aiockpt.Checkpointer("s3://bucket/run/step-00000003/a-0123456789ab/d")


def test_runs_and_weights_are_found_and_other_things_are_not(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    make_run(tmp_path / "of" / "my" / "second")
    (tmp_path / "logs" / "step-one").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    found = look(LocalBackend(str(tmp_path)))
    assert found == Hints(runs=("first", "of/my/second"), weights="model-00001-of-00002.safetensors")
    assert found.hints("/here/") == [
        "/here/first holds steps",
        "/here/of/my/second holds steps",
        "/here holds weights, model-00001-of-00002.safetensors: `aiockpt convert /here PLACE` makes a step of them",
    ]


def test_of_many_runs_a_few_are_shown(tmp_path: Path) -> None:
    for number in range(wrong_places.RUNS_SHOWN + 2):
        (tmp_path / f"run{number}" / "step-00000001").mkdir(parents=True)
    assert len(look(LocalBackend(str(tmp_path))).runs) == wrong_places.RUNS_SHOWN


def test_what_cannot_be_read_was_not_meant(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    make_run(tmp_path / "second")
    refusing = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="fail", verb="list", match="first", times=None)])
    assert look(refusing).runs == ("second",)
    broken = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="fail", verb="list", times=None)])
    assert look(broken) == Hints()


def test_a_place_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_places, "HINTS_S", 0.1)
    (tmp_path / "model.safetensors").write_bytes(b"")
    make_run(tmp_path / "first")
    hanging = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="hang", verb="list", match="first", times=None)])
    assert look(hanging) == Hints(weights="model.safetensors")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_load_of_nothing_says_what_may_have_been_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "run")
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.load(STATE).result() is None
    assert warnings(caplog) == [f"nothing is loaded, and {LocalBackend(str(tmp_path)).url}/run holds steps"]


def test_a_load_of_something_or_from_an_empty_place_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path)
    make_run(tmp_path / "inner")
    for place, step in ((tmp_path, 3), (tmp_path / "empty", None), (tmp_path / "not there", None)):
        with small_checkpointer(place) as ckpt:
            loaded = ckpt.load(STATE).result()
            assert (None if loaded is None else loaded.step) == step
    assert warnings(caplog) == []
