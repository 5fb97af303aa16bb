"""Membership of ranks: which are running, what each called last, and which have gone; from notes of each about itself.

A rank posts its process, its calls, and, when its checkpointer is closed, that it leaves, with the reason. A rank that is
killed posts nothing: the ranks on its host detect that its process has ended, and notify the others.

Guarantees:

- A rank that is reported gone takes part only in the operations that its own note lists.
- Each rank checks only a few others: its neighbours, which launchers put on the same host, and those it waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from copy import copy

import anyio
import msgspec

from aiockpt.errors import CheckpointError, RankError, RankFailedError, RanksDisagreeError
from aiockpt.runtime.notes import EVERYWHERE, NoteBoard, StoreLostError, name_ranks
from aiockpt.runtime.processes import Process, has_ended, this_process

NEXT_RANKS = 16
"""How many ranks on either side are checked: hosts have fewer, and launchers number those of one host in a row."""
DESCRIBED = 8
"""Ranks that are described one by one in a message."""
READ_AT_ONCE = 64
"""Departures that one poll reads: when a whole job ends, ranks do not read millions of each other's notes."""
_LEFT, _CLOSED = "left", "closed"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A rank's note about itself, the same for all of its checkpointers.

    Attributes:
        process: where it runs.
        world_size: that it assumes.
        writes: whether that process writes what it saves; else another one does, which may outlive it.
        place: where it saves to, or meant to when it left; empty before its first call.
        left: why it left that place before it had called anything; empty if it did not.
    """

    process: Process
    world_size: int
    writes: bool
    place: str = ""
    left: str = ""


class CallNote(msgspec.Struct, frozen=True, array_like=True):
    """A rank's note about its calls of one checkpointer: the last one in words, and the counts of loads and warm-ups.

    Attributes:
        step: of the last call, where it was a save; else negative.
    """

    last: str
    step: int
    loads: int
    warm_ups: int


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """A note about a rank that has gone.

    Attributes:
        part: the operations that it still takes part in, by the keys of their notes.
        killed: whether its process has ended; else it has posted this itself.
        writes: as `Member.writes`.
    """

    rank: int
    reason: str
    part: tuple[str, ...] = ()
    killed: bool = False
    writes: bool = True


class Membership:
    """One rank's view of the others. Use on the event loop of its board.

    Args:
        writes: as `Member.writes`.
        ended: returns whether a process has ended.
    """

    def __init__(
        self, board: NoteBoard, *, writes: bool = True, ended: Callable[[Process, Process], bool] = has_ended
    ) -> None:
        self._board = board
        self._writes = writes
        self._ended = ended
        self._here: Process | None = None
        self._others: dict[int, Member] = {}
        self._departures: dict[int, Departure] = {}
        self._received = 0
        self._placed = False

    async def register(self, place: str = "") -> None:
        """Post the process of this rank, and where it saves to; wait for rank 0 in between."""
        note = await self.introduce(place)
        await self._board.post(_member_key(self._board.rank), note)

    async def introduce(self, place: str) -> Member:
        """Post the same where ranks read it that wait for this one, and are of no incarnation with it."""
        note = Member(await self._locate(), self._board.world_size, self._writes, place)
        await self._board.post(_everywhere(self._board.rank), note)
        return note

    async def report(self, calls: CallNote) -> None:
        """Post what this rank has called; the first time also where it saves to."""
        if not self._placed:
            self._placed = True
            await self.register(self._board.place)
        await self._board.post(_calls_key(self._board.rank), calls)

    async def leave_group(self, reason: str, part: Iterable[str]) -> None:
        """Post that this rank now takes part only in *part*, and why. The last rank to leave removes all these notes."""
        board = self._board
        await self._announce(Departure(board.rank, reason, tuple(part), writes=self._writes))
        if await board.arrive(_CLOSED) == board.world_size:
            departed = await board.count(_LEFT)
            await board.delete([_LEFT, _CLOSED, *map(_left_key, range(1, departed + 1))])
            await board.delete(map(_calls_key, range(board.world_size)))

    async def leave_group_early(self, reason: str) -> None:
        """Post that this rank leaves before its board has a name. The note of its next checkpointer replaces this one."""
        here = await self._locate()
        note = Member(here, self._board.world_size, self._writes, self._board.place, left=reason)
        await self._board.post(_member_key(self._board.rank), note)

    async def find_early(self, ranks: Iterable[int]) -> None:
        """Find which of *ranks* have left before they made any call."""
        board = self._board
        some = [rank for rank in ranks if rank not in self._departures][:DESCRIBED]
        members = await board.find_all(list(map(_member_key, some)), Member)
        for rank, member in zip(some, members, strict=True):
            if member is not None and member.left and member.place == board.place:
                self._departures[rank] = Departure(rank, member.left, writes=member.writes)

    async def refresh(self) -> None:
        """Find which ranks have left, and whether a rank of this host has ended."""
        count = min(await self._board.count(_LEFT), self._received + READ_AT_ONCE)
        keys = list(map(_left_key, range(self._received + 1, count + 1)))
        for departure in await self._board.find_all(keys, Departure):
            if departure is None:  # counted, and not written yet
                break
            self._received += 1
            self._departures.setdefault(departure.rank, departure)
        for rank, member in await self._ended_neighbours():
            why = f"its process {member.process.pid} has ended, killed perhaps, without closing its Checkpointer"
            await self._announce(Departure(rank, why, killed=True, writes=member.writes))

    def departure(self, rank: int, operation: str, *, voting: bool = False) -> Departure | None:
        """Return why *rank* will do nothing more for an operation; None while it may, as far as is known.

        Args:
            voting: whether only its vote is needed, which its writer process may still give.
        """
        found = self._departures.get(rank)
        if found is None or operation in found.part or (voting and found.killed and not found.writes):
            return None
        return found

    async def find_passed(self, ranks: Iterable[int], operation: str, step: int) -> dict[int, CallNote]:
        """Return those of *ranks* that have called a save of a later step, and not *operation*, the save of *step*."""
        board, some = self._board, list(ranks)[:DESCRIBED]
        calls = await board.find_all(list(map(_calls_key, some)), CallNote)
        ahead = {rank: made for rank, made in zip(some, calls, strict=True) if made is not None and made.step > step}
        return {rank: made for rank, made in ahead.items() if not await board.is_there(f"{operation}/intent/{rank}")}

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._board.world_size

    @property
    def entered(self) -> bool:
        """Whether the incarnation is known: until then nothing is known of other ranks."""
        return self._board.entered

    @property
    def anyone_gone(self) -> bool:
        """Whether any rank is known to have gone."""
        return bool(self._departures)

    async def describe(self, ranks: Collection[int], call: str) -> str:
        """Return in words what is known of *ranks*, for which *call* waits."""
        some = sorted(ranks)[:DESCRIBED]
        board = self._board
        calls = (
            await board.find_all([_calls_key(rank) for rank in some], CallNote) if self.entered else [None] * len(some)
        )
        members = await self._find_running(some)
        words: dict[str, list[int]] = {}
        for rank, made in zip(some, calls, strict=True):
            said = self._in_words(members.get(rank)) if made is None else _what_it_does(made, call)
            words.setdefault(said, []).append(rank)
        return "; ".join(f"{name_ranks(those)} {said}" for said, those in words.items())

    async def find_other_worlds(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the world size that those of *ranks* assume that run on this host, where it is another than here."""
        here, members = await self._locate(), await self._find_running(list(ranks)[:DESCRIBED])
        return {
            rank: member.world_size
            for rank, member in members.items()
            if member.world_size != self._board.world_size and member.process.host == here.host
        }

    async def _find_running(self, ranks: Sequence[int]) -> dict[int, Member]:
        """Return what *ranks* posted everywhere, as far as they may run: it may be of an earlier start on another host."""
        here = await self._locate()
        found = await self._board.find_all(list(map(_everywhere, ranks)), Member)
        members = {rank: member for rank, member in zip(ranks, found, strict=True) if member is not None}
        return await self._board.run(
            lambda: {rank: member for rank, member in members.items() if not self._ended(member.process, here)}
        )

    def _in_words(self, member: Member | None) -> str:
        if member is None:
            return "made no Checkpointer that knows of this rank"
        if member.world_size != self._board.world_size:
            return f"is one of {member.world_size} ranks, not of {self._board.world_size}"
        if member.place and member.place != self._board.place:
            return f"saved to {member.place}, not to {self._board.place}"
        return "called neither save, load nor warm_up so far"

    async def _announce(self, departure: Departure) -> None:
        self._departures.setdefault(departure.rank, departure)
        await self._board.post(_left_key(await self._board.arrive(_LEFT)), departure)

    async def _locate(self) -> Process:
        if self._here is None:
            self._here = await self._board.run(this_process)
        return self._here

    async def _ended_neighbours(self) -> list[tuple[int, Member]]:
        here, rank = await self._locate(), self._board.rank
        next_ranks = range(max(0, rank - NEXT_RANKS), min(self._board.world_size, rank + NEXT_RANKS + 1))
        unknown = [other for other in next_ranks if other != rank and other not in self._others]
        found = await self._board.find_all(list(map(_member_key, unknown)), Member)
        self._others |= {other: member for other, member in zip(unknown, found, strict=True) if member is not None}
        near = [
            (other, member)
            for other, member in self._others.items()
            if member.process.host == here.host and other not in self._departures
        ]
        ended = await self._board.run(lambda: [each for each in near if self._ended(each[1].process, here)])
        # Another process may have come in its place before this rank had read anything of it.
        newest = await self._board.find_all([_member_key(other) for other, _ in ended], Member) if ended else []
        self._others |= {other: member for (other, _), member in zip(ended, newest, strict=True) if member is not None}
        return [(other, member) for other, member in ended if self._others[other] == member]


def lost(what: str, departures: Sequence[Departure]) -> RankFailedError:
    """Return the error that ends *what*, which needed the ranks of *departures*."""
    reasons = "; ".join(
        f"rank {departure.rank} {'is gone' if departure.killed else 'has left'}: {departure.reason}"
        for departure in departures[:DESCRIBED]
    )
    ranks = [departure.rank for departure in departures]
    return RankFailedError(f"{what} is given up. {reasons}", ranks, seen_here=True)


def _what_it_does(calls: CallNote, call: str) -> str:
    if calls.last == call:
        return f"called {call}, and is not done"
    return f"called {calls.last} last, load() {calls.loads} times, warm_up() {calls.warm_ups} times"


def _member_key(rank: int) -> str:
    return f"/members/{rank}"  # not of one board


def _everywhere(rank: int) -> str:
    return f"{EVERYWHERE}members/{rank}"


def _left_key(number: int) -> str:
    return f"{_LEFT}/{number}"


def _calls_key(rank: int) -> str:
    return f"calls/{rank}"


# Waits of one operation for other ranks: they log after a while, and end as soon as a needed rank has gone.
#
# One `Waiting` serves all waits of one operation for other ranks. Guarantees:
#
# - After ten seconds a warning names the ranks waited for and what they did last, and again every minute.
# - A wait for a rank that has left, or whose process has ended, ends within a second or so, and names that rank. What the
#   rank had posted before is read first.
# - A save that a rank has skipped, because it already saves a later step, is abandoned after those ten seconds, not at once:
#   the threads of one program may call in another order than those of the next.


logger = logging.getLogger("aiockpt")

Missing = Callable[[], Awaitable[Iterable[int]]]
"""Returns which ranks are missing."""
WARN_AFTER_S, WARN_AGAIN_S = 10.0, 60.0
FIRST_POLL_S, POLL_S = 0.2, 1.0
"""Before the first poll for departed ranks, and between polls."""


class Waiting:
    """The waits of one operation of this rank for other ranks.

    Args:
        operation: the key prefix of its notes.
        call: the operation, in words.
        deadline_s: after which the operation is abandoned; for the message.
        step: of a save; else negative.
        for_whom: returns the ranks that the checked ones wait for in turn; None if the checked ones are themselves late.
    """

    def __init__(
        self,
        members: Membership,
        operation: str,
        call: str,
        deadline_s: float,
        *,
        step: int = -1,
        for_whom: Missing | None = None,
    ) -> None:
        self._members = members
        self._operation = operation
        self._call = call
        self._deadline_s = deadline_s
        self._step = step
        self._for_whom = for_whom
        self.warns = True
        self._begun_s = anyio.current_time()
        self._poll_at_s = self._begun_s + FIRST_POLL_S
        self._warn_at_s = self._begun_s + WARN_AFTER_S

    async def check_ranks(self, ranks: Iterable[int], *, voting: bool = False) -> RankError | None:
        """Log, when that is due, which ranks are late; return the error if one of *ranks* has gone, else None.

        A caller that receives an error reads once more what those ranks had posted before.

        Args:
            voting: as of `Membership.departure`.
        """
        # A failed query is no reason to end the wait; a caller that needs the store raises the error itself.
        with suppress(CheckpointError):
            if await self._is_time():
                needed = list(ranks)
                if self._members.entered:
                    await self._members.find_early(needed)
                return await self._judge(needed, voting=voting)
        return None

    async def check_votes(self, missing: Missing) -> RankError | None:
        """The same for votes; *missing* lists the ranks from storage, and is called only when one has gone or is late."""
        with suppress(CheckpointError):
            if await self._is_time() and (self._members.anyone_gone or self._is_late):
                return await self._judge(sorted(await missing()), voting=True)
        return None

    async def _judge(self, needed: list[int], *, voting: bool) -> RankError | None:
        if not self.warns:
            return self.lost(needed)
        if self._warns_now:
            await self._warn(needed if self._for_whom is None else sorted(await self._for_whom()))
        return self.lost(needed, voting=voting) or await self._passed_over(needed) or await self._miscounted(needed)

    async def explain(self, ranks: Sequence[int]) -> str:
        """Return what is known of *ranks*, which missed the deadline."""
        try:
            return await self._members.describe(ranks, self._call)
        except StoreLostError as error:
            return str(error)

    @property
    def silent(self) -> Waiting:
        """The same without the warnings, for a wait whose ranks are not known one by one."""
        silent = copy(self)
        silent.warns = False
        return silent

    @property
    def _is_late(self) -> bool:
        return anyio.current_time() >= self._begun_s + WARN_AFTER_S

    @property
    def _warns_now(self) -> bool:
        return anyio.current_time() >= self._warn_at_s

    async def _passed_over(self, ranks: Sequence[int]) -> RanksDisagreeError | None:
        if self._step < 0 or not self._is_late or not self._members.entered:
            return None
        passed = await self._members.find_passed(ranks, self._operation, self._step)
        if not passed:
            return None
        words = "; ".join(f"rank {rank} called {made.last}" for rank, made in passed.items())
        return RanksDisagreeError(
            f"{self._call} is given up: not every rank has called it. {words} without it. Call save on all ranks alike",
            list(passed),
        )

    async def _miscounted(self, ranks: Sequence[int]) -> RanksDisagreeError | None:
        if not self._is_late or not (found := await self._members.find_other_worlds(ranks)):
            return None
        words = "; ".join(f"rank {rank} is one of {world_size} ranks" for rank, world_size in found.items())
        return RanksDisagreeError(
            f"{self._call} is given up: this rank is one of {self._members.world_size} ranks, and {words}. Start all ranks "
            "of a job with the same WORLD_SIZE",
            list(found),
        )

    async def _is_time(self) -> bool:
        now_s = anyio.current_time()
        if now_s < self._poll_at_s:
            return False
        self._poll_at_s = now_s + POLL_S
        if self._members.entered:
            await self._members.refresh()
        return True

    async def _warn(self, ranks: list[int]) -> None:
        if not ranks:
            return
        # A process that was stopped for long warns once, and not for each minute of that.
        while self._warns_now:
            self._warn_at_s += WARN_AGAIN_S
        logger.warning(
            "%s has waited %.0f s for %s, and is given up after %g s: %s. Every rank must make the same calls of save, "
            "load and warm_up",
            self._call,
            anyio.current_time() - self._begun_s,
            name_ranks(ranks),
            self._deadline_s,
            await self.explain(ranks),
        )

    def lost(self, ranks: Iterable[int], *, voting: bool = False) -> RankFailedError | None:
        """Return the error if some of *ranks* are known to do nothing more for the operation; None while all may.

        Args:
            voting: as of `Membership.departure`.
        """
        found = [self._members.departure(rank, self._operation, voting=voting) for rank in ranks]
        departures = [departure for departure in found if departure is not None]
        return lost(self._call, departures) if departures else None
