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

from aiockpt.engine import keep
from aiockpt.engine.context import Engine
from aiockpt.engine.rung import Climb, Rung
from aiockpt.engine.save import records_bytes, save
from aiockpt.engine.ticket import Ticket
from aiockpt.engine.together import save_together, withdraw
from aiockpt.engine.traces import Traces, hear_or_find
from aiockpt.errors import CheckpointError, SaveSkippedError
from aiockpt.events import PromotionFailed
from aiockpt.format.names import step_id
from aiockpt.futures import SaveResult
from aiockpt.options import Retention, Tier
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.manifests import read_manifest
from aiockpt.runtime.limits import Pace
from aiockpt.runtime.meeting import StoreLostError
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend

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
        self._rungs = [
            Rung(number, tier, engine, self.engines)
            for number, (tier, engine) in enumerate(zip(tiers, self.engines, strict=True))
        ]
        self.on_seen: Callable[[int], object] = lambda number: None
        self._alone: dict[int, anyio.Lock] = {}
        self._uncapped = Pace(None, nearest.world.clock)
        self._climbing = self._rungs[1:] if working else []
        for rung in self._climbing:
            nearest.loop.submit(rung.work)

    def note_seen(self, numbers: Iterable[int]) -> None:
        """Note that all ranks see these tiers."""
        for number in numbers:
            self._rungs[number].visibility.note_seen()

    def takes(self, step: int) -> bool:
        """Say whether any tier takes *step*."""
        return any(rung.tier.takes(step) for rung in self._rungs)

    def prepare(self, promise: SavePromise) -> None:
        """Give *promise* a stage for each tier; that of a tier which does not take the step fails at once."""
        if len(self._rungs) == 1:
            return
        for rung in self._rungs:
            stage: Promise[SaveResult] = Promise(f"save of step {promise.step}, committed in {rung.url}")
            if not rung.tier.takes(promise.step):
                stage.fail(SaveSkippedError(f"{rung.url} takes the steps that are multiples of {rung.tier.every}"))
            promise.tiers |= dict.fromkeys(rung.names, stage)

    def stages(self, promise: SavePromise) -> list[Promise[SaveResult]]:
        """Return those that `prepare` gave to *promise*, the nearest tier's first."""
        return [promise.tiers[rung.url] for rung in self._rungs] if promise.tiers else []

    def announce(self, ticket: Ticket) -> None:
        """Hear that *ticket* is planned, and copied next; on the thread that copies. Here nothing has to be known before."""

    async def save(self, engine: Engine, ticket: Ticket) -> SaveResult:
        """Save one state; when this returns it is committed in the first durable tier that takes it.

        Saves of the same step are made one after the other: each is a generation of its own.

        Raises:
            CheckpointError: as `aiockpt.engine.save.save`; no durable tier has it then.
        """
        async with AsyncExitStack() as until_saved:
            rung = await self._choose(ticket, until_saved)
            tell = save if ticket.turn is None else save_together
            backend = rung.engine.backend
            result = await tell(rung.engine, ticket)
            result = msgspec.structs.replace(result, url=backend.url, durable=backend.traits.durable)
            return await self._climb(rung, ticket, result) if len(self._rungs) > 1 else result

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

    async def _choose(self, ticket: Ticket, until_saved: AsyncExitStack) -> Rung:
        """Return the tier to write to, which all ranks see; when that fails on one rank all hear of it."""
        turn, sharing = ticket.turn, self.engines[0].sharing
        try:
            await until_saved.enter_async_context(self._alone_at(ticket.step))
            rung = await self._entry(ticket) if len(self._rungs) > 1 else self._rungs[0]
            if turn is not None and sharing is not None and not rung.visibility.seen:
                await rung.visibility.check(sharing, turn, _traces(rung, ticket))
                self.on_seen(rung.number)
        except BaseException as error:
            if turn is not None and sharing is not None:
                why = ticket.why(error)
                sharing.doubt()
                if not await sharing.tell_failure(turn, why) and ticket.nonce is not None:
                    await self.withdraw(ticket, why)
                await sharing.leave(turn)
            raise
        return rung

    async def _entry(self, ticket: Ticket) -> Rung:
        """Return the first tier that takes the step, and has room for it if it is a memory tier; rank 0 says which."""
        engine = self.engines[0]
        if ticket.turn is None or engine.sharing is None:
            return await self._with_room(ticket)
        key, meeting = ticket.turn.key("entry"), engine.sharing.meeting
        if meeting.rank == 0:
            rung = await self._with_room(ticket)
            with engine.surviving_store():
                await meeting.post(key, rung.number)
            return rung

        async def hear(seconds: float) -> Rung:
            return self._rungs[await meeting.wait(key, int, seconds, "the choice")]

        async def find(lost: bool) -> Rung | None:
            for rung in self._candidates(ticket):
                traces = _traces(rung, ticket)
                if traces is not None and await traces.begun() is not None:
                    return rung
            return None

        async with engine.sharing.heeding(ticket.turn):
            waiting = engine.sharing.waiting(ticket.turn)
            return await hear_or_find(engine, "rank 0's choice of a tier", hear, find, waiting=waiting)

    async def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Have nobody commit a save that this rank has failed before it knew, or could say, in which tier.

        The other ranks hear of it, where they can, once that is certain.
        """
        assert ticket.nonce is not None
        engines = [rung.engine for rung in self._candidates(ticket)]
        await withdraw(engines, ticket, ticket.nonce, error, untold=self.engines[0].sharing)

    async def tell_lost(self, step: int, nonce: str, numbers: Iterable[int], error: Exception) -> None:
        """Tell the other ranks, where this is rank 0, that the copies of a save to these tiers ended with its writer."""
        engine = self.engines[0]
        if engine.sharing is not None and engine.ranks.rank == 0:
            with suppress(StoreLostError):
                for number in numbers:
                    await self._rungs[number].tell_lost(step_id(step), nonce, error)

    def _candidates(self, ticket: Ticket) -> list[Rung]:
        """Return the tiers that a save may be written to, the nearest first."""
        return [rung for rung in self._rungs if rung.tier.full and rung.tier.takes(ticket.step)]

    async def _with_room(self, ticket: Ticket) -> Rung:
        taking = self._candidates(ticket)
        needed = (ticket.plan.file_bytes + records_bytes(ticket)) * self.engines[0].ranks.world_size
        for rung in taking[:-1]:
            if rung.durable:
                return rung
            try:
                free = (await rung.engine.backend.space()).free_bytes
            except CheckpointError as error:
                self._pass_over(rung, ticket.step, error)
                continue
            if free is None or free >= needed:
                return rung
            full = SaveSkippedError(f"{rung.url} has {free:,} bytes free and step {ticket.step} needs {needed:,}")
            self._pass_over(rung, ticket.step, full)
        return taking[-1]

    def _pass_over(self, rung: Rung, step: int, error: CheckpointError) -> None:
        logger.warning("%s is passed over for step %d: %s", rung.url, step, error)
        engine = rung.engine
        engine.emit(PromotionFailed(at_ns=engine.now_ns(), step=step, url=rung.url, error=repr(error), final=True))

    async def _climb(self, first: Rung, ticket: Ticket, result: SaveResult) -> SaveResult:
        """Go on from the first tier: at once to a durable one, in the background to the others."""
        promise, engine = ticket.promise, first.engine
        manifest = await read_manifest(engine.backend, result.id, result.generation)
        climb = Climb(result, {first.number: StepCopy(engine.backend, manifest)}, engine.now_ns())
        stages = {rung.number: promise.tiers[rung.url] for rung in self._rungs}
        stages[first.number].resolve(result)
        for rung in self._rungs[: first.number]:
            stages[rung.number].fail(SaveSkippedError(f"{rung.url} was passed over"))
        above = [rung for rung in self._rungs[first.number + 1 :] if rung.tier.takes(ticket.step)]
        try:
            if not first.durable:
                promise.reach(promise.in_memory)
                if any(rung.commits for rung in above):
                    result = await self._commit_durably(climb, above, stages)
                if engine.ranks.rank == 0 and result is not climb.result:
                    await keep.tidy(engine, climb.result)
        finally:
            for rung in above:
                if not stages[rung.number].is_settled:
                    await rung.enqueue(climb, stages[rung.number])
            for rung in self._rungs[first.number + 1 :]:
                rung.look_back()
        return result

    async def _commit_durably(
        self, climb: Climb, above: Sequence[Rung], stages: dict[int, Promise[SaveResult]]
    ) -> SaveResult:
        """Copy *climb* to the first durable tier that takes it now."""
        failure: CheckpointError | None = None
        for rung in above:
            if not rung.commits:
                continue
            try:
                result = await rung.take(climb, self._uncapped, rung.tier.deadline)
            except CheckpointError as error:
                logger.warning("%s did not take step %d: %s", rung.url, climb.step, error)
                failure = failure or error
                continue
            stages[rung.number].resolve(result)
            return result
        assert failure is not None
        raise failure

    async def tidy(self, result: SaveResult) -> None:
        """Clean up in the tier where a save was committed."""
        await keep.tidy(next(engine for engine in self.engines if engine.backend.url == result.url), result)

    def give_up(self, promise: SavePromise) -> None:
        """End a save that nobody waits for any more."""
        promise.cancel()

    async def close(self, patience_s: float) -> None:
        """Wait until every tier has, or has given up, what waits for it, and close all. Failures are not tried again."""
        try:
            with anyio.move_on_after(patience_s):
                async with open_tasks() as tasks:
                    for rung in self._climbing:
                        tasks.start_soon(rung.close)
        finally:
            for engine in self.engines:
                await engine.backend.close()


def _traces(rung: Rung, ticket: Ticket) -> Traces | None:
    return None if ticket.nonce is None else Traces(rung.engine, ticket.step, ticket.nonce)


def _retention(tier: Tier, backend: Backend, farther: Sequence[Backend]) -> Retention | None:
    """Return what stays in a tier: where nothing is said, all; but memory before a durable tier holds the newest step."""
    if tier.keep is None and not backend.traits.durable and any(other.traits.durable for other in farther):
        return Retention(last=1)
    return tier.retention


def _engine_of(rules: Retention | None, nearest: Engine, backend: Backend) -> Engine:
    options = msgspec.structs.replace(nearest.options, retention=rules)
    return Engine(backend, nearest.loop, options, (), nearest.world, nearest.ranks, nearer=nearest)
