"""Metrics for dashboards: the events of a checkpointer as metrics of Prometheus, or as scalars by step.

`Metrics` counts into a registry of ``prometheus_client``, which serves it (``start_http_server(9464, addr="127.0.0.1")``) or
pushes it. What is true of an instant only (memory in use, what waits, ages) is read when the registry is collected, on the
collecting thread. `Scalars` passes numbers with their step to a function: TensorBoard, W&B and MLflow have one each.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
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
    Promoted,
    PromotionFailed,
    PromotionQueued,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    SnapshotTaken,
    StageEnded,
    StepDamaged,
    StepRepaired,
    StorageRetried,
)
from aiockpt.monitor.run_time import RunTime

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aiockpt.events import Statistics

logger = logging.getLogger("aiockpt")

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends of the buckets of times."""


class Metrics:
    """Counts events; add it to one checkpointer: ``Checkpointer(…, observers=[Metrics()])``.

    Args:
        registry: of ``prometheus_client``; None is its default one, which holds the metrics of one checkpointer.

    Raises:
        UsageError: ``prometheus_client`` is not installed, or the registry has another one's metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise UsageError("Metrics() needs prometheus_client: pip install prometheus-client") from error
        to = prometheus.REGISTRY if registry is None else registry
        count, gauge, times = prometheus.Counter, prometheus.Gauge, prometheus.Histogram
        try:
            self._saves = count("aiockpt_saves", "Saves, by how they ended.", ["outcome"], registry=to)
        except ValueError as error:
            raise UsageError(
                "Metrics(): this registry has the metrics of another checkpointer already. Give that one's Metrics to the "
                "next one, too, when it is closed; or take a registry of its own, Metrics(CollectorRegistry()), which "
                "Endpoint(registry=…) serves"
            ) from error
        self._loads = count("aiockpt_loads", "Loads, by how they ended.", ["outcome"], registry=to)
        self._in_flight = gauge("aiockpt_saves_in_flight", "Saves that have begun and not ended.", registry=to)
        self._pause = times("aiockpt_pause_seconds", "A call of save held its caller.", registry=to, buckets=SECONDS)
        self._barrier = times("aiockpt_barrier_seconds", "An optimizer was held.", registry=to, buckets=SECONDS)
        self._durable = times("aiockpt_durable_seconds", "From the call to the commit.", registry=to, buckets=SECONDS)
        names = ["operation", "stage"]
        self._stage = times("aiockpt_stage_seconds", "Of a stage.", names, registry=to, buckets=SECONDS)
        self._written = count("aiockpt_written_bytes", "Bytes that reached the storage.", registry=to)
        self._read = count("aiockpt_read_bytes", "Bytes that loads read from storage.", registry=to)
        self._step = gauge("aiockpt_durable_step", "The last step that was committed.", registry=to)
        self._at = gauge("aiockpt_durable_timestamp_seconds", "When that was, since 1970.", registry=to)
        self._not_finite = count("aiockpt_saves_not_finite", "Saves with NaN or infinite numbers.", registry=to)
        self._scrubbed = count("aiockpt_scrub_found", "Damaged steps, by what came of them.", ["outcome"], registry=to)
        self._retries = count("aiockpt_storage_retries", "Calls to storage made again.", ["verb"], registry=to)
        places = ["url", "outcome"]
        self._copies = count("aiockpt_copies", "Copies to farther places, by how they ended.", places, registry=to)
        self._lag = gauge("aiockpt_copy_lag_seconds", "Of the last copy, from its commit on.", ["url"], registry=to)
        self._loaded = count("aiockpt_loaded_bytes", "Bytes of the tensors that loads filled.", registry=to)
        self._over_read = gauge("aiockpt_load_read_ratio", "Bytes read over bytes filled, last load.", registry=to)
        self._waiting = gauge("aiockpt_copies_waiting", "Steps a farther place still lacks.", ["url"], registry=to)
        self._behind = gauge("aiockpt_copies_waiting_seconds", "The oldest of them waits.", ["url"], registry=to)
        self._queues: dict[str, dict[int, int]] = defaultdict(dict)
        """URL → step that waits to be copied there → since when, monotonic."""
        self._begun: Counter[int] = Counter()
        """Step → saves of it that are under way."""
        self._time = RunTime()
        for name, what, of_time in (
            ("aiockpt_effective_ratio", "Of the time since what was loaded was saved: trained.", RunTime.effective),
            ("aiockpt_lost_seconds", "From when what was loaded was saved to this start.", RunTime.lost_s),
            ("aiockpt_at_risk_seconds", "Work that a crash would lose now.", RunTime.at_risk_s),
        ):
            gauge(name, what, registry=to).set_function(partial(self._now, of_time))
        self._use = {
            "pool": gauge("aiockpt_pool_bytes", "Of the staging pool.", ["state"], registry=to),
            "pool_waiting": gauge("aiockpt_pool_waiting", "Copies that wait for staging memory.", registry=to),
            "writes": gauge("aiockpt_writes", "Calls that write blocks.", ["state"], registry=to),
        }
        self._take = self._table()

    def read_statistics(self, statistics: Callable[[], Statistics]) -> None:
        """Read *statistics* whenever the registry is collected, as long as the checkpointer is there."""
        read = weakref.WeakMethod(statistics)

        def use(of: Callable[[Statistics], float]) -> Callable[[], float]:
            def now() -> float:
                found = read()
                return 0.0 if found is None else of(found())

            return now

        pool, writes = self._use["pool"], self._use["writes"]
        pool.labels("used").set_function(use(lambda now: now.pool.used_slabs * now.pool.slab_bytes))
        pool.labels("allocated").set_function(use(lambda now: now.pool.allocated_bytes))
        pool.labels("limit").set_function(use(lambda now: now.pool.ceiling_bytes))
        self._use["pool_waiting"].set_function(use(lambda now: now.pool.waiting))
        writes.labels("running").set_function(use(lambda now: sum(one.running for one in now.limiters)))
        writes.labels("waiting").set_function(use(lambda now: sum(one.waiting for one in now.limiters)))
        writes.labels("limit").set_function(use(lambda now: sum(one.limit for one in now.limiters)))

    def _now(self, of_time: Callable[[RunTime, int], float]) -> float:
        return of_time(self._time, time.monotonic_ns())

    def on_event(self, event: Event) -> None:
        """Count *event*."""
        self._time.hear(event)
        take = self._take.get(type(event))
        if take is not None:
            take(event)

    def _table(self) -> dict[type[Event], Callable[[Any], object]]:
        return {
            SaveStarted: self._take_started,
            SnapshotTaken: lambda taken: self._pause.observe(taken.pause_s),
            BarrierWaited: lambda waited: self._barrier.observe(waited.seconds),
            BytesWritten: lambda written: self._written.inc(written.bytes),
            StageEnded: lambda ended: self._stage.labels(ended.operation, ended.stage).observe(ended.seconds),
            Committed: self._take_committed,
            SaveFailed: lambda failed: self._end(failed, "failed"),
            SaveSkipped: lambda skipped: self._end(skipped, "skipped"),
            Loaded: self._take_loaded,
            LoadFailed: lambda failed: self._loads.labels("failed").inc(),
            NotFiniteFound: lambda found: self._not_finite.inc(),
            StepRepaired: lambda repaired: self._scrubbed.labels("repaired").inc(),
            StepDamaged: lambda damaged: self._scrubbed.labels("left").inc(),
            StorageRetried: lambda retried: self._retries.labels(retried.verb).inc(),
            Promoted: self._take_promoted,
            PromotionQueued: self._take_queued,
            PromotionFailed: self._take_not_promoted,
        }

    def _take_committed(self, event: Committed) -> None:
        self._end(event, "committed")
        self._durable.observe(event.seconds)
        self._step.set(event.step)
        self._at.set(self._time.wall_s(event.at_ns))

    def _take_loaded(self, event: Loaded) -> None:
        self._loads.labels("loaded").inc()
        self._read.inc(event.read_bytes)
        self._loaded.inc(event.bytes)
        if event.bytes:
            self._over_read.set(event.read_bytes / event.bytes)

    def _take_promoted(self, event: Promoted) -> None:
        self._copies.labels(event.url, "committed").inc()
        self._lag.labels(event.url).set(event.seconds)
        self._queues[event.url].pop(event.step, None)

    def _take_queued(self, event: PromotionQueued) -> None:
        queue = self._queues[event.url]
        queue[event.step] = event.at_ns
        self._waiting.labels(event.url).set_function(lambda: len(queue))
        self._behind.labels(event.url).set_function(lambda: _age_s(queue))

    def _take_not_promoted(self, event: PromotionFailed) -> None:
        self._copies.labels(event.url, "failed").inc()
        if event.final:
            self._queues[event.url].pop(event.step, None)

    def _take_started(self, event: SaveStarted) -> None:
        self._begun[event.step] += 1
        self._in_flight.inc()

    def _end(self, event: Event, outcome: str) -> None:
        """Count the end of a save; one that was skipped may have begun, where its step was committed already, or not."""
        self._saves.labels(outcome).inc()
        if self._begun[event.step]:
            self._begun[event.step] -= 1
            self._in_flight.dec()
        self._begun += Counter()  # drops those of which none is left


def _age_s(queue: Mapping[int, int]) -> float:
    """Return how long the oldest in *queue* has waited; 0 where nothing waits. Any thread."""
    return max(((time.monotonic_ns() - since_ns) / 1e9 for since_ns in list(queue.values())), default=0.0)


class Scalars:
    """Passes numbers of each step to *log*, on a worker thread, so that it may be slow.

    Args:
        log: called with values by name, such as ``{"checkpoint/pause_s": 0.07}``, and their step. One that raises is logged,
            and not called again.
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
        """Pass on what is queued, until `aclose`."""
        self._ending = False
        while not self._ending or self._queue:
            while self._queue:
                values, step = self._queue.popleft()
                await anyio.to_thread.run_sync(self._log, values, step)
            if not self._ending:
                self._news = anyio.Event()
                await self._news.wait()

    async def aclose(self) -> None:
        """Stop `run` when all is passed on."""
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
        case Promoted():
            return {"copy_lag_s": event.seconds}
        case _:
            return {}
