"""The comparison of two states, bit by bit."""

from typing import Any

import torch

from aiockpt import Shards


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Compare what was *found* with what was *expected*: tensors by dtype, shape and bytes."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert _bytes(_whole(found)) == _bytes(expected), path
    elif isinstance(expected, dict | list | tuple):
        assert isinstance(found, dict) == isinstance(expected, dict), path
        assert len(found) == len(expected), path
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key], f"{path}.{key}")
    else:
        assert found == expected or (found != found and expected != expected), path
        assert type(found) is type(expected), path


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in one piece; of the parts of one that has several."""
    if not isinstance(tensor, Shards):
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    for piece in tensor.held.pieces:
        (box,) = piece.boxes
        made[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = piece.local
    return made


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
