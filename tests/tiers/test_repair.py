"""Damaged steps, whole again wherever a good copy of what is bad exists, and never less than they were."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from typer.testing import CliRunner

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import StorageError
from aiockpt.events import StepDamaged, StepRepaired
from aiockpt.runtime.world import OsFiles, World
from aiockpt.tools.cli.main import app
from tests.run_python import run_python
from tests.watch import Watch

BLOCK = 4096
IO = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=1 << 16, block_bytes=BLOCK, file_bytes=40_000, read_bytes=1 << 14)


def open_place(place: Any, **options: Any) -> aiockpt.Checkpointer:
    return aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO), **options)


def state(fill: bool = False) -> dict[str, Any]:
    """Return a state of several data files; zeroed, to be filled."""
    return {name: torch.zeros(8000) if fill else torch.arange(8000.0) + start for start, name in enumerate("abcd")}


def save(root: Path, *steps: int) -> None:
    with open_place(root) as ckpt:
        for step in steps:
            ckpt.save(step, state()).result()


def copy(root: Path, to: Path) -> None:
    with open_place(root) as ckpt:
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
    with open_place(root) as ckpt:
        try:
            ckpt.verify(step).result()
        except aiockpt.CorruptionError:
            return False
        into = state(fill=True)
        ckpt.load(into, step).result()
    return all(torch.equal(into[name], value) for name, value in state().items())


def repair(root: Path, source: Path | None, step: int = 1) -> Any:
    with open_place(root) as ckpt:
        (done,) = ckpt.repair(step, source).result()
    return done


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A place with the steps 1 and 2."""
    save(tmp_path / "here", 1, 2)
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path, here: Path) -> Path:
    """A place with copies of them."""
    copy(here, tmp_path / "there")
    return tmp_path / "there"


def test_flipped_short_and_missing_files_are_mended(here: Path, there: Path) -> None:
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


def test_a_whole_step_is_left_and_marked(here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in data_files(here)}
    done = repair(here, None)
    assert (done.files, done.generation, done.bytes, done.left) == ((), 1, 0, "")
    assert {path: path.stat().st_mtime_ns for path in data_files(here)} == before
    assert (here / "step-00000001" / "VERIFIED-1.json").exists()


def test_each_copy_may_lack_another_block(here: Path, there: Path) -> None:
    flip(data_files(here)[0], 9000)
    flip(data_files(there)[0], 9000 + BLOCK)
    assert repair(here, there).left == ""
    assert is_whole(here)


def test_what_no_copy_has_is_told_and_marked(here: Path, there: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(data_files(here)[0], 9000)
    for place in (here, there):
        flip(data_files(place)[1], 9000)
    before = {path: path.read_bytes() for path in data_files(here)}
    watch = Watch()
    with open_place(here, observers=[watch]) as ckpt:
        (done,) = ckpt.repair(1, there).result()
    assert done.files == ()
    assert "is not what was saved" in done.left
    assert {path: path.read_bytes() for path in data_files(here)} == before
    assert (here / "step-00000001" / "DAMAGED-1.json").exists()
    assert [type(one) for one in watch.events if isinstance(one, StepDamaged)] == [StepDamaged]
    assert "no copy has what is bad" in caplog.text


def test_a_manifest_that_no_reader_believes_is_replaced_with_its_step(here: Path, there: Path) -> None:
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


def test_tiers_mend_each_other(near: Path, far: Path) -> None:
    watch = Watch()
    with open_place([near, far], observers=[watch]) as ckpt:
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


def test_an_unknown_step_is_refused_by_a_repair(here: Path, there: Path) -> None:
    with open_place(here) as ckpt:
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


def test_what_cannot_be_read_back_changes_nothing(here: Path, there: Path) -> None:
    flip(data_files(here)[0], 9000)
    before = sorted(here.glob("step-00000001/MANIFEST*"))
    place = LocalBackend(here, world=World(files=BadDisk()), direct=False)
    with open_place(place) as ckpt, pytest.raises(StorageError, match="cannot be read back; nothing was changed"):
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
def test_killed_at_any_call_a_repair_can_be_ended(here: Path, there: Path, call: int) -> None:
    """All 133 calls were tried by hand: before, at and after the commit of the new generation are these three."""
    for file in data_files(here)[:2]:
        flip(file, 9000)
    good = {path.name for path in data_files(here)[2:]}
    run_python("-c", KILLED, here, there, call, status=-signal.SIGKILL)
    assert good <= {path.name for path in data_files(here)}
    assert repair(here, there).left == ""
    assert is_whole(here)
    for lease in here.glob("step-*/lease-*"):
        os.utime(lease, (0, 0))  # of the one that was killed: it counts for six hours
    with open_place(here) as ckpt:
        ckpt.prune(aiockpt.Retention()).result()
    assert is_whole(here)
    assert len(data_files(here)) == len(data_files(there)), "nothing is left over"


DAMAGE = strategies.tuples(strategies.booleans(), strategies.integers(0, 3), strategies.integers(0, 7))
"""Whether in the other copy, in which file, in which block."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.lists(DAMAGE, max_size=9))
def test_whatever_some_copy_has_is_mended(
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


def test_the_command_mends_all_steps_from_another_place(here: Path, there: Path) -> None:
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


def test_what_was_damaged_on_its_way_is_read_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = Flaky(tmp_path)
    with open_place(place) as ckpt:
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
        with open_place(self.path) as other:
            other.delete(1).result()


@pytest.mark.parametrize("at", ["open", "create"])
def test_a_step_deleted_meanwhile_does_not_come_back(here: Path, there: Path, at: str) -> None:
    flip(data_files(here)[0], 9000)
    with (
        open_place(DeletedAtTheRead(here, at)) as ckpt,
        pytest.raises(aiockpt.StepNotFoundError, match="deleted meanwhile"),
    ):
        ckpt.repair(1, there).result()
    with open_place(here) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [2]
    assert data_files(here) == []


def test_retention_and_repair_bear_each_other(near: Path, far: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    rules = aiockpt.Retention(last=1)
    with open_place([near, far], retention=rules, observers=[watch]) as ckpt:
        for step in range(40):
            ckpt.save(step, state()).committed(far).result()
            reading = ckpt.repair(step)  # of which the next save's retention may remove the step
            if step % 2:
                with contextlib.suppress(aiockpt.StepNotFoundError):
                    reading.result()
    assert not [one for one in watch.events if isinstance(one, StepRepaired | StepDamaged)]
    assert "damaged" not in caplog.text
    for place in (near, far):
        with open_place(place) as ckpt:
            assert all(is_whole(place, info.step) for info in ckpt.steps().result()), (
                "what was being read is left whole"
            )
            ckpt.load(state(fill=True)).result()
            ckpt.prune(rules).result()
        assert [path.name for path in place.glob("step-*")] == ["step-00000039"]


class Unwritable(LocalBackend):
    async def create(self, key: str, size: int) -> Any:
        raise StorageError("it cannot be written now", retryable=False)


def test_an_outage_is_no_damage(here: Path, there: Path) -> None:
    outage = StorageError("not now", retryable=False)
    with open_place(Flaky(here, outage)) as ckpt, pytest.raises(StorageError, match="not now"):
        ckpt.repair(1, there).result()
    flip(data_files(here)[0], 9000)
    with open_place(Unwritable(here)) as ckpt, pytest.raises(StorageError, match="cannot be written"):
        ckpt.repair(1, there).result()
    assert list(here.glob("step-*/DAMAGED*")) == []


def test_a_source_that_is_away_has_no_copy(here: Path) -> None:

    class Away(LocalBackend):
        async def list(self, prefix: str) -> Any:
            raise StorageError("not now", retryable=False)

    flip(data_files(here)[0], 9000)
    with open_place(here) as ckpt:
        (done,) = ckpt.repair(1, Away(here)).result()
    assert done.left


def test_a_file_that_is_longer_than_it_was_is_written_anew(here: Path, there: Path) -> None:
    with data_files(here)[0].open("ab") as file:
        file.write(b"more")
    assert len(repair(here, there).files) == 1
    assert is_whole(here)


def test_what_a_repair_that_died_has_left_is_removed(here: Path, there: Path) -> None:
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
    with open_place(here) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model, "optimizer": optimizer}).result()
            ckpt.copy(step, there).result()
    with open_place(there) as ckpt:
        assert ckpt.prune(aiockpt.Retention(last=2, optimizer=1)).result().thinned
    flip(data_files(here)[-1], 5000)
    assert repair(here, there).left
