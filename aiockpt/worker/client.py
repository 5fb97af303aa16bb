"""The trainer's side of saving through a writer process: it announces saves, fills slabs, and receives the outcomes.

`WriterClient` replaces the places themselves, to which saves go when this process writes them
(`aiockpt.engine.alone`). Guarantees:

- A slab is either the pool's or the writer's. Those of a writer that died go back to the pool when the process is gone.
- Every save that a writer had ends: with the outcome that the writer reports, or with its death.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.alone import Destination
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.job import SaveJob
from aiockpt.engine.save import emit_start
from aiockpt.errors import CheckpointError, UsageError
from aiockpt.futures import SaveResult
from aiockpt.options import Options, Tier
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.promise import SavePromise
from aiockpt.runtime.relay import ask
from aiockpt.runtime.shared_memory import SharedMemory
from aiockpt.runtime.world import Ranks, World
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend
from aiockpt.worker.connection import Connection, PendingSave, ToWriter
from aiockpt.worker.messages import (
    Answer,
    Asked,
    Broken,
    Cancel,
    Close,
    Confirmed,
    Freed,
    GaveUp,
    Happened,
    Order,
    Reached,
    Replied,
    Save,
    Seen,
    Settled,
    Setup,
    Tidied,
    TierSetup,
    Written,
    decode_answer,
    encode,
    pack,
    to_json,
    unpack,
)
from aiockpt.worker.process import WriterProcess

logger = logging.getLogger("aiockpt")

END_S = 60.0
"""How long a writer may take to end once it has hung up."""


_INSTEAD = "; use worker='thread'"


def check_worker(tiers: Sequence[Tier], backends: Sequence[Backend], world: World | None) -> None:
    """Check that a separate process can write to these places.

    Raises:
        UsageError: it cannot; the message gives the reason.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError(f"worker='process' needs memory that two processes share (Linux: memfd_create){_INSTEAD}")
    if world is not None:
        raise UsageError(f"worker='process': a process cannot be given this world={world!r:.60}{_INSTEAD}")
    for tier, backend in zip(tiers, backends, strict=True):
        if not isinstance(tier.url, str | os.PathLike):
            raise UsageError(
                f"worker='process': {type(tier.url).__name__} is an object of this process; give the URL or path from which "
                f"another one can make it{_INSTEAD}"
            )
        if backend.traits.scope == "process":
            raise UsageError(
                f"worker='process': {backend.url} is memory of this process; shm:// is this host's{_INSTEAD}"
            )
        if backend.traits.scope == "hosts":
            raise UsageError(
                f"worker='process': {backend.url} is served by the trainer's process, and outlives that anyway{_INSTEAD}"
            )


class WriterClient:
    """The places of one checkpointer, to which a writer process saves; see `aiockpt.engine.alone.Destination`.

    Args:
        here: the same places, as this process reads them.
        coordinator: coordinates this process with the ranks that save with it.
        tiers: the options of each place.
        memory: contains the slabs.
        ranks: this process among those that save together.
    """

    def __init__(
        self, here: Destination, coordinator: Coordinator, tiers: Sequence[Tier], memory: SharedMemory, ranks: Ranks
    ) -> None:
        self._here, self._coordinator = here, coordinator
        # The places, and what lies there, are known in this process.
        self.places, self.takes, self.places_for = here.places, here.takes, here.places_for
        self.prepare, self.stages = here.prepare, here.stages
        self.list_steps, self.notify_lost = here.list_steps, here.notify_lost
        self._tiers = tiers
        self._memory = memory
        self.engine = here.engine
        self._ranks = ranks
        self._calls = Limiter("writer", 2)
        self._setup = compose_setup(
            tiers, self.engine.options, ranks, refuses_not_finite=self.engine.refuses_not_finite
        )
        self._expedited: tuple[int, dict[str, float]] = (-1, {})
        self._replacing = anyio.Lock()
        self._pending: dict[int, PendingSave] = {}
        self._begun: dict[int, PendingSave] = {}  # the same, until `save` asks for it: it may have ended by then
        self._connection = self._start()

    def expedite(self, step: int, seconds: Mapping[str, float]) -> None:
        self._expedited = step, dict(seconds)
        self._here.expedite(step, seconds)

    # ------------------------------------------------------------------ saves

    def announce(self, job: SaveJob) -> None:
        """Send the save to the writer, and direct its slabs there. On the thread that copies.

        Raises:
            WriterLostError: the writer is gone, and so is the one that was started in its place.
        """
        engine = self.engine
        job.nonce = job.round.name_attempt() or engine.token(6)
        engine.busy_attempts.add(job.nonce)  # what this process prunes leaves it alone
        save = self._order(job, job.nonce)
        try:
            self._begin(self._connection, save, job)
        except CheckpointError:
            # The writer is gone, or cannot work: a save costs one more try, with the writer that takes its place.
            self._begin(engine.loop.submit(self._replace, self._connection).result(), save, job)

    def _begin(self, connection: Connection, save: Save, job: SaveJob) -> None:
        pending = PendingSave(connection, save, job.promise, self.stages(job.promise), job.recheck)
        # Before it is sent: an answer, or the writer's death, must find it.
        self._pending[job.number] = self._begun[job.number] = pending
        job.target = ToWriter(job, connection, self.engine.pool)
        connection.begin(save, job.plan)

    def _order(self, job: SaveJob, nonce: str) -> Save:
        return Save(
            number=job.number,
            nonce=nonce,
            begun_ns=job.begun_ns,
            values=to_json(job.state.values),
            per_rank=to_json(job.state.per_rank),
            alias=dict(job.state.alias),
            left_out=dict(job.state.left_out),
            metrics=dict(job.request.metrics),
            user=to_json(job.request.user),
            config=to_json(job.request.config),
            position=self.engine.lineage.position(),
            save_round=job.round.name,
            board=self._coordinator.board_name,
            needs_check=job.guard.needs_check,
            compares=bool(job.state.replicas) and self.engine.options.replicas == "check",
            expedited=self._expedited[1] if job.step == self._expedited[0] else None,
        )

    async def save(self, job: SaveJob) -> SaveResult:
        """Wait until the writer has saved. A cancellation is forwarded to it, and may arrive too late.

        Raises:
            WriterLostError: the writer died.
            CheckpointError: as `Destination.save`.
        """
        engine = self.engine
        emit_start(engine, job)
        pending = self._begun.pop(job.number)
        async with job.round.accompanying(job, self.places_for(job.step), pending.death):
            try:
                await job.round.announce()
                await pending.answer.settled()
            except anyio.get_cancelled_exc_class() as cancelled:
                with anyio.CancelScope(shield=True):
                    await self._send(pending.connection, Cancel(job.number, pack(job.why(cancelled))))
                    await pending.answer.settled_within(engine.options.deadlines.commit_s)
                if not pending.is_committed:
                    raise
            finally:
                engine.busy_attempts.discard(job.nonce or "")
            return pending.answer.value

    async def clean_up(self, result: SaveResult) -> None:
        """Wait until the writer has cleaned up after the save of this very *result*."""
        async with self.places[0].cleaning:
            for pending in list(self._pending.values()):
                if pending.is_committed and pending.answer.value is result:
                    await pending.tidied.settled()

    def abandon(self, promise: SavePromise) -> bool:
        return not promise.snapshotted.is_settled and promise.cancel()

    async def close(self, patience_s: float) -> None:
        """Request the writer's end, wait for it, and close the places that this process reads from."""
        connection = self._connection
        for pending in list(self._pending.values()):
            pending.recheck()  # the writer does not ask any more
        await self._send(connection, Close())
        await connection.buried.settled_within(patience_s)
        if not connection.buried.is_settled:
            logger.warning("%r: still writing after %g s; it goes on without this process", connection, patience_s)
            connection.detached = True
            connection.process.hang_up()
            await connection.buried.settled_within(END_S)
        await self._here.close(patience_s)

    async def _send(self, connection: Connection, order: Order) -> None:
        """Send a message to a writer; it is lost without an error if the writer is gone."""
        with suppress(CheckpointError):
            await run_blocking(self._calls, connection.send, order)

    # ------------------------------------------------------------------ the writer's life

    def _start(self) -> Connection:
        options = self.engine.options
        process = WriterProcess(encode(self._setup), self._memory.fd, options.io.nice, options.deadlines.slab_s)
        connection = Connection(process)
        self.engine.loop.submit(self._receive, connection)
        return connection

    async def _replace(self, dead: Connection) -> Connection:
        """Return a writer in place of a *dead* one."""
        async with self._replacing:
            if self._connection is dead:
                dead.process.hang_up()
                await dead.buried.settled()
                self._connection = await run_blocking(self._calls, self._start)
        return self._connection

    async def _receive(self, connection: Connection) -> None:
        """Handle the messages of a writer, to its end."""
        answers = connection.process.answers
        try:
            while (frame := await answers.receive()) is not None:
                self._handle(connection, decode_answer(frame))
        except Exception:
            logger.exception("%r: a message could not be read; the writer is abandoned", connection)
        await self._bury(connection)

    async def _bury(self, connection: Connection) -> None:
        """Reap a writer; then return its slabs to the pool, and fail its saves."""
        process = connection.process
        process.hang_up()
        # A detached writer still reads its slabs, which no save fills any more: the checkpointer is being closed.
        if connection.detached:
            process.detach()
        else:
            await run_blocking(self._calls, process.end, END_S)
        connection.lose()
        for number in list(connection.lent):
            connection.reclaim(number, self.engine.pool)
        copies = []
        for number, pending in list(self._pending.items()):
            if pending.connection is connection:
                # Read before `fail`, which settles the stages.
                copies.append((pending, pending.unresolved))
                pending.fail(connection.death())
                del self._pending[number]
        process.close()
        connection.buried.resolve(None)
        for pending, tiers in copies:
            await self.notify_lost(pending.step, pending.nonce, tiers, connection.death())

    def _handle(self, connection: Connection, answer: Answer) -> None:
        match answer:
            case Freed():
                connection.reclaim(answer.slab, self.engine.pool)
            case Happened():
                self.engine.emit(answer.event)
            case Reached() | Settled() | Tidied():
                pending = self._pending.get(answer.number)
                if pending is None:  # of one that was given up
                    return
                pending.resolve(answer)
                if pending.ended:
                    del self._pending[answer.number]
            case Written():
                self.engine.loop.in_worker(self._confirm, connection, answer.number)
            case GaveUp():
                self._report_abandoned(answer)
            case Asked():
                self.engine.loop.in_worker(self._reply, connection, answer)  # the store may take its time
            case Seen():
                self._setup = msgspec.structs.replace(self._setup, seen=(*self._setup.seen, answer.tier))
            case Broken():
                connection.broken = unpack(answer.failure)

    def _reply(self, connection: Connection, asked: Asked) -> None:
        """Make a writer's call of the store. A writer has one under way at most, so one worker is enough."""
        reply = ask(self._ranks.store, asked.question)
        with suppress(CheckpointError):  # the writer is gone; the reply has no receiver
            connection.send(Replied(asked.number, reply))

    def _confirm(self, connection: Connection, number: int) -> None:
        """Let a writer vote, unless the state changed while it was copied: then its save is being cancelled."""
        pending = self._pending.get(number)
        if pending is not None and pending.recheck() is None:
            with suppress(CheckpointError):
                connection.send(Confirmed(number))

    def _report_abandoned(self, abandoned: GaveUp) -> None:
        """Apply the tier's ``on_error``."""
        error = unpack(abandoned.failure)
        on_error = None if abandoned.tier is None else self._tiers[abandoned.tier].on_error
        if not callable(on_error):
            self.engine.notify_abandoned(abandoned.step, error)
            return
        try:
            on_error(error)
        except Exception:
            logger.exception("on_error of %s raised; the tier goes on", self.places[abandoned.tier or 0].backend.url)


def compose_setup(tiers: Sequence[Tier], options: Options, ranks: Ranks, *, refuses_not_finite: bool = False) -> Setup:
    """Return the first message for the writer of this process, whose rank is that of *ranks*."""
    return Setup(
        tiers=tuple(map(_order, tiers)),
        io=options.io,
        deadlines=options.deadlines,
        on_exists=options.on_exists,
        screen=options.screen,
        log_level=logging.getLogger("aiockpt").getEffectiveLevel(),
        refuses_not_finite=refuses_not_finite,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _order(tier: Tier) -> TierSetup:
    return TierSetup(
        url=parse_address(tier.url).url,
        every=tier.every,
        keep=tier.retention,
        deadline=tier.deadline,
        bandwidth=tier.bandwidth,
        on_error="call" if callable(tier.on_error) else tier.on_error,
        content=tier.content,
    )
