"""The size map of a checkpoint: bytes of tensors by the parts of their names, small parts folded into one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aiockpt.engine.maintenance import TensorInfo
from aiockpt.format.names import split_name
from aiockpt.units import count

LEAST_SHARE = 0.002
"""Of all bytes: smaller parts of one level are shown as one."""


class SizeMap(msgspec.Struct, frozen=True, kw_only=True):
    """A tree as lists of equal length, the root first: what a tree map is drawn from.

    Attributes:
        parents: the place of each part's parent in the lists; -1 of the root.
        about: dtype and shape of a tensor, or how many tensors a part has.
    """

    step: int
    labels: list[str]
    parents: list[int]
    bytes: list[int]
    about: list[str]


class _TreePart:
    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.about = ""
        self.below: dict[str, _TreePart] = {}


def size_map(step: int, tensors: Iterable[TensorInfo]) -> SizeMap:
    """Return the tree of *tensors*."""
    root = _TreePart()
    for tensor in tensors:
        part = root
        for name in (None, *split_name(tensor.name)):
            part = part if name is None else part.below.setdefault(str(name), _TreePart())
            part.bytes += tensor.bytes
            part.count += 1
        part.about = f"{tensor.dtype} {'×'.join(map(str, tensor.shape)) or 'scalar'}"
    drawn = SizeMap(step=step, labels=[], parents=[], bytes=[], about=[])
    _draw(drawn, f"step {step}", root, -1, LEAST_SHARE * root.bytes)
    return drawn


def _draw(drawn: SizeMap, label: str, part: _TreePart, parent: int, least: float) -> None:
    while len(part.below) == 1 and parent >= 0:
        ((name, part),) = part.below.items()
        label = f"{label}.{name}"
    here = _add(drawn, label, parent, part.bytes, part.about or count(part.count, "tensor"))
    below = sorted(part.below.items(), key=lambda item: -item[1].bytes)
    small = [one for _, one in below if one.bytes < least]
    if len(small) == 1:
        small = []
    for name, one in below:
        if one not in small:
            _draw(drawn, name, one, here, least)
    if size := sum(one.bytes for one in small):
        _add(drawn, f"{len(small)} small parts", here, size, count(sum(one.count for one in small), "tensor"))


def _add(drawn: SizeMap, label: str, parent: int, size: int, about: str) -> int:
    drawn.labels.append(label)
    drawn.parents.append(parent)
    drawn.bytes.append(size)
    drawn.about.append(about)
    return len(drawn.labels) - 1
