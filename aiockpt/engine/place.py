"""State that the operations on one place share: storage, uploader, readers, what retention knows of it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import anyio

from aiockpt.engine.context import Engine
from aiockpt.errors import CheckpointError
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import lease_key
from aiockpt.options import Retention
from aiockpt.pipeline.discover import Heads, StepCopy
from aiockpt.pipeline.upload import Uploader
from aiockpt.runtime.limits import Pace
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying

logger = logging.getLogger("aiockpt")

UPLOADS_EVERY_S = 3600.0
"""Between two searches for uploads that dead saves left in an object store; they are a day old before they count."""


async def no_other_copies(_: Manifest) -> Sequence[StepCopy]:
    """Return nothing: there is one place only."""
    return ()


class Place:
    """One root below which steps lie. Used on the engine's loop.

    Args:
        engine: what all places share.
        number: of this one, 0 is the nearest.
        retention: what is kept here; None keeps all.

    Attributes:
        cleaning: held by each operation that deletes here.
        heads: what retention has read of the steps here.
        thin_steps: (id, generation) of the steps that are known to have their weights alone here.
        other_copies: finds the same save in other places, the nearest first, for what is damaged here.
    """

    def __init__(self, engine: Engine, backend: Backend, number: int = 0, retention: Retention | None = None) -> None:
        self.engine = engine
        self.backend = backend
        self.number = number
        self.retention = retention
        pace = Pace(engine.options.io.bandwidth, engine.world.clock)
        self.uploader = Uploader(backend, engine.lender, engine.block_bytes, pace)
        self.cleaning = anyio.Lock()
        self.heads = Heads()
        self.thin_steps: set[tuple[str, int]] = set()
        self.other_copies: Callable[[Manifest], Awaitable[Sequence[StepCopy]]] = no_other_copies
        self._looked_for_uploads_ns: int | None = None
        self._reading: dict[str, int] = {}
        engine.lineage.places.append(backend)
        if isinstance(backend, Retrying):
            backend.add_listener(engine.emit)

    @property
    def being_read(self) -> frozenset[str]:
        """The ids of steps that this process is reading."""
        return frozenset(self._reading)

    @asynccontextmanager
    async def reading(self, step_id: str) -> AsyncIterator[None]:
        """Keep retention, here and in other processes, away from a step for the length of the block."""
        with self._pinning(step_id):
            async with self._leasing(step_id, b"", must=False):
                yield

    @asynccontextmanager
    async def holding(self, step_id: str, who: bytes) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Do so for a reader outside this process, and yield what renews the lease.

        Args:
            who: written into the lease, for people who wonder why a step is kept.

        Raises:
            StorageError: the lease cannot be written, so that it would have no effect.
        """
        with self._pinning(step_id):
            async with self._leasing(step_id, who, must=True) as renew:
                yield renew

    @contextmanager
    def _pinning(self, step_id: str) -> Iterator[None]:
        self.pin(step_id)
        try:
            yield
        finally:
            self.unpin(step_id)

    def pin(self, step_id: str) -> None:
        """Keep this process's retention away from a step until `unpin`. On the loop."""
        self._reading[step_id] = self._reading.get(step_id, 0) + 1

    def unpin(self, step_id: str) -> None:
        """Take one `pin` back."""
        self._reading[step_id] -= 1
        if not self._reading[step_id]:
            del self._reading[step_id]

    @asynccontextmanager
    async def _leasing(self, step_id: str, who: bytes, *, must: bool) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Have a lease on a step for the length of the block; without *must* go on where none can be written."""
        key = lease_key(step_id, self.engine.token(6))

        async def renew() -> None:
            try:
                await self.backend.put(key, who)
            except CheckpointError as error:
                logger.warning("lease %s cannot be renewed now: %s", key, error)

        leased = True
        try:
            await self.backend.put(key, who)
        except CheckpointError:
            leased = False  # a read-only place: nothing is deleted there either
            if must:
                raise
        try:
            yield renew
        finally:
            if leased:
                with anyio.move_on_after(10, shield=True):
                    await self._release(key)

    async def _release(self, key: str) -> None:
        try:
            await self.backend.delete([key])
        except CheckpointError as error:
            logger.info("lease %s is left to expire: %s", key, error)

    def uploads_are_due(self) -> bool:
        """Return whether it is time to look for uploads that dead saves left: after the first save, then each hour."""
        last_ns, now_ns = self._looked_for_uploads_ns, self.engine.now_ns()
        if last_ns is not None and now_ns - last_ns < UPLOADS_EVERY_S * 1e9:
            return False
        self._looked_for_uploads_ns = now_ns
        return True
