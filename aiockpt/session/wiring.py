"""Assembly of one checkpointer. Ranks, tiers and the writer process are imported only if they are used.

The writer process puts its own parts together (`aiockpt.worker.root`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiockpt.engine.alone import Alone, CallProbe, Destination, Interruption, OnePlace
from aiockpt.engine.context import Engine, Place, retention_of
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.submit import Submitter
from aiockpt.events import BackgroundTask, BarrierWaited, Observer, Opened
from aiockpt.lazy.snapshotter import LazySnapshotter
from aiockpt.options import Options, Tier, announced_end_s
from aiockpt.pipeline.wrong_places import refuse_step_folder
from aiockpt.places.readers.hold import Holds
from aiockpt.policies.cadence import Cadence
from aiockpt.prove.session import Closes, find_probe
from aiockpt.redaction import redact
from aiockpt.runtime.background import run_background
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.loop import LoopThread, made_for_the_loop
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.runtime.progress import find_progress
from aiockpt.runtime.world import Loop, Ranks, World
from aiockpt.session.agreed_call import CallNotes, MakeLookout
from aiockpt.session.end_of_run import EndOfRun, LastStep
from aiockpt.session.shutdown import Shutdown
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.ranks.peers import Peers
    from aiockpt.runtime.shared_memory import SharedMemory
    from aiockpt.session.preemption.policy import OnPreempt, Preemption
    from aiockpt.session.rewind.rewinder import Rewinder
    from aiockpt.session.rewind.rules import Rewind


class Assembly:
    """The parts of one checkpointer, at work. `aiockpt.Checkpointer` explains the options.

    Args:
        at_exit: finishes the saves under way when the interpreter exits.
        observers: without the *cadence*.
        world: None for this machine's.

    Attributes:
        probe: notified of each call, for `aiockpt.prove`.
        interruption: decides whether a call is the last one.
        rewinder: sets the run back from bad steps; None without ``rewind=``.
        last_step: is saved at the end of a run that ends in order.
        end: of the run; then *shutdown* ends all of it.
        tiers: the places that saves are written to.

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
        rewind: Rewind | None,
        ranks: Ranks,
        world: World | None,
    ) -> None:
        simulated, world = world, world or World()
        peers = find_peers(ranks)
        self.interruption = make_interruption(on_preempt, world)
        self.rewinder = make_rewinder(rewind)
        by_process = options.worker == "process"
        self.probe: CallProbe = find_probe(checkpointer, ranks, tiers) or CallProbe()
        # A proof compares what follows a save, and nothing follows the last step.
        wanted = options.save_last and (options.every is not None or cadence is not None)
        self.last_step = LastStep(wanted=wanted and type(self.probe) is CallProbe)
        self.tiers, backends = self.probe.open_places(tiers, world, by_url=by_process)
        for backend in backends:
            refuse_step_folder(backend.url, world.files)
        memory = share_memory(self.tiers, backends, simulated) if by_process else None
        # After all that can be refused without it: from here on there are threads to end.
        self.loop: Loop = (world.make_loop or LoopThread)("aiockpt", at_exit)
        cadences = [] if cadence is None else [cadence]
        observers = [*observers, *cadences, *self.interruption.observers, *self.probe.observers]
        observers += [*find_progress().observers, *([] if self.rewinder is None else [self.rewinder])]
        try:
            self._start(options, backends, observers, ranks, peers, world, memory)
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
        ranks: Ranks,
        peers: Peers | None,
        world: World,
        memory: SharedMemory | None,
    ) -> None:
        """Make the parts that need the loop, and start the background ones; the order matters."""
        loop, interruption, url = self.loop, self.interruption, backends[0].url
        self.incarnation = incarnation = Incarnation(ranks.store, url, ranks.rank, ranks.world_size, world.process)
        self.coordinator = coordinator = make_coordinator(incarnation, peers, self.tiers, loop, options, world)
        self.engine = engine = Engine(
            loop,
            options,
            observers,
            world,
            rank=ranks.rank,
            world_size=ranks.world_size,
            memory=memory,
        )
        engine.refuses_not_finite = self.rewinder is not None
        ends = start_observers(observers, engine, incarnation)
        destination = make_destination(engine, self.tiers, backends, coordinator, working=memory is None)
        ends += connect_hosts(destination, self.tiers, incarnation)
        if memory is not None:
            destination = start_writer(destination, coordinator, self.tiers, memory, ranks)
        self.destination = destination
        if observers:
            loop.call_soon(engine.emit, opened(ranks, world, backends))
        self.copies = copies = PendingCopies(options.deadlines.slab_s, _on_waited(engine))
        beside = LazySnapshotter(engine, copies, destination.places[0].uploader.busy_slabs)
        self.submitter = Submitter(destination, coordinator, copies, beside)
        self.end = EndOfRun(self.last_step, interruption, coordinator, engine.failures, self.probe)
        self.holds = holds = Holds(loop, destination)
        start_interruption(interruption, engine, destination, incarnation, coordinator.make_lookout)
        if self.rewinder is not None:
            alone = incarnation.world_size == 1
            notes = None if alone else CallNotes(NoteBoard(incarnation, "rewind"), coordinator.make_lookout)
            self.rewinder.begin(engine, destination, self.submitter, notes)
            ends.append(self.rewinder.stop)
        self.shutdown = Shutdown(
            engine,
            self.submitter,
            destination,
            copies,
            before=[holds.release_all],
            ends=[*ends, interruption.stop, partial(coordinator.depart, "its Checkpointer was closed", failed=False)],
            after=[interruption.release, self.last_step.release],
        )


def start_observers(
    observers: Sequence[Observer], engine: Engine, incarnation: Incarnation
) -> list[Callable[[], object]]:
    """Start the tasks of observers, and have cadences serve the saves; return a function to end each."""
    options, clock = engine.options, engine.world.clock
    tasks = [observer for observer in observers if isinstance(observer, BackgroundTask)]
    ends: list[Callable[[], object]] = [run_background(engine.loop, one, engine.emit, engine.drop) for one in tasks]
    limits = options.max_in_flight, options.deadlines.ranks_s
    cadences = [observer for observer in observers if isinstance(observer, Cadence)]
    ends += [cadence.join(engine.loop, incarnation, clock, *limits) for cadence in cadences]
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

    return find_peers(ranks)


def make_coordinator(
    incarnation: Incarnation,
    peers: Peers | None,
    tiers: Sequence[Tier],
    loop: Loop,
    options: Options,
    world: World,
) -> Coordinator:
    """Return the coordinator of this process and those that save with it; `Alone` for a single process."""
    if incarnation.world_size == 1:
        return Alone()
    from aiockpt.ranks.coordinator import RankCoordinator

    secret, terms = world.token(16).hex(), _terms(tiers, options)
    coordinator = RankCoordinator(incarnation, loop, options, secret, terms=terms, peers=peers)
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
        return OnePlace(Place(engine, backends[0], retention=retention_of(tiers[0], backends[0])), tiers[0])
    from aiockpt.places.tiers.tiers import Tiers

    return Tiers(tiers, engine, backends, coordinator, working=working)


def connect_hosts(
    destination: Destination, tiers: Sequence[Tier], incarnation: Incarnation
) -> list[Callable[[], object]]:
    """Connect the memories of the job's hosts, where steps are kept there; return a function to end each connection."""
    places = zip(destination.places, tiers, strict=True)
    of_hosts = [(place, tier) for place, tier in places if place.backend.traits.scope == "hosts"]
    if incarnation.world_size == 1 or not of_hosts:
        return []
    from aiockpt.places.peers.keeper import keep_copies

    return [keep_copies(place, tier, incarnation) for place, tier in of_hosts]


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
        process=world.process,
    )


def make_interruption(on_preempt: OnPreempt | Preemption | None, world: World) -> Interruption:
    """Return the source of requests to end the run early; for None, one that never does."""
    if on_preempt is None:
        return Interruption()
    from aiockpt.session.preemption.handler import PreemptionHandler
    from aiockpt.session.preemption.policy import as_preemption

    policy = as_preemption(on_preempt)
    return PreemptionHandler(policy, policy.find_end(world.clock.time_ns() / 1e9, announced_end_s()))


def make_rewinder(policy: Rewind | None) -> Rewinder | None:
    """Return what sets the run back from bad steps; None where it is never set back."""
    if policy is None:
        return None
    from aiockpt.session.rewind.rewinder import Rewinder

    return Rewinder(policy)


def start_interruption(
    interruption: Interruption,
    engine: Engine,
    destination: Destination,
    incarnation: Incarnation,
    make_lookout: MakeLookout,
) -> None:
    """Start *interruption*; with other ranks, notices are exchanged with them."""
    if not interruption.listens:
        return
    from aiockpt.session.preemption.decision import EndsAlone, EndsWithRanks
    from aiockpt.session.preemption.handler import PreemptionHandler

    assert isinstance(interruption, PreemptionHandler)
    alone = incarnation.world_size == 1
    agreement = EndsAlone() if alone else EndsWithRanks(CallNotes(NoteBoard(incarnation, "preemption"), make_lookout))
    interruption.begin(engine, destination, agreement)
