"""The future state of optimizers that have not stepped yet, found by one step of each kind on tensors without memory.

An optimizer makes its state with its first step. A second one of the same class and options steps once on tensors of the
``meta`` device with the shapes and dtypes of the parameters, which takes no memory and does not touch the first one. The
state of the second is described as shards, spread as the parameters are: a save of them can be planned like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.kinds import find_objects
from aiockpt.adapters.selection import ALL, LeafChoice, Selection
from aiockpt.adapters.tensors import dtype_code
from aiockpt.format.names import join_name
from aiockpt.sizing.share import whole_bytes
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard

_ONE_BY_ONE = {"foreach": False, "fused": False, "capturable": False}
"""Implementations that the ``meta`` device does not support."""

Kind = tuple[tuple[int, ...], torch.dtype]
Slots = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""Key, shape and dtype of each tensor that a parameter has in an optimizer."""


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


class OptimizerToCome(msgspec.Struct, frozen=True):
    """The future state of one optimizer.

    Attributes:
        shards: of that state; they have no memory.
        device_bytes: the bytes of them that will not be in host memory.
    """

    described: StateToCome
    shards: tuple[TensorShard, ...] = ()
    device_bytes: int = 0


def find_state_to_come(
    state: Mapping[str, Any], walked: Sequence[TensorShard], selection: Selection = ALL
) -> list[OptimizerToCome]:
    """Return the future state of each optimizer of *state* that is saved and has parameters without state.

    Args:
        walked: the tensors of *state* as they are now, which show how parameters are spread over ranks.
    """
    choice = LeafChoice(selection, state)
    spread = {_address(shard.data): shard for shard in walked}
    chosen = ((path, one) for path, one in find_objects(state, Optimizer) if choice.keeps_whole(path, one))
    found = (_of_optimizer(join_name(path), optimizer, spread) for path, optimizer in chosen)
    return [one for one in found if one is not None]


def _address(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _of_optimizer(
    name: str, optimizer: Optimizer, spread: Mapping[tuple[int, tuple[int, ...]], TensorShard]
) -> OptimizerToCome | None:
    shards: list[TensorShard] = []
    device_bytes = 0
    for group in optimizer.param_groups:
        new = [parameter for parameter in group["params"] if _is_new(parameter, optimizer)]
        kinds = list(dict.fromkeys((tuple(local_part(parameter).shape), parameter.dtype) for parameter in new))
        made = _try(optimizer, group, kinds)
        if made is None:
            return OptimizerToCome(StateToCome(name, None, 0))
        for parameter in new:
            local = local_part(parameter)
            # data_ptr() is 0 for a tensor without memory: all of one shape would be taken for one.
            known = spread.get(_address(local)) if local.data_ptr() else None
            beside = known or _unnamed(parameter, local, len(shards))
            own = [_shard(name, beside, local, slot) for slot in made[tuple(local.shape), parameter.dtype]]
            device_bytes += 0 if local.is_cpu else sum(shard.nbytes for shard in own)
            shards += own
    described = StateToCome(name, sum(shard.nbytes for shard in shards), whole_bytes(shards))
    return OptimizerToCome(described, tuple(shards), device_bytes) if shards else None


def _is_new(parameter: torch.Tensor, optimizer: Optimizer) -> bool:
    """Return whether a parameter will get a state. One without elements on this rank may never get any."""
    if not parameter.requires_grad or optimizer.state.get(parameter):
        return False
    return local_part(parameter).numel() > 0 or not optimizer.state


def local_part(parameter: Any) -> torch.Tensor:
    """Return what this rank holds of a parameter."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


def _unnamed(parameter: torch.Tensor, local: torch.Tensor, number: int) -> TensorShard:
    """Return a flat stand-in for a parameter that is not saved, so that its spread over ranks is unknown."""
    box = Box((0,), (local.numel(),))
    return TensorShard(str(number), dtype_code(local.dtype), (parameter.numel(),), (box,), None)


def _shard(
    name: str, beside: TensorShard, local: torch.Tensor, slot: tuple[str, tuple[int, ...], torch.dtype]
) -> TensorShard:
    """Return one tensor of the state of a parameter: spread like the parameter if of its shape, else whole on each rank."""
    key, shape, dtype = slot
    own_shape, boxes = beside.shape, beside.boxes
    if shape != tuple(local.shape):
        own_shape, boxes = shape, (Box.whole(shape),)
    data = torch.empty(shape, dtype=dtype, device="meta")
    return TensorShard(f"{name}.state.{beside.name}.{key}", dtype_code(dtype), own_shape, boxes, data)


def _try(optimizer: Optimizer, group: Mapping[str, Any], kinds: Sequence[Kind]) -> dict[Kind, Slots] | None:
    """Return the tensors that a parameter of each kind will have in the optimizer; None if a step cannot be tried."""
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
    return {one: _slots(other.state[parameter]) for one, parameter in zip(kinds, parameters, strict=True)}


def _slots(held: Mapping[Any, Any]) -> Slots:
    tensors = ((key, value) for key, value in held.items() if isinstance(value, torch.Tensor))
    return [(str(key), tuple(value.shape), value.dtype) for key, value in tensors]
