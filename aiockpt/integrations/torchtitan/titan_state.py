"""State that torchtitan trains, as the engine takes it: dicts of names, fresh optimizers, loaders of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import aiockpt

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def make_state(optimizers: Any, saved: aiockpt.Description) -> None:
    """Add the tensors that *saved* fills to optimizers that never stepped, placed as their parameters are.

    torchtitan makes them by a step with gradients of zeros, which takes the memory of all gradients and calls the hooks
    of a step. Unknown state is still made so, through ``optimizers.state_dict()``.
    """
    nodes: Any = saved.values
    tensors = {tensor.name: tensor for tensor in saved.tensors}
    found = {
        key: tensors[node["name"]]
        for key, node in nodes.get("optimizer", {}).items()
        if isinstance(node, dict) and node.get("name") in tensors
    }
    for optimizer in optimizers:
        made = {} if optimizer.state else _state_like(optimizer, found)
        optimizer.state.update(made or {})


def _state_like(optimizer: torch.optim.Optimizer, found: Mapping[str, aiockpt.TensorInfo]) -> dict[Any, Any] | None:
    """Return tensors for the state of each parameter, zeros; None when the parameter has no tensor like one of them."""
    made: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            start = f"state.{name}."
            for key in (key for key in found if key.startswith(start)):
                shape, dtype = found[key].shape, _DTYPES.get(found[key].dtype)
                if dtype is None or shape not in ((), parameter.shape):
                    return None
                on = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                of_one = made.setdefault(parameter, {})
                like = torch.zeros((), device=on) if shape == () else parameter
                of_one[key.removeprefix(start)] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return made


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat dict as dicts in dicts, so that its tensors are called as those of a module are."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def flatten(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return the dict that `nest` received."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{start}{name}.") if isinstance(value, dict) else {start + name: value}
    return flat


def wrap_loader(dataloader: Any) -> aiockpt.Loader[Any]:
    """Return *dataloader* as the state of its data-parallel rank, which one of the ranks that read alike saves."""
    rank, size = getattr(dataloader, "dp_rank", None), getattr(dataloader, "dp_world_size", None)
    if rank is None or size is None:
        return aiockpt.Loader(dataloader)
    readers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(readers, rank)
    return aiockpt.Loader(dataloader, rank=rank, size=size, saves=readers.index(rank) == dist.get_rank())
