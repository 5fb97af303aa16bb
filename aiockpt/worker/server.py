"""The service of the writer process: it receives saves as they are copied, and writes them as the trainer's loop would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.job import CopyTarget, Round, SaveJob, SaveRequest
from aiockpt.errors import WriterLostError
from aiockpt.format.merge import ReplicaTables
from aiockpt.futures import SaveResult
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.channel import Receiver
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.shared_memory import map_shared
from aiockpt.runtime.slabs import Slab
from aiockpt.state.shards import ShardedState
from aiockpt.worker.messages import (
    Answer,
    Cancel,
    Close,
    Confirmed,
    Freed,
    Order,
    Plan,
    Reached,
    Replied,
    Sampled,
    Save,
    Settled,
    SlabFilled,
    Tidied,
    Written,
    decode_order,
    from_json,
    pack,
    unpack,
)

logger = logging.getLogger("aiockpt")
Post = Callable[[Answer], object]


async def receive(orders: Receiver) -> Order | None:
    """Return the trainer's next message; None when it has ended."""
    frame = await orders.receive()
    return None if frame is None else decode_order(frame)


class Service:
    """The service of one writer. Use on its loop.

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
        """Handle messages to the last one; then finish the saves that are complete, and abandon the rest."""
        async with open_tasks() as receiving:
            async with open_tasks() as tasks:
                await self._accept_all(orders, tasks)
                tasks.cancel_scope.deadline = anyio.current_time() + self._deadline_s
                for writing in self._saves.values():
                    writing.go_on_if_complete()
                # Not before: two readers of one stream would take each other's frames.
                receiving.start_soon(self._receive_replies, orders)
            await self._destination.close(self._deadline_s)
            receiving.cancel_scope.cancel()

    async def _accept_all(self, orders: Receiver, tasks: TaskGroup) -> None:
        """Handle messages until the trainer closes or ends."""
        try:
            while (order := await receive(orders)) is not None and not isinstance(order, Close):
                self._accept(order, tasks)
        except BaseException:
            # No reply is received any more, and a thread that waits for one cannot be cancelled.
            self._store.fail_all()
            raise

    async def _receive_replies(self, orders: Receiver) -> None:
        """Receive the remaining replies, until the trainer ends or all work here is done."""
        try:
            while (order := await receive(orders)) is not None:
                if isinstance(order, Replied):
                    self._store.receive(order.number, order.reply)
        finally:
            self._store.fail_all()

    def _accept(self, order: Order, tasks: TaskGroup) -> None:
        match order:
            case Plan():
                self._plan = order.plan
            case Save():
                self._begin(order, tasks)
            case Replied():
                self._store.receive(order.number, order.reply)
            case SlabFilled():
                slab = self._slabs.borrow(order.slab)
                if (writing := self._saves.get(order.number)) is None:  # the save has failed meanwhile
                    self._slabs.release(slab)
                else:
                    writing.arrive(order.window, slab)
            case Sampled() | Cancel() | Confirmed():
                if (writing := self._saves.get(order.number)) is not None:
                    writing.accept(order)

    def _begin(self, order: Save, tasks: TaskGroup) -> None:
        assert self._plan is not None
        save_round = self._coordinator.join(order.board, order.save_round)
        if order.expedited is not None:
            self._destination.expedite(order.step, order.expedited)
        writing = self._saves[order.number] = Writing(
            self._engine, self._slabs, order, save_round, self._plan, self._post
        )
        tasks.start_soon(self._write, writing)

    async def _write(self, writing: Writing) -> None:
        """Write one save, and clean up after it."""
        job = writing.job
        self._destination.prepare(job.promise)
        self._report_stages(job)
        try:
            async with job.running():
                job.promise.resolve(await self._destination.save(job))
            error = job.promise.error
            result = job.promise.value if error is None else None
            self._post(Settled(job.number, result, None if error is None else pack(error)))
            if result is not None and not result.existed and self._engine.rank == 0:
                await self._destination.clean_up(result)
        finally:
            del self._saves[job.number]
            self._post(Tidied(job.number))

    def _report_stages(self, job: SaveJob) -> None:
        """Notify the trainer of each stage that *job* reaches."""
        promise, number = job.promise, job.number

        def report_reached(point: Promise[None], name: Literal["written", "in_memory"]) -> None:
            if point.error is None:
                self._post(Reached(number, name))

        def report_settled(stage: Promise[SaveResult], tier: int) -> None:
            error = stage.error
            result, failure = (stage.value, None) if error is None else (None, pack(error))
            self._post(Settled(number, result, failure, tier))

        promise.written.when_settled(partial(report_reached, promise.written, "written"))
        promise.in_memory.when_settled(partial(report_reached, promise.in_memory, "in_memory"))
        for tier, stage in enumerate(self._destination.stages(promise)):
            stage.when_settled(partial(report_settled, stage, tier))


class FromTrainer(CopyTarget):
    """What the vote of a *job* waits for, whose state the trainer copies.

    Attributes:
        confirmed: resolved when the trainer has compared the state once more, after the copy; or has ended.
        tables: those of replicas, by the trainer.
    """

    def __init__(self, job: SaveJob, post: Post) -> None:
        super().__init__(job)
        self._post = post
        self.confirmed: Promise[None] = Promise(f"the trainer's word for step {job.step}")
        self.tables = ReplicaTables()

    def replica_tables(self) -> ReplicaTables:
        return self.tables

    async def confirm(self) -> None:
        """Wait for the trainer's confirmation. A torn snapshot arrives as a `Cancel`."""
        if not self.confirmed.is_settled:
            self._post(Written(self._job.number))
            await self.confirmed.settled()


class Writing:
    """One save whose windows arrive from the trainer."""

    def __init__(
        self, engine: Engine, slabs: LentSlabs, order: Save, save_round: Round, plan: SavePlan, post: Post
    ) -> None:
        engine.lineage.adopt_position(order.position)
        state = ShardedState(
            tensors=(),
            alias=order.alias,
            values=from_json(order.values),
            per_rank=from_json(order.per_rank),
            structure="",
            left_out=order.left_out,
        )
        request = SaveRequest(
            step=order.step,
            metrics=order.metrics,
            user=from_json(order.user),
            config=from_json(order.config),
            begun_ns=order.begun_ns,
        )
        self.job = SaveJob(engine, save_round, request, state)
        self.job.target = self._trainer = FromTrainer(self.job, post)
        self.job.number = order.number
        self.job.nonce = order.nonce
        if not order.needs_check:
            self._trainer.confirmed.resolve(None)
        self.job.plan = plan
        self.job.slabs = [Handover(slabs, len(file.windows)) for file in plan.files]
        self._windows: list[Window] = [window for file in plan.files for window in file.windows]
        # Where replicas are compared, `Sampled` is waited for like one more window.
        self._missing = len(self._windows) + order.compares
        self._resolve_if_complete()

    def arrive(self, number: int, slab: Slab) -> None:
        window = self._windows[number]
        self.job.slabs[window.file].arrive(window, slab)
        self._missing -= 1
        self._resolve_if_complete()

    def accept(self, order: Sampled | Cancel | Confirmed) -> None:
        """Accept what the trainer reports beside the windows."""
        match order:
            case Sampled():
                self._trainer.tables = order.tables
                self._missing -= 1
                self._resolve_if_complete()
            case Cancel():
                self.job.stop(unpack(order.why))
            case Confirmed():
                self._trainer.confirmed.resolve(None)

    def _resolve_if_complete(self) -> None:
        if not self._missing:
            self.job.copied.resolve(None)

    def go_on_if_complete(self) -> None:
        """Stop the save if windows are missing: the trainer has ended, and sends neither these nor its confirmation.

        Nothing had changed when it sent the last window. Its second comparison could only have found an operation that was
        under way then, on a tensor that it changed without permission.
        """
        step = self.job.step
        self._trainer.confirmed.resolve(None)
        if self._missing:
            logger.warning("step %d: the trainer ended before the snapshot was complete; nothing of it is kept", step)
            self.job.stop(WriterLostError(f"the trainer ended before the snapshot of step {step} was complete"))
        else:
            logger.info("step %d: the trainer has ended; the save goes on without it", step)


class LentSlabs:
    """The trainer's slabs, as many as it has sent: mapped once, returned by a message."""

    def __init__(self, memory_fd: int, slab_bytes: int, post: Post) -> None:
        self._memory_fd = memory_fd
        self._slab_bytes = slab_bytes
        self._post = post
        self._known: dict[int, Slab] = {}

    def borrow(self, number: int) -> Slab:
        """Return slab *number*, which the trainer has filled."""
        if number not in self._known:
            self._known[number] = Slab(map_shared(self._memory_fd, number, self._slab_bytes), number)
        return self._known[number]

    def release(self, slab: Slab) -> None:
        self._post(Freed(slab.number))
