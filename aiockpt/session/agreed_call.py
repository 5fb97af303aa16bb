"""Agreement of all ranks on one of their next calls: they wait at their next one, and rank 0 picks the first not yet passed.

What is done in that call is the caller's: the run ends (`aiockpt.session.preemption`), or is set back
(`aiockpt.session.rewind`). The ranks use notes in the job's store (`aiockpt.runtime.notes`) and no process group. The loop
thread of a rank writes its notes, whatever its main thread is doing. Guarantees:

- All ranks act in the same call, or learn that another rank did not answer in time.
- A rank waits in a call only until the loop threads of all have answered: never for the training of another, and not for one
  that has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio

from aiockpt.errors import RankError
from aiockpt.runtime.notes import Lookout, NoteBoard

N = TypeVar("N")
D = TypeVar("D")
MakeLookout = Callable[[str, float], Lookout | None]
POLL_S, POLL_OF_A_RANK_S = 0.2, 0.001
"""Seconds between two polls for a notice, through the whole run: the more ranks, the more rarely each polls."""
GOODBYE_S = 5.0
"""For the other ranks to read how it ended, before rank 0 ends, and the store with it."""


class CallNotes:
    """The notes of one rank about such a call.

    Args:
        board: of its own; it is not named before `begin`.
        make_lookout: returns what ends a wait for ranks that have gone; of what is agreed on, in words, and the deadline.

    Attributes:
        leads: whether this rank decides.
    """

    def __init__(self, board: NoteBoard, make_lookout: MakeLookout) -> None:
        self.board, self.make_lookout = board, make_lookout
        self.leads = board.rank == 0
        self._begun = False
        self._pause_s = max(POLL_S, POLL_OF_A_RANK_S * board.world_size)

    def begin(self) -> bool:
        """Adopt the name that these notes have on all ranks, in the first call that all make; return whether this was it."""
        if self._begun:
            return False
        self._begun = True
        self.board.begin()
        return True

    async def receive(self, kind: type[N], round_key: str = "") -> N:
        """Poll for the notice of any rank; *round_key* begins the keys of all notes about one call of several."""
        while True:
            if self.board.begun:
                notice = await self.board.find(f"{round_key}notice", kind)
                if notice is not None:
                    return notice
            await anyio.sleep(self._pause_s)

    async def notify(self, notice: object, round_key: str = "") -> None:
        """Post the notice; one of another rank has the same effect."""
        await self.board.post(f"{round_key}notice", notice)

    async def agree(
        self,
        calls: int,
        decide: Callable[[int, str], D],
        kind: type[D],
        deadline_s: float,
        what: str,
        round_key: str = "",
    ) -> D:
        """Post the number of *calls* that have passed on this rank; return rank 0's decision.

        Args:
            decide: on rank 0, makes the decision of a call, and of why the ranks could not agree; "" where they could.
            what: what is decided, in words.

        Raises:
            RankError: rank 0 has not answered; longer than *deadline_s* seconds, for it decides also after its deadline.
        """
        board, lookout = self.board, self.make_lookout(f"the agreement {what}", deadline_s)
        await board.post(f"{round_key}at/{board.rank}", calls)
        if not self.leads:
            return await board.wait(f"{round_key}decision", kind, deadline_s + GOODBYE_S, what, lookout=lookout)
        keys = {rank: f"{round_key}at/{rank}" for rank in range(board.world_size)}
        try:
            positions = await board.gather(keys, int, deadline_s, "how far the ranks are", lookout)
            decision = decide(max(positions.values()) + 1, "")
        except RankError as error:
            decision = decide(0, str(error))
        await board.post(f"{round_key}decision", decision)
        return decision
