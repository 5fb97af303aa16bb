"""Tensors that a load makes because the state has none in their place: one for all names of a tied tensor.

What a value of the checkpoint needs is found by a dry run over its nodes. The tensors are made after all of the state was
matched, since one that the state does have elsewhere stands for the others that it is tied to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from aiockpt.adapters.leaves import LeafReader, read_plain_leaf
from aiockpt.adapters.tensors import is_spread
from aiockpt.state.scalars import field
from aiockpt.state.tree import Decoder, Path

OWN_KINDS = ("stored", "numbers")
"""Kinds whose tensor is a means only: it is read, and the value is made of it."""


class Need(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint that a value is made of.

    Attributes:
        name: in the checkpoint.
        path: where in the state.
        device: the kind of device that it was on.
        kind: of the node.
    """

    name: str
    path: Path
    device: str
    kind: str


class NeedFinder:
    """Reads a value without its tensors, and notes which it needs."""

    def __init__(self) -> None:
        self.needs: list[Need] = []

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        """Return a stand-in for what needs a tensor, else the value."""
        if kind in ("tensor", "numpy.ndarray") or kind in OWN_KINDS:
            device = node.get("device", "cpu") if kind == "tensor" else "cpu"
            self.needs.append(Need(field(node, "name", str), path, device, kind))
            return {"stored": b"", "numbers": []}.get(kind)
        if kind == "numpy.raw" and "stored" in field(node, "bytes", dict):
            return decoder.decode(node["bytes"], path)
        return read_plain_leaf(kind, node, path, decoder)


class Made:
    """The tensors of one load, by their names in the checkpoint.

    Args:
        make: makes and requests a new tensor.
        tied_name: what all names of one tensor have in common.
    """

    def __init__(self, make: Callable[[Need], torch.Tensor], tied_name: Callable[[str], str]) -> None:
        self._make = make
        self._tied_name = tied_name
        self._whole: dict[str, torch.Tensor] = {}
        self._open: list[tuple[Need, ValueTensors]] = []

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        """Note that a *tensor* of the state is filled from tensor *name*."""
        if not is_spread(tensor):
            self._whole.setdefault(self._tied_name(name), tensor)

    def ask(self, need: Need, receiver: ValueTensors) -> None:
        """Have *receiver* get the tensor once all of the state was matched."""
        self._open.append((need, receiver))

    def settle(self) -> None:
        """Make and hand out all that was requested."""
        for need, receiver in self._open:
            receiver.put(need, self._find(need))
        self._open.clear()

    def _find(self, need: Need) -> torch.Tensor:
        if need.kind in OWN_KINDS:
            return self._make(need)
        name = self._tied_name(need.name)
        known = self._whole.get(name)
        if known is not None and (need.kind == "tensor" or known.device.type == "cpu"):
            return known
        made = self._make(need)
        self._whole.setdefault(name, made)
        return made


class ValueTensors:
    """The tensors of one value, by name and place; its `reader` returns them."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, Path], torch.Tensor] = {}
        self.reader = LeafReader(lambda name, path, device: self._tensors[name, path])

    def put(self, need: Need, tensor: torch.Tensor) -> None:
        """Accept the tensor that was needed."""
        self._tensors[need.name, need.path] = tensor
