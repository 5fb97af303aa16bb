"""Event structs (frozen), and the protocol of their observers.

Events are emitted on the engine's loop thread, in the order in which things happened to one save. An observer must be
quick (hand longer work to a queue of its own); one that raises is reported once and never harms a save. One with work to
do beside that, such as writing a file, is a `BackgroundTask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something happened at *at_ns* (monotonic) to *step* (-1: to no step in particular)."""

    at_ns: int
    step: int = -1


class Opened(Event, frozen=True, tag=True):
    """A checkpointer was made; the first event of each.

    Attributes:
        time_ns: the wall clock at *at_ns*, so that the events of several processes can be laid side by side.
        urls: of its places, the nearest first, without credentials.
        mesh: the rank's coordinates in the named dimensions of a mesh (dp, tp, pp, …), where `TraceFile` was given them.
        process: random, the same for all checkpointers of a process: containers give the same *pid* again.
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
    """No event came for a while, and the process lives: `aiockpt.monitor.TraceFile` of the first rank writes it."""


class SaveStarted(Event, frozen=True, tag=True):
    """``save()`` was called *seconds* ago, and is registered; *bytes* in *tensor_count* tensors, without file headers."""

    bytes: int
    tensor_count: int
    seconds: float = 0.0


class SnapshotTaken(Event, frozen=True, tag=True):
    """The state may change again.

    Attributes:
        bytes: of tensors.
        snapshot: how it was taken: "eager", "lazy" or "device".
        reason: why it was not made as requested; empty when it was.
        pause_s: how long the call held its caller.
        copy_s: how long the copy took, on whatever thread.
        copied_at_call_bytes: of a lazy snapshot, copied in the call because other things than optimizers change it; of one
            on the device, all of it.
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
    """All data files are flushed, *seconds* after the call; only votes and the manifest are missing."""

    bytes: int
    seconds: float


class Committed(Event, frozen=True, tag=True):
    """The checkpoint is durable and visible, *seconds* after the call."""

    bytes: int
    seconds: float
    generation: int


Operation = Literal["save", "load", "copy"]
"""What a stage belongs to; a copy is one to another place."""


class StageEnded(Event, frozen=True, tag=True):
    """A stage of a save, a load or a copy has ended, *seconds* after it began; docs/guide/watch.md#stages has them all.

    Attributes:
        key: the data file or the place; empty for all of the step.
        bytes: that it moved.
        hash_s: that worker threads hashed, all of them in sum.
        failed: whether it ended with an error.
        error: that error's repr, or that it was given up because something else failed.
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
    """What this rank wrote of the step has numbers that are NaN or infinite: so many in each of these *tensors*."""

    tensors: dict[str, int]


class SaveFailed(Event, frozen=True, tag=True):
    """The save ended without a checkpoint. *error* is its repr; the exception itself is on the future."""

    error: str
    seconds: float


class SaveSkipped(Event, frozen=True, tag=True):
    """The save was not started; *reason* says why."""

    reason: str


class StepSkipped(Event, frozen=True, tag=True):
    """``load`` did not take this step; *reason* says why."""

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


class LoadFailed(Event, frozen=True, tag=True):
    """A ``load`` of *step*, or of the newest one (-1), has raised *error*, in one line, after *seconds*."""

    error: str
    seconds: float

    @property
    def which(self) -> str:
        """What was to be loaded, in words."""
        return "the newest step" if self.step < 0 else f"step {self.step}"


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
    """What was bad of a step in the place *url* was written anew there, from other copies: the files of these *keys*."""

    url: str
    keys: tuple[str, ...]
    bytes: int


class StepDamaged(Event, frozen=True, tag=True):
    """A step in the place *url* is not what was saved, and no copy has what is bad; it is marked, and loads skip it."""

    url: str
    problem: str


class PromotionQueued(Event, frozen=True, tag=True):
    """The step waits to be copied to the tier *url*; `Promoted` ends that, or a final `PromotionFailed`."""

    url: str


class Promoted(Event, frozen=True, tag=True):
    """The step is in the tier *url* now, too, *seconds* after it was committed in the first one."""

    url: str
    bytes: int
    seconds: float


class PromotionFailed(Event, frozen=True, tag=True):
    """The step could not be copied to the tier *url*: *error* is a repr. *final*: it is not tried again."""

    url: str
    error: str
    final: bool


class StorageRetried(Event, frozen=True, tag=True):
    """The call *verb* on *key* failed with *error* (a repr) and is made again, as attempt *attempt*, after *wait_s*."""

    verb: str
    key: str
    error: str
    attempt: int
    wait_s: float


class StragglerFound(Event, frozen=True, tag=True):
    """A rank is slower than its peers, from *step* on; emitted by the `aiockpt.monitor.Heartbeat` of rank 0.

    Attributes:
        factor: how many times as long as the median of all ranks it takes for *stage*, in the median of *steps* steps.
        extra_s: how much longer that is, each time.
        cause: what is likely.
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
    """Anything that wants to know."""

    def on_event(self, event: Event) -> None:
        """Take *event*; called on the loop thread, must return quickly."""


@runtime_checkable
class BackgroundTask(Observer, Protocol):
    """An observer with work of its own: the checkpointer runs it beside the engine, on the same loop.

    What goes wrong in it is logged and harms no save.
    """

    async def run(self) -> None:
        """Work until `aclose`; a task from when the checkpointer is made, so before the first event."""

    async def aclose(self) -> None:
        """End: no event will come any more, and `run` ends soon. The checkpointer waits a minute for it, no longer."""


@runtime_checkable
class EventSource(Protocol):
    """An observer that emits events of its own; all observers of the checkpointer receive them."""

    def tell_through(self, emit: Callable[[Event], object]) -> None:
        """Take what shows an event to all observers, to be called on the loop thread; before the first event."""


class LimiterStatistics(msgspec.Struct, frozen=True):
    """A limiter at one instant: what it is for, how many may run, run, and wait, and the most that ever ran."""

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
    """An observer that wants to know what a checkpointer uses at this instant, too."""

    def read_statistics(self, statistics: Callable[[], Statistics]) -> None:
        """Take `aiockpt.Checkpointer.statistics`, which any thread may call; when the checkpointer is made."""
