"""File systems and sandboxes that refuse what is optional: simulated, in user space, and by a filter of system calls."""

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_reader import PIECE_BYTES
from aiockpt.backends.local_tree import FALLBACKS, OptionalCall
from aiockpt.convert import to_hugging_face
from aiockpt.convert.foreign import write_dcp
from aiockpt.errors import ObjectNotFoundError, StorageError
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.backend import Space
from aiockpt.testing.backend_suite import download, patterned, upload
from aiockpt.testing.faults import Fault, FaultyFiles
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from aiockpt.testing.recording import RecordingFiles
from tests import seccomp
from tests.fails import fails
from tests.run_python import run_python
from tests.servers import fuse
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import simulated_world
from tests.simulated.virtual_time import run_virtually

DATA = patterned(5 * 4096 + 77)
VERBS = {"fallocate": "fallocate", "link": "link", "statfs": "statvfs", "fsync of a folder": "fsync"}
"""Of the seam, for calls that have one of their own; the others are `open` and `preadv` with a flag."""


class Refusing(ForwardingFiles):
    """Refuses an optional call, always."""

    def __init__(self, call: OptionalCall, error: int) -> None:
        super().__init__(SimulatedFiles(page_cache="cold"))
        self.call, self.error = call, error
        self.refused = 0

    def forward(self, call: FilesCall) -> Any:
        verb: str | None = VERBS.get(self.call)
        if call.verb == "open" and call.arguments[1] & os.O_DIRECT and self.call == "O_DIRECT":
            verb = "open"
        if call.verb == "preadv" and call.arguments[3] and self.call == "preadv2":
            verb = "preadv"
        if call.verb == verb:
            self.refused += 1
            raise OSError(self.error, os.strerror(self.error), call.path)
        return call()


@pytest.mark.parametrize(
    ("call", "error"), [(call, error) for call, fallback in FALLBACKS.items() for error in sorted(fallback.absent)]
)
def test_what_a_place_lacks_is_done_without_and_told_once(
    call: OptionalCall, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    files = Refusing(call, error)
    backend = LocalBackend("/r", world=World(files, token=simulated_world().token))

    async def main() -> Space:
        for step in "ab":
            await backend.put_new(f"{step}/record", bytes(DATA))
            await upload(backend, f"{step}/data", DATA)
            reader = await backend.open(f"{step}/data")
            assert await download(reader) == DATA
            await reader.close()
            assert await backend.get(f"{step}/record", 1 << 20) == bytes(DATA)
        with pytest.raises(aiockpt.StorageError, match="exists"):
            await backend.put_new("a/record", b"")
        return await backend.space()

    space = run_virtually(main)
    told = [record for record in caplog.records if f"no {call} here" in record.message]
    assert [record.levelno for record in told] == [FALLBACKS[call].level]
    assert files.refused == 1 or call in ("statfs", "fsync of a folder")
    assert space == Space(None, None) or call != "statfs"
    assert backend.traits.survives_power_cuts is (call != "fsync of a folder")


async def put(backend: LocalBackend) -> None:
    await backend.put("s/k", b"new")
    assert await backend.get("s/k", 9) == b"new"


async def put_new(backend: LocalBackend) -> None:
    await backend.put_new("s/n", b"new")
    assert await backend.get("s/n", 9) == b"new"


async def look(backend: LocalBackend) -> None:
    assert [stat.key for stat in (await backend.list("s")).objects] == ["s/k"]
    assert (await backend.stat("s/k")).size == 3
    assert await backend.get_many(["s/k", "s/none"], 9) == (b"old", None)
    reader = await backend.open("s/k")
    with suppress(StorageError):  # the handle of an open file is lost with it
        await reader.close()


async def delete(backend: LocalBackend) -> None:
    await backend.delete(["s/k", "t/none"])
    await fails(backend.get("s/k", 9), ObjectNotFoundError)


# Where a record is made in place, what a lost answer leaves of it cannot be told from another's: the save fails.
@pytest.mark.parametrize(("hard_links", "do"), [(True, "fail"), (True, "lose_answer"), (False, "fail")])
@pytest.mark.parametrize("verb", [put, put_new, look, delete])
def test_a_stale_handle_at_any_call_is_waited_for(
    verb: Callable[[LocalBackend], Coroutine[Any, Any, None]], hard_links: bool, do: Any
) -> None:
    def run(faults: list[Fault]) -> int:
        files = SimulatedFiles(hard_links=hard_links)
        token = simulated_world().token
        run_virtually(functools.partial(LocalBackend("/r", world=World(files, token=token)).put, "s/k", b"old"))
        faulty = FaultyFiles(files, faults)
        try:
            run_virtually(functools.partial(verb, LocalBackend("/r", world=World(faulty, token=token))))
        except StorageError as error:  # a failed flush is not tried again
            if not str(faulty.schedule.fired[-1]).startswith(f"{do} fsync") or "flushing '/" not in str(error):
                raise
        return faulty.call_count

    for at in range(1, run([]) + 1):
        run([Fault(do=do, at=at, error=errno.ESTALE)])
        run([Fault(do=do, verb="[!ul]*", at=at, times=3, error=errno.ESTALE)])


@pytest.mark.parametrize(("times", "comes"), [(1, True), (4, True), (None, False)])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_open_file_whose_handle_goes_stale_is_opened_anew_and_read_on(
    at: int, times: int | None, comes: bool
) -> None:
    files, size = SimulatedFiles(), 3 * PIECE_BYTES
    shown = bytearray()
    stale = Fault(do="fail", verb="preadv", at=at, times=times, error=errno.ESTALE)

    async def main() -> None:
        await upload(LocalBackend("/r", world=World(files, token=simulated_world().token)), "s/data", patterned(size))
        reader = await LocalBackend("/r", world=World(FaultyFiles(files, [stale]))).open("s/data")
        into = memoryview(bytearray(size - 7))
        try:
            await reader.read(7, [into], shown.extend)
        finally:
            await reader.close()
        assert into == shown == patterned(size)[7:]

    if comes:
        return run_virtually(main)
    with pytest.raises(StorageError, match="Stale"):
        run_virtually(main)
    return None


@pytest.mark.parametrize("becomes", ["another", "gone"])
def test_where_another_file_has_the_name_of_one_whose_handle_went_stale_nothing_of_it_is_read(becomes: str) -> None:
    files = SimulatedFiles()

    async def main() -> None:
        backend = LocalBackend("/r", world=World(files, token=simulated_world().token))
        await backend.put("s/k", b"the first")
        reader = await LocalBackend("/r", world=World(FaultyFiles(files, [STALE_READ]))).open("s/k")
        await (backend.put("s/k", b"the other") if becomes == "another" else backend.delete(["s/k"]))
        into = bytearray(9)
        with pytest.raises(StorageError, match="was replaced while" if becomes == "another" else "[Nn]o "):
            await reader.read(0, [memoryview(into)])
        await reader.close()
        assert into == bytes(9)

    run_virtually(main)


def test_of_two_writers_of_equal_records_one_has_a_stale_handle_and_each_is_told_the_truth() -> None:
    """That a record is there with the very bytes makes it ours only where our own answer was lost."""
    files = SimulatedFiles()

    async def main() -> None:
        await LocalBackend("/r", world=World(files)).put_new("s/k", b"same")
        with pytest.raises(aiockpt.StorageError, match="exists"):
            await LocalBackend("/r", world=World(files)).put_new("s/k", b"same")

    run_virtually(main)


class Late(SimulatedFiles):
    """A folder that another client has made is there for `mkdir`, and not for lookups: these are answered from a cache."""

    def __init__(self, folder: str, looks: int) -> None:
        super().__init__()
        self.folder, self.looks = folder, looks

    def _hidden(self, path: str) -> bool:
        return self.looks > 0 and (path + "/").startswith(self.folder + "/")

    def lstat(self, path: str) -> os.stat_result:
        if self._hidden(path):
            self.looks -= 1
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().lstat(path)


@pytest.mark.parametrize("folder", ["/r", "/r/s"])
@pytest.mark.parametrize(("looks", "comes"), [(1, True), (12, True), (10_000, False)])
def test_a_folder_that_is_seen_late_is_waited_for(folder: str, looks: int, comes: bool) -> None:
    files = Late(folder, 0)
    backend = LocalBackend("/r", world=World(files, token=simulated_world().token))

    async def main() -> None:
        files.mkdir("/r")
        files.mkdir("/r/s")
        files.looks = looks
        await backend.put_new("s/k", b"x")
        await upload(backend, "s/data", DATA)

    if comes:
        return run_virtually(main)
    with pytest.raises(StorageError, match="not seen after 26 s") as caught:
        run_virtually(main)
    assert caught.value.retryable
    return None


STALE_READ = Fault(do="fail", verb="preadv", error=errno.ESTALE)
HABITS = [
    ["fallocate=ENOSYS"],
    ["fallocate=EPERM"],
    *([f"open_direct={name}"] for name in ("EINVAL", "EACCES")),
    *([f"write_direct={name}", f"read_direct={name}"] for name in ("EPERM", "EOPNOTSUPP")),
    *([f"link={name}"] for name in ("EACCES", "EXDEV", "EMLINK")),
    *([f"statfs={name}"] for name in ("EPERM", "ENOSYS")),
    *([f"fsyncdir={name}"] for name in ("EINVAL", "EBADF", "ENOTSUP")),
    *([f"{call}=ESTALE*3"] for call in ("create", "mkdir", "link", "getattr", "read")),
    ["late=40"],
    ["fallocate=ENOSYS", "open_direct=EACCES", "link=EXDEV", "statfs=ENOSYS", "fsyncdir=EINVAL", "late=9"],
]


def save_and_load(root: Path, count: int = 60_000) -> aiockpt.SaveResult:
    """Save and load as a program does."""
    state, into = {"weight": torch.arange(count, dtype=torch.float32)}, {"weight": torch.zeros(count)}
    with aiockpt.Checkpointer(root) as ckpt:
        saved = ckpt.save(1, state).result()
    with aiockpt.Checkpointer(root) as ckpt:
        assert ckpt.load(into).result() is not None
    assert torch.equal(into["weight"], state["weight"])
    return saved


@pytest.mark.parametrize("habits", HABITS, ids=" ".join)
def test_on_a_file_system_with_habits_a_step_is_saved_and_loaded(tmp_path: Path, habits: list[str]) -> None:
    (tmp_path / "source/run").mkdir(parents=True)
    with fuse.mount(tmp_path, *habits) as (mounted, asked):
        saved = save_and_load(mounted / "run")
    assert saved.durable is not any(habit.startswith("fsyncdir") for habit in habits)
    assert all(asked[habit.partition("=")[0]] for habit in habits if not habit.startswith(("late", "read_direct")))


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EIO])
def test_where_no_folder_can_be_flushed_steps_are_converted_all_the_same(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(error, os.strerror(error))
        os.fdatasync(fd)

    model = torch.nn.Linear(3, 2)
    with aiockpt.Checkpointer(f"memory://{tmp_path.name}-{error}") as ckpt:
        ckpt.save(1, {"model": model}).result()
        monkeypatch.setattr("aiockpt.runtime.world.OsFiles.fsync", staticmethod(refuse))
        if error == errno.EIO:
            with pytest.raises(StorageError, match="Input/output"):
                write_dcp(ckpt, tmp_path / "dcp")
            return
        for replace in (False, True):
            to_hugging_face(ckpt, tmp_path / "folder", replace=replace).result()
        write_dcp(ckpt, tmp_path / "dcp")
    assert (tmp_path / "dcp/.metadata").exists()
    assert torch.equal(load_file(tmp_path / "folder/model.safetensors")["weight"], model.weight)


@pytest.mark.parametrize("habits", [[], ["fallocate=ENOSYS"], ["fallocate=ENOSYS", "open_direct=EINVAL"]], ids=" ".join)
def test_without_fallocate_a_file_system_gets_the_writes_of_the_data(tmp_path: Path, habits: list[str]) -> None:
    size = 16 << 20
    with fuse.mount(tmp_path, *habits) as (mounted, asked):
        save_and_load(mounted / "run", size // 4)
    assert asked["fallocate"] == 1
    assert asked["write"] + asked["write_direct"] <= 1.1 * size / (128 << 10)


PROGRAM = """
import errno, sys
from tests import seccomp
try:
    seccomp.refuse({calls})
except (OSError, KeyError) as error:
    sys.exit(f"no filter: {{error!r}}")
import logging
logging.basicConfig(level=logging.INFO)
from pathlib import Path
import aiockpt
from tests.backends.test_optional_calls import save_and_load
{body}
"""


def in_a_sandbox(calls: dict[str, int], body: str) -> str:
    """Run *body* in a process whose *calls* are refused; return its log."""
    done = run_python("-c", PROGRAM.format(calls=calls, body=body), status=None)
    if "no filter" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_in_a_sandbox_that_refuses_all_that_is_optional_a_step_is_saved_and_loaded(tmp_path: Path, error: int) -> None:
    calls = dict.fromkeys(("fallocate", "link", "linkat", "statfs", "preadv", "preadv2", seccomp.DIRECT), error)
    body = f"assert not save_and_load(Path({str(tmp_path)!r})).durable"
    log = in_a_sandbox(calls | {"fsync": errno.EINVAL}, body)
    for call in FALLBACKS:
        assert log.count(f"no {call} here") <= 2, "two checkpointers, each of which says it once"
        assert f"no {call} here" in log or call == "preadv2", (
            "what is not opened past the page cache is not asked for it"
        )


def test_a_sandbox_without_shared_memory_refuses_a_writer_process_and_says_what_to_do(tmp_path: Path) -> None:
    body = f"""
try:
    aiockpt.Checkpointer({str(tmp_path)!r}, worker="process")
except aiockpt.UsageError as error:
    assert "worker='thread'" in str(error)
else:
    raise AssertionError("it was not refused")
"""
    in_a_sandbox({"memfd_create": errno.EPERM}, body)


async def test_space_is_reserved_at_once_where_that_can_be(tmp_path: Path) -> None:
    files = RecordingFiles(OsFiles())
    file = await LocalBackend(tmp_path, world=World(files=files)).create("f", 1 << 20)
    assert (tmp_path / "f").stat().st_size in (0, 1 << 20)
    await file.abort()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        OsFiles.fallocate(-1, 0, 1)
