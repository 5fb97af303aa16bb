"""What this rank will write: its share of a state, and what its optimizers will add with their first step.

Before the ranks have planned a save, a tensor that this rank holds whole is assumed to be whole on all ranks
(`DistributedDataParallel`, the scalars of an optimizer), and is divided as by `aiockpt.planning.spread`; a tensor that it
holds in part is assumed to be its own (FSDP). Both are wrong for a mesh that has both: the estimate reports them.

An optimizer makes its state with its first step. A second one of the same class and options steps once on tensors of the
``meta`` device with the shapes and dtypes of the parameters, which takes no memory and does not touch the first one. The
state of the second is described as shards, spread as the parameters are: a save of them can be planned like any other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.kinds import find_objects
from aiockpt.adapters.selection import ALL, LeafChoice, Selection
from aiockpt.adapters.take_parts import take_parts
from aiockpt.adapters.tensors import dtype_code
from aiockpt.engine.coordinator import Coordinator
from aiockpt.format.dtypes import itemsize
from aiockpt.format.names import join_name
from aiockpt.planning.shard_map import local_boxes_of
from aiockpt.planning.spread import spread
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure

_ONE_BY_ONE = {"foreach": False, "fused": False, "capturable": False}
"""Implementations that the ``meta`` device does not support."""


class StateToCome(msgspec.Struct, frozen=True):
    """What an optimizer will hold after its first step and does not hold yet.

    Attributes:
        name: its place in the state.
        rank_bytes: on this rank; None where that cannot be found.
        bytes: of all ranks together, those of a sharded parameter once.
        device_bytes: those of this rank that will not be in host memory.
        shards: of that state; they have no memory.
    """

    name: str
    rank_bytes: int | None
    bytes: int = 0
    device_bytes: int = 0
    shards: tuple[TensorShard, ...] = ()


def find_state_to_come(
    state: Mapping[str, Any], walked: Sequence[TensorShard], selection: Selection = ALL
) -> list[StateToCome]:
    """Return the future state of each optimizer of *state* that is saved and has parameters without state.

    Args:
        walked: the tensors of *state* as they are now, which show how parameters are spread over ranks.
    """
    choice = LeafChoice(selection, state)
    known = {_address(shard.data): shard for shard in walked}
    chosen = (
        (path, optimizer) for path, optimizer in find_objects(state, Optimizer) if choice.keeps_whole(path, optimizer)
    )
    found = (_of_optimizer(join_name(path), optimizer, known) for path, optimizer in chosen)
    return [future for future in found if future is not None]


def _address(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _of_optimizer(
    name: str, optimizer: Optimizer, known: Mapping[tuple[int, tuple[int, ...]], TensorShard]
) -> StateToCome | None:
    shards: list[TensorShard] = []
    device_bytes = 0
    for group in optimizer.param_groups:
        new = [parameter for parameter in group["params"] if _is_new(parameter, optimizer)]
        made = _try(optimizer, group, list(map(local_part, new)))
        if made is None:
            return StateToCome(name, None)
        for parameter, held in zip(new, made, strict=True):
            local = local_part(parameter)
            # data_ptr() is 0 for a tensor without memory: all of one shape would be taken for one.
            beside = (known.get(_address(local)) if local.data_ptr() else None) or _unnamed(
                parameter, local, len(shards)
            )
            tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
            own = [_shard(f"{name}.state.{beside.name}.{key}", beside, local, slot) for key, slot in tensors.items()]
            device_bytes += 0 if local.is_cpu else sum(shard.nbytes for shard in own)
            shards += own
    rank_bytes = sum(shard.nbytes for shard in shards)
    return StateToCome(name, rank_bytes, whole_bytes(shards), device_bytes, tuple(shards)) if shards else None


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


def _shard(name: str, beside: TensorShard, local: torch.Tensor, slot: torch.Tensor) -> TensorShard:
    """Return one tensor of the state of a parameter: spread like the parameter if of its shape, else whole on each rank."""
    shape = tuple(slot.shape)
    own_shape, boxes = (beside.shape, beside.boxes) if shape == tuple(local.shape) else (shape, (Box.whole(shape),))
    return TensorShard(name, dtype_code(slot.dtype), own_shape, boxes, slot)


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], parts: Sequence[torch.Tensor]
) -> list[Mapping[Any, Any]] | None:
    """Return what each of the parameters in a group will have in the optimizer; None if a step cannot be tried."""
    parameters = [torch.nn.Parameter(torch.empty_like(local, device="meta")) for local in parts]
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
        defaults = {key: value for key, value in {**optimizer.defaults, **options}.items() if key in takes}
        other = kind([{"params": parameters, **options}], **defaults)
        step(other)
    except Exception:  # noqa: BLE001  an optimizer of anybody's, which may need what is not there
        return None
    return [other.state[parameter] for parameter in parameters]


SUPPOSED = (
    "the ranks have not planned a save yet: what this rank holds whole is taken to be held by all of them, and what it "
    "holds in part to be its own"
)
ONLY_SEEN = (
    "tensors that other ranks have and this one has not (pipeline stages, FullyShardedDataParallel) are not counted"
)


def find_share(
    coordinator: Coordinator, walked: ShardedState, coming: Sequence[TensorShard]
) -> tuple[ShardedState, tuple[str, ...]]:
    """Return what this rank writes of *walked* and of *coming*, and the assumptions made, in words.

    The plan of an earlier save, or of `warm_up`, is used if there is one; nothing is communicated.
    """
    if coordinator.world_size == 1:
        return _join(walked, walked.tensors, coming), ()
    known = coordinator.known_share(walked)
    if known is None:
        return _divide(coordinator, _join(walked, walked.tensors, coming)), (SUPPOSED, ONLY_SEEN)
    if not coming:
        return known, (ONLY_SEEN,)
    likely = _divide(coordinator, _join(walked, (), coming))
    return _join(walked, known.tensors, likely.tensors), (SUPPOSED, ONLY_SEEN)


def _join(state: ShardedState, some: Sequence[TensorShard], others: Sequence[TensorShard]) -> ShardedState:
    """Return *state* with these tensors instead of its own; *state* itself if they are the same."""
    tensors = (*some, *others)
    if tensors == state.tensors:
        return state
    return msgspec.structs.replace(state, tensors=tensors, structure=digest_structure(tensors, state.alias))


def _divide(coordinator: Coordinator, state: ShardedState) -> ShardedState:
    whole = [shard for shard in state.tensors if sum(box.volume for box in shard.boxes) == math.prod(shard.shape)]
    held = local_boxes_of(msgspec.structs.replace(state, tensors=tuple(whole)))
    parts = spread([held] * coordinator.world_size)[coordinator.rank]
    names = {shard.name for shard in whole}
    order = {shard.name: number for number, shard in enumerate(state.tensors)}
    dealt = [*take_parts(whole, parts), *(shard for shard in state.tensors if shard.name not in names)]
    return _join(state, sorted(dealt, key=lambda shard: order[shard.name]), ())


def whole_bytes(shards: Iterable[TensorShard]) -> int:
    """Return the bytes of the tensors that *shards* are parts of, on all ranks together, each once."""
    return sum({shard.name: math.prod(shard.shape) * itemsize(shard.dtype) for shard in shards}.values())
