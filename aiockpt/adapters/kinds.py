"""Kinds of values in a state, one for each way of saving and loading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from aiockpt.adapters.rng import PerRank
from aiockpt.data.loader import Loader
from aiockpt.state.tree import MAX_DEPTH, Path

T = TypeVar("T")
Kind = Literal["module", "optimizer", "loader", "per_rank", "stateful", "tensor", "container", "value"]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_DICTS = frozenset({dict, OrderedDict})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


@runtime_checkable
class Stateful(Protocol):
    """Anything that returns its state and loads it."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def kind_of(value: Any) -> Kind:
    """Return how *value* is saved and loaded; "value" for everything that the tree of values writes, or refuses.

    A dict, list or tuple that contains an object at any depth is a "container", walked part by part; so is a dict with
    text keys that contains a tensor. Any other is a "value", read as a whole.
    """
    cls = type(value)
    if isinstance(value, torch.Tensor):
        return "tensor"
    # A class whose objects have `state_dict()` has that attribute itself, and would pass for `Stateful`.
    if cls in _PLAIN or issubclass(cls, type):
        return "value"
    if cls in _CONTAINERS:
        return "container" if _is_walked(value, set()) else "value"
    return _kind_of_object(value)


def _kind_of_object(value: Any) -> Kind:
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


def members(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return (key, value) of a mapping, (place, item) of a list or tuple."""
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def find_objects(container: Any, cls: type[T], path: Path = ()) -> Iterator[tuple[Path, T]]:
    """Yield the objects of class *cls* in a state, or in a container of it at *path*, with their paths."""
    for key, value in members(container):
        if isinstance(value, cls):
            yield (*path, key), value
        elif kind_of(value) == "container":
            yield from find_objects(value, cls, (*path, key))


def _is_walked(container: Any, seen: set[tuple[int, bool]], *, named: bool = True, depth: int = 0) -> bool:
    """Return whether a dict, list or tuple is a container.

    Args:
        seen: the containers walked already.
        named: whether all outer containers are dicts with text keys, so that a tensor in it has a name of its own.
        depth: the number of outer containers. Beyond the limit it is a value, and refused as one.
    """
    if (id(container), named) in seen or depth > MAX_DEPTH:
        return False
    seen.add((id(container), named))
    is_dict = type(container) in _DICTS
    values = container.values() if is_dict else container
    classes = set(map(type, values)) - _PLAIN
    if not classes:
        return False
    named = named and is_dict and all(type(key) is str for key in container)
    return any(
        _is_walked(value, seen, named=named, depth=depth + 1) if type(value) in _CONTAINERS else _counts(value, named)
        for value in values
        if type(value) in classes
    )


def _counts(value: Any, named: bool) -> bool:
    """Return whether a value makes the dict, list or tuple around it a container: an object does, and a named tensor."""
    if isinstance(value, torch.Tensor):
        return named
    return not isinstance(value, type) and _kind_of_object(value) != "value"


def reads_data(value: object) -> bool:
    """Return whether an object yields samples, so that its state depends on the rank and the number of ranks."""
    return isinstance(value, DataLoader | Dataset | Sampler)


def _belongs_to_rank(value: Stateful) -> bool:
    """Return whether an object's state belongs to this rank by nature: random generators and readers of data."""
    return reads_data(value) or bool(getattr(value, "aiockpt_per_rank", False))


NAMES = ("params", "param_names")
"""Keys of a group that torch itself adds."""
HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a group that are properties of the job."""

SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Keys of a group that schedulers set. (Some also set ``betas`` or ``momentum``.)"""


def default_keys(optimizer: Optimizer) -> list[str]:
    """Return the default keys of each group of *optimizer*, sorted, without those for how a step is computed."""
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, Mapping):
        return []
    return sorted(key for key in defaults if type(key) is str and key not in HOW_TO_STEP)


def scheduler_in(value: object) -> LRScheduler | None:
    """Return *value* if it is a learning rate scheduler, or the one that accelerate's wrapper forwards all calls to."""
    if type(value).__name__ == "AcceleratedScheduler":
        value = vars(value).get("scheduler")
    return value if isinstance(value, LRScheduler) else None


def driven_by(value: object) -> Optimizer | None:
    """Return the optimizer whose rates an object sets, without wrappers: a scheduler, or another with ``step()``."""
    optimizer = getattr(scheduler_in(value) or value, "__dict__", {}).get("optimizer")
    if isinstance(optimizer, Optimizer) and callable(getattr(value, "step", None)):
        return innermost(optimizer)
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that *optimizer* forwards all calls to, as wrappers of accelerate and Lightning do; or itself."""
    inner = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if len(inner) != 1 or inner[0].state is not optimizer.state or inner[0].param_groups is not optimizer.param_groups:
        return optimizer
    return innermost(inner[0])
