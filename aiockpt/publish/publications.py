"""Publications of one checkpointer: on request, and of each committed step.

Guarantees:

- A publication never holds up a save, and its failure never fails one: in the background it is logged and emitted.
- While a version is written, committed steps wait, and the newest of them is published next.
- What storage has refused is tried again, unless a newer step is due: who rolls out may wait for it, and training for them.
- When the checkpointer is closed in order, the last committed step is published first. After a kill before that, the next
  resume publishes it: who rolls out for a trainer may need it for the trainer to go on.
"""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, cast

import anyio
from anyio.abc import TaskStatus

from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.submit import check_step
from aiockpt.errors import CheckpointError, StepNotFoundError, StorageError
from aiockpt.events import Committed, Event, PublicationFailed, VersionPublished
from aiockpt.futures import Future
from aiockpt.places.readers.hold import holding
from aiockpt.publish.frames import load_zstd
from aiockpt.publish.publication import Publish, Published, as_publish
from aiockpt.publish.publisher import Publisher
from aiockpt.publish.shares import ShareRequests, ShareWriter, spread_ranks
from aiockpt.redaction import redact
from aiockpt.runtime.loop import Submitted, made_for_the_loop
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.world import Loop
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.ranks.coordinator import RankCoordinator

logger = logging.getLogger("aiockpt")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before a publication that storage has refused is tried again: at first, and at most."""


class Publications:
    """The publishers of one checkpointer, one for equal options: the same place, and the same weights of a step.

    Args:
        coordinator: of the ranks, which share out the files of what `follow` publishes.

    Raises:
        UsageError: zstd is not installed.
    """

    def __init__(self, loop: Loop, destination: Destination, coordinator: Coordinator) -> None:
        load_zstd()
        self._coordinator = coordinator
        self._loop = loop
        self._destination = destination
        self._engine: Engine = destination.engine
        self._publishers: list[tuple[Publish, Publisher]] = []
        self._follower: _Follower | None = None
        self._background: list[tuple[_Follower | ShareWriter, Submitted]] = []
        with made_for_the_loop():
            self._begun, self._over = anyio.Event(), anyio.Event()
        self._serving = loop.submit(self._serve)

    def publish(self, step: int, dest: str | os.PathLike[str] | Backend | Publish, *, full: bool) -> Future[Published]:
        """Publish a step, as `aiockpt.Checkpointer.publish` does."""
        step, options = check_step(step), as_publish(dest)
        publisher = self._publisher(options)
        promise: Promise[Published] = Promise(f"publication of step {step}")
        promise.run(self._loop, self.publish_with, publisher, step, full)
        return Future(promise)

    def follow(self, dest: str | os.PathLike[str] | Backend | Publish) -> None:
        """Publish each committed step from now on: of several ranks the first one does, and others write files for it."""
        options = as_publish(dest)
        task: _Follower | ShareWriter | None = None
        ranks = cast("RankCoordinator", self._coordinator) if self._coordinator.world_size > 1 else None
        if self._engine.rank == 0:
            publisher = self._publisher(options)
            publisher.shares = None if ranks is None else ShareRequests(ranks)
            task = self._follower = follower = _Follower(self, publisher, options.every or 1)
            self._engine.add_observer(follower)
        elif ranks is not None and ranks.rank in spread_ranks(ranks.world_size):
            task = ShareWriter(ranks, lambda request: self._publisher(options).write_share(request))
        if task is not None:
            self._background.append((task, self._loop.submit(task.run)))

    def resume(self, step: int) -> None:
        """Publish the last step that was due before the run goes on behind *step*, if that is not done."""
        if self._follower is not None:
            self._loop.call_soon(self._follower.reach, step - step % self._follower.every)

    def _publisher(self, options: Publish) -> Publisher:
        for known, publisher in self._publishers:
            if known == options:  # backends are equal if they are one object, whatever they are called
                return publisher
        with made_for_the_loop():
            made = Publisher(self._destination, options, self._hold)
        self._publishers.append((options, made))
        return made

    async def _serve(self) -> None:
        """Be the parent of the holds."""
        async with anyio.create_task_group() as self._tasks:
            self._begun.set()
            await self._over.wait()
            self._tasks.cancel_scope.cancel()

    async def _hold(self, step: int, url: str) -> anyio.Event:
        """Hold a step, for a publication to *url*, until the event that is returned is set."""
        await self._begun.wait()
        release = anyio.Event()
        await self._tasks.start(self._keep, step, redact(url), release)
        return release

    async def _keep(self, step: int, url: str, release: anyio.Event, *, task_status: TaskStatus[None]) -> None:
        async with holding(self._destination, step, f"the publisher to {url}, as the base of the next version"):
            task_status.started()
            await release.wait()

    async def publish_with(self, publisher: Publisher, step: int, full: bool) -> Published:
        """Publish a step and emit what became of it; on the loop."""
        url = redact(publisher.url)
        try:
            published, receivers = await publisher.publish(step, full=full)
        except CheckpointError as error:
            now_ns = self._engine.now_ns()
            self._engine.emit(PublicationFailed(at_ns=now_ns, step=step, url=url, error=repr(error)))
            raise
        event = VersionPublished(
            at_ns=self._engine.now_ns(),
            step=published.step,
            url=url,
            version=published.version,
            kind=published.kind,
            bytes=published.file_bytes,
            weight_bytes=published.weight_bytes,
            seconds=published.seconds,
            receivers={note.name: published.version - note.version for note in receivers},
        )
        self._engine.emit(event)
        return published

    def finish(self) -> None:
        """Wait until what was committed is published, and release the held steps. Blocks; never on the loop thread."""
        try:
            for task, running in self._background:
                self._loop.submit(task.end).result()
                running.result()
        finally:
            self._loop.call_soon(self._over.set)
            self._serving.result()
            for _, publisher in self._publishers:
                self._loop.submit(publisher.close).result()


class _Follower:
    """Publishes committed steps that are multiples of *every*: an observer, and a task on the loop."""

    def __init__(self, publications: Publications, publisher: Publisher, every: int) -> None:
        self._publications = publications
        self._publisher = publisher
        self.every = every
        self._due: int | None = None
        self._refused: int | None = None
        self._is_ending = False
        with made_for_the_loop():
            self._news = anyio.Event()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.reach(event.step)

    def reach(self, step: int) -> None:
        """Publish a committed step next, if it is due; on the loop."""
        if step % self.every == 0:
            self._due = step
            self._news.set()

    async def run(self) -> None:
        """Publish what is due until `end`, and then what is left."""
        pause_s = FIRST_PAUSE_S
        while not self._is_ending or self._due is not None:
            with anyio.move_on_after(math.inf if self._refused is None else pause_s):
                await self._news.wait()
            self._news = anyio.Event()
            step, self._due, self._refused = self._refused if self._due is None else self._due, None, None
            if step is not None:
                await self._publish(step)
            pause_s = FIRST_PAUSE_S if self._refused is None else min(2 * pause_s, LONGEST_PAUSE_S)

    async def end(self) -> None:
        """Let `run` end when all that is due is published."""
        self._is_ending = True
        self._news.set()

    async def _publish(self, step: int) -> None:
        try:
            await self._publications.publish_with(self._publisher, step, False)
        except StepNotFoundError as error:  # retention was faster; the newer step follows
            logger.info("step %d is not published: %s", step, error)
        except StorageError as error:
            self._refused = step
            logger.error("step %d is not published; it is tried again, or a newer one is: %s", step, error)
        except CheckpointError as error:
            logger.error("step %d is not published: %s", step, error)
        except Exception:
            logger.exception("step %d is not published", step)

    def __repr__(self) -> str:
        return f"<publication to {redact(self._publisher.url)}>"
