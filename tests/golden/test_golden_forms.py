"""The stored forms of optimizers and values stay readable, those that are not written any more, too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.golden import forms_state as forms
from tests.simulated.state_model import first_difference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]
RELEASES = sorted(path for path in (Path(__file__).parent / "forms").glob("v*") if path.is_dir())


@pytest.fixture(params=RELEASES, ids=[path.name for path in RELEASES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the golden checkpoints of one release."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def in_order(value: Any) -> Any:
    """Return a state dict with its keys sorted: one that is written anew in another form has its own order."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(one) for one in value] if type(value) is list else value


PAIRS = [(saved, here) for saved in forms.FORMS[:-1] for here in forms.FORMS[:-1]]


@pytest.mark.parametrize(("saved", "here"), [*PAIRS, ("rare", "rare")])
def test_an_optimizer_in_each_form_loads_into_each_form(place: Path, saved: str, here: str) -> None:
    state, wanted = (forms.optimizer_state(here, filled=filled) for filled in (False, True))
    assert first_difference(wanted, state) is not None
    with aiockpt.Checkpointer(place / "optimizers") as ckpt:
        assert ckpt.load(state, forms.FORMS.index(saved)).result() is not None
    assert first_difference(in_order(wanted), in_order(state)) is None


@pytest.fixture
def color() -> None:
    aiockpt.register_codec("golden color", forms.Color)
    torch.serialization.add_safe_globals([forms.Coded])


@pytest.mark.usefixtures("color")
def test_values_of_every_kind_load(place: Path) -> None:
    wanted: dict[str, Any] = forms.plain_values()
    state: dict[str, Any] = dict.fromkeys(wanted)
    with aiockpt.Checkpointer(place / "values") as ckpt:
        assert ckpt.load(state, 0).result() is not None
    for held in (wanted, state):
        held |= {"csr": held["csr"].to_dense(), "coded": held["coded"].codes}
        channels = held["channels"]
        held["channels"] = [channels.int_repr(), channels.q_per_channel_scales(), channels.q_per_channel_zero_points()]
    assert first_difference(wanted, state) is None


@pytest.mark.parametrize("stored", ["values", "retired"])
def test_loaders_and_random_numbers_go_on(place: Path, stored: str) -> None:
    """Those of `retired` do not say whether an iteration was under way."""
    state, before = (forms.loaders() | (forms.trained() if stored == "values" else {}) for _ in range(2))
    rest = [list(batches) for batches in forms.begun(before)]
    forms.seed(5)
    numbers = forms.draw()
    state["own"].value = None
    with aiockpt.Checkpointer(place / stored) as ckpt:
        assert ckpt.load(state, 1).result() is not None
    assert state["own"].value == {"of this rank": (0,)}
    assert forms.draw() == numbers
    names = [name for name, one in state.items() if isinstance(one, aiockpt.Loader)]
    found = {name: list(state[name]) for name in names}
    wanted = dict(zip(names, rest, strict=True))
    if "trained" in wanted:  # what was handed out and not trained comes again
        wanted["trained"] = list(forms.sharded())[1:]
    assert str(found) == str(wanted)


def test_what_is_stored_otherwise_since_loads(place: Path) -> None:
    state, wanted = (forms.retired(filled=filled) for filled in (False, True))
    with aiockpt.Checkpointer(place / "retired") as ckpt:
        assert ckpt.load(state, 0).result() is not None
    assert {str(key): value for key, value in state["keys"].items()} == {str(torch.ones(2)): 1, "a": 2}
    for name in ("scheduler", "state_dict"):
        assert first_difference(wanted[name], state[name]) is None


def test_there_is_a_golden_checkpoint_of_the_forms_of_this_release() -> None:
    assert f"v{aiockpt.__version__}" in [path.name for path in RELEASES]
