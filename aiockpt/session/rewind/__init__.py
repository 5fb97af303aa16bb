"""Rewind, the way back from a bad step: `rules` (the options), `alarm` (the bad step), `rewinder` (all ranks go back)."""

from aiockpt.session.rewind.rules import Rewind

__all__ = ["Rewind"]
