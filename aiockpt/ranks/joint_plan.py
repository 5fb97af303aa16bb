"""Plan of what this rank writes of a state that all ranks save together.

Ranks exchange the boxes of their local shards once for each structure (`aiockpt.planning.spread`). Guarantees:

- A later save of the same structure needs no exchange: a rank writes what it wrote last time.
- A rank whose structure changed waits for a note of every rank. When all changed, everything is planned anew; when only
  some did, these plan among themselves what is new and keep the rest, and the others never wait.
- If options that must be equal differ, every rank raises an error that names them, before anything is planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec

from aiockpt.adapters.take_parts import take_parts
from aiockpt.engine.job import RoundName
from aiockpt.errors import RankError, RanksDisagreeError, RankTimeoutError
from aiockpt.planning.spread import LocalBoxes, Part, local_boxes_of, plan_shares
from aiockpt.ranks.membership import Waiting
from aiockpt.runtime.notes import NoteBoard, name_ranks
from aiockpt.state.shards import ShardedState, TensorShard, are_same

_SMALL_WORLD = 16
"""Up to this world size each rank reads all notes itself, and names missing ranks, after `_PATIENCE_S` without a survey."""
_PATIENCE_S = 1.0
"""In a large world: for naming the missing ranks, after the survey has failed to arrive by the deadline."""


class Intent(msgspec.Struct, frozen=True):
    """The note of a rank that begins a save: whether it must receive a plan.

    Attributes:
        terms: options that all ranks must share, by name; only where it must receive a plan.
    """

    lost: bool
    terms: dict[str, str] = {}


class Share(msgspec.Struct, frozen=True):
    """The planner's note for a rank: the parts it writes and the replicas it has, or why nothing can be planned."""

    parts: tuple[Part, ...] = ()
    replicas: tuple[int, ...] = ()
    problem: str | None = None


class _Plan(msgspec.Struct, frozen=True):
    """What this rank writes of one structure; *replicas*: the numbers of the holdings that other ranks have, too."""

    structure: str
    holdings: tuple[LocalBoxes, ...]
    parts: tuple[Part, ...]
    label: str
    replicas: tuple[int, ...]


_Taken = tuple[tuple[TensorShard, ...], tuple[TensorShard, ...]]
"""What a rank writes, and its replicas."""


class JointPlan:
    """One rank's plan of what it writes. Its coroutines run on the engine's loop.

    Args:
        deadline_s: for the other ranks to come to a plan.
        terms: options that all ranks must share, by name, in words.
    """

    def __init__(self, board: NoteBoard, deadline_s: float, terms: Mapping[str, str]) -> None:
        self._board, self._deadline_s, self._terms = board, deadline_s, terms
        self._plan: _Plan | None = None
        self._doubted = False
        self._taken: tuple[_Plan, Sequence[TensorShard], _Taken] | None = None

    def invalidate(self) -> None:
        """Have the next save planned anew. Any thread."""
        # The plan stays: where other ranks keep theirs, the next planning keeps the parts of this one, too.
        self._doubted = True

    def known(self, state: ShardedState) -> ShardedState | None:
        """Return this rank's share of *state* when its structure is the planned one, else None. Any thread, no waiting."""
        plan = self._plan
        if plan is None or self._doubted or plan.structure != state.structure:
            return None
        return self._adopt(plan, state)

    async def announce(self, name: RoundName) -> None:
        """Post that this rank knows what to write."""
        await self._board.post(name.key("intent", self._board.rank), Intent(lost=False))

    async def make(self, name: RoundName, state: ShardedState, waiting: Waiting) -> ShardedState:
        """Plan *state* with the other ranks that have no plan for it; return this rank's share.

        Raises:
            RanksDisagreeError: the ranks differ in options, or the tensors do not fit together.
            RankTimeoutError: names the ranks that did not call this save.
        """
        board, rank = self._board, self._board.rank
        holdings = local_boxes_of(state)
        await board.post(name.key("holdings", rank), holdings)
        await board.post(name.key("intent", rank), Intent(lost=True, terms=dict(self._terms)))
        lost = await self._lost_ranks(name, waiting)
        kept = self._kept_parts(holdings) if len(lost) < board.world_size else {}
        if len(lost) < board.world_size:
            await board.post(name.key("kept", rank), sorted(kept))
        if rank == lost[0]:
            await self._plan_for(name, lost, waiting)
        share = await board.wait(
            name.key("share", rank), Share, self._deadline_s, f"planning {name.call}", lost[:1], waiting
        )
        if share.problem is not None:
            raise RanksDisagreeError(share.problem)
        parts = (*(part for some in kept.values() for part in some), *share.parts)
        replicas = share.replicas if len(lost) == board.world_size else self._maybe_replicas(holdings, kept)
        plan = _Plan(state.structure, holdings, parts, f"{state.structure}/{name.prefix}", replicas)
        self._plan, self._doubted = plan, False
        return self._adopt(plan, state)

    async def _lost_ranks(self, name: RoundName, waiting: Waiting) -> list[int]:
        """Wait for the notes of all ranks; return the ranks that must receive a plan."""
        intents = await self._survey(name, waiting)
        lost = sorted(rank for rank, intent in intents.items() if intent.lost)
        self._check_terms({rank: intents[rank].terms for rank in lost})
        return lost

    def _check_terms(self, terms: Mapping[int, Mapping[str, str]]) -> None:
        """Raise RanksDisagreeError if an option differs, naming it and the ranks; every rank raises the same error."""
        first, *others = terms
        for term, value in terms[first].items():
            odd = [rank for rank in others if terms[rank].get(term) != value]
            if odd:
                raise RanksDisagreeError(
                    f"{term} is {value} on rank {first} and {terms[odd[0]].get(term)} on {name_ranks(odd)}: make the "
                    "Checkpointer with the same options on all ranks",
                    odd,
                )

    async def _survey(self, name: RoundName, waiting: Waiting) -> dict[int, Intent]:
        """Return the notes of all ranks. The first rank to call reads them, and the others read its result.

        (If each of 10,000 read 10,000 notes, the store would need a quarter of an hour: `benchmarks.measure.gathering`.)
        """
        board, what = self._board, f"{name.call} (every rank must call it)"
        keys = {rank: name.key("intent", rank) for rank in range(board.world_size)}
        if await board.arrive(name.key("surveyors")) > 1:
            small = board.world_size <= _SMALL_WORLD
            with suppress(RankTimeoutError):
                found = await board.wait(
                    name.key("survey"),
                    list[tuple[Intent, int]],
                    min(_PATIENCE_S, self._deadline_s) if small else self._deadline_s,
                    what,
                    range(board.world_size),
                    waiting.silent,
                )
                return dict(enumerate(intent for intent, count in found for _ in range(count)))
            # In a large world the rank that reads for all is dead, or times out just now: name the other missing ranks.
            left_s = self._deadline_s if small else min(_PATIENCE_S, self._deadline_s)
            return await board.gather(keys, Intent, left_s, what, waiting)
        intents = await board.gather(keys, Intent, self._deadline_s, what, waiting)
        runs = groupby(intents[rank] for rank in range(board.world_size))
        await board.post(name.key("survey"), [(intent, len(list(some))) for intent, some in runs])
        return intents

    def _kept_parts(self, holdings: Sequence[LocalBoxes]) -> dict[int, list[Part]]:
        """Return, by number of the holding, the parts of unchanged tensors that this rank goes on writing."""
        if self._plan is None:
            return {}
        numbers = {holding: number for number, holding in enumerate(holdings)}
        kept: dict[int, list[Part]] = {numbers[holding]: [] for holding in self._plan.holdings if holding in numbers}
        for part in self._plan.parts:
            number = numbers.get(self._plan.holdings[part.holding])
            if number is not None:
                kept[number].append(msgspec.structs.replace(part, holding=number))
        return kept

    def _maybe_replicas(self, holdings: Sequence[LocalBoxes], kept: Mapping[int, object]) -> tuple[int, ...]:
        """Return the numbers of the holdings that other ranks may have, too, when only some ranks have planned.

        A kept one is a replica if it was one before. A new one was not compared with all ranks, and counts as a replica.
        """
        assert self._plan is not None
        before = {self._plan.holdings[number] for number in self._plan.replicas}
        return tuple(number for number, one in enumerate(holdings) if number not in kept or one in before)

    async def _plan_for(self, name: RoundName, lost: Sequence[int], waiting: Waiting) -> None:
        """Plan what the *lost* ranks do not keep, and post each one's share."""
        board, what = self._board, f"what they hold for {name.call}"
        held = await board.gather(
            {rank: name.key("holdings", rank) for rank in lost}, tuple[LocalBoxes, ...], self._deadline_s, what, waiting
        )
        some_keep = {rank: name.key("kept", rank) for rank in lost} if len(lost) < board.world_size else {}
        kept = await board.gather(some_keep, list[int], self._deadline_s, what, waiting)
        new = [sorted({*range(len(held[rank]))}.difference(kept.get(rank, ()))) for rank in lost]
        own = [[held[rank][number] for number in some] for rank, some in zip(lost, new, strict=True)]
        try:
            shares = plan_shares(own)
        except RankError as error:
            for rank in lost:
                await board.post(name.key("share", rank), Share(problem=str(error)))
            return
        for rank, numbers, parts, replicas in zip(lost, new, shares.parts, shares.replicas, strict=True):
            if kept:
                parts = tuple(msgspec.structs.replace(part, holding=numbers[part.holding]) for part in parts)
            await board.post(name.key("share", rank), Share(parts, tuple(numbers[number] for number in replicas)))

    def _adopt(self, plan: _Plan, state: ShardedState) -> ShardedState:
        """Return the state with only the parts that this rank writes; the same shards while the tensors are the same."""
        taken = self._taken
        if taken is None or taken[0] is not plan or not are_same(taken[1], state.tensors):
            replicas = tuple(state.tensors[number] for number in plan.replicas)
            taken = self._taken = (plan, state.tensors, (tuple(take_parts(state.tensors, plan.parts)), replicas))
        tensors, replicas = taken[2]
        return msgspec.structs.replace(state, tensors=tensors, structure=plan.label, replicas=replicas)


PLAN_NOTES = ("intent", "holdings", "kept", "share")
"""The notes that each rank posts under a key of its own while it plans."""
SHARED_PLAN_NOTES = ("surveyors", "survey")
"""The notes that all ranks share while they plan."""
