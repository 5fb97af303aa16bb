"""Retention, garbage, lineage, roll-forward and rivals: what happens around a commit."""

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.engine import maintenance
from aiockpt.engine.save import RECORD_FILES
from aiockpt.format.manifest import MAX_ANCESTORS
from aiockpt.format.names import attempt_folder
from aiockpt.options import Best, Snapshot, Worker
from aiockpt.pipeline.collect import Garbage, collect
from aiockpt.pipeline.commit import claim
from aiockpt.pipeline.discover import Heads, StepEntry, scan
from aiockpt.policies.retention import StepFacts, lineage, plan_retention
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.backend import Backend, Listing, Space
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.gates import Gate
from tests.small_run import SMALL, small_checkpointer, steps
from tests.watch import until

STATE: dict[str, Any] = {"x": torch.arange(5000), "value": 1}


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((5000,), value), "value": value}


def value_in(place: Path | Backend, step: int | None = None) -> float:
    """Return what a load takes from *place*."""
    target = state(-1)
    with small_checkpointer(place) as ckpt:
        assert ckpt.load(target, step).result() is not None
    return float(target["value"])


def facts(*rows: tuple[int, int, str, str | None]) -> list[StepFacts]:
    return [StepFacts(f"s{step}", step, sequence, run, parent, False, {}) for step, sequence, run, parent in rows]


def test_the_last_every_and_best_steps_are_kept(tmp_path: Path) -> None:
    rules = aiockpt.Retention(last=2, every=4, best=Best("loss", count=2))
    losses = [9.0, 8.0, 1.0, 7.0, 6.0, 2.0, 5.0, 4.0, 3.0, float("nan")]
    with small_checkpointer(tmp_path, retention=rules) as ckpt:
        for step, loss in enumerate(losses):
            ckpt.save(step, STATE, metrics={"loss": loss}).result()
    assert steps(tmp_path) == [9, 8, 5, 4, 2, 0]


def test_the_newest_and_the_newest_verified_step_are_never_deleted(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in range(5):
            ckpt.save(step, STATE).result()
        ckpt.verify(1).result()
        pruned = ckpt.prune(aiockpt.Retention(last=1), dry_run=True).result()
        assert [step.step for step in pruned.steps] == [0, 2, 3]
        assert steps(tmp_path) == [4, 3, 2, 1, 0]
        ckpt.prune(aiockpt.Retention(last=1)).result()
        assert [info.step for info in ckpt.steps().result()] == [4, 1]


def test_a_save_that_commits_while_retention_looks_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordingBackend(LocalBackend(str(tmp_path)))
    gate = Gate(recorded, "put_new", "*/MANIFEST-1.json", times=1)
    with small_checkpointer(gate) as ckpt:
        save = ckpt.save(1, STATE)
        assert gate.reached.wait(250)

        async def looked(backend: Backend, heads: Heads) -> list[StepEntry]:
            entries = await scan(backend, heads)
            gate.open_up()
            await save
            return entries

        monkeypatch.setattr(maintenance, "scan", looked)
        assert ckpt.prune(aiockpt.Retention(last=1, grace_s=0.0)).result().garbage == ()
    assert not [done for done in recorded.operations if done.verb == "get" and done.key.endswith("r00000.json")]
    assert steps(tmp_path) == [1]


def test_retention_reads_each_manifest_once(tmp_path: Path) -> None:
    recorded = RecordingBackend(LocalBackend(str(tmp_path)))
    with small_checkpointer(recorded, retention=aiockpt.Retention(last=3)) as ckpt:
        for step in range(6):
            ckpt.save(step, STATE).result()
    read = Counter(done.key for done in recorded.operations if done.verb == "get" and "MANIFEST" in done.key)
    assert read == {f"step-{step:08d}/MANIFEST-1.json": 1 for step in range(6)}
    assert steps(tmp_path) == [5, 4, 3]


def test_a_step_found_damaged_saves_no_place(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in range(4):
            ckpt.save(step, STATE).result()
        ckpt.verify(3).result()
        (data,) = (tmp_path / "step-00000003").glob("*/d/*.safetensors")
        whole = data.read_bytes()
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(aiockpt.CorruptionError):
            ckpt.verify(3).result()
        newest = ckpt.steps().result()[0]
        assert not newest.verified
        assert newest.problem is not None
        ckpt.prune(aiockpt.Retention(last=1)).result()
        assert [info.step for info in ckpt.steps().result()] == [3, 2]
        data.write_bytes(whole)
        ckpt.verify(3).result()
        assert ckpt.steps().result()[0].verified
        ckpt.prune(aiockpt.Retention(last=1)).result()
        assert [info.step for info in ckpt.steps().result()] == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": 3},
        {"retention": {"last": 1}},
        {"every": "10"},
        {"limits": 8},
        {"on_exists": "overwrite"},
        {"on_error": "ignore"},
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_and_not_ignored(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(aiockpt.UsageError, match=next(iter(wrong))):
        aiockpt.Checkpointer(tmp_path, **wrong)


def test_a_step_that_another_process_reads_is_left(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in range(3):
            ckpt.save(step, STATE).result()
        (tmp_path / "step-00000000" / "lease-abc").write_bytes(b"")
        pruned = ckpt.prune(aiockpt.Retention(last=1)).result()
        assert [step.step for step in pruned.steps] == [1]
        assert pruned.left == (("step-00000000", "another process is reading it"),)


def test_a_deleted_step_does_not_return_from_thinning(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    slow = Gate(LocalBackend(tmp_path), "put_new", "step-00000001/MANIFEST-2*")
    with small_checkpointer(slow) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model, "optimizer": optimizer}).result()
        thinning = ckpt.prune(aiockpt.Retention(last=2, optimizer=1))
        assert slow.reached.wait(250)
        deletion = ckpt.delete(1)
        with suppress(TimeoutError):  # it waits for the clean-up
            deletion.result(0.2)
        slow.open_up()
        thinning.result()
        deletion.result()
    assert steps(tmp_path) == [2]
    assert not (tmp_path / "step-00000001").exists()


def test_a_clean_up_that_fails_in_an_unforeseen_way_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(FaultyBackend):
        async def list(self, prefix: str) -> Listing:
            if caplog.records:
                raise RuntimeError("no error of ours")
            return await super().list(prefix)

    caplog.set_level(logging.INFO, "aiockpt")  # the commit is logged before its clean-up
    rules = aiockpt.Retention(last=1)
    with small_checkpointer(Odd(LocalBackend(tmp_path)), retention=rules) as ckpt:
        ckpt.save(1, STATE).result()
    assert "clean-up after step-00000001 failed" in caplog.text
    assert "no error of ours" in caplog.text


def test_after_going_back_both_branches_are_kept(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in (500, 1000):
            ckpt.save(step, state(step)).result()
    with small_checkpointer(tmp_path, retention=aiockpt.Retention(last=1)) as ckpt:
        ckpt.load(state(0), 500).result()
        ckpt.save(600, state(600)).result()
    with small_checkpointer(tmp_path) as ckpt:
        infos = ckpt.steps().result()
        assert [info.step for info in infos] == [600, 1000]
        assert infos[0].parent == "step-00000500"
        loaded = ckpt.load(state(0)).result()
        assert loaded is not None
        assert loaded.step == 600


def test_going_back_within_one_checkpointer_begins_a_new_branch_too(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path, retention=aiockpt.Retention(last=3)) as ckpt:
        for step in (100, 200, 300):
            ckpt.save(step, state(step)).result()
        ckpt.load(state(0), 100).result()
        ckpt.save(150, state(150)).result()
        ckpt.wait()
        assert [info.step for info in ckpt.steps().result()] == [150, 300, 200, 100]
        assert ckpt.prune(aiockpt.Retention(last=1), dry_run=True).result().steps[0].step == 100


def test_a_read_only_place_is_loaded_from(tmp_path: Path) -> None:
    attempt = dead_attempt(tmp_path, voted=True)
    shutil.copytree(tmp_path, tmp_path / "again")
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(3, state(3)).result()
    assert attempt.exists()
    read_only = FaultyBackend(LocalBackend(tmp_path), [Fault(do="fail", verb="put*", times=None, error=errno.EROFS)])
    assert value_in(read_only) == 3


def test_votes_that_cannot_be_finished_here_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead_attempt(tmp_path, voted=True)
    read_only = FaultyBackend(LocalBackend(tmp_path), [Fault(do="fail", verb="put*", times=None, error=errno.EROFS)])
    with small_checkpointer(read_only) as ckpt:
        for _ in range(3):
            assert ckpt.load(state(0)).result() is None
            assert ckpt.steps().result() == ()
    told = [record.getMessage() for record in caplog.records if "cannot be turned into a commit" in record.getMessage()]
    assert len(told) == 1


def test_votes_that_are_all_there_are_no_garbage(tmp_path: Path) -> None:
    dead_attempt(tmp_path, voted=True)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.prune(aiockpt.Retention(grace_s=0), dry_run=True).result().garbage == ()


def save_and_keep(root: Path, count: int) -> None:
    """Save step 7 *count* times; nothing of the generations before is collected."""
    place = FaultyBackend(LocalBackend(str(root)), [Fault(do="fail", verb="delete", times=None)])
    with small_checkpointer(place, on_error="warn") as ckpt:
        for value in range(count):
            ckpt.save(7, state(value)).result()


def attempts(root: Path) -> set[str]:
    return {path.name.removeprefix("a-") for path in (root / "step-00000007").glob("a-*")}


@pytest.mark.parametrize("committed", [(1, 2), (1, 3)])
def test_whole_votes_for_a_taken_number_are_garbage(tmp_path: Path, committed: tuple[int, ...]) -> None:
    """The votes are all there and their number is no newer than the newest generation, though newer than the oldest."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_and_keep(ours, 1)
    shutil.copytree(ours, theirs)
    save_and_keep(ours, 2)
    save_and_keep(theirs, 1)
    (overtaken,) = attempts(theirs) - attempts(ours)
    folder = ours / "step-00000007"
    shutil.copytree(theirs / "step-00000007" / f"a-{overtaken}", folder / f"a-{overtaken}")
    (folder / f"a-{overtaken}" / "DECISION.json").unlink()
    for generation in {1, 2, 3} - set(committed):
        (folder / f"MANIFEST-{generation}.json").unlink()
    with small_checkpointer(ours) as ckpt:
        garbage = ckpt.prune(aiockpt.Retention(grace_s=0), dry_run=True).result().garbage
    assert overtaken in {one.attempt for one in garbage}


def test_a_decided_attempt_without_its_number_is_removed(tmp_path: Path) -> None:
    slow = Gate(LocalBackend(tmp_path), "put_new", "step-00000007/MANIFEST*")
    with small_checkpointer(slow) as ckpt:
        loser = ckpt.save(7, state(1))
        assert slow.reached.wait(250)
        (overtaken,) = attempts(tmp_path)
        save_and_keep(tmp_path, 1)
        slow.open_up()
        assert isinstance(loser.exception(), aiockpt.CommitConflictError)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.prune(aiockpt.Retention()).result().garbage == ()
        garbage = ckpt.prune(aiockpt.Retention(grace_s=0)).result().garbage
        assert [one.attempt for one in garbage] == [overtaken]
        assert overtaken not in attempts(tmp_path)
    assert value_in(tmp_path) == 0


async def test_a_decision_that_is_being_written_is_awaited(tmp_path: Path) -> None:
    """Without hard links a record is created in place, and seen before it is whole."""
    begun, go_on = threading.Event(), threading.Event()

    class NoLinks(OsFiles):
        def link(self, *_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

    class Slow(NoLinks):
        def pwrite(self, fd: int, data: Any, offset: int, /) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("DECISION.json"):
                begun.set()
                assert go_on.wait(250)
            return OsFiles.pwrite(fd, data, offset)

    slow, other = (LocalBackend(tmp_path, world=World(files=files)) for files in (Slow(), NoLinks()))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim, slow, "step-00000001", "0" * 12, "commit", "x")
        await anyio.to_thread.run_sync(begun.wait, 250)
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        assert await claim(other, "step-00000001", "0" * 12, "collect", "y") == "commit"


def test_an_attempt_committed_since_it_was_found_stays(tmp_path: Path) -> None:
    save_and_keep(tmp_path, 1)
    (attempt,) = attempts(tmp_path)
    assert not asyncio.run(collect(LocalBackend(tmp_path), Garbage("step-00000007", attempt), "0" * 32))
    assert value_in(tmp_path) == 0


def test_the_lineage_follows_runs_and_their_parents() -> None:
    rows = facts((1, 1, "a", None), (2, 2, "a", None), (3, 3, "a", None), (4, 4, "b", "s2"), (5, 5, "b", "s2"))
    assert [fact.step for fact in lineage(rows)] == [5, 4, 2, 1]
    assert [step.step for step in plan_retention(rows, aiockpt.Retention(last=2))] == [1, 2]
    assert plan_retention(rows, aiockpt.Retention(last=2), protected={"s1"})[0].step == 2
    assert lineage([]) == []
    assert plan_retention([], aiockpt.Retention(last=1)) == []


def save_steps(root: Path, steps: Iterable[int], *, load: int | None = None, last: int = 2, **how: Any) -> None:
    with small_checkpointer(root, retention=aiockpt.Retention(last=last), **how) as ckpt:
        if load is not None:
            assert ckpt.load(state(0), load).result() is not None
        for step in steps:
            ckpt.save(step, state(step)).result()


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_saving_the_resumed_step_again_keeps_no_more_steps(tmp_path: Path, worker: Worker) -> None:
    save_steps(tmp_path, range(1, 4), worker=worker)
    save_steps(tmp_path, (3,), load=3, worker=worker)
    assert steps(tmp_path) == [3, 2]
    save_steps(tmp_path, range(3, 6), load=3, worker=worker)
    assert steps(tmp_path) == [5, 4]


def test_a_line_of_many_resumes_says_where_its_newest_came_from(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4))
    for _ in range(MAX_ANCESTORS + 2):
        save_steps(tmp_path, (3,), load=3)
    assert steps(tmp_path) == [3, 2]


def test_a_run_whose_parent_was_deleted_keeps_no_more_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4), last=9)
    save_steps(tmp_path, (4,), load=3, last=9)
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.delete(3).result()
    save_steps(tmp_path, (5,), load=4)
    assert steps(tmp_path) == [5, 4]


def test_the_branch_that_was_left_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 6), last=9)
    save_steps(tmp_path, (3,), load=3, last=1)
    assert steps(tmp_path) == [3, 5, 4]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 9), st.sampled_from("abc")), max_size=12, unique_by=lambda r: r[0]
    ),
    st.integers(1, 4),
)
def test_whatever_the_history_the_newest_is_kept(rows: list[tuple[int, int, str]], last: int) -> None:
    found = facts(*[(step, sequence, run, f"s{sequence}") for step, sequence, run in rows])
    doomed = {step.id for step in plan_retention(found, aiockpt.Retention(last=last))}
    if found:
        assert max(found, key=lambda fact: (fact.sequence, fact.step)).id not in doomed
    assert len(lineage(found)) - len(doomed) <= last or not doomed


def test_an_older_generation_is_collected_after_the_new_one_is_committed(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.save(1, state(2)).result()
        ckpt.wait()
    folder = tmp_path / "step-00000001"
    assert [path.name for path in folder.glob("MANIFEST-*")] == ["MANIFEST-2.json"]
    assert len(list(folder.glob("a-*"))) == 1


def dead_attempt(root: Path, *, voted: bool) -> Path:
    """Leave what a job leaves that was killed before, or after, its vote."""
    with small_checkpointer(root) as ckpt:
        ckpt.save(7, state(7)).result()
        ckpt.wait()
    folder = root / "step-00000007"
    (folder / "MANIFEST-1.json").unlink()
    attempt = next(folder.glob("a-*"))
    (attempt / "DECISION.json").unlink()
    if not voted:
        shutil.rmtree(attempt / "r")
    return attempt


def test_a_commit_whose_job_died_after_its_vote_is_rolled_forward(tmp_path: Path) -> None:
    dead_attempt(tmp_path, voted=True)
    target = state(0)
    with small_checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load(target).result()
    assert loaded is not None
    assert (loaded.step, target["value"]) == (7, 7)


def test_an_explicit_step_is_rolled_forward_too(tmp_path: Path) -> None:
    dead_attempt(tmp_path, voted=True)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.describe(7).result().info.step == 7


def test_an_explicit_step_has_its_newest_votes(tmp_path: Path) -> None:
    save_and_keep(tmp_path, 2)
    (tmp_path / "step-00000007" / "MANIFEST-2.json").unlink()  # the job died right before it
    target = state(9)
    with small_checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load(target, 7).result()
    assert loaded is not None
    assert (loaded.generation, target["value"]) == (2, 1)


def test_a_save_without_votes_is_garbage_after_grace(tmp_path: Path) -> None:
    attempt = dead_attempt(tmp_path, voted=False)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.load(state(0)).result() is None
        assert ckpt.prune(aiockpt.Retention()).result().garbage == ()
        assert attempt.exists()
        collected = ckpt.prune(aiockpt.Retention(grace_s=0)).result().garbage
        assert [f"a-{garbage.attempt}" for garbage in collected] == [attempt.name]
        assert not attempt.exists()


FULL = Fault(do="fail", verb="put*", times=None, error=errno.ENOSPC)


def test_a_full_place_is_cleaned_up(tmp_path: Path) -> None:
    attempt = dead_attempt(tmp_path, voted=False)
    save_steps(tmp_path, (1, 2, 3, 9), last=9)
    with small_checkpointer(FaultyBackend(LocalBackend(tmp_path), [FULL])) as ckpt:
        pruned = ckpt.prune(aiockpt.Retention(last=3, grace_s=0)).result()
        assert ([step.step for step in pruned.steps], pruned.left, pruned.failed) == ([1], (), ())
        assert not attempt.parent.exists()
        ckpt.delete(2).result()
    assert steps(tmp_path) == [9, 3]
    assert not (tmp_path / "step-00000002").exists()


class NoRenames(FaultyBackend):
    """An object store: nothing in it can be given another name."""

    move = None  # type: ignore[assignment]


def test_a_step_of_a_full_store_is_deleted(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4), last=9)
    recorded = RecordingBackend(NoRenames(LocalBackend(tmp_path), [FULL]))
    with small_checkpointer(recorded) as ckpt:
        ckpt.delete(2).result()
    assert steps(tmp_path) == [3, 1]
    first = next(done.key for done in recorded.operations if done.verb == "delete")
    assert first.partition(" ")[0].endswith("r/r00000.json")


@pytest.mark.parametrize("committed", [True, False])
def test_what_a_full_disk_collected_is_never_committed(tmp_path: Path, committed: bool) -> None:
    """The collector ends before all is gone: something of the attempt has the name of its decision record."""
    save_steps(tmp_path, (7,))
    folder = tmp_path / "step-00000007"
    (attempt,) = folder.glob("a-*")
    receipt, (data,) = attempt / "r" / "r00000.json", attempt.glob("d/*")
    votes, content = receipt.read_bytes(), data.read_bytes()
    if not committed:
        for path in (folder / "MANIFEST-1.json", attempt / "DECISION.json", receipt):
            path.unlink()
    stays = Fault(do="fail", verb="delete", match="*DECISION.json", times=None)
    with small_checkpointer(FaultyBackend(LocalBackend(tmp_path), [FULL, stays])) as ckpt:
        if committed:
            with pytest.raises(aiockpt.StorageError):
                ckpt.delete(7).result()
        else:
            assert ckpt.prune(aiockpt.Retention(grace_s=0)).result().failed == ("step-00000007",)
    assert (attempt / "DECISION.json").read_bytes() == (votes if committed else content)
    for path, was in ((receipt, votes), (data, content)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(was)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.finish_commits().result() == ()
        assert ckpt.load(state(0)).result() is None
        shutil.rmtree(receipt.parent)
        for path in attempt.rglob("*"):
            os.utime(path, (1e9, 1e9))
        ckpt.prune(aiockpt.Retention(grace_s=0)).result()
    assert not folder.exists()


def test_a_full_disk_takes_no_data_file_from_a_committed_step(tmp_path: Path) -> None:
    """A copy has no receipts: there is nothing to decide, and what its manifest names stays until that is gone."""
    save_steps(tmp_path, range(1, 3))
    for receipts in tmp_path.glob("*/a-*/r"):
        shutil.rmtree(receipts)
    recorded = RecordingBackend(FaultyBackend(LocalBackend(tmp_path), [FULL]))
    with small_checkpointer(recorded) as ckpt:
        ckpt.delete(1).result()
    assert "move" not in {done.verb for done in recorded.operations}
    assert steps(tmp_path) == [2]


class SmallDisk(FaultyBackend):
    """Room for five steps, of which each one that is deleted leaves its own."""

    steps_there = 5

    async def delete(self, keys: Sequence[str]) -> None:
        self.steps_there -= any("MANIFEST" in key for key in keys)
        await super().delete(keys)

    async def space(self) -> Space:
        return Space((5 - self.steps_there) * 1_000_000, 5_000_000)


class FewInodes(SmallDisk):
    """Inodes for five steps, and bytes for any number."""

    async def space(self) -> Space:
        return Space(1 << 40, 1 << 40, (5 - self.steps_there) * 20)


@pytest.mark.parametrize("disk", [SmallDisk, FewInodes])
def test_a_save_finds_room_that_retention_makes_for_it(tmp_path: Path, disk: type[SmallDisk]) -> None:
    save_steps(tmp_path, range(1, 6), last=9)
    with small_checkpointer(disk(LocalBackend(tmp_path)), retention=aiockpt.Retention(last=2)) as ckpt:
        ckpt.load(state(0)).result()
        ckpt.save(6, state(6)).result()
    assert steps(tmp_path) == [6, 5]


class LateDisk(LocalBackend):
    """Counts what was deleted as free once it is asked to settle, as btrfs does."""

    free_bytes = 0

    async def sync(self) -> None:
        self.free_bytes = 1 << 30

    async def space(self) -> Space:
        return Space(self.free_bytes, 1 << 40)


def test_what_was_deleted_counts_as_free_before_a_save_is_refused(tmp_path: Path) -> None:
    with small_checkpointer(LateDisk(tmp_path)) as ckpt:
        ckpt.save(1, state(1)).result()
    assert steps(tmp_path) == [1]


def test_inodes_are_counted_before_a_save_as_bytes_are(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 6), last=9)
    before = sorted(tmp_path.rglob("*"))
    with small_checkpointer(FewInodes(LocalBackend(tmp_path))) as ckpt:
        ckpt.load(state(0)).result()
        with pytest.raises(
            aiockpt.StorageFullError, match=r"step 6 makes \d+ files and folders, .* 0 inodes free \(df -i\)"
        ):
            ckpt.save(6, state(6)).result()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_first_step_makes_the_counted_files(tmp_path: Path) -> None:
    save_steps(tmp_path, (1,))
    made = len(list((tmp_path / "step-00000001").rglob("*"))) + 1
    (data,) = (tmp_path / "step-00000001").glob("a-*/d")
    assert made <= len(list(data.iterdir())) + RECORD_FILES


def test_retention_makes_room_for_a_save_that_writes(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 6), last=9)
    full = FaultyBackend(LocalBackend(tmp_path), [Fault(do="fail", verb="create", error=errno.EDQUOT)])
    with small_checkpointer(full, retention=aiockpt.Retention(last=2), on_error="warn") as ckpt:
        ckpt.load(state(0)).result()
        with pytest.raises(aiockpt.StorageError):
            ckpt.save(6, state(6)).result()
        assert steps(tmp_path) == [5, 4]
        ckpt.save(6, state(6)).result()
    assert steps(tmp_path) == [6, 5]


def test_a_collected_attempt_can_not_be_committed_any_more(tmp_path: Path) -> None:
    attempt = dead_attempt(tmp_path, voted=True)
    (attempt / "DECISION.json").write_text('{"decision":"collect","attempt":"x","write_id":"y"}')
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.finish_commits().result() == ()
        assert ckpt.load(state(0)).result() is None


def test_a_receipt_with_a_flipped_bit_is_no_vote(tmp_path: Path) -> None:
    attempt = dead_attempt(tmp_path, voted=True)
    receipt = attempt / "r" / "r00000.json"
    good = receipt.read_bytes()
    for position in range(0, len(good), 41):
        bad = bytearray(good)
        bad[position] ^= 4
        receipt.write_bytes(bad)
        with small_checkpointer(tmp_path) as ckpt:
            assert ckpt.finish_commits().result() == ()


def test_of_two_savers_one_wins(tmp_path: Path) -> None:
    """The second saver notes the generation, then the first commits it."""
    with small_checkpointer(tmp_path) as rival:
        committed: list[int] = []

        class Interloper(LocalBackend):
            async def create(self, key: str, size: int):  # type: ignore[no-untyped-def]
                if not committed:
                    import anyio.to_thread

                    committed.append(1)
                    await anyio.to_thread.run_sync(lambda: rival.save(1, state(1)).result())
                return await super().create(key, size)

        with small_checkpointer(Interloper(tmp_path)) as ckpt:
            with pytest.raises(aiockpt.CommitConflictError, match=r"by another job.*give it a place of its own"):
                ckpt.save(1, state(2)).result()
            target = state(0)
            ckpt.load(target).result()
            assert target["value"] == 1
            assert ckpt.save(1, state(3)).result().generation == 2


def test_deleting_a_step_removes_every_trace(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).result()
        ckpt.save(2, STATE).result()
        ckpt.delete(1).result()
        with pytest.raises(aiockpt.StepNotFoundError, match="it has: 2"):
            ckpt.load(state(0), 1).result()
    assert not (tmp_path / "step-00000001").exists()


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_saves_of_one_step_are_generations_in_order(tmp_path: Path, worker: Worker, snapshot: Snapshot) -> None:
    with aiockpt.Checkpointer(
        tmp_path, limits=aiockpt.Limits(io=SMALL, max_in_flight=3), worker=worker, snapshot=snapshot
    ) as ckpt:
        saves = [ckpt.save(10, state(value)) for value in range(3)]
        assert [save.result().generation for save in saves] == [1, 2, 3]
    assert value_in(tmp_path) == 2


def test_a_second_save_of_a_step_may_be_skipped(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path, on_exists="skip") as ckpt:
        first, second = ckpt.save(10, state(1)), ckpt.save(10, state(2))
        assert not first.result().existed
        assert second.result().existed


def test_a_save_whose_step_failed_before_is_made_all_the_same(tmp_path: Path) -> None:
    stuck = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="hang", verb="create", match="*")])
    with small_checkpointer(stuck) as ckpt:
        first, second = ckpt.save(10, state(1)), ckpt.save(10, state(2))
        until(lambda: stuck.schedule.fired, "the first save's file")
        first.cancel()
        assert second.result().generation == 1


def test_deleting_a_step_asks_little_of_the_place(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).result()
    recorded = RecordingBackend(LocalBackend(str(tmp_path)))
    with small_checkpointer(recorded) as ckpt:
        ckpt.delete(1).result()
    asked = [done.verb for done in recorded.operations]
    found = ["list", "get"]  # which copies there are
    hint = ["get", "delete"]  # which named it
    assert asked == [*found, "put", "delete", "list", "list", "delete", "delete", "list", *hint, "close"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_ours_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "readme.txt").write_text("x")
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.load(state(0)).result() is None
        ckpt.save(1, STATE).result()
    assert steps(tmp_path) == [1]
    assert attempt_folder("a", "0" * 12) == "a/a-000000000000"


def run_with_metrics(root: Path, values: Sequence[float], name: str = "acc") -> None:
    with small_checkpointer(root) as ckpt:
        for step, value in enumerate(values):
            ckpt.save(step, state(step), metrics={name: value}).result()


def test_the_best_step_is_loaded_and_of_equals_the_oldest(tmp_path: Path) -> None:
    run_with_metrics(tmp_path, [0.1, 0.9, float("nan"), 0.9, float("inf"), 0.2])
    run_with_metrics(tmp_path / "loss", [2.0, 1.0, 3.0], "loss")
    live = state(-1)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.best("acc").result() == 1
        assert ckpt.best(Best("acc", mode="min")).result() == 0
        loaded = ckpt.load(live, best="acc").result()
        assert (loaded and loaded.step, live["value"]) == (1, 1)
        loaded = ckpt.load(live, best="loss", fork=tmp_path / "loss").result()
        assert loaded
        assert loaded.step == 5, "its own steps come first"
    with small_checkpointer(tmp_path / "new") as ckpt:
        assert ckpt.best("acc").result() is None
        assert ckpt.load(live, best="acc").result() is None
        loaded = ckpt.load(live, best="loss", fork=tmp_path / "loss").result()
        assert (loaded and loaded.step, live["value"]) == (1, 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ckpt: ckpt.best("accuracy").result(), aiockpt.StepNotFoundError, "the metrics there are: acc"),
        (lambda ckpt: ckpt.best("kappa"), aiockpt.UsageError, r"aiockpt\.Best\('kappa', mode='max'\)"),
        (lambda ckpt: ckpt.best(3), aiockpt.UsageError, r"best\(metric=3\): give the name"),
        (lambda ckpt: ckpt.load({}, 0, best="acc"), aiockpt.UsageError, "give one of them"),
        (lambda ckpt: ckpt.read(0, None), aiockpt.UsageError, r"read\(name=None\): give the name of a tensor"),
    ],
)
def test_a_best_step_or_name_that_is_not_known_is_refused(tmp_path: Path, call: Any, error: Any, message: str) -> None:
    run_with_metrics(tmp_path, [0.5])
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(error, match=message):
        call(ckpt)


def test_the_best_step_is_of_the_current_branch_and_sound(tmp_path: Path) -> None:
    run_with_metrics(tmp_path, [0.1, 0.8, 0.7, 0.9])
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.load(state(0), 2).result()
        ckpt.save(4, state(4), metrics={"acc": 0.2}).result()
        assert ckpt.best("acc").result() == 1
    (tmp_path / "step-00000001" / "MANIFEST-1.json").write_bytes(b"{}")
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load(state(0), best="acc").result()
        assert loaded
        assert (loaded.step, [name for name, _ in loaded.skipped]) == (2, ["step-00000001"])


def test_an_outage_is_no_reason_for_the_second_best(tmp_path: Path) -> None:
    run_with_metrics(tmp_path, [0.1, 0.9, 0.2])
    broken = Fault(do="fail", verb="get", match="step-00000001/MANIFEST*", error=errno.EMFILE, times=None)
    backend = FaultyBackend(LocalBackend(str(tmp_path)), [broken])
    with small_checkpointer(backend) as ckpt, pytest.raises(aiockpt.StorageError):
        ckpt.best("acc").result()


def test_a_rule_of_retention_says_which_values_are_good(tmp_path: Path) -> None:
    run_with_metrics(tmp_path, [1.0, 3.0, 2.0], "kappa")
    rules = aiockpt.Retention(last=9, best=Best("kappa", mode="max"))
    with aiockpt.Checkpointer(tmp_path, retention=rules) as ckpt:
        assert ckpt.best("kappa").result() == 1
