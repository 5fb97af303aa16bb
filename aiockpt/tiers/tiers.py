"""How does one save go to several places? To the nearest, to the first durable one, and in the background to the others.

Guarantees (docs/decisions.md#tiers):

- *committed* means the first durable tier that takes the step in full. A memory tier is an earlier stage of its own, and
  one of weights alone no stage of a save at all: nothing is resumed from it.
- A memory tier that is full is passed over, and a durable one that fails is followed by the next: the save fails only when
  no durable tier takes it.
- Copies come from the nearest tier that has the step in full, never from the state.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import msgspec

from aiockpt.engine import maintenance
from aiockpt.engine.context import Engine
from aiockpt.engine.job import SaveJob
from aiockpt.engine.save import records_bytes
from aiockpt.errors import CheckpointError, SaveSkippedError
from aiockpt.events import PromotionFailed
from aiockpt.format.names import step_id
from aiockpt.futures import SaveResult
from aiockpt.options import Retention, Tier
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.manifests import read_manifest
from aiockpt.runtime.limits import Pace
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.tiers.promotion import Promoter, Promotion

logger = logging.getLogger("aiockpt")


class Tiers:
    """The places of one checkpointer, the nearest first; with a single one, just that.

    Args:
        nearest: the engine of the first; those of the others share its pool, ranks and lineage.
        backends: of all tiers.
        working: whether steps are saved and copied here, and not by another process.

    Attributes:
        engines: of all tiers, each with the retention of its tier.
    """

    def __init__(
        self, tiers: Sequence[Tier], nearest: Engine, backends: Sequence[Backend], *, working: bool = True
    ) -> None:
        rules = [_retention(tier, backends[n], backends[n + 1 :]) for n, tier in enumerate(tiers)]
        self.engines = (nearest, *[_engine_of(rules[n], nearest, backends[n]) for n in range(1, len(tiers))])
        nearest.options = msgspec.structs.replace(nearest.options, retention=rules[0])
        self._promoters = [
            Promoter(number, tier, engine, self.engines)
            for number, (tier, engine) in enumerate(zip(tiers, self.engines, strict=True))
        ]
        self._alone: dict[int, anyio.Lock] = {}
        self._uncapped = Pace(None, nearest.world.clock)
        self._promoting = self._promoters[1:] if working else []
        for promoter in self._promoting:
            nearest.loop.submit(promoter.work)

    def takes(self, step: int) -> bool:
        """Say whether any tier takes *step*."""
        return any(promoter.tier.takes(step) for promoter in self._promoters)

    def prepare(self, promise: SavePromise) -> None:
        """Give *promise* a stage for each tier; that of a tier which does not take the step fails at once."""
        if len(self._promoters) == 1:
            return
        for promoter in self._promoters:
            stage: Promise[SaveResult] = Promise(f"save of step {promise.step}, committed in {promoter.url}")
            if not promoter.tier.takes(promise.step):
                stage.fail(
                    SaveSkippedError(f"{promoter.url} takes the steps that are multiples of {promoter.tier.every}")
                )
            promise.tiers |= dict.fromkeys(promoter.names, stage)

    def stages(self, promise: SavePromise) -> list[Promise[SaveResult]]:
        """Return those that `prepare` gave to *promise*, the nearest tier's first."""
        return [promise.tiers[promoter.url] for promoter in self._promoters] if promise.tiers else []

    def announce(self, job: SaveJob) -> None:
        """Hear that *job* is planned, and copied next; on the thread that copies. Here nothing has to be known before."""

    async def save(self, engine: Engine, job: SaveJob) -> SaveResult:
        """Save one state; when this returns it is committed in the first durable tier that takes it.

        Saves of the same step are made one after the other: each is a generation of its own.

        Raises:
            CheckpointError: as `aiockpt.engine.save.save`; no durable tier has it then.
        """
        coordinator, candidates = self.engines[0].coordinator, self.candidates(job)
        async with coordinator.taking_part(job, candidates), self._alone_at(job.step):
            place = candidates[0]
            if len(self.engines) > 1:
                place = await coordinator.choose_place(job, candidates, partial(self._choose, job, candidates))
            result = await coordinator.save(place, job)
            result = msgspec.structs.replace(result, url=place.backend.url, durable=place.backend.traits.durable)
            first = self._promoters[place.number]
            return await self._promote(first, job, result) if len(self._promoters) > 1 else result

    @asynccontextmanager
    async def _alone_at(self, step: int) -> AsyncIterator[None]:
        """Let one save of *step* at a time in, in the order in which they come."""
        alone = self._alone.setdefault(step, anyio.Lock())
        try:
            async with alone:
                yield
        finally:
            if not alone.locked():
                self._alone.pop(step, None)

    async def tell_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Tell the other ranks, where this is rank 0, that the copies of a save to these tiers ended with its writer."""
        coordinator = self.engines[0].coordinator
        if coordinator.world_size > 1 and coordinator.rank == 0:
            for number in numbers:
                await self._promoters[number].tell_lost(step_id(step), nonce, error)

    def candidates(self, job: SaveJob) -> Sequence[Engine]:
        """Return the tiers that a save may be written to, the nearest first."""
        return [promoter.engine for promoter in self._promoters if promoter.tier.full and promoter.tier.takes(job.step)]

    async def _choose(self, job: SaveJob, candidates: Sequence[Engine]) -> Engine:
        """Return the first of the *candidates* that has room for the step if it is a memory tier."""
        needed = (job.plan.file_bytes + records_bytes(job)) * self.engines[0].coordinator.world_size
        for place in candidates[:-1]:
            promoter = self._promoters[place.number]
            if promoter.durable:
                return place
            try:
                free = (await place.backend.space()).free_bytes
            except CheckpointError as error:
                self._pass_over(promoter, job.step, error)
                continue
            if free is None or free >= needed:
                return place
            full = SaveSkippedError(f"{promoter.url} has {free:,} bytes free and step {job.step} needs {needed:,}")
            self._pass_over(promoter, job.step, full)
        return candidates[-1]

    def _pass_over(self, promoter: Promoter, step: int, error: CheckpointError) -> None:
        logger.warning("%s is passed over for step %d: %s", promoter.url, step, error)
        engine = promoter.engine
        engine.emit(PromotionFailed(at_ns=engine.now_ns(), step=step, url=promoter.url, error=repr(error), final=True))

    async def _promote(self, first: Promoter, job: SaveJob, result: SaveResult) -> SaveResult:
        """Go on from the first tier: at once to a durable one, in the background to the others."""
        promise, engine = job.promise, first.engine
        manifest = await read_manifest(engine.backend, result.id, result.generation)
        promotion = Promotion(result, {first.number: StepCopy(engine.backend, manifest)}, engine.now_ns())
        stages = {promoter.number: promise.tiers[promoter.url] for promoter in self._promoters}
        stages[first.number].resolve(result)
        for promoter in self._promoters[: first.number]:
            stages[promoter.number].fail(SaveSkippedError(f"{promoter.url} was passed over"))
        above = [promoter for promoter in self._promoters[first.number + 1 :] if promoter.tier.takes(job.step)]
        try:
            if not first.durable:
                promise.reach(promise.in_memory)
                if any(promoter.commits for promoter in above):
                    result = await self._commit_durably(promotion, above, stages)
                if engine.coordinator.rank == 0 and result is not promotion.result:
                    await maintenance.clean_up(engine, promotion.result)
        finally:
            for promoter in above:
                if not stages[promoter.number].is_settled:
                    await promoter.enqueue(promotion, stages[promoter.number])
            for promoter in self._promoters[first.number + 1 :]:
                promoter.look_back()
        return result

    async def _commit_durably(
        self, promotion: Promotion, above: Sequence[Promoter], stages: dict[int, Promise[SaveResult]]
    ) -> SaveResult:
        """Copy *promotion* to the first durable tier that takes it now."""
        failure: CheckpointError | None = None
        for promoter in above:
            if not promoter.commits:
                continue
            try:
                result = await promoter.take(promotion, self._uncapped, promoter.tier.deadline)
            except CheckpointError as error:
                logger.warning("%s did not take step %d: %s", promoter.url, promotion.step, error)
                failure = failure or error
                continue
            stages[promoter.number].resolve(result)
            return result
        assert failure is not None
        raise failure

    async def clean_up(self, result: SaveResult) -> None:
        """Clean up in the tier where a save was committed."""
        await maintenance.clean_up(next(engine for engine in self.engines if engine.backend.url == result.url), result)

    def give_up(self, promise: SavePromise) -> None:
        """End a save that nobody waits for any more."""
        promise.cancel()

    async def close(self, patience_s: float) -> None:
        """Wait until every tier has, or has given up, what waits for it, and close all. Failures are not tried again."""
        try:
            with anyio.move_on_after(patience_s):
                async with open_tasks() as tasks:
                    for promoter in self._promoting:
                        tasks.start_soon(promoter.close)
        finally:
            for engine in self.engines:
                await engine.backend.close()


def _retention(tier: Tier, backend: Backend, farther: Sequence[Backend]) -> Retention | None:
    """Return what stays in a tier: where nothing is said, all; but memory before a durable tier holds the newest step."""
    if tier.keep is None and not backend.traits.durable and any(other.traits.durable for other in farther):
        return Retention(last=1)
    return tier.retention


def _engine_of(rules: Retention | None, nearest: Engine, backend: Backend) -> Engine:
    options = msgspec.structs.replace(nearest.options, retention=rules)
    return Engine(backend, nearest.loop, options, (), nearest.world, nearest.coordinator, nearer=nearest)
