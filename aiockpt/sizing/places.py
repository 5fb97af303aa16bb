"""What a run needs at each of its places, and whether the place has it, from a listing and its free space."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from aiockpt.engine.context import Place
from aiockpt.errors import CheckpointError
from aiockpt.format.names import parse_step
from aiockpt.options import Retention, Tier
from aiockpt.units import count, size

MANY = 100
"""Steps for which a place that keeps every step should have room."""
SAFE = 1.1
"""A place has room for a run if its free space is at least so many times what the run will take."""


class PlaceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs at one of its places.

    Attributes:
        every: it accepts the multiples of this step number; None for every step.
        step_bytes: of one step there; sent to it once for each step that it accepts, by all ranks together. For the memory
            of hosts: what this host holds of it, copies of other hosts' parts among it.
        read_bytes: read there for copies to farther places, on the average of all saves.
        kept_steps: that lie there at once, at most, beside the multiples that are kept for ever; None if all are kept.
        kept_bytes: of these; of one step if all are kept.
        grows_bytes: added for ever by every *grows_every* steps of training (None: by every save); 0: it does not grow.
        found_steps: the steps that lie there now.
        free_bytes: None if the place does not report it.
    """

    url: str
    every: int | None
    step_bytes: int
    read_bytes: int
    kept_steps: int | None
    kept_bytes: int
    grows_bytes: int
    grows_every: int | None
    found_steps: int
    free_bytes: int | None

    def __str__(self) -> str:
        parts = [f"{size(self.step_bytes)} {'each save' if self.every in (None, 1) else f'every {self.every} steps'}"]
        if self.kept_steps is None:
            parts.append("keeps every step")
        else:
            parts.append(f"{count(self.kept_steps, 'step')} at once, {size(self.kept_bytes)}")
            if self.grows_bytes:
                parts.append(f"{size(self.grows_bytes)} more for each {self.grows_every} steps, for ever")
        parts += [f"{count(self.found_steps, 'step')} there now"] if self.found_steps else []
        parts += [f"{size(self.read_bytes)} read for farther places, a save"] if self.read_bytes else []
        parts += [] if self.free_bytes is None else [f"{size(self.free_bytes)} are free"]
        return f"{self.url}: {'; '.join(parts)}"

    def find_problem(self, reserve_bytes: int) -> str | None:
        """Return what exceeds the room of the place, with what to do; *reserve_bytes* must be free for records."""
        if self.free_bytes is None:
            return None
        room = f"{self.url} has {size(self.free_bytes)} free"
        if self.kept_steps is None:
            # The newest one, and older ones, which may have their weights alone.
            fits = max(1 + (self.free_bytes - self.kept_bytes) // max(self.grows_bytes, 1), 0)
            return (
                f"{room}, keeps every step, and takes {fits} of them: give Retention(last=…)" if fits < MANY else None
            )
        # Steps that are there may have their weights alone, and those to come have all.
        to_come_bytes = min(self.kept_bytes, max(self.kept_steps - self.found_steps, 0) * self.step_bytes)
        if self.free_bytes >= SAFE * to_come_bytes + reserve_bytes:
            return None
        there = f", {self.found_steps} of which are there" if self.found_steps else ""
        many = f"{count(self.kept_steps, 'step')} take {size(self.kept_bytes)}{there}"
        return f"{room}, and {many}: keep fewer, max_in_flight=1, or another place"


async def estimate_places(
    places: Sequence[Place], tiers: Sequence[Tier], step_bytes: int, weight_bytes: int
) -> tuple[PlaceEstimate, ...]:
    """Return what a run needs at each place, whose options are *tiers*, for steps of which *weight_bytes* are weights."""
    first = next(number for number, tier in enumerate(tiers) if tier.full)
    each_bytes = [step_bytes if tier.full else weight_bytes for tier in tiers]
    passed_on_bytes = [size // (tier.every or 1) for size, tier in zip(each_bytes, tiers, strict=True)]
    found = []
    for number, (place, tier) in enumerate(zip(places, tiers, strict=True)):
        await place.ready()
        here = place.fraction_here()
        kept_steps, kept_bytes, grows_bytes, grows_every = _find_kept(
            place, round(here * each_bytes[number]), round(here * weight_bytes)
        )
        found.append(
            PlaceEstimate(
                url=place.backend.url,
                every=tier.every,
                step_bytes=round(here * each_bytes[number]),
                read_bytes=sum(passed_on_bytes[first + 1 :]) if number == first else 0,
                kept_steps=kept_steps,
                kept_bytes=kept_bytes,
                grows_bytes=grows_bytes,
                grows_every=grows_every,
                found_steps=await _count_steps(place),
                free_bytes=await _free_bytes(place),
            )
        )
    return tuple(found)


def _find_kept(place: Place, step_bytes: int, weight_bytes: int) -> tuple[int | None, int, int, int | None]:
    """Return what the retention of a place keeps, as the fields of `PlaceEstimate` from `kept_steps` on.

    Beside the steps that its rules name, a place keeps the newest verified step while no named step is verified, and the
    steps that are being written. Thinned steps keep their weights. How many steps ``newer_than`` keeps is not known in
    advance: all, at most.
    """
    rules = place.retention or Retention()
    older_bytes = step_bytes if rules.optimizer is None else weight_bytes
    if rules.last is None or rules.newer_than is not None:
        return None, step_bytes, older_bytes, None
    # The newest replicated step is spared beside them (`aiockpt.places.peers.keeper`).
    beside = 1 + place.engine.options.max_in_flight + (place.backend.traits.scope == "hosts")
    named = rules.last + (rules.best.count if rules.best else 0)
    full = named if rules.optimizer is None else min(rules.optimizer, named)
    kept_bytes = (full + beside) * step_bytes + (named - full) * weight_bytes
    return named + beside, kept_bytes, older_bytes if rules.every else 0, rules.every


async def _free_bytes(place: Place) -> int | None:
    with suppress(CheckpointError):  # the place does not report it
        return (await place.backend.space()).free_bytes
    return None


async def _count_steps(place: Place) -> int:
    with suppress(CheckpointError):  # without a listing the other figures still hold
        return sum(parse_step(folder) is not None for folder in (await place.backend.list("")).folders)
    return 0
