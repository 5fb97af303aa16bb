"""The ``_metadata`` of a ``state_dict()`` is stored, and handed back as it was. Through the public API."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import Through


class Batch:
    """A stand-in for a ``TensorDict``: it refuses a state without the metadata that it gave."""

    def __init__(self, rows: int, value: float) -> None:
        self.rows, self.data = rows, torch.full((rows, 2), value)

    def state_dict(self) -> Any:
        state: Any = OrderedDict(data=self.data)
        state._metadata = OrderedDict({"": {"batch_size": torch.Size([self.rows]), "device": torch.device("cpu")}})
        return state

    def load_state_dict(self, state: Any) -> None:
        told = state._metadata[""]
        assert type(state._metadata) is OrderedDict
        assert told["device"] == torch.device("cpu")
        assert type(told["batch_size"]) is torch.Size
        self.rows = told["batch_size"][0]
        self.data = state["data"].clone()


class Holder:
    """An agent, a replay buffer or an EMA: its state is a dict that has the states of what it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return {"parts": [one.state_dict() for one in self.held.values()], "count": len(self.held)}

    def load_state_dict(self, state: Any) -> None:
        for one, part in zip(self.held.values(), state["parts"], strict=True):
            one.load_state_dict(part)


class Scaled(nn.Module):
    """A layer whose first version kept a hundredth of its weight."""

    _version = 2

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kw: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kw)


def net(value: float = 1.0) -> Any:
    return nn.Sequential(nn.Linear(1, 1), Scaled(value))


def old_net(value: float) -> Any:
    """The same network by the first version of the layer."""
    model = net(value)
    model[1].__class__ = type("Scaled", (Scaled,), {"_version": 1})
    return model


def weight(model: nn.Module) -> float:
    return float(model.state_dict()["1.weight"])


def test_an_object_gets_the_metadata_at_any_depth(through: Through) -> None:
    found = Holder(batch=Batch(1, 0.0), ema=net(), fresh=net())
    through({"agent": Holder(batch=Batch(3, 7.0), ema=net(5.0), fresh=old_net(0.02))}, {"agent": found})
    assert torch.equal(found.held["batch"].data, torch.full((3, 2), 7.0))
    assert (weight(found.held["ema"]), weight(found.held["fresh"])) == (5.0, 2.0)


@pytest.mark.parametrize("in_list", [False, True])
def test_a_state_dict_that_is_made_anew_has_its_metadata(through: Through, in_list: bool) -> None:
    saved = net(5.0).state_dict()
    found: Any = {"model": None}
    through({"model": [saved] if in_list else saved}, found)
    loaded = found["model"][0] if in_list else found["model"]
    assert loaded._metadata == saved._metadata
    model = net()
    model.load_state_dict(loaded)
    assert weight(model) == 5.0


@pytest.mark.parametrize("plain", [False, True])
def test_a_filled_state_dict_says_the_saved_versions(through: Through, plain: bool) -> None:
    """With tensors it is filled part by part, without it is one value; a plain dict cannot say it."""
    saved, here = old_net(0.05).state_dict(), net().state_dict()
    if plain:
        saved["1.weight"], here["1.weight"] = saved["1.weight"].tolist(), [0.0]
        del saved["0.weight"], saved["0.bias"], here["0.weight"], here["0.bias"]
    found: Any = {"model": here}
    through({"model": saved}, found)
    assert found["model"] is here
    assert here._metadata == saved._metadata
    if not plain:
        model = net()
        model.load_state_dict(here)
        assert weight(model) == 5.0
        through({"model": net(3.0).state_dict()}, other := {"model": dict(net().state_dict())})
        assert float(other["model"]["1.weight"]) == 3.0


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [lambda one: one, compiled, nn.DataParallel])
def test_a_module_is_told_the_versions_of_a_saved_state_dict(through: Through, wrap: Any) -> None:
    found = net()
    through({"model": wrap(old_net(0.03)).state_dict()}, {"model": found})
    assert weight(found) == 3.0
    found = net()
    through({"model": wrap(net(3.0)).state_dict()}, {"model": found})
    assert weight(found) == 3.0


def test_a_wrapped_module_says_the_saved_versions(through: Through) -> None:
    here = compiled(net()).state_dict()
    here._metadata["_orig_mod.1"]["version"] = 1
    through({"model": net(5.0)}, {"model": here})
    assert here._metadata["_orig_mod.1"] == {"version": 2}


def test_metadata_of_a_state_dict_without_any_stays_what_it_is(through: Through) -> None:
    here = net().state_dict()
    known = OrderedDict(here._metadata)
    through({"model": OrderedDict(net(5.0).state_dict().items())}, {"model": here})
    assert here._metadata == known
    assert float(here["1.weight"]) == 5.0


def test_a_key_of_a_dict_that_is_called_metadata_is_none(through: Through) -> None:
    here = net().state_dict()
    through({"model": {**net(5.0).state_dict(), "metadata": 7}}, {"model": here})
    assert here._metadata == net().state_dict()._metadata
    assert here["metadata"] == 7
