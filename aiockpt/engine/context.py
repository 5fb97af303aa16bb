"""State that operations share: all those of one checkpointer (`Engine`), and those on one place (`Place`).

An `Engine` has the loop, the pool, the lineage and the observers; a `Place` its storage, uploader and leases, and what
retention knows of it.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import BackgroundSaveError, CheckpointError
from aiockpt.events import Committed, Event, Observer, Operation, SnapshotTaken
from aiockpt.format.document import BLOCK_BYTES
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import lease_key
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.options import SHARED_BLOCK_BYTES, OnError, Options, Retention, Tier
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.discover import Heads, StepCopy, StepEntry
from aiockpt.pipeline.lineage import Lineage
from aiockpt.pipeline.upload import FileScreen, Uploader
from aiockpt.planning.shard_map import check_whole
from aiockpt.planning.write_plan import PAGE_BYTES, SavePlan, plan_save
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.host_memory import Memory
from aiockpt.runtime.limits import FileCalls, Limiter, Pace
from aiockpt.runtime.processes import ProcessNames
from aiockpt.runtime.promise import SavePromise
from aiockpt.runtime.slabs import Lender, SlabPool
from aiockpt.runtime.stages import Stages
from aiockpt.runtime.world import Loop, OsFiles, World
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying

if TYPE_CHECKING:
    import torch

    from aiockpt.pipeline.replica_samples import Sampling
    from aiockpt.pipeline.snapshot import CopyProgram  # a writer process copies no state, and need not load torch

logger = logging.getLogger("aiockpt")

REMEMBERED = 5
"""Saves over which medians of durations are taken."""


class DeviceBytes(dict["torch.device", int]):
    """How many bytes of some tensors each device has."""

    def __init__(
        self, device_of: Callable[[torch.Tensor], torch.device | None], tensors: Iterable[TensorShard]
    ) -> None:
        for shard in tensors:
            if (device := device_of(shard.data)) is not None:
                self[device] = self.get(device, 0) + shard.data.nbytes


# Failures: each is reported once, at the next request or at the end, as ``on_error`` says; the report never loses the save
# it interrupts (docs/decisions.md#a-failed-save-never-loses-the-next-one).


class Failures:
    """Failed saves, oldest first, until the caller has received them. Any thread.

    Args:
        policy: how they are reported.
        loop: its exit hook reports them at the latest. While there are some it is kept, with the checkpointer, for that.
        limit: how many are kept at most; all for None.
    """

    def __init__(self, policy: OnError, loop: Loop, limit: int | None = None) -> None:
        self._policy = policy
        self._loop = loop
        self._untold: deque[SaveFuture] = deque(maxlen=limit)

    def add(self, failed: SaveFuture) -> None:
        """Keep a save that has failed."""
        self._untold.append(failed)
        _with_untold.add(self)

    @property
    def log_level(self) -> int:
        """The level at which a failure is logged when it happens: the warning that follows is not to be the second."""
        return logging.INFO if self._policy == "warn" else logging.ERROR

    def report(self, just_started: SaveFuture | None = None) -> None:
        """Apply ``on_error`` to the failures not yet reported.

        Raises:
            BackgroundSaveError: the policy is "raise"; *just_started* was started all the same.
        """
        if self._untold:
            self._report(self.pop(just_started), just_started)

    def _report(self, failed: list[SaveFuture], just_started: SaveFuture | None) -> None:
        if failed and self._policy == "raise":
            raise BackgroundSaveError(failed, just_started) from failed[0].exception()
        for failure in failed:
            if callable(self._policy):
                self._policy(failure)
            else:
                warnings.warn(
                    f"the save of step {failure.step} failed: {failure.exception()!r}", RuntimeWarning, stacklevel=4
                )

    def pop(self, just_started: SaveFuture | None = None) -> list[SaveFuture]:
        """Return the failed saves whose error was not retrieved from their future, each once.

        One that this very call has started may have failed already: the next call reports it.
        """
        ended = []
        _with_untold.discard(self)  # first: another thread may add one meanwhile
        with suppress(IndexError):  # not by their number: another thread may take the last one
            while True:
                ended.append(self._untold.popleft())
        if just_started is not None and just_started in ended:
            self.add(just_started)
        return [future for future in ended if future is not just_started and not future.delivered]


_with_untold: set[Failures] = set()
"""Those with failures to report. A program may drop a checkpointer without closing it."""


class LastSaves:
    """The observer that measures the last saves of a checkpointer. On the loop."""

    def __init__(self) -> None:
        self._durable_s: deque[float] = deque(maxlen=REMEMBERED)
        self._pause_s: deque[float] = deque(maxlen=REMEMBERED)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._durable_s.append(event.seconds)
        elif isinstance(event, SnapshotTaken) and event.snapshot == "eager":
            self._pause_s.append(event.pause_s)

    @property
    def durable_s(self) -> float | None:
        """From the call to the commit; None before the first save."""
        return median(self._durable_s) if self._durable_s else None

    @property
    def pause_s(self) -> float | None:
        """How long an eager save held its caller; None before the first one."""
        return median(self._pause_s) if self._pause_s else None


class Engine:
    """The shared part of all operations of one checkpointer, whatever the place (`aiockpt.engine.context`).

    Args:
        rank, world_size: which this process is of those that save and load together.
        memory: of the staging pool; that of this process alone for None.
        lender: where written slabs are returned to; the pool for None.

    Attributes:
        now_ns: returns the monotonic time.
        lineage: the position of new saves among all others.
        block_bytes: of data files, under one checksum.
        names: of attempts, which tell their process; None in a simulation.
        calls: those of file systems that are under way.
        busy_attempts: nonces of attempts under way here; garbage collection skips them.
        differing_buffers: those that differed between ranks when that was logged.
        not_finite: tensors in which the last save found numbers that are not finite.
        refuses_not_finite: whether a step with such numbers is not to be committed.
        failures: the saves that have failed, until the caller has received them.
        last_saves: their durations.
        notify_abandoned: called with a step and an error, when a place with ``on_error="raise"`` has abandoned the step.
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
        self.now_ns = world.clock.monotonic_ns
        self.rank, self.world_size = rank, world_size
        self.pool = SlabPool(options.io.slab_bytes, options.io.pool_bytes, memory)
        self.lender: Lender = lender or self.pool
        self.lineage = Lineage(rank, world_size, lambda: self.token(6))
        alone = world_size == 1
        self.block_bytes = options.io.block_bytes or (BLOCK_BYTES if alone else SHARED_BLOCK_BYTES)
        # Ranks load ranges of rows: if the payload begins with a block, ranges of a power of two are whole blocks.
        self._payload_alignment = PAGE_BYTES if alone else max(PAGE_BYTES, self.block_bytes)
        self.names = ProcessNames() if isinstance(world.files, OsFiles) else None
        self.calls = FileCalls(options.deadlines.commit_s)
        self.busy_attempts: set[str] = set()
        self.differing_buffers: tuple[str, ...] = ()
        self.not_finite: frozenset[str] = frozenset()
        self.refuses_not_finite = False
        self.failures = Failures(options.on_error, loop)
        self.notify_abandoned: Callable[[int, BaseException], object] = self._note_abandoned
        self.state_work = Limiter("state", 2)
        self.last_saves = LastSaves()
        self._observers = [*observers, self.last_saves]

    def _note_abandoned(self, step: int, error: BaseException) -> None:
        promise = SavePromise(step)
        promise.fail(error)
        self.failures.add(SaveFuture(promise))

    def plan(self, state: ShardedState) -> SavePlan:
        """Return the plan for *state*: the cached one while its structure is the same. Any thread."""
        known = state.known
        return known.find(SavePlan, state.structure) or known.keep(self.make_plan(state), state.structure)

    def make_plan(self, state: ShardedState) -> SavePlan:
        """Return a new plan for *state*, and cache nothing. Any thread."""
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
        """Return a screen for each file of *plan*, used while it is written; empty without ``screen=``."""
        return [] if self.options.screen is None else list(map(FileScreen, plan.float_spans))

    def copy_program(self, plan: SavePlan, state: ShardedState, *, keep: bool = True) -> CopyProgram:
        """Return the copies of *plan*: the cached ones while no tensor has moved in memory. Any thread.

        Args:
            keep: whether the tensors will be there for the next save.
        """
        from aiockpt.pipeline.snapshot import CopyProgram

        program = state.known.find(CopyProgram, state.tensors)
        if program is None or program.plan is not plan:
            program = CopyProgram(plan, state.tensors, self.accelerator)
            if keep and program.in_place:
                state.known.keep(program, state.tensors)
        return program

    def sample_replicas(
        self, state: ShardedState, after: Sequence[tuple[torch.device, DeviceEvent]], *, keep: bool
    ) -> Sampling | None:
        """Begin to sample what this rank and others have of *state*; None where that is not compared."""
        if self.options.replicas == "first":
            return None
        from aiockpt.pipeline.replica_samples import ReplicaSamples

        samples = state.known.find(ReplicaSamples, state.replicas)
        if samples is None:
            samples = ReplicaSamples(state.replicas, self.accelerator, whole=self.options.lazy.debug == "digest")
            if keep:
                state.known.keep(samples, state.replicas)
        return samples.begin(after, self.options.deadlines.slab_s)

    def device_bytes(self, state: ShardedState) -> Mapping[torch.device, int]:
        """Return the bytes of the tensors of *state* on each device, without the host."""
        found = state.known.find(DeviceBytes, state.tensors)
        if found is None:
            found = state.known.keep(DeviceBytes(self.accelerator.device_of, state.tensors), state.tensors)
        return found

    def pin(self, state: ShardedState) -> None:
        """Have the slabs pinned for the devices of *state*, if they are not."""
        for device in self.device_bytes(state):
            self.pool.pin_with(self.accelerator.stream(device))

    def compute_events(self, state: ShardedState) -> list[tuple[torch.device, DeviceEvent]]:
        """Return the devices of *state*, each with an event after all work that the calling thread has queued there.

        A copy on a device begins after that event.
        """
        return [(device, self.accelerator.now(device)) for device in self.device_bytes(state)]

    def release_memory(self) -> None:
        """Release the staging pool, at the end."""
        self.pool.close()

    async def begin_attempt(self, entry: StepEntry, nonce: str, number: int) -> Attempt:
        """Return a new attempt at a step for the save of that *number*; garbage collection skips it."""
        attempt = await self.lineage.begin_attempt(entry, nonce, number)
        self.busy_attempts.add(attempt.attempt)
        return attempt

    @cached_property
    def accelerator(self) -> Accelerator:
        """The devices that tensors may be on; used by the thread that copies."""
        if self.world.accelerator is not None:
            return self.world.accelerator
        from aiockpt.runtime.cuda import Cuda

        return Cuda()

    def name_attempt(self, taken: Collection[str]) -> str:
        """Return the name of a new attempt that this process writes; a later one can tell that its writer has ended.

        Args:
            taken: those of the step's other attempts.
        """
        return (self.names and self.names.make(taken)) or self.token(6)

    def token(self, size: int) -> str:
        """Return *size* random bytes as hex."""
        return self.world.token(size).hex()

    def since_s(self, begun_ns: int) -> float:
        return (self.now_ns() - begun_ns) / 1e9

    def stages(self, operation: Operation, step: int) -> Stages:
        """Return the timer of the stages of one operation."""
        return Stages(self.emit, self.now_ns, operation, step)

    def emit(self, event: Event) -> None:
        """Send *event* to every observer. One that raises is dropped, with a log line; it never harms a save."""
        for observer in list(self._observers):
            try:
                observer.on_event(event)
            except Exception:
                self.drop(observer)
                logger.exception("observer %r raised and is not called again", observer)

    def add_observer(self, observer: Observer) -> None:
        """Send *observer* events from now on, too. Before the loop emits any."""
        self._observers.append(observer)

    def drop(self, observer: Observer) -> None:
        """Send *observer* no more events. On the loop."""
        self._observers = [one for one in self._observers if one is not observer]


# State that the operations on one place share: storage, uploader, readers, what retention knows of it.


HINT_EVERY_S = 5.0
"""Between two reads of the hint after saves, for saves of another job: quick saves are not asked for each."""
UPLOADS_EVERY_S = 3600.0
"""Between two searches for uploads that dead saves left in an object store; they are a day old before they count."""


async def _is_ready() -> None: ...


async def no_other_copies(_: Manifest) -> Sequence[StepCopy]:
    """Return nothing: there is one place only."""
    return ()


class Place:
    """One root below which steps lie. Used on the engine's loop.

    Args:
        engine: what all places share.
        number: of this one, 0 is the nearest.
        retention: what is kept here; None keeps all.

    Attributes:
        cleaning: held by each operation that deletes here.
        heads: what retention has read of the steps here.
        thin_steps: (id, generation) of the steps that are known to have their weights alone here.
        newest_saved: the save that was committed last by this process.
        other_copies: finds the same save in other places, the nearest first, for what is damaged here.
        ready: waits until what is here can be seen; the memory of other hosts, as soon as all ranks have come.
        follow: called with the promise of each save to here, where copies of it are made in other hosts' memory.
    """

    def __init__(self, engine: Engine, backend: Backend, number: int = 0, retention: Retention | None = None) -> None:
        self.engine = engine
        self.backend = backend
        self.number = number
        self.retention = retention
        pace = Pace(engine.options.io.bandwidth, engine.world.clock)
        self.uploader = Uploader(backend, engine.lender, engine.block_bytes, pace)
        self.cleaning = anyio.Lock()
        self.heads = Heads()
        self.newest_saved: SaveResult | None = None
        self.thin_steps: set[tuple[str, int]] = set()
        self.other_copies: Callable[[Manifest], Awaitable[Sequence[StepCopy]]] = no_other_copies
        self.ready: Callable[[], Awaitable[object]] = _is_ready
        self.follow: Callable[[SavePromise], object] = lambda promise: None
        self.fraction_here: Callable[[], float] = lambda: 1.0
        self._listed_uploads_ns: int | None = None
        self._read_hint_ns: int | None = None
        self._reading: dict[str, int] = {}
        # Its steps count for the order of saves; `Checkpointer._load_fork` removes a place that is only read from.
        engine.lineage.places.append(backend)
        if isinstance(backend, Retrying):
            backend.add_listener(engine.emit)

    @property
    def being_read(self) -> frozenset[str]:
        """The ids of steps that this process is reading."""
        return frozenset(self._reading)

    @asynccontextmanager
    async def reading(self, step_id: str) -> AsyncIterator[None]:
        """Protect a step from retention, here and in other processes, for the length of the block."""
        with self.pinning(step_id):
            async with self._leasing(self._new_lease(step_id), b"", must=False):
                yield

    @asynccontextmanager
    async def holding(self, step_id: str, who: bytes) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Do so for a reader outside this process, and yield the function that renews the lease.

        Args:
            who: written into the lease, to show people why a step is kept.

        Raises:
            StorageError: the lease cannot be written, so that it would have no effect.
        """
        key = self._new_lease(step_id)

        async def renew() -> None:
            try:
                await self.backend.put(key, who)
            except CheckpointError as error:
                logger.warning("lease %s cannot be renewed now: %s", key, error)

        with self.pinning(step_id):
            async with self._leasing(key, who, must=True):
                yield renew

    def _new_lease(self, step_id: str) -> str:
        return lease_key(step_id, self.engine.token(6))

    @contextmanager
    def pinning(self, step_id: str) -> Iterator[None]:
        """Protect a step for the length of the block."""
        self.protect(step_id)
        try:
            yield
        finally:
            self.unprotect(step_id)

    def protect(self, step_id: str) -> None:
        """Protect a step from this process's retention until `unprotect`. On the loop."""
        self._reading[step_id] = self._reading.get(step_id, 0) + 1

    def unprotect(self, step_id: str) -> None:
        """Undo one `protect`."""
        self._reading[step_id] -= 1
        if not self._reading[step_id]:
            del self._reading[step_id]

    @asynccontextmanager
    async def _leasing(self, key: str, who: bytes, *, must: bool) -> AsyncIterator[None]:
        """Hold the lease *key* for the length of the block; without *must*, continue where it cannot be written."""
        leased = True
        try:
            try:
                await self.backend.put(key, who)
            except CheckpointError:
                leased = False  # a read-only place: nothing is deleted there either
                if must:
                    raise
            yield
        finally:  # also when the put was cancelled: the lease may be there
            if leased:
                with anyio.move_on_after(10, shield=True):
                    await self._release(key)

    async def _release(self, key: str) -> None:
        try:
            await self.backend.delete([key])
        except CheckpointError as error:
            logger.info("lease %s is left to expire: %s", key, error)

    def hint_is_due(self) -> bool:
        """Return whether it is time to read the hint here that this process has moved: some seconds after the last time."""
        last_ns, now_ns = self._read_hint_ns, self.engine.now_ns()
        if last_ns is None or now_ns - last_ns >= HINT_EVERY_S * 1e9:
            self._read_hint_ns = now_ns
            return last_ns is not None
        return False

    def uploads_are_due(self) -> bool:
        """Return whether it is time to list uploads that dead saves left: after the first save, then each hour."""
        last_ns, now_ns = self._listed_uploads_ns, self.engine.now_ns()
        if last_ns is not None and now_ns - last_ns < UPLOADS_EVERY_S * 1e9:
            return False
        self._listed_uploads_ns = now_ns
        return True


def retention_of(tier: Tier, backend: Backend, farther: Sequence[Backend] = ()) -> Retention | None:
    """Return what is kept in a tier: all by default, in hosts' memory two steps, in memory before a durable tier one."""
    if tier.keep is None and backend.traits.scope == "hosts":
        return Retention(last=2)
    if tier.keep is None and not backend.traits.durable and any(other.traits.durable for other in farther):
        return Retention(last=1)
    return tier.retention
