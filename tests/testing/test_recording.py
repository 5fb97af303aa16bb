"""Recordings of calls to the storage, whole and in order."""

import errno
import os

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import ObjectNotFoundError
from aiockpt.testing.backend_suite import upload
from aiockpt.testing.recording import Call, Operation, RecordingBackend, RecordingFiles
from tests.simulated.simulated_files import SimulatedFiles


async def test_every_operation_of_a_backend_is_written_down() -> None:
    backend = RecordingBackend(MemoryBackend())
    await backend.put("k", b"12")
    await backend.put_new("new", b"123")
    await upload(backend, "f", memoryview(b"1234"))
    reader = await backend.open("f")
    await reader.read(1, [memoryview(bytearray(2)), memoryview(bytearray(1))])
    await reader.close()
    await backend.get("k", 9)
    await backend.stat("k")
    await backend.list("")
    await backend.space()
    with pytest.raises(ObjectNotFoundError):
        await backend.open("absent")
    await (await backend.create("gone", 0)).abort()
    await backend.delete(["k", "new"])
    await backend.close()
    assert backend.operations == [
        Operation("put", "k", size=2),
        Operation("put_new", "new", size=3),
        Operation("create", "f", size=4),
        Operation("upload.write", "f", 0, 4),
        Operation("upload.finish", "f"),
        Operation("open", "f"),
        Operation("reader.read", "f", 1, 3),
        Operation("reader.close", "f"),
        Operation("get", "k", size=9),
        Operation("stat", "k"),
        Operation("list", ""),
        Operation("space", ""),
        Operation("open", "absent", error="ObjectNotFoundError"),
        Operation("create", "gone"),
        Operation("upload.abort", "gone"),
        Operation("delete", "k new"),
        Operation("close", ""),
    ]


def test_every_call_that_changes_flushes_opens_or_closes_is_written_down() -> None:
    files = RecordingFiles(SimulatedFiles())
    flags = os.O_RDWR | os.O_CREAT
    files.mkdir("/a")
    fd = files.open("/a/f", flags)
    data = bytearray(b"data")
    files.pwrite(fd, memoryview(data), 3)
    data[:] = b"gone"  # the log has a copy
    files.fallocate(fd, 0, 100)
    files.fdatasync(fd)
    files.fsync(fd)
    files.close(fd)
    files.link("/a/f", "/a/g")
    files.rename("/a/g", "/a/h")
    for name in "fh":
        files.unlink(f"/a/{name}")
    files.rmdir("/a")
    assert files.calls == [
        Call(verb="mkdir", path="/a"),
        Call(verb="open", path="/a/f", fd=fd, flags=flags),
        Call(verb="pwrite", path="/a/f", fd=fd, offset=3, data=b"data"),
        Call(verb="fallocate", path="/a/f", fd=fd, size=100),
        Call(verb="fdatasync", path="/a/f", fd=fd),
        Call(verb="fsync", path="/a/f", fd=fd),
        Call(verb="close", path="/a/f", fd=fd),
        Call(verb="link", path="/a/f", target="/a/g"),
        Call(verb="rename", path="/a/g", target="/a/h"),
        Call(verb="unlink", path="/a/f"),
        Call(verb="unlink", path="/a/h"),
        Call(verb="rmdir", path="/a"),
    ]


def test_mere_looks_are_not_written_down() -> None:
    files = RecordingFiles(SimulatedFiles())
    files.lstat("/")
    files.listdir("/")
    files.statvfs("/")
    assert files.calls == []


def test_failures_are_written_down_with_their_errno() -> None:
    files = RecordingFiles(SimulatedFiles(capacity_bytes=1))
    fd = files.open("/f", os.O_RDWR | os.O_CREAT)
    for call in (
        lambda: files.open("/absent", os.O_RDONLY),
        lambda: files.pwrite(fd, memoryview(b"12"), 0),
        lambda: files.unlink("/absent"),
    ):
        with pytest.raises(OSError):
            call()
    assert [(call.verb, call.error) for call in files.calls[1:]] == [
        ("open", errno.ENOENT),
        ("pwrite", errno.ENOSPC),
        ("unlink", errno.ENOENT),
    ]
    assert not any(call.changes for call in files.calls[1:])


def test_only_the_bytes_that_were_taken_are_written_down() -> None:
    class TakesTwo(SimulatedFiles):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:2], offset)

    files = RecordingFiles(TakesTwo())
    files.pwrite(files.open("/f", os.O_RDWR | os.O_CREAT), memoryview(b"123"), 0)
    assert files.calls[-1].data == b"12"


def test_calls_tell_whether_a_power_cut_could_differ() -> None:
    assert Call(verb="open", path="/f", flags=os.O_CREAT).changes
    assert not Call(verb="open", path="/f", flags=os.O_RDONLY).changes
    assert not Call(verb="close", path="/f").changes
    assert Call(verb="fsync", path="/f").changes
    assert Call(verb="fsync", path="/f").is_flush
    assert str(Call(verb="link", path="/f", target="/g")) == "link /f → /g"
