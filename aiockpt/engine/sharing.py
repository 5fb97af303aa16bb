"""How do the ranks of a job act as one when they save? They count saves alike, and tell each other how each ends.

Every save has a *turn*: its step, and which save of that step it is, so that ranks that call ``save`` alike mean the same.
What they tell each other about it are notes of that turn (`aiockpt.runtime.meeting`). Guarantees:

- A save that one rank forgets, or comes to when the others have given it up, is lost; the next step that all save is not.
- Turns are planned in the order of the calls (`aiockpt.engine.joint_plan`): one that comes while an earlier one is being
  planned waits for what that finds out.
- Whatever was planned, the votes decide: pieces that overlap or leave a gap are no checkpoint (`aiockpt.format.merge`),
  and after such a save every rank plans anew. A rank that begins the next one before it has heard of the failure goes on
  as before; then those that have heard keep their parts, too.
- The name of an attempt follows from a secret of rank 0, shared once, and the turn: no save waits to learn it.
- A rank that leaves says so, and what it still takes part in: the others do not wait for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
import msgspec
import xxhash

from aiockpt.engine.gathering import vote_keys
from aiockpt.engine.joint_plan import PLAN_NOTES, JointPlan, Round, shared_plan_notes
from aiockpt.errors import RankError, RankFailedError
from aiockpt.runtime.meeting import Lookout, Meeting, StoreLostError
from aiockpt.runtime.membership import Calls, Membership
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.tasks import open_tasks
from aiockpt.runtime.waiting import Waiting
from aiockpt.state.shards import ShardedState

SESSION = "session"
WARM_UP = -1
"""The step of a turn that plans and saves nothing."""
PLAN_IN_CALL_S = 30.0
"""For the other ranks to come to a plan, where a call is not to fail for their sake."""
TELL_DEADLINE_S = 10.0
"""For the word of a rank that leaves."""
_LOOKS = 4
"""At turns that this rank has left and others may not have, whenever it leaves one."""


class Turn(msgspec.Struct, frozen=True):
    """One save, as all ranks count them: the *number*-th of its step."""

    step: int
    number: int

    @property
    def prefix(self) -> str:
        """What the keys of its notes begin with."""
        return f"warm_up/{self.number}" if self.step == WARM_UP else f"save/{self.step}/{self.number}"

    @property
    def call(self) -> str:
        """What it is, in words."""
        if self.step == WARM_UP:
            return f"warm_up() number {self.number}"
        return f"the save of step {self.step}" + (f", number {self.number}" if self.number > 1 else "")

    def key(self, *parts: object) -> str:
        """Return the key of a note of this turn."""
        return "/".join([self.prefix, *map(str, parts)])


class End(msgspec.Struct, frozen=True):
    """The last note of a turn: the generation that was committed, or why none was.

    Attributes:
        rank: who says it.
        ranks: whose fault it was, where it was that of others.
    """

    generation: int = 0
    rank: int = 0
    failure: str | None = None
    ranks: tuple[int, ...] = ()


class Sharing:
    """One rank's view of what all do together. Its coroutines run on the engine's loop.

    Args:
        meeting: where the ranks' notes are.
        deadline_s: for the other ranks.
        plan_s: for them to come to a plan; None for the same.
        secret: random hex; that of rank 0 is used.
        writes: whether this process writes what it saves; see `aiockpt.runtime.membership.Member`.
    """

    def __init__(
        self, meeting: Meeting, deadline_s: float, secret: str, *, plan_s: float | None = None, writes: bool = True
    ) -> None:
        self.meeting = meeting
        self.members = Membership(meeting, writes=writes)
        self.joint = JointPlan(meeting)
        self._deadline_s = deadline_s
        self._plan_s = deadline_s if plan_s is None else min(plan_s, deadline_s)
        self._secret: str | None = secret if meeting.rank == 0 else None
        self._posted = False
        self._saves: Counter[int] = Counter()
        self._loads = 0
        self._open: dict[Turn, None] = {}
        self._loading: set[str] = set()
        self._undecided: dict[Turn, None] = {}
        self._decided = anyio.Event()
        self._departed = False
        self._left: deque[Turn] = deque()

    def next_turn(self, step: int) -> Turn:
        """Return the turn of the save that the caller begins; called once for each, in the order of the calls."""
        self.meeting.begin()
        self._saves[step] += 1
        turn = Turn(step, self._saves[step])
        self._open[turn] = self._undecided[turn] = None
        return turn

    def next_load(self) -> int:
        """Return the number of the load that the caller begins, in the order of the calls."""
        self.meeting.begin()
        self._loads += 1
        return self._loads

    async def register(self) -> None:
        """Say in which process this rank is, so that others of its host see it end."""
        with suppress(StoreLostError):
            await self.members.register()

    async def report(self, call: str, step: int = WARM_UP) -> None:
        """Leave the note of what this rank has called last; without it others only know less.

        Args:
            step: of a save.
        """
        with suppress(StoreLostError):
            await self.members.report(Calls(call, step, self._loads, self._saves[WARM_UP]))

    # ------------------------------------------------------------------ the end of a turn

    async def read_end(self, turn: Turn, deadline_s: float, lookout: Lookout | None = None) -> int:
        """Wait for the end of a turn; return the generation that was committed.

        Raises:
            RankFailedError: a rank said that it failed, or *lookout* that rank 0 will not say any more.
            RankTimeoutError: there is no end yet.
        """
        what = f"the commit of step {turn.step}"
        end = await self.meeting.wait(turn.key("end"), End, deadline_s, what, lookout=lookout)
        if end.failure is None:
            return end.generation
        what = "warm_up() was" if turn.step == WARM_UP else f"step {turn.step} was"
        if end.ranks:
            raise RankFailedError(f"{what} given up on rank {end.rank}: {end.failure}", end.ranks)
        raise RankFailedError(f"{what} given up because rank {end.rank} failed: {end.failure}", [end.rank])

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

    async def tell_failure(self, turn: Turn, error: BaseException) -> bool:
        """Tell the other ranks at once why there will be no checkpoint of *turn*; the caller is certain of that.

        Returns:
            Whether they can know now.
        """
        if isinstance(error, RankFailedError) and not (error.seen_here or isinstance(error, StoreLostError)):
            return True
        others = error.ranks if isinstance(error, RankError) and not isinstance(error, StoreLostError) else ()
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            end = End(rank=self.meeting.rank, failure=f"{type(error).__name__}: {error}", ranks=tuple(others))
            await self.meeting.post(turn.key("end"), end)
            return True
        return False

    # ------------------------------------------------------------------ the plan

    def doubt(self) -> None:
        """Have the next save planned anew. Any thread."""
        self.joint.doubt()

    def known(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* when its structure is the planned one, else None. Any thread, no waiting."""
        return self.joint.known(state)

    def waiting(self, turn: Turn, deadline_s: float | None = None) -> Waiting:
        """Return what accompanies the waits of *turn* for other ranks."""
        return Waiting(self.members, turn.prefix, turn.call, deadline_s or self._deadline_s, step=turn.step)

    async def announce(self, turn: Turn) -> None:
        """Leave the note that this rank knows what to write."""
        self._decide(turn)
        await self.joint.announce(self._round(turn))
        await self.report(turn.call, turn.step)

    def _round(self, turn: Turn) -> Round:
        return Round(turn.prefix, turn.call, self._plan_s)

    def _decide(self, turn: Turn) -> None:
        """Let the turns after this one go on: it is clear what this rank writes."""
        self._undecided.pop(turn, None)
        self._decided.set()
        self._decided = anyio.Event()

    async def _wait_for_earlier_turns(self, turn: Turn) -> None:
        while turn in self._undecided and turn not in list(self._undecided)[:1]:  # a list: other threads add to it
            await self._decided.wait()

    async def plan(self, turn: Turn, state: ShardedState) -> tuple[ShardedState, bool]:
        """Plan *state* with the ranks that do not know what to write either.

        Returns:
            This rank's share, and whether it was planned with others; not, when an earlier turn has found it meanwhile.

        Raises:
            RanksDisagreeError: other options are meant by a rank, or the tensors do not fit together.
            RankTimeoutError: names the ranks that did not begin this turn.
            RankFailedError: a rank has failed, or has left and never will.
        """
        async with self.heeding(turn):
            await self._wait_for_earlier_turns(turn)
            known = self.known(state)
            if known is not None:
                return known, False
            await self.report(turn.call, turn.step)
            share = await self.joint.make(self._round(turn), state, self.waiting(turn, self._plan_s))
            self._decide(turn)
            return share, True

    async def attempt_nonce(self, turn: Turn) -> str:
        """Return the 12 hex digits that name the attempt of *turn* on every rank."""
        if self._secret is None:
            async with self.heeding(turn):  # rank 0 may have failed before it said
                waiting = self.waiting(turn, self._plan_s)
                self._secret = await self.meeting.wait(
                    SESSION, str, self._plan_s, f"the first save, at {turn.call}", lookout=waiting
                )
        elif not self._posted and self.meeting.rank == 0:
            self._posted = True
            await self.meeting.post(SESSION, self._secret)
        return _nonce(self._secret, turn)

    def known_nonce(self, turn: Turn) -> str | None:
        """Return the same where nothing has to be asked or said for it. Any thread, no waiting."""
        told = self._posted or self.meeting.rank != 0
        return _nonce(self._secret, turn) if told and self._secret is not None else None

    # ------------------------------------------------------------------ leaving

    async def leave(self, turn: Turn) -> None:
        """Say that this rank needs no note of *turn* any more, and remove what no rank needs. Idempotent.

        A rank may be many turns behind: only the last to leave removes what all of them read.
        """
        if turn not in self._open:
            return
        del self._open[turn]
        self._decide(turn)
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            world_size = self.meeting.world_size
            if await self.meeting.arrive(turn.key("past")) == world_size:
                shared = [*shared_plan_notes(world_size), "entry", "begun", "end", "past"]
                await self.meeting.forget([*vote_keys(turn.key("votes"), world_size), *map(turn.key, shared)])
            self._left.append(turn)
            await self._forget_own()

    async def _forget_own(self) -> None:
        """Remove this rank's notes of turns that all ranks have left; one that a rank never leaves holds up no other."""
        for _ in range(_LOOKS):
            if not self._left:
                return
            turn = self._left[0]
            self._left.rotate(-1)  # that of another one is looked at next
            if not await self.meeting.is_there(turn.key("past")) and turn in self._left:
                self._left.remove(turn)  # still there: another turn may have been left meanwhile
                await self.meeting.forget([turn.key(name, self.meeting.rank) for name in PLAN_NOTES])

    @contextmanager
    def loading(self, operation: str) -> Iterator[None]:
        """Note that this rank takes part in a load for the length of the block."""
        self._loading.add(operation)
        try:
            yield
        finally:
            self._loading.discard(operation)

    async def depart(self, reason: str, *, failed: bool) -> None:
        """Tell the other ranks that this one makes no more calls, and in what it still takes part; idempotent.

        Args:
            failed: whether others may wait for it; a rank that only looked at what is there closes without a word.
        """
        if self._departed or not (failed or self.meeting.name):
            return
        self._departed = True
        part = [*(turn.prefix for turn in list(self._open)), *self._loading]
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
            await (self.members.leave(reason, part) if self.meeting.name else self.members.leave_early(reason))


def _nonce(secret: str, turn: Turn) -> str:
    return xxhash.xxh3_128_hexdigest(f"{secret}/{turn.step}/{turn.number}".encode())[:12]


def make_sharing(
    ranks: Ranks, place: str, deadline_s: float, secret: str, *, plan_s: float | None = None, writes: bool = True
) -> Sharing | None:
    """Return how *ranks* share; None for a single process, which shares with nobody. Arguments as of `Sharing`."""
    if ranks.world_size == 1:
        return None
    relayed = isinstance(ranks.store, RelayedStore)
    meeting = Meeting(ranks.store, place, ranks.rank, ranks.world_size, relayed=relayed)
    return Sharing(meeting, deadline_s, secret, plan_s=plan_s, writes=writes)
