"""Leaves of a Megatron sharded state dict in the engine's form: boxes of global tensors, and values.

Every ``ShardedTensor`` of one key is a part of one tensor: a layer of a stack (``prepend_axis_num``), half of a SwiGLU
projection (what its factory builds), a tensor-parallel slice. All parts that a rank holds of a key are one
`aiockpt.Shards`, without copies: a save reads the tensors in place, and a load fills them in place. Ranks that hold the
same part are not distinguished by ``replica_id``: the engine stores it once, and distributes the writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

import aiockpt
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.integrations.nested import put

mapping: Any = import_module("megatron.core.dist_checkpointing.mapping")

STATE = "optimizer.state."
"""Prefix of the keys of Megatron's optimizers: ``optimizer.state.exp_avg.KEY``."""
MAIN = ("param", "fp32_param")
"""Names in these keys for the weights in the precision of the optimizer."""
Part = tuple[tuple[int, ...], torch.Tensor]
"""The offsets of a local tensor in the global one, and the tensor, with as many axes."""

_LOADED = "tensors"


class ShardParts(mapping.ShardedBase):  # type: ignore[misc]  # Any, where Megatron is not installed
    """A leaf for which Megatron has no class: any parts of a global tensor, such as a slice of a flat buffer.

    Args:
        key: of the global tensor.
        data: the local tensor that contains all parts; a load replaces this leaf by it.
        shape: of the global tensor.
        parts: views of *data*, with their offsets.
        saves: whether this rank saves them. Where another rank has the same elements in other parts, one of both saves.
        beside: other values of the parameter in the optimizer's dict, by their names there.
    """

    def __init__(
        self,
        key: str,
        data: torch.Tensor,
        shape: tuple[int, ...],
        parts: Sequence[Part],
        *,
        saves: bool = True,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        self.key = key
        self.data = data
        self.shape = shape
        self.parts = list(parts)
        self.saves = saves
        self.beside = dict(beside or {})
        self.replica_id = 0 if saves else 1

    @property
    def parameter(self) -> str:
        """The key of its parameter."""
        of_state = split_state_key(self.key)
        return self.key if of_state is None else of_state[1]

    def validate_metadata_integrity(self) -> None:
        """Do nothing: `aiockpt.Shards` checks it."""

    def without_data(self) -> ShardParts:
        """Return the leaf without its tensors."""
        return ShardParts(self.key, self.data[:0], self.shape, [], saves=self.saves)


def leaf_name(base: Any) -> str:
    """Return the name of a leaf: the key of a tensor; key and place for one of several objects of a key."""
    return str(base.unique_key if isinstance(base, mapping.ShardedObject) else base.key)


class GroupSettings(mapping.ShardedObject):  # type: ignore[misc]  # Any, where Megatron is not installed
    """The values of a group of the optimizer, with the keys of those of its parameters that this rank has."""

    parameters: Sequence[str] = ()


def split_state_key(key: str) -> tuple[str, str] | None:
    """Return slot and parameter of a key of the optimizer: ``("exp_avg", KEY)``; None for another key."""
    slot, dot, name = key.removeprefix(STATE).partition(".")
    return (slot, name) if key.startswith(STATE) and dot else None


def path_of(key: str) -> tuple[str, ...]:
    """Return the path in the checkpoint of the tensor of a key.

    The optimizer is a dict in the flat form of torch's ``get_optimizer_state_dict``, to which each rank adds its part.
    """
    of_state = split_state_key(key)
    if of_state is None:
        parts = key.split(".")
        return tuple(parts) if parts[0] == "optimizer" else ("model", *parts)
    slot, name = of_state
    return ("main_params", *name.split(".")) if slot in MAIN else ("optimizer", f"state.{name}.{slot}")


def path_to_load(key: str) -> tuple[str, ...]:
    """Return the path of the tensor of a key in the state to load, which is not that of an optimizer."""
    return (_LOADED, key)


def parts_of(base: Any) -> tuple[tuple[int, ...], torch.dtype, list[Part]]:
    """Return the shape of the global tensor, its dtype here, and this rank's parts of it."""
    if isinstance(base, ShardParts):
        return base.shape, base.data.dtype, base.parts
    local = base.data.detach()
    local = local.view((1,) * base.prepend_axis_num + tuple(local.shape))
    return tuple(base.global_shape), local.dtype, [(tuple(base.global_offset), local)]


class GlobalTensors:
    """The tensors of a sharded state dict by key, each with the parts of this rank.

    Attributes:
        shapes: of the global tensors.
        flexible: keys of tensors that may have another size in the checkpoint (a padded vocabulary).
    """

    def __init__(self, bases: Sequence[Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.flexible: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[Part]] = {}
        self._saves: dict[str, bool] = {}
        self._beside: dict[str, list[Any]] = {}
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []
        for base in bases:
            if not isinstance(base, mapping.ShardedObject):
                self._add(base)

    def _add(self, base: Any) -> None:
        shape, dtype, parts = parts_of(base)
        key = base.key
        self.shapes.setdefault(key, shape)
        if (self.shapes[key], self._dtypes.setdefault(key, dtype)) != (shape, dtype):
            raise aiockpt.UsageError(
                f"{key}: {dtype} {shape} in one place of the sharded state dict, and {self._dtypes[key]} "
                f"{self.shapes[key]} in another: a key names one tensor"
            )
        if getattr(base, "allow_shape_mismatch", False):
            self.flexible.add(key)
        known = self._parts.setdefault(key, [])
        self._saves[key] = self._saves.get(key, False) or getattr(base, "saves", True)
        for name, value in getattr(base, "beside", {}).items():
            self._beside.setdefault(name, []).append(value)
        for offsets, part in parts:
            same = [one for place, one in known if place == offsets and one.shape == part.shape]
            if same:
                self._after.append((part, same[0]))
            else:
                known.append((offsets, part))

    def to_save(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, shape in self.shapes.items():
            parts = self._parts[key] if self._saves[key] else []
            put(state, path_of(key), aiockpt.Shards(shape, parts, dtype=self._dtypes[key]))
        # Where the layers of a stack differ, the value is left out of the optimizer's dict.
        said = {name: values[0] for name, values in self._beside.items() if all(one == values[0] for one in values)}
        if said:
            state.setdefault("optimizer", {}).update(said)
        return state

    def to_load(self, saved: Mapping[str, aiockpt.TensorInfo]) -> dict[str, Any]:
        """Return the state to load, of *saved* tensors by key.

        A tensor of another dtype is loaded into a temporary one, from which `finish` fills it. A flexible tensor is filled
        where both sizes have elements, and with zeros elsewhere, as Megatron does.
        """
        state: dict[str, Any] = {}
        for key, shape in self.shapes.items():
            info, parts = saved[key], self._parts[key]
            if key in self.flexible and info.shape != shape:
                shape, (parts, outside) = info.shape, clip(parts, info.shape)
                # Not before the load, which may refuse the checkpoint, and then leaves all as it is.
                self._after[:0] = [(rest, rest.new_zeros(())) for rest in outside]
            dtype = torch_dtype(info.dtype)
            if dtype != self._dtypes[key]:
                made = [(offsets, torch.empty_like(part, dtype=dtype)) for offsets, part in parts]
                # In front: a second tensor with the same part is copied from the first, which must be filled by then.
                self._after[:0] = [(part, new) for (_, part), (_, new) in zip(parts, made, strict=True)]
                parts = made
            put(state, path_to_load(key), aiockpt.Shards(shape, parts, dtype=dtype))
        return state

    @torch.no_grad()
    def finish(self) -> None:
        """Fill tensors from their temporary ones, and the second of two tensors that hold the same part."""
        for target, source in self._after:
            target.copy_(source)


def clip(parts: Sequence[Part], shape: tuple[int, ...]) -> tuple[list[Part], list[torch.Tensor]]:
    """Return the pieces of *parts* inside a tensor of *shape*, and what is outside."""
    pieces, outside = [], []
    for offsets, part in parts:
        for axis, (start, whole) in enumerate(zip(offsets, shape, strict=True)):
            size = max(0, min(part.shape[axis], whole - start))
            part, rest = part.tensor_split((size,), axis)
            outside.append(rest)
        if part.numel():
            pieces.append((offsets, part))
    return pieces, outside


def flat_parts(base: Any, start: int, data: torch.Tensor) -> tuple[tuple[int, ...], list[Part]]:
    """Return the shape of the global tensor and the places of a slice of one local tensor.

    Args:
        base: the ``ShardedTensor`` of the local tensor.
        start: the number of the flattened local tensor's element that is the first of *data*.
        data: 1-D and contiguous.
    """
    ahead = base.prepend_axis_num
    shape, offsets = tuple(base.global_shape), tuple(base.global_offset)
    local = aiockpt.Shards.flat(tuple(base.local_shape), start, data).held
    boxes = [box for piece in local.pieces for box in piece.boxes]
    parts: list[Part] = []
    taken = 0
    for box in boxes:
        place = (*offsets[:ahead], *map(sum, zip(offsets[ahead:], box.offsets, strict=True)))
        length = math.prod(box.sizes)
        parts.append((place, data[taken : taken + length].view((1,) * ahead + box.sizes)))
        taken += length
    return shape, parts
