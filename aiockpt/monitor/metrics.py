"""Metrics for dashboards: the events of a checkpointer as metrics of Prometheus, or as scalars by step.

`Metrics` counts into a registry of ``prometheus_client``, which serves it (``start_http_server(9464, addr="127.0.0.1")``) or
pushes it. Values of an instant (memory in use, queues, ages) are read when the registry is collected, on the collecting
thread. `Scalars` passes numbers with their step to a function: TensorBoard, W&B and MLflow have one each.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from aiockpt.errors import UsageError
from aiockpt.events import (
    BarrierWaited,
    BytesWritten,
    Committed,
    Event,
    Loaded,
    LoadFailed,
    NotFiniteFound,
    Opened,
    Promoted,
    PromotionFailed,
    PromotionQueued,
    PublicationFailed,
    Replicated,
    Rewound,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    SnapshotTaken,
    StageEnded,
    StepDamaged,
    StepRepaired,
    StorageRetried,
    VersionPublished,
)
from aiockpt.runtime.progress import read_figures

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aiockpt.events import Statistics


class RunTime:
    """The use of the time of one process, from the events of its checkpointer. Updated on the loop thread, read on any.

    Time runs from the save of the step that this process resumed from, else from the creation of its checkpointer. *Lost*
    time lies between that save and this start: repeated work and downtime. *Held* time is that of calls of save, of
    optimizer waits and of loads; *thrown* time is what a rewind took back, from the save of the step that it went back to.
    The rest is trained (ETTR, effective training time ratio; goodput). For a run with many restarts, ``aiockpt report``
    reads the trace.
    """

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._held_s = self._lost_s = self._thrown_s = 0.0
        self._saves: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_SAVES)
        """Step, and the seconds that were trained when its save began."""
        self._resumed = False
        self._durable_from_ns: int | None = None

    def receive(self, event: Event) -> None:
        match event:
            case Opened():
                self._opened, self._durable_from_ns = event, event.at_ns
                self._held_s = self._lost_s = self._thrown_s = 0.0
                self._saves.clear()
                self._resumed = False
            case SaveStarted():
                self._saves.append((event.step, self._trained_s(event.at_ns - round(event.seconds * 1e9))))
            case Rewound():
                self._go_back(event)
            case SnapshotTaken():
                self._held_s += event.pause_s
            case BarrierWaited():
                self._held_s += event.seconds
            case Committed():
                self._durable_from_ns = event.at_ns - round(event.seconds * 1e9)
                self._resumed = True
            case Loaded():
                self._held_s += event.seconds
                self._durable_from_ns = event.at_ns
                self._resume(event)

    def _resume(self, event: Loaded) -> None:
        """Treat the first load as the resume of this process, unless a save came before it."""
        if not self._resumed and self._opened is not None and event.saved_ns:
            self._lost_s = max((self._opened.time_ns - event.saved_ns) / 1e9, 0.0)
        self._resumed = True

    def _go_back(self, event: Rewound) -> None:
        """Have trained as much as when the save of the step began that the run went back to."""
        trained_s = 0.0
        while self._saves and self._saves[-1][0] >= event.step:
            step, trained_s = self._saves.pop()
            trained_s = trained_s if step == event.step else 0.0
        self._saves.append((event.step, trained_s))
        self._thrown_s += self._trained_s(event.at_ns) - trained_s

    def _trained_s(self, now_ns: int) -> float:
        here_s = 0.0 if self._opened is None else (now_ns - self._opened.at_ns) / 1e9
        return max(here_s - self._held_s - self._thrown_s, 0.0)

    def wall_s(self, at_ns: int) -> float:
        """Return the wall clock, in seconds since 1970, at a time of the monotonic one."""
        return 0.0 if self._opened is None else (self._opened.time_ns + at_ns - self._opened.at_ns) / 1e9

    def effective(self, now_ns: int) -> float:
        """Return the trained fraction of the time, from 0 to 1."""
        here_s = 0.0 if self._opened is None else (now_ns - self._opened.at_ns) / 1e9
        return self._trained_s(now_ns) / (here_s + self._lost_s) if here_s > 0 else 1.0

    def lost_s(self, _: int) -> float:
        """Return the seconds from the save of the loaded step to this start."""
        return self._lost_s

    def at_risk_s(self, now_ns: int) -> float:
        """Return the seconds of work that a crash would lose now."""
        return 0.0 if self._durable_from_ns is None else (now_ns - self._durable_from_ns) / 1e9


logger = logging.getLogger("aiockpt")

REMEMBERED_SAVES = 1024
"""Whose begin is known, for a rewind."""
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends of the buckets of times."""


_METRICS: tuple[tuple[str, ...], ...] = (
    ("Counter", "saves", "Saves, by how they ended.", "outcome"),
    ("Counter", "loads", "Loads, by how they ended.", "outcome"),
    ("Gauge", "saves_in_flight", "Saves that have begun and not ended."),
    ("Histogram", "pause_seconds", "A call of save held its caller."),
    ("Histogram", "barrier_seconds", "An optimizer was held."),
    ("Histogram", "durable_seconds", "From the call to the commit."),
    ("Histogram", "stage_seconds", "Of a stage.", "operation", "stage"),
    ("Counter", "written_bytes", "Bytes that reached the storage."),
    ("Counter", "read_bytes", "Bytes that loads read from storage."),
    ("Gauge", "durable_step", "The last step that was committed."),
    ("Gauge", "durable_timestamp_seconds", "When that was, since 1970."),
    ("Counter", "saves_not_finite", "Saves with NaN or infinite numbers."),
    ("Counter", "rewinds", "Times that the run was set back from a bad step."),
    ("Counter", "repairs", "Damaged steps that a repair found, by what came of them.", "outcome"),
    ("Counter", "storage_retries", "Retried calls to storage.", "verb"),
    ("Counter", "copies", "Copies to farther places, by how they ended.", "url", "outcome"),
    ("Gauge", "copy_lag_seconds", "Of the last copy, from its commit on.", "url"),
    ("Counter", "publications", "Versions of the weights, by how they ended.", "url", "outcome"),
    ("Counter", "published_bytes", "Bytes of the files of versions.", "url"),
    ("Gauge", "published_step", "Of the newest version.", "url"),
    ("Gauge", "published_seconds", "Its publication took.", "url"),
    ("Gauge", "receiver_lag", "Versions that a receiver was behind it.", "url", "receiver"),
    ("Counter", "loaded_bytes", "Bytes of the tensors that loads filled."),
    ("Gauge", "load_read_ratio", "Bytes read over bytes filled, last load."),
    ("Gauge", "copies_waiting", "Steps a farther place still lacks.", "url"),
    ("Gauge", "copies_waiting_seconds", "The oldest of them waits.", "url"),
    ("Gauge", "effective_ratio", "Of the time since what was loaded was saved: trained."),
    ("Gauge", "lost_seconds", "From when what was loaded was saved to this start."),
    ("Gauge", "at_risk_seconds", "Work that a crash would lose now."),
    ("Gauge", "pool_bytes", "Of the staging pool.", "state"),
    ("Gauge", "pool_waiting", "Copies that wait for staging memory."),
    ("Gauge", "writes", "Calls that write blocks.", "state"),
)
"""Kind, name behind ``aiockpt_``, help, and labels, in the order in which a registry shows them."""
_OF_TIME: dict[str, Callable[[RunTime, int], float]] = {
    "effective_ratio": RunTime.effective,
    "lost_seconds": RunTime.lost_s,
    "at_risk_seconds": RunTime.at_risk_s,
}
_OF_STATISTICS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("pool_bytes", "used", lambda now: now.pool.used_slabs * now.pool.slab_bytes),
    ("pool_bytes", "allocated", lambda now: now.pool.allocated_bytes),
    ("pool_bytes", "limit", lambda now: now.pool.ceiling_bytes),
    ("pool_waiting", "", lambda now: now.pool.waiting),
    ("writes", "running", lambda now: sum(limiter.running for limiter in now.limiters)),
    ("writes", "waiting", lambda now: sum(limiter.waiting for limiter in now.limiters)),
    ("writes", "limit", lambda now: sum(limiter.limit for limiter in now.limiters)),
)


class Metrics:
    """Counts events; add it to one checkpointer: ``Checkpointer(…, observers=[Metrics()])``.

    Args:
        registry: of ``prometheus_client``; None is its default one, which holds the metrics of one checkpointer.

    Raises:
        UsageError: ``prometheus_client`` is not installed, or the registry has another checkpointer's metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise UsageError("Metrics() needs prometheus_client: pip install prometheus-client") from error
        to = prometheus.REGISTRY if registry is None else registry
        self._metrics: dict[str, Any] = {}
        for kind, name, what, *labels in _METRICS:
            buckets = {"buckets": SECONDS} if kind == "Histogram" else {}
            try:
                metric = getattr(prometheus, kind)(f"aiockpt_{name}", what, labels, registry=to, **buckets)
            except ValueError as error:
                raise UsageError(
                    "Metrics(): this registry has the metrics of another checkpointer already. Reuse that Metrics after "
                    "its checkpointer is closed, or use a separate registry, Metrics(CollectorRegistry()), "
                    "which Endpoint(registry=…) serves"
                ) from error
            self._metrics[name] = metric
        self._queues: dict[str, dict[int, int]] = defaultdict(dict)
        """URL → step that waits to be copied there → since when, monotonic."""
        self._begun: Counter[int] = Counter()
        """Step → saves of it that are under way."""
        self._time = RunTime()
        for name, of_time in _OF_TIME.items():
            self._metrics[name].set_function(partial(self._now, of_time))
        self._handlers = self._table()
        to.register(_RestartCollector())

    def read_statistics(self, statistics: Callable[[], Statistics]) -> None:
        """Read *statistics* whenever the registry is collected, as long as the checkpointer exists."""
        read = weakref.WeakMethod(statistics)

        def now(of: Callable[[Statistics], float]) -> float:
            found = read()
            return 0.0 if found is None else of(found())

        for name, state, of in _OF_STATISTICS:
            metric = self._metrics[name]
            (metric.labels(state) if state else metric).set_function(partial(now, of))

    def _now(self, of_time: Callable[[RunTime, int], float]) -> float:
        return of_time(self._time, time.monotonic_ns())

    def on_event(self, event: Event) -> None:
        self._time.receive(event)
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(event)

    def _table(self) -> dict[type[Event], Callable[[Any], object]]:
        metrics = self._metrics
        return {
            SaveStarted: self._on_started,
            SnapshotTaken: lambda taken: metrics["pause_seconds"].observe(taken.pause_s),
            BarrierWaited: lambda waited: metrics["barrier_seconds"].observe(waited.seconds),
            BytesWritten: lambda written: metrics["written_bytes"].inc(written.bytes),
            StageEnded: lambda ended: (
                metrics["stage_seconds"].labels(ended.operation, ended.stage).observe(ended.seconds)
            ),
            Committed: self._on_committed,
            SaveFailed: lambda failed: self._end(failed, "failed"),
            SaveSkipped: lambda skipped: self._end(skipped, "skipped"),
            Loaded: self._on_loaded,
            LoadFailed: lambda failed: metrics["loads"].labels("failed").inc(),
            Rewound: lambda rewound: metrics["rewinds"].inc(),
            NotFiniteFound: lambda found: metrics["saves_not_finite"].inc(),
            StepRepaired: lambda repaired: metrics["repairs"].labels("repaired").inc(),
            StepDamaged: lambda damaged: metrics["repairs"].labels("left").inc(),
            StorageRetried: lambda retried: metrics["storage_retries"].labels(retried.verb).inc(),
            Promoted: self._on_copied,
            Replicated: self._on_copied,
            PromotionQueued: self._on_queued,
            PromotionFailed: self._on_not_promoted,
            VersionPublished: self._on_published,
            PublicationFailed: lambda failed: metrics["publications"].labels(failed.url, "failed").inc(),
        }

    def _on_committed(self, event: Committed) -> None:
        self._end(event, "committed")
        self._metrics["durable_seconds"].observe(event.seconds)
        self._metrics["durable_step"].set(event.step)
        self._metrics["durable_timestamp_seconds"].set(self._time.wall_s(event.at_ns))

    def _on_loaded(self, event: Loaded) -> None:
        self._metrics["loads"].labels("loaded").inc()
        self._metrics["read_bytes"].inc(event.read_bytes)
        self._metrics["loaded_bytes"].inc(event.bytes)
        if event.bytes:
            self._metrics["load_read_ratio"].set(event.read_bytes / event.bytes)

    def _on_copied(self, event: Promoted | Replicated) -> None:
        self._metrics["copies"].labels(event.url, "committed").inc()
        self._metrics["copy_lag_seconds"].labels(event.url).set(event.seconds)
        queue = self._queues[event.url]
        overtaken = [step for step in queue if step < event.step] if isinstance(event, Replicated) else []
        for step in (event.step, *overtaken):
            queue.pop(step, None)

    def _on_published(self, event: VersionPublished) -> None:
        self._metrics["publications"].labels(event.url, event.kind).inc()
        self._metrics["published_bytes"].labels(event.url).inc(event.bytes)
        self._metrics["published_step"].labels(event.url).set(event.step)
        self._metrics["published_seconds"].labels(event.url).set(event.seconds)
        for receiver, behind in event.receivers.items():
            self._metrics["receiver_lag"].labels(event.url, receiver).set(behind)

    def _on_queued(self, event: PromotionQueued) -> None:
        queue = self._queues[event.url]
        queue[event.step] = event.at_ns
        self._metrics["copies_waiting"].labels(event.url).set_function(lambda: len(queue))
        self._metrics["copies_waiting_seconds"].labels(event.url).set_function(lambda: _age_s(queue))

    def _on_not_promoted(self, event: PromotionFailed) -> None:
        self._metrics["copies"].labels(event.url, "failed").inc()
        if event.final:
            self._queues[event.url].pop(event.step, None)

    def _on_started(self, event: SaveStarted) -> None:
        self._begun[event.step] += 1
        self._metrics["saves_in_flight"].inc()

    def _end(self, event: Event, outcome: str) -> None:
        """Count the end of a save. A skipped save may have begun (where its step was already committed) or not."""
        self._metrics["saves"].labels(outcome).inc()
        if self._begun[event.step]:
            self._begun[event.step] -= 1
            self._metrics["saves_in_flight"].dec()
        self._begun += Counter()  # drops those that are 0


def _age_s(queue: Mapping[int, int]) -> float:
    """Return how long the oldest in *queue* has waited; 0 where nothing waits. Any thread."""
    # list() copies without giving the interpreter away: the loop thread changes the queue meanwhile.
    return max(((time.monotonic_ns() - since_ns) / 1e9 for since_ns in list(queue.values())), default=0.0)


class _RestartCollector:
    """A collector of what the launcher of this process tells (`aiockpt.launch`): of nothing, where there is none."""

    def collect(self) -> Iterator[Any]:
        """Yield its metrics, for ``prometheus_client``."""
        from prometheus_client.core import GaugeMetricFamily

        figures = read_figures()
        if figures is None:
            return
        restarts = GaugeMetricFamily("aiockpt_launch_restarts", "By what came before them.", labels=["reason"])
        for reason, count in figures.restarts.items():
            restarts.add_metric([reason], count)
        took = GaugeMetricFamily("aiockpt_launch_seconds", "Of the phases of the last restart.", labels=["phase"])
        for phase in ("notice", "decide", "restart", "first_step"):
            took.add_metric([phase], getattr(figures, f"{phase}_s"))
        yield from (restarts, took)
        yield GaugeMetricFamily("aiockpt_launch_lost_steps", "That restarts have repeated.", figures.lost_steps)
        yield GaugeMetricFamily("aiockpt_launch_lost_seconds", "Of work, in all restarts.", figures.lost_s)
        yield GaugeMetricFamily(
            "aiockpt_launch_effective_ratio", "Of the time since the launch: trained.", figures.ettr
        )


class Scalars:
    """Passes numbers of each step to *log*, on a worker thread, so that it may be slow.

    Args:
        log: called with values by name, such as ``{"checkpoint/pause_s": 0.07}``, and their step. If it raises,
            the error is logged and it is not called again.
    """

    def __init__(self, log: Callable[[Mapping[str, float], int], object]) -> None:
        self._log = log
        self._queue: deque[tuple[dict[str, float], int]] = deque()
        self._news = anyio.Event()
        self._ending = False

    def on_event(self, event: Event) -> None:
        """Queue the numbers of *event*."""
        values = _numbers(event)
        if values:
            self._queue.append(({f"checkpoint/{name}": value for name, value in values.items()}, event.step))
            self._news.set()

    async def run(self) -> None:
        """Pass on the queued numbers, until `aclose`."""
        self._ending = False
        while not self._ending or self._queue:
            while self._queue:
                values, step = self._queue.popleft()
                await anyio.to_thread.run_sync(self._log, values, step)
            if not self._ending:
                # No await since the queue was seen empty: `on_event`, on this thread, cannot come between.
                self._news = anyio.Event()
                await self._news.wait()

    async def aclose(self) -> None:
        """Stop `run` after the queue is empty."""
        self._ending = True
        self._news.set()


def _numbers(event: Event) -> dict[str, float]:
    match event:
        case SnapshotTaken():
            return {"pause_s": event.pause_s, "copy_s": event.copy_s}
        case Committed():
            return {
                "durable_s": event.seconds,
                "bytes": event.bytes,
                "bytes_per_s": event.bytes / max(event.seconds, 1e-9),
            }
        case BarrierWaited():
            return {"barrier_s": event.seconds}
        case SaveFailed():
            return {"failed": 1.0}
        case Loaded():
            return {"load_s": event.seconds, "read_bytes": event.read_bytes}
        case Promoted() | Replicated():
            return {"copy_lag_s": event.seconds}
        case _:
            return {}
