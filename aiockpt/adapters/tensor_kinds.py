"""The table of tensor kinds: everything that saving and loading ask about a tensor beyond its dtype and its bytes.

A kind is one entry of `KINDS`: a `TensorKind`, whose defaults describe an ordinary tensor, with what differs from that. The
rest of the package asks the entry (`tensor_kind`), and never a class (docs/architecture.md#add-a-tensor-kind).

Guarantees:

- A tensor has exactly one kind: the first that claims it, else `PLAIN`.
- Asking imports nothing: a class whose module is not loaded has no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeGuard

import msgspec
import torch
from torch.nn.parameter import is_lazy as is_uninitialized

from aiockpt.adapters.dtensors import (
    as_dtensor,
    axes_of_dtensor,
    boxes_of,
    dtensor_placed,
    empty_like_dtensor,
    hold_dtensor,
    is_dtensor,
    local_of,
    placements_of,
    present_local,
)
from aiockpt.adapters.local_shards import LocalPiece, LocalShards, whole_boxes
from aiockpt.adapters.sharded_tensors import (
    Shards,
    empty_like_foreign,
    has_chunk_methods,
    hold_foreign,
    hold_torchs,
    is_torchs,
)
from aiockpt.state.codecs import DEFAULT_CODECS
from aiockpt.state.geometry import Box
from aiockpt.state.layout import axes_in_memory, fits_order
from aiockpt.state.tree import Path

ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes whose tensors are never spread over ranks, and are made of others only by their layout."""
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
SPARSE_LAYOUTS = frozenset({torch.sparse_coo, *COMPRESSED})
_UNFINISHED = frozenset({"AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor"})
"""Subclasses of torch itself that stand for a tensor without data, or not yet with data."""
_STRIDED: Any = torch.strided
_SHARD, _LOCAL, _SPEC = map(attrgetter, ("tensor", "_local_tensor", "_spec"))


class Watcher(Protocol):
    """Records the objects that must stay the same while a cached walk is used (`aiockpt.adapters.watch.Watch`)."""

    def items(self, items: list[Any]) -> None:
        """Watch the items of a list by identity."""

    def attribute(self, get: Callable[[Any], Any], owner: Any) -> None:
        """Watch what *get* of *owner* returns, by identity."""


class Mesh(msgspec.Struct, frozen=True, eq=False):
    """The functions of a kind whose tensors are placed on a mesh, so that another tensor can be placed like one.

    Attributes:
        wrap: (local, like) → the tensor placed like *like* whose local tensor is *local*, in the same memory.
        placements: tensor → its placement on each axis of the mesh, as text; empty where text cannot express it.
        alike: (tensor, other) → whether both have the same shape and placement.
        place: (placements, like, shape, dtype, axes) → a new tensor on the mesh of *like*, or None for invalid placements.
    """

    wrap: Callable[[torch.Tensor, Any], torch.Tensor]
    placements: Callable[[Any], tuple[str, ...]]
    alike: Callable[[Any, Any], bool]
    place: Callable[..., torch.Tensor | None]


def _whole(tensor: torch.Tensor, path: Path) -> LocalShards:
    shape = tuple(tensor.shape)
    return LocalShards(shape, (LocalPiece(whole_boxes(shape), tensor),))


def _alone(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [] if is_uninitialized(tensor) else [tensor]


def _boxes_held(tensor: torch.Tensor, path: Path) -> tuple[Box, ...]:
    return tuple(box for piece in tensor_kind(tensor).hold(tensor, path).pieces for box in piece.boxes)


def _axes_of_parts(tensor: torch.Tensor, held: LocalShards) -> tuple[int, ...] | None:
    first, *others = (piece.local for piece in held.pieces)
    plainly = first.is_contiguous() and 1 not in first.shape  # true of most, and cheap to check
    axes = None if plainly else axes_in_memory(first.shape, first.stride())
    if axes is None or not all(fits_order(local.shape, local.stride(), axes) for local in others):
        return None
    return axes


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype, axes: Sequence[int] | None) -> torch.Tensor:
    if axes is None:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    return torch.empty_permuted(tensor.shape, tuple(axes), dtype=dtype, device=tensor.device)


class TensorKind(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One kind of tensors. The defaults are those of an ordinary tensor; functions receive tensors of this kind alone.

    Attributes:
        name: for messages.
        claims: whether a tensor is of this kind. It may not raise, and receives tensors of any class.
        is_spread: whether the elements are in local tensors, and ranks may have different ones. Else they lie at the
            tensor's own address, or the tensor is refused.
        in_parts: whether it is saved as several tensors with names of their own (`aiockpt.adapters.composites`).
        hold: (tensor, path) → what this rank holds of it, in the memory of the local tensors; refuses what cannot be saved.
        local: this rank's one local tensor; the tensor itself where it has none, or several.
        local_tensors: all local tensors, none of them in parts; what a load fills and a lazy save guards.
        boxes: (tensor, path) → the boxes of the whole that this rank holds, in order; empty for no elements.
        axes: (tensor, what it holds) → the order in memory of the axes of the whole, slowest first, equal on all ranks;
            None for row-major.
        empty_like: (tensor, dtype, axes) → a new tensor spread alike, without communication; *axes* as in a `TensorShard`.
        counter: the tensor at which torch counts changes (``_version``) where its local tensors do not see them; else None.
        watch: (tensor, watcher) → records the objects whose replacement ends the use of a cached walk, beyond address,
            shape, strides and dtype of the local tensors.
        mesh: how another tensor can be placed like it; None where it cannot.
    """

    name: str
    claims: Callable[[torch.Tensor], bool]
    is_spread: bool = False
    in_parts: bool = False
    hold: Callable[[Any, Path], LocalShards] = _whole
    local: Callable[[Any], torch.Tensor] = lambda tensor: tensor
    local_tensors: Callable[[Any], list[torch.Tensor]] = _alone
    boxes: Callable[[Any, Path], tuple[Box, ...]] = _boxes_held
    axes: Callable[[Any, LocalShards], tuple[int, ...] | None] = _axes_of_parts
    empty_like: Callable[[Any, torch.dtype, Sequence[int] | None], torch.Tensor] = _empty_like
    counter: Callable[[Any], torch.Tensor | None] = lambda tensor: None
    watch: Callable[[Any, Watcher], None] = lambda tensor, watcher: None
    mesh: Mesh | None = None


def tensor_kind(tensor: object) -> TensorKind:
    """Return the kind of *tensor*; `PLAIN` for what is no tensor, too."""
    if type(tensor) in ORDINARY:
        # Most tensors end here, and each is asked several times in a walk: 0.1 µs.
        if tensor.layout is _STRIDED and not tensor.is_quantized:  # type: ignore[attr-defined]
            return PLAIN
    elif not isinstance(tensor, torch.Tensor):
        return PLAIN
    return next((kind for kind in KINDS if kind.claims(tensor)), PLAIN)  # type: ignore[arg-type]


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the local tensors with this rank's elements of *tensor*: itself if plain; nothing for a lazy parameter."""
    return tensor_kind(tensor).local_tensors(tensor)


def has_own_bytes(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether *value* is a tensor that is saved as one, not in parts."""
    return isinstance(value, torch.Tensor) and not tensor_kind(value).in_parts


def _watch_dtensor(tensor: Any, watcher: Watcher) -> None:
    watcher.attribute(_LOCAL, tensor)
    watcher.attribute(_SPEC, tensor)


def _watch_torchs(tensor: Any, watcher: Watcher) -> None:
    watcher.items(tensor.local_shards())
    for shard in tensor.local_shards():
        watcher.attribute(_SHARD, shard)


def _watch_foreign(tensor: Any, watcher: Watcher) -> None:
    watcher.attribute(lambda tensor: object(), tensor)  # whether its chunks are new ones cannot be determined


def _held(hold: Callable[[Any], LocalShards]) -> dict[str, Any]:
    """Return the members of a kind whose tensors list their parts; *hold* returns them."""
    return {
        "is_spread": True,
        "hold": lambda tensor, path: hold(tensor),
        "local_tensors": lambda tensor: [piece.local for piece in hold(tensor).pieces],
    }


def _consists_of_others(tensor: torch.Tensor) -> bool:
    cls = type(tensor)
    if cls not in ORDINARY:
        if DEFAULT_CODECS.for_class(cls) is not None:
            return True
        if cls.__name__ in _UNFINISHED or tensor.is_nested:
            return False
    return hasattr(tensor, "__tensor_flatten__") or tensor.layout in SPARSE_LAYOUTS or tensor.is_quantized


PLAIN = TensorKind(name="tensor", claims=lambda tensor: False)
_DTENSOR = TensorKind(
    name="DTensor",
    claims=is_dtensor,
    is_spread=True,
    hold=hold_dtensor,
    local=local_of,
    local_tensors=lambda tensor: [local_of(tensor)],
    boxes=boxes_of,
    axes=axes_of_dtensor,
    empty_like=empty_like_dtensor,
    counter=lambda tensor: tensor,
    watch=_watch_dtensor,
    mesh=Mesh(
        as_dtensor,
        placements_of,
        lambda tensor, other: tensor.shape == other.shape and tensor.placements == other.placements,
        dtensor_placed,
    ),
)
KINDS: list[TensorKind] = [
    msgspec.structs.replace(
        _DTENSOR,
        in_parts=True,
        claims=lambda tensor: is_dtensor(tensor) and tensor_kind(present_local(tensor)).in_parts,
    ),
    _DTENSOR,
    TensorKind(
        name="Shards",
        claims=lambda tensor: isinstance(tensor, Shards),
        **_held(lambda tensor: tensor.held),
        empty_like=lambda tensor, dtype, axes: tensor.empty_like(dtype),
    ),
    TensorKind(
        name="ShardedTensor",
        claims=is_torchs,
        **_held(hold_torchs),
        empty_like=empty_like_foreign,
        watch=_watch_torchs,
    ),
    TensorKind(
        name="tensor with chunks",
        claims=has_chunk_methods,
        **_held(hold_foreign),
        empty_like=empty_like_foreign,
        watch=_watch_foreign,
    ),
    TensorKind(name="tensor in parts", claims=_consists_of_others, in_parts=True),
]
"""All kinds but `PLAIN`, in the order in which they are asked."""
