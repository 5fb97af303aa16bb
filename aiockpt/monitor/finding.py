"""One finding: something that an operator should know. For `aiockpt.monitor.findings` and its parts.

Times are fields of a finding and not in its words, so that each reader's clock can show them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["bad", "warning", "note"]
"""Work is in danger; saves are slower or work was lost; worth attention."""
LATE = 3.0
"""So many usual intervals without a durable step, or without an event, are too long."""
MOST_NAMED = 5
"""Ranks or steps that a sentence names."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator should know.

    Attributes:
        what: in one sentence, with where it is.
        advice: what to inspect, or the likely cause; may be empty.
        since_s: seconds since 1970.
        rank, step, stage: what to inspect in the figures.
    """

    level: Level
    what: str
    advice: str = ""
    since_s: float | None = None
    rank: int | None = None
    step: int | None = None
    stage: str = ""
