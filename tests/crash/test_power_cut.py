"""The power is cut after every operation of a save, in every way a disk may have kept what was not flushed.

What must hold (docs/durability.md#invariants, I1–I3 and I5): before the commit the old step loads, bit-equal; from the
acknowledgement on the new one does; in between either. From `written` on a restart finishes the commit. Each flush is
removed once, to see that this very test fails without it.
"""

from functools import cache

import pytest

from aiockpt import SaveFuture
from aiockpt.errors import CheckpointError
from aiockpt.events import DataWritten, Event
from aiockpt.testing.recording import Call, RecordingFiles
from tests.file_surgery import ROOT
from tests.inline_process import Process, Restarts, local, tiny_state
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import power_cuts, run_inline, snapshot

LIMIT = 24
"""Crash states looked at after each operation; the large campaign is `pytest -m slow`."""
RESTARTS = Restarts()


class Recording:
    """The calls of saving step 2 over a committed step 1.

    Attributes:
        start: the file system before the first call.
        voted, acknowledged: how many calls were made when the save was *written*, and when it was *committed*.
    """

    def __init__(self) -> None:
        disk = SimulatedFiles()
        recording = RecordingFiles(disk)
        backend, world = local(recording)
        voted: list[int] = []
        acknowledged: list[int] = []

        class Watcher:
            def on_event(self, event: Event) -> None:
                if isinstance(event, DataWritten):
                    voted.append(len(recording.calls))

        def watch(future: SaveFuture) -> None:
            future.add_done_callback(lambda _: acknowledged.append(len(recording.calls)))

        async def main() -> tuple[int, SimulatedFiles]:
            job = Process(backend, world, (Watcher(),))
            (await job.save(1, tiny_state(1))).result()
            before = len(recording.calls), snapshot(disk)
            (await job.save(2, tiny_state(2), watch)).result()
            await backend.close()
            return before

        first, self.start = run_inline(main)
        self.calls: list[Call] = recording.calls[first:]
        self.voted = voted[-1] - first
        self.acknowledged = acknowledged[-1] - first


@cache
def recorded() -> Recording:
    return Recording()


def violation(
    recording: Recording,
    *,
    skip: frozenset[int] = frozenset(),
    limit: int = LIMIT,
    seed: int = 0,
    promised_at: int | None = None,
) -> str | None:
    """Return the first broken promise, or None. *promised_at*: after how many calls the new step is promised."""
    promised_at = recording.voted if promised_at is None else promised_at
    cuts = power_cuts(recording.calls, start=recording.start, skip=skip, seed=seed, limit=limit)
    for done, after in cuts:
        if done >= recording.acknowledged:
            without_votes(after)  # committed must not rest on a restart that finishes the commit
        try:
            value = RESTARTS.load_value(after)
        except (CheckpointError, AssertionError) as error:
            return f"after call {done} ({recording.calls[done - 1]}): {error!r}"
        promised = {2.0} if done >= promised_at else {1.0, 2.0}
        if value not in promised:
            return f"after call {done} ({recording.calls[done - 1]}): loaded {value}, promised {promised}"
    return None


def without_votes(files: SimulatedFiles) -> None:
    """Remove the receipts of step 2, so that nobody can roll its commit forward."""
    for attempt in files.listdir(f"{ROOT}/step-00000002"):
        folder = f"{ROOT}/step-00000002/{attempt}/r"
        if attempt.startswith("a-"):
            for name in files.listdir(folder):
                files.unlink(f"{folder}/{name}")


def test_the_recording_is_of_a_whole_save() -> None:
    recording = recorded()
    verbs = {call.verb for call in recording.calls}
    assert {"mkdir", "open", "pwrite", "fdatasync", "fsync", "link"} <= verbs
    assert 0 < recording.voted < recording.acknowledged <= len(recording.calls)


def test_every_prefix_leaves_the_old_or_the_new_step() -> None:
    assert violation(recorded()) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_leaves_the_old_or_the_new_step_in_many_more_states(seed: int) -> None:
    assert violation(recorded(), limit=500, seed=seed * 10_007) is None


def flushes_by_object(recording: Recording) -> dict[str, frozenset[int]]:
    """Return the flushes before the acknowledgement by what they flush; a temporary file goes by its final name."""
    names = {call.path: call.target for call in recording.calls if call.verb == "link"}
    found: dict[str, frozenset[int]] = {}
    for index, call in enumerate(recording.calls[: recording.acknowledged]):
        if call.is_flush:
            name = names.get(call.path, call.path)
            found[name] = found.get(name, frozenset()) | {index}
    return found


def test_each_flush_that_is_removed_is_missed() -> None:
    recording = recorded()
    flushes = flushes_by_object(recording)
    assert len(flushes) == 9  # data file, receipt, decision, manifest, and the folders root, step, attempt, d, r
    harmless = {name for name, skip in flushes.items() if violation(recording, skip=skip, limit=64) is None}
    assert harmless == set()


def test_an_early_acknowledgement_is_noticed() -> None:
    recording = recorded()
    flushes = [index for index, call in enumerate(recording.calls[: recording.voted]) if call.is_flush]
    assert violation(recording, promised_at=flushes[-1]) is not None
