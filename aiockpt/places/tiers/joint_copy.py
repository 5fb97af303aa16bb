"""The copy of one step to one tier by all ranks: each copies the files it wrote; rank 0 copies what is left, and commits.

- Rank 0 waits for the others' files while they come, and posts a note of the outcome; the others wait for that note, or
  find what rank 0 has committed (`aiockpt.pipeline.copy`).
- A store that is lost with a trainer whose writer process survives ends no copy: rank 0 needs no note, and the others poll
  for its commit.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.coordinator import Coordinator
from aiockpt.errors import CheckpointError, RankFailedError, SaveSkippedError
from aiockpt.format.manifest import FileEntry
from aiockpt.futures import SaveResult
from aiockpt.options import Tier
from aiockpt.pipeline.copy import CopySource, Windows, copied_files, copy_files, copy_step, open_copy_source
from aiockpt.pipeline.discover import StepCopy, find_copy
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.runtime.limits import Pace, note_progress

PATIENCE_S = 60.0
"""How long rank 0 waits for a file of another rank since the last one came, before it copies that itself."""
POLL_S = 0.1
KEPT_NOTES = 6
"""Of the last copies: another rank may still wait for one of them."""


class Promotion:
    """One step that is copied to a farther tier.

    Attributes:
        step: its number.
        copies: where it is in full already, by number of the tier.
        result: of the save.
        begun_ns: when it was committed in the first tier.
        alone: whether rank 0 copies all of it, because the others do not know of it.
    """

    def __init__(self, result: SaveResult, copies: dict[int, StepCopy], begun_ns: int, alone: bool = False) -> None:
        self.step = result.step
        self.result = result
        self.copies = copies
        self.begun_ns = begun_ns
        self.alone = alone

    @property
    def attempt(self) -> str:
        """The attempt, which has the same name in every tier that has it in full."""
        return next(iter(self.copies.values())).manifest.attempt

    @property
    def age(self) -> int:
        """The logical clock of the save: the newer, the higher."""
        return next(iter(self.copies.values())).manifest.sequence

    def sources(self) -> list[StepCopy]:
        """Return the copies, the nearest first."""
        return [self.copies[number] for number in sorted(self.copies)]


class Arrived(msgspec.Struct, frozen=True):
    """Rank 0's note: the generation that a step has in a tier, or why the copy failed (*final*: it is not retried)."""

    generation: int = 0
    failure: str | None = None
    final: bool = False


class JointCopy:
    """The copies to one tier. On the engine's loop."""

    def __init__(self, tier: Tier, place: Place, coordinator: Coordinator) -> None:
        self._tier, self._coordinator = tier, coordinator
        self._number, self._backend, self._engine = place.number, place.backend, place.engine
        # Not shared: a stalled tier holds all of its windows.
        self._windows = Windows(place.backend.traits.block_writes + 1, place.engine.options.io.read_bytes)
        self._notes: list[str] = []

    async def make(self, promotion: Promotion, pace: Pace) -> StepCopy:
        """Copy *promotion*, once; return the copy when it is committed.

        Raises:
            CheckpointError: the copy failed; `SaveSkippedError` where it is abandoned.
        """
        engine = self._engine
        io = engine.options.io
        source = await open_copy_source(
            promotion.sources(),
            self._tier.content,
            window_bytes=self._windows.window_bytes,
            file_bytes=io.file_bytes,
        )
        if engine.world_size == 1 or promotion.alone:
            return await self._copy_all(source, pace)

        def own(file: FileEntry) -> bool:
            return file.rank % engine.world_size == engine.rank

        await copy_files(source, self._backend, engine.world, windows=self._windows, pace=pace, only=own)
        if engine.rank != 0:
            return await self._receive(promotion)
        try:
            await self._wait_for_files(source)
            copied = await self._copy_all(source, pace)
        except CheckpointError as error:
            await self._notify_ranks(promotion, Arrived(failure=f"{type(error).__name__}: {error}"))
            raise
        await self._notify_ranks(promotion, Arrived(copied.manifest.generation))
        return copied

    def close(self) -> None:
        """Release the memory that copies move through."""
        self._windows.close()

    async def _receive(self, promotion: Promotion) -> StepCopy:
        """Wait for rank 0 to commit: for its note, or for what it commits."""
        engine, pause_s = self._engine, min(PATIENCE_S, self._tier.deadline)

        async def find() -> StepCopy | None:
            manifest = await find_copy(self._backend, promotion.result.id, promotion.attempt)
            note_progress(pause_s)  # rank 0 abandons a tier where nothing moves, and says so
            return None if manifest is None else StepCopy(self._backend, manifest)

        note_progress(pause_s)
        said = await self._coordinator.receive(
            engine,
            self._note(promotion.result.id, promotion.attempt),
            Arrived,
            f"step {promotion.step} in {self._backend.url}",
            find,
            pause_s=pause_s,
            deadline_s=self._tier.deadline,
        )
        if isinstance(said, StepCopy):
            return said
        if said.final:
            raise SaveSkippedError(f"{self._backend.url}: rank 0 gave step {promotion.step} up: {said.failure}")
        if said.failure is not None:
            raise RankFailedError(
                f"{self._backend.url}: rank 0 could not commit step {promotion.step}: {said.failure}", [0]
            )
        return StepCopy(self._backend, await read_manifest(self._backend, promotion.result.id, said.generation))

    async def notify_abandoned(self, promotion: Promotion, error: Exception) -> None:
        """Notify the other ranks that *promotion* is given up."""
        await self._notify_ranks(promotion, Arrived(failure=str(error), final=True))

    async def notify_lost(self, step_id: str, attempt: str, error: Exception) -> None:
        """Notify the other ranks of a copy that was lost with rank 0's writer process; the next writer makes it."""
        note = Arrived(failure=str(error), final=True)
        with suppress(CheckpointError), anyio.move_on_after(PATIENCE_S):  # the notices of the other tiers follow
            manifest = await find_copy(self._backend, step_id, attempt)
            note = note if manifest is None else Arrived(manifest.generation)
        await self._write(self._note(step_id, attempt), note)

    async def _notify_ranks(self, promotion: Promotion, note: Arrived) -> None:
        if self._engine.rank == 0 and not promotion.alone:
            await self._write(self._note(promotion.result.id, promotion.attempt), note)

    async def _write(self, key: str, note: Arrived) -> None:
        """Post rank 0's note, and remove those that no rank waits for any more. A copy counts without its note."""
        if key not in self._notes:
            self._notes.append(key)
        outdated, self._notes = self._notes[:-KEPT_NOTES], self._notes[-KEPT_NOTES:]
        await self._coordinator.post(key, note, outdated)

    def _note(self, step_id: str, attempt: str) -> str:
        return f"tier/{self._number}/{step_id}/{attempt}"

    async def _copy_all(self, source: CopySource, pace: Pace) -> StepCopy:
        engine = self._engine
        manifest = await copy_step(source, self._backend, engine.world, windows=self._windows, pace=pace)
        return StepCopy(self._backend, manifest)

    async def _wait_for_files(self, source: CopySource) -> None:
        """Wait until the other ranks have copied theirs, or no file came for `PATIENCE_S`."""
        seen, changed_ns = -1, self._engine.now_ns()
        while seen < len(source.files) and self._engine.since_s(changed_ns) < PATIENCE_S:
            found = len(await copied_files(self._backend, source))
            if found > seen:
                seen, changed_ns = found, self._engine.now_ns()
                note_progress()
            elif seen < len(source.files):
                await anyio.sleep(POLL_S)
