"""What did one process tell, so far? Everything that the display and the report ask about a run."""

from __future__ import annotations

from aiockpt.events import (
    BarrierWaited,
    BytesWritten,
    Committed,
    Loaded,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
)
from aiockpt.examples.child import StepDone, Told


class Record:
    """The events of one process, by step.

    Attributes:
        steps: what the trainer reported.
        starts, snapshots, commits, failures: what became of the saves.
        waits_s: how long the optimizer was held by lazy snapshots.
        written_bytes: bytes of each save that reached the storage.
        loaded: the checkpoint it went on from; None when it began at the beginning.
        last_step, last_snapshot, last_commit: the newest of each; the display reads them from its own thread.
    """

    def __init__(self) -> None:
        self.steps: dict[int, StepDone] = {}
        self.starts: dict[int, SaveStarted] = {}
        self.snapshots: dict[int, SnapshotTaken] = {}
        self.waits_s: dict[int, float] = {}
        self.commits: dict[int, Committed] = {}
        self.failures: dict[int, SaveFailed] = {}
        self.written_bytes: dict[int, int] = {}
        self.loaded: Loaded | None = None
        self.last_step: StepDone | None = None
        self.last_snapshot: SnapshotTaken | None = None
        self.last_commit: Committed | None = None

    def add(self, told: Told) -> None:
        """Take one more event."""
        match told:
            case StepDone():
                self.steps[told.step] = self.last_step = told
            case SaveStarted():
                self.starts[told.step] = told
                self.written_bytes[told.step] = 0
            case SnapshotTaken():
                self.snapshots[told.step] = self.last_snapshot = told
            case BarrierWaited():
                self.waits_s[told.step] = self.waits_s.get(told.step, 0.0) + told.seconds
            case BytesWritten():
                self.written_bytes[told.step] += told.bytes
            case Committed():
                self.commits[told.step] = self.last_commit = told
            case SaveFailed():
                self.failures[told.step] = told
            case Loaded():
                self.loaded = told

    @property
    def in_flight(self) -> int:
        """How many saves have started and not ended."""
        return len(self.starts) - len(self.commits) - len(self.failures)
