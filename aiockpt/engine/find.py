"""Choice of a step and of its nearest copy: the newest valid one over all tiers, or the one that was asked for.

Guarantees:

- A failed listing never counts as "no checkpoint": a tier that cannot be listed raises, unless another tier has steps.
  Then a stalled tier is not waited for, either. A listing that is older than ``LATEST`` is not believed
  (`aiockpt.pipeline.latest`).
- A commit that a dead job could not finish is finished first.
- A damaged step is skipped and logged. A transient failure of a step that may be the newest is raised: an outage is not
  damage, and a sound step of another branch is neither.
- When a step is chosen to be loaded, a newer one that was begun and not committed is logged. Without any step, a log line
  names the place that may have been meant.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from aiockpt.engine.context import Place
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    NewerFormatError,
    NoValidCheckpointError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.events import RolledForward, StepSkipped
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import step_id
from aiockpt.options import Best
from aiockpt.pipeline.collect import best_step
from aiockpt.pipeline.commit import roll_forward
from aiockpt.pipeline.discover import (
    StepAt,
    StepEntry,
    is_news,
    list_step,
    newest_first,
    newness,
)
from aiockpt.pipeline.latest import find_steps
from aiockpt.pipeline.lineage import log_other_line
from aiockpt.pipeline.step_info import StepInfo, read_info
from aiockpt.pipeline.unfinished import log_newer
from aiockpt.pipeline.wrong_places import find_hints, refuse_step
from aiockpt.planning.weights import has_weights_only

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine

logger = logging.getLogger("aiockpt")
Skipped = list[tuple[str, str]]
"""(step id, reason) of each step that was skipped."""


ListEntries = Callable[[Place], Awaitable[list[StepEntry]]]
"""Finds steps in one place."""


class StepPlaces(Protocol):
    """The places in which the steps of one checkpointer lie, the nearest first; *engine* is what they share."""

    engine: Engine
    places: Sequence[Place]

    async def list_steps(self, list_entries: ListEntries) -> Sequence[StepAt]:
        """Return what *list_entries* finds in each place; of one step the nearest copy comes first.

        Raises:
            StorageError: the steps cannot be listed.
        """
        ...


class Found(msgspec.Struct, frozen=True):
    """A step whose manifest in one place is valid."""

    place: Place
    manifest: Manifest


async def candidates(
    places: StepPlaces, step: int | Best | None, skipped: Skipped, *, to_load: bool = True
) -> AsyncIterator[Found]:
    """Yield the copies of *step*, or for None those of all committed steps, the newest first; note what is skipped.

    The best step by a metric is chosen as `find_best` does; without any step it is nothing, as the newest one.

    Of one step the nearest copy comes first; of a requested *step*, copies of its weights alone come last.

    Args:
        to_load: log a newer step that is not committed.

    Raises:
        StepNotFoundError, ManifestError: of *step*.
        NoValidCheckpointError: after the last copy, if the caller asks for another.
        UsageError: there are no steps, and a place is the folder of a step.
    """
    if isinstance(step, Best):
        step = await find_best(places, step, skipped)
    found = _newest(places, skipped, to_load=to_load) if step is None else _copies_of(places, step, skipped)
    async with aclosing(found):
        async for at in found:
            yield at


async def _newest(places: StepPlaces, skipped: Skipped, *, to_load: bool) -> AsyncGenerator[Found]:
    """Yield the copies of all committed steps, as `candidates` does."""
    unfinished: list[StepAt] = []
    listed = await committed_steps(places, unfinished)
    if to_load:
        if unfinished:
            top = next((one.entry.step for one in listed if one.entry.head is not None), None)
            await log_newer(unfinished, top, places.engine.busy_attempts, places.engine.world.clock)
        elif not listed:
            await _log_hints(places)
        heads = [one.entry.head for one in listed if one.entry.head is not None]
        if len({head.run for head in heads}) > 1:
            log_other_line(places.places[0].backend.url, heads)

    def pass_over(one: StepAt, error: CorruptionError) -> None:
        _note_skipped_copy(places, one, error, skipped)

    try:
        async for one, manifest in newest_first(listed, pass_over, partial(_doubt, places)):
            yield Found(places.places[one.number], manifest)
    except (NewerFormatError, StorageError) as error:
        error.add_note("It may be the newest step, so no older one is taken in its place. Try again, or name a step.")
        raise
    if listed:
        raise NoValidCheckpointError(places.places[0].backend.url, skipped)


async def _copies_of(places: StepPlaces, step: int, skipped: Skipped) -> AsyncGenerator[Found]:
    """Yield the copies of one step, as `candidates` does."""
    bad: list[CorruptionError] = []

    def pass_over(one: StepAt, error: CorruptionError) -> None:
        bad.append(error)
        _note_skipped_copy(places, one, error, skipped)

    weights: list[Found] = []
    async for one, manifest in newest_first(await find_step(places, step), pass_over, partial(_doubt, places)):
        found = Found(places.places[one.number], manifest)
        if has_weights_only(manifest):
            weights.append(found)
        else:
            yield found
    for found in weights:
        yield found
    if bad:
        raise bad[0]


def _note_skipped_copy(places: StepPlaces, one: StepAt, error: CorruptionError, skipped: Skipped) -> None:
    """Report a copy that is bad; one that is refused for good is news once."""
    is_known = one.entry.is_refused and not is_news(one.backend, f"{one.entry.id}: {error}")
    note_skipped(places.engine, one.entry.id, one.entry.step, error, skipped, is_known=is_known)


def _doubt(places: StepPlaces, one: StepAt) -> None:
    """Have retention count a step no more that turned out bad."""
    assert one.entry.head is not None
    places.places[one.number].heads.doubted.add(one.entry.head.attempt)


async def _log_hints(places: StepPlaces) -> None:
    """Log the place that may have been meant: loading nothing is no error, unless the place is a step's folder."""
    for place in places.places:
        await refuse_step(place.backend)
        for hint in (await find_hints(place.backend)).hints(place.backend.url):
            logger.warning("nothing is loaded, and %s", hint)


def note_skipped(
    engine: Engine, step_id: str, step: int, error: CheckpointError, skipped: Skipped, *, is_known: bool = False
) -> None:
    """Report to log and observers why a step is skipped; at level DEBUG where that *is_known* and lasting."""
    skipped.append((step_id, str(error)))
    logger.log(logging.DEBUG if is_known else logging.WARNING, "%s is skipped: %s", step_id, error)
    engine.emit(StepSkipped(at_ns=engine.now_ns(), step=step, reason=str(error)))


async def committed_steps(
    places: StepPlaces, unfinished: list[StepAt] | None = None, listed: set[int] | None = None
) -> list[StepAt]:
    """Return the committed steps of all places, newest first, after finishing the commits that dead jobs could not.

    Args:
        unfinished: gets the steps that were begun and not committed.
        listed: gets the numbers of the places that have answered.
    """

    async def list_entries(place: Place) -> list[StepEntry]:
        entries = await _scan_finishing(place)
        if listed is not None:
            listed.add(place.number)
        if unfinished is not None:
            begun = [entry for entry in entries if entry.attempts and not entry.committed]
            unfinished.extend(StepAt(place.backend, entry, place.number) for entry in begun)
        return [entry for entry in entries if entry.committed]

    return sorted(await places.list_steps(list_entries), key=newness)  # stable: the nearest stays first


async def _scan_finishing(place: Place) -> list[StepEntry]:
    entries = await find_steps(place.backend, place.heads)
    place.engine.lineage.see(entries)
    loose = [entry for entry in entries if entry.has_other_attempts]
    finished = [manifest for entry in loose for manifest in await finish_commits(place, entry)]
    return await find_steps(place.backend, place.heads) if finished else entries


async def finish_commits(place: Place, entry: StepEntry) -> list[Manifest]:
    """Roll forward the attempts of a step that have all their votes and no manifest."""
    engine = place.engine
    idle = tuple(attempt for attempt in entry.attempts if attempt not in engine.busy_attempts)
    if not idle or (entry.head is not None and idle == (entry.head.attempt,)):
        return []
    try:
        finished = await roll_forward(place.backend, msgspec.structs.replace(entry, attempts=idle), engine.world)
    except (CorruptionError, StorageError) as error:
        # A place that can only be read, say: what is committed can be loaded.
        if is_news(place.backend, f"votes of {entry.id}"):
            logger.warning("%s has votes that cannot be turned into a commit here: %s", entry.id, error)
        return []
    for manifest in finished:
        engine.emit(RolledForward(at_ns=engine.now_ns(), step=entry.step, attempt=manifest.attempt))
    return finished


async def find_step(places: StepPlaces, step: int) -> list[StepAt]:
    """Return the copies of the committed step of that number, the newest save first, and of that the nearest.

    Raises:
        StepNotFoundError: there is no such step; the message lists those that are there.
    """

    async def list_entries(place: Place) -> list[StepEntry]:
        entry = await list_step(place.backend, step_id(step), place.heads)
        if await finish_commits(place, entry):
            entry = await list_step(place.backend, step_id(step), place.heads)
        return [entry] if entry.committed else []

    listed = sorted(await places.list_steps(list_entries), key=newness)
    if not listed:
        have = sorted({one.entry.step for one in await committed_steps(places)}, reverse=True)
        shown = ", ".join(map(str, have[:10])) or "none"
        raise StepNotFoundError(f"{places.places[0].backend.url} has no step {step}; it has: {shown}")
    return listed


async def find_best(places: StepPlaces, rule: Best, skipped: Skipped) -> int | None:
    """Return the best step of the current lineage, as retention keeps it; None when there is no step at all.

    Raises:
        StepNotFoundError: no step has the metric; the message lists the metrics that they have.
        NoValidCheckpointError: steps exist and none is valid.
        StorageError: the manifest of a step, which may be the best, cannot be read now.
    """

    def pass_over(one: StepAt, error: CorruptionError) -> None:
        note_skipped(places.engine, one.entry.id, one.entry.step, error, skipped)

    doubted = frozenset().union(*(place.heads.doubted for place in places.places))
    best = await best_step(await committed_steps(places), rule, pass_over, doubted)
    if best is None and skipped:
        raise NoValidCheckpointError(places.places[0].backend.url, skipped)
    return best


async def find_good(places: StepPlaces, before: int) -> tuple[StepInfo | None, list[int]]:
    """Return the newest full step of this line of saves *before* that number whose numbers are finite, as far as is known;
    and the steps of this line from that number on.

    Raises:
        StorageError: the steps cannot be listed.
    """
    later: list[int] = []
    for at in await committed_steps(places):
        head = at.entry.head
        if head is None or not places.engine.lineage.is_own(head):
            continue
        if head.step >= before:
            later.append(head.step)
            continue
        info = await read_info(at.backend, at.entry)
        if info.problem is None and info.finite is not False and not info.weights_only:
            return info, later
    return None, later


async def find_manifest(places: StepPlaces, step: int | None) -> Found:
    """Return the nearest valid copy of a step; for None of the newest valid one that some tier has in full, if there is one.

    Raises:
        StepNotFoundError, NoValidCheckpointError, ManifestError: there is none.
    """
    weights: Found | None = None
    try:
        async for found in candidates(places, step, [], to_load=False):
            if not has_weights_only(found.manifest):
                return found
            weights = weights or found
    except CorruptionError:
        if weights is None:
            raise
    if weights is None:
        raise StepNotFoundError(f"{places.places[0].backend.url} holds no checkpoint yet")
    return weights
