"""What will optimizers hold that have not stepped yet? Found by one step of each kind on tensors without memory.

An optimizer makes its state with its first step. A second one of the same class and options steps once on tensors of the
``meta`` device with the shapes and dtypes of the parameters, which takes no memory and touches nothing of the first.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.selection import ALL, LeafChoice, Selection
from aiockpt.format.names import join_name
from aiockpt.state.tree import Path

_ONE_BY_ONE = {"foreach": False, "fused": False, "capturable": False}
"""Ways to compute that the ``meta`` device has not."""


class StateToCome(msgspec.Struct, frozen=True):
    """What an optimizer will hold after its first step and does not hold yet.

    Attributes:
        name: its place in the state.
        rank_bytes: on this rank; None where that cannot be found.
        bytes: of all ranks together, those of a sharded parameter once.
    """

    name: str
    rank_bytes: int | None
    bytes: int


def find_state_to_come(state: Mapping[str, Any], selection: Selection = ALL) -> list[StateToCome]:
    """Return what is to come of each optimizer of *state* that is saved and has parameters without state."""
    choice = LeafChoice(selection, state)
    chosen = ((path, one) for path, one in _optimizers(state, ()) if choice.keeps_whole(path, one))
    found = (_of_optimizer(join_name(path), optimizer) for path, optimizer in chosen)
    return [one for one in found if one is not None]


def _optimizers(value: Any, path: Path) -> Iterator[tuple[Path, Optimizer]]:
    if isinstance(value, Optimizer):
        yield path, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _optimizers(below, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from _optimizers(below, (*path, str(number)))


def _of_optimizer(name: str, optimizer: Optimizer) -> StateToCome | None:
    rank_bytes = total = 0
    fresh = False
    for group in optimizer.param_groups:
        new = [
            parameter for parameter in group["params"] if parameter.requires_grad and not optimizer.state.get(parameter)
        ]
        fresh = fresh or bool(new)
        kinds = Counter((tuple(_local(parameter).shape), parameter.dtype) for parameter in new)
        made = _try(optimizer, group, list(kinds))
        if made is None:
            return StateToCome(name, None, 0)
        for parameter in new:
            local = _local(parameter)
            size = made[tuple(local.shape), parameter.dtype]
            rank_bytes += size
            total += round(size * parameter.numel() / max(local.numel(), 1))
    return StateToCome(name, rank_bytes, total) if fresh and rank_bytes else None


def _local(parameter: Any) -> torch.Tensor:
    """Return what this rank holds of a parameter."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], kinds: list[tuple[tuple[int, ...], torch.dtype]]
) -> dict[tuple[tuple[int, ...], torch.dtype], int] | None:
    """Return the bytes that a parameter of each kind will have in the optimizer; None where it cannot be tried."""
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in kinds]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    options |= {key: value for key, value in _ONE_BY_ONE.items() if key in options}
    kind: Any = type(optimizer)
    step = getattr(kind.step, "__wrapped__", None)  # without the hooks: nothing is trained
    if step is None:
        return None
    try:
        takes = inspect.signature(kind.__init__).parameters
        defaults = {key: value for key, value in optimizer.defaults.items() if key in takes} | {
            key: value for key, value in options.items() if key in takes
        }
        other = kind([{"params": parameters, **options}], **defaults)
        step(other)
    except Exception:  # noqa: BLE001  an optimizer of anybody's, which may need what is not there
        return None
    return {
        one: sum(_bytes(value) for value in other.state[parameter].values())
        for one, parameter in zip(kinds, parameters, strict=True)
    }


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
