"""Faults come when they are due, and do what they say."""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError, StorageFullError, StorageTimeoutError, UsageError
from aiockpt.testing.backend_suite import upload
from aiockpt.testing.faults import Fault, FaultyBackend, FaultyFiles, flip_bit
from tests.run_python import run_python
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import crash_states

CREATE = os.O_RDWR | os.O_CREAT


async def failures(backend: FaultyBackend, call: Callable[[], Awaitable[object]], count: int) -> list[int]:
    """Return at which of *count* calls, from 1, a StorageError came."""
    failed = []
    for number in range(1, count + 1):
        try:
            await call()
        except StorageError:
            failed.append(number)
    return failed


async def test_a_fault_comes_at_its_call_and_as_often_as_it_says() -> None:
    for at, times, expected in ((1, 1, [1]), (3, 2, [3, 4]), (4, None, [4, 5, 6]), (7, 1, [])):
        backend = FaultyBackend(MemoryBackend(), [Fault(do="fail", at=at, times=times)])
        assert await failures(backend, lambda backend=backend: backend.put("k", b""), 6) == expected  # type: ignore[misc]
        assert backend.call_count == 6
        assert backend.schedule.fired == ["fail put k"] * len(expected)


async def test_a_fault_counts_only_the_calls_it_is_meant_for() -> None:
    backend = FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="put*", match="s/*", at=2)])
    await backend.put("s/k", b"")
    await backend.put("t/k", b"")
    await backend.stat("s/k")
    with pytest.raises(StorageError):
        await backend.put_new("s/new", b"")
    await backend.put("s/k", b"")


async def test_the_error_is_ours_for_the_errno_and_names_the_key() -> None:
    for number, kind in ((errno.ENOSPC, StorageFullError), (errno.ETIMEDOUT, StorageTimeoutError)):
        backend = FaultyBackend(MemoryBackend(), [Fault(do="fail", error=number)])
        with pytest.raises(kind, match=r"'k'.*injected") as caught:
            await backend.put("k", b"")
        assert isinstance(caught.value.__cause__, OSError)


async def test_a_failed_call_has_no_effect_and_one_whose_answer_is_lost_has() -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(inner, [Fault(do="fail", match="a"), Fault(do="lose_answer", match="b")])
    for key in ("a", "b"):
        with pytest.raises(StorageError):
            await backend.put_new(key, b"x")
    assert [found.key for found in (await inner.list("")).objects] == ["b"]


BACKEND_VERBS: dict[str, Callable[[FaultyBackend], Awaitable[object]]] = {
    "put": lambda backend: backend.put("n", b""),
    "put_new": lambda backend: backend.put_new("n", b""),
    "get": lambda backend: backend.get("k", 1),
    "open": lambda backend: backend.open("k"),
    "create": lambda backend: backend.create("n", 1),
    "stat": lambda backend: backend.stat("k"),
    "list": lambda backend: backend.list(""),
    "delete": lambda backend: backend.delete(["k"]),
    "space": lambda backend: backend.space(),
    "close": lambda backend: backend.close(),
}


@pytest.mark.parametrize("verb", BACKEND_VERBS)
async def test_every_verb_can_fail(verb: str) -> None:
    inner = MemoryBackend()
    await inner.put("k", b"x")
    with pytest.raises(StorageError):
        await BACKEND_VERBS[verb](FaultyBackend(inner, [Fault(do="fail", verb=verb)]))
    assert [found.key for found in (await inner.list("")).objects] == ["k"]


async def test_reads_writes_and_finish_can_fail_and_abort_cannot() -> None:
    faults = [Fault(do="fail", verb=verb) for verb in ("reader.read", "upload.write", "upload.finish", "upload.abort")]
    backend = FaultyBackend(MemoryBackend(), faults)
    file = await backend.create("f", 1)
    with pytest.raises(StorageError):
        await file.write(0, [memoryview(b"x")])
    await file.write(0, [memoryview(b"x")])
    with pytest.raises(StorageError):
        await file.finish()
    await file.finish()
    await (await backend.create("g", 1)).abort()
    reader = await backend.open("f")
    with pytest.raises(StorageError):
        await reader.read(0, [memoryview(bytearray(1))])
    await reader.close()


async def test_a_hung_call_hangs_until_it_is_cancelled() -> None:
    backend = FaultyBackend(MemoryBackend(), [Fault(do="hang", verb="get")])
    await backend.put("k", b"x")
    getting = asyncio.ensure_future(backend.get("k", 1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not getting.done()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting


async def test_a_flipped_bit_is_flipped_where_it_was_said_and_the_callers_bytes_are_not() -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(
        inner, [Fault(do="flip", verb=verb, bit=9) for verb in ("put", "put_new", "get", "upload.write", "reader.read")]
    )
    zeros = memoryview(bytearray(4))
    await backend.put("put", bytes(4))
    await backend.put_new("new", bytes(4))
    await upload(backend, "file", zeros)
    for key in ("put", "new", "file"):
        assert await inner.get(key, 10) == b"\0\2\0\0"
    assert bytes(zeros) == bytes(4)
    await inner.put("fine", bytes(4))
    assert await backend.get("fine", 10) == b"\0\2\0\0"
    reader = await backend.open("fine")
    into, seen = bytearray(4), bytearray()
    await reader.read(0, [memoryview(into)], seen.extend)
    assert bytes(into) == bytes(seen) == b"\0\2\0\0"


def test_bits_are_counted_around_the_end() -> None:
    data = bytearray(2)
    flip_bit(memoryview(data), 16 + 15)
    assert data == b"\0\x80"
    flip_bit(memoryview(b""), 3)


def test_what_cannot_be_done_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="'hang' is not supported here"):
        FaultyFiles(SimulatedFiles(), [Fault(do="hang")])
    with pytest.raises(UsageError, match="'short' is not supported here"):
        FaultyBackend(MemoryBackend(), [Fault(do="short")])


FILES_VERBS: dict[str, Callable[[FaultyFiles, int], object]] = {
    "open": lambda files, fd: files.open("/a/new", CREATE),
    "mkdir": lambda files, fd: files.mkdir("/a/folder"),
    "rmdir": lambda files, fd: files.rmdir("/empty"),
    "link": lambda files, fd: files.link("/a/f", "/a/linked"),
    "rename": lambda files, fd: files.rename("/a/f", "/a/moved"),
    "unlink": lambda files, fd: files.unlink("/a/f"),
    "lstat": lambda files, fd: files.lstat("/a"),
    "listdir": lambda files, fd: files.listdir("/a"),
    "statvfs": lambda files, fd: files.statvfs("/a"),
    "utime": lambda files, fd: files.utime("/a"),
    "fstat": lambda files, fd: files.fstat(fd),
    "fadvise": lambda files, fd: files.fadvise(fd, 0, 0, 0),
    "fallocate": lambda files, fd: files.fallocate(fd, 0, 10),
    "pwrite": lambda files, fd: files.pwrite(fd, memoryview(b"x"), 0),
    "preadv": lambda files, fd: files.preadv(fd, [memoryview(bytearray(1))], 0),
    "fdatasync": lambda files, fd: files.fdatasync(fd),
    "fsync": lambda files, fd: files.fsync(fd),
    "close": lambda files, fd: files.close(fd),
}
CHANGING = {"open", "mkdir", "rmdir", "link", "rename", "unlink", "fallocate", "pwrite"}


@pytest.mark.parametrize("do", ["fail", "lose_answer"])
@pytest.mark.parametrize("verb", FILES_VERBS)
def test_every_call_of_the_file_system_can_fail_and_lose_its_answer(
    verb: str, do: Literal["fail", "lose_answer"]
) -> None:
    inner = SimulatedFiles()
    inner.mkdir("/a")
    inner.mkdir("/empty")
    fd = inner.open("/a/f", CREATE)

    def look() -> tuple[list[str], list[str], int]:
        return inner.listdir("/"), inner.listdir("/a"), inner.fstat(fd).st_size if verb != "close" else 0

    before = look()
    with pytest.raises(OSError) as caught:
        FILES_VERBS[verb](FaultyFiles(inner, [Fault(do=do, verb=verb, error=errno.EDQUOT)]), fd)
    assert caught.value.errno == errno.EDQUOT
    assert (look() != before) == (do == "lose_answer" and verb in CHANGING)


def test_a_failed_close_closes() -> None:
    inner = SimulatedFiles()
    files = FaultyFiles(inner, [Fault(do="fail", verb="close", match="/f")])
    fd = files.open("/f", CREATE)
    with pytest.raises(OSError):
        files.close(fd)
    assert inner.open_count == 0


def test_descriptors_are_matched_by_the_path_they_were_opened_by() -> None:
    files = FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="pwrite", match="/b")])
    first, second = files.open("/a", CREATE), files.open("/b", CREATE)
    files.pwrite(first, memoryview(b"x"), 0)
    with pytest.raises(OSError):
        files.pwrite(second, memoryview(b"x"), 0)


@pytest.mark.parametrize(
    ("size", "taken"), [(1, 1), (2, 1), (4096, 4096), (8192, 4096), (20_480, 8192), (20_481, 10_240)]
)
def test_short_transfers_move_half_in_whole_pages_where_there_are_such(size: int, taken: int) -> None:
    files = FaultyFiles(SimulatedFiles(), [Fault(do="short", times=None)])
    fd = files.open("/f", CREATE)
    assert files.pwrite(fd, memoryview(bytes(size)), 0) == taken
    files.inner.pwrite(fd, memoryview(bytes(size)), 0)
    assert files.preadv(fd, [memoryview(bytearray(size)), memoryview(bytearray(5))], 0) == taken


def test_bits_flip_on_the_way_to_and_from_the_disk() -> None:
    inner = SimulatedFiles()
    files = FaultyFiles(inner, [Fault(do="flip", verb="pwrite", bit=0), Fault(do="flip", verb="preadv", bit=8)])
    fd = files.open("/f", CREATE)
    data = bytearray(2)
    files.pwrite(fd, memoryview(data), 0)
    assert bytes(data) == b"\0\0"
    inner.preadv(fd, [memoryview(data)], 0)
    assert bytes(data) == b"\1\0"
    files.preadv(fd, [memoryview(data)], 0)
    assert bytes(data) == b"\1\1"


@pytest.mark.parametrize("verb", ["fsync", "fdatasync"])
def test_a_flush_that_failed_has_lost_the_bytes_for_good(verb: str) -> None:
    inner = SimulatedFiles()
    files = FaultyFiles(inner, [Fault(do="fail", verb=verb, match="/f")])
    fd = files.open("/f", CREATE)
    files.fsync(files.open("/", os.O_RDONLY | os.O_DIRECTORY))
    files.pwrite(fd, memoryview(b"data"), 0)
    flush = getattr(files, verb)
    with pytest.raises(OSError):
        flush(fd)
    flush(fd)
    assert [state.lstat("/f").st_size for state in crash_states(inner)] == [0]


def test_kill_ends_the_process_before_the_call(tmp_path: Path) -> None:
    script = """
import os, sys
from aiockpt.runtime.world import OsFiles
from aiockpt.testing.faults import Fault, FaultyFiles
files = FaultyFiles(OsFiles(), [Fault(do="kill", verb="mkdir", at=2)])
files.mkdir(sys.argv[1] + "/first")
files.mkdir(sys.argv[1] + "/second")
"""
    run_python("-c", script, tmp_path, status=-signal.SIGKILL)
    assert os.listdir(tmp_path) == ["first"]


async def test_the_repr_tells_what_has_gone_wrong() -> None:
    backend = FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="stat")])
    with pytest.raises(StorageError):
        await backend.stat("k")
    assert "1 calls, fired: ['fail stat k']" in repr(backend)


def test_a_lost_answer_of_open_leaves_the_file_and_no_descriptor() -> None:
    inner = SimulatedFiles()
    files = FaultyFiles(inner, [Fault(do="lose_answer", verb="open")])
    with pytest.raises(OSError, match="injected"):
        files.open("/f", os.O_WRONLY | os.O_CREAT)
    assert inner.listdir("/") == ["f"]
    assert inner.open_count == 0
