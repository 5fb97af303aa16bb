"""The end of all ranks in the same call (`aiockpt.session.agreed_call`), and of a process by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import anyio
import msgspec

from aiockpt.errors import RankError
from aiockpt.session.agreed_call import GOODBYE_S, CallNotes


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
    """One of several ranks."""

    def __init__(self, notes: CallNotes) -> None:
        self._notes = notes
        self.leads, self.begin, self.notify = notes.leads, notes.begin, notes.notify

    async def receive(self) -> Notice:
        return await self._notes.receive(Notice)

    async def agree(self, calls: int, wants_new: Callable[[], bool], deadline_s: float) -> EndDecision:
        def decide(call: int, failure: str) -> EndDecision:
            return EndDecision(call, None if failure else wants_new(), failure)

        return await self._notes.agree(calls, decide, EndDecision, deadline_s, "in which call to end")

    async def share_reading(self, reading: Reading | None, deadline_s: float) -> Reading:
        """Post rank 0's *reading*, or wait for it; rank 0 returns when all have read it, or after `GOODBYE_S`."""
        board = self._notes.board
        try:
            if reading is None:
                what = "what was read back"
                lookout = self._notes.make_lookout(what, deadline_s)
                reading = await board.wait("reading", Reading, deadline_s, what, lookout=lookout)
                await board.arrive("gone")
            else:
                await board.post("reading", reading)
                await board.arrive("gone")
                await board.wait_all_arrived("gone", GOODBYE_S)
        except RankError:  # rank 0 has gone, or knows of others that have
            return reading or Reading()
        return reading
