"""Comparison of the needs of a run at each of its places with what the place has, from a listing and an optional probe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.context import Place
from aiockpt.errors import CheckpointError, StorageFullError
from aiockpt.format.names import parse_step
from aiockpt.options import Retention, Tier
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.units import count, size, speed

MANY = 100
"""Steps for which a place that keeps every step should have room."""
SAFE = 1.1
"""A place has room for a run if its free space is at least so many times what the run will take."""


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one step in storage, of all ranks: all of it, and its weights alone.

    Attributes:
        of_rank: the part that this rank sends.
        reserve: free bytes that a save requires beside the step, before it begins.
    """

    full: int
    weights: int
    of_rank: int
    reserve: int


class KeptSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that a place holds.

    Attributes:
        steps: at once, at most, beside the multiples that are kept for ever; None if all steps are kept.
        bytes: of these; of one step if all steps are kept.
        grows_bytes: added for ever by every *grows_every* steps of training; 0 if the place does not grow.
        grows_every: None for every save.
    """

    steps: int | None
    bytes: int
    grows_bytes: int
    grows_every: int | None


class PlaceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs at one of its places.

    Attributes:
        every: it accepts the multiples of this step number; None for every step.
        step_bytes: of one step there; sent to it once for each step that it accepts, by all ranks together.
        read_bytes: read there for copies to farther places, on the average of all saves.
        kept: what lies there at once, and what is added for ever.
        found_steps: the steps that lie there now.
        free_bytes: None if the place does not report it.
        bytes_per_s: of the probe, which this rank wrote alone; None without a probe.
        arrives_s: for a step to get there at the speed of the probe, and at most at the tier's own ``bandwidth`` if a save
            does not wait for it; None without a probe.
    """

    url: str
    every: int | None
    step_bytes: int
    read_bytes: int
    kept: KeptSteps
    found_steps: int
    free_bytes: int | None
    bytes_per_s: float | None
    arrives_s: float | None

    def __str__(self) -> str:
        parts = [f"{size(self.step_bytes)} {'each save' if self.every in (None, 1) else f'every {self.every} steps'}"]
        if self.kept.steps is None:
            parts.append("keeps every step")
        else:
            parts.append(f"{count(self.kept.steps, 'step')} at once, {size(self.kept.bytes)}")
            if self.kept.grows_bytes:
                parts.append(f"{size(self.kept.grows_bytes)} more for each {self.kept.grows_every} steps, for ever")
        parts += [f"{count(self.found_steps, 'step')} there now"] if self.found_steps else []
        parts += [f"{size(self.read_bytes)} read for farther places, a save"] if self.read_bytes else []
        parts += [] if self.free_bytes is None else [f"{size(self.free_bytes)} are free"]
        parts += [] if self.bytes_per_s is None else [speed(self.bytes_per_s)]
        return f"{self.url}: {'; '.join(parts)}"


async def estimate_places(
    places: Sequence[Place], tiers: Sequence[Tier], sizes: StepSizes, probe_bytes: int
) -> list[PlaceEstimate]:
    """Return what a run needs at each place.

    Args:
        tiers: their options.
        probe_bytes: written to each durable place, flushed, timed and removed; 0 for none.

    Raises:
        StorageError: a place cannot be written to. Without a probe nothing is raised.
    """
    first = next(number for number, tier in enumerate(tiers) if tier.full)
    found = []
    for number, (place, tier) in enumerate(zip(places, tiers, strict=True)):
        fast = await _probe(place, probe_bytes) if probe_bytes and place.backend.traits.durable else None
        farther = [other for after, other in enumerate(tiers) if after > first] if number == first else []
        found.append(
            PlaceEstimate(
                url=place.backend.url,
                every=tier.every,
                step_bytes=_bytes_of(tier, sizes),
                read_bytes=sum(_bytes_of(other, sizes) // (other.every or 1) for other in farther),
                kept=kept(place.retention, place.engine.options.max_in_flight, _bytes_of(tier, sizes), sizes.weights),
                found_steps=await _count_steps(place),
                free_bytes=await _free_bytes(place),
                bytes_per_s=fast,
                arrives_s=None if fast is None else _arrives_s(tier, sizes, fast, limited=number > first),
            )
        )
    return found


def kept(rules: Retention | None, in_flight: int, step_bytes: int, weight_bytes: int) -> KeptSteps:
    """Return the steps that *rules* keep, each of *step_bytes*, of which *weight_bytes* are weights.

    Beside the steps that the rules name, a place keeps the newest verified step while no named step is verified, and the
    *in_flight* steps that are being written. Thinned steps keep their weights. How many steps ``newer_than`` keeps is not
    known in advance: all, at most.
    """
    rules = rules or Retention()
    older_bytes = step_bytes if rules.optimizer is None else weight_bytes
    if rules.last is None or rules.newer_than is not None:
        return KeptSteps(steps=None, bytes=step_bytes, grows_bytes=older_bytes, grows_every=None)
    beside = 1 + in_flight
    named = rules.last + (rules.best.count if rules.best else 0)
    full = named if rules.optimizer is None else min(rules.optimizer, named)
    return KeptSteps(
        steps=named + beside,
        bytes=(full + beside) * step_bytes + (named - full) * weight_bytes,
        grows_bytes=older_bytes if rules.every else 0,
        grows_every=rules.every,
    )


def _bytes_of(tier: Tier, sizes: StepSizes) -> int:
    return sizes.full if tier.full else sizes.weights


def _arrives_s(tier: Tier, sizes: StepSizes, bytes_per_s: float, *, limited: bool) -> float:
    if limited and tier.bandwidth is not None:
        bytes_per_s = min(bytes_per_s, tier.bandwidth)
    return sizes.of_rank * _bytes_of(tier, sizes) / max(sizes.full, 1) / bytes_per_s


async def _free_bytes(place: Place) -> int | None:
    with suppress(CheckpointError):  # the place does not report it
        return (await place.backend.space()).free_bytes
    return None


async def _count_steps(place: Place) -> int:
    with suppress(CheckpointError):  # without a listing the other figures still hold
        return sum(parse_step(folder) is not None for folder in (await place.backend.list("")).folders)
    return 0


async def _probe(place: Place, byte_count: int) -> float:
    """Write a file, flush it, remove it; return its bytes per second."""
    free_bytes = await _free_bytes(place)
    if free_bytes is not None and byte_count > free_bytes:
        raise StorageFullError(f"estimate(probe_bytes={byte_count:,}): {place.backend.url} has {free_bytes:,} free")
    backend, key = place.backend, f".aiockpt-probe-{place.engine.token(8)}"
    unit = min(place.engine.options.io.slab_bytes, byte_count)
    data = memoryview(bytearray(unit))
    begun_ns = time.perf_counter_ns()
    upload = await backend.create(key, byte_count)
    try:
        for offset in range(0, byte_count, unit):
            await upload.write(offset, [data[: min(unit, byte_count - offset)]])
        await upload.finish()
        return byte_count / (time.perf_counter_ns() - begun_ns) * 1e9
    finally:
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            await upload.abort()  # nothing where it was finished
            await backend.delete([key])


def find_problems(place: PlaceEstimate, reserve_bytes: int) -> list[str]:
    """Return what exceeds the room of a place, with what to do; *reserve_bytes* must be free for records."""
    if place.free_bytes is None:
        return []
    room = f"{place.url} has {size(place.free_bytes)} free"
    if place.kept.steps is None:
        # The newest one, and older ones, which may have their weights alone.
        fits = max(1 + (place.free_bytes - place.kept.bytes) // max(place.kept.grows_bytes, 1), 0)
        if fits >= MANY:
            return []
        return [f"{room}, keeps every step, and takes {fits} of them: give Retention(last=…)"]
    # Steps that are there may have their weights alone, and those to come have all.
    to_come_bytes = min(place.kept.bytes, max(place.kept.steps - place.found_steps, 0) * place.step_bytes)
    if place.free_bytes >= SAFE * to_come_bytes + reserve_bytes:
        return []
    there = f", {place.found_steps} of which are there" if place.found_steps else ""
    many = count(place.kept.steps, "step")
    return [f"{room}, and {many} take {size(place.kept.bytes)}{there}: keep fewer, max_in_flight=1, or another place"]
