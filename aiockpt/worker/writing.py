"""One save in the writer: a `SaveJob` as the engine knows it, whose windows come from the trainer, in its slabs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiockpt.engine.context import Engine
from aiockpt.engine.save import SaveCall, SaveJob
from aiockpt.engine.snapshotter import Capture
from aiockpt.errors import WriterLostError
from aiockpt.format.replicas import ReplicaTables
from aiockpt.pipeline.upload import Handover
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.shared_memory import map_shared
from aiockpt.runtime.slabs import Slab
from aiockpt.state.shards import ShardedState
from aiockpt.worker.messages import Answer, Freed, Save, Written, from_json

logger = logging.getLogger("aiockpt")
Post = Callable[[Answer], object]


class Writing:
    """One save, its windows on their way from the trainer.

    Attributes:
        confirmed: resolved when the trainer has compared the state once more, after the copy; or has ended.
    """

    def __init__(self, engine: Engine, slabs: LentSlabs, order: Save, plan: SavePlan, post: Post) -> None:
        engine.lineage.take_position(order.position)
        state = ShardedState(
            tensors=(),
            alias=order.alias,
            values=from_json(order.values),
            per_rank=from_json(order.per_rank),
            structure="",
            left_out=order.left_out,
        )
        call = SaveCall(
            save_round=order.save_round,
            metrics=order.metrics,
            user=from_json(order.user),
            config=from_json(order.config),
            begun_ns=order.begun_ns,
        )
        self.job = SaveJob(engine, call, Capture(state=state))
        self.job.agreed = True  # by the trainer, which posts it for the others
        self.job.number = order.number
        self.job.nonce = order.nonce
        self.confirmed: Promise[None] = Promise(f"the trainer's word for step {order.step}")
        if order.unsure:
            self.job.confirm = self._ask
        self._post = post
        self.job.plan = plan
        self.job.slabs = [Handover(slabs, len(file.windows)) for file in plan.files]
        self._windows: list[Window] = [window for file in plan.files for window in file.windows]
        self._missing = len(self._windows) + order.compares
        self._note_if_complete()

    async def _ask(self) -> None:
        """Wait for the trainer's confirmation. A torn snapshot comes as a `Cancel`."""
        if not self.confirmed.is_settled:
            self._post(Written(self.job.number))
            await self.confirmed.settled()

    def arrive(self, number: int, slab: Slab) -> None:
        """Accept a full slab."""
        window = self._windows[number]
        self.job.slabs[window.file].arrive(window, slab)
        self._missing -= 1
        self._note_if_complete()

    def take_tables(self, tables: ReplicaTables) -> None:
        """Accept what the receipt says of replicas."""
        self.job.replica_tables = lambda: tables
        self._missing -= 1
        self._note_if_complete()

    def _note_if_complete(self) -> None:
        if not self._missing:
            self.job.copied.resolve(None)

    def go_on_if_complete(self) -> None:
        """Stop when windows are missing: the trainer has ended, and they will not come, nor will its confirmation.

        When it sent the last window nothing had changed. Its second comparison could have found only an operation that was
        under way then, on a tensor that it changed without permission.
        """
        step = self.job.step
        self.confirmed.resolve(None)
        if self._missing:
            logger.warning("the trainer ended before the snapshot of step %d was complete: nothing of it is kept", step)
            self.job.stop(WriterLostError(f"the trainer ended before the snapshot of step {step} was complete"))
        else:
            logger.info("the trainer has ended; step %d is written all the same", step)


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

    def give(self, slab: Slab) -> None:
        """Let the trainer fill it again."""
        self._post(Freed(slab.number))
