"""Composite tensors, made of other tensors (wrapper subclasses, quantised, sparse): decomposition and reassembly.

- A *wrapper subclass* (torchao's 8-bit optimizer state and int8 weights, fp8 …) describes its parts by torch's
  ``__tensor_flatten__`` and ``__tensor_unflatten__``. A present instance is filled. A new one is made only of a class that
  this program has declared safe to load (``torch.serialization.add_safe_globals``, which such libraries call when they
  are imported): nothing is imported or looked up on behalf of a checkpoint.
- A *quantised* one consists of its integers, with scales and zero points.
- A *sparse* one consists of its indices and values.

The parts are stored under names of their own (``model.weight.codes``), bit by bit; the rest is a plain value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch

from aiockpt.adapters.tensor_kinds import COMPRESSED, ORDINARY, SPARSE_LAYOUTS, tensor_kind
from aiockpt.adapters.tensors import dtype_code
from aiockpt.errors import UnsupportedStateError, UsageError, kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.codecs import class_name, field
from aiockpt.state.geometry import Box
from aiockpt.state.tree import TAG, Decoder, Encoder, Node, Path, damaged, refuse

SUBCLASS, QUANTIZED, SPARSE = "subclass", "quantized", "sparse"
KINDS = (SUBCLASS, QUANTIZED, SPARSE)
_LAYOUTS = {str(layout): layout for layout in SPARSE_LAYOUTS}
_SCALED_AS_A_WHOLE = (torch.per_tensor_affine, torch.per_tensor_symmetric)


class Parts(msgspec.Struct, frozen=True):
    """The parts of a composite tensor.

    Attributes:
        kind: one of the three kinds.
        cls: name of its class.
        tensors: the tensors that hold its value, by name.
        facts: all other properties, as plain values where possible.
    """

    kind: str
    cls: str
    tensors: dict[str, torch.Tensor]
    facts: Any


def decompose(tensor: Any) -> Parts:
    """Return the parts of a composite tensor: for a subclass the tensors themselves, else copies or views."""
    name = class_name(type(tensor))
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return Parts(SUBCLASS, name, {key: getattr(tensor, key) for key in names}, context)
    plain = tensor.detach()
    if plain.is_quantized:
        return Parts(QUANTIZED, name, *_take_quantized(plain))
    if plain.layout == torch.sparse_coo:
        tensors = {"indices": plain._indices(), "values": plain._values()}
        return Parts(SPARSE, name, tensors, {"layout": str(plain.layout), "coalesced": plain.is_coalesced()})
    tensors = {key: getattr(plain, key)() for key in (*COMPRESSED[plain.layout], "values")}
    return Parts(SPARSE, name, tensors, {"layout": str(plain.layout)})


def _take_quantized(plain: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    scheme = plain.qscheme()
    tensors = {"integers": plain.int_repr()}
    if scheme in _SCALED_AS_A_WHOLE:
        return tensors, {"scale": plain.q_scale(), "zero_point": plain.q_zero_point()}
    tensors |= {"scales": plain.q_per_channel_scales(), "zero_points": plain.q_per_channel_zero_points()}
    return tensors, {"axis": plain.q_per_channel_axis()}


def find_class(name: str, here: type | None) -> type | None:
    """Return the class called *name* if it is the class *here*, or was declared safe to load; else None."""
    declared = (one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals())
    safe = (one for one in declared if isinstance(one, type) and issubclass(one, torch.Tensor))
    return next((cls for cls in (here, *safe) if cls is not None and class_name(cls) == name), None)


def put_together(
    written: CompositeNode, cls: type | None, tensors: Mapping[str, torch.Tensor], facts: Any
) -> torch.Tensor:
    """Return a tensor made of *tensors*; errors of torch, or of the class, for parts that do not fit pass through."""
    shape = written.shape
    if written.kind == SUBCLASS:
        unflatten: Any = getattr(cls, "__tensor_unflatten__")  # noqa: B009  torch.Tensor does not declare it
        made: torch.Tensor = unflatten(dict(tensors), facts, torch.Size(shape), written.stride)
        return made
    if written.kind == QUANTIZED:
        return _make_quantized(tensors, facts, written.dtype, shape)
    layout = _LAYOUTS[facts["layout"]]
    if layout == torch.sparse_coo:
        found = torch.sparse_coo_tensor(tensors["indices"], tensors["values"], shape, check_invariants=True)
        return found._coalesced_(bool(facts["coalesced"]))
    compressed, plain = COMPRESSED[layout]
    return torch.sparse_compressed_tensor(
        tensors[compressed], tensors[plain], tensors["values"], shape, layout=layout, check_invariants=True
    )


def _make_quantized(
    tensors: Mapping[str, torch.Tensor], facts: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    integers = tensors["integers"]
    if "scales" in tensors:
        made = torch._empty_per_channel_affine_quantized(  # pyright: ignore[reportPrivateImportUsage]
            shape, scales=tensors["scales"], zero_points=tensors["zero_points"], axis=facts["axis"], dtype=dtype
        )
    else:
        made = torch._empty_affine_quantized(  # pyright: ignore[reportPrivateImportUsage]
            shape, scale=float(facts["scale"]), zero_point=int(facts["zero_point"]), dtype=dtype
        )
    rows = torch.empty(integers.shape, device="meta").stride()
    torch.empty(0, dtype=integers.dtype).set_(made.untyped_storage(), 0, integers.shape, rows).copy_(integers)
    return made


def replace_content(live: torch.Tensor, made: torch.Tensor) -> bool:
    """Turn *live*, which other objects hold, into *made*; return False where torch refuses."""
    if live is made:
        return True
    # `swap_tensors` exchanges the classes, too: *live* would be a parameter no longer.
    if isinstance(live, torch.nn.Parameter) and not isinstance(made, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=live.requires_grad)
    try:
        torch.utils.swap_tensors(live, made)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError):
        return False
    return True


def in_words(tensor: torch.Tensor) -> str:
    """Return the kind of a composite tensor, for a message."""
    kind = tensor_kind(tensor)
    if kind.is_spread:
        return f"a {kind.name} of {in_words(kind.local(tensor))}"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    return f"a tensor of layout {tensor.layout}" if type(tensor) in ORDINARY else kind_in_words(tensor)


# Nodes of composite tensors in the tree of values.
#
# ``{"$": "composite"}`` has a node for each tensor of the composite. One that is spread over ranks (a DTensor around a
# wrapper subclass) is ``{"$": "spread"}``: the parts of all ranks, keyed by their elements of the whole. A part has its own
# tensors, independent of other parts, so it loads only under the same sharding.


COMPOSITE, SPREAD = "composite", "spread"
FACTS, SHOWN_FACTS = "facts", "facts_shown"
"""Keys of a tensor's facts: as plain values, or, where they contain other objects, as their ``repr()``."""


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
    kind = node.get(TAG) if type(node) is dict else None
    return kind == COMPOSITE or (kind == "tensor" and type(node.get("name")) is str)


def write_composite(tensor: Any, path: Path, encoder: Encoder) -> Node:
    """Return the node of a composite tensor at *path*."""
    kind = tensor_kind(tensor)
    if kind.is_spread:
        boxes = kind.boxes(tensor, path)
        key = box_key(boxes)
        parts = {key: write_composite(kind.local(tensor), (*path, f"@{key}"), encoder)} if boxes else {}
        return {TAG: SPREAD, "shape": list(tensor.shape), "parts": parts}
    parts_of_it = decompose(tensor)
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
            dtype_code(tensor.dtype)
        except UsageError as error:
            refuse(path, str(error))
    return name.removeprefix("torch.")


def write_facts(parts: Parts, path: Path, encoder: Encoder) -> dict[str, Node]:
    """Return the member of a node that holds the facts beside the tensors."""
    try:
        return {FACTS: encoder.encode(parts.facts, (*path, FACTS))}
    except UnsupportedStateError:
        return {SHOWN_FACTS: repr(parts.facts)}


def box_key(boxes: tuple[Box, ...]) -> str:
    """Return the key of a part: its elements of the whole, as text."""
    axes = (zip(box.offsets, box.sizes, strict=True) for box in boxes)
    return "+".join(",".join(f"{low}:{low + size}" for low, size in ranges) for ranges in axes)


def read_written(node: Mapping[str, Any], path: Path) -> CompositeNode:
    """Return the content of the node of one composite tensor.

    Raises:
        ManifestError: the node is malformed.
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
        return put_together(written, cls, tensors, facts)
    except Exception as error:
        raise damaged(path, f"cannot be put together ({type(error).__name__}: {error})") from error


def class_to_make(written: CompositeNode, path: Path, here: type | None) -> type | None:
    """Return the class of a new tensor; None where its kind determines it.

    Raises:
        UsageError: the program has not declared it, or its facts were stored only as ``repr()``.
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
    """Return a new tensor from the node of a composite one; used where no present tensor can be filled."""
    written = read_written(node, path)
    tensors = {key: decoder.decode(inner, (*path, key)) for key, inner in written.tensors.items()}
    facts = decoder.decode(written.facts, (*path, FACTS))
    if decoder.describes_only:
        return tensors
    cls = class_to_make(written, path, None)
    return None if decoder.is_dry else make(written, path, cls, tensors, facts)


def read_spread(node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
    """Return the parts of a spread tensor, for readers without a state only: the parts cannot be joined."""
    if decoder.describes_only:
        return {key: decoder.decode(part, (*path, f"@{key}")) for key, part in field(node, "parts", dict).items()}
    raise UsageError(f"{join_name(path)}: saved in parts by several ranks; load it into the DTensor that it was")
