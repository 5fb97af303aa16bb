"""Tensors that are made of other tensors: wrapper subclasses, quantised and sparse ones. Taken apart, and put together.

- A *wrapper subclass* (torchao's 8-bit optimizer state and int8 weights, fp8 …) says itself what it is made of, by
  torch's ``__tensor_flatten__`` and ``__tensor_unflatten__``. Where an instance is there it is filled; a new one is only
  made of a class that this program has declared safe to load (``torch.serialization.add_safe_globals``, which such
  libraries call when they are imported): nothing is imported or looked up because a checkpoint says so.
- A *quantised* one is its integers, with scales and zero points.
- A *sparse* one is its indices and values.

What it is made of is stored under names of its own (``model.weight.codes``), bit by bit; the rest is a plain value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
import torch

from aiockpt.adapters.dtensors import is_dtensor, local_of
from aiockpt.adapters.sharded_tensors import is_sharded_tensor
from aiockpt.adapters.tensors import ORDINARY
from aiockpt.errors import kind_in_words
from aiockpt.state.codecs import DEFAULT_CODECS, class_name

SUBCLASS, QUANTIZED, SPARSE = "subclass", "quantized", "sparse"
KINDS = (SUBCLASS, QUANTIZED, SPARSE)
_UNFINISHED = frozenset({"AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor"})
"""Subclasses of torch's own that stand for a tensor which is not there, or not yet."""
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
_PACKED = (torch.quint4x2, torch.quint2x4)
_SCALED_AS_A_WHOLE = (torch.per_tensor_affine, torch.per_tensor_symmetric)


class Parts(msgspec.Struct, frozen=True):
    """What a tensor is made of.

    Attributes:
        kind: which of the three.
        cls: name of its class.
        tensors: those that hold its value, by name.
        facts: what else there is to know, plain values where they are such.
    """

    kind: str
    cls: str
    tensors: dict[str, torch.Tensor]
    facts: Any


def is_composite(tensor: object) -> bool:
    """Return whether a tensor is made of others, or its class has a codec of the user."""
    cls = type(tensor)
    if not isinstance(tensor, torch.Tensor):
        return False
    if cls in ORDINARY:
        return tensor.layout in _LAYOUTS.values() or tensor.is_quantized
    if is_dtensor(tensor):
        return is_composite(local_of(tensor))
    if is_sharded_tensor(tensor):
        return False
    if DEFAULT_CODECS.for_class(cls) is not None:
        return True
    if cls.__name__ in _UNFINISHED or tensor.is_nested:
        return False
    return hasattr(tensor, "__tensor_flatten__") or tensor.layout in _LAYOUTS.values() or tensor.is_quantized


def has_own_bytes(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether *value* is a tensor that is not made of others."""
    return isinstance(value, torch.Tensor) and not is_composite(value)


def take_apart(tensor: Any) -> Parts:
    """Return what a composite tensor is made of: of a subclass the tensors themselves, else copies or views."""
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
    tensors = {key: getattr(plain, key)() for key in (*_COMPRESSED[plain.layout], "values")}
    return Parts(SPARSE, name, tensors, {"layout": str(plain.layout)})


def _take_quantized(plain: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    scheme = plain.qscheme()
    tensors = {"integers": plain.int_repr()}
    if scheme in _SCALED_AS_A_WHOLE:
        return tensors, {"scale": plain.q_scale(), "zero_point": plain.q_zero_point()}
    tensors |= {"scales": plain.q_per_channel_scales(), "zero_points": plain.q_per_channel_zero_points()}
    return tensors, {"axis": plain.q_per_channel_axis()}


def find_class(name: str, here: type | None) -> type | None:
    """Return the class called *name*, if it is that of what is *here*, or was declared safe to load; else None."""
    if here is not None and class_name(here) == name:
        return here
    for declared in torch.serialization.get_safe_globals():
        cls = declared[0] if isinstance(declared, tuple) else declared
        if isinstance(cls, type) and issubclass(cls, torch.Tensor) and class_name(cls) == name:
            return cls
    return None


def put_together(
    kind: str,
    cls: type | None,
    tensors: Mapping[str, torch.Tensor],
    facts: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor that is made of *tensors*; raises whatever torch, or the class, says of parts that do not fit."""
    if kind == SUBCLASS:
        unflatten: Any = getattr(cls, "__tensor_unflatten__")  # noqa: B009  torch.Tensor does not declare it
        made: torch.Tensor = unflatten(dict(tensors), facts, torch.Size(shape), stride)
        return made
    if kind == QUANTIZED:
        return _make_quantized(tensors, facts, dtype, shape)
    layout = _LAYOUTS[facts["layout"]]
    if layout == torch.sparse_coo:
        found = torch.sparse_coo_tensor(tensors["indices"], tensors["values"], shape, check_invariants=True)
        return found._coalesced_(bool(facts["coalesced"]))
    compressed, plain = _COMPRESSED[layout]
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
    """Have *live*, which others hold, become *made*; return False where torch lets it not."""
    if live is made:
        return True
    if isinstance(live, torch.nn.Parameter) and not isinstance(made, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=live.requires_grad)
    try:
        torch.utils.swap_tensors(live, made)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError):
        return False
    return True


def in_words(tensor: torch.Tensor) -> str:
    """Return what a composite tensor is, for a message."""
    if is_dtensor(tensor):
        return f"a DTensor of {in_words(local_of(tensor))}"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    return f"a tensor of layout {tensor.layout}" if type(tensor) in ORDINARY else kind_in_words(tensor)
