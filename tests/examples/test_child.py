"""The doomed process dies in the middle of the right save, and every event it wrote is whole."""

import os
from collections.abc import Sequence

import msgspec
import pytest

from aiockpt.events import BytesWritten, Committed, DataWritten, Event, GarbageDeleted, SaveStarted, SnapshotTaken
from aiockpt.tools.examples.child import DemoEvent, DieInSave, StepDone, StepReporter

STARTED = SaveStarted(at_ns=0, step=4, bytes=9, tensor_count=1)
SNAPSHOT = SnapshotTaken(at_ns=0, step=4, bytes=9, pause_s=0.0, copy_s=0.0)
BLOCK = BytesWritten(at_ns=0, step=4, bytes=9)
DATA = DataWritten(at_ns=0, step=4, bytes=9, seconds=0.0)


@pytest.mark.parametrize(
    ("events", "dies_at"),
    [
        ([STARTED, SNAPSHOT, BLOCK, DATA], 2),
        ([STARTED, BLOCK, SNAPSHOT, DATA], 2),
        ([STARTED, BLOCK, BLOCK, BLOCK], None),
        ([STARTED, SNAPSHOT, DATA], 2),
        ([msgspec.structs.replace(event, step=2) for event in (STARTED, SNAPSHOT, BLOCK, DATA)], None),
    ],
    ids=["copied first", "written while copying", "still copying", "data flushed", "another save"],
)
def test_it_dies_once_the_state_is_snapshotted_and_some_of_it_is_written(
    events: Sequence[Event], dies_at: int | None
) -> None:
    deaths: list[int] = []
    killer = DieInSave(4, die=lambda: deaths.append(index))
    for index, event in enumerate(events):  # noqa: B007  the callback reads it
        killer.on_event(event)
    assert deaths[:1] == ([] if dies_at is None else [dies_at])


def test_what_is_told_comes_out_of_the_pipe_line_by_line_with_every_bit_of_the_loss() -> None:
    hear, tell = os.pipe()
    teller = StepReporter(tell, 2)
    teller.on_step(3, 1 / 3)
    teller.on_event(GarbageDeleted(at_ns=0, key="not of interest"))
    teller.on_event(Committed(at_ns=0, step=3, bytes=9, seconds=0.5, generation=1))
    os.close(tell)
    with os.fdopen(hear, "rb") as pipe:
        (rank, done), (_, committed) = (msgspec.json.decode(line, type=tuple[int, DemoEvent]) for line in pipe)
    assert isinstance(done, StepDone)
    assert (rank, done.step, done.loss) == (2, 3, 1 / 3)
    assert committed == Committed(at_ns=0, step=3, bytes=9, seconds=0.5, generation=1)
