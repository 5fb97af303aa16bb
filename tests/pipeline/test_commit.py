"""A commit looks for the data files unless this process has just written them all."""

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CommitError
from aiockpt.format.manifest import Receipt
from aiockpt.format.names import data_path, step_id
from aiockpt.pipeline.collect import Garbage, collect
from aiockpt.pipeline.commit import UNCHECKED_NS, cast_vote, commit
from aiockpt.runtime.world import World
from aiockpt.testing.data_files import upload
from aiockpt.testing.recording import RecordingBackend
from tests.paper import paper_receipt, written_files
from tests.simulated.simulation import SimulatedClock

STEP, ATTEMPT = step_id(1), "0" * 12
IMAGE = b"\2" * 5000


class Written:
    """A place with the data file and the vote of an attempt."""

    def __init__(self) -> None:
        self.place = RecordingBackend(MemoryBackend())
        self.clock = SimulatedClock()
        self.world = World(clock=self.clock)

    async def vote(self) -> Receipt:
        await upload(self.place, f"{STEP}/{data_path(ATTEMPT, 0, 0)}", memoryview(IMAGE))
        files = written_files([IMAGE], 4096)
        facts = {"id": STEP, "step": 1, "attempt": ATTEMPT, "world_size": 1, "files": files}
        receipt = paper_receipt(0, created_ns=self.clock.time_ns(), **facts)
        await cast_vote(self.place, receipt)
        self.place.operations.clear()
        return receipt

    def listed(self) -> bool:
        return any(operation.verb == "list" for operation in self.place.operations)


@pytest.mark.parametrize(
    ("own", "waited_ns", "listed"),
    [(True, 0, False), (True, UNCHECKED_NS - 1, False), (True, UNCHECKED_NS, True), (False, 0, True)],
)
async def test_files_are_looked_for_unless_they_were_just_written_here(own: bool, waited_ns: int, listed: bool) -> None:
    written = Written()
    receipt = await written.vote()
    written.clock.advance(waited_ns / 1e9)
    manifest = await commit(written.place, [receipt], written.world, own=own)
    assert (manifest.id, written.listed()) == (STEP, listed)


async def test_a_process_that_was_stopped_until_its_attempt_was_collected_commits_nothing() -> None:
    written = Written()
    receipt = await written.vote()
    assert await collect(written.place, Garbage(STEP, ATTEMPT), "f" * 32)
    written.clock.advance(UNCHECKED_NS / 1e9)
    with pytest.raises(CommitError, match="the attempt was collected"):
        await commit(written.place, [receipt], written.world, own=True)
