"""Who writes what when several ranks save one state, and how do they act as one?

Every save has a *turn*: its number, the same on all ranks because all call ``save`` in the same order. What ranks tell
each other about it are notes of that turn (`aiockpt.runtime.meeting`). Guarantees:

- Ranks exchange what they hold once for each structure (`aiockpt.planning.spread`). A later save of the same structure
  asks nobody: a rank writes what it wrote last time. Each rank only leaves a note that it does.
- A rank whose structure changed waits for all notes of the turn. When all changed, everything is planned anew; when only
  some did, these plan among themselves what is new and keep the rest, and the others never wait.
- Turns are planned in their order: one that comes while an earlier one is being planned waits for what that finds out.
- Whatever was planned, the votes decide: pieces that overlap or leave a gap are no checkpoint (`aiockpt.format.merge`),
  and after such a save every rank plans anew. A rank that begins the next one before it has heard of the failure goes on
  as before; then those that have heard keep their parts, too.
- The name of an attempt follows from a secret of rank 0, shared once, and the turn: no save waits to learn it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby

import anyio
import msgspec
import xxhash

from aiockpt.adapters.parts import take_parts
from aiockpt.engine.gathering import vote_keys
from aiockpt.errors import RankError, RankFailedError, RanksDisagreeError, RankTimeoutError
from aiockpt.planning.spread import Holding, Part, holdings_of, spread
from aiockpt.runtime.meeting import Meeting, StoreLostError, name_ranks
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import ShardedState, TensorShard, are_same

SESSION = "session"
WARM_UP = -1
"""The step of a turn that plans and saves nothing."""
_LOOKS = 4
"""At turns that this rank has left and others may not have, whenever it leaves one."""


class Turn(msgspec.Struct, frozen=True):
    """One save, as all ranks count them."""

    number: int
    step: int

    def key(self, *parts: object) -> str:
        """Return the key of a note of this turn."""
        return "/".join(["save", str(self.number), *map(str, parts)])


class Intent(msgspec.Struct, frozen=True):
    """The note of a rank that begins a turn: the step and the world it means, and whether it must be told what to write."""

    step: int
    world_size: int
    lost: bool


class Share(msgspec.Struct, frozen=True):
    """What the planner tells a rank: the parts it writes, or why nothing can be planned."""

    parts: tuple[Part, ...] = ()
    problem: str | None = None


class End(msgspec.Struct, frozen=True):
    """The last note of a turn: the generation that was committed, or which rank failed, and why."""

    generation: int = 0
    rank: int = 0
    failure: str | None = None


class _Plan(msgspec.Struct, frozen=True):
    """What this rank writes of one structure."""

    structure: str
    holdings: tuple[Holding, ...]
    parts: tuple[Part, ...]
    label: str


class Sharing:
    """One rank's view of how a state is shared out. Its coroutines run on the engine's loop.

    Args:
        meeting: where the ranks' notes are.
        deadline_s: for the other ranks.
        secret: random hex; that of rank 0 is used.
    """

    def __init__(self, meeting: Meeting, deadline_s: float, secret: str) -> None:
        self.meeting = meeting
        self._deadline_s = deadline_s
        self._secret: str | None = secret if meeting.rank == 0 else None
        self._posted = False
        self._turns = 0
        self._loads = 0
        self._open: set[int] = set()
        self._undecided: set[int] = set()
        self._decided = anyio.Event()
        self._left: deque[int] = deque()
        self._plan: _Plan | None = None
        self._doubted = False
        self._taken: tuple[_Plan, Sequence[TensorShard], tuple[TensorShard, ...]] | None = None

    def next_turn(self, step: int) -> Turn:
        """Return the turn of the save that the caller begins; called once for each, in the order of the calls."""
        self.meeting.begin()
        self._turns += 1
        self._open.add(self._turns)
        self._undecided.add(self._turns)
        return Turn(self._turns, step)

    async def read_end(self, turn: Turn, deadline_s: float) -> int:
        """Wait for the end of a turn; return the generation that was committed.

        Raises:
            RankFailedError: a rank said that it failed.
            RankTimeoutError: there is no end yet.
        """
        end = await self.meeting.wait(turn.key("end"), End, deadline_s, f"the commit of step {turn.step}")
        if end.failure is not None:
            raise RankFailedError(
                f"step {turn.step} was given up because rank {end.rank} failed: {end.failure}", [end.rank]
            )
        return end.generation

    @asynccontextmanager
    async def heeding(self, turn: Turn) -> AsyncIterator[None]:
        """Stop the block, and raise, as soon as another rank says that it failed."""
        async with open_tasks() as tasks:
            tasks.start_soon(self._heed, turn)
            yield
            tasks.cancel_scope.cancel()

    async def _heed(self, turn: Turn) -> None:
        with suppress(StoreLostError):  # the block meets it when it needs the store
            await self.read_end(turn, float("inf"))

    def next_load(self) -> int:
        """Return the number of the load that the caller begins, in the order of the calls."""
        self.meeting.begin()
        self._loads += 1
        return self._loads

    def doubt(self) -> None:
        """Have the next save planned anew. Any thread."""
        self._doubted = True

    async def tell_failure(self, turn: Turn, error: BaseException) -> bool:
        """Tell the other ranks at once why there will be no checkpoint of *turn*; the caller is certain of that.

        Returns:
            Whether they can know now.
        """
        if isinstance(error, RankFailedError) and not isinstance(error, StoreLostError):
            return True
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            end = End(rank=self.meeting.rank, failure=f"{type(error).__name__}: {error}")
            await self.meeting.post(turn.key("end"), end)
            return True
        return False

    def known(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* when its structure is the planned one, else None. Any thread, no waiting."""
        plan = self._plan
        if plan is None or self._doubted or plan.structure != state.structure:
            return None
        return self._take(plan, state)

    async def announce(self, turn: Turn) -> None:
        """Leave the note that this rank knows what to write."""
        self._decide(turn)
        await self.meeting.post(
            turn.key("intent", self.meeting.rank), Intent(turn.step, self.meeting.world_size, lost=False)
        )

    def _decide(self, turn: Turn) -> None:
        """Let the turns after this one go on: it is clear what this rank writes."""
        self._undecided.discard(turn.number)
        self._decided.set()
        self._decided = anyio.Event()

    async def _wait_for_earlier_turns(self, turn: Turn) -> None:
        while min(self._undecided, default=turn.number) < turn.number:
            await self._decided.wait()

    async def plan(self, turn: Turn, state: ShardedState) -> tuple[ShardedState, bool]:
        """Plan *state* with the ranks that do not know what to write either.

        Returns:
            This rank's share, and whether it was planned with others; not, when an earlier turn has found it meanwhile.

        Raises:
            RanksDisagreeError: another step is meant by a rank, or the tensors do not fit together.
            RankTimeoutError: names the ranks that did not begin this turn.
        """
        async with self.heeding(turn):
            await self._wait_for_earlier_turns(turn)
            known = self.known(state)
            if known is not None:
                return known, False
            share = await self._plan_with_others(turn, state)
            self._decide(turn)
            return share, True

    async def _plan_with_others(self, turn: Turn, state: ShardedState) -> ShardedState:
        meeting, rank = self.meeting, self.meeting.rank
        holdings = holdings_of(state)
        await meeting.post(turn.key("holdings", rank), holdings)
        await meeting.post(turn.key("intent", rank), Intent(turn.step, meeting.world_size, lost=True))
        lost = await self._lost_ranks(turn)
        kept = self._kept_parts(holdings) if len(lost) < meeting.world_size else {}
        if len(lost) < meeting.world_size:
            await meeting.post(turn.key("kept", rank), sorted(kept))
        if rank == lost[0]:
            await self._plan_for(turn, lost)
        share = await meeting.wait(
            turn.key("share", rank), Share, self._deadline_s, f"planning step {turn.step}", lost[:1]
        )
        if share.problem is not None:
            raise RanksDisagreeError(share.problem)
        parts = (*(part for some in kept.values() for part in some), *share.parts)
        plan = _Plan(state.structure, holdings, parts, f"{state.structure}/{turn.number}")
        self._plan, self._doubted = plan, False
        return self._take(plan, state)

    async def _lost_ranks(self, turn: Turn) -> list[int]:
        """Wait for the notes of all ranks; return the ranks that must be told what to write."""
        intents = await self._survey(turn)
        for rank, intent in sorted(intents.items()):
            if intent.world_size != self.meeting.world_size:
                raise RanksDisagreeError(
                    f"rank {self.meeting.rank} is one of {self.meeting.world_size} ranks and rank {rank} one of "
                    f"{intent.world_size}: start all ranks of a job with the same WORLD_SIZE",
                    [rank],
                )
        others = sorted(rank for rank, intent in intents.items() if intent.step != turn.step)
        if others:
            raise RanksDisagreeError(
                f"rank {self.meeting.rank} saves step {turn.step} and {name_ranks(others)} step "
                f"{intents[others[0]].step}, both as save number {turn.number}: call save on all ranks alike",
                others,
            )
        return sorted(rank for rank, intent in intents.items() if intent.lost)

    async def _survey(self, turn: Turn) -> dict[int, Intent]:
        """Return the notes of all ranks. The first rank to ask reads them, and the others read what it found.

        (If each of 10,000 read 10,000 notes, the store would need a quarter of an hour: `benchmarks.gathering`.)
        """
        meeting, what = self.meeting, f"the save of step {turn.step} (every rank must call save)"
        if await meeting.arrive(turn.key("surveyors", meeting.world_size)) > 1:
            with suppress(RankTimeoutError):  # then the rank that reads for all is dead: see who else is missing
                found = await meeting.wait(
                    turn.key("survey", meeting.world_size), list[tuple[Intent, int]], self._deadline_s, what
                )
                return dict(enumerate(intent for intent, count in found for _ in range(count)))
        keys = {rank: turn.key("intent", rank) for rank in range(meeting.world_size)}
        intents = await meeting.gather(keys, Intent, self._deadline_s, what)
        runs = groupby(intents[rank] for rank in range(meeting.world_size))
        await meeting.post(turn.key("survey", meeting.world_size), [(intent, len(list(some))) for intent, some in runs])
        return intents

    def _kept_parts(self, holdings: Sequence[Holding]) -> dict[int, list[Part]]:
        """Return, by number of the holding, what this rank goes on to write of tensors that did not change."""
        if self._plan is None:
            return {}
        numbers = {holding: number for number, holding in enumerate(holdings)}
        kept: dict[int, list[Part]] = {numbers[holding]: [] for holding in self._plan.holdings if holding in numbers}
        for part in self._plan.parts:
            number = numbers.get(self._plan.holdings[part.holding])
            if number is not None:
                kept[number].append(msgspec.structs.replace(part, holding=number))
        return kept

    async def _plan_for(self, turn: Turn, lost: Sequence[int]) -> None:
        """Plan what the *lost* ranks do not keep, and tell each of them."""
        what = f"what they hold for step {turn.step}"
        held = await self.meeting.gather(
            {rank: turn.key("holdings", rank) for rank in lost}, tuple[Holding, ...], self._deadline_s, what
        )
        some_keep = {rank: turn.key("kept", rank) for rank in lost} if len(lost) < self.meeting.world_size else {}
        kept = await self.meeting.gather(some_keep, list[int], self._deadline_s, what)
        new = [[number for number in range(len(held[rank])) if number not in set(kept.get(rank, ()))] for rank in lost]
        try:
            shares = spread([[held[rank][number] for number in some] for rank, some in zip(lost, new, strict=True)])
        except RankError as error:
            for rank in lost:
                await self.meeting.post(turn.key("share", rank), Share(problem=str(error)))
            return
        for rank, numbers, parts in zip(lost, new, shares, strict=True):
            own = tuple(msgspec.structs.replace(part, holding=numbers[part.holding]) for part in parts)
            await self.meeting.post(turn.key("share", rank), Share(own))

    def _take(self, plan: _Plan, state: ShardedState) -> ShardedState:
        """Return the state with only the parts that this rank writes; the same shards while the tensors are the same."""
        taken = self._taken
        if taken is None or taken[0] is not plan or not are_same(taken[1], state.tensors):
            taken = self._taken = (plan, state.tensors, tuple(take_parts(state.tensors, plan.parts)))
        return msgspec.structs.replace(state, tensors=taken[2], structure=plan.label)

    async def attempt_nonce(self, turn: Turn) -> str:
        """Return the 12 hex digits that name the attempt of *turn* on every rank."""
        if self._secret is None:
            async with self.heeding(turn):  # rank 0 may have failed before it said
                self._secret = await self.meeting.wait(SESSION, str, self._deadline_s, "the first save")
        elif not self._posted and self.meeting.rank == 0:
            self._posted = True
            await self.meeting.post(SESSION, self._secret)
        return _nonce(self._secret, turn)

    def known_nonce(self, turn: Turn) -> str | None:
        """Return the same where nothing has to be asked or said for it. Any thread, no waiting."""
        told = self._posted or self.meeting.rank != 0
        return _nonce(self._secret, turn) if told and self._secret is not None else None

    async def leave(self, turn: Turn) -> None:
        """Say that this rank needs no note of *turn* any more, and remove what no rank needs. Idempotent.

        A rank may be many turns behind: only the last to leave removes what all of them read.
        """
        if turn.number not in self._open:
            return
        self._open.remove(turn.number)
        self._decide(turn)
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            if await self.meeting.arrive(turn.key("past")) == self.meeting.world_size:
                world_size = self.meeting.world_size
                votes = vote_keys(turn.key("votes"), world_size)
                survey = [turn.key(name, world_size) for name in ("surveyors", "survey")]
                await self.meeting.forget([*votes, *survey, *map(turn.key, ("entry", "begun", "end", "past"))])
            self._left.append(turn.number)
            await self._forget_own()

    async def _forget_own(self) -> None:
        """Remove this rank's notes of turns that all ranks have left; one that a rank never leaves holds up no other."""
        for _ in range(_LOOKS):
            if not self._left:
                return
            turn = Turn(self._left[0], WARM_UP)
            self._left.rotate(-1)  # that of another one is looked at next
            if not await self.meeting.is_there(turn.key("past")) and turn.number in self._left:
                self._left.remove(turn.number)  # still there: another turn may have been left meanwhile
                own = ("intent", "holdings", "kept", "share")
                await self.meeting.forget([turn.key(name, self.meeting.rank) for name in own])


def _nonce(secret: str, turn: Turn) -> str:
    return xxhash.xxh3_128_hexdigest(f"{secret}/{turn.number}/{turn.step}".encode())[:12]


def make_sharing(ranks: Ranks, place: str, deadline_s: float, secret: str) -> Sharing | None:
    """Return how *ranks* share; None for a single process, which shares with nobody."""
    if ranks.world_size == 1:
        return None
    relayed = isinstance(ranks.store, RelayedStore)
    return Sharing(Meeting(ranks.store, place, ranks.rank, ranks.world_size, relayed=relayed), deadline_s, secret)
