"""Detection of slow ranks while the job runs: each rank publishes what its stages took, and rank 0 compares.

The last saves and loads of a rank are one small object beside the run, written when there is something new. A straggler
that rank 0 finds there is reported once, and again when it was not one meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict

import anyio.to_thread
import msgspec

from aiockpt.events import Event, Opened, Operation, SnapshotTaken, StageEnded, StragglerFound
from aiockpt.monitor.stage_times import HASH, StageKey, StageTimes, is_remote
from aiockpt.monitor.stragglers import Straggler, stragglers
from aiockpt.monitor.trace import FOLDER
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import get_many

logger = logging.getLogger("aiockpt")

BEGINS = "times-"
KEPT_STEPS = 24
"""Steps that a rank publishes: enough for a median, and a small object."""
MAX_BYTES = 1 << 20


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the last steps took on one rank: rows of operation, stage, step and seconds."""

    rank: int
    host: str
    time_s: float
    rows: list[tuple[Operation, str, int, float]]


class PeerTimes:
    """The times that this rank publishes, and, on rank 0, the comparison of all. On the loop thread.

    Attributes:
        slow: the stragglers that were found by the last comparison.
    """

    def __init__(self) -> None:
        self.slow: list[Straggler] = []
        self._steps: dict[int, dict[StageKey, float]] = {}
        self._news = False

    def hear(self, event: Event) -> None:
        """Record what a stage took."""
        match event:
            case StageEnded(failed=False):
                self._add(event, (event.operation, event.stage), event.seconds)
                self._add(event, (event.operation, HASH), event.hash_s)
            case SnapshotTaken():
                self._add(event, ("save", "snapshot"), event.copy_s)

    def _add(self, event: Event, key: StageKey, seconds: float) -> None:
        if seconds:
            taken = self._steps.setdefault(event.step, defaultdict(float))
            taken[key] += seconds
            self._news = True
            while len(self._steps) > KEPT_STEPS:
                self._steps.pop(next(iter(self._steps)))

    async def publish(self, backend: Backend, opened: Opened) -> None:
        """Write the times of this rank, where they are new."""
        if self._news:
            self._news = False
            rows = [(*key, step, seconds) for step, taken in self._steps.items() for key, seconds in taken.items()]
            told = RankTimes(rank=opened.rank, host=opened.host, time_s=time.time(), rows=rows)
            await backend.put(f"{FOLDER}/{BEGINS}{opened.rank:05}.json", msgspec.json.encode(told))

    async def compare(self, backend: Backend, opened: Opened) -> list[Straggler]:
        """Read the times of all ranks; return, and log, the ranks that are slow now and were not at the last comparison."""
        listing = await backend.list(FOLDER)
        times = StageTimes(remote=is_remote(opened.urls))
        keys = [stat.key for stat in listing.objects if stat.key.startswith(f"{FOLDER}/{BEGINS}")]
        for data in await get_many(backend, keys, MAX_BYTES):
            if data is not None:  # else gone meanwhile
                _add_told(times, data, opened)
        known = {_who(one) for one in self.slow}
        self.slow = await anyio.to_thread.run_sync(stragglers, times)  # 0.1 s for a thousand ranks
        new = [one for one in self.slow if _who(one) not in known]
        for one in new:
            logger.warning("%s", explain(one))
        return new


def _add_told(times: StageTimes, data: bytes, opened: Opened) -> None:
    """Add the times of one rank, unless they are of an earlier start, or of another version."""
    try:
        told = msgspec.json.decode(data, type=RankTimes)
    except msgspec.MsgspecError:
        return
    if told.rank < opened.world_size and told.time_s * 1e9 >= opened.time_ns:
        times.hosts[told.rank] = told.host
        for operation, stage, step, seconds in told.rows:
            times.add(told.rank, (operation, stage), step, seconds)


def found_event(slow: Straggler, at_ns: int) -> StragglerFound:
    """Return the event of a straggler for observers."""
    told = msgspec.structs.asdict(slow)
    return StragglerFound(at_ns=at_ns, step=told.pop("since"), **told)


def explain(slow: Straggler) -> str:
    """Return in one sentence which rank is slow, where, since when, by how much, and why that may be."""
    return (
        f"rank {slow.rank} ({slow.host}) is slow: {slow.stage} takes {slow.factor:.1f} × as long as on the others, "
        f"{slow.extra_s:.3g} s more each {slow.operation}, since step {slow.since}; likely: {slow.cause}"
    )


def _who(slow: Straggler) -> tuple[int, Operation]:
    return slow.rank, slow.operation
