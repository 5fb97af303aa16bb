"""Heartbeats: what each rank does and waits for, written every few seconds to a small object beside the run.

Guarantees:

- No save waits for a heartbeat: an event costs a few assignments, and a separate task writes.
- Work that is pending for longer than a deadline is logged with its details, also while storage hangs.
- A rank that is slower than its peers is reported (`aiockpt.events.StragglerFound`), about every minute, by rank 0.
- The last beat is written when the checkpointer is closed. A killed process falls silent, and readers detect that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio
import msgspec

from aiockpt.errors import CheckpointError, UsageError
from aiockpt.events import BytesWritten, Event, LoadFailed, Opened, Promoted, Replicated, SaveFailed, StorageRetried
from aiockpt.monitor.stragglers import PeerTimes, Straggler, found_event
from aiockpt.monitor.trace import FOLDER
from aiockpt.monitor.under_way import PendingWork, UnderWay, describe
from aiockpt.options import check_amount
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

logger = logging.getLogger("aiockpt")

BEGINS = "beat-"
POLL_S = 1.0
"""Seconds between two checks for overdue work."""
BEATS_TO_COMPARISON = 12


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank, as the rank itself reports it.

    Attributes:
        number: of the beat, counted within one process.
        time_s: the wall clock of the host.
        every_s: seconds until the next beat is due.
        pending: the oldest first.
        durable_step, durable_s: the last step that is durable, and the seconds of work since its save was called, or it
            was loaded: what a crash would lose. None before the first.
        places: url → the last step that was copied there; for the memory of hosts, between them.
        bytes_per_s: written since the beat before.
        last_error: of the last save or load that failed.
        slow: ranks that are slower than their peers, as rank 0 reports them.
        ended: the checkpointer was closed in order.
    """

    number: int
    time_s: float
    every_s: float
    host: str
    pid: int
    rank: int
    world_size: int
    pending: list[PendingWork]
    durable_step: int | None
    durable_s: float | None
    places: dict[str, int]
    bytes_per_s: float
    failed: int
    retried: int
    last_error: str = ""
    slow: list[Straggler] = []
    ended: bool = False


def beat_key(rank: int) -> str:
    """Return where the last beat of a rank lies."""
    return f"{FOLDER}/{BEGINS}{rank:05}.json"


class Heartbeat:
    """Reports every few seconds what this rank does, for ``aiockpt top RUN``; add one to each checkpointer's ``observers``.

    Args:
        url: the target: a folder or a URL that all ranks and the reader can see. None: the nearest place of the
            checkpointer that other hosts see, in ``monitor/beat-00000.json``.
        every_s: seconds from one beat to the next.
        overdue_s: a save or a load that takes longer is logged with all pending work, and again each time its duration
            has doubled.

    Raises:
        UsageError: a time is not above 0.
    """

    def __init__(self, url: str | None = None, *, every_s: float = 5.0, overdue_s: float = 300.0) -> None:
        for name, value in (("every_s", every_s), ("overdue_s", overdue_s)):
            check_amount("Heartbeat", name, value, " seconds")
        self._url, self._every_s, self._overdue_s = url, every_s, overdue_s
        self._opened: Opened | None = None
        self._begun, self._ending = anyio.Event(), anyio.Event()
        self._under_way = UnderWay()
        self._peers = PeerTimes()
        self._emit: Callable[[Event], object] = lambda _: None
        self._places: dict[str, int] = {}
        self._number = self._failed = self._retried = self._written = 0
        self._last_error = ""
        self._counted_from_ns = time.monotonic_ns()

    # ------------------------------------------------------------------ events, on the loop thread

    def on_event(self, event: Event) -> None:
        self._under_way.receive(event)
        self._peers.receive(event)
        match event:
            case Opened():
                self._opened = event
                self._begun.set()
            case BytesWritten():
                self._written += event.bytes
            case SaveFailed():
                self._failed += 1
                self._last_error = f"step {event.step}: {event.error}"
            case LoadFailed():
                self._last_error = f"load of {event.which}: {event.error}"
            case Promoted() | Replicated():
                self._places[event.url] = event.step
            case StorageRetried():
                self._retried += 1

    def set_emitter(self, emit: Callable[[Event], object]) -> None:
        """Set the function that emits an event to all observers."""
        self._emit = emit

    # ------------------------------------------------------------------ writing

    async def run(self) -> None:
        """Write a beat every few seconds until `aclose`, and a last one then.

        Raises:
            UsageError: no place was given, and no place of the checkpointer is visible to other hosts.
        """
        await self._begun.wait()
        if self._opened is None:  # closed before it began
            return
        backend = self._open_place(self._opened)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._poll_overdue)
                failing = False
                while True:
                    # Before the beat: a close that comes during it has one more written, which says that it has ended.
                    ending = self._ending.is_set()
                    failing = await self._beat(backend, failing)
                    if ending:
                        break
                    with anyio.move_on_after(self._every_s):
                        await self._ending.wait()
        finally:
            await backend.close()

    async def aclose(self) -> None:
        """Stop `run` after a last beat."""
        self._ending.set()
        self._begun.set()

    def beat(self) -> Beat:
        assert self._opened is not None, "Opened is the first event"
        now_ns = time.monotonic_ns()
        apart_s = max((now_ns - self._counted_from_ns) / 1e9, 1e-3)
        speed, self._written, self._counted_from_ns = self._written / apart_s, 0, now_ns
        durable_step, durable_s = self._under_way.durable(now_ns) or (None, None)
        self._number += 1
        return Beat(
            number=self._number,
            time_s=time.time(),
            every_s=self._every_s,
            host=self._opened.host,
            pid=self._opened.pid,
            rank=self._opened.rank,
            world_size=self._opened.world_size,
            pending=self._under_way.pending(now_ns),
            durable_step=durable_step,
            durable_s=durable_s,
            places=dict(self._places),
            bytes_per_s=speed,
            failed=self._failed,
            retried=self._retried,
            last_error=self._last_error,
            slow=self._peers.slow,
            ended=self._ending.is_set(),
        )

    async def _beat(self, backend: Backend, was_failing: bool) -> bool:
        """Write a beat and the times beside it; return whether that failed. Only the first failure in a row is logged."""
        assert self._opened is not None, "Opened is the first event"
        beat = self.beat()
        try:
            await self._peers.publish(backend, self._opened)
            if beat.rank == 0 and beat.number % BEATS_TO_COMPARISON == 0:
                for slow in await self._peers.compare(backend, self._opened):
                    self._emit(found_event(slow, time.monotonic_ns()))
            await backend.put(beat_key(beat.rank), msgspec.json.encode(beat))
        except CheckpointError as error:
            if not was_failing:
                logger.warning("the heartbeat of rank %d could not be written; will retry: %r", beat.rank, error)
            return True
        return False

    def _open_place(self, opened: Opened) -> Backend:
        if self._url is not None:
            return open_backend(self._url)
        for url in opened.urls:
            backend = open_backend(url)
            if backend.traits.scope == "shared":
                return backend
        raise UsageError("Heartbeat(): other hosts can see no place of the run: name one, Heartbeat('/shared/run')")

    # ------------------------------------------------------------------ overdue work

    async def _poll_overdue(self) -> None:
        while not self._ending.is_set():
            self._log_overdue(time.monotonic_ns())
            with anyio.move_on_after(min(POLL_S, self._overdue_s)):
                await self._ending.wait()

    def _log_overdue(self, now_ns: int) -> None:
        assert self._opened is not None, "Opened is the first event"
        if self._under_way.grew_overdue(now_ns, self._overdue_s):
            logger.warning(
                "rank %d on %s: a save or load is overdue (%g s); pending:\n%s",
                self._opened.rank,
                self._opened.host,
                self._overdue_s,
                "\n".join(f"  {describe(work)}" for work in self._under_way.pending(now_ns)),
            )

    def __repr__(self) -> str:
        return f"<Heartbeat every {self._every_s:g} s, {len(self._under_way)} pending>"
