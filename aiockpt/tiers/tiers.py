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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import msgspec

from aiockpt.engine import maintenance
from aiockpt.engine.context import Engine
from aiockpt.engine.job import SaveJob
from aiockpt.engine.save import records_bytes, save
from aiockpt.errors import CheckpointError, SaveSkippedError
from aiockpt.events import PromotionFailed
from aiockpt.format.names import step_id
from aiockpt.futures import SaveResult
from aiockpt.options import Retention, Tier
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.manifests import read_manifest
from aiockpt.ranks.save import abort_attempt, save_with_ranks
from aiockpt.ranks.storage_fallback import StorageFallback, hear_or_find
from aiockpt.runtime.limits import Pace
from aiockpt.runtime.notes import StoreLostError
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
        on_seen: called with the number of a tier once all ranks are known to see it.
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
        self.on_seen: Callable[[int], object] = lambda number: None
        self._alone: dict[int, anyio.Lock] = {}
        self._uncapped = Pace(None, nearest.world.clock)
        self._promoting = self._promoters[1:] if working else []
        for promoter in self._promoting:
            nearest.loop.submit(promoter.work)

    def note_seen(self, numbers: Iterable[int]) -> None:
        """Note that all ranks see these tiers."""
        for number in numbers:
            self._promoters[number].visibility.note_seen()

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
        async with AsyncExitStack() as until_saved:
            promoter = await self._choose(job, until_saved)
            tell = save if job.save_round is None else save_with_ranks
            backend = promoter.engine.backend
            result = await tell(promoter.engine, job)
            result = msgspec.structs.replace(result, url=backend.url, durable=backend.traits.durable)
            return await self._promote(promoter, job, result) if len(self._promoters) > 1 else result

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

    async def _choose(self, job: SaveJob, until_saved: AsyncExitStack) -> Promoter:
        """Return the tier to write to, which all ranks see; when that fails on one rank all hear of it."""
        save_round, coordinator = job.save_round, self.engines[0].coordinator
        try:
            await until_saved.enter_async_context(self._alone_at(job.step))
            promoter = await self._entry(job) if len(self._promoters) > 1 else self._promoters[0]
            if save_round is not None and coordinator is not None and not promoter.visibility.seen:
                await promoter.visibility.check(coordinator, save_round, _fallback(promoter, job))
                self.on_seen(promoter.number)
        except BaseException as error:
            if save_round is not None and coordinator is not None:
                why = job.why(error)
                coordinator.invalidate()
                if not await coordinator.tell_failure(save_round, why) and job.nonce is not None:
                    await self.abort_attempt(job, why)
                await coordinator.leave(save_round)
            raise
        return promoter

    async def _entry(self, job: SaveJob) -> Promoter:
        """Return the first tier that takes the step, and has room for it if it is a memory tier; rank 0 says which."""
        engine = self.engines[0]
        if job.save_round is None or engine.coordinator is None:
            return await self._with_room(job)
        key, board = job.save_round.key("entry"), engine.coordinator.board
        if board.rank == 0:
            promoter = await self._with_room(job)
            with engine.surviving_store():
                await board.post(key, promoter.number)
            return promoter

        async def hear(seconds: float) -> Promoter:
            return self._promoters[await board.wait(key, int, seconds, "the choice")]

        async def find(lost: bool) -> Promoter | None:
            for promoter in self._candidates(job):
                fallback = _fallback(promoter, job)
                if fallback is not None and await fallback.begun() is not None:
                    return promoter
            return None

        async with engine.coordinator.watching_failures(job.save_round):
            waiting = engine.coordinator.waiting(job.save_round)
            return await hear_or_find(engine, "rank 0's choice of a tier", hear, find, waiting=waiting)

    async def abort_attempt(self, job: SaveJob, error: BaseException) -> None:
        """Have nobody commit a save that this rank has failed before it knew, or could say, in which tier.

        The other ranks hear of it, where they can, once that is certain.
        """
        assert job.nonce is not None
        engines = [promoter.engine for promoter in self._candidates(job)]
        await abort_attempt(engines, job, job.nonce, error, untold=self.engines[0].coordinator)

    async def tell_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Tell the other ranks, where this is rank 0, that the copies of a save to these tiers ended with its writer."""
        engine = self.engines[0]
        if engine.coordinator is not None and engine.ranks.rank == 0:
            with suppress(StoreLostError):
                for number in numbers:
                    await self._promoters[number].tell_lost(step_id(step), nonce, error)

    def _candidates(self, job: SaveJob) -> list[Promoter]:
        """Return the tiers that a save may be written to, the nearest first."""
        return [promoter for promoter in self._promoters if promoter.tier.full and promoter.tier.takes(job.step)]

    async def _with_room(self, job: SaveJob) -> Promoter:
        taking = self._candidates(job)
        needed = (job.plan.file_bytes + records_bytes(job)) * self.engines[0].ranks.world_size
        for promoter in taking[:-1]:
            if promoter.durable:
                return promoter
            try:
                free = (await promoter.engine.backend.space()).free_bytes
            except CheckpointError as error:
                self._pass_over(promoter, job.step, error)
                continue
            if free is None or free >= needed:
                return promoter
            full = SaveSkippedError(f"{promoter.url} has {free:,} bytes free and step {job.step} needs {needed:,}")
            self._pass_over(promoter, job.step, full)
        return taking[-1]

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
                if engine.ranks.rank == 0 and result is not promotion.result:
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


def _fallback(promoter: Promoter, job: SaveJob) -> StorageFallback | None:
    return None if job.nonce is None else StorageFallback(promoter.engine, job.step, job.nonce)


def _retention(tier: Tier, backend: Backend, farther: Sequence[Backend]) -> Retention | None:
    """Return what stays in a tier: where nothing is said, all; but memory before a durable tier holds the newest step."""
    if tier.keep is None and not backend.traits.durable and any(other.traits.durable for other in farther):
        return Retention(last=1)
    return tier.retention


def _engine_of(rules: Retention | None, nearest: Engine, backend: Backend) -> Engine:
    options = msgspec.structs.replace(nearest.options, retention=rules)
    return Engine(backend, nearest.loop, options, (), nearest.world, nearest.ranks, nearer=nearest)
