"""Descriptions of tensors: one tensor of torch → the `TensorShard`s that this rank holds of it.

A plain tensor is held whole; a DTensor, a ``ShardedTensor`` and a slice of a flat parameter in part, or not at all.

Guarantees:

- A tensor without bytes of its own, or whose bytes are not its whole value (sparse, quantised, meta, lazy, nested and
  wrapper tensors), is refused by path. Every dense tensor is accepted, whatever its strides, device and dtype.
- The result of `describe` shares memory with the (local) tensor, and is detached from autograd.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Hashable, Sequence
from operator import attrgetter, eq, mul
from typing import Any, TypeGuard

import msgspec
import numpy as np
import torch
from torch.nn.parameter import is_lazy as is_uninitialized

from aiockpt.adapters.local_shards import FlatRange, LocalShards
from aiockpt.adapters.tensor_kinds import ORDINARY, PLAIN, local_tensors, tensor_kind
from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.dtypes import TORCH_NAMES, from_torch_name, itemsize, same, torch_name
from aiockpt.format.manifest import MAX_RANK
from aiockpt.format.names import MAX_NAME_BYTES, join_name
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import Path, refuse

_DISPATCH = attrgetter("__torch_dispatch__")
_LAYOUT, _IS_NESTED, _DTYPE, _SHAPE = map(attrgetter, ("layout", "is_nested", "dtype", "shape"))
_STRIDED = frozenset({torch.strided})


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """One tensor of the state: its name in the checkpoint, and the shards of it on this rank, which may be empty.

    Attributes:
        owner: the tensor itself, which must live as long as *memory* is compared.
        memory: equal for two leaves if and only if they are the same elements in the same memory; None for nothing shared.
    """

    name: str
    shards: tuple[TensorShard, ...]
    owner: torch.Tensor
    memory: Hashable


def describe(
    name: str,
    tensor: torch.Tensor,
    path: Path,
    flat: FlatRange | None = None,
    *,
    may_differ: bool = True,
    is_buffer: bool = False,
) -> Leaf:
    """Return the part of *tensor*, at *path* of the state, that this rank holds; *name* is its name in the checkpoint.

    Args:
        flat: the range of the original tensor that a 1-D *tensor* holds; None for a whole tensor.
        may_differ, is_buffer: as in `TensorShard`.

    Raises:
        UnsupportedStateError: it cannot be stored.
    """
    if not name or name == "__metadata__" or len(name.encode()) > MAX_NAME_BYTES:
        refuse(path, f"{name[:80]!r} cannot name a tensor: use 1 to {MAX_NAME_BYTES} bytes, and not '__metadata__'")
    held, kind = hold(tensor, path, flat), PLAIN if flat is not None else tensor_kind(tensor)
    shards = shards_of(
        name,
        dtype_code(tensor.dtype),
        held,
        kind.counter(tensor),
        may_differ,
        kind.axes(tensor, held) if flat is None else flat.axes,  # a slice of a flat parameter is 1-D
        is_buffer or getattr(tensor, "_is_buffer", False),  # a torch.nn.Buffer
    )
    return Leaf(name, shards, tensor, _leaf_key(tensor, shards))


def hold(tensor: torch.Tensor, path: Path, flat: FlatRange | None = None) -> LocalShards:
    """Return what this rank holds of *tensor*; the arguments are those of `describe`.

    Raises:
        UnsupportedStateError: it cannot be stored.
    """
    kind = PLAIN if flat is not None else tensor_kind(tensor)
    held = kind.hold(tensor, path) if kind.is_spread else None
    for local in [tensor] if held is None else [piece.local for piece in held.pieces]:
        if (reason := _unsupported(local)) is not None:
            refuse(path, reason)
    if held is not None:
        return held
    return kind.hold(tensor, path) if flat is None else flat.hold(tensor)


def facts_of(tensor: torch.Tensor, flat: FlatRange | None = None) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype code and global shape of any tensor, also one that cannot be stored; None where it has none."""
    if is_uninitialized(tensor):
        return None
    try:
        return dtype_code(tensor.dtype), flat.shape if flat is not None else tuple(map(int, tensor.shape))
    except (UsageError, TypeError, RuntimeError):  # a dtype that we have no code for; sizes that are no numbers
        return None


def plain_addresses(tensors: Sequence[torch.Tensor], facts: Sequence[tuple[str, tuple[int, ...]] | None]) -> list[int]:
    """Return the address of each tensor that is ordinary, has its *facts* and whose memory is its value; else 0: see `hold`.

    Args:
        facts: the dtype code and shape expected of each of *tensors*.
    """
    try:
        if (
            ORDINARY.issuperset(map(type, tensors))
            and _STRIDED.issuperset(map(_LAYOUT, tensors))
            and not any(map(_IS_NESTED, tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
        ):
            own = zip(map(_REAL.get, map(_DTYPE, tensors)), map(_SHAPE, tensors), strict=True)
            return list(map(mul, map(torch.Tensor.data_ptr, tensors), map(eq, own, facts)))
    except RuntimeError:  # torch.func wraps tensors while it transforms a function
        pass
    if len(tensors) == 1:
        return [0]
    return [plain_addresses([one], [fact])[0] for one, fact in zip(tensors, facts, strict=True)]


def shards_of(
    name: str,
    code: str,
    held: LocalShards,
    outer: torch.Tensor | None = None,
    may_differ: bool = False,
    axes: tuple[int, ...] | None = None,
    is_buffer: bool = False,
) -> tuple[TensorShard, ...]:
    """Return the shards of tensor *name*, of dtype *code*; the arguments after *held* are those of `TensorShard`."""
    facts = outer, may_differ, axes, is_buffer
    return tuple(
        [TensorShard(name, code, held.shape, piece.boxes, bytes_of(piece.local), *facts) for piece in held.pieces]
    )


def _leaf_key(tensor: torch.Tensor, shards: Sequence[TensorShard]) -> Hashable:
    """Return `Leaf.memory`; the object's identity where this rank holds no elements, so that all ranks have equal ties."""
    keys = [(memory_key(shard.data), shard.boxes) for shard in shards]
    shape = shards[0].shape
    if all(key is None for key, _ in keys):
        return ("object", id(tensor)) if 0 not in shape else None
    return (shape, *keys)


def lies_at_address(tensor: object) -> TypeGuard[torch.Tensor]:
    """Return whether *tensor* is one whose bytes lie at its own address."""
    return isinstance(tensor, torch.Tensor) and not tensor_kind(tensor).is_spread and _unsupported(tensor) is None


def may_spread() -> bool:
    """Return whether there can be DTensors in this process at all."""
    return "torch.distributed.tensor" in sys.modules


def _unsupported(tensor: torch.Tensor) -> str | None:
    """Return why the bytes of *tensor* are not its value, and a remedy; None where they are."""
    if type(tensor) not in ORDINARY:
        if is_uninitialized(tensor):
            return "a lazy parameter has no shape yet; run a forward pass first"
        if _DISPATCH(type(tensor)) != _DISPATCH(torch.Tensor):
            return (
                f"{kind_in_words(tensor)} keeps its value elsewhere; give its class __tensor_flatten__ and "
                "__tensor_unflatten__, or a codec (aiockpt.register_codec), or save the tensors it wraps"
            )
    if tensor.is_nested:
        return "a nested tensor; save its values and offsets"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}; save its indices and values, or its dense form"
    if tensor.is_meta:
        return "a meta tensor has no data; materialise it first (to_empty())"
    if tensor.dtype not in _CODES:
        try:
            dtype_code(tensor.dtype)
        except UsageError as error:
            return str(error)
    if tensor.dim() > MAX_RANK:
        return f"a tensor of {tensor.dim()} axes, and at most {MAX_RANK} can be stored; save it in another shape"
    if not _has_memory(tensor):
        return (
            "it has no memory: its storage was freed, or it stands for another tensor inside a transform or a trace; "
            "save where its data exist"
        )
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:  # torch.func wraps tensors while it transforms a function
        return False


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached from autograd, in the same memory; a lazily conjugated or negated one as a copy.

    A dtype that torch cannot copy, or may be unable to, is viewed as another of the same size, with the same strides.
    """
    plain = tensor.detach()
    if plain.dtype not in _COPIED:
        return plain.view(_BITS[plain.dtype.itemsize])
    return plain.resolve_conj().resolve_neg() if is_lazy(plain) else plain


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the memory is not yet the value, because a conjugation or negation is pending."""
    return tensor.is_conj() or tensor.is_neg()


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that two tensors share if and only if they are the same elements in the same memory.

    None for an empty tensor, which shares nothing. Valid while the tensors live.
    """
    if not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a dense host tensor's memory as bytes; valid while the tensor lives."""
    address = tensor.data_ptr()
    return _ADDRESS_SPACE[address : address + tensor.nbytes]


def is_fillable(tensor: torch.Tensor) -> bool:
    """Return whether each element has memory of its own, and that memory is its value."""
    return not is_lazy(tensor) and has_memory_of_its_own(tensor)


def has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    """Return whether no two elements share memory, as they do after `expand`; False also where that is unclear."""
    if tensor.is_contiguous():
        return True
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False
            reach += step * (size - 1)
    return True


def dtype_code(dtype: torch.dtype) -> str:
    return _CODES.get(dtype) or from_torch_name(str(dtype), dtype.itemsize)


def torch_dtype(code: str) -> torch.dtype:
    """Return the dtype of torch that has this *code* in manifests.

    Raises:
        UsageError: this torch has no dtype of that name and size.
    """
    dtype = getattr(torch, torch_name(code), None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != itemsize(code):
        raise UsageError(
            f"this torch has no torch.{torch_name(code)}: install the one that the checkpoint was saved with"
        )
    return dtype


def tensor_name(path: Path, rank: int | None = None) -> str:
    """Return the name of the tensor at *path*; that of one rank alone ends in the rank, so that names do not collide."""
    name = join_name(path)
    return name if rank is None else f"{name}@rank{rank}"


_CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items() if hasattr(torch, name)}
_COPIED = {dtype for dtype in _CODES if not re.fullmatch(r"torch\.(u?int[1-7]|float4_e2m1fn_x2)", str(dtype))}
# Without complex dtypes: such a tensor may be lazily conjugated, which `plain_addresses` does not check.
_REAL = {dtype: code for dtype, code in _CODES.items() if dtype in _COPIED and not dtype.is_complex}
_ADDRESS_SPACE = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""All memory by address; only slices of it are accessed. A slice costs 0.2 µs, a view of a size new to ctypes 30 µs."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


# Whether a tensor or value of the state can be filled from the checkpoint, and the new tensor for one that cannot.


def fits(live: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor | torch.device, flat: FlatRange | None) -> bool:
    """Return whether *live* can hold a tensor of *shape*; with *flat*, the slice of it that *like* holds."""
    if flat is not None and isinstance(like, torch.Tensor):
        return live.shape == like.shape and is_fillable(live)
    return tuple(live.shape) == shape and all(map(is_fillable, local_tensors(live)))


def misfit(own_dtype: torch.dtype, held: LocalShards, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return as text why a tensor of *own_dtype* cannot be filled from one of code *dtype* and *shape*, or None."""
    if held.shape != shape:
        return f"shape {held.shape} in the state, {shape} in the checkpoint"
    if not same(dtype_code(own_dtype), dtype):
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
    """Return a new tensor of *shape*, or for slice *flat* of it; on the device *like*, or like the tensor *like*.

    Args:
        axes: the saved order of the axes in memory, slowest first; ignored for a slice. None takes the layout of the
            tensor *like* where it has the same shape, else row-major.
    """
    if (
        isinstance(like, torch.Tensor)
        and not is_uninitialized(like)
        and (flat is not None or tuple(like.shape) == shape)
    ):
        return tensor_kind(like).empty_like(like, dtype, axes if flat is None else None)
    device = like if isinstance(like, torch.device) else like.device
    if axes is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_permuted(shape, tuple(axes), dtype=dtype, device=device)


def number_misfit(number: Any, dtype: torch.dtype) -> str | None:
    """Return as text why a plain number cannot become an element of *dtype*, or None.

    Floats are rounded, in the range of the dtype, and integers are not; an integer dtype accepts integral values in its
    range; only a complex dtype accepts complex numbers.
    """
    try:
        _as_element(number, dtype)
    except (OverflowError, ValueError, TypeError, RuntimeError):
        return f"a tensor of {dtype} in the state, {kind_in_words(number)} that it cannot hold in the checkpoint"
    return None


def write_number(number: Any, into: torch.Tensor) -> None:
    """Fill a 0-d tensor with a plain number that fits it (`number_misfit`)."""
    element = _as_element(number, into.dtype)
    with torch.inference_mode(into.is_inference()), torch.no_grad():
        for local in local_tensors(into):
            local.detach().copy_(element)


def _as_element(number: Any, dtype: torch.dtype) -> torch.Tensor:
    plain = number.item() if isinstance(number, np.generic) else number
    if isinstance(plain, np.generic):  # longdouble.item() is a longdouble again
        plain = complex(plain) if np.iscomplexobj(plain) else float(plain)
    if dtype.is_complex:
        element = torch.tensor(complex(plain), dtype=dtype)
    elif isinstance(plain, complex):
        raise TypeError("a complex number")
    elif dtype.is_floating_point:
        element = torch.tensor(float(plain), dtype=dtype)
    else:
        whole = int(plain)
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if whole != plain or not least <= whole <= most:
            raise ValueError("not one of its values")
        return torch.tensor(whole, dtype=dtype)
    if isinstance(plain, int) and element.item() != plain:
        raise ValueError("rounded")
    if any(torch.finfo(dtype).max < abs(part) < math.inf for part in (plain.real, plain.imag)):
        raise ValueError("out of range")
    return element
