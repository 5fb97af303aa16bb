"""Promotion of steps to one tier from nearer ones: one after the other, in the background, at the tier's own pace.

Guarantees:

- A tier that is stalled, full or unreachable delays only itself. A failed copy is retried, less and less often, until its
  deadline; when more than `MOST_WAITING` steps wait, the oldest is abandoned for the newer ones. All is logged.
- The first save of a process also copies what an earlier one could not: the newest step that only nearer tiers have.
- A step that waits is not deleted from the durable tiers where it will be read. Memory keeps it only while it is copied:
  a memory tier holds what its rules keep and what is being copied, never more, also after the end.
- At the end a tier is waited for while its transfers progress, and abandoned after `STALLED_S` without progress: one
  warning names the steps that it lacks.

How the ranks make one copy together is in `aiockpt.places.tiers.joint_copy`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio
import msgspec

from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.find import committed_steps
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    SaveCancelledError,
    SaveSkippedError,
    StorageTimeoutError,
    UsageError,
)
from aiockpt.events import Promoted, PromotionFailed, PromotionQueued
from aiockpt.futures import SaveResult
from aiockpt.options import Tier
from aiockpt.pipeline.discover import StepAt, StepCopy, find_copy, list_step, newest_manifest
from aiockpt.places.tiers.joint_copy import JointCopy, Promotion
from aiockpt.planning.weights import has_weights_only, weights_attempt
from aiockpt.runtime.limits import Pace, reporting_progress
from aiockpt.runtime.promise import Promise

# Steps left by an earlier process: the newest one that nearer tiers have, and that a tier accepts and lacks.


async def find_missing_step(tier: Tier, number: int, destination: Destination) -> dict[int, StepCopy]:
    """Return the copies of that step in full, by number of their tier; empty when *tier* has the newest that it accepts.

    Steps of this process do not count: they are queued already, even if their commit is too recent to be known here.

    Args:
        number: of *tier*.

    Raises:
        CheckpointError: the steps cannot be listed.
    """
    own = destination.places[number]
    every = await committed_steps(destination)
    for entry in (listed.entry for listed in every):
        if entry.head is None or not tier.takes(entry.step):
            continue
        there = await list_step(own.backend, entry.id)
        attempt = entry.head.attempt if tier.full else weights_attempt(entry.head.attempt)
        if there.committed and attempt in there.attempts:
            break
        if not own.engine.lineage.is_earlier(entry.head.sequence):
            continue
        copies = await _copies(entry.id, entry.head.attempt, [one for one in every if one.number < number])
        if copies:
            return copies
    return {}


async def _copies(step_id: str, attempt: str, nearer: Sequence[StepAt]) -> dict[int, StepCopy]:
    """Return every whole copy of a save, by number of its tier: retention may take the nearest away at any time."""
    copies = {}
    for one in nearer:
        if one.entry.id == step_id and one.entry.head is not None and one.entry.head.attempt == attempt:
            with suppress(CheckpointError):
                manifest = await newest_manifest(one.backend, one.entry)
                if not has_weights_only(manifest):
                    copies[one.number] = StepCopy(one.backend, manifest)
    return copies


logger = logging.getLogger("aiockpt")

MOST_WAITING = 2
STALLED_S = 5.0
"""Seconds without progress, after the last save, before a tier is abandoned."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 60.0
"""Between tries."""
_HOPELESS = (CorruptionError, SaveSkippedError, UsageError)
"""Errors that another attempt would raise again."""


class _Waiting(msgspec.Struct):
    """A step that waits for a tier, and the tiers that keep it for that."""

    promotion: Promotion
    stage: Promise[SaveResult]
    held: tuple[int, ...]


class Promoter:
    """Copies steps to one tier. Used on the engine's loop.

    Args:
        destination: all tiers; those that have a step keep it while it waits here.
        coordinator: how this process agrees with the other ranks.

    Attributes:
        joint_copy: makes one copy, with the other ranks.
    """

    def __init__(self, tier: Tier, place: Place, destination: Destination, coordinator: Coordinator) -> None:
        self.number = place.number
        self.tier = tier
        self.place = place
        self.engine = place.engine
        self.joint_copy = JointCopy(tier, place, coordinator)
        self._destination = destination
        self._capped = Pace(tier.bandwidth, place.engine.world.clock)
        self._waiting: list[_Waiting] = []
        self._wants_catch_up = self._caught_up = False
        self._changed = anyio.Event()
        self._closing = anyio.Event()
        self._ended = anyio.Event()
        self._working: anyio.CancelScope | None = None
        self._moved_ns = 0

    @property
    def url(self) -> str:
        return self.place.backend.url

    @property
    def names(self) -> set[str]:
        """The names that a caller may use: the URL as it was given, and that of the backend."""
        given = self.tier.url
        return {self.url, os.fspath(given)} if isinstance(given, str | os.PathLike) else {self.url}

    @property
    def durable(self) -> bool:
        return self.place.backend.traits.durable

    @property
    def commits(self) -> bool:
        """Whether a step that is here is committed."""
        return self.durable and self.tier.full

    async def enqueue(self, promotion: Promotion, stage: Promise[SaveResult]) -> None:
        """Have *promotion* copied here in the background."""
        held = tuple(number for number in promotion.copies if self._destination.places[number].backend.traits.durable)
        for number in held:
            self._destination.places[number].protect(promotion.result.id)
        self._waiting.append(_Waiting(promotion, stage, held))
        self._waiting[1:] = sorted(
            self._waiting[1:], key=lambda waiting: waiting.promotion.age
        )  # saves may end in any order
        engine = self.engine
        engine.emit(PromotionQueued(at_ns=engine.now_ns(), step=promotion.step, url=self.url))
        self._changed.set()
        if len(self._waiting) > MOST_WAITING + 1:  # the first is at work
            slow = SaveSkippedError(
                f"step {self._waiting[1].promotion.step} was given up in {self.url}: {MOST_WAITING} newer steps wait for "
                "it; give the tier more bandwidth, or fewer steps (Tier(every=…))"
            )
            await self._abandon(1, slow)

    def catch_up(self) -> None:
        """Copy here, once, what an earlier process left, even while there is nothing newer to copy."""
        if not self._wants_catch_up:
            self._wants_catch_up = True
            self._changed.set()

    async def work(self) -> None:
        """Copy what waits, one step after the other, until `close`."""
        try:
            self._working = anyio.CancelScope()
            with reporting_progress(self._note_progress), self._working as working:
                await self._copy_all()
            if working.cancelled_caught:
                await self._abandon_all()
        finally:
            self.joint_copy.close()
            for left in self._waiting:  # the loop ends with this task: nothing else would end a wait for them
                left.stage.fail(SaveCancelledError(f"{left.stage.what}: cancelled with its event loop"))
            self._ended.set()

    async def _copy_all(self) -> None:
        while self._waiting or not self._closing.is_set():
            if self._wants_catch_up and not self._caught_up:
                self._caught_up = True
                await self._by_deadline("the copy of what an earlier process left", self._catch_up)
                continue
            if not self._waiting:
                # Nothing was awaited since the check, so no notice is lost.
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            try:
                await self._keep_in_memory(self._waiting[0])
                result = await self._keep_trying(self._waiting[0].promotion)
            except Exception as error:  # noqa: BLE001  whatever it is, the next step may get there
                await self._abandon(0, error)
            else:
                done = self._release(0)
                done.stage.resolve(result)
                await self._thin_memory(done)
                if self.engine.rank == 0:
                    await self._by_deadline("the clean-up", partial(maintenance.clean_up, self.place, result))

    async def _keep_in_memory(self, waiting: _Waiting) -> None:
        """Pin a step in the memory tiers while it is copied; a step that only waits is not pinned there.

        Raises:
            SaveSkippedError: it was in memory alone, and newer steps replaced it while it waited.
        """
        promotion = waiting.promotion
        for number in list(promotion.copies):
            place = self._destination.places[number]
            if place.backend.traits.durable:
                continue
            # Before it is looked for: retention could delete it in between.
            place.protect(promotion.result.id)
            waiting.held += (number,)
            with suppress(CheckpointError):
                if await find_copy(place.backend, promotion.result.id, promotion.attempt) is not None:
                    continue
            if len(promotion.copies) == 1:
                raise SaveSkippedError(
                    f"step {promotion.step} was in {place.backend.url} only, and gave way to newer steps while {self.url} "
                    "had others to take; give the memory tier a higher keep, or this one more bandwidth"
                )
            del promotion.copies[number]

    async def _thin_memory(self, left: _Waiting) -> None:
        """Apply retention in the memory tiers that kept a step for this one: no later save may do so."""
        for number in left.held:
            place = self._destination.places[number]
            rules = place.retention
            if place.backend.traits.durable or rules is None or self.engine.rank != 0:
                continue
            try:
                async with place.cleaning:
                    await maintenance.prune(place, rules, with_uploads=False)
            except CheckpointError as error:
                logger.warning("%s: clean-up failed: %s", place.backend.url, error)

    def _note_progress(self, unseen_s: float) -> None:
        self._moved_ns = max(self._moved_ns, self.engine.now_ns() + round(unseen_s * 1e9))

    async def _by_deadline(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run *work*, which can be postponed if the tier hangs, until the tier's deadline."""
        with anyio.move_on_after(self.tier.deadline) as scope:
            await work()
        if scope.cancelled_caught:
            logger.warning("%s: no answer within %g s; %s is postponed", self.url, self.tier.deadline, what)

    async def _catch_up(self) -> None:
        """Copy here the newest step that an earlier process left in a nearer tier, if this tier accepts it."""
        if self.engine.rank != 0:
            return
        try:
            copies = await find_missing_step(self.tier, self.number, self._destination)
        except CheckpointError as error:
            logger.warning(
                "%s: steps of an earlier process cannot be listed; the next save tries again: %s",
                self.url,
                error,
            )
            self._wants_catch_up = self._caught_up = False  # the next save lists them again
            return
        if copies:
            manifest = copies[min(copies)].manifest
            size = sum(file.size for file in manifest.files)
            result = SaveResult(manifest.step, manifest.id, manifest.generation, size, seconds=0.0)
            stage: Promise[SaveResult] = Promise(f"step {manifest.step}, in {self.url}")
            await self.enqueue(Promotion(result, copies, self.engine.now_ns(), alone=True), stage)

    async def close(self) -> None:
        """Wait until no step waits here, while transfers progress. Failures from now on are not retried."""
        self._closing.set()
        self._changed.set()
        self._note_progress(0.0)
        while not self._ended.is_set():
            left_s = STALLED_S - self.engine.since_s(self._moved_ns)
            if left_s <= 0 and self._working is not None:
                self._working.cancel()
                await self._ended.wait()
            with anyio.move_on_after(left_s):
                await self._ended.wait()

    async def _abandon_all(self) -> None:
        """Abandon the steps that wait, and log them once: this tier has made no progress since the last save."""
        if not self._waiting:
            return
        steps = ", ".join(str(waiting.promotion.step) for waiting in self._waiting)
        logger.warning(
            "%s: nothing moved there for %g s, so the end does not wait for it; it lacks step %s. The first save of the next"
            " process copies the newest of them there, or `aiockpt cp` does",
            *(self.url, STALLED_S, steps),
        )
        while self._waiting:
            step = self._waiting[0].promotion.step
            left = SaveSkippedError(
                f"step {step} was not copied to {self.url}: nothing moved there for {STALLED_S:g} s, and the run ended"
            )
            await self._abandon(0, left, logged=True)

    async def _keep_trying(self, promotion: Promotion) -> SaveResult:
        """Copy *promotion* here; again after a failure, until the deadline."""
        tries, pause_s, deadline_s = 0, FIRST_PAUSE_S, self.tier.deadline
        while True:
            tries += 1
            try:
                result = await self.copy(promotion, self._capped, deadline_s - self.engine.since_s(promotion.begun_ns))
            except CheckpointError as error:
                late = self.engine.since_s(promotion.begun_ns) + pause_s > deadline_s
                if late or self._closing.is_set() or isinstance(error, _HOPELESS):
                    raise
                self._report_failure(promotion, error, final=False)
                with anyio.move_on_after(pause_s):
                    await self._closing.wait()
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                if tries > 1:
                    logger.info(
                        "%s: copying works again (step %d copied after %d attempts)", self.url, promotion.step, tries
                    )
                return result

    async def copy(self, promotion: Promotion, pace: Pace, deadline_s: float) -> SaveResult:
        """Copy *promotion* here, once.

        Raises:
            CheckpointError: the copy failed; StorageTimeoutError after *deadline_s* seconds.
        """
        copied: StepCopy | None = None
        with (
            # A step that has waited past its deadline has one short try.
            anyio.move_on_after(max(deadline_s, 1.0)),
            self.engine.stages("copy", promotion.step).time("copy", self.url),
        ):
            copied = await self.joint_copy.make(promotion, pace)
        if copied is None:
            raise StorageTimeoutError(
                f"{self.url}: step {promotion.step} did not get there within {self.tier.deadline:g} s"
            )
        if self.tier.full:
            promotion.copies[self.number] = copied
        manifest = copied.manifest
        durable = self.place.backend.traits.survives_power_cuts
        result = msgspec.structs.replace(
            promotion.result, generation=manifest.generation, url=self.url, durable=durable, existed=False
        )
        engine = self.engine
        engine.emit(
            Promoted(
                at_ns=engine.now_ns(),
                step=promotion.step,
                url=self.url,
                bytes=sum(file.size for file in manifest.files),
                seconds=engine.since_s(promotion.begun_ns),
            )
        )
        return result

    async def _abandon(self, index: int, error: Exception, *, logged: bool = False) -> None:
        left = self._release(index)
        self._report_failure(left.promotion, error, final=True, logged=logged)
        left.stage.fail(error)
        if callable(self.tier.on_error):
            self._call(self.tier.on_error, error)
        elif self.tier.on_error == "raise":
            self.engine.notify_abandoned(left.promotion.step, error)
        await self.joint_copy.notify_abandoned(left.promotion, error)
        await self._thin_memory(left)

    def _call(self, on_error: Callable[[BaseException], object], error: Exception) -> None:
        try:
            on_error(error)
        except Exception:
            logger.exception("on_error of %s raised; the tier goes on", self.url)

    def _release(self, index: int) -> _Waiting:
        left = self._waiting.pop(index)
        for number in left.held:
            self._destination.places[number].unprotect(left.promotion.result.id)
        return left

    def _report_failure(self, promotion: Promotion, error: Exception, *, final: bool, logged: bool = False) -> None:
        what = "is given up" if final else "failed and will be retried"
        if not logged:
            logger.warning("%s: copying step %d %s: %s", self.url, promotion.step, what, error)
        engine = self.engine
        engine.emit(
            PromotionFailed(at_ns=engine.now_ns(), step=promotion.step, url=self.url, error=repr(error), final=final)
        )
