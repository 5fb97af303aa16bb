"""Is a damaged step whole again wherever a good copy of what is bad exists, and never less than it was?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from typer.testing import CliRunner

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError
from aiockpt.events import StepDamaged, StepRepaired
from aiockpt.places.scrub import scrubber
from aiockpt.runtime.world import OsFiles, World
from aiockpt.session.wiring import start_scrubber
from aiockpt.tools.cli.main import app
from tests.small_run import SMALL
from tests.watch import Watch, until

BLOCK = 4096
IO = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=1 << 16, block_bytes=BLOCK, file_bytes=40_000, read_bytes=1 << 14)


def state(fill: bool = False) -> dict[str, Any]:
    """Return a state of several data files; zeroed, to be filled."""
    return {name: torch.zeros(8000) if fill else torch.arange(8000.0) + start for start, name in enumerate("abcd")}


def save(root: Path, *steps: int) -> None:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=IO)) as ckpt:
        for step in steps:
            ckpt.save(step, state()).result()


def copy(root: Path, to: Path) -> None:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=IO)) as ckpt:
        for info in ckpt.steps().result():
            ckpt.copy(info.step, to).result()


def data_files(root: Path, step: int = 1) -> list[Path]:
    return sorted(root.glob(f"step-{step:08}/a-*/d/*"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def is_whole(root: Path, step: int = 1) -> bool:
    """Return whether a new process reads all of the step as it was saved."""
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=IO)) as ckpt:
        try:
            ckpt.verify(step).result()
        except aiockpt.CorruptionError:
            return False
        into = state(fill=True)
        ckpt.load(into, step).result()
    return all(torch.equal(into[name], value) for name, value in state().items())


def repair(root: Path, source: Path | None, step: int = 1) -> Any:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=IO)) as ckpt:
        (done,) = ckpt.repair(step, source).result()
    return done


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two places with the same steps 1 and 2."""
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, 1, 2)
    copy(here, there)
    return here, there


def test_a_flipped_bit_a_short_file_and_a_missing_one_are_mended_and_the_rest_is_left(
    places: tuple[Path, Path],
) -> None:
    here, there = places
    files = data_files(here)
    assert len(files) >= 4
    flip(files[0], 10_000)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    untouched = files[3].stat()
    assert not is_whole(here)
    done = repair(here, there)
    assert (done.step, done.generation, done.left) == (1, 2, "")
    assert sorted(done.files) == [f"step-00000001/{path.relative_to(here / 'step-00000001')}" for path in files[:3]]
    assert is_whole(here)
    assert files[3].stat().st_mtime_ns == untouched.st_mtime_ns, "what was whole stays where it is"
    assert len(data_files(here)) == len(files), "what was bad is gone"
    assert [path.name for path in here.glob("step-00000001/MANIFEST*")] == ["MANIFEST-2.json"]
    assert (here / "step-00000001" / "VERIFIED-2.json").exists()


def test_a_step_that_is_whole_is_left_as_it_is_and_marked(places: tuple[Path, Path]) -> None:
    here, _ = places
    before = {path: path.stat().st_mtime_ns for path in data_files(here)}
    done = repair(here, None)
    assert (done.files, done.generation, done.bytes, done.left) == ((), 1, 0, "")
    assert {path: path.stat().st_mtime_ns for path in data_files(here)} == before
    assert (here / "step-00000001" / "VERIFIED-1.json").exists()


def test_each_copy_may_lack_another_block(places: tuple[Path, Path]) -> None:
    here, there = places
    flip(data_files(here)[0], 9000)
    flip(data_files(there)[0], 9000 + BLOCK)
    assert repair(here, there).left == ""
    assert is_whole(here)


def test_what_no_copy_has_is_told_and_marked_and_nothing_is_changed(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = places
    flip(data_files(here)[0], 9000)
    for place in places:
        flip(data_files(place)[1], 9000)
    before = {path: path.read_bytes() for path in data_files(here)}
    watch = Watch()
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO), observers=[watch]) as ckpt:
        (done,) = ckpt.repair(1, there).result()
    assert done.files == ()
    assert "is not what was saved" in done.left
    assert {path: path.read_bytes() for path in data_files(here)} == before
    assert (here / "step-00000001" / "DAMAGED-1.json").exists()
    assert [type(one) for one in watch.events if isinstance(one, StepDamaged)] == [StepDamaged]
    assert "no copy has what is bad" in caplog.text


def test_a_manifest_that_no_reader_believes_is_replaced_with_its_step(places: tuple[Path, Path]) -> None:
    here, there = places
    manifest = here / "step-00000001" / "MANIFEST-1.json"
    flip(manifest, manifest.stat().st_size // 2)
    done = repair(here, there)
    assert (done.generation, done.left) == (2, "")
    assert is_whole(here)
    assert repair(here, None, step=2).left == ""


def test_without_a_copy_a_bad_manifest_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "MANIFEST-1.json"
    flip(manifest, manifest.stat().st_size // 2)
    done = repair(tmp_path, None)
    assert "MANIFEST-1.json" in done.left


def test_another_save_of_that_number_is_no_copy(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    save(tmp_path / "there", 1)
    flip(data_files(tmp_path / "here")[0], 9000)
    done = repair(tmp_path / "here", tmp_path / "there")
    assert done.left
    assert not is_whole(tmp_path / "here")


def test_tiers_mend_each_other(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    watch = Watch()
    with aiockpt.Checkpointer(
        [aiockpt.Tier(near), aiockpt.Tier(far)], limits=aiockpt.Limits(io=IO), observers=[watch]
    ) as ckpt:
        ckpt.save(1, state()).committed(far).result()
        flip(data_files(near)[0], 9000)
        flip(data_files(far)[1], 9000)
        done = ckpt.repair().result()
    assert [(one.url, len(one.files), one.left) for one in done] == [
        (f"file://{near}", 1, ""),
        (f"file://{far}", 1, ""),
    ]
    assert is_whole(near)
    assert is_whole(far)
    assert len([one for one in watch.events if isinstance(one, StepRepaired)]) == 2


def test_an_unknown_step_is_refused_and_a_place_that_is_away_has_no_copy(places: tuple[Path, Path]) -> None:
    here, there = places
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO)) as ckpt:
        with pytest.raises(aiockpt.StepNotFoundError):
            ckpt.repair(9).result()
        flip(data_files(here)[0], 9000)
        (done,) = ckpt.repair(1, there / "nothing here").result()
        assert done.left


class BadDisk(OsFiles):
    """A disk on which what is written from now on cannot be read back."""

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if offset == 0 and bytes(data[2000:2010]) != bytes(10):
            data = bytearray(data)
            data[2000] ^= 1
        return super().pwrite(fd, memoryview(data), offset)


def test_what_cannot_be_read_back_changes_nothing(places: tuple[Path, Path]) -> None:
    here, there = places
    flip(data_files(here)[0], 9000)
    before = sorted(here.glob("step-00000001/MANIFEST*"))
    place = LocalBackend(here, world=World(files=BadDisk()), direct=False)
    with (
        aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO)) as ckpt,
        pytest.raises(StorageError, match="cannot be read back; nothing was changed"),
    ):
        ckpt.repair(1, there).result()
    assert sorted(here.glob("step-00000001/MANIFEST*")) == before


KILLED = """
import os, signal, sys
import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.forwarding_files import ForwardingFiles

class Dies(ForwardingFiles):
    left = int(sys.argv[3])

    def forward(self, call):
        self.left -= call.verb not in ("preadv", "fstat", "lstat", "listdir", "fadvise")
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call()

with aiockpt.Checkpointer(LocalBackend(sys.argv[1], world=World(files=Dies(OsFiles())))) as ckpt:
    ckpt.repair(1, sys.argv[2]).result()
"""


@pytest.mark.parametrize("call", [40, 97, 120])
def test_killed_at_any_call_the_step_is_as_it_was_or_whole_and_another_repair_ends_it(
    places: tuple[Path, Path], call: int
) -> None:
    """All 133 calls were tried by hand: before, at and after the commit of the new generation are these three."""
    here, there = places
    for file in data_files(here)[:2]:
        flip(file, 9000)
    good = {path.name for path in data_files(here)[2:]}
    ended = subprocess.run([sys.executable, "-c", KILLED, here, there, str(call)], check=False, timeout=250)
    assert ended.returncode == -signal.SIGKILL
    assert good <= {path.name for path in data_files(here)}
    assert repair(here, there).left == ""
    assert is_whole(here)
    for lease in here.glob("step-*/lease-*"):
        os.utime(lease, (0, 0))  # of the one that was killed: it counts for six hours
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO)) as ckpt:
        ckpt.prune(aiockpt.Retention()).result()
    assert is_whole(here)
    assert len(data_files(here)) == len(data_files(there)), "nothing is left over"


DAMAGE = strategies.tuples(strategies.booleans(), strategies.integers(0, 3), strategies.integers(0, 7))
"""Whether in the other copy, in which file, in which block."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strategies.lists(
        strategies.tuples(strategies.booleans(), strategies.integers(0, 3), strategies.integers(0, 7)), max_size=9
    )
)
def test_whatever_is_bad_is_mended_where_some_copy_of_each_block_is_good(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[bool, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("repair")
    here, there = root / "here", root / "there"
    save(here, 1)
    copy(here, there)
    bad: set[tuple[int, int]] = set()
    for elsewhere, file, block in damage:
        if (file, block) in bad:
            continue  # one copy of each block stays good
        bad.add((file, block))
        target = data_files(there if elsewhere else here)[file]
        flip(target, min(block * BLOCK + 17, target.stat().st_size - 1))
    assert repair(here, there).left == ""
    assert repair(there, here).left == ""
    assert is_whole(here)
    assert is_whole(there)
    shutil.rmtree(root)


def test_the_command_mends_all_steps_from_another_place(places: tuple[Path, Path]) -> None:
    here, there = places
    flip(data_files(here, 1)[0], 9000)
    run = CliRunner().invoke(app, ["verify", str(here), "--all"])
    assert run.exit_code == 1
    run = CliRunner().invoke(app, ["verify", str(here), "--all", "--repair", str(there)])
    assert run.exit_code == 0, run.output
    assert "was damaged: 1 file rewritten" in run.output
    assert is_whole(here)
    flip(data_files(here, 2)[0], 9000)
    flip(data_files(there, 2)[0], 9000)
    run = CliRunner().invoke(app, ["verify", str(here), "--all", "--repair", str(there), "--json"])
    assert run.exit_code == 1
    found = {one["step"]: one["valid"] for one in json.loads(run.output)}
    assert found == {1: True, 2: False}


# ---------------------------------------------------------------------- in the background of a run


OFTEN = aiockpt.Scrub(every_h=0.2 / 3600, bandwidth=None)


def test_a_run_mends_its_tiers_by_itself(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with aiockpt.Checkpointer(
        [aiockpt.Tier(near), aiockpt.Tier(far)], limits=aiockpt.Limits(io=IO), scrub=OFTEN
    ) as ckpt:
        ckpt.save(1, state()).committed(far).result()
        flip(data_files(near)[0], 9000)
        until(lambda: (near / "step-00000001" / "MANIFEST-2.json").exists(), "it was mended")
    assert is_whole(near)


def test_what_cannot_be_mended_is_told_again_and_again_but_never_raised(tmp_path: Path) -> None:
    watch = Watch()
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=IO), scrub=OFTEN, observers=[watch]) as ckpt:
        ckpt.save(1, state()).result()
        flip(data_files(tmp_path)[0], 9000)
        until(lambda: len([one for one in watch.events if isinstance(one, StepDamaged)]) >= 2, "it was told twice")
        ckpt.save(2, state()).result()
        into = state(fill=True)
        loaded = ckpt.load(into).result()
        assert loaded is not None
        assert loaded.step == 2


def test_what_was_read_lately_is_not_read_again_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "LONGEST_POLL_S", 0.01)
    save(tmp_path, 1)
    repair(tmp_path, None)
    mark = tmp_path / "step-00000001" / "VERIFIED-1.json"
    before = mark.stat().st_mtime_ns
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=IO), scrub=aiockpt.Scrub()) as ckpt:
        ckpt.save(2, state()).result()
        until(lambda: (tmp_path / "step-00000002" / "VERIFIED-1.json").exists(), "what was never read is read")
        ckpt.save(3, state()).result()
        until(lambda: (tmp_path / "step-00000003" / "VERIFIED-1.json").exists(), "it looks again and again")
    assert mark.stat().st_mtime_ns == before


def test_memory_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "LONGEST_POLL_S", 0.01)
    memory = MemoryBackend()
    with aiockpt.Checkpointer(
        [aiockpt.Tier(memory), aiockpt.Tier(tmp_path)], limits=aiockpt.Limits(io=IO), scrub=aiockpt.Scrub()
    ) as ckpt:
        ckpt.save(1, state()).committed(tmp_path).result()
        until(lambda: (tmp_path / "step-00000001" / "VERIFIED-1.json").exists(), "the disk is")
        assert not any("VERIFIED" in stat.key for stat in anyio.run(memory.list, "step-00000001").objects)


async def test_nothing_is_read_while_a_save_is_under_way() -> None:
    class Busy:
        busy_attempts: ClassVar[set[str]] = {"3f9c21d07b44"}
        world = World()

    engine: Any = Busy()
    pace = scrubber.PatientPace(None, engine)
    with anyio.move_on_after(0.2) as waited:
        await pace.throttle(1)
    assert waited.cancelled_caught
    engine.busy_attempts.clear()
    with anyio.fail_after(250):
        await pace.throttle(1)


def test_only_the_first_rank_reads() -> None:
    nobody: Any = None
    meeting: Any = object()
    assert start_scrubber(aiockpt.Scrub(), nobody, nobody, aiockpt.Ranks(1, 2, meeting))() is None


class Flaky(LocalBackend):
    """A place whose data files come damaged, or not at all, when they are read for the first time.

    Attributes:
        leases: of readers, that lay beside the step when a data file was opened.
    """

    def __init__(self, root: Path, error: Exception | None = None) -> None:
        super().__init__(root)
        self.path = root
        self.error = error
        self.flips = 1
        self.leases = 0

    async def open(self, key: str) -> Any:
        self.leases += len(list((self.path / key).parents[2].glob("lease-*")))
        if self.error is not None:
            raise self.error
        return _FlakyReader(self, await super().open(key))


class _FlakyReader:
    def __init__(self, place: Flaky, inner: Any) -> None:
        self._place, self._inner = place, inner
        self.size, self.close = inner.size, inner.close

    async def read(self, offset: int, into: Any, seen: Any = None) -> None:
        await self._inner.read(offset, into)
        if self._place.flips:
            self._place.flips -= 1
            into[0][0] ^= 1
        for view in into:
            seen(view)


def test_what_was_damaged_on_its_way_is_read_once_more_and_the_step_is_leased_meanwhile(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = Flaky(tmp_path)
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO)) as ckpt:
        (done,) = ckpt.repair(1).result()
    assert (done.files, done.left, place.flips) == ((), "", 0)
    assert place.leases == len(data_files(tmp_path))


class DeletedAtTheRead(LocalBackend):
    """A place where another process deletes the step, whatever lease there is, when its data are read or written.

    Attributes:
        at: "open" or "create".
    """

    def __init__(self, root: Path, at: str) -> None:
        super().__init__(root)
        self.at, self.path = at, root

    async def open(self, key: str) -> Any:
        await self._delete_it("open")
        return await super().open(key)

    async def create(self, key: str, size: int) -> Any:
        upload = await super().create(key, size)
        await self._delete_it("create")
        return upload

    async def _delete_it(self, at: str) -> None:
        if self.at == at:
            self.at = ""
            await anyio.to_thread.run_sync(self._delete_elsewhere)

    def _delete_elsewhere(self) -> None:
        with aiockpt.Checkpointer(self.path, limits=aiockpt.Limits(io=IO)) as other:
            other.delete(1).result()


@pytest.mark.parametrize("at", ["open", "create"])
def test_a_step_that_is_deleted_meanwhile_is_not_damaged_and_does_not_come_back(
    places: tuple[Path, Path], at: str
) -> None:
    here, there = places
    flip(data_files(here)[0], 9000)
    with (
        aiockpt.Checkpointer(DeletedAtTheRead(here, at), limits=aiockpt.Limits(io=IO)) as ckpt,
        pytest.raises(aiockpt.StepNotFoundError, match="deleted meanwhile"),
    ):
        ckpt.repair(1, there).result()
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO)) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [2]
    assert data_files(here) == []


def test_retention_and_scrub_do_not_see_each_others_work_as_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    watch = Watch()
    always = aiockpt.Scrub(every_h=0.01 / 3600, bandwidth=None)
    rules = aiockpt.Retention(last=1)
    tiers = [aiockpt.Tier(near), aiockpt.Tier(far)]
    with aiockpt.Checkpointer(
        tiers, limits=aiockpt.Limits(io=IO), scrub=always, retention=rules, observers=[watch]
    ) as ckpt:
        for step in range(40):
            ckpt.save(step, state()).committed(far).result()
    assert not [one for one in watch.events if isinstance(one, StepRepaired | StepDamaged)]
    assert "damaged" not in caplog.text
    for place in (near, far):
        with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO)) as ckpt:
            assert all(is_whole(place, info.step) for info in ckpt.steps().result()), (
                "what was being read is left whole"
            )
            ckpt.load(state(fill=True)).result()
            ckpt.prune(rules).result()
        assert [path.name for path in place.glob("step-*")] == ["step-00000039"]


class Unwritable(LocalBackend):
    async def create(self, key: str, size: int) -> Any:
        raise StorageError("it cannot be written now", retryable=False)


def test_an_outage_is_no_damage(places: tuple[Path, Path]) -> None:
    here, there = places
    outage = StorageError("not now", retryable=False)
    with (
        aiockpt.Checkpointer(Flaky(here, outage), limits=aiockpt.Limits(io=IO)) as ckpt,
        pytest.raises(StorageError, match="not now"),
    ):
        ckpt.repair(1, there).result()
    flip(data_files(here)[0], 9000)
    with (
        aiockpt.Checkpointer(Unwritable(here), limits=aiockpt.Limits(io=IO)) as ckpt,
        pytest.raises(StorageError, match="cannot be written"),
    ):
        ckpt.repair(1, there).result()
    assert list(here.glob("step-*/DAMAGED*")) == []


def test_a_source_that_is_away_has_no_copy(places: tuple[Path, Path]) -> None:
    here, _ = places

    class Away(LocalBackend):
        async def list(self, prefix: str) -> Any:
            raise StorageError("not now", retryable=False)

    flip(data_files(here)[0], 9000)
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO)) as ckpt:
        (done,) = ckpt.repair(1, Away(here)).result()
    assert done.left


def test_a_file_that_is_longer_than_it_was_is_written_anew(places: tuple[Path, Path]) -> None:
    here, there = places
    with data_files(here)[0].open("ab") as file:
        file.write(b"more")
    assert len(repair(here, there).files) == 1
    assert is_whole(here)


def test_a_step_that_cannot_be_read_now_holds_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Partly(LocalBackend):
        async def open(self, key: str) -> Any:
            if key.startswith("step-00000002"):
                raise StorageError("not now", retryable=False)
            return await super().open(key)

    save(tmp_path, 1, 2)
    with aiockpt.Checkpointer(Partly(tmp_path), limits=aiockpt.Limits(io=IO), scrub=OFTEN):
        until(lambda: (tmp_path / "step-00000001" / "VERIFIED-1.json").exists(), "the other one is read")
    assert "step-00000002" in caplog.text
    assert "cannot be read again now" in caplog.text


def test_what_a_repair_that_died_has_left_is_removed(places: tuple[Path, Path]) -> None:
    here, there = places
    file = data_files(here)[0]
    stray = file.with_name(f"{file.stem}-1a2b3c4d.safetensors")
    stray.write_bytes(b"half a file")
    flip(file, 9000)
    assert repair(here, there).left == ""
    assert not stray.exists()


def test_a_copy_that_was_thinned_has_other_files_and_is_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(50)).sum().backward()
    optimizer.step()
    here, there = tmp_path / "here", tmp_path / "there"
    with aiockpt.Checkpointer(here, limits=aiockpt.Limits(io=IO)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model, "optimizer": optimizer}).result()
            ckpt.copy(step, there).result()
    with aiockpt.Checkpointer(there, limits=aiockpt.Limits(io=IO)) as ckpt:
        assert ckpt.prune(aiockpt.Retention(last=2, optimizer=1)).result().thinned
    flip(data_files(here)[-1], 5000)
    assert repair(here, there).left


def test_a_place_that_cannot_be_listed_now_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Away(LocalBackend):
        away = False

        async def list(self, prefix: str) -> Any:
            if self.away:
                raise StorageError("not now", retryable=False)
            return await super().list(prefix)

    place = Away(tmp_path)
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO), scrub=OFTEN) as ckpt:
        ckpt.save(1, state()).result()
        place.away = True
        until(lambda: "cannot be listed now" in caplog.text, "it was told")
        place.away = False
        until(lambda: (tmp_path / "step-00000001" / "VERIFIED-1.json").exists(), "it was read")


@pytest.mark.parametrize("given", [{"every_h": 0}, {"bandwidth": -1}, {"every_h": "daily"}])
def test_options_that_cannot_be_meant_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(aiockpt.UsageError, match=next(iter(given))):
        aiockpt.Scrub(**given)


def test_a_default_run_is_not_scrubbed(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(1, state()).result()
    assert list(tmp_path.glob("step-*/VERIFIED*")) == []
