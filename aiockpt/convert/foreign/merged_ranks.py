"""The merge of states that ranks saved separately, as one state: what they had in common, and where one differed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.state.geometry import Box


def merge_rank(state: dict[Any, Any], held: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add to *state* what only this rank *held*, and return what it held otherwise: dicts to the same paths.

    Tensors are compared by their bytes. A list of which an element differs differs as a whole.
    """
    differences = {}
    for key, value in held.items():
        if key not in state:
            state[key] = value
        elif type(value) is dict and type(state[key]) is dict:
            if inside := merge_rank(state[key], value):
                differences[key] = inside
        elif not _same(state[key], value):
            differences[key] = value
    return differences


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # noqa: BLE001  of objects whose comparison is neither
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    mine, theirs = _pieces(one), _pieces(other)
    return mine.keys() == theirs.keys() and all(torch.equal(_bytes(mine[box]), _bytes(theirs[box])) for box in mine)


def _pieces(tensor: torch.Tensor) -> dict[tuple[Box, ...], torch.Tensor]:
    if isinstance(tensor, Shards):
        return {piece.boxes: piece.local for piece in tensor.held.pieces}
    return {(): tensor}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
