"""Assembly of one checkpointer, and its end. Ranks, tiers and the writer process are imported only if they are used.

The writer process puts its own parts together (`aiockpt.worker.root`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from aiockpt.engine.alone import Alone, NeverInterrupted, OnePlace, Unwatched
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.destination import Destination
from aiockpt.engine.submit import Submitter
from aiockpt.events import BackgroundTask, BarrierWaited, Closed, Observer, Opened
from aiockpt.futures import SaveFuture
from aiockpt.lazy.snapshotter import LazySnapshotter
from aiockpt.options import Options, Scrub, Tier, announced_end_s
from aiockpt.pipeline.discover import refuse_step_folder
from aiockpt.places.readers.hold import Holds
from aiockpt.policies.cadence import Cadence
from aiockpt.prove.call_probe import CallProbe
from aiockpt.prove.session import Closes, find_probe
from aiockpt.redaction import redact
from aiockpt.runtime.background import run_background
from aiockpt.runtime.loop import LoopThread, made_for_the_loop
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.runtime.world import Loop, Ranks, World
from aiockpt.session.interruption import Interruption
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.ranks.peers import Peers
    from aiockpt.runtime.shared_memory import SharedMemory
    from aiockpt.session.preemption.policy import OnPreempt, Preemption

logger = logging.getLogger("aiockpt")


class Assembly:
    """The parts of one checkpointer, at work. `aiockpt.Checkpointer` explains the options.

    Args:
        at_exit: finishes the saves under way when the interpreter exits.
        observers: without the *cadence*.
        world: None for this machine's.

    Attributes:
        probe: notified of each call, for `aiockpt.prove`.
        interruption: decides whether a call is the last one.
        tiers: the places that saves are written to.
        shutdown: ends all of it.

    Raises:
        UsageError: a place cannot be opened, ranks do not fit, or a cadence serves another checkpointer.
    """

    # Places and coordinators have locks and events that are waited for on the loop alone, whatever the caller runs.
    @made_for_the_loop()
    def __init__(
        self,
        checkpointer: Closes,
        at_exit: Callable[[], object],
        *,
        options: Options,
        tiers: Sequence[Tier],
        observers: Sequence[Observer],
        cadence: Cadence | None,
        on_preempt: OnPreempt | Preemption | None,
        scrub: Scrub | None,
        ranks: Ranks,
        world: World | None,
    ) -> None:
        simulated, world = world, world or World()
        peers = find_peers(ranks)
        self.interruption = make_interruption(on_preempt, world)
        by_process = options.worker == "process"
        self.probe: CallProbe = find_probe(checkpointer, ranks, tiers) or Unwatched()
        self.tiers, backends = self.probe.open_places(tiers, world, by_url=by_process)
        for backend in backends:
            refuse_step_folder(backend.url, world.files)
        memory = share_memory(self.tiers, backends, simulated) if by_process else None
        # After all that can be refused without it: from here on there are threads to end.
        self.loop: Loop = (world.make_loop or LoopThread)("aiockpt", at_exit)
        cadences = [] if cadence is None else [cadence]
        observers = [*observers, *cadences, *self.interruption.observers, *self.probe.observers]
        try:
            self._start(options, backends, observers, scrub, ranks, peers, world, memory)
        except BaseException:
            self.loop.discard()
            if memory is not None:
                memory.close()
            raise

    def _start(
        self,
        options: Options,
        backends: Sequence[Backend],
        observers: Sequence[Observer],
        scrub: Scrub | None,
        ranks: Ranks,
        peers: Peers | None,
        world: World,
        memory: SharedMemory | None,
    ) -> None:
        """Make the parts that need the loop, and start the background ones; the order matters."""
        loop, interruption, url = self.loop, self.interruption, backends[0].url
        self.coordinator = coordinator = make_coordinator(ranks, peers, self.tiers, backends[0], loop, options, world)
        self.engine = engine = Engine(
            loop,
            options,
            observers,
            world,
            rank=ranks.rank,
            world_size=ranks.world_size,
            memory=memory,
        )
        ends = start_observers(observers, engine, ranks, url)
        destination = make_destination(engine, self.tiers, backends, coordinator, working=memory is None)
        if memory is not None:
            destination = start_writer(destination, coordinator, self.tiers, memory, ranks)
        self.destination = destination
        if observers:
            loop.call_soon(engine.emit, opened(ranks, world, backends))
        self.copies = copies = PendingCopies(options.deadlines.slab_s, _on_waited(engine))
        beside = LazySnapshotter(engine, copies, destination.places[0].uploader.busy_slabs)
        self.submitter = Submitter(destination, coordinator, copies, beside)
        self.holds = holds = Holds(loop, destination)
        start_interruption(interruption, engine, destination, ranks)
        stop_scrubbing = start_scrubber(scrub, engine, destination, ranks)
        self.shutdown = Shutdown(
            engine,
            self.submitter,
            destination,
            copies,
            before=[stop_scrubbing, holds.release_all],
            ends=[*ends, interruption.stop, partial(coordinator.depart, "its Checkpointer was closed", failed=False)],
            after=interruption.release,
        )


def start_observers(
    observers: Sequence[Observer], engine: Engine, ranks: Ranks, url: str
) -> list[Callable[[], object]]:
    """Start the tasks of observers, and have cadences serve the saves to *url*; return a function to end each."""
    options, clock = engine.options, engine.world.clock
    tasks = [observer for observer in observers if isinstance(observer, BackgroundTask)]
    ends: list[Callable[[], object]] = [run_background(engine.loop, one, engine.emit, engine.drop) for one in tasks]
    limits = options.max_in_flight, options.deadlines.ranks_s
    cadences = [observer for observer in observers if isinstance(observer, Cadence)]
    ends += [cadence.join(engine.loop, ranks, url, clock, *limits) for cadence in cadences]
    return ends


def _on_waited(engine: Engine) -> Callable[[int, float], None]:
    """Return the callback that reports how many seconds an optimizer waited for the copy of a step."""

    def report(step: int, seconds: float) -> None:
        event = BarrierWaited(at_ns=engine.now_ns(), step=step, seconds=seconds)
        engine.loop.call_soon(engine.emit, event)

    return report


def find_peers(ranks: Ranks) -> Peers | None:
    """Return the ranks that share one read with this one; None without a ``load_group``."""
    if ranks.load_group is None:
        return None
    from aiockpt.ranks.peers import find_peers

    return find_peers(ranks.load_group, ranks)


def start_scrubber(scrub: Scrub | None, engine: Engine, destination: Destination, ranks: Ranks) -> Callable[[], object]:
    """Start the scrubber on the first rank, where *scrub* is given; return the function that stops it."""
    if scrub is None or ranks.rank:
        return lambda: None
    from aiockpt.places.scrub.scrubber import Scrubber

    scrubber = Scrubber(scrub, engine, destination)
    scrubber.start()
    return scrubber.stop


def make_coordinator(
    ranks: Ranks,
    peers: Peers | None,
    tiers: Sequence[Tier],
    place: Backend,
    loop: Loop,
    options: Options,
    world: World,
) -> Coordinator:
    """Return the coordinator of this process and those that save with it; `Alone` for a single process."""
    if ranks.world_size == 1:
        return Alone()
    from aiockpt.ranks.coordinator import RankCoordinator

    secret, terms = world.token(16).hex(), _terms(tiers, options)
    coordinator = RankCoordinator(ranks, place.url, loop, options, secret, terms=terms, peers=peers)
    coordinator.register()
    return coordinator


def make_destination(
    engine: Engine, tiers: Sequence[Tier], backends: Sequence[Backend], coordinator: Coordinator, *, working: bool
) -> Destination:
    """Return the destination of saves, where steps lie.

    Args:
        working: whether steps are saved, and copied from place to place, by this process.
    """
    if len(tiers) == 1:
        return OnePlace(Place(engine, backends[0], retention=tiers[0].retention), tiers[0])
    from aiockpt.places.tiers.tiers import Tiers

    return Tiers(tiers, engine, backends, coordinator, working=working)


def share_memory(tiers: Sequence[Tier], backends: Sequence[Backend], world: World | None) -> SharedMemory:
    """Return memory that a writer process can see, when one can write to these places."""
    from aiockpt.runtime.shared_memory import SharedMemory
    from aiockpt.worker.client import check_worker

    check_worker(tiers, backends, world)
    return SharedMemory()


def start_writer(
    here: Destination, coordinator: Coordinator, tiers: Sequence[Tier], memory: SharedMemory, ranks: Ranks
) -> Destination:
    """Start a writer process; return the destination that hands saves to it, and reads from *here*."""
    from aiockpt.worker.client import WriterClient

    return WriterClient(here, coordinator, tiers, memory, ranks)


def _terms(tiers: Sequence[Tier], options: Options) -> dict[str, str]:
    """Return the options that all ranks must share, in words."""
    places = [f"every={tier.every}, content={tier.content!r}" for tier in tiers]
    return {
        "on_exists": repr(options.on_exists),
        "replicas": repr(options.replicas),
        "the list of tiers": "; ".join(places),
    }


def opened(ranks: Ranks, world: World, backends: Sequence[Backend]) -> Opened:
    """Return the first event of a checkpointer: which process it is in, and where it saves to."""
    return Opened(
        at_ns=world.clock.monotonic_ns(),
        time_ns=world.clock.time_ns(),
        pid=os.getpid(),
        host=socket.gethostname(),
        rank=ranks.rank,
        world_size=ranks.world_size,
        urls=tuple(redact(backend.url) for backend in backends),
        process=_process_token(os.getpid()),
    )


@cache
def _process_token(pid: int) -> str:
    """Return a token of this process, which differs from that of a later one with its *pid* and of a forked child."""
    return secrets.token_hex(4)


def make_interruption(on_preempt: OnPreempt | Preemption | None, world: World) -> Interruption:
    """Return the source of requests to end the run early; for None, one that never does."""
    if on_preempt is None:
        return NeverInterrupted()
    from aiockpt.session.preemption.handler import PreemptionHandler
    from aiockpt.session.preemption.policy import as_preemption

    policy = as_preemption(on_preempt)
    return PreemptionHandler(policy, policy.find_end(world.clock.time_ns() / 1e9, announced_end_s()))


def start_interruption(interruption: Interruption, engine: Engine, destination: Destination, ranks: Ranks) -> None:
    """Start *interruption*; with other ranks, notices are exchanged with them."""
    if not interruption.listens:
        return
    from aiockpt.session.preemption.decision import EndsAlone, EndsWithRanks
    from aiockpt.session.preemption.handler import PreemptionHandler

    assert isinstance(interruption, PreemptionHandler)
    if ranks.world_size == 1:
        interruption.begin(engine, destination, EndsAlone())
        return
    place = destination.places[0].backend.url
    board = NoteBoard(ranks.store, f"{place}/preemption", ranks.rank, ranks.world_size)
    interruption.begin(engine, destination, EndsWithRanks(board))


# The end of a checkpointer: it waits for saves and copies under way, abandons the late ones, and releases all.
#
# Guarantees:
#
# - What is under way ends by itself, within its own deadlines; it is waited for, for ``Deadlines.close_s``.
# - An interrupt of the wait (a second Ctrl-C) is obeyed: saves whose commit has not begun are abandoned, what they wrote is
#   removed, and the wait is over in seconds. A writer process finishes what is ``snapshotted`` by itself.
# - Threads end, whatever happened before: a save that was interrupted where it could not notice it does not hold them.


CLOSE_S = 60.0
"""For work with deadlines of its own to report that they have passed."""
GIVE_UP_S = 10.0
"""For abandoned saves to remove what they wrote."""


class Shutdown:
    """The end of one checkpointer. Blocking; never on its loop thread.

    Args:
        before: called first, while everything still works.
        ends: called once, to end what observers do on the loop.
        after: called last, whatever happened.
    """

    def __init__(
        self,
        engine: Engine,
        submitter: Submitter,
        destination: Destination,
        copies: PendingCopies,
        *,
        before: Sequence[Callable[[], object]],
        ends: Sequence[Callable[[], object]],
        after: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._submitter = submitter
        self._destination = destination
        self._copies = copies
        self._before, self._ends, self._after = before, ends, after

    def wait(self) -> None:
        """Wait until no save runs, and no clean-up after one.

        Raises:
            TimeoutError: that took longer than ``Deadlines.close_s``.
        """
        deadline_s = self._engine.options.deadlines.close_s
        if not self._is_idle_within(deadline_s):
            waiting = [repr(SaveFuture(promise)) for promise in self._submitter.in_flight]
            raise TimeoutError(f"after {deadline_s:g} s these saves still run: {waiting}")

    def close(self) -> None:
        """Wait, then release everything.

        Raises:
            TimeoutError: as `wait`; what still ran was abandoned.
        """
        try:
            for begin in self._before:
                begin()
            self._end()
        finally:
            self._after()

    def _end(self) -> None:
        # Stays 0 after an interrupt or a timeout: then copies to farther places are not waited for.
        patience_s = 0.0
        try:
            self.wait()
            patience_s = self._engine.options.deadlines.close_s
        except BaseException:
            self._abandon()
            raise
        finally:
            self._release(patience_s)

    def _is_idle_within(self, seconds: float) -> bool:
        idle = self._engine.loop.submit(self._idle)
        try:
            idle.result(seconds)
        except TimeoutError:
            return False
        finally:
            idle.cancel()
        return True

    async def _idle(self) -> None:
        for promise in self._submitter.in_flight:
            await promise.settled()
        # A clean-up takes this lock in the very turn in which its save gets its outcome (`Submitter._run`).
        for place in self._destination.places:
            async with place.cleaning:
                pass
            # Saves are committed here, or nearer; farther places have copies, whose end `Destination.close` waits for.
            if place.backend.traits.durable:
                break

    def _abandon(self) -> None:
        """End the saves in flight, and wait until they have."""
        waiting = self._submitter.in_flight
        for promise in waiting:
            self._destination.abandon(promise)
        if waiting:
            logger.warning("shutdown: abandoning %s", ", ".join(repr(SaveFuture(promise)) for promise in waiting))
        self._is_idle_within(GIVE_UP_S)

    def _release(self, patience_s: float) -> None:
        closing = self._engine.loop.submit(self._destination.close, patience_s)
        in_order = False
        try:
            closing.result(2 * patience_s + CLOSE_S)  # it keeps deadlines of its own
            in_order = patience_s > 0
        finally:
            closing.cancel()
            engine = self._engine
            engine.loop.call_soon(engine.emit, Closed(at_ns=engine.now_ns()))
            for end in self._ends:
                end()
            self._engine.loop.close(cancel=not in_order)
            # After the threads, which `close` joins: until then they read and fill slabs.
            self._engine.release_memory()
            self._submitter.release()
            self._copies.close()
