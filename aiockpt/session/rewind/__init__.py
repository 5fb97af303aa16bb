"""Rewind, the way back from a bad step: `policy` (the options), `alarm` (the bad step), `handler` (all ranks go back)."""

from aiockpt.session.rewind.policy import Rewind, WentBack

__all__ = ["Rewind", "WentBack"]
