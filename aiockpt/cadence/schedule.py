"""Which steps are decided, and what was decided of them? The same answers on every rank, as far as they are known.

Rank 0 decides a few steps ahead and leaves a note; the others read it. A step that is not decided has no answer: whoever
asks must wait. So no rank ever saves a step that another one does not.
"""

from __future__ import annotations

from collections import deque

import msgspec

REMEMBERED = 256
"""Decided saves that are remembered; a rank that is further behind than that is told of them by their notes, in order."""


class Note(msgspec.Struct, frozen=True):
    """Rank 0's decision.

    Attributes:
        saves: the steps to be saved, of all those below *until* that were not decided before.
        notice: so many steps before *until* there will be another note.
        why: in words.
    """

    saves: tuple[int, ...]
    until: int
    notice: int
    why: str


class Schedule:
    """What is decided so far.

    Attributes:
        until: the first step that is not decided.
        notice, why: of the last note.
    """

    def __init__(self) -> None:
        self.until = self.notice = 0
        self.why = ""
        self._saves: deque[int] = deque(maxlen=REMEMBERED)

    def add(self, note: Note) -> None:
        """Take what was decided next."""
        self._saves.extend(note.saves)
        self.until = max(self.until, note.until)
        self.notice, self.why = note.notice, note.why

    def planned(self, after: int) -> list[int]:
        """Return the steps beyond *after* that are decided to be saved."""
        return [step for step in self._saves if step > after]

    def answer(self, after: int, step: int) -> bool | None:
        """Say whether one of the steps beyond *after*, up to *step*, is to be saved; None: that is not decided yet."""
        if step >= self.until:
            return None
        return any(after < save <= step for save in self._saves)
