"""State that all operations of one checkpointer share: the loop, the pool, the plan, the lineage, the observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from aiockpt.engine.outcomes import Failures
from aiockpt.events import Event, Observer, Operation
from aiockpt.format.checksum import BLOCK_BYTES
from aiockpt.futures import SaveFuture
from aiockpt.options import SHARED_BLOCK_BYTES, Options
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.discover import StepEntry
from aiockpt.pipeline.lineage import Lineage
from aiockpt.pipeline.upload import FileScreen, FloatSpan, find_spans
from aiockpt.planning.shard_map import check_whole
from aiockpt.planning.write_plan import PAGE_BYTES, SavePlan, plan_save
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.host_memory import Memory
from aiockpt.runtime.limits import Limiter
from aiockpt.runtime.promise import SavePromise
from aiockpt.runtime.slabs import Lender, SlabPool
from aiockpt.runtime.stages import Stages
from aiockpt.runtime.world import Loop, World
from aiockpt.state.shards import ShardedState, TensorShard

if TYPE_CHECKING:
    import torch

    from aiockpt.pipeline.replica_samples import ReplicaSamples, Sampling
    from aiockpt.pipeline.snapshot import CopyProgram  # a writer process copies no state, and need not load torch

logger = logging.getLogger("aiockpt")


class Engine:
    """The shared part of all operations of one checkpointer, whatever the place (`aiockpt.engine.place`).

    Args:
        rank, world_size: which this process is of those that save and load together.
        memory: of the staging pool; that of this process alone for None.
        lender: where written slabs are returned to; the pool for None.

    Attributes:
        lineage: where new saves stand among all others.
        block_bytes: of data files: what one checksum is of.
        busy_attempts: nonces of attempts under way here; garbage collection skips them.
        differing_buffers: those that ranks had differently when that was logged.
        not_finite: tensors in which the last save found numbers that are not finite.
        failures: the saves that have failed, until the caller has received them.
        tell_given_up: called with a step, and why a place has given it up whose ``on_error`` says that the next call raises.
    """

    def __init__(
        self,
        loop: Loop,
        options: Options,
        observers: Sequence[Observer],
        world: World,
        *,
        rank: int = 0,
        world_size: int = 1,
        memory: Memory | None = None,
        lender: Lender | None = None,
    ) -> None:
        self.loop = loop
        self.options = options
        self.world = world
        self.rank, self.world_size = rank, world_size
        self.pool = SlabPool(options.io.slab_bytes, options.io.pool_bytes, memory)
        self.lender: Lender = lender or self.pool
        self.lineage = Lineage(rank, world_size, lambda: self.token(6))
        alone = world_size == 1
        self.block_bytes = options.io.block_bytes or (BLOCK_BYTES if alone else SHARED_BLOCK_BYTES)
        self._payload_alignment = PAGE_BYTES if alone else max(PAGE_BYTES, self.block_bytes)
        self.busy_attempts: set[str] = set()
        self.differing_buffers: tuple[str, ...] = ()
        self.not_finite: frozenset[str] = frozenset()
        self.failures = Failures()
        self.tell_given_up: Callable[[int, BaseException], object] = self._note_given_up
        self.state_work = Limiter("state", 2)
        self._observers = list(observers)
        self._plan: tuple[str, SavePlan] | None = None
        self._program: tuple[SavePlan, CopyProgram] | None = None
        self._samples: ReplicaSamples | None = None
        self._spans: tuple[SavePlan, list[list[FloatSpan]]] | None = None

    def _note_given_up(self, step: int, error: BaseException) -> None:
        promise = SavePromise(step)
        promise.fail(error)
        self.failures.add(SaveFuture(promise))

    def plan(self, state: ShardedState) -> SavePlan:
        """Return the plan for *state*: the cached one while its structure is the same. Any thread."""
        cached = self._plan  # read once: several saves may be planned on several threads
        if cached is not None and cached[0] == state.structure:
            return cached[1]
        plan = self.make_plan(state)
        self._plan = (state.structure, plan)
        return plan

    def make_plan(self, state: ShardedState) -> SavePlan:
        """Return a plan for *state* that no save has asked for, and remember nothing. Any thread."""
        if self.world_size == 1:
            check_whole(state)
        io = self.options.io
        return plan_save(
            state,
            slab_bytes=io.slab_bytes,
            file_bytes=io.file_bytes,
            payload_alignment=self._payload_alignment,
        )

    def screens(self, plan: SavePlan) -> list[FileScreen]:
        """Return what screens each file of *plan* while it is written; empty where that was not asked for. On the loop."""
        if self.options.screen is None:
            return []
        if self._spans is None or self._spans[0] is not plan:
            self._spans = (plan, find_spans(plan.tensors, len(plan.files)))
        return [FileScreen(spans) for spans in self._spans[1]]

    def copy_program(self, plan: SavePlan, shards: Sequence[TensorShard], *, keep: bool = True) -> CopyProgram:
        """Return the copies of *plan*: the cached ones while the tensors are where they were. Any thread.

        Args:
            keep: whether the tensors will be there for the next save.
        """
        from aiockpt.pipeline.snapshot import CopyProgram

        cached = self._program
        if cached is not None and cached[0] is plan and cached[1].serves(shards):
            return cached[1]
        program = CopyProgram(plan, shards, self.accelerator)
        if keep:
            self._program = (plan, program) if program.serves(shards) else None
        return program

    def sample_replicas(
        self, state: ShardedState, after: Sequence[tuple[torch.device, DeviceEvent]], *, keep: bool
    ) -> Sampling | None:
        """Read some of what this rank and others have of *state*; None where that is nothing, or not to be compared."""
        if not state.replicas or self.options.replicas == "first":
            return None
        from aiockpt.pipeline.replica_samples import ReplicaSamples

        samples = self._samples
        if samples is None or not samples.serves(state.replicas):
            samples = ReplicaSamples(state.replicas, self.accelerator, whole=self.options.debug == "digest")
            self._samples = samples if keep else None
        return samples.begin(after, self.options.deadlines.slab_s)

    def release_memory(self) -> None:
        """Let go of the staging pool and of the state's tensors, at the end."""
        self.pool.close()
        self._program = self._samples = None
        self._spans = None

    async def begin_attempt(self, entry: StepEntry, nonce: str, number: int) -> Attempt:
        """Return a new attempt at a step for the save of that *number*; garbage collection skips it."""
        attempt = await self.lineage.begin_attempt(entry, nonce, number)
        self.busy_attempts.add(attempt.attempt)
        return attempt

    @cached_property
    def accelerator(self) -> Accelerator:
        """The devices that tensors may be on; asked for by the thread that copies."""
        if self.world.accelerator is not None:
            return self.world.accelerator
        from aiockpt.runtime.cuda import Cuda

        return Cuda()

    def token(self, size: int) -> str:
        """Return *size* random bytes as hex."""
        return self.world.token(size).hex()

    def now_ns(self) -> int:
        """Return the monotonic time."""
        return self.world.clock.monotonic_ns()

    def since_s(self, begun_ns: int) -> float:
        """Return the seconds since *begun_ns*."""
        return (self.now_ns() - begun_ns) / 1e9

    def stages(self, operation: Operation, step: int) -> Stages:
        """Return what times the stages of one operation."""
        return Stages(self.emit, self.now_ns, operation, step)

    def emit(self, event: Event) -> None:
        """Show *event* to every observer. One that raises is dropped, with a log line; it never harms a save."""
        for observer in list(self._observers):
            try:
                observer.on_event(event)
            except Exception:
                self._observers.remove(observer)
                logger.exception("observer %r raised and is not called again", observer)
