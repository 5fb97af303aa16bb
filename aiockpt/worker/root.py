"""Composition of a writer process from the trainer's first message: the engine that the trainer would have.

It differs in two points: it copies nothing, and its slabs belong to the trainer. As `aiockpt.session.checkpointer` in the
trainer, this module chooses the coordinator and the destination; no other module of the writer knows which they are.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import cast

import anyio
import msgspec

from aiockpt.engine.alone import Alone, Destination, OnePlace
from aiockpt.engine.context import Engine, Failures, Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.events import Event, SaveFailed, SaveStarted
from aiockpt.options import Options, Tier
from aiockpt.runtime.channel import Poster, Receiver
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.loop import LoopThread
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend
from aiockpt.worker.messages import (
    Answer,
    AnyEvent,
    Asked,
    Broken,
    GaveUp,
    Happened,
    Seen,
    Setup,
    TierSetup,
    encode,
    pack,
)
from aiockpt.worker.process import ignore_signals
from aiockpt.worker.server import LentSlabs, Post, Service, receive

logger = logging.getLogger("aiockpt")

FINAL_EVENTS_S = 60.0
"""For the trainer to read the last messages; a trainer that is gone reads nothing."""


def main(orders_fd: int, answers_fd: int, memory_fd: int) -> None:
    """Serve the trainer at the other end of these descriptors."""
    ignore_signals()
    orders, answers = Receiver(socket.socket(fileno=orders_fd)), Poster(socket.socket(fileno=answers_fd))
    loop = LoopThread("aiockpt-writer", on_exit=lambda: None)
    try:
        loop.submit(_serve, loop, orders, answers, memory_fd).result()
    finally:
        loop.close()


async def _serve(loop: LoopThread, orders: Receiver, answers: Poster, memory_fd: int) -> None:
    def post(answer: Answer) -> None:
        answers.post(encode(answer))

    await answers.open()
    try:
        setup = await receive(orders)
        if not isinstance(setup, Setup):
            return
        logging.basicConfig(format=f"aiockpt writer {os.getpid()}: %(message)s")
        logger.setLevel(setup.log_level)
        try:
            service = await run_blocking(Limiter("start", 1), make_service, loop, setup, memory_fd, post)
        except Exception as error:  # noqa: BLE001  the trainer raises it
            post(Broken(pack(error)))
            return
        await service.serve(orders)
    finally:
        with anyio.move_on_after(FINAL_EVENTS_S):
            await answers.close()
        orders.close()


def make_service(loop: LoopThread, setup: Setup, memory_fd: int, post: Post) -> Service:
    """Return the service of this writer.

    Args:
        setup: what to build.
        memory_fd: of the memory in which the slabs are.
        post: sends an answer to the trainer.
    """
    world = World()
    backends = [open_backend(tier.url, world=world) for tier in setup.tiers]
    options = Options(
        io=setup.io,
        deadlines=setup.deadlines,
        on_exists=setup.on_exists,
        screen=setup.screen,
        on_error="warn",
        worker="process",
    )
    store = RelayedStore(lambda number, question: loop.call_soon(post, Asked(number, question)))
    slabs = LentSlabs(memory_fd, setup.io.slab_bytes, post)
    coordinator = _make_coordinator(setup, store, backends[0], loop, options, world, post)
    engine = Engine(loop, options, [Teller(post)], world, rank=setup.rank, world_size=setup.world_size, lender=slabs)
    engine.refuses_not_finite = setup.refuses_not_finite
    engine.failures = Failures("raise", loop, limit=0)  # a save reports its own failure
    engine.notify_abandoned = lambda step, error: post(GaveUp(step, None, pack(error)))
    tiers = [_tier_of(order, number, post) for number, order in enumerate(setup.tiers)]
    return Service(_make_destination(engine, tiers, backends, coordinator), coordinator, store, slabs, post)


def _make_coordinator(
    setup: Setup, store: RelayedStore, place: Backend, loop: LoopThread, options: Options, world: World, post: Post
) -> Coordinator:
    if setup.world_size == 1:
        return Alone()
    from aiockpt.ranks.coordinator import RankCoordinator

    # That of the trainer, whose boards it joins by name.
    incarnation = Incarnation(store, place.url, setup.rank, setup.world_size, world.process)
    return RankCoordinator(
        *(incarnation, loop, options, world.token(16).hex()),
        seen=setup.seen,
        on_seen=lambda number: post(Seen(number)),
    )


def _make_destination(
    engine: Engine, tiers: Sequence[Tier], backends: Sequence[Backend], coordinator: Coordinator
) -> Destination:
    if len(tiers) == 1:
        return OnePlace(Place(engine, backends[0], retention=tiers[0].retention), tiers[0])
    from aiockpt.places.tiers.tiers import Tiers

    return Tiers(tiers, engine, backends, coordinator)


class Teller:
    """Sends events to the trainer's observers; the beginning and the failure of a save are emitted there."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def on_event(self, event: Event) -> None:
        if not isinstance(event, SaveStarted | SaveFailed):
            self._post(Happened(cast(AnyEvent, event)))


def _tier_of(order: TierSetup, number: int, post: Post) -> Tier:
    """Return the tier as the engine knows it, whose ``on_error`` is called in the trainer."""
    fields = msgspec.structs.asdict(order)
    if order.on_error == "call":
        fields["on_error"] = lambda error: post(GaveUp(-1, number, pack(error)))
    return Tier(**fields)
