"""The needs of a run at one of its places, compared with what the place has: a listing, and a probe if one is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.context import Place
from aiockpt.errors import CheckpointError
from aiockpt.format.names import parse_step
from aiockpt.options import Retention, Tier
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.units import count, size, speed

MANY = 100
"""Of steps a place that keeps all of them should have room for."""
SAFE = 1.1
"""A place has room for a run where it has so many times what the run will take."""


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one step in storage, of all ranks: all of it, and its weights alone.

    Attributes:
        of_rank: that this rank sends of it.
        reserve: that a save asks for beside it, before it begins.
    """

    full: int
    weights: int
    of_rank: int
    reserve: int


class KeptSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a place.

    Attributes:
        steps: at once, at most, beside the multiples that are kept for ever; None where all are kept.
        bytes: of these; of one step where all are kept.
        grows_bytes: that every *grows_every* steps of training add for ever; 0: nothing does.
        grows_every: None: every save.
    """

    steps: int | None
    bytes: int
    grows_bytes: int
    grows_every: int | None


class PlaceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes of one of its places.

    Attributes:
        every: it accepts the multiples of this step number; None: each.
        step_bytes: of one step there; sent to it once for each step that it accepts, by all ranks together.
        read_bytes: that are read there, on the average of all saves, to be copied to farther places.
        kept: what lies there at once, and what is added for ever.
        found_steps: that lie there now.
        free_bytes: None where the place does not say.
        bytes_per_s: that this rank alone wrote in the probe; None without one.
        arrives_s: that a step takes to get there at the speed of the probe, and of no more than the tier's own
            ``bandwidth`` where a save does not wait for it; None without a probe.
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
    """Return what a run takes of each place.

    Args:
        tiers: their options.
        probe_bytes: written to each durable place, flushed, timed and removed; 0 for none.

    Raises:
        StorageError: a place cannot be written to: better known now. Without a probe nothing is raised.
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
    """Return what *rules* leave of steps of *step_bytes*, *weight_bytes* of them weights.

    Beside those that the rules name there is the newest one that was verified, for as long as none that is named was, and
    those that are being written: *in_flight*. Steps that are thinned keep their weights. How many ``newer_than`` keeps is
    not known before they are saved: all, at most.
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
    with suppress(CheckpointError):  # it does not say
        return (await place.backend.space()).free_bytes
    return None


async def _count_steps(place: Place) -> int:
    with suppress(CheckpointError):  # a place that cannot be listed now has room, or not, all the same
        return sum(parse_step(folder) is not None for folder in (await place.backend.list("")).folders)
    return 0


async def _probe(place: Place, byte_count: int) -> float:
    """Write a file, flush it, remove it; return its bytes per second."""
    backend, key = place.backend, f"probe-{place.engine.token(8)}"
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
    """Return what is too much for a place, with what to do; *reserve_bytes* must be free for records."""
    if place.free_bytes is None:
        return []
    room = f"{place.url} has {size(place.free_bytes)} free"
    if place.kept.steps is None:
        if place.free_bytes >= MANY * place.step_bytes:
            return []
        fits = place.free_bytes // max(place.step_bytes, 1)
        return [f"{room}, keeps every step, and takes {fits} of them: give Retention(last=…)"]
    to_come_bytes = place.kept.bytes - min(place.found_steps, place.kept.steps) * place.step_bytes
    if place.free_bytes >= SAFE * to_come_bytes + reserve_bytes:
        return []
    there = f", {place.found_steps} of which are there" if place.found_steps else ""
    many = count(place.kept.steps, "step")
    return [f"{room}, and {many} take {size(place.kept.bytes)}{there}: keep fewer, max_in_flight=1, or another place"]
