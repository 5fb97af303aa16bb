"""Agreement of all ranks on each step of a load: done by all, or not at all.

Each rank reports, rank 0 judges, all follow its verdict. Guarantees: a step is done on every rank when `Agreement.on`
returns on any; when it raises on one it raises on all, each with the worst of what any found, and a difference names the
ranks that found it. If the store is lost when a rank has filled all that it wants, its load succeeds: the process that
hosted the store had every report, and may have ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

import anyio
import msgspec

from aiockpt.adapters.differences import ADVICE
from aiockpt.errors import (
    CorruptionError,
    ObjectNotFoundError,
    RankFailedError,
    RankTimeoutError,
    StateMismatchError,
)
from aiockpt.ranks.block_exchange import UnservedError
from aiockpt.ranks.membership import Waiting
from aiockpt.ranks.rounds import Rounds
from aiockpt.runtime.notes import NoteBoard, StoreLostError, name_ranks
from aiockpt.runtime.stages import UNREPORTED, Stages

# The notes of loads, and their removal.
#
# A rank removes its own notes of a load once every rank has left that load: the last rank at once, the others when they
# leave a later load. So a store holds the notes of at most one load, however many there were.


logger = logging.getLogger("aiockpt")

T = TypeVar("T")
TELL_DEADLINE_S = 10.0
"""For posting the last notes of a rank that leaves a load, whatever the reason."""
_REMOVALS = 4
"""Earlier loads whose notes a rank tries to remove when it leaves one; other ranks may still be in them."""


class Notes:
    """The notes of one load, by keys of their own. Use on one event loop.

    Args:
        waiting: checks the other ranks during its waits.
    """

    def __init__(self, board: NoteBoard, prefix: str, waiting: Waiting) -> None:
        self.rank = board.rank
        self.world_size = board.world_size
        self._board = board
        self._prefix = prefix
        self._waiting = waiting
        self._written: list[str] = []

    async def post(self, key: str, note: Any) -> None:
        """Write *note* under *key*."""
        self._written.append(self._key(key))
        await self._board.post(self._key(key), note)

    async def wait(self, key: str, kind: type[T], deadline_s: float, what: str, ranks: Iterable[int] = (0,)) -> T:
        """Return the note under *key* as soon as it is there; see `NoteBoard.wait`."""
        return await self._board.wait(self._key(key), kind, deadline_s, what, ranks, self._waiting)

    async def gather(self, keys: dict[int, str], kind: type[T], deadline_s: float, what: str) -> dict[int, T]:
        """Return the note of each rank under its key; see `NoteBoard.gather`."""
        names = {rank: self._key(key) for rank, key in keys.items()}
        return await self._board.gather(names, kind, deadline_s, what, self._waiting)

    async def release(self) -> None:
        """Note that this rank no longer needs these notes."""
        if await self._board.arrive(self._key("past")) == self.world_size:
            await self._board.delete([self._key("past")])

    async def remove(self) -> bool:
        """Remove what this rank wrote, if every rank has left; return whether it did."""
        # The count is there since this rank released the notes; the last rank to do so has removed it.
        if await self._board.is_there(self._key("past")):
            return False
        await self._board.delete(self._written)
        return True

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def load_prefix(number: int) -> str:
    """Return the key prefix of the notes of load *number*."""
    return f"load/{number}"


class LoadNotes:
    """The notes of all loads of one checkpointer."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._board = rounds.board
        self.deadline_s = rounds.deadline_s
        self._left: deque[Notes] = deque()

    @asynccontextmanager
    async def taking(self, number: int, part: str = "") -> AsyncIterator[Notes]:
        """Yield the notes of load *number*, or of a *part* of it; release them when the block ends."""
        call, rounds = f"load() number {number}", self._rounds
        prefix = "/".join(filter(None, (load_prefix(number), part)))
        waiting = Waiting(rounds.members, prefix, call, self.deadline_s)
        notes = Notes(self._board, prefix, waiting)
        await rounds.enter(f"{call} (every rank must call it)", self.deadline_s, waiting)
        try:
            with rounds.loading(prefix):
                await rounds.report(call)
                yield notes
        finally:
            with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
                await notes.release()
                self._left.append(notes)
                await self._remove_old()

    async def _remove_old(self) -> None:
        """Remove the notes of loads that all ranks have left; a load that one rank never leaves delays no other."""
        for _ in range(_REMOVALS):
            if not self._left:
                return
            notes = self._left[0]
            self._left.rotate(-1)  # those of another load are checked next
            if await notes.remove() and notes in self._left:  # another load may have been left meanwhile
                self._left.remove(notes)


STEPS = ("read", "fit", "fill", "apply")
"""The steps of a trial, in order, on all ranks; "apply" runs separately, when the caller waits for the load."""
FILLED = STEPS[2:]
"""The steps after which a rank has all its bytes: a store that is lost then fails no load."""
Outcome = Literal["fits", "misfits", "damaged", "unserved", "failed"]
_WORST_FIRST: tuple[Outcome, ...] = ("failed", "misfits", "damaged", "unserved")


class Report(msgspec.Struct, frozen=True):
    """The outcome of one rank.

    Attributes:
        outcome: "fits" also means that everything was filled; "misfits", "damaged" and "failed" carry a message;
            "unserved" means that another rank failed before it sent what this one was to receive.
        problems: the differences, of "misfits".
        spare: names in the checkpoint that this rank does not want; a difference if no rank wants them.
        ranks: at fault, where the cause is on other ranks.
        may_refuse: whether an object of this rank may still refuse its value.
    """

    outcome: Outcome = "fits"
    message: str = ""
    problems: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    may_refuse: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """Rank 0's verdict on all reports; *message* and *ranks* are those of *rank*, *may_refuse* is that of any rank."""

    outcome: Outcome = "fits"
    message: str = ""
    problems: tuple[str, ...] = ()
    rank: int = 0
    ranks: tuple[int, ...] = ()
    may_refuse: bool = False


class Agreement:
    """Steps that all ranks take in the same order; each step is done on every rank, or fails on every rank."""

    def __init__(self, notes: Notes, key: str, deadline_s: float, stages: Stages = UNREPORTED) -> None:
        self._notes = notes
        self._key = key
        self._deadline_s = deadline_s
        self._stages = stages
        self.may_refuse = False

    async def on(
        self, what: str, work: Callable[[], Awaitable[T]], report: Callable[[T], Report] = lambda _: Report()
    ) -> T:
        """Run *work*, and return its result once it has succeeded on every rank.

        Args:
            report: returns what the other ranks must know of the result.

        Raises:
            Exception: this rank's own error, or one that stands for those of other ranks.
        """
        try:
            return await self._on(what, work, report)
        except (anyio.get_cancelled_exc_class(), RankTimeoutError, RankFailedError) as error:
            # What another rank reported has reached all by its verdict; only what was found here must be posted.
            if not isinstance(error, RankFailedError) or error.seen_here:
                await self._abandon(what, error)
            raise

    async def _on(self, what: str, work: Callable[[], Awaitable[T]], report: Callable[[T], Report]) -> T:
        key = f"{self._key}/{what}"
        try:
            result = await work()
        except Exception as error:
            shared: Exception = error
            with suppress(StoreLostError):
                shared = _error(await self._exchange(key, what, _report(error)), error)
            if shared is error:
                raise
            raise shared from error
        try:
            verdict = await self._exchange(key, what, report(result))
        except StoreLostError as lost:
            if what not in FILLED:
                raise
            # Rank 0, which may host the store, waits for the report of each rank; then it may end.
            logger.info("all that this rank wants is loaded, and what the other ranks report is not known: %s", lost)
            return result
        self.may_refuse = self.may_refuse or verdict.may_refuse
        if verdict.outcome != "fits":
            raise _error(verdict, None)
        return result

    async def _abandon(self, what: str, error: BaseException) -> None:
        """Fail this step and those after it: the other ranks may have judged this one already, and wait in the next."""
        report, notes = _report(error), self._notes
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True):
            for later in STEPS[STEPS.index(what) :]:
                await notes.post(f"{self._key}/{later}/{notes.rank}", report)
                if notes.rank == 0:
                    verdict = Verdict(report.outcome, report.message, ranks=report.ranks)
                    await notes.post(f"{self._key}/{later}/verdict", verdict)

    async def _exchange(self, key: str, what: str, report: Report) -> Verdict:
        await self._notes.post(f"{key}/{self._notes.rank}", report)
        with self._stages.time("wait", what):
            return await self._judge(key, what)

    async def _judge(self, key: str, what: str) -> Verdict:
        notes = self._notes
        if notes.rank != 0:  # rank 0 knows which ranks are late, and names them when it gives up
            deadline_s = self._deadline_s + TELL_DEADLINE_S
            return await notes.wait(f"{key}/verdict", Verdict, deadline_s, f"the other ranks to {what}")
        keys = {rank: f"{key}/{rank}" for rank in range(notes.world_size)}
        reports = await notes.gather(keys, Report, self._deadline_s, f"loading ({what})")
        verdict = judge(reports)
        await notes.post(f"{key}/verdict", verdict)
        return verdict


def _report(error: BaseException) -> Report:
    match error:
        case UnservedError():
            return Report("unserved", str(error))
        case StateMismatchError():
            return Report("misfits", str(error), error.problems)
        case CorruptionError() | ObjectNotFoundError():
            return Report("damaged", str(error))
        case RankTimeoutError() | RankFailedError(seen_here=True):
            return Report("failed", f"{type(error).__name__}: {error}", ranks=error.ranks)
        case _:
            return Report("failed", f"{type(error).__name__}: {error}")


def judge(reports: Mapping[int, Report]) -> Verdict:
    """Return the verdict on all reports: the worst of them, and every difference with the ranks that found it."""
    for outcome in _WORST_FIRST:
        found = {rank: report for rank, report in sorted(reports.items()) if report.outcome == outcome}
        if found:
            rank, first = next(iter(found.items()))
            return Verdict(outcome, first.message, tuple(_union(found, len(reports))), rank, first.ranks)
    unwanted = set.intersection(*(set(report.spare) for report in reports.values()))
    if unwanted:
        problems = tuple(f"{name}: in the checkpoint but not in the state of any rank" for name in sorted(unwanted))
        return Verdict("misfits", problems=problems)
    return Verdict(may_refuse=any(report.may_refuse for report in reports.values()))


def _union(reports: Mapping[int, Report], world_size: int) -> list[str]:
    """Return all differences; one that not every rank found names its ranks."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, report in reports.items():
        for problem in report.problems:
            ranks_by_problem.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == world_size else f"{problem} ({name_ranks(ranks)})"
        for problem, ranks in sorted(ranks_by_problem.items())
    ]


def _error(verdict: Verdict, own: Exception | None) -> Exception:
    """Return what this rank raises; its own error says more than a report of it."""
    if verdict.outcome == "misfits" and verdict.problems:
        return StateMismatchError("the checkpoint", verdict.problems, ADVICE)
    if own is not None and verdict.outcome in (_report(own).outcome, "fits"):
        return own
    if verdict.outcome in ("damaged", "unserved"):
        return CorruptionError(f"rank {verdict.rank}: {verdict.message}")
    if verdict.ranks:
        return RankFailedError(f"the load was given up on rank {verdict.rank}: {verdict.message}", verdict.ranks)
    return RankFailedError(
        f"the load was given up because rank {verdict.rank} failed: {verdict.message}", [verdict.rank]
    )
