"""What has this rank of the parameters below an FSDP1 ``FullyShardedDataParallel``? Slices, without gathering anything.

FSDP1 puts the parameters of a module one after the other into a flat one (with padding between them) and gives each rank
an equal share. With ``use_orig_params=True`` each parameter is then a 1-D view of this share, empty on the ranks that have
nothing of it; so is the optimizer's state of it.

FSDP1's private ``FlatParamHandle`` is the only place that says which elements these are; the tests pin its source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aiockpt.adapters.held import FlatRange
from aiockpt.state.tree import Path, refuse


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether *module* is an FSDP1 wrapper."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


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
        for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            start, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
            yield parameter, FlatRange(tuple(shape), start, start + count)
