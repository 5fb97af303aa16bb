"""The estimate of a save, from the state as it is now, what optimizers will add, and a short probe of each place.

The state is walked and planned as for a save, but neither copied nor written: bytes, files and windows are those of the
plan itself. No other rank is involved, so one rank alone may call (`aiockpt.sizing.share`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.kinds import find_objects
from aiockpt.engine.context import Engine, LastSaves, Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.destination import Destination
from aiockpt.engine.load import is_fillable, scratch_limit_bytes
from aiockpt.engine.save import records_bytes
from aiockpt.format.document import SUM_BYTES, block_count
from aiockpt.options import MIB, Tier
from aiockpt.planning.write_plan import REST, SavePlan
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.sizing.places import PlaceEstimate, StepSizes, estimate_places, find_problems
from aiockpt.sizing.share import find_share, whole_bytes
from aiockpt.sizing.to_come import OptimizerToCome, StateToCome, local_part
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.units import count, size

COPIED_BYTES = 32 * MIB
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
            of *rank_bytes* at the speed of a copy of host memory made now.
        durable_s: from the call to the commit: measured in the last saves of this run; before the first, this rank's part
            at the probed speed of the nearest durable place; every rank that shares its bandwidth makes it longer. None
            without either.
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

    @property
    def save_peak_ratio(self) -> float:
        """The memory of this process at the peak of a save ÷ its state."""
        return (self.held_bytes + self.memory_bytes) / max(self.held_bytes, 1)

    @property
    def load_peak_ratio(self) -> float:
        """The same of a load of what the same layout saved, at most."""
        return (self.held_bytes + self.load_bytes) / max(self.held_bytes, 1)

    def __str__(self) -> str:
        here = f", {size(self.rank_bytes)} of them written by this rank" if self.world_size > 1 else ""
        peaks = f"{self.save_peak_ratio:.2f} and {self.load_peak_ratio:.2f} × the state"
        lines = [
            f"a step            {size(self.step_bytes)}{here}; {size(self.disk_bytes)} in storage",
            f"data files        {self.files} of this rank, {count(self.requests, 'request')} at most",
            f"training is held  {self.pause_s * 1e3:.0f} ms by an eager save",
            f"memory beside     {size(self.memory_bytes)} while saving, {size(self.load_bytes)} while loading: {peaks}",
            f"                  {size(self.other_layout_bytes)} at most, while loading what another layout saved",
        ]
        if self.durable_s is not None:
            lines.append(f"durable after     {self.durable_s:.2f} s")
        for one in self.to_come:
            added = "is not known: estimate again after the first step" if one.rank_bytes is None else size(one.bytes)
            lines.append(f"to come           {one.name} makes its state with its first step: {added}")
        lines += map(str, self.places)
        lines += [f"supposed: {one}" for one in self.assumptions]
        return "\n".join([*lines, *(f"problem: {one}" for one in self.problems)])


async def estimate(
    destination: Destination,
    coordinator: Coordinator,
    *,
    walked: ShardedState,
    state: Mapping[str, Any],
    to_come: Sequence[OptimizerToCome],
    tiers: Sequence[Tier],
    probe_bytes: int,
) -> Estimate:
    """Return the estimate of a save. On the loop.

    Args:
        walked: the state as it is now; *state* as the caller gave it.
        to_come: what its optimizers will add.
        tiers: the options of each place.
        probe_bytes: written to each durable place, and removed; 0 for none.

    Raises:
        UsageError: this process saves alone and has not all of each tensor.
        StorageError: a place cannot be written to, where it is probed.
    """
    engine = destination.engine
    coming = [shard for one in to_come for shard in one.shards]
    share, supposed = await run_blocking(engine.state_work, find_share, coordinator, walked, coming)
    plan = await run_blocking(engine.state_work, engine.make_plan, share)
    described = tuple(one.described for one in to_come)
    step_bytes = whole_bytes(walked.tensors) + sum(one.bytes for one in described)
    each_bytes = _records_bytes(plan, share, engine.block_bytes)
    others_bytes = plan.file_bytes - plan.tensor_bytes + each_bytes
    disk_bytes = step_bytes + others_bytes * coordinator.world_size
    sizes = StepSizes(
        full=disk_bytes,
        weights=_weights_bytes(plan, disk_bytes),
        of_rank=plan.file_bytes,
        reserve=records_bytes(plan),
    )
    to_spare = available_bytes()
    memory, problems = find_memory(
        destination.places[0],
        plan,
        to_spare,
        copied_bytes=copied_at_call_bytes(state, walked.tensors) if engine.options.snapshot == "lazy" else 0,
        staged_bytes=staged_bytes(walked.tensors) + sum(one.device_bytes for one in to_come),
        step_bytes=step_bytes,
        largest_bytes=max((whole_bytes([shard]) for shard in (*walked.tensors, *coming)), default=0),
    )
    places = await estimate_places(destination.places, tiers, sizes, probe_bytes)
    problems += _host_problems(
        destination, places, memory.save_bytes + sum(one.rank_bytes or 0 for one in described), to_spare
    )
    problems += [problem for place in places for problem in find_problems(place, sizes.reserve)]
    return Estimate(
        step_bytes=step_bytes,
        disk_bytes=disk_bytes,
        rank_bytes=plan.tensor_bytes,
        rank_file_bytes=plan.file_bytes,
        held_bytes=sum(shard.nbytes for shard in (*walked.tensors, *coming)),
        world_size=coordinator.world_size,
        to_come=described,
        files=len(plan.files),
        requests=plan.window_count + 2 * len(plan.files) + REQUESTS,
        memory_bytes=memory.save_bytes,
        pool_bytes=memory.pool_bytes,
        load_bytes=memory.load_bytes,
        other_layout_bytes=memory.other_parts_bytes,
        pause_s=await _pause_s(plan.tensor_bytes, engine.last_saves),
        durable_s=engine.last_saves.durable_s or _durable_s(destination, places),
        places=tuple(places),
        assumptions=(*supposed, *_supposed_of(engine, described)),
        problems=tuple(problems),
    )


def _host_problems(
    destination: Destination, places: Sequence[PlaceEstimate], needed_bytes: int, to_spare: int
) -> list[str]:
    """Return the problem that saves and memory tiers exceed this machine's spare memory, if they do."""
    traits = [place.backend.traits for place in destination.places]
    tiers_bytes = sum(
        place.kept.bytes for place, one in zip(places, traits, strict=True) if not one.durable and one.scope != "shared"
    )
    if needed_bytes + tiers_bytes <= to_spare:
        return []
    return [
        f"this process will need {size(needed_bytes)} beside its state, and memory tiers {size(tiers_bytes)}; this machine "
        f"has {size(to_spare)} to spare: give a smaller IO(pool_bytes=…), or keep fewer steps in memory"
    ]


def _supposed_of(engine: Engine, described: Sequence[StateToCome]) -> list[str]:
    known = [one.name for one in described if one.rank_bytes]
    unknown = [one.name for one in described if one.rank_bytes is None]
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


def _durable_s(destination: Destination, places: Sequence[PlaceEstimate]) -> float | None:
    """Return the seconds of a save by the probe of the nearest durable place; None without a probe."""
    pairs = zip(places, destination.places, strict=True)
    return next((one.arrives_s for one, place in pairs if place.backend.traits.durable), None)


async def _pause_s(rank_bytes: int, last_saves: LastSaves) -> float:
    if last_saves.pause_s is not None:
        return last_saves.pause_s
    tried = min(max(rank_bytes, 1), COPIED_BYTES)
    return rank_bytes / await run_blocking(Limiter("probe", 1), time_copy, tried)


def time_copy(byte_count: int) -> float:
    """Return the bytes per second of a copy into memory that was touched before."""
    source, target = torch.ones(byte_count, dtype=torch.uint8), torch.empty(byte_count, dtype=torch.uint8)
    target.copy_(source)
    begun_ns = time.perf_counter_ns()
    target.copy_(source)
    return byte_count / max(time.perf_counter_ns() - begun_ns, 1) * 1e9


# The peak memory that a process needs beside its state, in a save and in a load.


BESIDE_BYTES = 4 << 20
"""Beside pool, copies and reads: tables of tensors, checksums, threads. Measured: 0.6 to 3 MiB for 300 tensors."""
WRITER_BYTES = 28 << 20
"""Of a writer process alone: its interpreter, and tables of tensors. Measured: 28 MiB for 10 tensors, 37 for 3,000."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of one process beside its state, with that of its writer process.

    Attributes:
        save_bytes: at the peak of a save.
        pool_bytes: of these, what is kept from save to save.
        load_bytes: at the peak of a load, at most, of what was saved in the wanted parts.
        other_parts_bytes: the same of what was saved in other parts.
    """

    save_bytes: int
    pool_bytes: int
    load_bytes: int
    other_parts_bytes: int


def find_memory(
    nearest: Place,
    plan: SavePlan,
    to_spare: int,
    *,
    copied_bytes: int,
    staged_bytes: int,
    step_bytes: int,
    largest_bytes: int,
) -> tuple[Peaks, list[str]]:
    """Return the memory that a save by *plan* and a load from the *nearest* place take, and the problems with that.

    Args:
        to_spare: bytes of memory that this machine has; its staging pools get a quarter of that at most.
        copied_bytes: that a lazy save copies beside the pool (`copied_at_call_bytes`).
        staged_bytes: that cannot be read into place (`staged_bytes`).
        step_bytes: of all ranks; *largest_bytes*: of one tensor of these.
    """
    engine, traits = nearest.engine, nearest.backend.traits
    io, pool = engine.options.io, engine.pool.statistics()
    wanted, most = plan.window_count * io.slab_bytes, pool.ceiling_bytes
    if io.pool_bytes is None:
        # As the pool will decide it: slabs that it has already are not in *to_spare* any more, and count, too.
        most = max((to_spare + pool.allocated_bytes) // 4 // io.slab_bytes * io.slab_bytes, most)
    pool_bytes = min(wanted, most)
    writer_bytes = WRITER_BYTES if engine.options.worker == "process" else 0
    each_bytes = io.read_bytes if traits.read_buffer_bytes is None else traits.read_buffer_bytes
    read_bytes = min(traits.block_reads * each_bytes, step_bytes)
    gap_bytes = min(traits.block_reads * io.read_bytes, step_bytes)
    scratch_bytes = min(max(scratch_limit_bytes(nearest), largest_bytes), step_bytes)
    verifying_bytes = gap_bytes if io.verify == "full" else 0  # before anything is staged
    found = Peaks(
        save_bytes=pool_bytes + copied_bytes + BESIDE_BYTES + writer_bytes,
        pool_bytes=pool_bytes,
        load_bytes=read_bytes + max(staged_bytes, verifying_bytes) + BESIDE_BYTES,
        other_parts_bytes=read_bytes + staged_bytes + gap_bytes + scratch_bytes + BESIDE_BYTES,
    )
    if pool_bytes < wanted and io.pool_bytes is None:
        return found, [
            f"the staging pool gets {size(pool_bytes)}, a quarter of the memory to spare, for {size(plan.file_bytes)}: a "
            "save holds training until the rest is written. Free memory, give IO(pool_bytes=…), or save with "
            "snapshot='lazy'"
        ]
    return found, []


def copied_at_call_bytes(state: Mapping[str, Any], walked: Sequence[TensorShard]) -> int:
    """Return the host memory of what a lazy save copies in the call: buffers, bare tensors, what no optimizer owns."""
    owned = {
        local_part(parameter).data_ptr()
        for _, optimizer in find_objects(state, Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return sum(shard.nbytes for shard in walked if _on_host(shard) and _is_mutable(shard, owned))


def _on_host(shard: TensorShard) -> bool:
    return isinstance(shard.data, torch.Tensor) and shard.data.is_cpu


def _is_mutable(shard: TensorShard, owned: Set[int]) -> bool:
    return shard.may_differ or (isinstance(shard.data, torch.nn.Parameter) and shard.data.data_ptr() not in owned)


def staged_bytes(walked: Sequence[TensorShard]) -> int:
    """Return the bytes that a load stages in host memory until all is verified: of device tensors and strided tensors."""
    return sum(
        shard.nbytes
        for shard in walked
        if isinstance(shard.data, torch.Tensor) and not is_fillable(shard.data.detach())
    )
