"""Can a tensor that is here hold one of the checkpoint? And what is made where none can."""

from __future__ import annotations

import torch

from aiockpt.adapters.held import FlatRange, Held
from aiockpt.adapters.tensors import dtype_code, empty_like, is_lazy, local_tensors, overlaps_itself
from aiockpt.format.dtypes import torch_name


def _fillable(tensor: torch.Tensor) -> bool:
    return not overlaps_itself(tensor) and not is_lazy(tensor)


def fits(live: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor | torch.device, flat: FlatRange | None) -> bool:
    """Return whether *live* can hold a tensor of *shape*; with *flat*, that slice of it, as the slice *like* does."""
    if flat is not None and isinstance(like, torch.Tensor):
        return live.shape == like.shape and _fillable(live)
    return tuple(live.shape) == shape and all(map(_fillable, local_tensors(live)))


def misfit(own_dtype: torch.dtype, held: Held, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return in words why a tensor of *own_dtype* cannot be filled from one of code *dtype* and *shape*, or None."""
    if held.shape != shape:
        return f"shape {held.shape} in the state, {shape} in the checkpoint"
    if dtype_code(own_dtype) != dtype:
        return f"{own_dtype} in the state, torch.{torch_name(dtype)} in the checkpoint"
    if not all(_fillable(piece.local) for piece in held.pieces):
        return "its elements share memory or are lazily conjugated; give a plain copy (clone())"
    return None


def new_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | torch.device, flat: FlatRange | None
) -> torch.Tensor:
    """Return a tensor to hold one of *shape*, or slice *flat* of it; on the device *like*, or like that tensor."""
    if isinstance(like, torch.device):
        return torch.empty(shape, dtype=dtype, device=like)
    if flat is not None or tuple(like.shape) == shape:
        return empty_like(like, dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)
