"""Can a tensor or value that is here become one of the checkpoint? And what tensor is made where none can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy as is_uninitialized

from aiockpt.adapters.local_shards import FlatRange, LocalShards
from aiockpt.adapters.tensors import dtype_code, empty_like, is_fillable, is_lazy, local_tensors
from aiockpt.errors import kind_in_words
from aiockpt.format.dtypes import torch_name


def fits(live: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor | torch.device, flat: FlatRange | None) -> bool:
    """Return whether *live* can hold a tensor of *shape*; with *flat*, that slice of it, as the slice *like* does."""
    if flat is not None and isinstance(like, torch.Tensor):
        return live.shape == like.shape and is_fillable(live)
    return tuple(live.shape) == shape and all(map(is_fillable, local_tensors(live)))


def misfit(own_dtype: torch.dtype, held: LocalShards, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return in words why a tensor of *own_dtype* cannot be filled from one of code *dtype* and *shape*, or None."""
    if held.shape != shape:
        return f"shape {held.shape} in the state, {shape} in the checkpoint"
    if dtype_code(own_dtype) != dtype:
        return f"{own_dtype} in the state, torch.{torch_name(dtype)} in the checkpoint"
    if any(is_lazy(piece.local) for piece in held.pieces):
        return "it is lazily conjugated or negated; give a plain copy (resolve_conj(), resolve_neg())"
    return None


def new_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: torch.Tensor | torch.device,
    flat: FlatRange | None,
    axes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a tensor to hold one of *shape*, or slice *flat* of it; on the device *like*, or like that tensor.

    Args:
        axes: in which order they lay in memory, slowest first; a slice has none. None takes the layout of the tensor
            *like*, where it has the shape, else their own order.
    """
    if (
        isinstance(like, torch.Tensor)
        and not is_uninitialized(like)
        and (flat is not None or tuple(like.shape) == shape)
    ):
        return empty_like(like, dtype, axes if flat is None else None)
    device = like if isinstance(like, torch.device) else like.device
    if axes is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_permuted(shape, tuple(axes), dtype=dtype, device=device)


def number_misfit(number: Any, dtype: torch.dtype) -> str | None:
    """Return in words why a plain number cannot become an element of *dtype*, or None.

    Floats are rounded; an integer dtype takes integral values in its range, and only a complex one complex numbers.
    """
    try:
        _as_element(number, dtype)
    except (OverflowError, ValueError, TypeError, RuntimeError):
        return f"a tensor of {dtype} in the state, {kind_in_words(number)} that is none of its values in the checkpoint"
    return None


def write_number(number: Any, into: torch.Tensor) -> None:
    """Fill a tensor without axes with a plain number that fits it (`number_misfit`)."""
    element = _as_element(number, into.dtype)
    with torch.inference_mode(into.is_inference()), torch.no_grad():
        for local in local_tensors(into):
            local.detach().copy_(element)


def _as_element(number: Any, dtype: torch.dtype) -> torch.Tensor:
    plain = number.item() if isinstance(number, np.generic) else number
    if isinstance(plain, np.generic):  # longdouble is its own item
        plain = complex(plain) if np.iscomplexobj(plain) else float(plain)
    if dtype.is_complex:
        return torch.tensor(complex(plain), dtype=dtype)
    if isinstance(plain, complex):
        raise TypeError("a complex number")
    if dtype.is_floating_point:
        return torch.tensor(float(plain), dtype=dtype)
    whole = int(plain)
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if whole != plain or not least <= whole <= most:
        raise ValueError("not one of its values")
    return torch.tensor(whole, dtype=dtype)
