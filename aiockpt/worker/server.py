"""What does the writer process do? It takes saves as they are copied, and writes them as the trainer's own loop would.

The engine is the one of `aiockpt.engine`, with two things less: it copies nothing, and its slabs belong to the trainer.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import Alone, Coordinator
from aiockpt.engine.job import SaveJob
from aiockpt.events import Event, SaveFailed, SaveStarted
from aiockpt.futures import SaveResult
from aiockpt.options import Options, Tier
from aiockpt.planning.write_plan import SavePlan
from aiockpt.runtime.channel import Poster, Receiver
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.loop import LoopThread
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.tasks import open_tasks
from aiockpt.runtime.world import World
from aiockpt.storage.open import open_backend
from aiockpt.tiers.tiers import Tiers
from aiockpt.worker.messages import (
    Answer,
    AnyEvent,
    Asked,
    Broken,
    Cancel,
    Close,
    Confirmed,
    Filled,
    GaveUp,
    Happened,
    Order,
    Plan,
    Reached,
    Replied,
    Save,
    Seen,
    Settled,
    Setup,
    Tidied,
    TierSettled,
    TierSetup,
    decode_order,
    encode,
)
from aiockpt.worker.packed_errors import pack, unpack
from aiockpt.worker.writing import LentSlabs, Post, Writing

logger = logging.getLogger("aiockpt")

LAST_WORDS_S = 60.0
"""For the trainer to take what it was told; one that is gone takes nothing."""


def main(orders_fd: int, answers_fd: int, memory_fd: int) -> None:
    """Serve the trainer at the other end of these descriptors."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # what ends a job in order; this process ends with the trainer
    orders, answers = Receiver(socket.socket(fileno=orders_fd)), Poster(socket.socket(fileno=answers_fd))
    loop = LoopThread("aiockpt-writer", on_exit=lambda: None)
    try:
        loop.submit(_serve, loop, orders, answers, memory_fd).result()
    finally:
        loop.close()


async def _serve(loop: LoopThread, orders: Receiver, answers: Poster, memory_fd: int) -> None:
    def post(answer: Answer) -> None:
        answers.post(encode(answer))

    await answers.open()
    try:
        setup = await _receive(orders)
        if not isinstance(setup, Setup):
            return
        logging.basicConfig(format=f"aiockpt writer {os.getpid()}: %(message)s")
        logger.setLevel(setup.log_level)
        try:
            service = await run_blocking(Limiter("start", 1), Service, loop, setup, memory_fd, post)
        except Exception as error:  # noqa: BLE001  the trainer raises it
            post(Broken(pack(error)))
            return
        await service.serve(orders)
    finally:
        with anyio.move_on_after(LAST_WORDS_S):
            await answers.close()
        orders.close()


async def _receive(orders: Receiver) -> Order | None:
    frame = await orders.receive()
    return None if frame is None else decode_order(frame)


class Service:
    """One writer at work. Used on its loop.

    Args:
        hello: what to build.
        memory_fd: of the memory in which the slabs are.
        post: sends an answer to the trainer.
    """

    def __init__(self, loop: LoopThread, setup: Setup, memory_fd: int, post: Post) -> None:
        self._post = post
        self._slabs = LentSlabs(memory_fd, setup.io.slab_bytes, post)
        self._deadline_s = setup.deadlines.close_s
        world = World()
        backends = [open_backend(tier.url, world=world) for tier in setup.tiers]
        options = Options(
            io=setup.io, deadlines=setup.deadlines, on_exists=setup.on_exists, on_error="warn", worker="process"
        )
        self._store = RelayedStore(lambda number, question: loop.call_soon(post, Asked(number, question)))
        coordinator: Coordinator = Alone()
        if setup.world_size > 1:
            from aiockpt.ranks.coordinator import RankCoordinator

            ranks = Ranks(setup.rank, setup.world_size, self._store)
            secret = world.token(16).hex()
            coordinator = RankCoordinator(
                *(ranks, backends[0].url, loop, options, secret),
                seen=setup.seen,
                on_seen=lambda tier: post(Seen(tier)),
            )
        self._engine = Engine(backends[0], loop, options, [Teller(post)], world, coordinator, lender=self._slabs)
        self._engine.failed = deque(maxlen=0)  # a save tells of itself
        self._engine.tell_given_up = lambda step, error: post(GaveUp(step, None, pack(error)))
        tiers = [_tier_of(order, number, post) for number, order in enumerate(setup.tiers)]
        self._tiers = Tiers(tiers, self._engine, backends)
        self._plan: SavePlan | None = None
        self._saves: dict[int, Writing] = {}

    async def serve(self, orders: Receiver) -> None:
        """Do what arrives, and when nothing more will: finish what is complete, and give up the rest."""
        async with open_tasks() as hearing:
            async with open_tasks() as tasks:
                await self._take_all(orders, tasks)
                tasks.cancel_scope.deadline = anyio.current_time() + self._deadline_s
                for writing in self._saves.values():
                    writing.go_on_if_complete()
                hearing.start_soon(self._hear_store, orders)
            await self._tiers.close(self._deadline_s)
            hearing.cancel_scope.cancel()

    async def _take_all(self, orders: Receiver, tasks: TaskGroup) -> None:
        """Do what arrives until nothing more will."""
        try:
            while (order := await _receive(orders)) is not None and not isinstance(order, Close):
                self._take(order, tasks)
        except BaseException:
            self._store.lose()  # nobody hears its replies any more, and who waits for one cannot be cancelled
            raise

    async def _hear_store(self, orders: Receiver) -> None:
        """Hear the replies that are still to come, to the end of the trainer or of all work here."""
        try:
            while (order := await _receive(orders)) is not None:
                if isinstance(order, Replied):
                    self._store.hear(order.number, order.reply)
        finally:
            self._store.lose()

    def _take(self, order: Order, tasks: TaskGroup) -> None:
        match order:
            case Plan():
                self._plan = order.plan
            case Save():
                self._begin(order, tasks)
            case Filled():
                slab = self._slabs.borrow(order.slab)
                if order.number in self._saves:
                    self._saves[order.number].arrive(order.window, slab)
                else:
                    self._slabs.give(slab)  # the save has failed meanwhile
            case Cancel():
                if order.number in self._saves:
                    self._saves[order.number].job.stop(unpack(order.why))
            case Confirmed():
                if order.number in self._saves:
                    self._saves[order.number].confirmed.resolve(None)
            case Replied():
                self._store.hear(order.number, order.reply)

    def _begin(self, order: Save, tasks: TaskGroup) -> None:
        assert self._plan is not None
        self._engine.coordinator.join(order.board)
        writing = self._saves[order.number] = Writing(self._engine, self._slabs, order, self._plan, self._post)
        tasks.start_soon(self._write, writing)

    async def _write(self, writing: Writing) -> None:
        """Write one save, and clean up after it."""
        job = writing.job
        self._tiers.prepare(job.promise)
        self._tell_stages(job)
        try:
            result = await job.run(self._tiers.save)
            error = job.promise.error
            self._post(Settled(job.number, result, None if error is None else pack(error)))
            if result is not None and not result.existed and self._engine.coordinator.rank == 0:
                await self._clean_up(result)
        finally:
            del self._saves[job.number]
            self._post(Tidied(job.number))

    async def _clean_up(self, result: SaveResult) -> None:
        try:
            await self._tiers.clean_up(result)
        except Exception:  # the step is safe; other saves must not end with this one
            logger.exception("cleaning up after step %d", result.step)

    def _tell_stages(self, job: SaveJob) -> None:
        """Have the trainer told of what *job* reaches."""
        promise, number = job.promise, job.number
        _when_reached(promise.written, lambda: self._post(Reached(number, "written")))
        _when_reached(promise.in_memory, lambda: self._post(Reached(number, "in_memory")))
        for tier, stage in enumerate(self._tiers.stages(promise)):
            stage.when_settled(partial(self._tell_tier, number, tier, stage))

    def _tell_tier(self, number: int, tier: int, stage: Promise[SaveResult]) -> None:
        error = stage.error
        if error is None:
            self._post(TierSettled(number, tier, result=stage.value))
        else:
            self._post(TierSettled(number, tier, failure=pack(error)))


def _when_reached(stage: Promise[None], tell: Callable[[], object]) -> None:
    stage.when_settled(lambda: None if stage.error else tell())


class Teller:
    """Has the trainer's observers see what happens here; the beginning and the failure of a save are seen there."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def on_event(self, event: Event) -> None:
        """Send *event*."""
        if not isinstance(event, SaveStarted | SaveFailed):
            self._post(Happened(cast(AnyEvent, event)))


def _tier_of(order: TierSetup, number: int, post: Post) -> Tier:
    """Return the tier as the engine knows it, whose ``on_error`` is called in the trainer."""
    fields = msgspec.structs.asdict(order)
    if order.on_error == "call":
        fields["on_error"] = lambda error: post(GaveUp(-1, number, pack(error)))
    return Tier(**fields)
