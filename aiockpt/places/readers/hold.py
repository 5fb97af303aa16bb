"""Holds, which keep a step while it is read, in any process, on any host, by any program.

The holder's lease lies in the step's folder, and is renewed long before it expires: a hold may last for days, and that of
a dead process ends within hours (docs/format.md#deletion).
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from aiockpt.engine.alone import Destination
from aiockpt.engine.find import find_manifest
from aiockpt.errors import StepNotFoundError, UsageError
from aiockpt.futures import Future
from aiockpt.pipeline.collect import LEASE_S
from aiockpt.pipeline.discover import find_copy
from aiockpt.runtime.loop import made_for_the_loop, refuse_in_event_loop
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.world import Loop
from aiockpt.storage.backend import local_path

RENEW_S = LEASE_S / 6
"""Seconds between two renewals of one lease: several may fail."""


class HeldStep(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step that is protected from deletion.

    Attributes:
        step, id: its number, and its folder below the root.
        url: the place where it lies, the nearest of the checkpointer's.
        folder: the step's own, where that place is a folder of this machine; None elsewhere.
    """

    step: int
    id: str
    url: str
    folder: Path | None


class Holds:
    """The holds of one checkpointer, whose steps lie in *destination*."""

    def __init__(self, loop: Loop, destination: Destination) -> None:
        self.loop = loop
        self.destination = destination
        self.active: set[Hold] = set()

    def make(self, step: int | None, who: str = "") -> Hold:
        """Return a hold of a step (the newest valid one for None) that has not begun.

        Args:
            who: the reader in words, shown to people; by default the process and its host.
        """
        return Hold(self, step, who or f"process {os.getpid()} on {socket.gethostname()}")

    def release_all(self) -> None:
        """Release all: the checkpointer is being closed. Blocks."""
        for hold in list(self.active):
            hold.release()


class Hold:
    """Keeps a step for the length of a block, plain or ``async``; made by `aiockpt.Checkpointer.hold`."""

    def __init__(self, holds: Holds, step: int | None, who: str) -> None:
        self._holds = holds
        self._step = step
        self._what = "hold of the newest step" if step is None else f"hold of step {step}"
        self._who = who
        self._keeping: Promise[None] | None = None
        with made_for_the_loop():
            self._over = anyio.Event()

    def __enter__(self) -> HeldStep:
        refuse_in_event_loop("a plain `with` block", "write `async with`")
        return self.begin().result()

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> HeldStep:
        return await self.begin()

    async def __aexit__(self, *_: object) -> None:
        await self.let_go()

    def release(self) -> None:
        """Release the step, and wait until its lease is gone. Idempotent; on no thread that runs an event loop."""
        if (ending := self._end()) is not None:
            ending.result()

    async def let_go(self) -> None:
        """`release`, in an event loop."""
        if (ending := self._end()) is not None:
            await ending

    def begin(self) -> Future[HeldStep]:
        """Begin without a block; `release` or `let_go` ends it.

        Raises: Raised by the future
            StepNotFoundError, NoValidCheckpointError: there is none, or it was deleted at this very moment.
            StorageError: the lease cannot be written, so that others would not see it.
        """
        if self._keeping is not None:
            raise UsageError(f"this {self._what} is in use: ask for another one, ckpt.hold(…)")
        held: Promise[HeldStep] = Promise(self._what)

        async def keep() -> None:
            try:
                async with holding(self._holds.destination, self._step, self._who) as step:
                    held.resolve(step)
                    await self._over.wait()
            except BaseException as error:
                held.fail(error)
                raise
            finally:
                self._holds.active.discard(self)

        self._holds.active.add(self)
        with made_for_the_loop():
            self._over = anyio.Event()
        keeping: Promise[None] = Promise(f"end of the {self._what}")
        keeping.run(self._holds.loop, keep)
        self._keeping = keeping
        return Future(held)

    def _end(self) -> Future[None] | None:
        """End it; return the future of its end, or None where it has ended already."""
        keeping, self._keeping = self._keeping, None
        if keeping is None or keeping.is_settled:
            return None
        self._holds.loop.call_soon(self._over.set)
        return Future(keeping)


@asynccontextmanager
async def holding(destination: Destination, step: int | None, who: str) -> AsyncIterator[HeldStep]:
    """Keep a step, the newest valid one for None, for the length of the block. On the loop.

    Raises:
        StepNotFoundError, NoValidCheckpointError: there is none, or it was deleted at this very moment.
        StorageError: the lease cannot be written, so that others would not see it.
    """
    found = await find_manifest(destination, step)
    place, manifest = found.place, found.manifest
    async with place.holding(manifest.id, who.encode()) as renew:
        if await find_copy(place.backend, manifest.id, manifest.attempt) is None:  # deleted before the lease was seen
            raise StepNotFoundError(
                f"{place.backend.url}: {manifest.id} was deleted at this moment; ask for another one"
            )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_renew_again_and_again, renew)
            root = local_path(url := place.backend.url)
            folder = None if root is None else root / manifest.id
            yield HeldStep(step=manifest.step, id=manifest.id, url=url, folder=folder)
            tasks.cancel_scope.cancel()


async def _renew_again_and_again(renew: Callable[[], Awaitable[None]]) -> None:
    while True:
        await anyio.sleep(RENEW_S)
        await renew()
