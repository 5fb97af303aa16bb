"""Faults of a soak, drawn at random with a seed, at a fraction of all calls.

Only faults that a faithful backend could have and a caller can repair:

- *fail* without effect, at every verb;
- *lose the answer* after the effect, where a repeated call is distinguished from a rival's: ``put``, ``put_new``,
  ``delete``. (Of ``create``, ``Upload.write`` and ``Upload.finish`` it is lost below a backend, which detects it; here it
  would be lost above one, which then rightly reports that this block, or file, is there already.)
- *flip* a bit of what was read. One flipped in what is written would be damage that no reader can repair.
"""

from __future__ import annotations

import errno
import random
from collections import Counter

from aiockpt.testing.faults import Action, Fault, FaultSchedule, FaultyBackend

ERRNOS = (errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ESTALE)
"""Those after which the same call may succeed."""

_MEET: dict[str, tuple[Action, ...]] = {
    "put": ("fail", "lose_answer"),
    "put_new": ("fail", "lose_answer"),
    "delete": ("fail", "lose_answer"),
    "get": ("fail", "flip"),
    "reader.read": ("fail", "flip"),
    "create": ("fail",),
    "upload.write": ("fail",),
    "upload.finish": ("fail",),
    "open": ("fail",),
    "stat": ("fail",),
    "list": ("fail",),
}


class DrawnFaults(FaultSchedule):
    """A random schedule: *fraction* of the calls get a fault that such a call can have.

    Attributes:
        injected: how often each thing happened to each verb.
    """

    def __init__(self, seed: int, fraction: float) -> None:
        super().__init__((), FaultyBackend.ACTIONS)
        self._dice = random.Random(seed)
        self._fraction = fraction
        self.injected: Counter[str] = Counter()

    def due(self, verb: str, name: str) -> Fault | None:
        """Count a call of *verb* and draw its fault."""
        super().due(verb, name)
        if verb not in _MEET or self._dice.random() >= self._fraction:
            return None
        action = self._dice.choice(_MEET[verb])
        self.injected[f"{action} {verb}"] += 1
        return Fault(do=action, error=self._dice.choice(ERRNOS), bit=self._dice.getrandbits(40))
