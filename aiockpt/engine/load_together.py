"""How do many ranks load the same step, or all learn why not?

Rank 0 chooses the step; every rank matches and fills its own part and reports; rank 0 judges the reports
(`aiockpt.engine.agreement`). Guarantees (DECISIONS 12):

- No rank's load is done, and none begins a new line of saves, before all ranks have filled what they wanted from the same
  generation of the same step.
- All ranks match before any fills: a checkpoint that does not fit on one rank changes nothing on any, and every rank
  raises the same list of differences.
- A step that one rank finds damaged is left by all, and all go on to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count

import anyio
import msgspec

from aiockpt.adapters.native import LoadTarget
from aiockpt.engine.agreement import Agreement
from aiockpt.engine.context import Engine
from aiockpt.engine.find import Found, Skipped, candidates
from aiockpt.engine.load import (
    Filled,
    Lacking,
    LoadRequest,
    Traffic,
    check_rewritten,
    fill,
    finish,
    open_manifest,
    skip_or_raise,
)
from aiockpt.engine.load_notes import TELL_DEADLINE_S, LoadNotes, Notes
from aiockpt.engine.read_once import ReadOnce
from aiockpt.errors import CorruptionError, ManifestError, ObjectNotFoundError, RankFailedError, StateMismatchError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.discover import read_manifest
from aiockpt.runtime.meeting import Meeting
from aiockpt.runtime.peers import Peers


class Choice(msgspec.Struct, frozen=True):
    """Rank 0's note: which manifest is next; without one, there is nothing to load, or *failure* says why."""

    id: str = ""
    step: int = -1
    generation: int = 0
    tier: int = 0
    failure: str | None = None


class LoadTogether:
    """The loads of one rank of a job. Use on the engine's loop.

    Args:
        meeting: where the ranks' notes are.
        peers: those with which this rank reads once; None reads alone.
    """

    def __init__(self, engine: Engine, meeting: Meeting, peers: Peers | None) -> None:
        self._engine = engine
        self._peers = peers
        self._meeting = meeting
        self._notes = LoadNotes(meeting)

    async def load(self, request: LoadRequest, number: int) -> Filled | None:
        """Fill this rank's part of a state; None, on all ranks, when no checkpoint exists at all.

        Args:
            number: of this load among all loads of the job, the same on every rank.

        Raises:
            RankError: other ranks failed or are silent.
            NoValidCheckpointError, StateMismatchError, CorruptionError: as `aiockpt.engine.load.load`, on every rank.
        """
        async with self._notes.taking(number) as notes:
            return await self._load(request, notes)

    async def _load(self, request: LoadRequest, notes: Notes) -> Filled | None:
        engine = self._engine
        begun_ns = engine.now_ns()
        skipped: Skipped = []
        touched: frozenset[str] = frozenset()
        lacking = Lacking(request, skipped)
        found = candidates(engine, request.step, skipped)
        for trial in count():
            agree = Agreement(notes, str(trial), engine.options.deadlines.close_s)
            with lacking.explaining():
                choice = await _choose(engine, notes, f"{trial}/choice", found)
            if choice is None:
                return None
            target: LoadTarget | None = None
            tier = engine.tiers[choice.tier]
            try:
                manifest = await agree.on("read", partial(_read, tier, choice))
                fit = partial(_fit, tier, request, manifest, touched, skipped)
                try:
                    target = await agree.on("fit", fit, _spare(request))
                except StateMismatchError as error:
                    lacking.pass_over(tier, manifest, error)
                    continue
                traffic = await agree.on("fill", partial(self._fill, tier, manifest, target, notes, trial))
            except CorruptionError as error:
                if target is not None:
                    touched |= target.written
                skip_or_raise(engine, request, choice.id, choice.step, error, skipped)
            else:
                return finish(tier, manifest, target, traffic, begun_ns, skipped)
        raise AssertionError("there is always another trial")

    async def _fill(self, tier: Engine, manifest: Manifest, target: LoadTarget, notes: Notes, trial: int) -> Traffic:
        if self._peers is None:
            return await fill(tier, manifest, target)
        read_once = ReadOnce(self._peers, notes, str(trial))
        try:
            return await fill(tier, manifest, target, read_once)
        except BaseException as error:
            await read_once.give_up(error)
            raise


async def _read(engine: Engine, choice: Choice) -> Manifest:
    try:
        return await read_manifest(engine.backend, choice.id, choice.generation)
    except ObjectNotFoundError as error:
        message = f"{choice.id}: generation {choice.generation} was deleted meanwhile"
        raise ManifestError(message, key=error.key) from error


async def _fit(
    engine: Engine, request: LoadRequest, manifest: Manifest, touched: frozenset[str], skipped: Skipped
) -> LoadTarget:
    target = await open_manifest(engine, request, manifest)
    check_rewritten(manifest, target, touched, skipped)
    return target


def _spare(request: LoadRequest) -> Callable[[LoadTarget], tuple[str, ...]]:
    """Return what of a target counts as a difference when no rank wants it."""
    return lambda target: target.unexpected_claimed if request.strict else ()


async def _choose(engine: Engine, notes: Notes, key: str, found: AsyncIterator[Found]) -> Choice | None:
    """Return the manifest to try next: rank 0 finds it and tells the others; None when there is nothing to load."""
    if notes.rank != 0:
        choice = await notes.wait(key, Choice, engine.options.deadlines.ranks_s, "the choice of a step to load")
        if choice.failure is not None:
            raise RankFailedError(f"rank 0 found no step to load: {choice.failure}", [0])
        return choice if choice.id else None
    try:
        chosen = await anext(found, None)
    except BaseException as error:
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True):
            await notes.post(key, Choice(failure=f"{type(error).__name__}: {error}"))
        raise
    choice = Choice()
    if chosen is not None:
        manifest, tier = chosen.manifest, engine.tiers.index(chosen.engine)
        choice = Choice(manifest.id, manifest.step, manifest.generation, tier)
    await notes.post(key, choice)
    return choice if choice.id else None
