"""What will a save take? The state as it is now, what optimizers will add, and a short look at each place."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch

from aiockpt.engine.context import Engine
from aiockpt.engine.destination import Destination
from aiockpt.engine.place import Place
from aiockpt.errors import CheckpointError
from aiockpt.format.dtypes import itemsize
from aiockpt.options import MIB, Retention
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.sizing.to_come import StateToCome
from aiockpt.state.shards import ShardedState
from aiockpt.units import count, size, speed

PROBE_BYTES = 64 * MIB
MANY = 100
"""Of steps a place that keeps all of them should have room for."""
SAFE = 1.1
"""A place has room for a run where it has so many times what the run will take."""


class PlaceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes of one of its places.

    Attributes:
        steps: that lie there at once, at most, by the rules of retention; one is being written among them. None: all.
        bytes: of these; of one step where all are kept.
        grows: in words, what the rules keep for ever beside that; may be empty.
        free_bytes: None where the place does not say.
        bytes_per_s: that this rank alone wrote in the probe; None without one.
    """

    url: str
    steps: int | None
    bytes: int
    grows: str
    free_bytes: int | None
    bytes_per_s: float | None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a save of a state takes; ``print`` it.

    Attributes:
        step_bytes: of a step in storage, of all ranks: parts that several hold once, as far as this rank's state names
            them (other stages of a pipeline have more).
        rank_bytes: that this rank copies.
        to_come: what optimizers will add with their first step; counted in both.
        files: data files of this rank, about.
        memory_bytes: beside the state, of the staging pool of this process.
        load_bytes: beside the state, of a load.
        pause_s: that training is held by an eager save: one copy of *rank_bytes*, at the speed of a copy tried now.
        durable_s: until this rank's even share is in the nearest durable place, at the speed of its probe; every rank that
            shares the place's bandwidth makes it longer. None without a probe.
        places: the nearest first.
        problems: what does not fit, with what to do.
    """

    step_bytes: int
    rank_bytes: int
    world_size: int
    to_come: tuple[StateToCome, ...]
    files: int
    memory_bytes: int
    load_bytes: int
    pause_s: float
    durable_s: float | None
    places: tuple[PlaceEstimate, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        here = f", {size(self.rank_bytes)} of them on this rank" if self.world_size > 1 else ""
        lines = [
            f"a step            {size(self.step_bytes)}{here}",
            f"data files        {self.files} of this rank",
            f"training is held  {self.pause_s * 1e3:.0f} ms by an eager save",
            f"memory beside     {size(self.memory_bytes)} while saving, {size(self.load_bytes)} while loading",
        ]
        if self.durable_s is not None:
            lines.append(f"durable after     {self.durable_s:.2f} s")
        for one in self.to_come:
            added = "is not known: estimate again after the first step" if one.rank_bytes is None else size(one.bytes)
            lines.append(f"to come           {one.name} makes its state with its first step: {added}")
        return "\n".join([*lines, *map(_tell_place, self.places), *(f"problem: {one}" for one in self.problems)])


def _tell_place(place: PlaceEstimate) -> str:
    kept = "keeps every step"
    if place.steps is not None:
        kept = f"{count(place.steps, 'step')} at once, {size(place.bytes)}" + (place.grows and f", and {place.grows}")
    free = "" if place.free_bytes is None else f"; {size(place.free_bytes)} are free"
    fast = "" if place.bytes_per_s is None else f"; {speed(place.bytes_per_s)}"
    return f"{place.url}: {kept}{free}{fast}"


async def estimate(
    destination: Destination, walked: ShardedState, to_come: Sequence[StateToCome], probe_bytes: int
) -> Estimate:
    """Return what a save of a state that was walked takes. On the loop.

    Args:
        probe_bytes: written to each durable place, and removed; 0 for none.
    """
    engine = destination.engine
    world_size = engine.coordinator.world_size
    added = sum(one.rank_bytes or 0 for one in to_come)
    rank_bytes = sum(shard.nbytes for shard in walked.tensors) + added
    step_bytes = sum(math.prod(shard.shape) * itemsize(shard.dtype) for shard in walked.tensors)
    step_bytes += sum(one.bytes for one in to_come)
    copy_s = await run_blocking(Limiter("probe", 1), _time_copy, min(max(rank_bytes, 1), PROBE_BYTES))
    memory_bytes, problems = _memory(engine, rank_bytes)
    in_flight = engine.options.max_in_flight
    places = [await _of_place(place, step_bytes, in_flight, probe_bytes) for place in destination.places]
    problems += [problem for place in places for problem in _problems(place, step_bytes)]
    durable = [
        one.bytes_per_s
        for one, place in zip(places, destination.places, strict=True)
        if one.bytes_per_s and place.backend.traits.durable
    ]
    io = engine.options.io
    return Estimate(
        step_bytes=step_bytes,
        rank_bytes=rank_bytes,
        world_size=world_size,
        to_come=tuple(to_come),
        files=max(len(engine.plan(walked).files) + bool(added), math.ceil(rank_bytes / io.file_bytes)),
        memory_bytes=memory_bytes,
        load_bytes=io.read_bytes * destination.places[0].backend.traits.block_reads,
        pause_s=rank_bytes / copy_s,
        durable_s=step_bytes / world_size / durable[0] if durable else None,
        places=tuple(places),
        problems=tuple(problems),
    )


def _memory(engine: Engine, rank_bytes: int) -> tuple[int, list[str]]:
    """Return the bytes of the staging pool that a state gets, and what is wrong with that."""
    io = engine.options.io
    wanted = math.ceil(rank_bytes / io.slab_bytes) * io.slab_bytes
    if io.pool_bytes is not None:
        return min(wanted, io.pool_bytes), []
    allowed = max(available_bytes() // 4 // io.slab_bytes, 1) * io.slab_bytes
    if wanted <= allowed:
        return wanted, []
    return allowed, [
        f"the staging pool gets {size(allowed)}, a quarter of the memory to spare, for {size(rank_bytes)}: a save "
        "holds training until the rest is written. Free memory, give IO(pool_bytes=…), or save with snapshot='lazy'"
    ]


def _time_copy(byte_count: int) -> float:
    """Return the bytes per second of a copy into memory that was touched before."""
    source, target = torch.ones(byte_count, dtype=torch.uint8), torch.empty(byte_count, dtype=torch.uint8)
    target.copy_(source)
    begun_ns = time.perf_counter_ns()
    target.copy_(source)
    return byte_count / max(time.perf_counter_ns() - begun_ns, 1) * 1e9


async def _of_place(place: Place, step_bytes: int, in_flight: int, probe_bytes: int) -> PlaceEstimate:
    steps, grows = _kept(place.retention, in_flight)
    free = None
    with suppress(CheckpointError):  # it does not say
        free = (await place.backend.space()).free_bytes
    fast = await _probe(place, probe_bytes) if probe_bytes and place.backend.traits.durable else None
    return PlaceEstimate(
        url=place.backend.url,
        steps=steps,
        bytes=step_bytes * (steps or 1),
        grows=grows,
        free_bytes=free,
        bytes_per_s=fast,
    )


def _kept(rules: Retention | None, in_flight: int) -> tuple[int | None, str]:
    """Return how many steps lie in a place at once, and in words what is kept for ever beside them."""
    if rules is None or rules.last is None:
        return None, ""
    steps = (
        rules.last + (rules.best.count if rules.best else 0) + 1 + in_flight
    )  # the newest verified one; those written
    return steps, f"each multiple of {rules.every} for ever" if rules.every else ""


async def _probe(place: Place, byte_count: int) -> float:
    """Write a file, flush it, remove it; return its bytes per second.

    Raises:
        StorageError: the place cannot be written to: better known now.
    """
    backend, key = place.backend, f"probe-{place.engine.token(8)}"
    data = memoryview(bytearray(byte_count))
    begun_ns = time.perf_counter_ns()
    upload = await backend.create(key, byte_count)
    try:
        unit = place.engine.options.io.slab_bytes
        for offset in range(0, byte_count, unit):
            await upload.write(offset, [data[offset : offset + unit]])
        await upload.finish()
        return byte_count / (time.perf_counter_ns() - begun_ns) * 1e9
    except BaseException:
        await upload.abort()
        raise
    finally:
        await backend.delete([key])


def _problems(place: PlaceEstimate, step_bytes: int) -> list[str]:
    """Return what is too much for a place, with what to do."""
    if place.free_bytes is None:
        return []
    room = f"{place.url} has {size(place.free_bytes)} free"
    if place.steps is None and place.free_bytes < MANY * step_bytes:
        return [f"{room}, keeps every step, and takes {place.free_bytes // step_bytes} of them: give Retention(last=…)"]
    if place.steps is not None and place.free_bytes < SAFE * place.bytes:
        many = count(place.steps, "step")
        return [f"{room}, and {many} take {size(place.bytes)}: keep fewer, max_in_flight=1, or another place"]
    return []
