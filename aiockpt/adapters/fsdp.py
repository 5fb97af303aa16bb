"""Shards of the parameters of modules under FSDP: what this rank has of them. Nothing is gathered.

FSDP1 (``FullyShardedDataParallel``) puts the parameters of a module one after the other into a flat one (with padding
between them) and gives each rank an equal share. With ``use_orig_params=True`` each parameter is then a 1-D view of this
share, empty on the ranks that have nothing of it; so is the optimizer's state of it. What was flattened may be a part of the
parameter (tensor parallelism under FSDP1), and its axes lie as they lay in memory (``channels_last``). FSDP1's private
``FlatParamHandle`` is the only place that says which elements these are; the tests pin its source.

FSDP2 (``fully_shard``) has DTensors as parameters, which are read directly. It hooks ``state_dict()`` and
``load_state_dict()`` for one thing only: to show the sharded parameters instead of those gathered for a forward pass.
`show_shards` does the same, so these hooks are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from aiockpt.adapters.dtensors import part_of_spec
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.errors import kind_in_words
from aiockpt.state.geometry import Box
from aiockpt.state.tree import Path, refuse

FSDP = "torch.distributed.fsdp"
"""A program that has not imported it has no such module."""
_FSDP2 = f"{FSDP}._fully_shard."


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether *module* is an FSDP1 wrapper."""
    fsdp = sys.modules.get(FSDP)
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook of a module is one of FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith(_FSDP2)


def show_shards(module: nn.Module) -> None:
    """Have all modules below *module* show their sharded parameters: what was gathered is freed, nothing is sent.

    After a forward pass without a backward pass the outermost module keeps what it gathered, but optimizers and
    checkpoints use the shards only.
    """
    fsdp: Any = sys.modules.get(FSDP)
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    sharded: list[Any] = [member for member in module.modules() if isinstance(member, fsdp.FSDPModule)]
    for member in sharded:
        member.reshard()


def find_slices(module: nn.Module, path: Path) -> Iterator[tuple[torch.Tensor, FlatRange]]:
    """Yield each parameter below *module* (at *path* of the state) that is a slice, and what it has of the original.

    Raises:
        UnsupportedStateError: the original parameters are not there, or are gathered at the moment.
    """
    handles: list[Any] = [member._handle for member in module.modules() if is_fsdp1(member)]
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
    """Return what this rank has of original parameter *number* of a flat one."""
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
    """Return the axes from the slowest to the fastest: FSDP1 flattens what is not contiguous as it lies in memory."""
    axes = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
    step = 1
    for axis in reversed(axes):
        if sizes[axis] > 1 and strides[axis] != step:
            refuse(path, f"FSDP1 flattened a parameter of shape {sizes} with gaps; give it its own memory (clone())")
        step *= sizes[axis]
    return tuple(axes)


def _part_of(spec: Any, path: Path) -> tuple[Box | None, tuple[int, ...]]:
    """Return which box tensor parallelism gave to this rank before FSDP1 flattened it, and the global shape."""
    if not hasattr(spec, "device_mesh"):
        refuse(path, f"FSDP1 over a parameter that is spread in its own way, {kind_in_words(spec)}; use FSDP2")
    return part_of_spec(spec, path), tuple(spec.shape)
