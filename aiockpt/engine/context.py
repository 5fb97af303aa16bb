"""What do all operations of one checkpointer share? The storage, the pool, the limits, the lineage, who is watching."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import anyio

from aiockpt.engine.lineage import Lineage
from aiockpt.errors import CheckpointError
from aiockpt.events import Event, Observer
from aiockpt.format.checksum import BLOCK_BYTES
from aiockpt.futures import SaveFuture
from aiockpt.options import SHARED_BLOCK_BYTES, Options
from aiockpt.pipeline.collect import lease_key
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.discover import Heads, StepEntry
from aiockpt.pipeline.upload import Uploader
from aiockpt.planning.shard_map import check_whole
from aiockpt.planning.write_plan import PAGE_BYTES, SavePlan, plan_save
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.host_memory import Memory
from aiockpt.runtime.limits import Limiter, Pace
from aiockpt.runtime.promise import SavePromise
from aiockpt.runtime.slabs import Lender, SlabPool
from aiockpt.runtime.world import Loop, World
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying

if TYPE_CHECKING:
    from aiockpt.engine.coordinator import Coordinator
    from aiockpt.pipeline.snapshot import CopyProgram  # a writer process copies no state, and need not load torch

logger = logging.getLogger("aiockpt")

UPLOADS_EVERY_S = 3600.0
"""Between two looks for uploads that dead saves left in an object store; they are a day old before they count."""


class Engine:
    """The shared part of all operations below one root. Owned by one checkpointer.

    Args:
        coordinator: how this process agrees with those that save and load with it.
        nearer: the engine of a nearer tier, whose pool, lineage and observers this one shares.
        memory: of the staging pool; that of this process alone for None.
        lender: whom slabs go back to that were written; the pool for None.

    Attributes:
        lineage: where new saves stand among all others.
        tiers: the engines of all tiers, the nearest first; in most checkpointers just this one.
        busy_attempts: nonces of attempts under way here; garbage collection leaves them alone.
        heads: what retention has read of the steps here.
        thin_steps: (id, generation) of the steps that are known to have their weights alone here.
        number: of the tier, 0 is the nearest.
        failed: failed saves, oldest first, until the checkpointer has told its caller.
        tell_given_up: told a step, and why a place has given it up whose ``on_error`` says that the next call raises.
    """

    def __init__(
        self,
        backend: Backend,
        loop: Loop,
        options: Options,
        observers: Sequence[Observer],
        world: World,
        coordinator: Coordinator,
        nearer: Engine | None = None,
        *,
        memory: Memory | None = None,
        lender: Lender | None = None,
    ) -> None:
        self.backend = backend
        self.loop = loop
        self.options = options
        self.world = world
        self.coordinator = coordinator
        if nearer is None:
            self.pool = SlabPool(options.io.slab_bytes, options.io.pool_bytes, memory)
            self.lender: Lender = lender or self.pool
            self.lineage = Lineage(coordinator, lambda: self.token(6))
            self.busy_attempts: set[str] = set()
            self.failed: deque[SaveFuture] = deque()
            self.tell_given_up: Callable[[int, BaseException], object] = self._note_given_up
            self._observers = list(observers)
            self.tiers: list[Engine] = []
        else:
            self.tiers = nearer.tiers
            self.pool, self.lineage = nearer.pool, nearer.lineage
            self.lender, self.tell_given_up = nearer.lender, nearer.tell_given_up
            self.busy_attempts, self.failed, self._observers = nearer.busy_attempts, nearer.failed, nearer._observers
        self.number = len(self.tiers)
        self.tiers.append(self)
        self.lineage.places.append(backend)
        block_bytes = options.io.block_bytes
        if block_bytes is None:
            block_bytes = BLOCK_BYTES if coordinator.world_size == 1 else SHARED_BLOCK_BYTES
        self._payload_alignment = PAGE_BYTES if coordinator.world_size == 1 else max(PAGE_BYTES, block_bytes)
        self.uploader = Uploader(backend, self.lender, block_bytes, Pace(options.io.bandwidth, world.clock))
        self.state_work = Limiter("state", 2)
        self.cleaning = anyio.Lock()
        self.heads = Heads()
        self.thin_steps: set[tuple[str, int]] = set()
        self._looked_for_uploads_ns: int | None = None
        if isinstance(backend, Retrying):
            backend.tell(self.emit)
        self._plan: tuple[str, SavePlan] | None = None
        self._program: tuple[SavePlan, CopyProgram] | None = None
        self._reading: dict[str, int] = {}

    def _note_given_up(self, step: int, error: BaseException) -> None:
        promise = SavePromise(step)
        promise.fail(error)
        self.failed.append(SaveFuture(promise))

    def plan(self, state: ShardedState) -> SavePlan:
        """Return the plan for *state*: the cached one while its structure is the same. Any thread."""
        cached = self._plan  # read once: several saves may be planned on several threads
        if cached is not None and cached[0] == state.structure:
            return cached[1]
        if self.coordinator.world_size == 1:
            check_whole(state)
        io = self.options.io
        plan = plan_save(
            state,
            slab_bytes=io.slab_bytes,
            file_bytes=io.file_bytes,
            payload_alignment=self._payload_alignment,
        )
        self._plan = (state.structure, plan)
        return plan

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

    def release_memory(self) -> None:
        """Let go of the staging pool and of the state's tensors, at the end."""
        self.pool.close()
        self._program = None

    async def begin_attempt(self, entry: StepEntry, nonce: str, number: int) -> Attempt:
        """Return a new attempt at a step for the save of that *number*; garbage collection leaves it alone."""
        attempt = await self.lineage.begin_attempt(entry, nonce, number)
        self.busy_attempts.add(attempt.attempt)
        return attempt

    @cached_property
    def accelerator(self) -> Accelerator:
        """The devices that tensors may be on; asked for by who copies, in the nearest tier's engine."""
        if self.world.accelerator is not None:
            return self.world.accelerator
        from aiockpt.runtime.cuda import Cuda

        return Cuda()

    @property
    def being_read(self) -> frozenset[str]:
        """The ids of steps that this process is reading."""
        return frozenset(self._reading)

    @asynccontextmanager
    async def reading(self, step_id: str) -> AsyncIterator[None]:
        """Keep retention, here and in other processes, away from a step for the length of the block."""
        key = lease_key(step_id, self.token(6))
        self.hold(step_id)
        leased = await self._lease(key)
        try:
            yield
        finally:
            self.let_go(step_id)
            if leased:
                with anyio.move_on_after(10, shield=True):
                    await self._release(key)

    def hold(self, step_id: str) -> None:
        """Keep this process's retention away from a step until `let_go`. On the loop."""
        self._reading[step_id] = self._reading.get(step_id, 0) + 1

    def let_go(self, step_id: str) -> None:
        """Take one `hold` back."""
        self._reading[step_id] -= 1
        if not self._reading[step_id]:
            del self._reading[step_id]

    async def _lease(self, key: str) -> bool:
        try:
            await self.backend.put(key, b"")
        except CheckpointError:
            return False  # a read-only place: nobody deletes there either
        return True

    async def _release(self, key: str) -> None:
        try:
            await self.backend.delete([key])
        except CheckpointError as error:
            logger.info("lease %s is left to expire: %s", key, error)

    def uploads_are_due(self) -> bool:
        """Say whether it is time to look for uploads that dead saves left: after the first save, then each hour."""
        last_ns, now_ns = self._looked_for_uploads_ns, self.now_ns()
        if last_ns is not None and now_ns - last_ns < UPLOADS_EVERY_S * 1e9:
            return False
        self._looked_for_uploads_ns = now_ns
        return True

    def token(self, size: int) -> str:
        """Return *size* random bytes as hex."""
        return self.world.token(size).hex()

    def now_ns(self) -> int:
        """Return the monotonic time."""
        return self.world.clock.monotonic_ns()

    def since_s(self, begun_ns: int) -> float:
        """Return the seconds since *begun_ns*."""
        return (self.now_ns() - begun_ns) / 1e9

    def emit(self, event: Event) -> None:
        """Show *event* to every observer. One that raises is dropped, with a log line; it never harms a save."""
        for observer in list(self._observers):
            try:
                observer.on_event(event)
            except Exception:
                self._observers.remove(observer)
                logger.exception("observer %r raised and is not called again", observer)
