"""Rounds of saves, which make the ranks of a job act as one: all count saves alike, and report how each ends.

Every save has a *round*: its step, and which save of that step it is, so that ranks that call ``save`` alike mean the same.
What they report about it are notes of that round (`aiockpt.runtime.notes`). Guarantees:

- A save that one rank omits, or begins when the others have given it up, is lost; the next step that all save is not.
- Rounds are planned in the order of the calls (`aiockpt.ranks.joint_plan`): one that begins while an earlier one is being
  planned waits for the result.
- Whatever was planned, the votes decide: pieces that overlap or leave a gap are no checkpoint (`aiockpt.format.merge`),
  and after such a save every rank plans anew. A rank that begins the next one before it has received the failure goes on
  as before; then those that have received it keep their parts, too.
- The name of an attempt follows from a secret of rank 0, shared once, and the round: no save waits to learn it.
- A rank that leaves posts that, and what it still takes part in: the others do not wait for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
import msgspec
import xxhash

from aiockpt.engine.round import WARM_UP, SaveRound
from aiockpt.errors import RankError, RankFailedError, ReplicasDifferError, StepExistsError
from aiockpt.ranks.gathering import vote_keys
from aiockpt.ranks.joint_plan import PLAN_NOTES, JointPlan, PlanRound, shared_plan_notes
from aiockpt.ranks.membership import Calls, Membership, Waiting
from aiockpt.runtime.notes import Lookout, NoteBoard, StoreLostError
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import ShardedState

SESSION = "session"
TELL_DEADLINE_S = 10.0
"""For the word of a rank that leaves."""
_TENSORS_TOLD = 1000
_LOOKS = 4
"""At rounds that this rank has left and others may not have, whenever it leaves one."""


class End(msgspec.Struct, frozen=True):
    """The last note of a round: the generation that was committed, or why none was.

    Attributes:
        rank: the author.
        ranks: at fault, where the cause is on other ranks.
        exists: whether no rank failed: the step is there, and ``on_exists="raise"`` refuses it on every rank.
        tensors: what ranks have differently; then *ranks* are those that differ.
    """

    generation: int = 0
    rank: int = 0
    failure: str | None = None
    ranks: tuple[int, ...] = ()
    exists: bool = False
    tensors: tuple[str, ...] = ()


class Rounds:
    """One rank's view of what all do together. Its coroutines run on the engine's loop.

    Args:
        board: where the ranks' notes are.
        deadline_s: for the other ranks.
        plan_s: for them to come to a plan; None for the same.
        secret: random hex; that of rank 0 is used.
        writes: whether this process writes what it saves; see `aiockpt.ranks.membership.Member`.
    """

    def __init__(
        self, board: NoteBoard, deadline_s: float, secret: str, *, plan_s: float | None = None, writes: bool = True
    ) -> None:
        self.board = board
        self.members = Membership(board, writes=writes)
        self.joint = JointPlan(board)
        self._deadline_s = deadline_s
        self._plan_s = deadline_s if plan_s is None else min(plan_s, deadline_s)
        self._secret: str | None = secret if board.rank == 0 else None
        self._posted = False
        self._saves: Counter[int] = Counter()
        self._loads = 0
        self._open: dict[SaveRound, None] = {}
        self._loading: set[str] = set()
        self._undecided: dict[SaveRound, None] = {}
        self._decided = anyio.Event()
        self._departed = False
        self._left: deque[SaveRound] = deque()

    def next_round(self, step: int) -> SaveRound:
        """Return the round of the save that the caller begins; called once for each, in the order of the calls."""
        self.board.begin()
        self._saves[step] += 1
        save_round = SaveRound(step, self._saves[step])
        self._open[save_round] = self._undecided[save_round] = None
        return save_round

    def next_load(self) -> int:
        """Return the number of the load that the caller begins, in the order of the calls."""
        self.board.begin()
        self._loads += 1
        return self._loads

    @property
    def outlives_store(self) -> bool:
        """Whether saves go on here when the store of the notes is lost, as those of a writer process do."""
        return self.board.relayed

    def surviving_store(self) -> suppress:
        """End the block, where saves go on without the store, when the store is lost; elsewhere that is an error."""
        ends = (StoreLostError,) if self.outlives_store else ()
        return suppress(*ends)

    async def register(self) -> None:
        """Post in which process this rank is, so that others of its host see it end."""
        with suppress(StoreLostError):
            await self.members.register()

    async def report(self, call: str, step: int = WARM_UP) -> None:
        """Post what this rank has called last; without the note others only know less.

        Args:
            step: of a save.
        """
        with suppress(StoreLostError):
            await self.members.report(Calls(call, step, self._loads, self._saves[WARM_UP]))

    # ------------------------------------------------------------------ the end of a round

    async def read_end(self, save_round: SaveRound, deadline_s: float, lookout: Lookout | None = None) -> int:
        """Wait for the end of a round; return the generation that was committed.

        Raises:
            RankFailedError: a rank reported that it failed, or *lookout* that rank 0 will not answer any more.
            StepExistsError: rank 0 found the step committed.
            ReplicasDifferError: ranks have other values of the same tensors.
            RankTimeoutError: there is no end yet.
        """
        what = f"the commit of step {save_round.step}"
        end = await self.board.wait(save_round.key("end"), End, deadline_s, what, lookout=lookout)
        if end.failure is None:
            return end.generation
        if end.exists:
            raise StepExistsError(end.failure)
        if end.tensors:
            raise ReplicasDifferError(end.failure, end.tensors, end.ranks)
        what = "warm_up() was" if save_round.step == WARM_UP else f"step {save_round.step} was"
        if end.ranks:
            raise RankFailedError(f"{what} given up on rank {end.rank}: {end.failure}", end.ranks)
        raise RankFailedError(f"{what} given up because rank {end.rank} failed: {end.failure}", [end.rank])

    @asynccontextmanager
    async def watching_failures(self, save_round: SaveRound) -> AsyncIterator[None]:
        """Stop the block, and raise, as soon as another rank reports that it failed."""
        async with open_tasks() as tasks:
            tasks.start_soon(self._watch_failures, save_round)
            yield
            tasks.cancel_scope.cancel()

    async def _watch_failures(self, save_round: SaveRound) -> None:
        with suppress(StoreLostError):  # the block raises it when it needs the store
            await self.read_end(save_round, float("inf"))

    async def tell_failure(self, save_round: SaveRound, error: BaseException) -> bool:
        """Report to the other ranks at once why there will be no checkpoint of a round; the caller is certain of that.

        Returns:
            Whether they can know now.
        """
        if isinstance(error, RankFailedError) and not (error.seen_here or isinstance(error, StoreLostError)):
            return True
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            await self.board.post(save_round.key("end"), _end_by(error, self.board.rank))
            return True
        return False

    # ------------------------------------------------------------------ the plan

    def invalidate(self) -> None:
        """Have the next save planned anew. Any thread."""
        self.joint.invalidate()

    def known(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* when its structure is the planned one, else None. Any thread, no waiting."""
        return self.joint.known(state)

    def waiting(self, save_round: SaveRound, deadline_s: float | None = None) -> Waiting:
        """Return the `Waiting` of a round: it accompanies the waits for other ranks."""
        return Waiting(
            self.members, save_round.prefix, save_round.call, deadline_s or self._deadline_s, step=save_round.step
        )

    async def announce(self, save_round: SaveRound) -> None:
        """Post that this rank knows what to write."""
        self._decide(save_round)
        await self.joint.announce(self._round(save_round))
        await self.report(save_round.call, save_round.step)

    def _round(self, save_round: SaveRound) -> PlanRound:
        return PlanRound(save_round.prefix, save_round.call, self._plan_s)

    def _decide(self, save_round: SaveRound) -> None:
        """Let the rounds after this one go on: it is clear what this rank writes."""
        self._undecided.pop(save_round, None)
        self._decided.set()
        self._decided = anyio.Event()

    async def _wait_for_earlier_rounds(self, save_round: SaveRound) -> None:
        while (
            save_round in self._undecided and save_round not in list(self._undecided)[:1]
        ):  # a list: other threads add to it
            await self._decided.wait()

    async def plan(self, save_round: SaveRound, state: ShardedState) -> tuple[ShardedState, bool]:
        """Plan *state* with the ranks that do not know what to write either.

        Returns:
            This rank's share, and whether it was planned with others; not, when an earlier round has found it meanwhile.

        Raises:
            RanksDisagreeError: a rank has other options, or the tensors do not fit together.
            RankTimeoutError: names the ranks that did not begin this round.
            RankFailedError: a rank has failed, or has left and never will.
        """
        async with self.watching_failures(save_round):
            await self._wait_for_earlier_rounds(save_round)
            known = self.known(state)
            if known is not None:
                return known, False
            await self.report(save_round.call, save_round.step)
            share = await self.joint.make(self._round(save_round), state, self.waiting(save_round, self._plan_s))
            self._decide(save_round)
            return share, True

    async def attempt_nonce(self, save_round: SaveRound) -> str:
        """Return the 12 hex digits that name the attempt of a round on every rank."""
        if self._secret is None:
            async with self.watching_failures(save_round):  # rank 0 may have failed before it posted the note
                waiting = self.waiting(save_round, self._plan_s)
                self._secret = await self.board.wait(
                    SESSION, str, self._plan_s, f"the first save, at {save_round.call}", lookout=waiting
                )
        elif not self._posted and self.board.rank == 0:
            self._posted = True
            await self.board.post(SESSION, self._secret)
        return _nonce(self._secret, save_round)

    def known_nonce(self, save_round: SaveRound) -> str | None:
        """Return the same where no note must be read or posted for it. Any thread, no waiting."""
        told = self._posted or self.board.rank != 0
        return _nonce(self._secret, save_round) if told and self._secret is not None else None

    # ------------------------------------------------------------------ leaving

    async def leave(self, save_round: SaveRound) -> None:
        """Post that this rank needs no note of a round any more, and remove what no rank needs. Idempotent.

        A rank may be many rounds behind: only the last to leave removes what all of them read.
        """
        if save_round not in self._open:
            return
        del self._open[save_round]
        self._decide(save_round)
        with anyio.move_on_after(self._deadline_s, shield=True), suppress(StoreLostError):
            world_size = self.board.world_size
            if await self.board.arrive(save_round.key("past")) == world_size:
                shared = [*shared_plan_notes(world_size), "entry", "begun", "end", "past"]
                await self.board.forget([*vote_keys(save_round.key("votes"), world_size), *map(save_round.key, shared)])
            self._left.append(save_round)
            await self._forget_own()

    async def _forget_own(self) -> None:
        """Remove this rank's notes of rounds that all ranks have left; one that a rank never leaves delays no other."""
        for _ in range(_LOOKS):
            if not self._left:
                return
            save_round = self._left[0]
            self._left.rotate(-1)  # that of another one is checked next
            if not await self.board.is_there(save_round.key("past")) and save_round in self._left:
                self._left.remove(save_round)  # still there: another round may have been left meanwhile
                await self.board.forget([save_round.key(name, self.board.rank) for name in PLAN_NOTES])

    @contextmanager
    def loading(self, operation: str) -> Iterator[None]:
        """Note that this rank takes part in a load for the length of the block."""
        self._loading.add(operation)
        try:
            yield
        finally:
            self._loading.discard(operation)

    async def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the other ranks that this one makes no more calls, and in what it still takes part; idempotent.

        Args:
            failed: whether others may wait for it; a rank that only read what is there closes without a note.
        """
        if self._departed or not (failed or self.board.name):
            return
        self._departed = True
        part = [*(save_round.prefix for save_round in list(self._open)), *self._loading]
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
            await (self.members.leave(reason, part) if self.board.name else self.members.leave_early(reason))


def _nonce(secret: str, save_round: SaveRound) -> str:
    return xxhash.xxh3_128_hexdigest(f"{secret}/{save_round.step}/{save_round.number}".encode())[:12]


def _end_by(error: BaseException, rank: int) -> End:
    """Return the note of *rank* that there will be no checkpoint, because of *error*."""
    if isinstance(error, StepExistsError):
        return End(rank=rank, failure=str(error), exists=True)
    if isinstance(error, ReplicasDifferError):
        return End(rank=rank, failure=str(error), ranks=error.ranks, tensors=error.tensors[:_TENSORS_TOLD])
    others = error.ranks if isinstance(error, RankError) and not isinstance(error, StoreLostError) else ()
    return End(rank=rank, failure=f"{type(error).__name__}: {error}", ranks=tuple(others))
