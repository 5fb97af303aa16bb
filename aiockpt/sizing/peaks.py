"""The peak memory that a process needs beside its state, in a save and in a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import torch

from aiockpt.engine.context import Engine
from aiockpt.engine.load import scratch_limit_bytes
from aiockpt.engine.place import Place
from aiockpt.pipeline.scatter import is_fillable
from aiockpt.planning.write_plan import SavePlan
from aiockpt.sizing.to_come import find_optimizers, local_part
from aiockpt.state.shards import TensorShard
from aiockpt.units import size

BESIDE_BYTES = 4 << 20
"""Beside pool, copies and reads: tables of tensors, checksums, threads. Measured: 0.6 to 3 MiB for 300 tensors."""
WRITER_BYTES = 28 << 20
"""Of a writer process alone: its interpreter, and tables of tensors. Measured: 28 MiB for 10 tensors, 37 for 3,000."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of one process beside its state, with that of its writer process.

    Attributes:
        save_bytes: at the peak of a save.
        pool_bytes: of these, what is kept from save to save.
        load_bytes: at the peak of a load, at most, of what was saved in the parts that are wanted.
        other_parts_bytes: the same of what was saved in other parts.
    """

    save_bytes: int
    pool_bytes: int
    load_bytes: int
    other_parts_bytes: int


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What of a state decides on memory.

    Attributes:
        copied_bytes: that a lazy save copies beside the pool (`copied_at_call_bytes`).
        staged_bytes: that cannot be read into place (`staged_bytes`).
        step_bytes: of all ranks; *largest_bytes*: of one tensor of these.
    """

    copied_bytes: int
    staged_bytes: int
    step_bytes: int
    largest_bytes: int


def find_memory(engine: Engine, plan: SavePlan, needs: Needs, nearest: Place, to_spare: int) -> tuple[Peaks, list[str]]:
    """Return the memory that a save by *plan* and a load from the *nearest* place take, and what is wrong with that.

    Args:
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
    writer_bytes = WRITER_BYTES if engine.options.worker == "process" else 0
    load_bytes, other_parts_bytes = _find_loads(needs, nearest)
    found = Peaks(
        save_bytes=pool_bytes + needs.copied_bytes + BESIDE_BYTES + writer_bytes,
        pool_bytes=pool_bytes,
        load_bytes=load_bytes,
        other_parts_bytes=other_parts_bytes,
    )
    if pool_bytes < wanted and io.pool_bytes is None:
        return found, [
            f"the staging pool gets {size(pool_bytes)}, a quarter of the memory to spare, for {size(plan.file_bytes)}: a "
            "save holds training until the rest is written. Free memory, give IO(pool_bytes=…), or save with "
            "snapshot='lazy'"
        ]
    return found, []


def _find_loads(needs: Needs, nearest: Place) -> tuple[int, int]:
    """Return what a load takes of what was saved in the parts that are wanted, and in others."""
    io, traits = nearest.engine.options.io, nearest.backend.traits
    each_bytes = io.read_bytes if traits.read_buffer_bytes is None else traits.read_buffer_bytes
    read_bytes = min(traits.block_reads * each_bytes, needs.step_bytes)
    gap_bytes = min(traits.block_reads * io.read_bytes, needs.step_bytes)
    scratch_bytes = min(max(scratch_limit_bytes(nearest), needs.largest_bytes), needs.step_bytes)
    verifying_bytes = gap_bytes if io.verify == "full" else 0  # before anything is staged
    load_bytes = read_bytes + max(needs.staged_bytes, verifying_bytes)
    other_bytes = read_bytes + needs.staged_bytes + gap_bytes + scratch_bytes
    return load_bytes + BESIDE_BYTES, other_bytes + BESIDE_BYTES


def copied_at_call_bytes(state: Mapping[str, Any], walked: Sequence[TensorShard]) -> int:
    """Return the host memory of what a lazy save copies in the call: buffers, bare tensors, what no optimizer owns."""
    owned = {
        local_part(parameter).data_ptr()
        for _, optimizer in find_optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return sum(shard.nbytes for shard in walked if _on_host(shard) and _is_mutable(shard, owned))


def _on_host(shard: TensorShard) -> bool:
    return isinstance(shard.data, torch.Tensor) and shard.data.is_cpu


def _is_mutable(shard: TensorShard, owned: Set[int]) -> bool:
    return shard.may_differ or (isinstance(shard.data, torch.nn.Parameter) and shard.data.data_ptr() not in owned)


def staged_bytes(walked: Sequence[TensorShard]) -> int:
    """Return what a load brings to host memory first, to copy it when all is verified: of devices, and strided tensors."""
    return sum(
        shard.nbytes
        for shard in walked
        if isinstance(shard.data, torch.Tensor) and not is_fillable(shard.data.detach())
    )
