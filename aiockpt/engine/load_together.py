"""How do many ranks load the same step, or all learn why not?

Rank 0 chooses the step; every rank matches and fills its own part and reports; rank 0 judges the reports. Guarantees
(DECISIONS 12):

- No rank's load is done before all ranks have filled what they wanted from the same generation of the same step.
- All ranks match before any fills: a checkpoint that does not fit on one rank changes nothing on any, and every rank
  raises the same list of differences.
- A step that one rank finds damaged is left by all, and all go on to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import count
from typing import Literal, TypeVar

import anyio
import msgspec

from aiockpt.adapters.native import LoadTarget
from aiockpt.engine.context import Engine
from aiockpt.engine.load import (
    Filled,
    LoadRequest,
    Skipped,
    candidates,
    check_rewritten,
    fill,
    open_manifest,
    skip_or_raise,
)
from aiockpt.errors import (
    CorruptionError,
    ManifestError,
    ObjectNotFoundError,
    RankFailedError,
    RankTimeoutError,
    StateMismatchError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.discover import read_manifest
from aiockpt.runtime.meeting import Meeting, name_ranks

T = TypeVar("T")
TELL_DEADLINE_S = 10.0
_STEPS = ("read", "fit", "fill")
"""What all ranks do one after the other in each trial."""
_ADVICE = "Change the state, rename with map=, choose with only=, or load what fits with strict=False."


class Choice(msgspec.Struct, frozen=True):
    """Rank 0's note: which manifest is next; without one, there is nothing to load, or *failure* says why."""

    id: str = ""
    step: int = -1
    generation: int = 0
    failure: str | None = None


class Report(msgspec.Struct, frozen=True):
    """How one rank fared.

    Attributes:
        outcome: "fits" also says that everything was filled; "misfits", "damaged" and "failed" carry a message.
        problems: the differences, of "misfits".
        spare: names that the checkpoint has and this rank does not want, though it would be a difference.
    """

    outcome: Literal["fits", "misfits", "damaged", "failed"] = "fits"
    message: str = ""
    problems: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """Rank 0's judgement of all reports; *rank* is the one whose message it has."""

    outcome: Literal["fits", "misfits", "damaged", "failed"] = "fits"
    message: str = ""
    problems: tuple[str, ...] = ()
    rank: int = 0


async def load_together(engine: Engine, request: LoadRequest, number: int) -> Filled | None:
    """Fill this rank's part of a state; None, on all ranks, when no checkpoint exists at all.

    Args:
        number: of this load among all loads of the job, the same on every rank.

    Raises:
        RankError: other ranks failed or are silent.
        NoValidCheckpointError, StateMismatchError, CorruptionError: as `aiockpt.engine.load.load`, on every rank.
    """
    assert engine.sharing is not None
    meeting = engine.sharing.meeting
    begun_ns = engine.now_ns()
    skipped: Skipped = []
    touched: frozenset[str] = frozenset()
    found = candidates(engine, request.step, skipped)
    for trial in count():
        agree = _Agreement(meeting, f"load/{number}/{trial}", engine.options.deadlines.close_s)
        choice = await _choose(engine, meeting, f"load/{number}/{trial}/choice", found)
        if choice is None:
            return None
        target: LoadTarget | None = None
        try:
            manifest = await agree.on("read", lambda choice=choice: _read(engine, choice))  # type: ignore[misc]
            target = await agree.on("fit", lambda: _fit(engine, request, manifest, touched, skipped), _spare(request))  # noqa: B023
            return await _filled(engine, agree, manifest, target, begun_ns, skipped)
        except CorruptionError as error:
            if target is not None:
                touched |= target.written
            skip_or_raise(engine, request, choice.id, choice.step, error, skipped)
    raise AssertionError("there is always another trial")


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


async def _filled(
    engine: Engine, agree: _Agreement, manifest: Manifest, target: LoadTarget, begun_ns: int, skipped: Skipped
) -> Filled:
    return await agree.on("fill", lambda: fill(engine, manifest, target, begun_ns, skipped))


def _spare(request: LoadRequest) -> Callable[[LoadTarget], tuple[str, ...]]:
    """Return what of a target counts as a difference when no rank wants it."""
    return lambda target: target.unexpected_claimed if request.strict else ()


async def _choose(engine: Engine, meeting: Meeting, key: str, found: AsyncIterator[Manifest]) -> Choice | None:
    """Return the manifest to try next: rank 0 finds it and tells the others; None when there is nothing to load."""
    if meeting.rank != 0:
        choice = await meeting.wait(key, Choice, engine.options.deadlines.ranks_s, "the choice of a step to load")
        if choice.failure is not None:
            raise RankFailedError(f"rank 0 found no step to load: {choice.failure}", [0])
        return choice if choice.id else None
    try:
        manifest = await anext(found, None)
    except BaseException as error:
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True):
            await meeting.post(key, Choice(failure=f"{type(error).__name__}: {error}"))
        raise
    choice = Choice() if manifest is None else Choice(manifest.id, manifest.step, manifest.generation)
    await meeting.post(key, choice)
    return choice if choice.id else None


class _Agreement:
    """All ranks do one thing after the other, and each step is done by all or by none."""

    def __init__(self, meeting: Meeting, key: str, deadline_s: float) -> None:
        self._meeting = meeting
        self._key = key
        self._deadline_s = deadline_s

    async def on(
        self, what: str, work: Callable[[], Awaitable[T]], spare: Callable[[T], tuple[str, ...]] = lambda _: ()
    ) -> T:
        """Return what *work* returns when it went well on every rank.

        Args:
            spare: names the result leaves to other ranks: one of them must want each.

        Raises:
            Exception: this rank's own error, or one that stands for those of other ranks.
        """
        try:
            return await self._on(what, work, spare)
        except (anyio.get_cancelled_exc_class(), RankTimeoutError) as error:
            await self._leave(what, error)
            raise

    async def _on(self, what: str, work: Callable[[], Awaitable[T]], spare: Callable[[T], tuple[str, ...]]) -> T:
        key = f"{self._key}/{what}"
        try:
            result = await work()
        except Exception as error:
            shared = _error(await self._tell(key, what, _report(error)), error)
            if shared is error:
                raise
            raise shared from error
        verdict = await self._tell(key, what, Report(spare=spare(result)))
        if verdict.outcome != "fits":
            raise _error(verdict, None)
        return result

    async def _leave(self, what: str, error: BaseException) -> None:
        """Fail this step and those after it: the other ranks may have judged this one already, and wait in the next."""
        report, meeting = _report(error), self._meeting
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True):
            for later in _STEPS[_STEPS.index(what) :]:
                await meeting.post(f"{self._key}/{later}/{meeting.rank}", report)
                if meeting.rank == 0:
                    verdict = Verdict(report.outcome, report.message)
                    await meeting.post(f"{self._key}/{later}/verdict", verdict)

    async def _tell(self, key: str, what: str, report: Report) -> Verdict:
        await self._meeting.post(f"{key}/{self._meeting.rank}", report)
        return await self._judge(key, what)

    async def _judge(self, key: str, what: str) -> Verdict:
        meeting = self._meeting
        if meeting.rank != 0:
            return await meeting.wait(f"{key}/verdict", Verdict, self._deadline_s, f"the other ranks to {what}")
        keys = {rank: f"{key}/{rank}" for rank in range(meeting.world_size)}
        reports = await meeting.gather(keys, Report, self._deadline_s, f"loading ({what})")
        verdict = judge(reports)
        await meeting.post(f"{key}/verdict", verdict)
        return verdict


def _report(error: BaseException) -> Report:
    match error:
        case StateMismatchError():
            return Report("misfits", str(error), error.problems)
        case CorruptionError() | ObjectNotFoundError():
            return Report("damaged", str(error))
        case _:
            return Report("failed", f"{type(error).__name__}: {error}")


def judge(reports: Mapping[int, Report]) -> Verdict:
    """Return what the reports of all ranks come to: the worst of them, and every difference with the ranks that met it."""
    for outcome in ("failed", "misfits", "damaged"):
        found = {rank: report for rank, report in sorted(reports.items()) if report.outcome == outcome}
        if found:
            rank, first = next(iter(found.items()))
            return Verdict(outcome, first.message, tuple(_union(found, len(reports))), rank)
    unwanted = set.intersection(*(set(report.spare) for report in reports.values()))
    if unwanted:
        problems = tuple(f"{name}: in the checkpoint but not in the state of any rank" for name in sorted(unwanted))
        return Verdict("misfits", problems=problems)
    return Verdict()


def _union(reports: Mapping[int, Report], world_size: int) -> list[str]:
    """Return all differences; one that not every rank met says who did."""
    met: dict[str, list[int]] = {}
    for rank, report in reports.items():
        for problem in report.problems:
            met.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == world_size else f"{problem} ({name_ranks(ranks)})"
        for problem, ranks in sorted(met.items())
    ]


def _error(verdict: Verdict, own: Exception | None) -> Exception:
    """Return what this rank raises; its own error says more than a report of it."""
    if verdict.outcome == "misfits" and verdict.problems:
        return StateMismatchError("the checkpoint", verdict.problems, _ADVICE)
    if own is not None and verdict.outcome in (_report(own).outcome, "fits"):
        return own
    if verdict.outcome == "damaged":
        return CorruptionError(f"rank {verdict.rank}: {verdict.message}")
    return RankFailedError(
        f"the load was given up because rank {verdict.rank} failed: {verdict.message}", [verdict.rank]
    )
