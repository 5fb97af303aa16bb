"""Shared memory: it survives the process, keeps others out, and reports honestly how much room there is."""

import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends import shm
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.backends.shm import SHARED_MEMORY, ShmBackend
from aiockpt.errors import ObjectNotFoundError, StorageAccessError, StorageError, StorageFullError, UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, works_when_full
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.faults import FaultyBackend
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
