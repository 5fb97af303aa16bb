"""Assembly of one checkpointer from the core's parts and optional packages, each imported where it is used.

`wire` puts them together, in an order that matters: coordinator, destination, snapshotters, observers, and what ends all
that. The writer process puts its own parts together (`aiockpt.worker.root`).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import Alone, Coordinator
from aiockpt.engine.destination import Destination, OnePlace
from aiockpt.engine.place import Place
from aiockpt.engine.snapshotter import ByCall, Eager
from aiockpt.engine.submit import Submitter
from aiockpt.events import BackgroundTask, BarrierWaited, Observer, Opened
from aiockpt.lazy.snapshotter import LazySnapshotter
from aiockpt.options import Options, Scrub, Tier, announced_end_s
from aiockpt.pipeline.device_copy import StateDevices
from aiockpt.pipeline.discover import refuse_step_folder
from aiockpt.places.readers.hold import Holds
from aiockpt.policies.cadence import Cadence
from aiockpt.prove.call_probe import CallProbe, Unwatched
from aiockpt.prove.session import Closes, find_probe
from aiockpt.redaction import redact
from aiockpt.runtime.background import run_background
from aiockpt.runtime.loop import LoopThread, made_for_the_loop
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.world import Loop, World
from aiockpt.session.interruption import Interruption, NeverInterrupted
from aiockpt.session.shutdown import Shutdown
from aiockpt.sizing.estimate import LastSaves
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.ranks.peers import Peers
    from aiockpt.runtime.shared_memory import SharedMemory
    from aiockpt.session.preemption.policy import OnPreempt, Preemption


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What a checkpointer is made of, at work.

    Attributes:
        probe: asked at each call; `aiockpt.prove` sees them there.
        interruption: whether a call is the last one.
        tiers: where saves really go.
        shutdown: ends all of it.
    """

    probe: CallProbe
    interruption: Interruption
    tiers: Sequence[Tier]
    loop: Loop
    engine: Engine
    coordinator: Coordinator
    destination: Destination
    copies: PendingCopies
    submitter: Submitter
    holds: Holds
    last_saves: LastSaves
    shutdown: Shutdown


@made_for_the_loop()
def wire(
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
) -> Assembly:
    """Make the parts of *checkpointer*, and start what works by itself. `aiockpt.Checkpointer` explains the options.

    Args:
        at_exit: finishes the saves under way when the interpreter exits.
        observers: without the *cadence*.
        world: None for this machine's.

    Raises:
        UsageError: a place cannot be opened, ranks do not fit, or a cadence serves another checkpointer.
    """
    simulated, world = world, world or World()
    peers = find_peers(ranks)
    interruption = make_interruption(on_preempt, world)
    by_process = options.worker == "process"
    probe = find_probe(checkpointer, ranks, tiers) or Unwatched()
    tiers, backends = probe.open_places(tiers, world, by_url=by_process)
    for backend in backends:
        refuse_step_folder(backend.url, world.files)
    memory = share_memory(tiers, backends, simulated) if by_process else None
    loop = (world.make_loop or LoopThread)("aiockpt", at_exit)
    try:
        last_saves = LastSaves()
        coordinator = make_coordinator(ranks, peers, tiers, backends[0], loop, options, world)
        cadences = [] if cadence is None else [cadence]
        observers = [*observers, *cadences, *interruption.observers, *probe.observers]
        engine = Engine(
            loop,
            options,
            [*observers, last_saves],
            world,
            rank=ranks.rank,
            world_size=ranks.world_size,
            memory=memory,
        )
        ends = start_observers(observers, engine, ranks, backends[0].url)
        destination = make_destination(engine, tiers, backends, coordinator, working=memory is None)
        if memory is not None:
            destination = start_writer(destination, coordinator, tiers, memory, ranks)
        if observers:
            loop.call_soon(engine.emit, opened(ranks, world, backends))
        copies = PendingCopies(options.deadlines.slab_s, _tell_waited(engine))
        submitter = Submitter(destination, coordinator, copies, make_snapshotter(engine, destination, copies))
        holds = Holds(loop, destination)
        start_interruption(interruption, engine, destination, ranks)
        stop_scrubbing = start_scrubber(scrub, engine, destination, ranks)
        shutdown = Shutdown(
            engine,
            submitter,
            destination,
            copies,
            before=[stop_scrubbing, holds.release_all],
            ends=[*ends, interruption.stop, _tell_leaving(coordinator)],
            after=interruption.release,
        )
    except BaseException:
        loop.discard()
        if memory is not None:
            memory.close()
        raise
    return Assembly(
        probe=probe,
        interruption=interruption,
        tiers=tiers,
        loop=loop,
        engine=engine,
        coordinator=coordinator,
        destination=destination,
        copies=copies,
        submitter=submitter,
        holds=holds,
        last_saves=last_saves,
        shutdown=shutdown,
    )


def start_observers(
    observers: Sequence[Observer], engine: Engine, ranks: Ranks, url: str
) -> list[Callable[[], object]]:
    """Start the tasks of observers, and have cadences serve the saves to *url*; return what ends each."""
    options, clock = engine.options, engine.world.clock
    tasks = [observer for observer in observers if isinstance(observer, BackgroundTask)]
    ends: list[Callable[[], object]] = [run_background(engine.loop, observer, engine.emit) for observer in tasks]
    limits = options.max_in_flight, options.deadlines.ranks_s
    cadences = [observer for observer in observers if isinstance(observer, Cadence)]
    ends += [cadence.join(engine.loop, ranks, url, clock, *limits) for cadence in cadences]
    return ends


def _tell_waited(engine: Engine) -> Callable[[int, float], None]:
    """Return what reports that an optimizer waited so many seconds for the copy of a step."""

    def tell(step: int, seconds: float) -> None:
        event = BarrierWaited(at_ns=engine.now_ns(), step=step, seconds=seconds)
        engine.loop.call_soon(engine.emit, event)

    return tell


def _tell_leaving(coordinator: Coordinator) -> Callable[[], None]:
    """Return what notifies the other ranks, at the end of all that this one does, that it makes no more calls."""
    return lambda: coordinator.depart("its Checkpointer was closed", failed=False)


def find_peers(ranks: Ranks) -> Peers | None:
    """Return the ranks that this one reads once with; None where it was given none."""
    if ranks.load_group is None:
        return None
    from aiockpt.ranks.peers import find_peers

    return find_peers(ranks.load_group, ranks)


def start_scrubber(scrub: Scrub | None, engine: Engine, destination: Destination, ranks: Ranks) -> Callable[[], object]:
    """Have the steps read again now and then, where that is asked for, by the first rank; return what ends it."""
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
    """Return how this process agrees with those that save with it; alone it needs nothing for that."""
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
    """Return where saves go and where steps lie.

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
    """Start a writer process; return what hands saves to it, and reads *here*."""
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


def make_snapshotter(engine: Engine, destination: Destination, copies: PendingCopies) -> ByCall:
    """Return how states are copied: in the call, or beside the program, as each call says."""
    devices = StateDevices(engine.accelerator, engine.pool)
    busy_slabs = destination.places[0].uploader.busy_slabs
    lazy = LazySnapshotter(engine.options, engine.accelerator, devices, copies, engine.pool, busy_slabs, engine.now_ns)
    compares = engine.options.debug == "digest"
    return ByCall(Eager(devices, lazy.guard_in_call) if compares else Eager(devices), lazy)


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
    """Return what identifies this process, also against a later one with its *pid*; a forked child has its own."""
    return secrets.token_hex(4)


def make_interruption(on_preempt: OnPreempt | Preemption | None, world: World) -> Interruption:
    """Return what may end the run before it is done; for None nothing."""
    if on_preempt is None:
        return NeverInterrupted()
    from aiockpt.session.preemption.handler import PreemptionHandler
    from aiockpt.session.preemption.policy import as_preemption

    policy = as_preemption(on_preempt)
    return PreemptionHandler(policy, policy.find_end(world.clock.time_ns() / 1e9, announced_end_s()))


def start_interruption(interruption: Interruption, engine: Engine, destination: Destination, ranks: Ranks) -> None:
    """Have *interruption* listen; with other ranks, notices go to them and come from them."""
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
