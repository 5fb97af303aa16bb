"""What did one process tell, so far? Everything that the display and the report ask about a run."""

from __future__ import annotations

from aiockpt.events import (
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
        snapshots, commits, failures: what became of the saves.
        written_bytes: bytes of each save that reached the storage.
        loaded: the checkpoint it went on from; None when it began at the beginning.
    """

    def __init__(self) -> None:
        self.steps: dict[int, StepDone] = {}
        self.snapshots: dict[int, SnapshotTaken] = {}
        self.commits: dict[int, Committed] = {}
        self.failures: dict[int, SaveFailed] = {}
        self.written_bytes: dict[int, int] = {}
        self.loaded: Loaded | None = None

    def add(self, told: Told) -> None:
        """Take one more event."""
        match told:
            case StepDone():
                self.steps[told.step] = told
            case SaveStarted():
                self.written_bytes[told.step] = 0
            case SnapshotTaken():
                self.snapshots[told.step] = told
            case BytesWritten():
                self.written_bytes[told.step] += told.bytes
            case Committed():
                self.commits[told.step] = told
            case SaveFailed():
                self.failures[told.step] = told
            case Loaded():
                self.loaded = told

    @property
    def in_flight(self) -> int:
        """How many saves have started and not ended."""
        return len(self.written_bytes) - len(self.commits) - len(self.failures)

    @property
    def last_step(self) -> StepDone | None:
        """The newest step of the trainer."""
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def last_snapshot(self) -> SnapshotTaken | None:
        """The newest snapshot."""
        return self.snapshots[max(self.snapshots)] if self.snapshots else None

    @property
    def last_commit(self) -> Committed | None:
        """The newest committed checkpoint."""
        return self.commits[max(self.commits)] if self.commits else None
