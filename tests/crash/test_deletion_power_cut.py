"""The power is cut while a step, or an older generation, is deleted: it is whole, or gone for good, and others are safe."""

import errno
from collections.abc import Awaitable, Callable

import pytest

from aiockpt.errors import CheckpointError, StorageError
from aiockpt.testing.faults import Fault, FaultyFiles
from aiockpt.testing.recording import Call, RecordingFiles
from tests.file_surgery import ROOT, paths
from tests.inline_process import Process, Restarts, load_value, local, saved_files, tiny_state
from tests.seams import give_up_voted
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import power_cuts, replay, run_inline, snapshot

LIMIT = 24


def record(start: SimulatedFiles, work: Callable[[Process], Awaitable[object]]) -> list[Call]:
    """Run *work* on a copy of *start* and return its calls."""
    recording = RecordingFiles(snapshot(start))
    backend, world = local(recording, seed=3)

    async def main() -> None:
        await work(Process(backend, world))
        await backend.close()

    run_inline(main)
    return recording.calls


def saved(steps: int, *, full: bool) -> SimulatedFiles:
    """Return a disk with *steps* steps; a *full* one takes no byte more."""
    files = saved_files(steps)
    files.capacity_bytes = 0 if full else None
    return files


@pytest.mark.parametrize("full", [False, True])
def test_a_deleted_newest_step_is_whole_or_gone_and_never_comes_back(full: bool) -> None:
    start = saved(2, full=full)
    calls = record(start, lambda process: process.ckpt.delete(2))
    unlinked = next(index for index, call in enumerate(calls) if call.verb == "unlink" and "MANIFEST" in call.path)
    flushed = next(index for index, call in enumerate(calls) if index > unlinked and call.is_flush)
    gone_at: int | None = None
    restarts = Restarts()
    for done, after in power_cuts(calls, start=start, limit=LIMIT):
        value = restarts.load_value(after)
        assert value in (1.0, 2.0), f"after call {done}"
        if done > flushed:
            assert value == 1.0, f"after call {done}: it came back"
        if value == 1.0 and gone_at is None:
            gone_at = done
    assert gone_at is not None


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_another_step_is_never_harmed_by_a_deletion(step: int, full: bool) -> None:
    start = saved(2, full=full)
    calls = record(start, lambda process: process.ckpt.delete(step))
    other = 3 - step
    for done, after in power_cuts(calls, start=start, limit=8):
        assert load_value(after, other) == float(other), f"after call {done}"


@pytest.mark.parametrize("full", [False, True])
def test_a_deletion_that_stopped_half_way_is_not_undone_by_the_loss_of_its_decision_record(full: bool) -> None:
    """The job ends at any call of a deletion; then the records that say *collect* are removed, and another job looks."""
    start = saved(2, full=full)
    calls = record(start, lambda process: process.ckpt.delete(2))
    lost = 0
    for count, now in replay(calls, start=start):
        files = snapshot(now)
        deleted = f"{ROOT}/step-00000002/MANIFEST-1.json" not in set(paths(files))
        for path in [path for path in paths(files) if path.endswith("DECISION.json") and "step-00000002" in path]:
            files.unlink(path)
            lost += deleted
        assert load_value(files) == (1.0 if deleted else 2.0), f"after call {count}"
    assert lost


def test_a_collected_generation_does_not_come_back_when_its_decision_record_is_lost() -> None:
    """Somebody removes the manifest of the newer generation, too: that one comes back by its votes, and not the older."""
    start = saved_files(1)
    calls = record(start, lambda process: process.save(1, tiny_state(5)))
    old = next(path for path in paths(start) if path.endswith("DECISION.json")).rpartition("/")[0]
    lost = 0
    for count, now in replay(calls, start=start):
        files = snapshot(now)
        there = set(paths(files))
        if f"{ROOT}/step-00000001/MANIFEST-1.json" in there or f"{old}/DECISION.json" not in there:
            continue
        lost += 1
        files.unlink(f"{old}/DECISION.json")
        files.unlink(f"{ROOT}/step-00000001/MANIFEST-2.json")
        assert load_value(files) == 5.0, f"after call {count}"
        assert f"{ROOT}/step-00000001/MANIFEST-1.json" not in set(paths(files)), f"after call {count}"
    assert lost


def test_a_save_that_a_rank_gave_up_does_not_come_back_when_the_disk_was_full_for_the_reason() -> None:
    """All have voted, and no decision was made; a rank withdraws the save, cannot say why, and the record is lost later."""
    files = SimulatedFiles()
    undecided = [Fault(do="fail", verb="link", match="*/DECISION.json", times=None, error=errno.EIO)]
    full = [Fault(do="fail", verb="link", match="*.fail.json", times=None, error=errno.ENOSPC)]
    full += [Fault(do="fail", verb="rename", match="*.fail.json", times=None, error=errno.ENOSPC)]

    async def main() -> None:
        backend, world = local(FaultyFiles(files, undecided))
        future = await Process(backend, world).save(1, tiny_state(1))
        assert isinstance(future.exception(), StorageError)
        await backend.close()
        backend, world = local(FaultyFiles(files, full), seed=1)
        await give_up_voted(backend, world, 1, tiny_state(1))
        await backend.close()

    run_inline(main)
    there = set(paths(files))
    assert any(path.endswith("DECISION.json") for path in there)
    assert not any(path.endswith(("fail.json", ".safetensors")) for path in there)
    for path in there:
        if path.endswith("DECISION.json"):
            files.unlink(path)
    assert load_value(files) is None


@pytest.mark.parametrize("seed", range(4))
def test_of_two_saves_with_all_votes_for_one_number_the_newer_is_finished(seed: int) -> None:
    """Whatever their attempts are called: the first was never committed, and the manifest of the second is removed."""
    files = SimulatedFiles()
    undecided = [Fault(do="fail", verb="link", match="*/DECISION.json", times=None, error=errno.EIO)]

    async def main() -> None:
        backend, world = local(FaultyFiles(files, undecided), seed=100 + seed)
        assert (await Process(backend, world).save(1, tiny_state(1))).exception() is not None
        await backend.close()
        backend, world = local(files, seed=200 + seed)
        (await Process(backend, world).save(1, tiny_state(2))).result()
        await backend.close()

    run_inline(main)
    files.unlink(f"{ROOT}/step-00000001/MANIFEST-1.json")
    assert load_value(files) == 2.0


def test_a_new_generation_replaces_the_old_one_without_a_moment_without_either() -> None:
    """Step 1 is saved again with value 5; the old generation is collected afterwards."""
    start = saved_files(1)
    calls = record(start, lambda process: process.save(1, tiny_state(5)))
    seen, restarts = set(), Restarts()
    for done, after in power_cuts(calls, start=start, limit=LIMIT):
        try:
            seen.add(restarts.load_value(after))
        except CheckpointError as error:
            pytest.fail(f"after call {done} ({calls[done - 1]}): {error!r}")
    assert seen == {1.0, 5.0}
