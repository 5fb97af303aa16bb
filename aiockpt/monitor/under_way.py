"""Unfinished saves and loads, with the stage that each is in, from the events alone."""

from __future__ import annotations

import msgspec

from aiockpt.events import (
    BytesWritten,
    Committed,
    DataWritten,
    Event,
    Loaded,
    LoadFailed,
    Operation,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    SnapshotTaken,
    StageEnded,
)
from aiockpt.units import size

_AFTER = {"find": "match", "match": "plan", "plan": "read", "read": "read", "exchange": "read", "scatter": "scatter"}
"""The stage of a load after each one; "read" repeats, since any of many files may be the last."""


class PendingWork(msgspec.Struct, frozen=True, kw_only=True):
    """A save or a load that has begun and not ended.

    Attributes:
        stage: the current one, as far as events show.
        for_s: seconds since it began.
        silent_s: seconds since its last event.
        done_bytes: those of *bytes* that have reached the storage.
    """

    operation: Operation
    step: int
    stage: str
    for_s: float
    silent_s: float
    bytes: int = 0
    done_bytes: int = 0


class _Work:
    """A save or a load under way."""

    def __init__(self, operation: Operation, step: int, stage: str, begun_ns: int, total: int = 0) -> None:
        self.operation: Operation = operation
        self.step, self.stage, self.begun_ns, self.last_event_ns = step, stage, begun_ns, begun_ns
        self.bytes, self.done_bytes = total, 0
        self.logged_ns = 0

    def at(self, now_ns: int) -> PendingWork:
        return PendingWork(
            operation=self.operation,
            step=self.step,
            stage=self.stage,
            for_s=(now_ns - self.begun_ns) / 1e9,
            silent_s=(now_ns - self.last_event_ns) / 1e9,
            bytes=self.bytes,
            done_bytes=self.done_bytes,
        )


class UnderWay:
    """The saves and loads of one checkpointer that are under way, and its last durable step. On the loop thread."""

    def __init__(self) -> None:
        self._work: dict[tuple[Operation, int], _Work] = {}
        self._durable: tuple[int, int] | None = None

    def receive(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._work["save", event.step] = _Work("save", event.step, "snapshot", event.at_ns, event.bytes)
            case SnapshotTaken():
                self._enter("save", event, "write")
            case BytesWritten():
                self._count(event)
            case DataWritten():
                self._enter("save", event, "vote")
            case StageEnded(operation="save", stage="vote"):
                self._enter("save", event, "commit")
            case StageEnded(operation="load"):
                self._receive_of_load(event)
            case Committed() | SaveFailed() | SaveSkipped():
                self._work.pop(("save", event.step), None)
                if isinstance(event, Committed):
                    self._durable = (event.step, event.at_ns - round(event.seconds * 1e9))
            case Loaded() | LoadFailed():
                # Files of a step that the load has passed over may have ended after the one that is damaged.
                self._work = {which: work for which, work in self._work.items() if which[0] != "load"}
                if isinstance(event, Loaded) and event.step >= 0:
                    self._durable = (event.step, event.at_ns)

    def pending(self, now_ns: int) -> list[PendingWork]:
        """Return the unfinished work, the oldest first."""
        return sorted((work.at(now_ns) for work in self._work.values()), key=lambda work: -work.for_s)

    def durable(self, now_ns: int) -> tuple[int, float] | None:
        """Return the last durable step, and the seconds of work since then that a crash would lose."""
        return None if self._durable is None else (self._durable[0], (now_ns - self._durable[1]) / 1e9)

    def grew_overdue(self, now_ns: int, overdue_s: float) -> bool:
        """Return whether some work has exceeded *overdue_s*, or twice its duration when it was last reported."""
        late = False
        for work in self._work.values():
            if (lasts_ns := now_ns - work.begun_ns) > max(overdue_s * 1e9, 2 * work.logged_ns):
                work.logged_ns, late = lasts_ns, True
        return late

    def _enter(self, operation: Operation, event: Event, stage: str) -> None:
        if (work := self._work.get((operation, event.step))) is not None:
            work.stage, work.last_event_ns = stage, event.at_ns

    def _count(self, event: BytesWritten) -> None:
        if (work := self._work.get(("save", event.step))) is not None:
            work.done_bytes += event.bytes
            work.last_event_ns = event.at_ns

    def _receive_of_load(self, event: StageEnded) -> None:
        if event.failed:
            self._work.pop(("load", event.step), None)
        elif event.stage in _AFTER:
            begun_ns = event.at_ns - round(event.seconds * 1e9)
            self._work.setdefault(("load", event.step), _Work("load", event.step, "find", begun_ns))
            self._enter("load", event, _AFTER[event.stage])

    def __len__(self) -> int:
        return len(self._work)


def describe(work: PendingWork) -> str:
    """Return *work* in words."""
    moved = f", {size(work.done_bytes)} of {size(work.bytes)} written" if work.bytes and work.stage == "write" else ""
    return (
        f"{work.operation} of step {work.step}: in {work.stage}, for {work.for_s:.1f} s{moved}; "
        f"nothing happened for {work.silent_s:.1f} s"
    )
