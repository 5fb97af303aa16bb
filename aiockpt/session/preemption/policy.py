"""The policy for a run that must end, and the exception that it ends with."""

from __future__ import annotations

import signal
from datetime import datetime
from typing import Literal

import msgspec

from aiockpt.errors import UsageError
from aiockpt.options import KeywordsChecked, check_amount, refuse_value

OnPreempt = Literal["save"]
"""Save, with the defaults of `Preemption`."""


class Preemption(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """How a run ends when it must: ``Checkpointer(url, on_preempt=Preemption(grace_s=120))``. "save" is the default one.

    Attributes:
        signals: that request it. SIGTERM comes from most schedulers, SIGUSR1 beforehand from Slurm (``--signal=USR1@300``).
        grace_s: seconds from the signal until the process is killed. 30 is what Kubernetes, Slurm and torchrun give.
        ends_at: when the allocation ends: seconds since 1970, or a datetime with its zone. The run ends in time before that
            by itself. None uses ``SLURM_JOB_END_TIME``, where that is set.
        recent_s: a snapshot of at most this age is flushed, and no new one is made: steps since then are trained again. 0
            saves the last finished step.
        verify: whether what was saved is read back and compared, as far as the grace lasts.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    grace_s: float = 30.0
    ends_at: float | datetime | None = None
    recent_s: float = 0.0
    verify: bool = True

    def __post_init__(self) -> None:
        names: object = self.signals
        # A text is a sequence, too, of its letters.
        for name in names if isinstance(names, tuple | list) else (names,):
            if isinstance(names, str) or not (
                isinstance(name, str) and name.startswith("SIG") and hasattr(signal, name)
            ):
                refuse_value("Preemption", "signals", name, "names of signals, such as ('SIGTERM', 'SIGUSR1')")
        check_amount("Preemption", "grace_s", self.grace_s, " seconds")
        if self.recent_s != 0:
            check_amount("Preemption", "recent_s", self.recent_s, " seconds")
        if isinstance(self.ends_at, datetime):
            if self.ends_at.tzinfo is None:
                refuse_value("Preemption", "ends_at", self.ends_at, "a datetime with its zone, or seconds since 1970")
        else:
            check_amount("Preemption", "ends_at", self.ends_at, ", in seconds since 1970", optional=True)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(int(getattr(signal, name)) for name in self.signals)

    def find_end(self, now_s: float, announced_s: float | None) -> float | None:
        """Return when the allocation ends, in seconds since 1970; None where that is unknown.

        Args:
            announced_s: the end by the scheduler's announcement.

        Raises:
            UsageError: *ends_at* is in the past.
        """
        if self.ends_at is None:
            return None if announced_s is None or announced_s <= now_s else announced_s  # an old one is another job's
        end_s = self.ends_at.timestamp() if isinstance(self.ends_at, datetime) else float(self.ends_at)
        if end_s <= now_s:
            raise UsageError(f"Preemption(ends_at={end_s:.0f}) was {now_s - end_s:.0f} s ago: give a time to come")
        return end_s


def as_preemption(given: OnPreempt | Preemption) -> Preemption:
    """Return the policy that ``on_preempt`` stands for."""
    if isinstance(given, Preemption):
        return given
    if given != "save":
        refuse_value("", "on_preempt", given, "'save', an aiockpt.Preemption(grace_s=…), or None")
    return Preemption()


class Preempted(SystemExit):
    """The run must end, and ends: raised by ``step`` or ``save``, on all ranks in the same call.

    As a SystemExit it ends the program, through its ``finally`` and ``with`` blocks, with a status that a job script can ask
    for. It is never 0: the training is not done.

    Attributes:
        VERIFIED: the status 75 (of sysexits.h: try again): *step* is committed, and was read back and compared.
        COMMITTED: the status 76: *step* is committed; the time did not suffice to read it back.
        UNSAVED: the status 77: the last save is not known to be committed; *step* is the newest that is.
        code: which of them.
        reason: what requested the end.
        step: what the next process resumes from, as far as this one knows; None where it has saved nothing.
    """

    VERIFIED = 75
    COMMITTED = 76
    UNSAVED = 77

    def __init__(self, reason: str, step: int | None, code: int, outcome: str) -> None:
        super().__init__(code)
        self.reason = reason
        self.step = step
        self._outcome = outcome

    @property
    def verified(self) -> bool:
        """Whether *step* was read back and compared."""
        return self.code == self.VERIFIED

    def __str__(self) -> str:
        return self._outcome
