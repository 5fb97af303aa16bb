"""How does a save get from the caller's thread onto the loop? Walked, planned, registered, copied; few at a time.

Guarantees:

- A save that must wait for another one to end, or for other ranks, never holds an event loop: it waits on a worker, and
  the optimizers wait for it at the barrier.
- After the first snapshot of a state the staging pool holds all of it, so that later ones are one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from aiockpt.adapters.mutable import hold_still
from aiockpt.adapters.native import StateWalker
from aiockpt.engine.sharing import Turn
from aiockpt.engine.ticket import Ticket
from aiockpt.engine.tiers import Tiers
from aiockpt.errors import SaveSkippedError, UsageError
from aiockpt.events import SaveSkipped
from aiockpt.options import MIB
from aiockpt.runtime.barrier import MutationBarrier
from aiockpt.runtime.future import SaveFuture
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.loop import runs_event_loop
from aiockpt.runtime.memory import available_bytes
from aiockpt.runtime.tasks import open_tasks
from aiockpt.state.shards import ShardedState

INLINE_COPY_BYTES = 16 * MIB
"""Inside a running event loop a larger state is copied on a worker: 16 MiB is about a millisecond."""


class Launcher:
    """Starts the saves of one checkpointer and knows which are in flight."""

    def __init__(self, tiers: Tiers, barrier: MutationBarrier) -> None:
        self._tiers = tiers
        self._engine = engine = tiers.engines[0]
        self._barrier = barrier
        self._walker = StateWalker(rank=engine.ranks.rank)
        self._saves: list[SaveFuture] = []

    @property
    def in_flight(self) -> Sequence[SaveFuture]:
        """The saves that have not ended."""
        return [future for future in self._saves if not future.done()]

    def launch(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float | torch.Tensor], user: object
    ) -> SaveFuture:
        """Start a save, or skip it where the policy says so. Raises as `aiockpt.Checkpointer.save`."""
        turn = self._engine.next_turn(step)
        try:
            check_step(step)
            if not self._tiers.takes(step):
                return self._skip(step, turn, "no tier takes it (Tier(every=…))")
            if self._engine.options.when_full == "skip" and self._is_full():
                return self._skip(step, turn, f"{len(self._saves)} saves are in flight and when_full is 'skip'")
            return self._start(step, state, _plain_metrics(metrics), _plain_json(user), turn)
        except BaseException as error:
            self._engine.renounce(turn, error)
            raise

    def _start(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], user: object, turn: Turn | None
    ) -> SaveFuture:
        """Register the save, and copy the state: here, or on a worker where that would hold an event loop."""
        walked = self._walker.walk(state)
        before = self._must_end_first()
        waits = before is not None or turn is not None
        elsewhere = runs_event_loop() and (waits or _tensor_bytes(walked) > INLINE_COPY_BYTES)
        if elsewhere:
            walked = hold_still(walked, state)
        ticket = Ticket(self._engine, step, walked, metrics, user, turn)
        self._tiers.prepare(ticket.future)
        if elsewhere:
            self._saves.append(ticket.future)
            self._barrier.guard(ticket.future.snapshotted(), ticket.stop)
            self._engine.loop.in_worker(self._copy_elsewhere, before, ticket)
        else:
            self._copy_after(before, ticket)
        return ticket.future

    def _copy_elsewhere(self, before: SaveFuture | None, ticket: Ticket) -> None:
        try:
            self._copy_after(before, ticket)
        except Exception as error:  # noqa: BLE001  the future carries it to the caller
            self._engine.renounce(ticket.turn, error)
            ticket.refuse(error)

    def _copy_after(self, before: SaveFuture | None, ticket: Ticket) -> None:
        """Wait for the save that must end first, plan and start this one, and copy its state on this thread."""
        if before is not None:
            before._wait_anyway(self._engine.options.deadlines.close_s)
        ticket.prepare()
        self._engine.pool.fit(ticket.plan.window_count, available_bytes)
        if ticket.future not in self._saves:
            self._saves.append(ticket.future)
        self._engine.loop.submit(self._run, ticket)
        ticket.copy()

    async def _run(self, ticket: Ticket) -> None:
        async with open_tasks() as tasks:
            tasks.start_soon(self._fill_pool, ticket)
            result = await ticket.run(self._tiers.save)
            if result is not None and not result.existed and self._engine.ranks.rank == 0:
                await self._tiers.tidy(result)

    async def _fill_pool(self, ticket: Ticket) -> None:
        """Make the slabs that the next snapshot of this state will need.

        A first copy into untouched memory is so slow that writers give slabs back before new ones are made: it ends with
        a handful, and without this every later save would pay for some more (measured: 5 × a plain copy, not 1.2 ×).
        """
        await ticket.future.snapshotted()._settled()
        await run_blocking(self._engine.state_work, self._engine.pool.warm_up, ticket.plan.window_count)

    def _is_full(self) -> bool:
        self._saves = list(self.in_flight)
        return len(self._saves) >= self._engine.options.max_in_flight

    def _must_end_first(self) -> SaveFuture | None:
        """Return the save that must end before a new one may begin, so that at most ``max_in_flight`` run."""
        return self._saves[-self._engine.options.max_in_flight] if self._is_full() else None

    def _skip(self, step: int, turn: Turn | None, reason: str) -> SaveFuture:
        future = SaveFuture(step)
        skipped = SaveSkippedError(f"step {step} was not saved: {reason}")
        self._engine.renounce(turn, skipped)
        future._fail(skipped)
        event = SaveSkipped(at_ns=self._engine.now_ns(), step=step, reason=reason)
        self._engine.loop.call_soon(self._engine.emit, event)
        return future

    def walk(self, state: Mapping[str, Any]) -> ShardedState:
        """Return what *state* holds; on the caller's thread."""
        return self._walker.walk(state)

    def warm_up(self, walked: ShardedState, turn: Turn | None) -> None:
        """Plan, and allocate the pool. Runs on a worker: other ranks may come later."""
        try:
            share, _ = self._engine.share(turn, walked)
        except BaseException as error:
            self._engine.renounce(turn, error)
            raise
        self._engine.leave(turn)
        plan, pool = self._engine.plan(share), self._engine.pool
        pool.fit(plan.window_count, available_bytes)
        pool.warm_up(plan.window_count)

    def forget(self) -> None:
        """Let go of the last state."""
        self._walker.forget()


def check_step(step: object) -> int:
    """Return *step* when it numbers one; raise UsageError else, without printing a state in its place."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        given = repr(step) if isinstance(step, int | float | str) else f"a {type(step).__name__}"
        raise UsageError(f"step={given}: give an int of 0 or more")
    return step


def _tensor_bytes(walked: ShardedState) -> int:
    return sum(shard.nbytes for shard in walked.tensors)


def _plain_metrics(metrics: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    try:
        return {str(name): _plain_number(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"metrics must be a dict of names to numbers: {error}") from error


def _plain_number(value: float | torch.Tensor) -> float:
    """Return a metric as a number; of a loss that was not detached torch would warn."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _plain_json(user: object) -> object:
    try:
        return msgspec.json.decode(msgspec.json.encode(user))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"user={type(user)}: give what JSON can hold ({error})") from error
