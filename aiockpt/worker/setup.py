"""The check that a writer process can do what a checkpointer is asked for, and the first message to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from aiockpt.errors import UsageError
from aiockpt.options import Options, Tier
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.world import World
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend
from aiockpt.worker.messages import Setup, TierSetup

_INSTEAD = "; use worker='thread'"


def check_worker(tiers: Sequence[Tier], backends: Sequence[Backend], world: World | None) -> None:
    """Return when a process of its own can write to these places.

    Raises:
        UsageError: it cannot; gives the reason.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError(f"worker='process' needs memory that two processes share (Linux: memfd_create){_INSTEAD}")
    if world is not None:
        raise UsageError(f"worker='process': a process cannot be given this world={world!r:.60}{_INSTEAD}")
    for tier, backend in zip(tiers, backends, strict=True):
        if not isinstance(tier.url, str | os.PathLike):
            raise UsageError(
                f"worker='process': {type(tier.url).__name__} is an object of this process; give the URL or path from which "
                f"another one can make it{_INSTEAD}"
            )
        if backend.traits.scope == "process":
            raise UsageError(
                f"worker='process': {backend.url} is memory of this process; shm:// is this host's{_INSTEAD}"
            )


def compose_setup(tiers: Sequence[Tier], options: Options, ranks: Ranks) -> Setup:
    """Return the first message for a writer of this one of the *ranks*."""
    return Setup(
        tiers=tuple(map(_order, tiers)),
        io=options.io,
        deadlines=options.deadlines,
        on_exists=options.on_exists,
        screen=options.screen,
        log_level=logging.getLogger("aiockpt").getEffectiveLevel(),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _order(tier: Tier) -> TierSetup:
    return TierSetup(
        url=parse_address(tier.url).url,
        every=tier.every,
        keep=tier.retention,
        deadline=tier.deadline,
        bandwidth=tier.bandwidth,
        on_error="call" if callable(tier.on_error) else tier.on_error,
        content=tier.content,
    )
