"""What is a value of the state, as far as saving and loading differ? One of a few kinds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from aiockpt.adapters.loader import Loader
from aiockpt.adapters.rng import PerRank

Kind = Literal["module", "optimizer", "loader", "per_rank", "stateful", "tensor", "container", "value"]

_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple)


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def kind_of(value: Any) -> Kind:
    """Return how *value* is saved and loaded; "value" for all that the tree of values writes, or refuses."""
    if type(value) in (dict, OrderedDict):
        return "container" if _has_objects(value, set()) else "value"
    if type(value) in _PLAIN or isinstance(value, type):
        return "value"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, Loader):
        return "loader"
    if isinstance(value, PerRank):
        return "per_rank"
    if isinstance(value, Stateful):
        return "per_rank" if _belongs_to_rank(value) else "stateful"
    return "value"


def _has_objects(mapping: Mapping[Any, Any], seen: set[int]) -> bool:
    """Return whether a dict holds, at any depth of dicts with string keys, something that is more than a plain value."""
    if id(mapping) in seen or not all(type(key) is str for key in mapping):
        return False
    seen.add(id(mapping))
    return any(
        _has_objects(value, seen) if type(value) in (dict, OrderedDict) else kind_of(value) != "value"
        for value in mapping.values()
    )


def reads_data(value: object) -> bool:
    """Return whether an object gives samples, so that its state belongs to a rank out of so many."""
    return isinstance(value, DataLoader | Dataset | Sampler)


def _belongs_to_rank(value: Stateful) -> bool:
    """Return whether an object's state is this rank's own by nature: random generators and what reads data."""
    return reads_data(value) or bool(getattr(value, "aiockpt_per_rank", False))
