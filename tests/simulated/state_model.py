"""Model of what a load must restore: facts of a state, bit by bit and type by type, and how two states differ.

Written from the guide to states alone; no code of a load is imported. `facts_of` maps an object to a value that is the same
for equal objects and differs for different ones: NaN by its bits, a container with its class and order, a tensor with dtype,
shape and bytes, a module, optimizer or scheduler with its whole ``state_dict()``.
"""

import array
import collections
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import numpy as np
import torch

from tests.simulated.states import Path

Facts = Any
"""Nested tuples of plain values, to be compared with ``==``."""


def facts_of(value: Any) -> Facts:
    """Return the facts of an object of a state, or of a whole state."""
    for kinds, describe in _TELL:
        if isinstance(value, kinds):
            return describe(value)
    if hasattr(value, "state_dict"):  # a scheduler; functions in its state are the program's
        return _describe_items(
            type(value).__name__, {key: one for key, one in value.state_dict().items() if not callable(one)}
        )
    return (type(value).__name__, repr(value))


def _describe_items(name: str, mapping: Mapping[Any, Any]) -> Facts:
    return (name, tuple((facts_of(key), facts_of(one)) for key, one in mapping.items()))


def _describe_sequence(value: Sequence[Any]) -> Facts:
    return (type(value).__name__, tuple(map(facts_of, value)))


_TELL: list[tuple[type | UnionType, Callable[[Any], Facts]]] = [
    (torch.Tensor, lambda one: ("tensor", str(one.dtype), tuple(one.shape), _bytes_of(one))),
    (torch.nn.Module | torch.optim.Optimizer, lambda one: (type(one).__name__, facts_of(one.state_dict()))),
    (np.ndarray, lambda one: ("ndarray", str(one.dtype), one.shape, one.tobytes())),
    (np.generic, lambda one: (type(one).__name__, one.tobytes())),
    (float, lambda one: ("float", struct.pack("<d", one))),
    (complex, lambda one: ("complex", struct.pack("<dd", one.real, one.imag))),
    (collections.defaultdict, lambda one: _describe_items(f"defaultdict of {one.default_factory}", one)),
    (collections.OrderedDict, lambda one: (_describe_items("OrderedDict", one), facts_of(vars(one).get("_metadata")))),
    (Mapping, lambda one: _describe_items(type(one).__name__, one)),
    (collections.deque, lambda one: ("deque", one.maxlen, tuple(map(facts_of, one)))),
    (set | frozenset, lambda one: (type(one).__name__, frozenset(map(facts_of, one)))),
    (torch.Size | list | tuple, _describe_sequence),
    (bytearray | array.array, lambda one: (type(one).__name__, bytes(one))),
]
"""The function for the facts of each kind; the first that fits is used."""


def _bytes_of(tensor: torch.Tensor) -> bytes:
    packed = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # without strides of its own
    return packed.reshape(-1).view(torch.uint8).numpy().tobytes()


def first_difference(wanted: Any, found: Any, path: Path = ()) -> str | None:
    """Return the first difference of two states in words; None for equal states."""
    if facts_of(wanted) == facts_of(found):
        return None
    if isinstance(wanted, Mapping) and isinstance(found, Mapping) and type(wanted) is type(found):
        if list(map(facts_of, wanted)) != list(map(facts_of, found)):
            return f"{path}: the keys are {list(found)}, not {list(wanted)}"
        pairs: list[tuple[Any, Any, Any]] = [(key, wanted[key], found[key]) for key in wanted]
    elif isinstance(wanted, list | tuple) and type(wanted) is type(found) and len(wanted) == len(found):
        pairs = [(number, *pair) for number, pair in enumerate(zip(wanted, found, strict=True))]
    else:
        return f"{path}: it is {_shown(found)}, not {_shown(wanted)}"
    for key, one, other in pairs:
        if (difference := first_difference(one, other, (*path, key))) is not None:
            return difference
    return f"{path}: {_shown(found)} is not {_shown(wanted)}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text[:120]}"


FILLED = (
    list, dict, collections.deque, set, bytearray, array.array, np.ndarray, torch.Tensor, torch.nn.Module,
    torch.optim.Optimizer,
)  # fmt: skip
"""Classes of objects that a load fills in place."""


def identities(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each object of a state that a load must fill in place, with its path.

    It skips sequences of plain values: their length is data.
    """
    if isinstance(state, FILLED) or hasattr(state, "state_dict"):
        yield path, state
    if isinstance(state, dict):
        for key, one in state.items():
            yield from identities(one, (*path, key))
    elif isinstance(state, list | tuple | collections.deque):
        for number, one in enumerate(state):
            yield from identities(one, (*path, number))


def layout_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of more than one element in memory order, slowest first; None for a tensor with gaps."""
    strides = tensor.stride()
    axes = sorted((axis for axis, size in enumerate(tensor.shape) if size > 1), key=lambda axis: -strides[axis])
    elements = 1
    for axis in reversed(axes):
        if strides[axis] != elements:
            return None
        elements *= tensor.shape[axis]
    return tuple(axes)


def at(state: Any, path: Path) -> Any:
    """Return the object at *path* of a state."""
    for key in path:
        state = state[key]
    return state


def ties_of(state: Any) -> frozenset[frozenset[Path]]:
    """Return the groups of places whose tensors begin at the same byte of one storage."""
    groups: dict[tuple[int, int], set[Path]] = {}
    for path, one in identities(state):
        if isinstance(one, torch.Tensor) and one.numel():
            groups.setdefault((one.untyped_storage().data_ptr(), int(one.storage_offset())), set()).add(path)
    return frozenset(frozenset(group) for group in groups.values() if len(group) > 1)
