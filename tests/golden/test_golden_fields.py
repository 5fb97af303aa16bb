"""The optional fields of the format stay readable: what was left out, thinned, strided, composite, or stored as numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.golden.fields_state import LEFT_OUT, fields_state
from tests.simulated.state_model import first_difference, layout_of

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
RELEASES = sorted(path for path in (Path(__file__).parent / "fields").glob("v*") if path.is_dir())
MADE = ("strided", "quantized", "sparse", "values")


@pytest.fixture(params=RELEASES, ids=[path.name for path in RELEASES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the golden checkpoint of one release."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def blank() -> dict[str, Any]:
    """Return a state of the same structure with other contents, or with nothing."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    left_out = {LEFT_OUT: {"weight": torch.full((2, 3), 9.0)}}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, **left_out, **dict.fromkeys(MADE)}


def dense(state: dict[str, Any]) -> dict[str, Any]:
    """Return *state* with its composite tensors as plain ones."""
    return state | {"quantized": state["quantized"].int_repr(), "sparse": state["sparse"].to_dense()}


def manifest(place: Path, step: int) -> dict[str, Any]:
    paths = sorted(place.glob(f"step-{step:08d}/MANIFEST-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    found: dict[str, Any] = json.loads(paths[-1].read_bytes())
    return found


def test_a_step_with_every_optional_field_loads_bit_for_bit(place: Path) -> None:
    state, wanted = blank(), fields_state()
    with aiockpt.Checkpointer(place) as ckpt:
        loaded = ckpt.load(state).result()
        described = ckpt.describe(7).result()
    assert loaded is not None
    assert (loaded.step, loaded.skipped, loaded.missing, loaded.unexpected) == (7, (), (), ())
    assert loaded.left_out == (f"{LEFT_OUT}.weight",)
    assert torch.equal(state[LEFT_OUT]["weight"], torch.full((2, 3), 9.0))
    wanted[LEFT_OUT] = state[LEFT_OUT]
    assert first_difference(dense(wanted), dense(state)) is None
    assert state["quantized"].q_scale() == 0.5
    for name, tensor in wanted["strided"].items():
        assert layout_of(state["strided"][name]) == layout_of(tensor) != tuple(range(tensor.dim()))
    assert described.left_out == {f"{LEFT_OUT}.weight": ("F32", (2, 3))}
    assert described.user == {"by": "hand"}


def test_a_thinned_step_loads_its_weights(place: Path) -> None:
    state = {"model": torch.nn.Linear(3, 2)}
    with aiockpt.Checkpointer(place) as ckpt:
        loaded = ckpt.load(state, 6).result()
    assert loaded is not None
    assert first_difference(fields_state()["model"], state["model"]) is None
    assert not list(place.glob("step-00000006/a-*/d/*-0001.safetensors"))


def test_the_golden_manifest_has_the_optional_fields(place: Path) -> None:
    """Else a reader that has forgotten one of them would not be noticed here."""
    written = manifest(place, 7)
    assert written["head"]
    assert {file["kind"] for file in written["files"]} == {"weights", "rest"}
    assert list(written["left_out"]) == [f"{LEFT_OUT}.weight"]
    assert {name for name, entry in written["tensors"].items() if "axes" in entry} == {
        "strided.channels last",
        "strided.transposed",
    }
    assert manifest(place, 6)["state"]["content"] == "weights"


def test_there_is_a_golden_checkpoint_of_this_release() -> None:
    assert f"v{aiockpt.__version__}" in [path.name for path in RELEASES]
