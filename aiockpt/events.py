"""Event structs (frozen), and the protocol of their observers.

Events are emitted on the engine's loop thread, those of one save in the order in which they happened. An observer must
return quickly, and queue longer work. One that raises is logged once, is not called again, and never harms a save. An
observer with work of its own, such as writing a file, is a `BackgroundTask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something happened to *step* (-1: to no particular step) at *at_ns* (monotonic)."""

    at_ns: int
    step: int = -1


class Opened(Event, frozen=True, tag=True):
    """A checkpointer was made; the first event of each.

    Attributes:
        time_ns: the wall clock at *at_ns*, so that the events of several processes can be laid side by side.
        urls: of its places, the nearest first, without credentials.
        mesh: the rank's coordinates in the named dimensions of a mesh (dp, tp, pp, …), where `TraceFile` was given them.
        process: random, the same for all checkpointers of one process; containers reuse a *pid*.
    """

    time_ns: int
    pid: int
    host: str
    rank: int
    world_size: int
    urls: tuple[str, ...]
    mesh: dict[str, int] = {}
    process: str = ""


class Closed(Event, frozen=True, tag=True):
    """The checkpointer was closed, also by an exception or at interpreter exit; its last event. Not emitted on a kill."""


class Alive(Event, frozen=True, tag=True):
    """A sign of life after a while without events; written by the `aiockpt.monitor.TraceFile` of the first rank."""


class SaveStarted(Event, frozen=True, tag=True):
    """``save()`` was called *seconds* ago, and is registered; *bytes* in *tensor_count* tensors, without file headers.

    *metrics* are those of the call; in a trace, None where one was not finite.
    """

    bytes: int
    tensor_count: int
    seconds: float = 0.0
    metrics: Mapping[str, float | None] = {}


class SnapshotTaken(Event, frozen=True, tag=True):
    """The snapshot is complete: the state may change again.

    Attributes:
        bytes: of tensors.
        snapshot: how it was taken: "eager", "lazy" or "device".
        reason: why it was not made as requested; empty when it was.
        pause_s: how long the call held its caller.
        copy_s: how long the copy took, on whatever thread.
        copied_at_call_bytes: what a lazy snapshot copied in the call, because other code than optimizers changes it; with
            a snapshot on the device, all of it.
        seconds: since the call; 0 where that is not known.
    """

    bytes: int
    pause_s: float
    copy_s: float
    snapshot: Literal["eager", "lazy", "device"] = "eager"
    copied_at_call_bytes: int = 0
    reason: str = ""
    seconds: float = 0.0


class BarrierWaited(Event, frozen=True, tag=True):
    """An optimizer, or `Checkpointer.barrier`, was held for *seconds* until the snapshot of *step* was taken."""

    seconds: float


class BytesWritten(Event, frozen=True, tag=True):
    """Some windows, *bytes* with file headers, reached the storage in *seconds*, not flushed yet; *key* is the data file."""

    bytes: int
    key: str = ""
    seconds: float = 0.0


class DataWritten(Event, frozen=True, tag=True):
    """All data files are flushed, *seconds* after the call; only receipts and the manifest are missing."""

    bytes: int
    seconds: float


class Committed(Event, frozen=True, tag=True):
    """The checkpoint is durable and visible, *seconds* after the call."""

    bytes: int
    seconds: float
    generation: int


Operation = Literal["save", "load", "copy"]
"""The operation that a stage belongs to; a copy is one to another place."""


class StageEnded(Event, frozen=True, tag=True):
    """A stage of a save, a load or a copy has ended, *seconds* after it began; docs/guide/watch.md#stages lists all.

    Attributes:
        key: the data file or the place; empty for a stage of the whole step.
        bytes: that it moved.
        hash_s: seconds of hashing, summed over all worker threads.
        failed: whether it ended with an error.
        error: that error's repr, or a note that the stage was abandoned because something else failed.
    """

    operation: Operation
    stage: str
    seconds: float
    key: str = ""
    bytes: int = 0
    hash_s: float = 0.0
    failed: bool = False
    error: str = ""


class NotFiniteFound(Event, frozen=True, tag=True):
    """This rank wrote numbers that are NaN or infinite; *tensors* has their count for each tensor with some."""

    tensors: dict[str, int]


class SaveFailed(Event, frozen=True, tag=True):
    """The save ended without a checkpoint. *error* is its repr; the exception itself is on the future."""

    error: str
    seconds: float


class SaveSkipped(Event, frozen=True, tag=True):
    """The save was not started; *reason* says why."""

    reason: str


class StepSkipped(Event, frozen=True, tag=True):
    """``load`` skipped this step; *reason* says why."""

    reason: str


class Loaded(Event, frozen=True, tag=True):
    """The state was filled: *bytes* of tensors, *read_bytes* from storage, in *seconds*.

    Attributes:
        saved_ns: when the step was saved, by the wall clock of the process that saved it; 0 where that is not known.
        forked_from: the step of another place, in words, that the run began from; a foreign checkpoint has the step -1.
    """

    bytes: int
    read_bytes: int
    seconds: float
    saved_ns: int = 0
    forked_from: str = ""


CANCELLED = "it was cancelled"
"""The *error* of a load that its program has cancelled."""


class LoadFailed(Event, frozen=True, tag=True):
    """A ``load`` of *step*, or of the newest one (-1), failed after *seconds*; *error* is the exception, or `CANCELLED`."""

    error: str
    seconds: float

    @property
    def which(self) -> str:
        """The requested step, in words."""
        return "the newest step" if self.step < 0 else f"step {self.step}"


class Rewound(Event, frozen=True, tag=True):
    """The run was set back to *step*, which took *seconds* (`aiockpt.Rewind`): *bad_step* is bad.

    Attributes:
        reason: why it is bad, and *bad_rank* where that was found.
        skipped: batches after *step* that are not trained.
    """

    bad_step: int
    reason: str
    bad_rank: int
    skipped: int
    seconds: float


class StepDeleted(Event, frozen=True, tag=True):
    """Retention removed a step; *reason* says which rule did not keep it."""

    reason: str


class GarbageDeleted(Event, frozen=True, tag=True):
    """An attempt that was never committed, or an older generation, was removed."""

    key: str


class RolledForward(Event, frozen=True, tag=True):
    """A commit that its own job could not finish was finished from its receipts."""

    attempt: str


class StepRepaired(Event, frozen=True, tag=True):
    """Bad files of a step in the place *url*, those of these *keys*, were rewritten there from other copies."""

    url: str
    keys: tuple[str, ...]
    bytes: int


class StepDamaged(Event, frozen=True, tag=True):
    """A step in the place *url* is damaged, and no copy has the bad part; the step is marked, and loads skip it."""

    url: str
    problem: str


class PromotionQueued(Event, frozen=True, tag=True):
    """The step waits to be copied to the tier *url*; `Promoted` ends that, or a final `PromotionFailed`.

    Where *url* is the memory of hosts, it waits to be copied to other hosts; `Replicated`, also of a newer step, ends that.
    """

    url: str


class Promoted(Event, frozen=True, tag=True):
    """The step was copied to the tier *url*, *seconds* after it was committed in the first one."""

    url: str
    bytes: int
    seconds: float


class Replicated(Event, frozen=True, tag=True):
    """The step is in the memory of as many other hosts as ``Tier(copies=…)`` says, *seconds* after its commit there."""

    url: str
    seconds: float


class PromotionFailed(Event, frozen=True, tag=True):
    """The step could not be copied to the tier *url*: *error* is a repr. *final*: it is not retried."""

    url: str
    error: str
    final: bool


class VersionPublished(Event, frozen=True, tag=True):
    """The weights of the step were published in *seconds* as *version* of the place *url* (`aiockpt.Publish`).

    Attributes:
        kind: a "full" version, or a "delta" against the version before.
        bytes: of its files, for *weight_bytes* of weights.
        receivers: how many versions each living receiver is behind.
    """

    url: str
    version: int
    kind: Literal["full", "delta"]
    bytes: int
    weight_bytes: int
    seconds: float
    receivers: dict[str, int] = {}


class PublicationFailed(Event, frozen=True, tag=True):
    """The weights of the step could not be published at *url*: *error* is a repr."""

    url: str
    error: str


class StorageRetried(Event, frozen=True, tag=True):
    """The call *verb* on *key* failed with *error* (a repr) and is retried, as attempt *attempt*, after *wait_s*."""

    verb: str
    key: str
    error: str
    attempt: int
    wait_s: float


class StragglerFound(Event, frozen=True, tag=True):
    """A rank is slower than its peers, from *step* on; emitted by the `aiockpt.monitor.Heartbeat` of rank 0.

    Attributes:
        factor: its duration of *stage* ÷ the median of all ranks; the median over *steps* steps.
        extra_s: the same as a difference: how many seconds longer it takes each time.
        cause: the likely one.
    """

    rank: int
    host: str
    operation: Operation
    stage: str
    factor: float
    extra_s: float
    steps: int
    cause: str


class Observer(Protocol):
    """A receiver of events."""

    def on_event(self, event: Event) -> None:
        """Receive *event*; called on the loop thread, must return quickly."""


@runtime_checkable
class BackgroundTask(Observer, Protocol):
    """An observer with work of its own: the checkpointer runs it beside the engine, on the same loop.

    Its errors are logged and harm no save; after one it receives no more events.
    """

    async def run(self) -> None:
        """Work until `aclose`; starts as a task when the checkpointer is made, so before the first event."""

    async def aclose(self) -> None:
        """End: no more events come, and `run` must return soon. The checkpointer waits a minute for it, no longer."""


@runtime_checkable
class EventSource(Protocol):
    """An observer that emits events of its own; all observers of the checkpointer receive them."""

    def set_emitter(self, emit: Callable[[Event], object]) -> None:
        """Accept *emit*, which sends an event to all observers, on the loop thread only; called before the first event."""


class LimiterStatistics(msgspec.Struct, frozen=True):
    """A limiter at one instant: its name and limit, how many calls run and wait, and the most that ever ran."""

    name: str
    limit: int
    running: int
    waiting: int
    peak: int


class PoolStatistics(msgspec.Struct, frozen=True):
    """The pool at one instant: bytes allocated and their ceiling, slabs in use, the most ever in use, callers waiting."""

    slab_bytes: int
    ceiling_bytes: int
    allocated_bytes: int
    used_slabs: int
    peak_used_slabs: int
    waiting: int


class Statistics(msgspec.Struct, frozen=True):
    """A checkpointer at one instant: saves in flight, the staging pool, and the limiters of the write path."""

    saves_in_flight: int
    pool: PoolStatistics
    limiters: tuple[LimiterStatistics, ...]


@runtime_checkable
class StatisticsReader(Observer, Protocol):
    """An observer that also polls what a checkpointer uses at an instant."""

    def read_statistics(self, statistics: Callable[[], Statistics]) -> None:
        """Accept `aiockpt.Checkpointer.statistics`, which any thread may call; called when the checkpointer is made."""
