"""Load of the same step by many ranks: it succeeds on all, or fails on all with the reason.

Rank 0 chooses the step; every rank matches and fills its own part and reports; rank 0 judges the reports
(`aiockpt.ranks.agreement`). Guarantees (docs/decisions.md#loading):

- All ranks must be asked to load the same step in the same way; else every rank raises an error that lists the calls.
- No rank's load completes, and no rank begins a new line of saves, before all ranks have filled what they wanted from the
  same generation of the same step.
- All ranks match before any fills: a checkpoint that does not fit on one rank changes nothing on any, and every rank
  raises the same list of differences.
- A step that one rank finds damaged is skipped by all, and all go on to the next. What was skipped, and why, is the same
  in the result of every rank: the report of rank 0, which alone lists all steps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from itertools import count

import anyio
import msgspec

from aiockpt.adapters.differences import PARTLY_OVERWRITTEN
from aiockpt.adapters.matcher import LoadTarget
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.find import Found, Skipped, StepPlaces, candidates
from aiockpt.engine.load import (
    Filled,
    LoadRequest,
    Traffic,
    Trials,
    fill,
)
from aiockpt.errors import (
    CorruptionError,
    ManifestError,
    ObjectNotFoundError,
    RankError,
    RankFailedError,
    RanksDisagreeError,
    StateMismatchError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.options import Best
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.ranks.agreement import TELL_DEADLINE_S, Agreement, LoadNotes, Notes, Report
from aiockpt.ranks.peers import Peers
from aiockpt.ranks.read_once import ReadOnce
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.notes import name_ranks


class LoadCall(msgspec.Struct, frozen=True, array_like=True):
    """A rank's note: the arguments of its load that must be the same on all ranks."""

    step: int | Best | None
    strict: bool | dict[str, bool]

    def in_words(self) -> str:
        """Return the call as a user writes it."""
        step = f"best={self.step}" if isinstance(self.step, Best) else self.step
        return f"load(state, {step}{'' if self.strict is True else f', strict={self.strict}'})"


class Choice(msgspec.Struct, frozen=True):
    """Rank 0's note: the manifest to try next; without an id there is nothing to load, or *failure* gives the reason.

    Attributes:
        ranks: at fault, where a failure was not rank 0's.
        disagree: whether the failure is that ranks were asked to load differently.
        skipped: what rank 0 has skipped since its previous choice.
    """

    id: str = ""
    step: int = -1
    generation: int = 0
    attempt: str = ""
    tier: int = 0
    failure: str | None = None
    ranks: tuple[int, ...] = ()
    disagree: bool = False
    skipped: tuple[tuple[str, str], ...] = ()


class RankLoad:
    """One load of a rank of a job; see `aiockpt.engine.coordinator.LoadRound`. Use on the engine's loop.

    Args:
        all_notes: those of all loads of this rank.
        number: of this load among all loads of the job, the same on every rank.
        peers: the ranks that read each block once together with this one; None: this rank reads alone.
    """

    def __init__(self, all_notes: LoadNotes, number: int, peers: Peers | None) -> None:
        self._all_notes, self._number, self._peers = all_notes, number, peers

    async def load(self, places: StepPlaces, request: LoadRequest) -> Filled | None:
        """Fill this rank's part of a state; None, on all ranks, when no checkpoint exists at all.

        Raises:
            RankError: other ranks failed or are silent.
            NoValidCheckpointError, StateMismatchError, CorruptionError: as `aiockpt.engine.load.load`, on every rank.
        """
        async with self._all_notes.taking(self._number) as notes:
            return await self._load(places, request, notes)

    async def _load(self, places: StepPlaces, request: LoadRequest, notes: Notes) -> Filled | None:
        engine = places.engine
        trials = Trials(engine, request)
        chooser = _Chooser(engine, notes, candidates(places, request.step, trials.skipped), trials.skipped)
        strict = request.strict if isinstance(request.strict, bool) else dict(request.strict)
        await notes.post(f"call/{notes.rank}", LoadCall(request.step, strict))
        for trial in count():
            sought_ns = engine.now_ns()
            with trials.explaining():
                choice = await chooser.choose(trial)
            if choice is None:
                return None
            stages = engine.stages("load", choice.step)
            stages.ended("find", sought_ns)
            agree = Agreement(notes, str(trial), engine.options.deadlines.close_s, stages)
            target: LoadTarget | None = None
            place = places.places[choice.tier]
            try:
                manifest = await agree.on("read", partial(_read, place, choice))
                try:
                    target = await agree.on("fit", partial(trials.match, place, manifest), _report)
                except StateMismatchError as error:
                    trials.pass_over(place, manifest, error)
                    continue
                # Others may ask this rank for what it offers until all have reported.
                async with nullcontext() if self._peers is None else self._peers.connected() as shelf:
                    read_once = None if shelf is None else ReadOnce(shelf, notes, str(trial))
                    traffic = await agree.on("fill", partial(_fill, place, manifest, target, read_once))
            except CorruptionError as error:
                trials.skip_damaged(choice.id, choice.step, target, error)
            else:
                filled = trials.finish(place, manifest, target, traffic)
                return msgspec.structs.replace(filled, agree=agree.may_refuse)
        raise AssertionError("there is always another trial")

    async def agree_applied(self, error: Exception | None) -> None:
        """Report whether this rank's objects accepted their loaded values; receive the other ranks' reports.

        Raises:
            Exception: the objects of a rank refused them; *error* itself if it was this rank. All states are then invalid.
        """

        async def applied() -> None:
            if error is not None:
                raise error

        async with self._all_notes.taking(self._number, "end") as notes:
            try:
                await Agreement(notes, "end", self._all_notes.deadline_s).on("apply", applied)
            except StateMismatchError as shared:
                raise StateMismatchError("the checkpoint", shared.problems, PARTLY_OVERWRITTEN) from error


async def _fill(place: Place, manifest: Manifest, target: LoadTarget, read_once: ReadOnce | None) -> Traffic:
    try:
        return await fill(place, manifest, target, read_once)
    except BaseException as error:
        if read_once is not None:
            await read_once.abandon(error)
        raise


async def _read(place: Place, choice: Choice) -> Manifest:
    try:
        manifest = await read_manifest(place.backend, choice.id, choice.generation)
    except ObjectNotFoundError as error:
        message = f"{choice.id}: generation {choice.generation} was deleted meanwhile"
        raise ManifestError(message, key=error.key) from error
    if manifest.attempt != choice.attempt:
        raise ManifestError(f"{choice.id}: this rank finds another save there than rank 0 does")
    return manifest


def _report(target: LoadTarget) -> Report:
    """Return the report on a target, with the names that are a difference if no rank wants them."""
    return Report(spare=target.unexpected_claimed, may_refuse=target.may_refuse)


class _Chooser:
    """Chooses what the ranks of one load try next: rank 0 finds it and posts it for the others.

    Args:
        found: on rank 0, the candidates, the newest first.
        skipped: on the other ranks, overwritten with what rank 0 has skipped.
    """

    def __init__(self, engine: Engine, notes: Notes, found: AsyncIterator[Found], skipped: Skipped) -> None:
        self._engine = engine
        self._notes = notes
        self._found = found
        self._skipped = skipped
        self._reasons: Skipped = []

    async def choose(self, trial: int) -> Choice | None:
        """Return the manifest to try next, the same on all ranks; None when there is nothing to load."""
        key = f"{trial}/choice"
        choice = await (self._receive(key) if self._notes.rank else self._find(key, first=not trial))
        self._reasons += choice.skipped
        self._skipped[:] = self._reasons
        return choice if choice.id else None

    async def _find(self, key: str, *, first: bool) -> Choice:
        """Find the next candidate and post it, or post why the search failed.

        Args:
            first: this is the first choice, so check that all ranks were asked to load the same.
        """
        chosen: Found | None = None
        try:
            async with open_tasks() as tasks:
                if first:
                    tasks.start_soon(_check_calls, self._engine, self._notes)
                chosen = await anext(self._found, None)
        except BaseException as error:
            others = error.ranks if isinstance(error, RankError) else ()
            failure = Choice(
                failure=f"{type(error).__name__}: {error}", ranks=others, disagree=isinstance(error, RanksDisagreeError)
            )
            with anyio.move_on_after(TELL_DEADLINE_S, shield=True):
                await self._notes.post(key, failure)
            raise
        choice = Choice(skipped=tuple(self._skipped[len(self._reasons) :]))
        if chosen is not None:
            manifest, tier = chosen.manifest, chosen.place.number
            names = manifest.id, manifest.step, manifest.generation, manifest.attempt
            choice = Choice(*names, tier, skipped=choice.skipped)
        await self._notes.post(key, choice)
        return choice

    async def _receive(self, key: str) -> Choice:
        # Rank 0 knows which ranks are late, and names them when it gives up.
        deadline_s = self._engine.options.deadlines.ranks_s + TELL_DEADLINE_S
        choice = await self._notes.wait(key, Choice, deadline_s, "the choice of a step to load")
        if choice.failure is None:
            return choice
        if choice.disagree:
            raise RanksDisagreeError(choice.failure.partition(": ")[2], choice.ranks)
        if choice.ranks:
            raise RankFailedError(f"the load was given up on rank 0: {choice.failure}", choice.ranks)
        raise RankFailedError(f"rank 0 found no step to load: {choice.failure}", [0])


async def _check_calls(engine: Engine, notes: Notes) -> None:
    """Raise, on rank 0, unless all ranks were asked to load the same."""
    keys = {rank: f"call/{rank}" for rank in range(notes.world_size)}
    what = "load() (every rank must call it)"
    calls = await notes.gather(keys, LoadCall, engine.options.deadlines.ranks_s, what)
    asked: dict[LoadCall, list[int]] = {}
    for rank, call in sorted(calls.items()):
        asked.setdefault(call, []).append(rank)
    if len(asked) > 1:
        words = ", ".join(f"{call.in_words()} on {name_ranks(ranks)}" for call, ranks in asked.items())
        raise RanksDisagreeError(
            f"the ranks load differently, and none has loaded anything: {words}. Call load on all ranks alike",
            [rank for ranks in list(asked.values())[1:] for rank in ranks],
        )
