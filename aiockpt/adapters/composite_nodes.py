"""How is a composite tensor written into the tree of values, and read from it?

As ``{"$": "composite"}`` with a node for each tensor that it is made of. One that is spread over ranks (a DTensor around a
wrapper subclass) is ``{"$": "spread"}``: the parts of all ranks, by which elements of the whole they are. A part is made
of its own tensors, which say nothing about other parts, so it loads where the sharding is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch

from aiockpt.adapters.composites import KINDS, SUBCLASS, Parts, find_class, put_together, take_apart
from aiockpt.adapters.dtensors import boxes_of, is_dtensor, local_of
from aiockpt.errors import UnsupportedStateError, UsageError
from aiockpt.format.dtypes import from_torch_name
from aiockpt.format.names import join_name
from aiockpt.state.geometry import Box
from aiockpt.state.scalars import field
from aiockpt.state.tree import TAG, Decoder, Encoder, Node, Path, damaged, refuse

COMPOSITE, SPREAD = "composite", "spread"
FACTS, SHOWN_FACTS = "facts", "facts_shown"
"""What is known of a tensor beside its parts: as plain values, or where it holds other objects as their ``repr()``."""


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class CompositeNode(msgspec.Struct, frozen=True):
    """The node of one composite tensor, read."""

    kind: str
    cls: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tensors: dict[str, Any]
    facts: Node
    shown: str | None


def is_composite_node(node: Node) -> bool:
    """Return whether a node was written for a composite tensor."""
    return type(node) is dict and node.get(TAG) in (COMPOSITE, SPREAD)


def _is_part(node: Node) -> bool:
    if is_composite_node(node):
        return bool(node[TAG] == COMPOSITE)
    return type(node) is dict and node.get(TAG) == "tensor" and type(node.get("name")) is str


def write_composite(tensor: Any, path: Path, encoder: Encoder) -> Node:
    """Return the node of a composite tensor at *path*."""
    if is_dtensor(tensor):
        boxes = boxes_of(tensor, path)
        key = box_key(boxes)
        parts = {key: write_composite(local_of(tensor), (*path, f"@{key}"), encoder)} if boxes else {}
        return {TAG: SPREAD, "shape": list(tensor.shape), "parts": parts}
    parts_of_it = take_apart(tensor)
    return {
        TAG: COMPOSITE,
        "kind": parts_of_it.kind,
        "class": parts_of_it.cls,
        "dtype": _dtype_name(tensor, path),
        "shape": list(map(int, tensor.shape)),
        "stride": list(map(int, tensor.stride())) if parts_of_it.kind == SUBCLASS else [],
        "tensors": {key: encoder.encode(inner, (*path, key)) for key, inner in parts_of_it.tensors.items()},
        **write_facts(parts_of_it, path, encoder),
    }


def _dtype_name(tensor: torch.Tensor, path: Path) -> str:
    name = str(tensor.dtype)
    if not tensor.is_quantized:
        try:
            from_torch_name(name)
        except UsageError as error:
            refuse(path, str(error))
    return name.removeprefix("torch.")


def write_facts(parts: Parts, path: Path, encoder: Encoder) -> dict[str, Node]:
    """Return the member of a node that says what is known beside the tensors."""
    try:
        return {FACTS: encoder.encode(parts.facts, (*path, FACTS))}
    except UnsupportedStateError:
        return {SHOWN_FACTS: repr(parts.facts)}


def box_key(boxes: tuple[Box, ...]) -> str:
    """Return which elements of a whole a part has, as text."""
    ranges = (
        ",".join(f"{low}:{low + size}" for low, size in zip(box.offsets, box.sizes, strict=True)) for box in boxes
    )
    return "+".join(ranges)


def read_written(node: Mapping[str, Any], path: Path) -> CompositeNode:
    """Return what the node of one composite tensor says.

    Raises:
        ManifestError: no such node is ever written.
    """
    try:
        dtype = _DTYPES[field(node, "dtype", str)]
        shape, stride = (tuple(msgspec.convert(node[key], list[_Size])) for key in ("shape", "stride"))
        tensors = msgspec.convert(node["tensors"], dict[str, Any])
        if not all(map(_is_part, tensors.values())):
            raise ValueError("a part that is no tensor")
        kind, cls = field(node, "kind", str), field(node, "class", str)
        if kind not in KINDS:
            raise ValueError("no such kind")
        return CompositeNode(kind, cls, dtype, shape, stride, tensors, node.get(FACTS), node.get(SHOWN_FACTS))
    except (KeyError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise damaged(path, f"is not a tensor that was ever saved ({error})") from error


def make(
    written: CompositeNode, path: Path, cls: type | None, tensors: Mapping[str, torch.Tensor], facts: Any
) -> torch.Tensor:
    """Return a new tensor as it was saved.

    Raises:
        ManifestError: its parts do not fit each other.
    """
    try:
        return put_together(written.kind, cls, tensors, facts, written.dtype, written.shape, written.stride)
    except Exception as error:
        raise damaged(path, f"cannot be put together ({type(error).__name__}: {error})") from error


def class_to_make(written: CompositeNode, path: Path, here: type | None) -> type | None:
    """Return the class of a new tensor; None where torch knows it by its kind.

    Raises:
        UsageError: the program has not declared it, or what it is made of cannot be written down.
    """
    if written.kind != SUBCLASS:
        return None
    cls = find_class(written.cls, here)
    if cls is None or (written.shown is not None and here is None):
        name = written.cls.rpartition(".")[2]
        raise UsageError(
            f"{join_name(path)}: saved as a {written.cls}, and there is none here that could be filled (one in a list is "
            f"made anew); import what defines it and call torch.serialization.add_safe_globals([{name}]), or have such a "
            "tensor under a key of a dict"
            + ("" if written.shown is None else f" (what it knows, {written.shown}, cannot be made anew)")
        )
    return cls


def read_composite(node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
    """Return the value of a composite tensor's node where nothing is here that it could fill."""
    written = read_written(node, path)
    tensors = {key: decoder.decode(inner, (*path, key)) for key, inner in written.tensors.items()}
    facts = decoder.decode(written.facts, (*path, FACTS))
    if decoder.looks_only:
        return tensors
    cls = class_to_make(written, path, None)
    return None if decoder.is_dry else make(written, path, cls, tensors, facts)


def read_spread(node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
    """Return the parts of a spread tensor for those who only look; nothing else can be made of them."""
    if decoder.looks_only:
        return {key: decoder.decode(part, (*path, f"@{key}")) for key, part in field(node, "parts", dict).items()}
    raise UsageError(f"{join_name(path)}: saved in parts by several ranks; load it into the DTensor that it was")
