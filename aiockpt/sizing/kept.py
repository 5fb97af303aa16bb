"""The bytes of a run that lie in a place at once, by its rules of retention: pure arithmetic, no storage."""

from __future__ import annotations

import msgspec

from aiockpt.options import Retention


class KeptSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a place.

    Attributes:
        steps: at once, at most, beside the multiples that are kept for ever; None where all are kept.
        bytes: of these; of one step where all are kept.
        grows_bytes: that every *grows_every* steps of training add for ever; 0: nothing does.
        grows_every: None: every save.
    """

    steps: int | None
    bytes: int
    grows_bytes: int
    grows_every: int | None


def kept(rules: Retention | None, in_flight: int, step_bytes: int, weight_bytes: int) -> KeptSteps:
    """Return what *rules* leave of steps of *step_bytes*, *weight_bytes* of them weights.

    Beside those that the rules name there is the newest one that was verified, for as long as none that is named was, and
    those that are being written: *in_flight*. Steps that are thinned keep their weights. How many ``newer_than`` keeps is
    not known before they are saved: all, at most.
    """
    rules = rules or Retention()
    older_bytes = step_bytes if rules.optimizer is None else weight_bytes
    if rules.last is None or rules.newer_than is not None:
        return KeptSteps(steps=None, bytes=step_bytes, grows_bytes=older_bytes, grows_every=None)
    beside = 1 + in_flight
    named = rules.last + (rules.best.count if rules.best else 0)
    full = named if rules.optimizer is None else min(rules.optimizer, named)
    return KeptSteps(
        steps=named + beside,
        bytes=(full + beside) * step_bytes + (named - full) * weight_bytes,
        grows_bytes=older_bytes if rules.every else 0,
        grows_every=rules.every,
    )
