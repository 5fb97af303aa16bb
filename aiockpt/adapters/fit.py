"""Can a tensor or value that is here become one of the checkpoint? And what tensor is made where none can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from aiockpt.adapters.held import FlatRange, Held
from aiockpt.adapters.tensors import dtype_code, empty_like, is_lazy, local_tensors, overlaps_itself
from aiockpt.format.dtypes import torch_name
from aiockpt.state.tree import TAG, Node

_OBJECTS = {
    "module": "a module",
    "optimizer": "an optimizer",
    "stateful": "an object with state_dict()",
    "loader": "an aiockpt.Loader",
    "per_rank": "a value of each rank (aiockpt.per_rank)",
}
_WORDS = {
    "numpy.raw": "numpy.ndarray",
    "numpy.scalar": "numpy number",
    "stored": "bytes",
    "OrderedDict": "dict",
}
_NUMBERS = {"bool", "int", "float", "complex", "numpy number"}


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


def value_misfit(own: Node, stored: Node) -> str | None:
    """Return in words why a plain value that is written as *own* cannot become the *stored* one, or None.

    Types must be the same, also below the keys that two dicts share. None is a value yet to come and fits any; numbers of
    all types fit each other, since a counter that was 0 may have become 0.5.
    """
    problems = list(_value_misfits(own, stored, ""))
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more if problems else None


def _value_misfits(own: Node, stored: Node, where: str) -> Iterator[str]:
    here, there = _type_name(own), _type_name(stored)
    at = f"{where}: " if where else ""
    if there in _OBJECTS:
        yield f"{at}a plain value in the state, {_OBJECTS[there]} in the checkpoint"
    elif here != there and "None" not in (here, there) and not {here, there} <= _NUMBERS:
        yield f"{at}{_with_article(here)} in the state, {_with_article(there)} in the checkpoint"
    elif here == "None":
        for key, inner in _items(stored):
            yield from _value_misfits(None, inner, f"{where}[{key!r}]")
    else:
        found: dict[Any, Node] = dict(_items(stored))
        for key, inner in _items(own):
            if key in found:
                yield from _value_misfits(inner, found[key], f"{where}[{key!r}]")


def _items(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield what a dict with text keys holds."""
    if isinstance(node, Mapping) and TAG not in node:
        yield from node.items()


def _type_name(node: Node) -> str:
    """Return the type of what *node* was written for, by the name that people know."""
    if node is None:
        return "None"
    if not isinstance(node, dict) or TAG not in node:
        return type(node).__name__
    kind = str(node[TAG])
    return f"codec {node.get('name')!r}" if kind == "codec" else _WORDS.get(kind, kind)


def _with_article(name: str) -> str:
    if name in ("bytes", "None"):
        return name
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"
