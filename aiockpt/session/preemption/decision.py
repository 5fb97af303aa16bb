"""Agreement on the call in which all ranks end: they stop at their next one, and rank 0 picks the first not yet passed.

They use notes in the job's store (`aiockpt.runtime.notes`) and no process group. The loop thread of a rank
writes its notes, whatever its main thread is doing. Guarantees:

- All ranks end in the same call, or each by itself, because another rank did not answer in time.
- A rank waits in a call only until the loop threads of all have answered: never for the training of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import anyio
import msgspec

from aiockpt.errors import RankError
from aiockpt.runtime.notes import NoteBoard

POLL_S, POLL_OF_A_RANK_S = 0.2, 0.001
"""Seconds between two polls for a notice, through the whole run: the more ranks, the more rarely each polls."""
GOODBYE_S = 5.0
"""For the other ranks to read how it ended, before rank 0 ends, and the store with it."""


class Notice(msgspec.Struct, frozen=True):
    """A request to end the run: *reason* names its source, *left_s* is how many seconds were left when it was made."""

    reason: str
    left_s: float


class EndDecision(msgspec.Struct, frozen=True):
    """How a run ends.

    Attributes:
        call: the number of the call of ``step`` or ``save`` in which it does.
        saves: whether the state is saved there; None: the call decides.
        failure: why the ranks could not agree: each ends in its next call, without a save.
    """

    call: int
    saves: bool | None = None
    failure: str = ""


class Reading(msgspec.Struct, frozen=True):
    """The outcome of reading the last step back."""

    found: Literal["good", "damaged", "unread"] = "unread"


class EndAgreement(Protocol):
    """How the processes that save together end together.

    Attributes:
        leads: whether this process decides.
    """

    @property
    def leads(self) -> bool: ...

    def begin(self) -> bool:
        """Join the others in the first call that all make; return whether this was that call. On the training thread."""
        ...

    async def receive(self) -> Notice:
        """Wait for the notice of another rank that must end."""
        ...

    async def notify(self, notice: Notice) -> None:
        """Notify the other ranks."""

    async def agree(self, calls: int, wants_new: Callable[[], bool], deadline_s: float) -> EndDecision:
        """Return how all end.

        Args:
            calls: that have passed here; the next one waits for the decision.
            wants_new: returns whether the state is to be saved once more.

        Raises:
            RankError: a rank has not answered within *deadline_s* seconds.
        """
        ...

    async def share_reading(self, reading: Reading | None, deadline_s: float) -> Reading:
        """Return the outcome of reading the last step back, which rank 0 has done."""
        ...


class EndsAlone:
    """A process that ends by itself, in its next call: there are no other ranks to notify or to wait for."""

    leads = True

    def begin(self) -> bool:
        return False

    async def receive(self) -> Notice:
        await anyio.sleep_forever()
        raise AssertionError("for ever is over")

    async def notify(self, notice: Notice) -> None: ...

    async def agree(self, calls: int, wants_new: Callable[[], bool], deadline_s: float) -> EndDecision:
        return EndDecision(calls + 1)  # that call decides whether to save: it may come late

    async def share_reading(self, reading: Reading | None, deadline_s: float) -> Reading:
        return reading or Reading()


class EndsWithRanks:
    """One of several ranks.

    Args:
        board: of its own; it is not named before `begin`.
    """

    def __init__(self, board: NoteBoard) -> None:
        self._board = board
        self.leads = board.rank == 0
        self._begun = False
        self._pause_s = max(POLL_S, POLL_OF_A_RANK_S * board.world_size)

    def begin(self) -> bool:
        """Adopt the name that these notes have on all ranks, once."""
        if self._begun:
            return False
        self._begun = True
        self._board.begin()
        return True

    async def receive(self) -> Notice:
        """Poll for the notice that any rank must end."""
        while True:
            if self._board.begun:
                notice = await self._board.find("notice", Notice)
                if notice is not None:
                    return notice
            await anyio.sleep(self._pause_s)

    async def notify(self, notice: Notice) -> None:
        """Post the notice; one of another rank has the same effect."""
        await self._board.post("notice", notice)

    async def agree(self, calls: int, wants_new: Callable[[], bool], deadline_s: float) -> EndDecision:
        """Post the number of calls of this rank; return rank 0's decision."""
        board = self._board
        await board.post(f"at/{board.rank}", calls)
        if not self.leads:
            # Longer than rank 0, which posts a decision also when its own deadline has passed.
            return await board.wait("decision", EndDecision, deadline_s + GOODBYE_S, "in which call to end")
        keys = {rank: f"at/{rank}" for rank in range(board.world_size)}
        try:
            positions = await board.gather(keys, int, deadline_s, "how far the ranks are")
            decision = EndDecision(max(positions.values()) + 1, wants_new())
        except RankError as error:
            decision = EndDecision(0, failure=str(error))
        await board.post("decision", decision)
        return decision

    async def share_reading(self, reading: Reading | None, deadline_s: float) -> Reading:
        """Post rank 0's *reading*, or wait for it; rank 0 returns when all have read it, or after `GOODBYE_S`."""
        board = self._board
        try:
            if reading is None:
                reading = await board.wait("reading", Reading, deadline_s, "what was read back")
                await board.arrive("gone")
            else:
                await board.post("reading", reading)
                await board.arrive("gone")
                await board.wait_all_arrived("gone", GOODBYE_S)
        except RankError:  # rank 0 has gone, or knows of others that have
            return reading or Reading()
        return reading
