"""The name of one save among those of all ranks."""

from __future__ import annotations

import msgspec

WARM_UP = -1
"""The step of a round that plans and saves nothing."""


class SaveRound(msgspec.Struct, frozen=True):
    """One save, as all ranks count them: the *number*-th of its step; 0 where this process saves alone."""

    step: int
    number: int = 0

    @property
    def prefix(self) -> str:
        """What the keys of its notes begin with."""
        return f"warm_up/{self.number}" if self.step == WARM_UP else f"save/{self.step}/{self.number}"

    @property
    def call(self) -> str:
        """What it is, in words."""
        if self.step == WARM_UP:
            return f"warm_up() number {self.number}"
        return f"the save of step {self.step}" + (f", number {self.number}" if self.number > 1 else "")

    def key(self, *parts: object) -> str:
        """Return the key of a note of this round."""
        return "/".join([self.prefix, *map(str, parts)])
