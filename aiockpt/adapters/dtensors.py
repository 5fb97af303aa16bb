"""Boxes of DTensors and of parameters under FSDP: which elements of the global tensor are in the local one.

DTensors may have any mesh and any placements except Partial.

The arithmetic is our own, because torch's offset helper is wrong for strided shards: for each axis of the tensor we keep
the runs of indices that this rank has, and cut them placement by placement (`aiockpt.state.geometry.chunk_runs`).

Guarantees:

- Boxes that do not add up to the local tensor's shape are refused; nothing is guessed.
- No communication: a rank needs only its own coordinate. A rank outside the mesh holds nothing.

Importing this module does not import ``torch.distributed.tensor``: as long as that is not loaded, no DTensor exists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from aiockpt.adapters.local_shards import FlatRange, LocalPiece, LocalShards
from aiockpt.errors import kind_in_words
from aiockpt.state.geometry import Box, Run, boxes_follow, chunk_runs, flat_range_boxes, runs_to_boxes
from aiockpt.state.layout import axes_in_memory, fits_order, strides_in_order
from aiockpt.state.tree import Path, refuse

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# DTensors cut by veScale's RaggedShard: each rank has a range of the flattened tensor.
#
# ``RaggedShard(dims, local_units)`` gives rank *i* of an axis ``local_units[i] / sum(local_units)`` of the elements, in the
# order in which they lie in memory. The placement is detected by its ``local_units``: veScale is not imported.
#
# Guarantee: a range that does not add up is refused; nothing is guessed.


def ragged_range(spec: DTensorSpec, path: Path) -> FlatRange | None:
    """Return this rank's range of a tensor with a ragged placement; None for a tensor without one.

    Raises:
        UnsupportedStateError: another placement also cuts it, or its elements do not divide into the units.
    """
    ragged = [axis for axis, placement in enumerate(spec.placements) if hasattr(placement, "local_units")]
    if not ragged:
        return None
    from torch.distributed.tensor import Replicate

    axis, shape = ragged[0], tuple(spec.shape)
    placement: Any = spec.placements[axis]
    others = [one for number, one in enumerate(spec.placements) if number != axis and not isinstance(one, Replicate)]
    if others or hasattr(placement, "split_factor"):
        refuse(
            path,
            f"a DTensor placed as {spec.placements}: a ragged cut is read beside Replicate() alone; redistribute the others",
        )
    units, count = tuple(placement.local_units), prod(shape)
    if len(units) != spec.device_mesh.size(axis) or min(units) < 0 or not sum(units) or count % sum(units):
        refuse(
            path,
            f"a DTensor of {count} elements placed as {placement!r} over {spec.device_mesh.size(axis)} ranks: they do not "
            "divide into its units",
        )
    coordinate = spec.device_mesh.get_coordinate()
    if coordinate is None:
        return FlatRange(shape, 0, 0)
    unit, index = count // sum(units), coordinate[axis]
    start = sum(units[:index]) * unit
    return FlatRange(shape, start, start + units[index] * unit)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def present_local(tensor: Any) -> torch.Tensor:
    """Return the local tensor after collectives that still compute it have ended."""
    local: Any = tensor._local_tensor
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(local, module.AsyncCollectiveTensor):
        local = local.wait()
    return local  # type: ignore[no-any-return]


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor, detached from autograd, after collectives that still compute it have ended."""
    return present_local(tensor).detach()


def axes_of_dtensor(tensor: DTensor, held: LocalShards) -> tuple[int, ...] | None:
    """Return the order in memory of the global tensor's axes; None for row-major.

    A local tensor of a single row fits several orders; the order of the DTensor is chosen where it is among them, so that
    ranks with uneven parts return the same.
    """
    local = local_of(tensor)
    axes = axes_in_memory(tensor.shape, tensor.stride())
    if axes is not None and local.numel() and fits_order(local.shape, local.stride(), axes):
        return axes
    return axes_in_memory(local.shape, local.stride()) if local.dim() == tensor.dim() else None


def hold_dtensor(tensor: DTensor, path: Path) -> LocalShards:
    """Return this rank's part of *tensor*, which is at *path* of the state.

    Raises:
        UnsupportedStateError: a placement is Partial or unknown, or the local tensor has another shape than expected.
    """
    shape, local = tuple(tensor.shape), local_of(tensor)
    ragged = ragged_range(tensor._spec, path)
    if ragged is not None:
        if local.numel() != ragged.end - ragged.start or not local.is_contiguous():
            refuse(
                path,
                f"a DTensor of shape {shape} placed as {tensor.placements} whose local tensor has shape "
                f"{tuple(local.shape)}, not {ragged.end - ragged.start} elements one behind another",
            )
        return ragged.hold(local.view(-1))
    axes = _held_runs(tensor._spec, path)
    held = tuple(sum(size for _, size in runs) for runs in axes) if axes is not None else (0,)
    if 0 in held and not local.numel():
        return LocalShards(shape, (LocalPiece((), local),))
    if axes is None or held != tuple(local.shape):
        refuse(
            path,
            f"a DTensor of shape {shape} placed as {tensor.placements} whose local tensor has shape "
            f"{tuple(local.shape)}, not {held}; make it with distribute_tensor(), or give from_local() its shape",
        )
    blocks = runs_to_boxes(axes)
    if local.is_contiguous() and boxes_follow(axes):
        return LocalShards(shape, (LocalPiece(tuple(box for box, _ in blocks), local),))
    # Stepping through outer axes would make one box for each row; some strided parts need far fewer.
    return LocalShards(shape, tuple(LocalPiece((box,), _part(local, own.offsets, own.sizes)) for box, own in blocks))


def boxes_of(tensor: DTensor, path: Path) -> tuple[Box, ...]:
    """Return the boxes of *tensor*, at *path*, whose elements are in the local tensor, in order; empty for no elements.

    Raises:
        UnsupportedStateError: as for `hold_dtensor`.
    """
    ragged = ragged_range(tensor._spec, path)
    if ragged is not None:
        return tuple(flat_range_boxes(ragged.shape, ragged.start, ragged.end))
    axes = _held_runs(tensor._spec, path)
    return () if axes is None or not all(axes) else tuple(box for box, _ in runs_to_boxes(axes))


def part_of_spec(spec: DTensorSpec, path: Path) -> Box | None:
    """Return the one box that this rank has of a tensor spread by *spec*; None without elements.

    Raises:
        UnsupportedStateError: it has several boxes, or as for `hold_dtensor`.
    """
    axes = _held_runs(spec, path)
    if axes is None or not all(axes):
        return None
    if any(len(runs) > 1 for runs in axes):
        refuse(path, f"a tensor placed as {spec.placements} was flattened, and this rank has several boxes of it")
    return Box(tuple(first for ((first, _),) in axes), tuple(size for ((_, size),) in axes))


def _part(local: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(axis, offset, size)
    return local


def _held_runs(spec: DTensorSpec, path: Path) -> list[list[Run]] | None:
    """Return the runs of indices that this rank has on each axis; None when it is not in the mesh."""
    coordinate = spec.device_mesh.get_coordinate()
    axes: list[list[Run]] = [[(0, size)] if size else [] for size in spec.shape]
    # The coordinate is checked in the loop, after the placements: a rank outside the mesh refuses the same ones.
    for mesh_axis in _cutting_order(spec, path):
        if coordinate is None:
            return None
        placement: Any = spec.placements[mesh_axis]
        count, index = spec.device_mesh.size(mesh_axis), coordinate[mesh_axis]
        pieces = int(getattr(placement, "split_factor", 1))
        axes[placement.dim] = chunk_runs(axes[placement.dim], count, index, pieces)
    return axes if coordinate is not None else None


def _cutting_order(spec: DTensorSpec, path: Path) -> Iterator[int]:
    """Yield the axes of the mesh over which the tensor is cut: left to right, unless the spec has another order."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    cuts = []
    for mesh_axis, placement in enumerate(spec.placements):
        if placement.is_partial():
            refuse(
                path,
                f"a DTensor placed as {spec.placements} holds partial sums, not its value; "
                "reduce it first: redistribute(placements=[Replicate() or Shard(...), ...])",
            )
        if isinstance(placement, Shard | _StridedShard):
            cuts.append(mesh_axis)
        elif not isinstance(placement, Replicate):
            refuse(path, f"a DTensor with an unknown placement, {placement!r}; redistribute it to Shard or Replicate")
    order = getattr(spec, "shard_order", None)
    if order is not None:
        cuts = [mesh_axis for entry in order for mesh_axis in entry.mesh_dims]
    yield from cuts


def empty_like_dtensor(like: DTensor, dtype: torch.dtype, axes: Sequence[int] | None = None) -> DTensor:
    """Return a new DTensor of *dtype* on the same mesh with the same placements; no communication.

    Args:
        axes: the order of the axes in the memory of each rank, slowest first; None takes the layout of *like*.
    """
    local = local_of(like)
    if axes is None:
        return as_dtensor(torch.empty_like(local, dtype=dtype, requires_grad=False), like)
    made = torch.empty_permuted(local.shape, tuple(axes), dtype=dtype, device=local.device)
    return as_dtensor(made, like, strides_in_order(like.shape, axes))


def placements_of(tensor: DTensor) -> tuple[str, ...]:
    """Return the placement on each mesh axis: "R", or "S" and the axis that is cut; an empty tuple for others."""
    from torch.distributed.tensor import Replicate, Shard

    said = ["R" if type(one) is Replicate else f"S{one.dim}" if type(one) is Shard else "" for one in tensor.placements]
    return tuple(said) if all(said) else ()


def dtensor_placed(
    placements: Sequence[str],
    like: DTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    axes: Sequence[int] | None = None,
) -> DTensor | None:
    """Return a new DTensor on the mesh of *like*, with *placements* as `placements_of` returns them; no communication.

    On a mesh with another number of axes it is replicated. Return None for invalid placements.

    Args:
        axes: the order of the axes in memory, slowest first; None is row-major.
    """
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh, said = like.device_mesh, list(placements)
    if len(said) != mesh.ndim:
        said = ["R"] * mesh.ndim
    if any(one != "R" and one not in (f"S{axis}" for axis in range(len(shape))) for one in said):
        return None
    placed = [Replicate() if one == "R" else Shard(int(one[1:])) for one in said]
    made = empty(shape, dtype=dtype, device_mesh=mesh, placements=placed)
    return made if axes is None else empty_like_dtensor(made, dtype, axes)


def as_dtensor(local: torch.Tensor, like: torch.Tensor, stride: Sequence[int] | None = None) -> DTensor:
    """Return a DTensor in the memory of *local*, which is this rank's part of a tensor like *like*; no communication.

    Args:
        stride: of the global tensor; None is that of *like*.
    """
    from torch.distributed.tensor import DTensor as Class

    assert isinstance(like, Class)
    return Class.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride() if stride is None else tuple(stride),
    )


# This rank's shards of the parameters of modules under FSDP. Nothing is gathered.
#
# FSDP1 (``FullyShardedDataParallel``) concatenates the parameters of a module into a flat one (with padding between them)
# and assigns each rank an equal share. With ``use_orig_params=True`` each parameter is then a 1-D view of this share, empty
# on ranks without elements of it; so is its optimizer state. The flattened tensor may be a part of the parameter (tensor
# parallelism under FSDP1), and is flattened in the order of its axes in memory (``channels_last``). Only FSDP1's private
# ``FlatParamHandle`` records which elements these are; the tests pin its source.
#
# FSDP2 (``fully_shard``) has DTensors as parameters, which are read directly. It hooks ``state_dict()`` and
# ``load_state_dict()`` for one purpose only: to show the sharded parameters instead of those gathered for a forward pass.
# `show_shards` does the same, so these hooks are ignored.


FSDP = "torch.distributed.fsdp"
"""Only a program that has imported it can have such a module."""
_FSDP2 = f"{FSDP}._fully_shard."
_FSDP1_WRAPPED = "_fsdp_wrapped_module"


def fsdp1_name(module: nn.Module) -> str | None:
    """Return the name under which an FSDP1 wrapper holds the module it wraps; None when *module* is no such wrapper."""
    fsdp = sys.modules.get(FSDP) if _FSDP1_WRAPPED in module._modules else None
    return _FSDP1_WRAPPED if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel) else None


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook of a module is one of FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith(_FSDP2)


def show_shards(module: nn.Module) -> None:
    """Make all modules below *module* show their sharded parameters: gathered ones are freed, nothing is sent.

    After a forward pass without a backward pass the outermost module keeps its gathered parameters, but optimizers and
    checkpoints use the shards only.
    """
    fsdp: Any = sys.modules.get(FSDP)
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    sharded: list[Any] = [member for member in module.modules() if isinstance(member, fsdp.FSDPModule)]
    for member in sharded:
        member.reshard()


def find_slices(module: nn.Module, path: Path) -> Iterator[tuple[torch.Tensor, FlatRange]]:
    """Yield each parameter below *module* (at *path* of the state) that is a slice, and its range of the original.

    Raises:
        UnsupportedStateError: the original parameters are not exposed, or are gathered at the moment.
    """
    handles: list[Any] = [member._handle for member in module.modules() if fsdp1_name(member)]
    for handle in handles:
        if handle is None:  # a wrapper without parameters of its own
            continue
        flat: Any = handle.flat_param
        if not handle._use_orig_params:
            refuse(path, "FSDP1 without its original parameters; wrap with use_orig_params=True")
        if not handle.uses_sharded_strategy:
            continue
        if not handle.is_sharded(flat):
            refuse(
                path,
                "the parameters are gathered at the moment; save and load outside summon_full_params(), and after a "
                "forward pass under SHARD_GRAD_OP do the backward pass first",
            )
        for number, parameter in enumerate(flat._params):
            yield parameter, _range_of(flat, number, path)


def _range_of(flat: Any, number: int, path: Path) -> FlatRange:
    """Return this rank's range of original parameter *number* of a flat one."""
    info, sizes = flat._shard_param_infos[number], tuple(flat._shapes[number])
    start, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
    axes = None if flat._contiguities[number] else _axes_in_memory(flat._strides[number], sizes, path)
    spec = flat._param_extensions[number]
    if spec is None:
        return FlatRange(sizes, start, start + count, axes=axes)
    part, shape = _part_of(spec, path)
    if part is not None and part.sizes != sizes:
        refuse(path, f"FSDP1 flattened a tensor of shape {sizes} of a parameter placed as {spec.placements}")
    return FlatRange(shape, start, start + count, part, axes)


def _axes_in_memory(strides: Sequence[int], sizes: tuple[int, ...], path: Path) -> tuple[int, ...]:
    """Return the axes from slowest to fastest: FSDP1 flattens a parameter in the order of its memory."""
    axes = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
    step = 1
    for axis in reversed(axes):
        if sizes[axis] > 1 and strides[axis] != step:
            refuse(path, f"FSDP1 flattened a parameter of shape {sizes} with gaps; give it its own memory (clone())")
        step *= sizes[axis]
    return tuple(axes)


def _part_of(spec: Any, path: Path) -> tuple[Box | None, tuple[int, ...]]:
    """Return the box that tensor parallelism assigned to this rank before FSDP1 flattened it, and the global shape."""
    if not hasattr(spec, "device_mesh"):
        refuse(path, f"FSDP1 over a parameter that is spread in its own way, {kind_in_words(spec)}; use FSDP2")
    return part_of_spec(spec, path), tuple(spec.shape)
