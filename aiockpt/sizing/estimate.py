"""The estimate of a save, from the state as it is now and what optimizers will add.

The state is walked and planned as for a save, but neither copied nor written: bytes, files and windows are those of the
plan itself. No other rank is involved, so one rank alone may call (`aiockpt.sizing.to_come`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.kinds import find_objects
from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.load import is_fillable, scratch_limit_bytes
from aiockpt.engine.save import records_bytes
from aiockpt.format.document import SUM_BYTES, block_count
from aiockpt.options import Tier
from aiockpt.planning.write_plan import REST, SavePlan
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import run_blocking
from aiockpt.sizing.places import PlaceEstimate, estimate_places
from aiockpt.sizing.run_plan import COPY_BYTES_PER_S
from aiockpt.sizing.to_come import StateToCome, find_share, local_part, whole_bytes
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.units import count, size

RECORD_BYTES = 1 << 10
"""The size of a receipt, or of a manifest, without its tables."""
REQUESTS = 24
"""Beside those of data files: listings of the place, the records of a commit, and a step that retention deletes."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a save of a state takes; ``print`` it.

    Attributes:
        step_bytes: of the tensors of a step on all ranks; a part that several ranks hold counts once.
        disk_bytes: of a step in storage, with headers, receipts and manifest.
        rank_bytes: of the tensors that this rank copies and writes; *rank_file_bytes* of its data files.
        held_bytes: of the state in the memory of this process, on host and devices.
        to_come: what optimizers will add with their first step; counted in all of these.
        files: data files of this rank.
        requests: calls that a save of this rank makes to its place, at most, those of retention among them.
        memory_bytes: of the host, beside the state, at the peak of a save.
        pool_bytes: of these, the staging pool, which is kept from save to save.
        load_bytes: of the host, beside the state, at the peak of a load of what the same layout saved, at most.
        other_layout_bytes: the same where another layout saved it, in parts that must be cut and copied.
        pause_s: for which an eager save holds training: measured in the last saves of this run; before the first, one copy
            of *rank_bytes* at the speed of a common host.
        durable_s: from the call to the commit, measured in the last saves of this run; None before the first.
        places: the nearest first.
        assumptions: on which these figures rest.
        problems: what does not fit, with what to do.
    """

    step_bytes: int
    disk_bytes: int
    rank_bytes: int
    rank_file_bytes: int
    held_bytes: int
    world_size: int
    to_come: tuple[StateToCome, ...]
    files: int
    requests: int
    memory_bytes: int
    pool_bytes: int
    load_bytes: int
    other_layout_bytes: int
    pause_s: float
    durable_s: float | None
    places: tuple[PlaceEstimate, ...]
    assumptions: tuple[str, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        here = f", {size(self.rank_bytes)} of them written by this rank" if self.world_size > 1 else ""
        save, load = (1 + beside / max(self.held_bytes, 1) for beside in (self.memory_bytes, self.load_bytes))
        peaks = f"{save:.2f} and {load:.2f} × the state"
        lines = [
            f"a step            {size(self.step_bytes)}{here}; {size(self.disk_bytes)} in storage",
            f"data files        {self.files} of this rank, {count(self.requests, 'request')} at most",
            f"training is held  {self.pause_s * 1e3:.0f} ms by an eager save",
            f"memory beside     {size(self.memory_bytes)} while saving, {size(self.load_bytes)} while loading: {peaks}",
            f"                  {size(self.other_layout_bytes)} at most, while loading what another layout saved",
        ]
        if self.durable_s is not None:
            lines.append(f"durable after     {self.durable_s:.2f} s")
        for optimizer in self.to_come:
            added = (
                "is not known: estimate again after the first step"
                if optimizer.rank_bytes is None
                else size(optimizer.bytes)
            )
            lines.append(f"to come           {optimizer.name} makes its state with its first step: {added}")
        lines += map(str, self.places)
        lines += [f"supposed: {assumption}" for assumption in self.assumptions]
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


async def estimate(
    destination: Destination,
    coordinator: Coordinator,
    *,
    walked: ShardedState,
    state: Mapping[str, Any],
    to_come: Sequence[StateToCome],
    tiers: Sequence[Tier],
) -> Estimate:
    """Return the estimate of a save. On the loop.

    Args:
        walked: the state as it is now; *state* as the caller gave it.
        to_come: what its optimizers will add.
        tiers: the options of each place.

    Raises:
        UsageError: this process saves alone and has not all of each tensor.
    """
    engine, nearest, spare_bytes = destination.engine, destination.places[0], available_bytes()
    coming = [shard for optimizer in to_come for shard in optimizer.shards]
    share, supposed = await run_blocking(engine.state_work, find_share, coordinator, walked, coming)
    plan = await run_blocking(engine.state_work, engine.make_plan, share)
    step_bytes = whole_bytes(walked.tensors) + sum(optimizer.bytes for optimizer in to_come)
    others_bytes = plan.file_bytes - plan.tensor_bytes + _records_bytes(plan, share, engine.block_bytes)
    disk_bytes = step_bytes + others_bytes * coordinator.world_size
    pool_bytes, wanted_bytes = _pool_bytes(engine, plan, spare_bytes)
    memory_bytes = pool_bytes + BESIDE_BYTES + (WRITER_BYTES if engine.options.worker == "process" else 0)
    if engine.options.snapshot == "lazy":
        memory_bytes += copied_at_call_bytes(state, walked.tensors)
    load_bytes, other_layout_bytes = _load_bytes(
        nearest,
        staged_bytes=staged_bytes(walked.tensors) + sum(optimizer.device_bytes for optimizer in to_come),
        step_bytes=step_bytes,
        largest_bytes=max((whole_bytes([shard]) for shard in (*walked.tensors, *coming)), default=0),
    )
    places = await estimate_places(destination.places, tiers, disk_bytes, _weights_bytes(plan, disk_bytes))
    needed_bytes = memory_bytes + sum(optimizer.rank_bytes or 0 for optimizer in to_come)
    problems = [
        _pool_problem(engine, plan, pool_bytes, wanted_bytes),
        _host_problem(destination, places, needed_bytes, spare_bytes),
        *(place.find_problem(records_bytes(plan)) for place in places),
    ]
    return Estimate(
        step_bytes=step_bytes,
        disk_bytes=disk_bytes,
        rank_bytes=plan.tensor_bytes,
        rank_file_bytes=plan.file_bytes,
        held_bytes=sum(shard.nbytes for shard in (*walked.tensors, *coming)),
        world_size=coordinator.world_size,
        to_come=tuple(to_come),
        files=len(plan.files),
        requests=plan.window_count + 2 * len(plan.files) + REQUESTS,
        memory_bytes=memory_bytes,
        pool_bytes=pool_bytes,
        load_bytes=load_bytes,
        other_layout_bytes=other_layout_bytes,
        pause_s=engine.last_saves.pause_s or plan.tensor_bytes / COPY_BYTES_PER_S,
        durable_s=engine.last_saves.durable_s,
        places=places,
        assumptions=(*supposed, *_supposed_of(engine, to_come)),
        problems=tuple(problem for problem in problems if problem),
    )


def _pool_problem(engine: Engine, plan: SavePlan, pool_bytes: int, wanted_bytes: int) -> str | None:
    if pool_bytes == wanted_bytes or engine.options.io.pool_bytes is not None:
        return None
    return (
        f"the staging pool gets {size(pool_bytes)}, a quarter of the memory to spare, for {size(plan.file_bytes)}: a save "
        "holds training until the rest is written. Free memory, give IO(pool_bytes=…), or save with snapshot='lazy'"
    )


def _host_problem(
    destination: Destination, places: Sequence[PlaceEstimate], needed_bytes: int, spare_bytes: int
) -> str | None:
    """Return the problem that saves and memory tiers exceed this machine's spare memory, if they do."""
    traits = [place.backend.traits for place in destination.places]
    tiers_bytes = sum(
        place.kept_bytes
        for place, trait in zip(places, traits, strict=True)
        if not trait.durable and trait.scope != "shared"
    )
    if needed_bytes + tiers_bytes <= spare_bytes:
        return None
    return (
        f"this process will need {size(needed_bytes)} beside its state, and memory tiers {size(tiers_bytes)}; this machine "
        f"has {size(spare_bytes)} to spare: give a smaller IO(pool_bytes=…), or keep fewer steps in memory"
    )


def _supposed_of(engine: Engine, to_come: Sequence[StateToCome]) -> list[str]:
    known = [optimizer.name for optimizer in to_come if optimizer.rank_bytes]
    unknown = [optimizer.name for optimizer in to_come if optimizer.rank_bytes is None]
    words = []
    if known:
        words.append(f"{', '.join(known)}: every parameter with requires_grad gets a gradient in the first step")
    if unknown:
        words.append(f"{', '.join(unknown)}: nothing is counted of what its first step will make")
    if engine.options.io.pool_bytes is None and engine.world_size > 1:
        words.append("the other ranks of this host have their pools already, or take theirs from the same memory")
    return words


def _records_bytes(plan: SavePlan, share: ShardedState, block_bytes: int) -> int:
    """Return the approximate bytes of the records of a rank's part: its receipt, and as much again in the manifest."""
    sums = sum(block_count(file.size, block_bytes) * SUM_BYTES * 4 // 3 for file in plan.files)
    parts: tuple[object, ...] = (plan.tensors, share.values, share.per_rank, share.alias, share.left_out)
    return 2 * (sum(len(msgspec.json.encode(part)) for part in parts) + sums + RECORD_BYTES)


def _weights_bytes(plan: SavePlan, disk_bytes: int) -> int:
    """Return the bytes of the weights of a step, by the share of weights in this rank's files."""
    rest = sum(file.size for file in plan.files if file.kind == REST)
    return round(disk_bytes * (1 - rest / max(plan.file_bytes, 1)))


BESIDE_BYTES = 4 << 20
"""Beside pool, copies and reads: tables of tensors, checksums, threads. Measured: 0.6 to 3 MiB for 300 tensors."""
WRITER_BYTES = 28 << 20
"""Of a writer process alone: its interpreter, and tables of tensors. Measured: 28 MiB for 10 tensors, 37 for 3,000."""


def _pool_bytes(engine: Engine, plan: SavePlan, spare_bytes: int) -> tuple[int, int]:
    """Return the bytes of the staging pool, which is kept from save to save, and those that a save by *plan* would fill."""
    io, pool = engine.options.io, engine.pool.statistics()
    wanted, most = plan.window_count * io.slab_bytes, pool.ceiling_bytes
    if io.pool_bytes is None:
        # As the pool will decide it: slabs that it has already are not in *spare_bytes* any more, and count, too.
        most = max((spare_bytes + pool.allocated_bytes) // 4 // io.slab_bytes * io.slab_bytes, most)
    return min(wanted, most), wanted


def _load_bytes(nearest: Place, *, staged_bytes: int, step_bytes: int, largest_bytes: int) -> tuple[int, int]:
    """Return the memory of a load, at most, of what was saved in the wanted parts, and of what was saved in other parts.

    Args:
        staged_bytes: that cannot be read into place (`staged_bytes`).
        step_bytes: of all ranks; *largest_bytes*: of one tensor of these.
    """
    io, traits = nearest.engine.options.io, nearest.backend.traits
    each_bytes = io.read_bytes if traits.read_buffer_bytes is None else traits.read_buffer_bytes
    read_bytes = min(traits.block_reads * each_bytes, step_bytes)
    gap_bytes = min(traits.block_reads * io.read_bytes, step_bytes)
    scratch_bytes = min(max(scratch_limit_bytes(nearest), largest_bytes), step_bytes)
    verifying_bytes = gap_bytes if io.verify == "full" else 0  # before anything is staged
    return (
        read_bytes + max(staged_bytes, verifying_bytes) + BESIDE_BYTES,
        read_bytes + staged_bytes + gap_bytes + scratch_bytes + BESIDE_BYTES,
    )


def copied_at_call_bytes(state: Mapping[str, Any], walked: Sequence[TensorShard]) -> int:
    """Return the host memory of what a lazy save copies in the call: buffers, bare tensors, what no optimizer owns."""
    owned = {
        local_part(parameter).data_ptr()
        for _, optimizer in find_objects(state, Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }

    def is_mutable(shard: TensorShard) -> bool:
        return shard.may_differ or (isinstance(shard.data, torch.nn.Parameter) and shard.data.data_ptr() not in owned)

    held = (shard for shard in walked if isinstance(shard.data, torch.Tensor) and shard.data.is_cpu)
    return sum(shard.nbytes for shard in held if is_mutable(shard))


def staged_bytes(walked: Sequence[TensorShard]) -> int:
    """Return the bytes that a load stages in host memory until all is verified: of device tensors and strided tensors."""
    return sum(
        shard.nbytes
        for shard in walked
        if isinstance(shard.data, torch.Tensor) and not is_fillable(shard.data.detach())
    )
