"""What changed between two steps? Leaf by leaf, bit by bit, with the size of the difference where there is one."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from aiockpt.checkpointer import Checkpointer
from aiockpt.cli.progress import bytes_progress
from aiockpt.engine.keep import Description, TensorInfo


class Change(msgspec.Struct, frozen=True):
    """One leaf in two steps.

    Attributes:
        max_difference, mean_difference: of the absolute values, computed as float64; None where it makes no sense.
    """

    name: str
    kind: Literal["same", "changed", "added", "removed"]
    detail: str = ""
    max_difference: float | None = None
    mean_difference: float | None = None


def diff_steps(ckpt: Checkpointer, one: int, two: int, *, quiet: bool = False) -> list[Change]:
    """Compare every tensor and value of two steps; one tensor of each is in memory at a time."""
    before, after = ckpt.describe(one).result(), ckpt.describe(two).result()
    old = {tensor.name: tensor for tensor in before.tensors}
    new = {tensor.name: tensor for tensor in after.tensors}
    changes = []
    with bytes_progress(f"comparing {one} and {two}", sum(tensor.bytes for tensor in before.tensors), quiet) as tick:
        for name in dict.fromkeys([*old, *new]):
            changes.append(_tensor(ckpt, one, two, name, old.get(name), new.get(name)))
            tick(old[name].bytes if name in old else 0)
    return changes + _values(before, after)


def _tensor(
    ckpt: Checkpointer, one: int, two: int, name: str, old: TensorInfo | None, new: TensorInfo | None
) -> Change:
    if old is None:
        return Change(name, "added")
    if new is None:
        return Change(name, "removed")
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Change(name, "changed", f"{old.dtype} {old.shape} → {new.dtype} {new.shape}")
    left, right = ckpt.read(one, name).result(), ckpt.read(two, name).result()
    if torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):
        return Change(name, "same")
    difference = (_wide(left) - _wide(right)).abs()
    return Change(name, "changed", "", difference.max().item(), difference.mean().item())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _values(before: Description, after: Description) -> list[Change]:
    old, new = dict(_leaves("", before.values)), dict(_leaves("", after.values))
    changes = []
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            changes.append(Change(name, "removed"))
        elif name not in old:
            changes.append(Change(name, "added", _short(new[name])))
        elif old[name] == new[name]:
            changes.append(Change(name, "same"))
        else:
            changes.append(Change(name, "changed", f"{_short(old[name])} → {_short(new[name])}"))
    return changes


def _leaves(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        parts = [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for name, inner in parts for leaf in _leaves(name, inner)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
