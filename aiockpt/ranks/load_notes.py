"""What do ranks leave in the store while they load, and who tidies up?

Guarantees: a rank removes the notes it wrote when every rank has left the load that they were about: the last one out at
once, the others when they leave a later one. So a store holds the notes of one load at most, however many there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio

from aiockpt.ranks.rounds import Rounds
from aiockpt.ranks.waiting import Waiting
from aiockpt.runtime.notes import NoteBoard, StoreLostError

T = TypeVar("T")
TELL_DEADLINE_S = 10.0
"""For the notes of a rank that leaves, whatever happened to it."""
_LOOKS = 4
"""At loads that this rank has left and others may not have, whenever it leaves one."""


class Notes:
    """The notes of one load, by keys of their own. Use on one event loop.

    Args:
        waiting: accompanies its waits.
    """

    def __init__(self, board: NoteBoard, prefix: str, waiting: Waiting) -> None:
        self.rank = board.rank
        self.world_size = board.world_size
        self._board = board
        self._prefix = prefix
        self._waiting = waiting
        self._written: list[str] = []

    async def post(self, key: str, note: Any) -> None:
        """Write *note* under *key*."""
        self._written.append(self._key(key))
        await self._board.post(self._key(key), note)

    async def wait(self, key: str, kind: type[T], deadline_s: float, what: str, ranks: Iterable[int] = (0,)) -> T:
        """Return the note under *key* as soon as it is there; see `NoteBoard.wait`."""
        return await self._board.wait(self._key(key), kind, deadline_s, what, ranks, self._waiting)

    async def gather(self, keys: dict[int, str], kind: type[T], deadline_s: float, what: str) -> dict[int, T]:
        """Return the note of each rank under its key; see `NoteBoard.gather`."""
        names = {rank: self._key(key) for rank, key in keys.items()}
        return await self._board.gather(names, kind, deadline_s, what, self._waiting)

    async def leave(self) -> None:
        """Say that this rank needs no note any more."""
        if await self._board.arrive(self._key("past")) == self.world_size:
            await self._board.forget([self._key("past")])

    async def remove(self) -> bool:
        """Remove what this rank wrote, if every rank has left; say whether."""
        if await self._board.is_there(self._key("past")):
            return False
        await self._board.forget(self._written)
        return True

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def load_prefix(number: int) -> str:
    """Return what the keys of the notes of load *number* begin with."""
    return f"load/{number}"


class LoadNotes:
    """The notes of all loads of one checkpointer.

    Args:
        deadline_s: for the other ranks, for messages.
    """

    def __init__(self, rounds: Rounds, deadline_s: float) -> None:
        self._rounds = rounds
        self._board = rounds.board
        self._deadline_s = deadline_s
        self._left: deque[Notes] = deque()

    @asynccontextmanager
    async def taking(self, number: int, part: str = "") -> AsyncIterator[Notes]:
        """Lend the notes of load *number*, or of a *part* of it, for the length of the block."""
        call, rounds = f"load() number {number}", self._rounds
        prefix = "/".join(filter(None, (load_prefix(number), part)))
        waiting = Waiting(rounds.members, prefix, call, self._deadline_s)
        notes = Notes(self._board, prefix, waiting)
        try:
            with rounds.loading(prefix):
                await rounds.report(call)
                yield notes
        finally:
            with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
                await notes.leave()
                self._left.append(notes)
                await self._remove_old()

    async def _remove_old(self) -> None:
        """Remove the notes of loads that all ranks have left; one that a rank never leaves holds up no other."""
        for _ in range(_LOOKS):
            if not self._left:
                return
            notes = self._left[0]
            self._left.rotate(-1)  # those of another load are looked at next
            if await notes.remove() and notes in self._left:  # another load may have been left meanwhile
                self._left.remove(notes)
