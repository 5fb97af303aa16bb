"""Rounds of saves: the ranks of a job number their saves alike, and report how each one ends.

Every save has a *round*: its step, and which save of that step it is. Ranks that make the same calls of ``save`` use the
same round, and report on a save by notes of its round (`aiockpt.runtime.notes`). Guarantees:

- A save that one rank omits, or begins after the others have abandoned it, is lost; the next step that all save is not.
- Rounds are planned in the order of the calls (`aiockpt.ranks.joint_plan`): one that begins while an earlier one is being
  planned waits for the result.
- The votes decide, whatever was planned: parts that overlap or leave a gap are no checkpoint (`aiockpt.format.merge`),
  and after such a save every rank plans anew. A rank that begins the next save before it has received the failure keeps
  its parts; then the ranks that have received the failure keep theirs, too.
- The name of an attempt follows from its round and a secret of rank 0. The secret is shared once: later saves do not wait.
- A rank that leaves posts that, and the operations it still takes part in: the others do not wait for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
import msgspec
import xxhash

from aiockpt.engine.job import WARM_UP, RoundName
from aiockpt.errors import BadStepError, RankError, RankFailedError, ReplicasDifferError, StepExistsError
from aiockpt.ranks.gathering import vote_keys
from aiockpt.ranks.joint_plan import PLAN_NOTES, SHARED_PLAN_NOTES, JointPlan
from aiockpt.ranks.membership import CallNote, Membership, Missing, Waiting
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.notes import Lookout, NoteBoard, StoreLostError
from aiockpt.state.shards import ShardedState

SESSION = "session"
TELL_DEADLINE_S = 10.0
"""For posting that this rank leaves."""
_TENSORS_TOLD = 1000
_REMOVALS = 4
"""Earlier rounds whose notes a rank tries to remove when it leaves one; other ranks may still be in them."""


class End(msgspec.Struct, frozen=True):
    """The last note of a round: the generation that was committed, or why none was.

    Attributes:
        rank: the author.
        ranks: at fault, where the cause is on other ranks.
        exists: whether no rank failed, but the step exists and ``on_exists="raise"`` refuses it on every rank.
        tensors: those whose replicas differ; then *ranks* are the ranks that differ.
        is_bad: whether no rank failed, but the step is bad, and the run is set back.
    """

    generation: int = 0
    rank: int = 0
    failure: str | None = None
    ranks: tuple[int, ...] = ()
    exists: bool = False
    tensors: tuple[str, ...] = ()
    is_bad: bool = False


class Rounds:
    """All rounds of one rank. Its coroutines run on the engine's loop.

    Args:
        board: where the ranks' notes are.
        deadline_s: for the other ranks.
        plan_s: for the joint plan, at most *deadline_s*; None for *deadline_s*.
        secret: random hex; that of rank 0 is used.
        writes: whether this process writes what it saves; see `aiockpt.ranks.membership.Member`.
        terms: options that all ranks must share, by name, in words.
    """

    def __init__(
        self,
        board: NoteBoard,
        deadline_s: float,
        secret: str,
        *,
        plan_s: float | None = None,
        writes: bool = True,
        terms: Mapping[str, str] = {},
    ) -> None:
        self.board = board
        self.members = Membership(board, writes=writes)
        self.deadline_s = deadline_s
        self.plan_s = deadline_s if plan_s is None else min(plan_s, deadline_s)
        self.joint = JointPlan(board, self.plan_s, terms)
        self._secret: str | None = secret if board.rank == 0 else None
        self._posted = False
        self._saves: Counter[int] = Counter()
        self._loads = 0
        self._open: dict[RoundNotes, None] = {}
        self._loading: set[str] = set()
        self._undecided: dict[RoundNotes, None] = {}
        self._decided = anyio.Event()
        self._departed = self._has_ended_one = False
        self._left: deque[RoundName] = deque()

    def begin(self, step: int) -> RoundNotes:
        """Return the round of the save that the caller begins. Call it once for each save, in the order of the calls."""
        self.board.begin()
        self._saves[step] += 1
        begun = RoundNotes(self, RoundName(step, self._saves[step]))
        self._open[begun] = self._undecided[begun] = None
        return begun

    def begin_load(self) -> int:
        """Return the number of the load that the caller begins, in the order of the calls."""
        self.board.begin()
        self._loads += 1
        return self._loads

    @property
    def outlives_store(self) -> bool:
        """Whether saves go on here when the store of the notes is lost, as those of a writer process do."""
        return self.board.relayed

    def surviving_store(self) -> suppress:
        """End the block without an error when the store is lost, if saves go on here; elsewhere the error is raised."""
        return suppress(*((StoreLostError,) if self.outlives_store else ()))

    async def register(self) -> None:
        """Post the process of this rank: ranks on the same host can then detect its end."""
        with suppress(StoreLostError):
            await self.members.register()

    async def admit(self) -> None:
        """On rank 0, admit the others to the incarnation until all are there and the first call of all is over."""
        with suppress(StoreLostError):
            await self.board.admit(lambda: self._has_ended_one)

    async def enter(self, what: str, deadline_s: float, waiting: Waiting) -> None:
        """Wait until the incarnation of the ranks is known, for *what*; see `NoteBoard.enter`."""
        if not self.board.entered:
            await self.members.introduce(self.board.place)
            await self.board.enter(deadline_s, what, waiting)

    async def report(self, call: str, step: int = WARM_UP) -> None:
        """Post the last call of this rank, and the *step* of a save. A lost store is ignored: the note only informs."""
        with suppress(StoreLostError):
            await self.members.report(CallNote(call, step, self._loads, self._saves[WARM_UP]))

    # ------------------------------------------------------------------ the order of the plans

    def decide(self, save_round: RoundNotes) -> None:
        """Unblock the rounds after this one: what this rank writes in it is known."""
        self._undecided.pop(save_round, None)
        self._decided.set()
        self._decided = anyio.Event()

    async def wait_for_earlier(self, save_round: RoundNotes) -> None:
        """Wait until it is known what this rank writes in the rounds before this one."""
        while save_round in self._undecided and save_round not in list(self._undecided)[:1]:
            await self._decided.wait()  # the list above is a copy: other threads add to it

    async def secret_for(self, save_round: RoundNotes) -> str:
        """Return rank 0's secret, from which the names of all attempts follow; rank 0 posts it once."""
        if self._secret is None:
            async with save_round.watching_failures():  # rank 0 may have failed before it posted the note
                what, waiting = f"the first save, at {save_round.name.call}", save_round.waiting(self.plan_s)
                self._secret = await self.board.wait(SESSION, str, self.plan_s, what, lookout=waiting)
        elif not self._posted and self.board.rank == 0:
            self._posted = True
            await self.board.post(SESSION, self._secret)
        return self._secret

    @property
    def known_secret(self) -> str | None:
        """The secret if no note must be read or posted for it, else None. Any thread, no waiting."""
        return self._secret if self._posted or self.board.rank != 0 else None

    # ------------------------------------------------------------------ leaving

    async def release(self, save_round: RoundNotes) -> None:
        """See `RoundNotes.release`. A rank may be many rounds behind: the last one removes what all of them read."""
        if save_round not in self._open:
            return
        del self._open[save_round]
        self._has_ended_one = True
        # A round that ended before its plan must not block those after it.
        self.decide(save_round)
        name, world_size = save_round.name, self.board.world_size
        with anyio.move_on_after(self.deadline_s, shield=True), suppress(StoreLostError):
            if await self.board.arrive(name.key("past")) == world_size:
                shared = [*SHARED_PLAN_NOTES, "entry", "begun", "end", "past"]
                await self.board.delete([*vote_keys(name.key("votes"), world_size), *map(name.key, shared)])
            self._left.append(name)
            await self._remove_own()

    async def _remove_own(self) -> None:
        """Remove this rank's notes of rounds that all ranks have left; one that a rank never leaves delays no other."""
        for _ in range(_REMOVALS):
            if not self._left:
                return
            name = self._left[0]
            self._left.rotate(-1)  # that of another one is checked next
            if not await self.board.is_there(name.key("past")) and name in self._left:
                self._left.remove(name)  # still there: another round may have been left meanwhile
                await self.board.delete([name.key(note, self.board.rank) for note in PLAN_NOTES])

    @contextmanager
    def loading(self, operation: str) -> Iterator[None]:
        """Note that this rank takes part in a load for the length of the block."""
        self._loading.add(operation)
        try:
            yield
        finally:
            self._loading.discard(operation)
            self._has_ended_one = True

    async def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the other ranks that this one makes no more calls, and of what it still takes part in; idempotent.

        Args:
            failed: whether others may wait for it. Without a failure, a rank that made no joint call posts no note.
        """
        if self._departed or not (failed or (self.board.begun and self.board.entered)):
            return
        self._departed = True
        part = [*(save_round.name.prefix for save_round in list(self._open)), *self._loading]
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
            await (
                self.members.leave_group(reason, part) if self.board.begun else self.members.leave_group_early(reason)
            )


class RoundNotes:
    """The notes of one save or ``warm_up`` of all ranks. Use on the engine's loop, except where stated otherwise.

    Attributes:
        planned: whether this rank has planned it with others, or another process of this rank posts that plan.
        begun: whether the save has begun; from then on it reports its failures itself.
    """

    def __init__(self, rounds: Rounds, name: RoundName, *, planned: bool = False) -> None:
        self.rounds, self.board, self.name = rounds, rounds.board, name
        self.key = name.key
        self.planned = planned
        self.begun = False

    def waiting(self, deadline_s: float | None = None, for_whom: Missing | None = None) -> Waiting:
        """Return the `Waiting` of this round; *for_whom* as there."""
        name, deadline_s = self.name, deadline_s or self.rounds.deadline_s
        return Waiting(self.rounds.members, name.prefix, name.call, deadline_s, step=name.step, for_whom=for_whom)

    # ------------------------------------------------------------------ the plan

    def known(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* when its structure is the planned one, else None. Any thread, no waiting."""
        return self.rounds.joint.known(state)

    async def plan(self, state: ShardedState) -> ShardedState:
        """Return this rank's share of *state*, planned with the other ranks that have no plan for it.

        Raises:
            RanksDisagreeError: a rank has other options, or the tensors do not fit together.
            RankTimeoutError: names the ranks that did not begin this round.
            RankFailedError: a rank has failed, or has left before it began this round.
        """
        waiting, plan_s = self.waiting(self.rounds.plan_s), self.rounds.plan_s
        await self.rounds.enter(f"{self.name.call} (every rank must call it)", plan_s, waiting)
        async with self.watching_failures():
            await self.rounds.wait_for_earlier(self)
            known = self.known(state)  # an earlier round may have found it meanwhile
            if known is not None:
                return known
            await self.rounds.report(self.name.call, self.name.step)
            share = await self.rounds.joint.make(self.name, state, waiting)
            self.rounds.decide(self)
            self.planned = True
            return share

    async def announce(self) -> None:
        """Post that this rank knows what to write, unless it has planned that with the others."""
        if not self.planned:
            self.rounds.decide(self)
            await self.rounds.joint.announce(self.name)
            await self.rounds.report(self.name.call, self.name.step)

    async def attempt_nonce(self) -> str:
        """Return the 12 hex digits that name the attempt of a round on every rank."""
        return _nonce(await self.rounds.secret_for(self), self.name)

    @property
    def known_nonce(self) -> str | None:
        """The nonce if no note must be read or posted for it, else None. Any thread, no waiting."""
        secret = self.rounds.known_secret
        return None if secret is None else _nonce(secret, self.name)

    # ------------------------------------------------------------------ the end

    async def read_end(self, deadline_s: float, lookout: Lookout | None = None) -> int:
        """Wait for the end; return the generation that was committed.

        Raises:
            RankFailedError: a rank reported that it failed, or *lookout* that rank 0 will not answer any more.
            StepExistsError: rank 0 found the step committed.
            BadStepError: a rank found the step bad.
            ReplicasDifferError: ranks have different values of the same tensors.
            RankTimeoutError: the end was not posted in time.
        """
        step = self.name.step
        end = await self.board.wait(self.key("end"), End, deadline_s, f"the commit of step {step}", lookout=lookout)
        if end.failure is None:
            return end.generation
        if end.exists:
            raise StepExistsError(end.failure)
        if end.is_bad:
            raise BadStepError(end.failure)
        if end.tensors:
            raise ReplicasDifferError(end.failure, end.tensors, end.ranks)
        what = "warm_up() was" if step == WARM_UP else f"step {step} was"
        if end.ranks:
            raise RankFailedError(f"{what} given up on rank {end.rank}: {end.failure}", end.ranks)
        raise RankFailedError(f"{what} given up because rank {end.rank} failed: {end.failure}", [end.rank])

    @asynccontextmanager
    async def watching_failures(self) -> AsyncIterator[None]:
        """Stop the block, and raise, as soon as another rank reports that it failed."""

        async def watch() -> None:
            with suppress(StoreLostError):  # the block raises it when it needs the store
                await self.read_end(float("inf"))

        async with open_tasks() as tasks:
            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()

    async def post_committed(self, generation: int) -> None:
        """Wake the ranks that wait for the commit, which is valid without this note."""
        with suppress(StoreLostError):
            await self.board.post(self.key("end"), End(generation=generation))

    async def post_failure(self, error: BaseException) -> bool:
        """Report to the other ranks at once why there will be no checkpoint. Call it only when that is certain.

        Returns:
            Whether a report has been posted, by this rank or another.
        """
        if isinstance(error, RankFailedError) and not (error.seen_here or isinstance(error, StoreLostError)):
            return True
        with anyio.move_on_after(self.rounds.deadline_s, shield=True), suppress(StoreLostError):
            await self.board.post(self.key("end"), _end_by(error, self.board.rank))
            return True
        return False

    async def abort(self, error: BaseException) -> None:
        """Report that this rank takes no part, and have the next save planned anew."""
        self.rounds.joint.invalidate()
        await self.post_failure(error)
        await self.release()

    async def release(self) -> None:
        """Post that this rank no longer needs the round's notes, and remove those that no rank needs. Idempotent."""
        await self.rounds.release(self)


def _nonce(secret: str, name: RoundName) -> str:
    return xxhash.xxh3_128_hexdigest(f"{secret}/{name.step}/{name.number}".encode())[:12]


def _end_by(error: BaseException, rank: int) -> End:
    """Return the note of *rank* that there will be no checkpoint, because of *error*."""
    if isinstance(error, StepExistsError):
        return End(rank=rank, failure=str(error), exists=True)
    if isinstance(error, BadStepError):
        return End(rank=rank, failure=str(error), is_bad=True)
    if isinstance(error, ReplicasDifferError):
        return End(rank=rank, failure=str(error), ranks=error.ranks, tensors=error.tensors[:_TENSORS_TOLD])
    others = error.ranks if isinstance(error, RankError) and not isinstance(error, StoreLostError) else ()
    return End(rank=rank, failure=f"{type(error).__name__}: {error}", ranks=tuple(others))
