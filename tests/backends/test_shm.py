"""Shared memory: it survives the process, keeps others out, and reports honestly how much room there is."""

import errno
import fcntl
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends import shm
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.backends.shm import SHARED_MEMORY, ShmBackend
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    UsageError,
)
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, works_when_full
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from aiockpt.testing.recording import RecordingBackend, RecordingFiles
from tests.fails import fails
from tests.run_python import run_python

pytestmark = pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason=f"this host has no {SHARED_MEMORY}")


@pytest.fixture
def name() -> Iterator[str]:
    """Return a name that nobody else uses, and leave nothing below it."""
    chosen = f"test-{uuid.uuid4().hex}"
    yield chosen
    subprocess.run(["rm", "-rf", f"{SHARED_MEMORY}/aiockpt-{os.geteuid()}/{chosen}"], check=True)


class TestShm(BackendSuite):
    @pytest.fixture
    async def backend(self, name: str) -> AsyncIterator[Backend]:
        open_before = len(os.listdir("/proc/self/fd"))
        backend = ShmBackend(name)
        yield backend
        await backend.close()
        assert len(os.listdir("/proc/self/fd")) == open_before


class TestShmWrapped(BackendSuite):
    @pytest.fixture
    def backend(self, name: str) -> Backend:
        return RecordingBackend(FaultyBackend(ShmBackend(name)))


def test_it_says_that_it_is_of_this_host_and_not_durable(name: str) -> None:
    traits = ShmBackend(name).traits
    assert (traits.scope, traits.durable) == ("node", False)


async def test_backends_of_one_name_share_their_objects(name: str) -> None:
    await ShmBackend(f"{name}/run").put("a", b"1")
    assert await ShmBackend(f"/{name}/run/").get("a", 10) == b"1"
    await fails(ShmBackend(f"{name}/other").get("a", 10), ObjectNotFoundError)


def test_a_name_cannot_lead_out_of_the_users_folder() -> None:
    with pytest.raises(UsageError):
        ShmBackend("../elsewhere")


SAVER = """
import os, signal, sys, torch, aiockpt
ckpt = aiockpt.Checkpointer(aiockpt_backend(sys.argv[1]))
ckpt.save(7, {"w": torch.arange(100_000), "step": 7}).result()
ckpt.save(8, {"w": torch.arange(100_000), "step": 8})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_outlives_the_trainer_that_was_killed(name: str) -> None:
    opened = "from aiockpt.backends.shm import ShmBackend as aiockpt_backend\n"
    run_python("-c", opened + SAVER, name, status=-signal.SIGKILL)
    state: dict[str, Any] = {"w": torch.zeros(100_000, dtype=torch.int64), "step": 0}
    with aiockpt.Checkpointer(ShmBackend(name)) as ckpt:
        loaded = ckpt.load(state).result()
    assert loaded is not None
    assert loaded.step in (7, 8)
    assert state["step"] == loaded.step
    assert torch.equal(state["w"], torch.arange(100_000))


# Others


async def test_the_folder_lets_nobody_else_in(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        await ShmBackend("run", mount=str(tmp_path)).put("a/b", b"1")
    finally:
        os.umask(before)
    home = tmp_path / f"aiockpt-{os.geteuid()}"
    assert {path.stat().st_mode & 0o777 for path in (home, home / "run", home / "run" / "a")} == {0o700}


@pytest.mark.parametrize("planted", ["open to all", "a link", "a file", "somebody else's"])
async def test_a_planted_folder_is_refused_by_every_verb(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / f"aiockpt-{os.geteuid()}"
    if planted == "open to all":
        home.mkdir()
        home.chmod(0o755)
    elif planted == "a link":
        (tmp_path / "target").mkdir(0o700)
        home.symlink_to(tmp_path / "target")
    elif planted == "a file":
        home.touch(0o600)
    else:
        home.mkdir(0o700)
    backend = ShmBackend("run", mount=str(tmp_path))
    if planted == "somebody else's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for verb in (
        lambda: backend.put("a", b""),
        lambda: backend.put_new("a", b""),
        lambda: backend.get("a", 1),
        lambda: backend.open("a"),
        lambda: backend.create("a", 1),
        lambda: backend.stat("a"),
        lambda: backend.list(""),
        lambda: backend.delete(["a"]),
    ):
        await fails(verb(), StorageAccessError, "not a private folder")
    assert planted == "a file" or os.listdir(home) == []


async def test_looking_makes_no_folder(tmp_path: Path) -> None:
    backend = ShmBackend("run", mount=str(tmp_path))
    assert (await backend.list("")).objects == ()
    await backend.delete(["a"])
    assert os.listdir(tmp_path) == []


async def test_a_host_without_shared_memory_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no shared memory of that kind"):
        await ShmBackend("run", mount=str(tmp_path / "absent")).put("a", b"")


# Room


async def test_the_room_is_never_more_than_the_host_has_memory_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = os.statvfs(SHARED_MEMORY)
    space = await ShmBackend(name).space()
    assert space.total_bytes == mounted.f_blocks * mounted.f_frsize
    monkeypatch.setattr(shm, "available_bytes", lambda: 1000)
    assert (await ShmBackend(name).space()).free_bytes == 1000


async def test_a_file_that_memory_cannot_hold_is_refused_before_it_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "available_bytes", lambda: 1000)
    backend = ShmBackend(name)
    await fails(backend.create("a", 1001), StorageFullError, "1001 bytes do not fit into the 1000")
    await (await backend.create("a", 1000)).abort()
    assert (await backend.list("")).objects == ()


def test_a_step_that_memory_cannot_hold_goes_to_the_next_tier(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "available_bytes", lambda: 1000)
    with aiockpt.Checkpointer([aiockpt.Tier(f"shm://{name}"), aiockpt.Tier(tmp_path)]) as ckpt:
        assert ckpt.save(1, {"x": torch.ones(1000)}).result().url == f"file://{tmp_path}"
    with aiockpt.Checkpointer(f"shm://{name}") as ckpt:
        error = ckpt.save(1, {"x": torch.ones(1000)}).exception()
        assert isinstance(error, StorageFullError)


def test_a_backend_with_some_of_the_verbs_of_a_full_place_is_used_without_them() -> None:
    class Moves(MemoryBackend):
        async def move(self, key: str, to: str, *, new: bool) -> None: ...

    assert works_when_full(Moves()) is None


# Memory that is written again

SIZE = shm.LEAST_SPARE_BYTES


async def write(backend: ShmBackend, key: str, value: int, size: int = SIZE) -> int:
    """Write a data file of one value; return its inode."""
    upload = await backend.create(key, size)
    await upload.write(0, [memoryview(bytes([value]) * size)])
    await upload.finish()
    return os.stat(backend.path(key)).st_ino


def values(backend: ShmBackend, key: str) -> set[int]:
    return set(Path(backend.path(key)).read_bytes())


def leftovers(backend: ShmBackend) -> list[str]:
    return [name for name in os.listdir(backend.path("")) if name.startswith(".")]


async def test_a_file_is_written_into_the_memory_of_a_removed_one(name: str) -> None:
    backend = ShmBackend(name)
    made = await write(backend, "s/a/d/0", 1)
    await backend.delete(["s/a/d/0"])
    assert (await backend.list("")).objects == ()
    assert await write(backend, "s/b/d/0", 2) == made
    assert values(backend, "s/b/d/0") == {2}
    assert leftovers(backend) == []
    await backend.delete(["s/b/d/0"])
    assert await write(backend, "s/c/d/0", 3, SIZE + 1) != made


async def test_a_file_in_the_memory_of_an_old_one_is_young(name: str) -> None:
    backend = ShmBackend(name)
    await write(backend, "s/a/d/0", 1)
    os.utime(backend.path("s/a/d/0"), (0, 0))
    await backend.delete(["s/a/d/0"])
    upload = await backend.create("s/b/d/0", SIZE)
    assert (await backend.stat("s/b/d/0")).modified_ns > 0  # else its attempt would pass for one of long ago
    await upload.abort()


@contextmanager
def used(path: str, user: str) -> Iterator[None]:
    """Have *path* open, mapped, or under another name."""
    if user == "another name":
        os.link(path, f"{path}-other")
        yield
    elif user == "a mapping":
        mapped = torch.from_file(path, shared=True, size=SIZE, dtype=torch.uint8)  # and the file is closed
        yield
        assert bool((mapped == 1).all())
    else:
        with open(path, "r+b" if user == "a writer" else "rb") as file:
            if user != "another process":
                yield
                return
            reader = subprocess.Popen(["sleep", "600"], stdin=file)
        yield
        reader.kill()
        reader.wait()


@pytest.mark.parametrize("user", ["a reader", "a writer", "a mapping", "another process", "another name"])
async def test_what_anybody_has_is_never_written_over(user: str, name: str) -> None:
    backend = ShmBackend(name)
    made = await write(backend, "s/a/d/0", 1)
    with used(backend.path("s/a/d/0"), user):
        await backend.delete(["s/a/d/0"])
        assert bool(leftovers(backend)) == (user != "another name")
        assert await write(backend, "s/b/d/0", 2) != made
    assert user != "another name" or values(backend, "s/a/d/0-other") == {1}
    assert leftovers(backend) == []


async def test_a_spare_that_has_got_another_name_is_left_alone(name: str) -> None:
    backend = ShmBackend(name)
    made = await write(backend, "s/a/d/0", 1)
    await backend.delete(["s/a/d/0"])
    os.link(backend.path(leftovers(backend)[0]), backend.path("kept"))
    assert await write(backend, "s/b/d/0", 2) != made
    assert values(backend, "kept") == {1}


async def test_of_two_that_create_files_at_once_one_gets_the_memory(name: str) -> None:
    backends = [ShmBackend(name) for _ in range(4)]
    made = await write(backends[0], "s/a/d/0", 9)
    await backends[0].delete(["s/a/d/0"])
    found = {}

    async def create(number: int) -> None:
        found[number] = await write(backends[number], f"s/b/d/{number}", number)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(create, number)
    assert list(found.values()).count(made) == 1
    assert [values(backends[0], f"s/b/d/{number}") for number in range(4)] == [{0}, {1}, {2}, {3}]


async def test_a_name_that_is_taken_stays_what_it_is(name: str) -> None:
    backend = ShmBackend(name)
    await write(backend, "s/a/d/0", 1)
    await write(backend, "s/b/d/0", 2)
    await backend.delete(["s/a/d/0"])
    await fails(backend.create("s/b/d/0", SIZE), ObjectExistsError)
    assert values(backend, "s/b/d/0") == {2}
    assert leftovers(backend) == []


def inodes(backend: ShmBackend) -> list[int]:
    return [path.stat().st_ino for path in Path(backend.path("s")).glob("*/d/*")]


class Killed(ForwardingFiles):
    """Files of a process that is killed before its nth change of a name."""

    def __init__(self, number: int) -> None:
        super().__init__(World().files)
        self.left = number

    def forward(self, call: FilesCall) -> Any:
        if call.verb in ("rename", "link", "unlink", "utime", "open"):
            self.left -= 1
        if self.left < 0 and call.verb != "close":
            raise OSError(errno.EIO, "dead")
        return call()


@pytest.mark.parametrize("calls", range(12))
async def test_whoever_is_killed_while_it_takes_memory_leaves_no_file_with_another_ones(calls: int, name: str) -> None:
    files = Killed(10**9)
    backend, killed = ShmBackend(name), ShmBackend(name, world=World(files=files), writes=True)
    await backend.put("s/b/d/x", b"")
    for number in range(2):
        await write(backend, f"s/a/d/{number}", 9)
    files.left = calls
    with suppress(StorageError):
        await killed.delete(["s/a/d/0", "s/a/d/1"])
        await write(killed, "s/b/d/0", 1)
    for number in range(1, 4):
        await write(backend, f"s/b/d/{number}", number)
    assert [values(backend, f"s/b/d/{number}") for number in range(1, 4)] == [{1}, {2}, {3}]
    assert len(inodes(backend)) == len(set(inodes(backend)))
    await backend.delete([f"s/b/d/{number}" for number in range(4)])
    await backend.close()
    assert leftovers(backend) == []


async def test_spare_memory_counts_as_free_and_is_freed_where_it_lacks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ShmBackend(name)
    await write(backend, "s/a/d/0", 1)
    monkeypatch.setattr(shm, "available_bytes", lambda: SIZE)
    await backend.delete(["s/a/d/0"])
    assert (await backend.space()).free_bytes == 2 * SIZE
    await write(backend, "s/b/d/0", 2, SIZE - 1)
    assert len(leftovers(backend)) == 1
    await write(backend, "s/b/d/1", 2, SIZE + 1)
    assert leftovers(backend) == []


async def test_the_spares_are_those_of_one_attempt_and_go_with_their_process(name: str) -> None:
    backend = ShmBackend(name)
    for attempt in "ab":
        for number in range(2):
            await write(backend, f"s/{attempt}/d/{number}", number)
    for attempt in "ab":
        await backend.delete([f"s/{attempt}/d/{number}" for number in range(2)])
        assert {file.rpartition(".")[2] for file in leftovers(backend)} == {attempt}
        assert len(leftovers(backend)) == 2
    looks = ShmBackend(name)
    await looks.list("")
    await looks.close()
    assert len(leftovers(backend)) == 2
    await backend.close()
    assert leftovers(backend) == []


async def test_a_program_that_writes_nothing_frees_what_it_removes_and_all_spares(name: str) -> None:
    writer, remover = ShmBackend(name), ShmBackend(name)
    for number in range(3):
        await write(writer, f"s/{number}/d/0", 1)
    await writer.delete(["s/0/d/0"])
    assert len(leftovers(writer)) == 1
    await remover.delete(["s/1/d/0"])
    assert leftovers(writer) == []


async def test_where_the_kernel_cannot_tell_who_reads_nothing_is_written_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "no leases here")

    backend = ShmBackend(name)
    made = await write(backend, "s/a/d/0", 1)
    await backend.delete(["s/a/d/0"])
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert await write(backend, "s/b/d/0", 2) != made
    await backend.delete(["s/b/d/0"])
    assert leftovers(backend) == []


async def test_a_folder_is_dated_by_the_clock_of_its_names(name: str) -> None:
    backend = ShmBackend(name)
    await backend.put_new("a/b", b"1")
    assert abs(await backend.folder_ns("a") - (await backend.stat("a/b")).modified_ns) < 10**10
    assert works_when_full(backend) is not None


async def test_nothing_is_flushed(name: str) -> None:
    files = RecordingFiles(World().files)
    backend = ShmBackend(name, world=World(files=files))
    await backend.put_new("a/b", b"1")
    upload = await backend.create("a/c", 3)
    await upload.write(0, [memoryview(b"123")])
    await upload.finish()
    verbs = {call.verb for call in files.calls}
    assert "pwrite" in verbs
    assert not verbs & {"fsync", "fdatasync"}
    await LocalBackend(f"{SHARED_MEMORY}/aiockpt-{os.geteuid()}/{name}", world=World(files=files)).put("a/b", b"2")
    assert {call.verb for call in files.calls} & {"fsync", "fdatasync"}  # the recording would have seen them
