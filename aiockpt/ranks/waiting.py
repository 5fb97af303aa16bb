"""Whom does an operation wait for? It says so after a while, and ends as soon as one of them cannot come any more.

One `Waiting` accompanies one operation through all of its waits for other ranks. Guarantees:

- After ten seconds a warning names the ranks waited for and what they did last, and again every minute.
- A wait for a rank that has left, or whose process has ended, ends within a second or so, and names that rank. What the
  rank had written before is found first.
- A save that a rank has passed over, because it saves a later step already, is given up after those ten seconds: threads of
  one program may call in another order than those of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import anyio

from aiockpt.errors import CheckpointError, RankError, RankFailedError, RanksDisagreeError
from aiockpt.ranks.membership import Membership, lost
from aiockpt.runtime.notes import Lookout, StoreLostError, name_ranks

logger = logging.getLogger("aiockpt")

Missing = Callable[[], Awaitable[Iterable[int]]]
"""Asks which ranks are missing."""
WARN_AFTER_S, WARN_AGAIN_S = 10.0, 60.0
FIRST_LOOK_S, LOOK_S = 0.2, 1.0
"""Between two looks at who has left."""


class Waiting:
    """One operation of this rank that other ranks are needed for.

    Args:
        operation: what the keys of its notes begin with.
        call: what it is, in words.
        deadline_s: after which it is given up, for the message.
        step: of a save; else negative.
    """

    def __init__(self, members: Membership, operation: str, call: str, deadline_s: float, *, step: int = -1) -> None:
        self._members = members
        self._operation = operation
        self._call = call
        self._deadline_s = deadline_s
        self._step = step
        self._begun_s = anyio.current_time()
        self._look_at_s = self._begun_s + FIRST_LOOK_S
        self._warn_at_s = self._begun_s + WARN_AFTER_S

    async def look(
        self, ranks: Iterable[int], for_whom: Missing | None = None, *, voting: bool = False
    ) -> RankError | None:
        """Say whom it waits for, when it is time, and return why one of *ranks* will not come; None while all may.

        Whoever gets an error here looks once more for what those ranks had left before.

        Args:
            for_whom: those ranks wait for themselves; None when they are the ones that are late.
            voting: as of `Membership.departure`.
        """
        with suppress(CheckpointError):  # what cannot be known now is no reason to give up: who needs that meets it
            if not await self._is_time():
                return None
            needed = list(ranks)
            await self._members.find_early(needed)
            if self._warns_now:
                await self._warn(needed if for_whom is None else sorted(await for_whom()))
            return self.lost(needed, voting=voting) or await self._passed_over(needed)
        return None

    async def look_for_votes(self, missing: Missing) -> RankError | None:
        """The same for ranks whose votes are wanted; *missing* asks the storage whose, when that is worth it."""
        with suppress(CheckpointError):
            if not await self._is_time() or not (self._members.anyone_gone or self._is_late):
                return None
            needed = sorted(await missing())
            if self._warns_now:
                await self._warn(needed)
            return self.lost(needed, voting=True) or await self._passed_over(needed)
        return None

    async def explain(self, ranks: Sequence[int]) -> str:
        """Return what is known of *ranks*, which did not come in time."""
        try:
            return await self._members.describe(ranks, self._call)
        except StoreLostError as error:
            return str(error)

    @property
    def silent(self) -> Lookout:
        """The same without the warnings, for a wait whose ranks are not known one by one."""
        return _Silent(self)

    async def look_silently(self, ranks: Iterable[int]) -> RankFailedError | None:
        """Do as `look`, and say nothing."""
        with suppress(CheckpointError):
            if await self._is_time():
                needed = list(ranks)
                await self._members.find_early(needed)
                return self.lost(needed)
        return None

    @property
    def _is_late(self) -> bool:
        return anyio.current_time() >= self._begun_s + WARN_AFTER_S

    @property
    def _warns_now(self) -> bool:
        return anyio.current_time() >= self._warn_at_s

    async def _passed_over(self, ranks: Sequence[int]) -> RanksDisagreeError | None:
        if self._step < 0 or not self._is_late:
            return None
        passed = await self._members.find_passed(ranks, self._operation, self._step)
        if not passed:
            return None
        words = "; ".join(f"rank {rank} called {made.last}" for rank, made in passed.items())
        return RanksDisagreeError(
            f"{self._call} is given up: not every rank has called it. {words} without it. Call save on all ranks alike",
            list(passed),
        )

    async def _is_time(self) -> bool:
        now_s = anyio.current_time()
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + LOOK_S
        await self._members.refresh()
        return True

    async def _warn(self, ranks: list[int]) -> None:
        if not ranks:
            return
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
        """Return why one of *ranks* will do nothing more for the operation, as far as is known; None while all may.

        Args:
            voting: as of `Membership.departure`.
        """
        found = [self._members.departure(rank, self._operation, voting=voting) for rank in ranks]
        departures = [departure for departure in found if departure is not None]
        return lost(self._call, departures) if departures else None


class _Silent:
    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    async def look(self, ranks: Iterable[int]) -> RankFailedError | None:
        return await self._waiting.look_silently(ranks)

    async def explain(self, ranks: Sequence[int]) -> str:
        return await self._waiting.explain(ranks)
