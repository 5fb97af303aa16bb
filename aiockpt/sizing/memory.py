"""How much memory does a process need beside its state, at the peak of a save and of a load?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from aiockpt.engine.context import Engine
from aiockpt.planning.write_plan import SavePlan
from aiockpt.sizing.to_come import find_optimizers, local_part
from aiockpt.state.shards import TensorShard
from aiockpt.units import size

BESIDE_BYTES = 4 << 20
"""Beside pool, copies and reads: tables of tensors, checksums, threads. Measured: 0.6 to 3 MiB for 300 tensors."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of one process beside its state.

    Attributes:
        save_bytes, load_bytes: at the peak of a save, and of a load at most.
        pool_bytes: of the first: what is kept from save to save.
    """

    save_bytes: int
    load_bytes: int
    pool_bytes: int


def find_memory(
    engine: Engine, plan: SavePlan, copied_at_call: int, reads: int, to_spare: int
) -> tuple[Memory, list[str]]:
    """Return the memory that a save by *plan* takes, and what is wrong with that.

    Args:
        copied_at_call: bytes that a lazy save copies beside the pool.
        reads: that the place has under way at once.
        to_spare: bytes of memory that this machine has; its staging pools get a quarter of that at most.
    """
    io, pool = engine.options.io, engine.pool.statistics()
    wanted = plan.window_count * io.slab_bytes
    if io.pool_bytes is None:
        quarter = (to_spare + pool.allocated_bytes) // 4 // io.slab_bytes * io.slab_bytes
        most = max(quarter, pool.ceiling_bytes)
    else:
        most = pool.ceiling_bytes
    pool_bytes = min(wanted, most)
    read_bytes = min(reads * io.read_bytes, plan.file_bytes)
    found = Memory(
        save_bytes=pool_bytes + copied_at_call + BESIDE_BYTES,
        load_bytes=read_bytes + BESIDE_BYTES,
        pool_bytes=pool_bytes,
    )
    if pool_bytes < wanted and io.pool_bytes is None:
        return found, [
            f"the staging pool gets {size(pool_bytes)}, a quarter of the memory to spare, for {size(plan.file_bytes)}: a "
            "save holds training until the rest is written. Free memory, give IO(pool_bytes=…), or save with "
            "snapshot='lazy'"
        ]
    return found, []


def copied_at_call_bytes(state: Mapping[str, Any], walked: Sequence[TensorShard]) -> int:
    """Return what a lazy save copies in the call: what no optimizer of *state* owns, buffers and bare tensors."""
    owned = {
        local_part(parameter).data_ptr()
        for _, optimizer in find_optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return sum(
        shard.nbytes
        for shard in walked
        if shard.may_differ or (isinstance(shard.data, torch.nn.Parameter) and shard.data.data_ptr() not in owned)
    )
