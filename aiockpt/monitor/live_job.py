"""The state of a running job at this moment: its heartbeats, polled, and the ranks that have fallen silent.

Clocks of other hosts are not trusted: silence is the time since the reader last saw a new beat. The first poll alone
has no other measure than those clocks.
"""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec

from aiockpt.format.document import described
from aiockpt.monitor.heartbeat import BEGINS, Beat, beat_key
from aiockpt.monitor.stragglers import Straggler
from aiockpt.monitor.trace import FOLDER
from aiockpt.monitor.under_way import PendingWork
from aiockpt.storage.backend import Backend, Stat
from aiockpt.storage.transfer import get_many

_decoder = msgspec.json.Decoder(described(Beat))
MISSED = 3
"""Consecutive missing beats from which on a rank counts as silent."""
GRACE_S = 2.0
"""Added to that for the way through the storage."""
MAX_BYTES = 1 << 20


class RankNow(msgspec.Struct, frozen=True, kw_only=True):
    """A rank at this moment: its last beat, and the seconds since then."""

    beat: Beat
    heard_s: float

    @property
    def silent(self) -> bool:
        """Whether the rank is overdue: more than `MISSED` beats and `GRACE_S` have passed."""
        return not self.beat.ended and self.heard_s > MISSED * self.beat.every_s + GRACE_S

    @property
    def oldest(self) -> PendingWork | None:
        return self.beat.pending[0] if self.beat.pending else None


class JobNow(msgspec.Struct, frozen=True, kw_only=True):
    """A job at this moment.

    Attributes:
        ranks: those with a beat, by number.
        missing: ranks of the world that have never written a beat.
        durable_step, durable_s: the step that all ranks fall back to after a crash, the newest that any rank reports; and
            the seconds of work since then.
        in_flight: the steps that are being saved.
        slow: ranks that are slower than their peers, the slowest first.
        damaged: heartbeats in the storage that cannot be read, by key: the file is damaged, or of another version.
        doubled: ranks whose beats two processes write alternately: two jobs share one place.
    """

    ranks: list[RankNow]
    world_size: int
    missing: list[int]
    silent: list[int]
    durable_step: int | None
    durable_s: float | None
    in_flight: list[int]
    slow: list[Straggler]
    damaged: list[str]
    doubled: list[int]
    bytes_per_s: float
    failed: int
    retried: int
    ended: bool


class JobWatch:
    """Reads the heartbeats of one run; for one task.

    Args:
        backend: of the run, or of the *url* of `Heartbeat`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[str, tuple[Stat, Beat, float]] = {}
        """Key → the entry of the listing, the beat, and the second of our clock at which it was read."""
        self._earlier: dict[int, set[tuple[str, int]]] = defaultdict(set)
        """Rank → processes that wrote its beats before another one did."""
        self._doubled: set[int] = set()
        self._damaged: set[str] = set()

    async def poll(self) -> JobNow | None:
        """Read what has changed, and return the state of the job; None where there is no heartbeat."""
        listing = await self._backend.list(FOLDER)
        there = {stat.key: stat for stat in listing.objects if stat.key.startswith(f"{FOLDER}/{BEGINS}")}
        self._known = {key: known for key, known in self._known.items() if key in there}
        self._damaged &= there.keys()
        changed = [stat for key, stat in there.items() if key not in self._known or self._known[key][0] != stat]
        beats = await get_many(self._backend, [stat.key for stat in changed], MAX_BYTES)
        for stat, data in zip(changed, beats, strict=True):
            if data is not None:  # else gone meanwhile
                self._accept(stat, data)
        return self._sum_up()

    def _accept(self, stat: Stat, data: bytes) -> None:
        try:
            beat = _decoder.decode(data)
        except msgspec.MsgspecError:
            self._damaged.add(stat.key)
            return
        self._damaged.discard(stat.key)
        if (before := self._known.get(stat.key)) is not None:
            self._compare_tellers(before[1], beat)
        silent_s = 0.0 if before is not None else max(time.time() - beat.time_s, 0.0)
        self._known[stat.key] = (stat, beat, time.monotonic() - silent_s)

    def _compare_tellers(self, before: Beat, beat: Beat) -> None:
        """Record a process that writes again after another one; a later start of the job does not alternate so."""
        was, now = (before.host, before.pid), (beat.host, beat.pid)
        if was != now:
            self._earlier[beat.rank].add(was)
            if now in self._earlier[beat.rank]:
                self._doubled.add(beat.rank)

    def _sum_up(self) -> JobNow | None:
        now_s = time.monotonic()
        found = [RankNow(beat=beat, heard_s=now_s - said_s) for _, beat, said_s in self._known.values()]
        if not found and not self._damaged:
            return None
        # Beats of an earlier start with more ranks stay in storage: the newest beat tells how many ranks there are now.
        newest = max(found, key=lambda rank: rank.beat.time_s, default=None)
        world_size = 0 if newest is None else newest.beat.world_size
        ranks = sorted((rank for rank in found if rank.beat.rank < world_size), key=lambda rank: rank.beat.rank)
        unreadable = {rank for rank in range(world_size) if beat_key(rank) in self._damaged}
        durable = [rank for rank in ranks if rank.beat.durable_step is not None]
        last = max(durable, key=lambda rank: rank.beat.durable_step or 0, default=None)
        return JobNow(
            ranks=ranks,
            world_size=world_size,
            missing=sorted(set(range(world_size)) - {rank.beat.rank for rank in ranks} - unreadable),
            silent=[rank.beat.rank for rank in ranks if rank.silent],
            durable_step=None if last is None else last.beat.durable_step,
            durable_s=None if last is None else (last.beat.durable_s or 0.0) + last.heard_s,
            in_flight=sorted({work.step for rank in ranks for work in rank.beat.pending if work.operation == "save"}),
            slow=[slow for rank in ranks[:1] for slow in rank.beat.slow],
            damaged=sorted(self._damaged),
            doubled=sorted(self._doubled),
            bytes_per_s=sum(rank.beat.bytes_per_s for rank in ranks if not rank.silent and not rank.beat.ended),
            failed=max((rank.beat.failed for rank in ranks), default=0),
            retried=sum(rank.beat.retried for rank in ranks),
            ended=bool(ranks) and all(rank.beat.ended for rank in ranks),
        )
