"""A run that never was, as its ranks would have told it: as many ranks and saves as a test likes, with faults put in.

What a rank tells in a save is as `TraceFile` has it of real runs: two data files, the stages in their order, seconds that
vary a little from a fixed seed. Faults are drawn upon that: slow ranks, a failed save, calls made again, a restart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from aiockpt import events
from aiockpt.events import Event, Operation

BEGUN_S = 1_795_500_000.0
"""When the run began, in seconds since 1970."""
RANKS_OF_A_HOST = 8
FILE_BYTES = (800 << 20, 400 << 20)
SNAPSHOT_S, WRITE_S, FLUSH_S, VOTE_S = 0.08, 1.0, 0.2, 0.01
REST_S = 1.0
"""From the votes to the commit."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A stage takes *factor* times as long on *ranks* from save number *since* on."""

    ranks: frozenset[int]
    stage: str
    factor: float
    since: int = 0


class SyntheticRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn.

    Attributes:
        mesh: sizes by name, the last dimension innermost; its product is the number of ranks.
        failing: numbers of saves that fail, on every rank.
        retried: numbers of saves in which rank 1 makes a call again.
        restart_after: the number of the save after which the run is killed, 90 s of work later, and goes on 60 s later.
        killed: it was not closed.
        silent: ranks that tell nothing any more after save number *silent_after*.
    """

    saves: int
    mesh: Mapping[str, int]
    every: int = 100
    period_s: float = 60.0
    faults: tuple[Fault, ...] = ()
    failing: frozenset[int] = frozenset()
    retried: frozenset[int] = frozenset()
    restart_after: int | None = None
    killed: bool = False
    silent: frozenset[int] = frozenset()
    silent_after: int = 0
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many there are."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    def write(self, folder: Path) -> None:
        """Write the trace of each rank into *folder*."""
        encode = msgspec.json.Encoder().encode
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.ranks):
            lines = b"\n".join(encode(event) for event in self.events_of(rank))
            (folder / f"rank-{rank:05}.jsonl").write_bytes(lines + b"\n")

    def events_of(self, rank: int) -> Iterator[Event]:
        """Yield what *rank* tells, on a clock of its own."""
        rng = random.Random(self.seed * 1_000_003 + rank)
        clock = _RankClock(rank)
        yield self._opened(rank, clock, start=0)
        at_s = BEGUN_S + self.period_s
        for number in range(self.saves):
            if rank in self.silent and number > self.silent_after:
                return
            yield from self._save(rank, number, at_s, clock, rng)
            if number == self.restart_after:
                yield events.BarrierWaited(at_ns=clock.at_ns(at_s + 90), step=number * self.every, seconds=0.001)
                at_s += 150
                clock = _RankClock(rank, start=1, begun_s=at_s)
                yield self._opened(rank, clock, start=1)
                yield from _load(number * self.every, at_s, clock, rng)
            at_s += self.period_s
        if not self.killed:
            yield events.Closed(at_ns=clock.at_ns(at_s))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where *rank* stands in the mesh."""
        found: dict[str, int] = {}
        for name, size in reversed(list(self.mesh.items())):
            found[name] = rank % size
            rank //= size
        return {name: found[name] for name in self.mesh}

    def _opened(self, rank: int, clock: _RankClock, start: int) -> Event:
        return events.Opened(
            at_ns=clock.zero_ns,
            time_ns=int(clock.begun_s * 1e9),
            pid=1000 + start,
            host=f"node-{rank // RANKS_OF_A_HOST:03}",
            rank=rank,
            world_size=self.ranks,
            urls=("s3://bucket/run",),
            mesh=self.coordinates(rank),
        )

    def _save(self, rank: int, number: int, at_s: float, clock: _RankClock, rng: random.Random) -> Iterator[Event]:
        step = number * self.every
        slow = {fault.stage: fault.factor for fault in self.faults if rank in fault.ranks and number >= fault.since}

        def took(stage: str, seconds: float) -> float:
            return seconds * slow.get(stage, 1.0) * rng.uniform(0.95, 1.1)

        def at(seconds: float) -> int:
            return clock.at_ns(at_s + seconds)

        snapshot_s = took("snapshot", SNAPSHOT_S)
        total = sum(FILE_BYTES)
        yield events.SaveStarted(
            at_ns=at(0.002), step=step, bytes=total, tensor_count=100, metrics={"loss": 1 / (1 + step)}
        )
        yield _stage("walk", at(0.001), step, took("walk", 0.001))
        yield _stage("plan", at(0.002), step, 0.0005)
        yield events.SnapshotTaken(
            at_ns=at(snapshot_s), step=step, bytes=total, pause_s=snapshot_s + 0.002, copy_s=snapshot_s
        )
        written_s = snapshot_s
        for file, size in enumerate(FILE_BYTES):
            key = f"d/r{rank:05}-{file:04}.safetensors"
            share = size / total
            write_s, flush_s = took("write", WRITE_S * share), took("flush", FLUSH_S * share)
            for block in (1, 2):
                yield events.BytesWritten(
                    at_ns=at(written_s + write_s * block / 2), step=step, bytes=size // 2, key=key, seconds=write_s / 2
                )
            written_s += write_s + flush_s
            yield _stage("flush", at(written_s), step, flush_s, key=key)
            yield _stage("write", at(written_s), step, write_s + flush_s, key=key, bytes=size, hash_s=0.1)
        if number in self.retried and rank == 1:
            yield events.StorageRetried(
                at_ns=at(written_s), step=step, verb="put", key="d", error="TimeoutError()", attempt=2, wait_s=0.5
            )
        if number in self.failing:
            error = "StorageFullError('no space left on node-000')"
            yield events.SaveFailed(at_ns=at(written_s), step=step, error=error, seconds=written_s)
            return
        voted_s = written_s + took("vote", VOTE_S)
        yield _stage("vote", at(voted_s), step, voted_s - written_s)
        yield events.DataWritten(at_ns=at(voted_s), step=step, bytes=total, seconds=voted_s)
        slowest_s = max((fault.factor for fault in self.faults if number >= fault.since), default=1.0)
        end_s = max(voted_s, slowest_s * (WRITE_S + FLUSH_S)) + REST_S
        yield _stage("wait", at(end_s), step, end_s - voted_s, key="commit")
        yield events.Committed(at_ns=at(end_s), step=step, bytes=total, seconds=end_s, generation=1)


def opened(at_s: float, pid: int) -> events.Opened:
    """Return what a run's only rank tells first."""
    at_ns = int(at_s * 1e9)
    return events.Opened(at_ns=at_ns, time_ns=at_ns, pid=pid, host="h", rank=0, world_size=1, urls=())


def append_events(trace: Path, *told: Event) -> None:
    """Append *told* to a trace, which need not be there."""
    with trace.open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in told)


class _RankClock:
    """A monotonic clock that began at another time than those of the other ranks."""

    def __init__(self, rank: int, start: int = 0, begun_s: float = BEGUN_S) -> None:
        self.begun_s = begun_s
        self.zero_ns = 1_000_000_000 * (rank + 1) + 7 * start

    def at_ns(self, wall_s: float) -> int:
        return self.zero_ns + int((wall_s - self.begun_s) * 1e9)


def _stage(
    stage: str, at_ns: int, step: int, seconds: float, operation: Operation = "save", **facts: object
) -> events.StageEnded:
    told = {"at_ns": at_ns, "step": step, "operation": operation, "stage": stage, "seconds": seconds, **facts}
    return msgspec.convert(told, events.StageEnded)


def _load(step: int, at_s: float, clock: _RankClock, rng: random.Random) -> Iterator[Event]:
    read_s = 0.8 * rng.uniform(0.9, 1.2)
    total = sum(FILE_BYTES)
    for stage, ended_s, seconds in (("find", 0.2, 0.2), ("match", 0.25, 0.05), ("read", 0.25 + read_s, read_s)):
        size = total if stage == "read" else 0
        yield _stage(stage, clock.at_ns(at_s + ended_s), step, seconds, "load", bytes=size)
    end_s = 0.3 + read_s
    yield events.Loaded(at_ns=clock.at_ns(at_s + end_s), step=step, bytes=total, read_bytes=total, seconds=end_s)
