"""Tiers: one save goes to the nearest place, to the first durable one, and in the background to the others.

Guarantees (docs/decisions.md#tiers):

- *committed* means the first durable tier that accepts the step in full. A memory tier is an earlier stage of its own, and
  one of weights alone no stage of a save at all: nothing is resumed from it.
- A memory tier that is full is skipped, and a durable one that fails is followed by the next: the save fails only when
  no durable tier accepts it.
- Copies come from the nearest tier that has the step in full, never from the state.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine, Place, retention_of
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.find import ListEntries
from aiockpt.engine.job import SaveJob
from aiockpt.engine.save import OneAtATime, records_bytes
from aiockpt.errors import CheckpointError, RankError, SaveSkippedError, StorageError
from aiockpt.events import PromotionFailed
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import step_id
from aiockpt.futures import SaveResult
from aiockpt.options import Tier
from aiockpt.pipeline.discover import StepAt, StepCopy, find_same_files
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.places.tiers.joint_copy import Promotion
from aiockpt.places.tiers.promotion import Promoter
from aiockpt.runtime.limits import Pace, open_tasks
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry_calls import QueryTimeout
from aiockpt.storage.transfer import space_for

# Queries of several tiers, all at once, so that a stalled one delays the answer by little: once one has returned a result,
# the others have limited time, and one that refuses every call has less (`aiockpt.storage.retry_calls`). A tier without an
# answer by then counts as failed; both are logged.


logger = logging.getLogger("aiockpt")

A = TypeVar("A", bound=Sized)


async def query_tiers(
    tiers: Sequence[Place], ask: Callable[[Place], Awaitable[A]], patience_s: float, errors: type[CheckpointError]
) -> tuple[list[tuple[Place, A]], CheckpointError | None]:
    """Return what each tier answers, the nearest first, and the first failure among them.

    Args:
        patience_s: seconds for the others once one has returned a result.
        errors: what counts as no answer; anything else is raised.
    """
    answers: dict[int, A] = {}
    failures: dict[int, CheckpointError] = {}

    waits = [QueryTimeout() for _ in tiers]

    async def ask_one(number: int) -> None:
        try:
            with waits[number].waiting():
                answers[number] = await ask(tiers[number])
        except errors as error:
            logger.warning("%s: could not be listed: %s", tiers[number].backend.url, error)
            failures[number] = error
        if answers.get(number):
            for wait in waits:
                wait.limit(patience_s)

    async with open_tasks() as tasks:
        for number in range(len(tiers)):
            tasks.start_soon(ask_one, number)
    for number, tier in enumerate(tiers):
        if number not in answers and number not in failures:
            logger.warning(
                "%s: could not be listed in time, another tier has answered: %s",
                tier.backend.url,
                waits[number].reason(),
            )
    first = failures[min(failures)] if failures else None
    return [(tiers[number], answers[number]) for number in sorted(answers)], first


LIST_PATIENCE_S = 10.0
"""How long the other tiers have to list their steps once one has listed some."""
COPY_PATIENCE_S = 3.0
"""The same for a copy of one step, which is found by two requests."""


class Tiers(Destination):
    """Several places, the nearest first; see `aiockpt.engine.alone.Destination`.

    Args:
        tiers: their options, two at least.
        backends: of all tiers.
        coordinator: of this process and those that save with it.
        working: whether steps are saved and copied here, and not by another process. A save here needs no `announce`.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        engine: Engine,
        backends: Sequence[Backend],
        coordinator: Coordinator,
        *,
        working: bool = True,
    ) -> None:
        self.engine = engine
        rules = [retention_of(tier, backends[n], backends[n + 1 :]) for n, tier in enumerate(tiers)]
        self.places = [Place(engine, backend, n, rules[n]) for n, backend in enumerate(backends)]
        for place in self.places:
            place.other_copies = partial(self._other_copies, place)
        self._promoters = [
            Promoter(tier, place, self, coordinator) for tier, place in zip(tiers, self.places, strict=True)
        ]
        self._one_at_a_time = OneAtATime()
        self._expedited: tuple[int, Sequence[Promoter]] = (-1, ())
        self._uncapped = Pace(None, engine.world.clock)
        self._promoting = self._promoters[1:] if working else []
        for promoter in self._promoting:
            engine.loop.submit(promoter.work)

    # ------------------------------------------------------------------ saves

    def takes(self, step: int) -> bool:
        return any(self._takes(promoter, step) for promoter in self._promoters)

    def _takes(self, promoter: Promoter, step: int) -> bool:
        return promoter.tier.takes(step) or promoter in self._soonest(step)

    def _soonest(self, step: int) -> Sequence[Promoter]:
        """Return the durable tiers for a step that must not wait, the fastest first; none for all others."""
        return self._expedited[1] if step == self._expedited[0] else ()

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        """Send *step* to the durable tier that finishes it soonest; one that was never measured keeps its position."""
        durable = [promoter for promoter in self._promoters if promoter.commits]
        known = sorted((p for p in durable if p.url in seconds), key=lambda promoter: seconds[promoter.url])
        measured = iter(known)
        self._expedited = step, [next(measured) if promoter.url in seconds else promoter for promoter in durable]

    def prepare(self, promise: SavePromise) -> None:
        """Give *promise* a stage for each tier; that of a tier which does not accept the step fails at once."""
        for promoter in self._promoters:
            stage: Promise[SaveResult] = Promise(f"save of step {promise.step}, committed in {promoter.url}")
            if not self._takes(promoter, promise.step):
                stage.fail(
                    SaveSkippedError(f"{promoter.url} takes the steps that are multiples of {promoter.tier.every}")
                )
            else:
                promoter.place.follow(promise)
            promise.tiers |= dict.fromkeys(promoter.names, stage)

    def stages(self, promise: SavePromise) -> list[Promise[SaveResult]]:
        return [promise.tiers[promoter.url] for promoter in self._promoters]

    async def save(self, job: SaveJob) -> SaveResult:
        """Save one state; when this returns it is committed in the first durable tier that accepts it.

        Raises:
            CheckpointError: as `aiockpt.engine.save.save_alone`; no durable tier has it then.
        """
        places = self.places_for(job.step)
        async with job.round.taking_part(job, places), self._one_at_a_time.saving(job.step):
            place = await job.round.choose_place(job, places, partial(self._choose, job, places))
            with ExitStack() as pins:
                # Of saves that overtake this one, retention must not delete here what is still to be copied from here.
                pins.enter_context(place.pinning(step_id(job.step)))
                async with maintenance.making_room(place):
                    result = await job.round.save(place, job)
                durable = place.backend.traits.survives_power_cuts
                result = msgspec.structs.replace(result, url=place.backend.url, durable=durable)
                return await self._promote(self._promoters[place.number], job, result, pins)

    async def notify_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Notify the other ranks, where this is rank 0, that the copies of a save to these tiers ended with its writer."""
        if self.engine.world_size > 1 and self.engine.rank == 0:
            for number in numbers:
                await self._promoters[number].joint_copy.notify_lost(step_id(step), nonce, error)

    def places_for(self, step: int) -> Sequence[Place]:
        """Return the tiers that a save may be written to, the nearest first; of one that must not wait the fastest."""
        soonest = [promoter.place for promoter in self._soonest(step)]
        return soonest or [
            promoter.place for promoter in self._promoters if promoter.tier.full and promoter.tier.takes(step)
        ]

    async def _choose(self, job: SaveJob, places: Sequence[Place]) -> Place:
        """Return the first of *places* that has room for the step, if it is a memory tier or the step must not wait."""
        needed = (job.plan.file_bytes + records_bytes(job.plan)) * self.engine.world_size
        # The last one is not asked: there is no other to go to, and the save itself reports what is wrong there.
        for place in places[:-1]:
            promoter = self._promoters[place.number]
            if promoter.durable and not self._soonest(job.step):
                return place
            try:
                free = (await space_for(place.backend, needed)).free_bytes
            except CheckpointError as error:
                self._skip(promoter, job.step, error)
                continue
            if free is None or free >= needed:
                return place
            full = SaveSkippedError(f"{promoter.url} has {free:,} bytes free and step {job.step} needs {needed:,}")
            self._skip(promoter, job.step, full)
        return places[-1]

    def _skip(self, promoter: Promoter, step: int, error: CheckpointError) -> None:
        logger.warning("%s: skipped for step %d: %s", promoter.url, step, error)
        engine = self.engine
        engine.emit(PromotionFailed(at_ns=engine.now_ns(), step=step, url=promoter.url, error=repr(error), final=True))

    async def _promote(self, first: Promoter, job: SaveJob, result: SaveResult, pins: ExitStack) -> SaveResult:
        """Continue from the first tier: copy at once to a durable one, in the background to the others.

        Args:
            pins: keeps the step in the first tier until it is committed, and each tier that will copy it knows of it.
        """
        promise, engine, backend = job.promise, self.engine, first.place.backend
        try:
            manifest = await read_manifest(backend, result.id, result.generation)
        except CheckpointError as error:
            if not first.durable:
                raise
            # It is committed: what fails is its way to the farther tiers, which may find it when they catch up.
            return self._settle_first(first, promise, result, pins, error)
        promotion = Promotion(result, {first.number: StepCopy(backend, manifest)}, engine.now_ns())
        stages = {promoter.number: promise.tiers[promoter.url] for promoter in self._promoters}
        stages[first.number].resolve(result)
        for promoter in self._promoters[: first.number]:
            stages[promoter.number].fail(SaveSkippedError(f"{promoter.url} was passed over"))
        above = [promoter for promoter in self._promoters[first.number + 1 :] if self._takes(promoter, job.step)]
        leaves_memory = not first.durable and any(promoter.commits for promoter in above)
        try:
            if not first.durable:
                promise.reach(promise.in_memory)
            if leaves_memory:
                result = await self._commit_durably(promotion, above, stages)
        finally:
            for promoter in above:
                if not stages[promoter.number].is_settled:
                    await promoter.enqueue(promotion, stages[promoter.number])
            for promoter in self._promoters[first.number + 1 :]:
                promoter.catch_up()
            pins.close()
            # Also where it failed: steps that no disk accepts must not pile up in memory.
            if leaves_memory and engine.rank == 0:
                await maintenance.clean_up(first.place, promotion.result)
        return result

    def _settle_first(
        self, first: Promoter, promise: SavePromise, result: SaveResult, pins: ExitStack, error: CheckpointError
    ) -> SaveResult:
        """Resolve the save for its first tier alone, where it cannot be read back."""
        why = f"{first.url}: step {result.step} cannot be read back, and is not copied to other tiers now: {error}"
        logger.warning(why)
        for promoter in self._promoters:
            if promoter is first:
                promise.tiers[promoter.url].resolve(result)
            else:
                promise.tiers[promoter.url].fail(SaveSkippedError(why))
                promoter.catch_up()
        pins.close()
        return result

    async def _commit_durably(
        self, promotion: Promotion, above: Sequence[Promoter], stages: dict[int, Promise[SaveResult]]
    ) -> SaveResult:
        """Copy *promotion* to the first durable tier that accepts it now."""
        failure: CheckpointError | None = None
        for promoter in above:
            if not promoter.commits:
                continue
            try:
                result = await promoter.copy(promotion, self._uncapped, promoter.tier.deadline)
            except CheckpointError as error:
                logger.warning("%s: copying step %d failed: %s", promoter.url, promotion.step, error)
                failure = failure or error
                continue
            stages[promoter.number].resolve(result)
            return result
        assert failure is not None
        raise failure

    async def clean_up(self, result: SaveResult) -> None:
        await maintenance.clean_up(next(place for place in self.places if place.backend.url == result.url), result)

    async def close(self, patience_s: float) -> None:
        """Wait until every tier has copied, or abandoned, its waiting steps, and close all. Failures are not retried."""
        try:
            with anyio.move_on_after(patience_s):
                async with open_tasks() as tasks:
                    for promoter in self._promoting:
                        tasks.start_soon(promoter.close)
        finally:
            for place in self.places:
                await place.backend.close()

    # ------------------------------------------------------------------ loads

    async def list_steps(self, list_entries: ListEntries) -> Sequence[StepAt]:
        """Return what *list_entries* finds; a tier that cannot be listed counts as empty, unless no other one has steps.

        A step that one tier cannot describe now is read from another tier that can.
        """
        for place in self.places:  # before one that answers at once makes another one late
            with suppress(RankError):
                await place.ready()
        answers, failure = await query_tiers(self.places, list_entries, LIST_PATIENCE_S, StorageError)
        listed = [StepAt(place.backend, entry, place.number) for place, entries in answers for entry in entries]
        if failure is not None and not listed:
            raise failure
        readable = {one.entry.id for one in listed if one.entry.head is not None}
        known = [one for one in listed if one.entry.trouble is None or one.entry.id not in readable]
        for one in listed:
            if one not in known:
                logger.warning("%s: read from another tier: %s", one.entry.id, one.entry.trouble)
        return known

    async def _other_copies(self, place: Place, manifest: Manifest) -> list[StepCopy]:
        """Return the copies of the same save in the other tiers, the nearest first; an unreachable tier counts as empty."""

        async def list_entries(other: Place) -> list[StepCopy]:
            found = await find_same_files(other.backend, manifest)
            return [] if found is None else [found]

        others = [other for other in self.places if other is not place]
        answers, _ = await query_tiers(others, list_entries, COPY_PATIENCE_S, CheckpointError)
        return [copy for _, copies in answers for copy in copies]
