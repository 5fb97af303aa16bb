"""Reception on one loop: the newest version is looked for, what leads to it downloaded, and the folder updated.

Guarantees:

- What follows the folder's version is downloaded as it comes; the folder changes in `Reception.next` only.
- An outage, or a damaged version, is logged and waited out while the receiver follows; else it is raised.
"""

from __future__ import annotations

import logging
from pathlib import Path

import anyio

from aiockpt.errors import CheckpointError
from aiockpt.options import GIB
from aiockpt.publish.downloads import Downloads
from aiockpt.publish.form import VersionIndex, newest_full
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.publish.received_version import ReceivedVersion
from aiockpt.publish.receiver_notes import RENEW_S, remove_note, write_note
from aiockpt.publish.update_plan import UpdatePlan, plan_update
from aiockpt.publish.updater import Updater
from aiockpt.publish.version_chain import VersionChain
from aiockpt.publish.versions import Versions
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend

logger = logging.getLogger("aiockpt")

AHEAD_BYTES = GIB
"""Of deltas that are downloaded before the program asks for them."""
LONGEST_WAIT_S = 60.0
"""Between two tries while the place, or its newest version, cannot be read."""


class Reception:
    """Keeps *copy* at the newest version in *backend*; on one loop.

    Args:
        name: of the receiver.
        every_s: seconds between two looks.
        follow: wait for versions to come.
        base: a folder whose tensors the first version may be made of.

    Attributes:
        at: number and attempt of the version that was handed out last.
    """

    def __init__(
        self,
        backend: Backend,
        copy: LocalCopy,
        name: str,
        world: World,
        *,
        every_s: float,
        follow: bool,
        base: Path | None,
    ) -> None:
        self._backend = backend
        self._copy = copy
        self._name = name
        self._every_s = every_s
        self._follow = follow
        self._base = base
        self._chain = VersionChain(Versions(backend, world))
        self._downloads = Downloads(backend, copy.private)
        self._updater = Updater(copy, self._downloads, backend)
        self._newest: VersionIndex | None = None
        self.at: tuple[int, str] = (-1, "")
        self._step = self._least = -1
        self._is_begun = self._is_dirty = self._is_refused = False
        self._refused_s = 0.0
        self._broken: BaseException | None = None
        self._looking = anyio.Lock()
        self._news = anyio.Event()

    def __repr__(self) -> str:
        return f"{self._name} of {self._backend.url} in {self._copy.path}"

    async def run(self) -> None:
        """Look for versions, download what follows, and renew the note, until cancelled."""
        try:
            async with open_tasks() as tasks:
                tasks.start_soon(self._renew)
                if self._follow:
                    tasks.start_soon(self._look_again_and_again)
        except BaseException as error:
            self._broken = error
            self._news.set()
            raise

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(RENEW_S)
            await self._note(self._least)

    async def _look_again_and_again(self) -> None:
        wait_s = self._every_s
        while True:
            try:
                await self._look()
                wait_s = self._every_s
            except CheckpointError as error:
                wait_s = self._put_off("the place cannot be read now", error, wait_s)
            await anyio.sleep(wait_s)

    def _put_off(self, what: str, error: CheckpointError, wait_s: float) -> float:
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        logger.warning("receiver %s: %s, and is tried again in %.1f s: %s", self._name, what, wait_s, error)
        return wait_s

    async def _note(self, needs: int) -> None:
        self._least = needs
        await write_note(self._backend, self._name, self.at[0], self._step, needs)

    async def _look(self) -> None:
        """Find the newest version, and download the deltas that lead to it from the one at hand."""
        async with self._looking:
            self._newest = newest = await self._chain.newest()
            if newest is None or self._is_at(newest):
                return
            self._news.set()
            if self.at[0] < 0:
                return
            chain, _ = await self._chain.leading_to(newest, self.at[0])
            ahead_bytes = 0
            for index in reversed([one for one in chain if one.number > self.at[0] and not one.is_full]):
                ahead_bytes += index.file_bytes
                if ahead_bytes > AHEAD_BYTES:
                    break
                await self._downloads.fetch(index)

    def _is_at(self, index: VersionIndex) -> bool:
        return self.at == (index.number, index.notes.attempt)

    def refuse(self) -> None:
        """Let the next call of `next` return the version again, or a newer one, after a pause; on the caller's thread."""
        self._is_refused = True

    async def next(self) -> ReceivedVersion | None:
        """Make the folder the newest version, once there is one; None where no version is to come."""
        if self._is_refused:
            self._is_refused, self.at = False, (-1, "")
            self._refused_s = min(2 * self._refused_s or self._every_s, LONGEST_WAIT_S)
            await anyio.sleep(self._refused_s)
        else:
            self._refused_s = 0.0
        wait_s = self._every_s
        while True:
            try:
                if not self._is_begun:
                    await self._downloads.clear()
                    await self._updater.hash_copy()
                    self._is_begun = True
                await self._look()
                if self._newest is not None and not self._is_at(self._newest):
                    return await self._advance()
            except CheckpointError as error:
                if not self._follow:
                    raise
                wait_s = self._put_off("the newest version cannot be received now", error, wait_s)
                await anyio.sleep(wait_s)
                continue
            if not self._follow:
                return None
            await self._news.wait()
            self._news = anyio.Event()
            if self._broken is not None:
                raise self._broken

    async def _advance(self) -> ReceivedVersion:
        async with self._looking:
            assert self._newest is not None
            if self._base is not None and self._copy.version < 0:
                base, self._base = self._base, None
                await self._updater.open_base(base)
            # With nothing here the newest full version is the way: no index before that one is read.
            is_fresh = self._copy.version < 0 and not self._updater.base
            since = self._newest.number if is_fresh else self._copy.version
            chain, folds = await self._chain.leading_to(self._newest, since)
            full = newest_full([*chain, *folds])
            if self._copy.layout != self._newest.notes.layout and full is not None:
                await self._updater.lay_out(full)
            plan = plan_update(self._updater.digests, chain, folds, self._backend.url, self._updater.base)
            await self._note(plan.least)
            if self._updater.base and not self._is_dirty:
                self._log_base(plan)
            is_whole = self.at[0] < 0 or self._is_dirty or any(how.full or how.base for how in plan.tensors.values())
            self._is_dirty = True
            await self._updater.apply(plan)
            self._is_dirty = False
            self._updater.close_base()
            return await self._handed_out(plan, is_whole=is_whole)

    def _log_base(self, plan: UpdatePlan) -> None:
        taken, count = sum(how.base is not None for how in plan.tensors.values()), len(plan.target.notes.tensors)
        if taken:
            logger.info("receiver %s: %d of %d tensors are taken from the base", self._name, taken, count)
        elif any(how.full for how in plan.tensors.values()):
            logger.warning(
                "receiver %s: the base has no tensor of a version that leads to %d, so all are downloaded; publish it as "
                "the first version",
                self._name, plan.target.number,
            )  # fmt: skip

    async def _handed_out(self, plan: UpdatePlan, *, is_whole: bool) -> ReceivedVersion:
        target = plan.target
        self.at, self._step = (target.number, target.notes.attempt), target.notes.step
        await self._note(target.number)
        await self._downloads.drop(plan.deltas[0].number if plan.deltas else target.number + 1)
        self._chain.drop(plan.least)
        if is_whole:
            return ReceivedVersion(self._copy, target, dict.fromkeys(target.notes.tensors), self.refuse)
        frames = {index.number: await self._downloads.fetch(index) for index in plan.deltas}
        # Of each tensor its own deltas: one that was back at its old bytes meanwhile has fewer than others.
        changed = {name: [frames[one.number] for one in how.deltas] for name, how in plan.tensors.items()}
        return ReceivedVersion(self._copy, target, changed, self.refuse)

    async def end(self) -> None:
        """Remove the receiver's note."""
        await remove_note(self._backend, self._name)
