"""The service of the writer process: it receives saves as they are copied, and writes them as the trainer's loop would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.destination import Destination
from aiockpt.engine.save import SaveJob
from aiockpt.futures import SaveResult
from aiockpt.planning.write_plan import SavePlan
from aiockpt.runtime.channel import Receiver
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.tasks import open_tasks
from aiockpt.worker.messages import (
    Cancel,
    Close,
    Confirmed,
    Order,
    Plan,
    Reached,
    Replied,
    Sampled,
    Save,
    Settled,
    SlabFilled,
    Tidied,
    TierSettled,
    decode_order,
)
from aiockpt.worker.packed_errors import pack, unpack
from aiockpt.worker.writing import LentSlabs, Post, Writing

logger = logging.getLogger("aiockpt")


async def receive(orders: Receiver) -> Order | None:
    """Return the trainer's next message; None when it has ended."""
    frame = await orders.receive()
    return None if frame is None else decode_order(frame)


class Service:
    """One writer at work. Used on its loop.

    Args:
        destination: where saves go.
        store: relays questions to the store of the ranks' notes; its replies arrive here.
        slabs: those of the trainer.
        post: sends an answer to the trainer.
    """

    def __init__(
        self, destination: Destination, coordinator: Coordinator, store: RelayedStore, slabs: LentSlabs, post: Post
    ) -> None:
        self._destination, self._coordinator = destination, coordinator
        self._engine = destination.engine
        self._store = store
        self._slabs = slabs
        self._post = post
        self._deadline_s = self._engine.options.deadlines.close_s
        self._plan: SavePlan | None = None
        self._saves: dict[int, Writing] = {}

    async def serve(self, orders: Receiver) -> None:
        """Handle what arrives, and when nothing more will: finish what is complete, and give up the rest."""
        async with open_tasks() as hearing:
            async with open_tasks() as tasks:
                await self._take_all(orders, tasks)
                tasks.cancel_scope.deadline = anyio.current_time() + self._deadline_s
                for writing in self._saves.values():
                    writing.go_on_if_complete()
                hearing.start_soon(self._hear_store, orders)
            await self._destination.close(self._deadline_s)
            hearing.cancel_scope.cancel()

    async def _take_all(self, orders: Receiver, tasks: TaskGroup) -> None:
        """Handle what arrives until nothing more will."""
        try:
            while (order := await receive(orders)) is not None and not isinstance(order, Close):
                self._take(order, tasks)
        except BaseException:
            self._store.lose()  # no reply is received any more, and a thread that waits for one cannot be cancelled
            raise

    async def _hear_store(self, orders: Receiver) -> None:
        """Receive the replies that are still to come, to the end of the trainer or of all work here."""
        try:
            while (order := await receive(orders)) is not None:
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
            case SlabFilled():
                slab = self._slabs.borrow(order.slab)
                if order.number in self._saves:
                    self._saves[order.number].arrive(order.window, slab)
                else:
                    self._slabs.give(slab)  # the save has failed meanwhile
            case Sampled():
                if order.number in self._saves:
                    self._saves[order.number].take_tables(order.tables)
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
        self._coordinator.join(order.board)
        if order.hastened is not None:
            self._destination.hasten(order.step, order.hastened)
        writing = self._saves[order.number] = Writing(self._engine, self._slabs, order, self._plan, self._post)
        tasks.start_soon(self._write, writing)

    async def _write(self, writing: Writing) -> None:
        """Write one save, and clean up after it."""
        job = writing.job
        self._destination.prepare(job.promise)
        self._tell_stages(job)
        try:
            result = await job.run(self._destination.save)
            error = job.promise.error
            self._post(Settled(job.number, result, None if error is None else pack(error)))
            if result is not None and not result.existed and self._engine.rank == 0:
                await self._clean_up(result)
        finally:
            del self._saves[job.number]
            self._post(Tidied(job.number))

    async def _clean_up(self, result: SaveResult) -> None:
        try:
            await self._destination.clean_up(result)
        except Exception:  # the step is safe; other saves must not end with this one
            logger.exception("cleaning up after step %d", result.step)

    def _tell_stages(self, job: SaveJob) -> None:
        """Have the trainer notified of what *job* reaches."""
        promise, number = job.promise, job.number
        _when_reached(promise.written, lambda: self._post(Reached(number, "written")))
        _when_reached(promise.in_memory, lambda: self._post(Reached(number, "in_memory")))
        for tier, stage in enumerate(self._destination.stages(promise)):
            stage.when_settled(partial(self._tell_tier, number, tier, stage))

    def _tell_tier(self, number: int, tier: int, stage: Promise[SaveResult]) -> None:
        error = stage.error
        if error is None:
            self._post(TierSettled(number, tier, result=stage.value))
        else:
            self._post(TierSettled(number, tier, failure=pack(error)))


def _when_reached(stage: Promise[None], tell: Callable[[], object]) -> None:
    stage.when_settled(lambda: None if stage.error else tell())
