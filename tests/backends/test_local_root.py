"""A root that is itself wrong: named, with the next action, by the first call that needs it."""

import errno
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends import local_mounts
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_mounts import Mount
from aiockpt.runtime.world import Files, OsFiles, World
from aiockpt.storage.backend import Space
from aiockpt.testing.faults import Fault, FaultyFiles
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from aiockpt.testing.recording import RecordingFiles
from tests.crash.test_full_disk import call
from tests.fails import fails
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import simulated_world
from tests.small_run import Run, small_checkpointer

Verb = Callable[[LocalBackend], Awaitable[object]]


async def put_new(backend: LocalBackend) -> None:
    await backend.put_new("s/k", b"x")


async def create(backend: LocalBackend) -> None:
    await (await backend.create("s/f", 5000)).abort()


async def list_root(backend: LocalBackend) -> None:
    await backend.list("")


async def list_step(backend: LocalBackend) -> None:
    await backend.list("step-00000001")


async def space(backend: LocalBackend) -> None:
    await backend.space()


WRITERS: list[Verb] = [put_new, create]
EVERY_VERB: list[Verb] = [*WRITERS, list_root, list_step, space]


def on(files: Files) -> LocalBackend:
    return LocalBackend("/data/r", world=World(files, token=simulated_world().token))


# A file that is there, what "run" is a link to, the root, and what it is said to be.
PLACES = {
    "a file in its place": ("run", "", "run", "is a file"),
    "a file above": ("notes", "", "notes/deep/run", "notes is a file"),
    "a link to a file": ("notes", "notes", "run", "is a link to a file"),
    "a link to nothing": ("", "gone", "run", "is a link to nothing"),
}


@pytest.mark.parametrize("verb", EVERY_VERB)
@pytest.mark.parametrize(("file", "link", "at", "what"), PLACES.values(), ids=PLACES)
async def test_a_root_that_is_no_folder_is_named_by_every_verb(
    tmp_path: Path, verb: Verb, file: str, link: str, at: str, what: str
) -> None:
    if file:
        (tmp_path / file).write_bytes(b"")
    if link:
        (tmp_path / "run").symlink_to(link)
    root = tmp_path / at
    if link == "gone" and verb is list_step:
        pytest.skip("a step that is not there needs no look at the root, which the first listing has had")
    error = await fails(verb(LocalBackend(root)), aiockpt.StorageError, what)
    assert str(error).startswith(str(root))
    assert "name another one" in str(error)


@pytest.mark.parametrize("verb", EVERY_VERB)
async def test_a_root_that_is_a_link_to_a_folder_is_used(tmp_path: Path, verb: Verb) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "run").symlink_to("there")
    await verb(LocalBackend(tmp_path / "run"))


@pytest.mark.parametrize("call", ["save", "load"])
def test_save_and_load_name_a_root_that_is_a_file(tmp_path: Path, run: Run, call: str) -> None:
    (tmp_path / "run").write_bytes(b"")
    with small_checkpointer(tmp_path / "run") as ckpt, pytest.raises(aiockpt.StorageError, match="run is a file"):
        (ckpt.save(1, run.state) if call == "save" else ckpt.load(run.state)).result()


def test_a_root_that_cannot_be_made_is_not_taken_for_a_full_disk(run: Run) -> None:
    with (
        small_checkpointer("/proc/aiockpt-run") as ckpt,
        pytest.raises(aiockpt.StorageError, match="/proc/aiockpt-run: this folder cannot be made") as caught,
    ):
        ckpt.save(1, run.state).result()
    assert not isinstance(caught.value, aiockpt.StorageFullError)
    assert not caught.value.retryable


async def test_a_file_system_that_tells_no_size_says_so() -> None:
    assert await LocalBackend("/proc/aiockpt-run").space() == Space(None, None)


@pytest.mark.parametrize("verb", WRITERS)
async def test_a_root_that_this_user_may_not_write_is_named_with_what_to_do(verb: Verb) -> None:
    faulty = FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="mkdir", error=errno.EACCES, times=None)])
    await fails(verb(on(faulty)), aiockpt.StorageAccessError, r"^/data/r: creating .* give this user the right")


async def test_a_root_that_this_user_may_not_read_is_named_with_what_to_do() -> None:
    faulty = FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="listdir", error=errno.EACCES)])
    await fails(on(faulty).list(""), aiockpt.StorageAccessError, r"^listing '/data/r': .* give this user the right")


async def test_a_file_that_finds_no_room_says_how_much_it_needs_and_where() -> None:
    with pytest.raises(aiockpt.StorageFullError, match=r"^/data/r: creating a file of 10,001 bytes, 'f'"):
        await on(SimulatedFiles(capacity_bytes=10_000)).create("f", 10_001)


@pytest.mark.parametrize(("inodes", "free", "told"), [(100, 7, 7), (100, 0, 0), (0, 0, None)])
async def test_inodes_are_told_where_a_file_system_has_a_number_of_them(
    inodes: int, free: int, told: int | None
) -> None:
    class Few(SimulatedFiles):
        def statvfs(self, path: str) -> os.statvfs_result:
            return os.statvfs_result((1, 1, 100, 90, 90, inodes, free + 5, free, 0, 255))

    assert await on(Few()).space() == Space(90, 100, told)


@pytest.mark.parametrize(("kind", "told"), [("fuse.rclone", None), ("ext4", 0)])
async def test_no_free_inode_is_believed_of_a_kernel_only(
    kind: str, told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AsRcloneReports(SimulatedFiles):
        def statvfs(self, path: str) -> os.statvfs_result:
            return os.statvfs_result((4096, 4096, 100, 90, 90, 1_000_000_000, 0, 0, 0, 255))

    monkeypatch.setattr(local_mounts, "find_mount", lambda path: Mount("b", "/", kind))
    assert await on(AsRcloneReports()).space() == Space(90 * 4096, 100 * 4096, told)


class _NothingIsThere(SimulatedFiles):
    def lstat(self, path: str) -> os.stat_result:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def statvfs(self, path: str) -> os.statvfs_result:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)


@pytest.mark.parametrize("verb", [put_new, create, space])
async def test_a_file_system_that_denies_its_own_root_is_an_error_and_no_endless_loop(verb: Verb) -> None:
    await fails(verb(on(_NothingIsThere())), aiockpt.StorageError, "not even '/' is there")


@pytest.mark.parametrize("verb", WRITERS)
async def test_a_flush_that_says_no_such_file_is_a_failed_flush(verb: Verb) -> None:
    recording = RecordingFiles(SimulatedFiles())
    await verb(on(recording))
    flushes = sum(call.verb == "fsync" for call in recording.calls)
    assert flushes
    for at in range(1, flushes + 1):
        faulty = FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="fsync", at=at, error=errno.ENOENT)])
        await fails(verb(on(faulty)), aiockpt.StorageError, "flushing")


@pytest.mark.parametrize("inner", ["run", ""])
def test_a_volume_that_is_unmounted_fails_the_save(tmp_path: Path, inner: str) -> None:
    volume, spare, kept = tmp_path / "volume", tmp_path / "spare", tmp_path / "kept"

    def mount(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        call("mount", "-t", "tmpfs", "-o", "size=8m", "none", folder)

    mount(volume)
    try:
        with small_checkpointer(volume / inner, on_error="warn") as ckpt:
            ckpt.save(1, {"x": 1}).result()
            ckpt.wait()
            shutil.copytree(volume, kept)
            subprocess.run(["umount", "-l", str(volume)], check=True)
            for what in (lambda: ckpt.save(2, {"x": 2}), ckpt.latest):
                with pytest.raises(
                    aiockpt.StorageError, match=f"^{volume / inner}.* is not mounted any more: .* Mount it again"
                ):
                    what().result()
            assert list(volume.iterdir()) == []
            mount(spare)  # it gets the number of the device
            mount(volume)
            with pytest.raises(aiockpt.StorageError, match="is not mounted any more"):  # another volume
                ckpt.save(2, {"x": 2}).result()
            shutil.copytree(kept, volume, dirs_exist_ok=True)  # the same one, under another number of its device
            ckpt.save(3, {"x": 3}).result()
            assert ckpt.latest().result() == 3
    finally:
        subprocess.run(["umount", str(volume), str(spare)], check=False)


async def test_a_root_that_is_removed_is_made_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "run")
    await put_new(backend)
    shutil.rmtree(tmp_path / "run")
    await put_new(backend)
    assert await backend.get("s/k", 1) == b"x"


class NoReplacing(ForwardingFiles):
    """A file system whose rename replaces no file."""

    def forward(self, call: FilesCall) -> object:
        if call.verb == "rename" and os.path.lexists(call.arguments[1]):
            raise FileExistsError(errno.EEXIST, "no replacing here", call.arguments[1])
        return call()


def test_without_replacing_renames_retention_and_hints_work(tmp_path: Path) -> None:
    world = World(files=NoReplacing(OsFiles()))
    rules = aiockpt.Retention(last=1)
    with small_checkpointer(tmp_path, retention=rules, world=world) as ckpt:
        for step in range(3):
            ckpt.save(step, {"x": step}).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000002"]
    assert (tmp_path / "LATEST").read_text() == "step-00000002\n"
