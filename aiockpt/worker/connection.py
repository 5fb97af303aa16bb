"""The trainer's record of one writer: the slabs that it writes from, and the saves that it has not finished.

The thread that copies and the loop thread both use it. They change its dict by single operations only, which are atomic, so
that a slab is returned exactly once, even if the writer dies meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from aiockpt.engine.job import CopyTarget, SaveJob
from aiockpt.errors import WriterLostError
from aiockpt.futures import SaveResult
from aiockpt.planning.write_plan import SavePlan, Window
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.worker.messages import (
    Order,
    Plan,
    Reached,
    Sampled,
    Save,
    Settled,
    SlabFilled,
    Tidied,
    encode,
    strip_plan,
    unpack,
)
from aiockpt.worker.process import WriterProcess

if TYPE_CHECKING:
    from aiockpt.pipeline.replica_samples import Sampling


class Connection:
    """One writer, from its start until it is buried.

    Attributes:
        process: the writer.
        lent: slabs that it has, by number.
        broken: the error that it reported when it could not work.
        detached: whether it may go on although its messages are no longer received.
        buried: resolved when the writer has ended and its slabs are back in the pool.
    """

    def __init__(self, process: WriterProcess) -> None:
        self.process = process
        self.lent: dict[int, Slab] = {}
        self.broken: Exception | None = None
        self.detached = False
        self.buried: Promise[None] = Promise("the end of a writer process")
        self._lost = False
        self._plan = ""

    def send(self, *orders: Order) -> None:
        """Send *orders*; they are sure to arrive once this returns. Any thread but the loop's.

        Raises:
            WriterLostError: the writer is gone.
        """
        self._send(lambda: map(encode, orders))

    def begin(self, save: Save, plan: SavePlan) -> None:
        """Send a save, and its plan unless that is the plan sent last.

        Raises:
            WriterLostError: the writer is gone.
        """

        def compose() -> list[bytes]:
            if self._plan == plan.digest:
                return [encode(save)]
            frames = [encode(Plan(strip_plan(plan))), encode(save)]
            self._plan = plan.digest  # here, where no other thread sends
            return frames

        try:
            self._send(compose)
        except BaseException:
            self._plan = ""  # whether it has a plan, and which, is not known: the next save brings its own
            raise

    def _send(self, compose: Callable[[], Iterable[bytes]]) -> None:
        try:
            self.process.orders.send(compose)
        except OSError as error:
            raise self.death() from error

    def lend(self, slab: Slab, pool: SlabPool) -> None:
        """Note that the writer has *slab*, of *pool*, from now on.

        Raises:
            WriterLostError: the writer is gone; the slab is the pool's again.
        """
        self.lent[slab.number] = slab
        # `lose` was called before, and the reclaim that follows it may have missed this slab.
        if self._lost:
            self.reclaim(slab.number, pool)
            raise self.death()

    def reclaim(self, number: int, pool: SlabPool) -> None:
        """Return slab *number* to its pool, once."""
        slab = self.lent.pop(number, None)
        if slab is not None:
            pool.release(slab)

    def lose(self) -> None:
        """Note that the writer is gone; slabs handed over from now on are returned at once."""
        self._lost = True

    def death(self) -> Exception:
        """Return the error for a writer that sends no more messages."""
        return self.broken or WriterLostError(
            f"{self!r} {self.process.fate}: `aiockpt ls` shows whether its saves are committed, and its output is on the "
            "standard error. The next save starts another writer."
        )

    def __repr__(self) -> str:
        return f"<writer process {self.process.pid}>"


class ToWriter(CopyTarget):
    """Hands the windows of *job*, with their slabs, and its samples to the writer; for the thread that copies."""

    def __init__(self, job: SaveJob, connection: Connection, pool: SlabPool) -> None:
        super().__init__(job)
        self._connection = connection
        self._pool = pool
        self._firsts = [0, *accumulate(len(file.windows) for file in job.plan.files)]

    def hand_over(self, window: Window, slab: Slab) -> None:
        job, pool = self._job, self._pool
        # The barrier may have abandoned the save, and its copy be torn: without this window it is never committed.
        if job.stopped:
            pool.release(slab)
            return
        self._connection.lend(slab, pool)
        place = self._firsts[window.file] + window.offset // pool.slab_bytes
        self._connection.send(SlabFilled(job.number, place, slab.number))

    def hand_samples(self, sampling: Sampling) -> None:
        self._connection.send(Sampled(self._job.number, sampling.tables()))


class PendingSave:
    """One save that was sent to a writer.

    Attributes:
        step, nonce: which one.
        stages: of the tiers, the nearest first; empty if there is only one.
        answer: the outcome; *tidied*: resolved when only messages about farther tiers may follow.
        recheck: compares the state with its copy, if that was not done; returns the error that ends the save if it is torn.
    """

    def __init__(
        self,
        connection: Connection,
        save: Save,
        promise: SavePromise,
        stages: Sequence[Promise[SaveResult]],
        recheck: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        step = self.step = save.step
        self.nonce = save.nonce
        self.connection = connection
        self.stages = stages
        self.answer: Promise[SaveResult] = Promise(f"save of step {step}, in the writer")
        self.tidied: Promise[None] = Promise(f"save of step {step}, tidied")
        self._orphaned = False
        self.recheck = recheck
        self._promise = promise

    @property
    def is_committed(self) -> bool:
        return self.answer.is_settled and self.answer.error is None

    @property
    def unresolved(self) -> list[int]:
        """The farther tiers whose outcome is not known."""
        return [number for number, stage in enumerate(self.stages) if number and not stage.is_settled]

    @property
    def ended(self) -> bool:
        """Whether no more messages about it will come."""
        return self.tidied.is_settled and all(stage.is_settled for stage in self.stages)

    def death(self) -> Exception | None:
        """Return the error if its writer died, and the save does not go on in a detached writer; else None."""
        return self.connection.death() if self._orphaned else None

    def resolve(self, answer: Reached | Settled | Tidied) -> None:
        """Resolve or fail the promise of what the writer reports."""
        match answer:
            case Reached(stage="written"):
                self._promise.reach(self._promise.written)
            case Reached():
                self._promise.reach(self._promise.in_memory)
            case Settled():
                stage = self.answer if answer.tier is None else self.stages[answer.tier]
                if answer.result is not None:
                    stage.resolve(answer.result)
                elif answer.failure is not None:
                    stage.fail(unpack(answer.failure))
            case Tidied():
                self.tidied.resolve(None)

    def fail(self, error: Exception) -> None:
        """Fail what has no outcome yet: the writer is gone.

        The tiers of a save that has no outcome yet fail with it. (A save that was never sent goes to the next writer.)
        """
        self._orphaned = not self.connection.detached
        if self.answer.is_settled:
            for stage in self.stages:
                stage.fail(error)
        self.answer.fail(error)
        self.tidied.resolve(None)
