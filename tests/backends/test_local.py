"""What is particular to the local backend: links, leftovers, folders, O_DIRECT, the two ways to read."""

import asyncio
import errno
import functools
import mmap
import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_reader import BELIEVED_BYTES, BOUNCE_BYTES, PIECE_BYTES
from aiockpt.backends.local_tree import Tree
from aiockpt.backends.ranges import Buffers
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError, StorageFullError, UsageError
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.open import open_backend
from aiockpt.testing.backend_suite import download, patterned, upload
from aiockpt.testing.recording import RecordingFiles
from tests.fails import fails
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import simulated_world
from tests.simulated.virtual_time import run_virtually


def on(files: SimulatedFiles | RecordingFiles, *, direct: bool | None = None) -> LocalBackend:
    return LocalBackend("/r", world=World(files, token=simulated_world().token), direct=direct)


def direct_writes(recording: RecordingFiles) -> list[tuple[int, int]]:
    """Return (offset, length) of each write that went past the page cache."""
    fds = {call.fd for call in recording.calls if call.verb == "open" and call.flags & os.O_DIRECT}
    return [(call.offset, len(call.data)) for call in recording.calls if call.verb == "pwrite" and call.fd in fds]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Links


@pytest.mark.parametrize("verb", ["get", "open", "stat"])
async def test_a_link_in_the_place_of_an_object_is_not_followed(tmp_path: Path, verb: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    backend = LocalBackend(tmp_path / "root")
    with pytest.raises(StorageError, match="symbolic link") as caught:
        await (backend.get("link", 10) if verb == "get" else getattr(backend, verb)("link"))
    assert caught.value.key == "link"
    assert caught.value.damaged, "the next older step is taken"


async def test_a_link_in_the_place_of_a_folder_is_not_followed_by_any_verb(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "k").write_bytes(b"secret")
    (tmp_path / "root" / "s").mkdir(parents=True)
    (tmp_path / "root" / "s" / "link").symlink_to(outside)
    backend = LocalBackend(tmp_path / "root")
    for call in (
        backend.get("s/link/k", 10),
        backend.open("s/link/k"),
        backend.stat("s/link/k"),
        backend.put("s/link/new", b""),
        backend.put_new("s/link/new", b""),
        backend.create("s/link/new", 0),
        backend.list("s/link"),
        backend.delete(["s/link/k"]),
    ):
        await fails(call, StorageError, "symbolic link")
    assert [path.name for path in outside.iterdir()] == ["k"]
    assert (await backend.list("s")).folders == ()


async def test_a_folder_that_became_a_link_after_it_was_used_is_not_followed(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "root")
    await backend.put("s/k", b"x")
    (tmp_path / "root" / "s").rename(tmp_path / "moved")
    (tmp_path / "root" / "s").symlink_to(tmp_path / "moved")
    await fails(backend.put("s/new", b"y"), StorageError, "symbolic link")
    assert not (tmp_path / "moved" / "new").exists()


async def test_a_link_is_never_an_object_that_exists_but_keeps_its_key_taken(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nowhere")
    backend = LocalBackend(tmp_path)
    assert (await backend.list("")).objects == ()
    await fails(backend.put_new("link", b""), ObjectExistsError)
    await fails(backend.create("link", 0), ObjectExistsError)
    await backend.put("link", b"replaced, not written through")
    assert not (tmp_path / "link").is_symlink()


async def test_a_pipe_is_no_object_and_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    backend = LocalBackend(tmp_path)
    await fails(backend.open("pipe"), ObjectNotFoundError)
    await fails(backend.stat("pipe"), ObjectNotFoundError)
    assert (await backend.list("")).objects == ()


class _OtherLater(OsFiles):
    """Puts something else in the place of the file between the look and the opening."""

    def __init__(self, make: Callable[[str], None]) -> None:
        self.make = make

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:  # type: ignore[override]
        if path.endswith("/k"):
            os.unlink(path)
            self.make(path)
        return os.open(path, flags, mode)


@pytest.mark.parametrize(
    ("make", "error"), [(os.mkfifo, ObjectNotFoundError), (functools.partial(os.symlink, "secret"), StorageError)]
)
async def test_a_pipe_or_a_link_put_there_at_the_last_moment_neither_hangs_the_reader_nor_is_followed(
    tmp_path: Path, make: Callable[[str], None], error: type[StorageError]
) -> None:
    for name in ("k", "secret"):
        (tmp_path / name).write_bytes(b"secret")
    for call in ("open", "get"):
        (tmp_path / "k").unlink()
        (tmp_path / "k").write_bytes(b"x")
        backend = LocalBackend(tmp_path, world=World(_OtherLater(make)))
        await fails(backend.open("k") if call == "open" else backend.get("k", 10), error)


# Names


async def test_leftovers_and_impossible_names_are_not_listed(tmp_path: Path) -> None:
    for name in ("real", ".tmp-0123", "back\\slash", "new\nline"):
        (tmp_path / name).write_bytes(b"x")
    assert [found.key for found in (await LocalBackend(tmp_path).list("")).objects] == ["real"]


async def test_leftovers_of_a_crash_go_with_their_folder(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    await backend.put("s/r/k", b"x")
    (tmp_path / "s" / "r" / ".tmp-0123").write_bytes(b"left")
    await backend.delete(["s/r/k"])
    assert names_in(tmp_path) == []


async def test_empty_folders_of_a_crash_can_be_deleted_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "s" / "a" / "d").mkdir(parents=True)
    (tmp_path / "s" / "a" / "r").mkdir()
    backend = LocalBackend(tmp_path)
    await backend.delete(["s/a/d", "s/a/r"])
    assert names_in(tmp_path) == []


async def test_folders_above_one_that_is_gone_already_are_removed_too(tmp_path: Path) -> None:
    (tmp_path / "s" / "a").mkdir(parents=True)
    await LocalBackend(tmp_path).delete(["s/a/d/k"])
    assert names_in(tmp_path) == []


async def test_a_root_that_others_removed_is_made_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "root")
    await backend.put("s/k", b"1")
    (tmp_path / "root" / "s" / "k").unlink()
    (tmp_path / "root" / "s").rmdir()
    (tmp_path / "root").rmdir()
    await backend.put("s/k", b"2")
    assert await backend.get("s/k", 1) == b"2"


async def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "root")
    assert (await backend.list("")).folders == ()
    await backend.delete(["a/b"])
    assert (await backend.space()).free_bytes
    assert not (tmp_path / "root").exists()


async def test_an_object_in_the_place_of_a_folder_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    await backend.put("a", b"x")
    for call in (backend.put("a/b", b""), backend.put_new("a/b", b""), backend.create("a/b", 1)):
        await fails(call, StorageError, "'a/b'")


class _ChurningFiles(SimulatedFiles):
    """Somebody removes the folder of every file just before it is opened."""

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_CREAT:
            self.rmdir(path.rpartition("/")[0])
        return super().open(path, flags, mode)


def test_a_folder_that_keeps_vanishing_is_an_error_in_the_end() -> None:
    with pytest.raises(StorageError, match="the folder of 's/k' was removed 16 times") as caught:
        run_virtually(lambda: on(_ChurningFiles()).put("s/k", b"x"))
    assert caught.value.retryable


class _DeletedAtOnce(SimulatedFiles):
    """Somebody sees each linked object at once, deletes it, and removes its folder."""

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.unlink(source)
        self.unlink(target)
        self.rmdir(target.rpartition("/")[0])


async def test_an_object_deleted_as_soon_as_it_was_there_was_put_and_is_not_put_again() -> None:
    backend = on(_DeletedAtOnce())
    await backend.put_new("s/k", b"x")
    assert (await backend.list("")).folders == ()


# Writing


async def test_whole_aligned_pages_are_written_past_the_page_cache_and_the_rest_through_it() -> None:
    recording = RecordingFiles(SimulatedFiles())
    data = patterned(5 * 4096 + 100)
    file = await on(recording).create("f", data.nbytes)
    await file.write(4096, [data[4096 : 4 * 4096]])
    await file.write(0, [data[:4096]])
    await file.write(4 * 4096, [data[4 * 4096 :]])
    await file.finish()
    assert direct_writes(recording) == [(4096, 3 * 4096), (0, 4096), (4 * 4096, 4096)]
    assert await on(recording).get("f", 1 << 20) == bytes(data)


async def test_odd_ends_of_a_block_leave_its_pages_to_o_direct() -> None:
    recording = RecordingFiles(SimulatedFiles())
    memory = patterned(4 * 4096)
    data = memory[4000 : 4000 + 96 + 2 * 4096 + 50]  # its second page boundary is one of the file too
    file = await on(recording).create("f", 4000 + data.nbytes)
    await file.write(4000, [data])
    await file.write(0, [memory[:4000]])
    await file.finish()
    assert direct_writes(recording) == [(4096, 2 * 4096)]
    assert await on(recording).get("f", 1 << 20) == bytes(memory[: 4000 + data.nbytes])


async def test_memory_out_of_line_with_the_file_goes_through_the_page_cache() -> None:
    recording = RecordingFiles(SimulatedFiles())
    memory = patterned(3 * 4096)
    await upload(on(recording), "f", memory[8 : 8 + 2 * 4096])
    assert direct_writes(recording) == []


async def test_direct_false_never_opens_past_the_page_cache() -> None:
    recording = RecordingFiles(SimulatedFiles())
    backend = on(recording, direct=False)
    await upload(backend, "f", patterned(8192))
    assert not [call for call in recording.calls if call.flags & os.O_DIRECT]
    assert backend.traits.alignment == 1


async def test_a_file_system_without_o_direct_is_asked_once() -> None:
    recording = RecordingFiles(SimulatedFiles(direct_alignment=None))
    backend = on(recording)
    assert backend.traits.alignment == 4096
    for key in ("a", "b"):
        await upload(backend, key, patterned(8192))
    assert len([call for call in recording.calls if call.flags & os.O_DIRECT]) == 1
    assert backend.traits.alignment == 1
    assert backend.statistics().direct is False


async def test_a_disk_with_larger_blocks_is_asked_once_and_written_through_the_page_cache() -> None:
    recording = RecordingFiles(SimulatedFiles(direct_alignment=1 << 16))
    backend = on(recording)
    data = patterned(8192)
    await upload(backend, "f", data, block_bytes=4096)
    assert await backend.get("f", 1 << 20) == bytes(data)
    assert backend.statistics().direct is False
    assert [call.error for call in recording.calls if call.verb == "pwrite"] == [errno.EINVAL, 0, 0]


class _ShortDirectWrites(SimulatedFiles):
    """Takes 512 bytes of the first write past the page cache, which is less than a page."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self._open[fd].flags & os.O_DIRECT and offset == 0:
            self.direct_alignment = 512
            data = data[:512]
        return super().pwrite(fd, data, offset)


async def test_a_direct_write_that_ends_within_a_page_is_continued_through_the_page_cache() -> None:
    recording = RecordingFiles(_ShortDirectWrites())
    data = patterned(3 * 4096)
    await upload(on(recording), "f", data)
    assert direct_writes(recording) == [(0, 512)]
    assert await on(recording).get("f", 1 << 20) == bytes(data)


async def test_direct_true_is_refused_where_the_file_system_cannot() -> None:
    files = SimulatedFiles(direct_alignment=None)
    backend = on(files, direct=True)
    await fails(backend.create("f", 4096), StorageError, "direct=None")
    await fails(backend.stat("f"), ObjectNotFoundError)
    assert files.open_count == 0


async def test_a_file_that_does_not_fit_is_refused_before_a_byte_and_removed() -> None:
    files = SimulatedFiles(capacity_bytes=10_000)
    backend = on(files)
    await fails(backend.create("big", 10_001), StorageFullError, "Free space")
    assert (await backend.list("")).objects == ()
    await upload(backend, "fits", patterned(10_000))
    assert (await backend.space()).free_bytes == 0
    await fails(backend.put("small", b"1"), StorageFullError)
    assert [found.key for found in (await backend.list("")).objects] == ["fits"]


async def test_the_space_of_a_file_is_reserved_at_once() -> None:
    backend = on(SimulatedFiles(capacity_bytes=10_000))
    file = await backend.create("f", 9_000)
    assert (await backend.space()).free_bytes == 1_000
    await file.abort()
    assert (await backend.space()).free_bytes == 10_000


class _SlowFlush(SimulatedFiles):
    """Says when a flush has begun, and waits for leave to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.go_on: queue.SimpleQueue[None] = queue.SimpleQueue()

    def fdatasync(self, fd: int) -> None:
        self.begun.put(None)
        self.go_on.get(timeout=250)
        super().fdatasync(fd)


async def test_an_abort_while_the_file_is_being_finished_leaves_it_alone() -> None:
    files = _SlowFlush()
    backend = on(files)
    file = await backend.create("f", 1)
    await file.write(0, [memoryview(b"x")])
    finishing = asyncio.ensure_future(file.finish())
    await asyncio.to_thread(files.begun.get, timeout=250)
    await file.abort()
    files.go_on.put(None)
    await finishing
    assert await backend.get("f", 1) == b"x"
    assert files.open_count == 0


# Reading


@pytest.fixture
async def cold() -> LocalBackend:
    """A backend whose page cache is empty, with a file "f" of a few bounce blocks."""
    backend = on(SimulatedFiles(page_cache="cold"))
    await upload(backend, "f", patterned(2 * BOUNCE_BYTES + 5000), block_bytes=BOUNCE_BYTES)
    return backend


async def test_uncached_bytes_are_read_past_the_page_cache(cold: LocalBackend) -> None:
    data = bytes(patterned(2 * BOUNCE_BYTES + 5000))
    reader = await cold.open("f")
    for offset, size in ((0, len(data)), (4097, 3), (BOUNCE_BYTES - 1, 2), (len(data) - 1, 1), (4095, BOUNCE_BYTES)):
        assert await download(reader, offset, size) == data[offset : offset + size]
    statistics = cold.statistics()
    assert statistics.cached_read_bytes == 0
    assert statistics.direct_read_bytes == len(data) + 3 + 2 + 1 + BOUNCE_BYTES
    assert statistics.bounce_bytes == BOUNCE_BYTES
    await reader.close()
    assert cold.statistics().bounce_bytes == 0


class _CountingProbes(SimulatedFiles):
    """Keeps how many bytes were asked for of an empty page cache."""

    def __init__(self) -> None:
        super().__init__(page_cache="cold")
        self.probed: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            self.probed.append(sum(buffer.nbytes for buffer in buffers))
        return super().preadv(fd, buffers, offset, flags)


async def test_the_page_cache_is_asked_for_one_page_lest_it_reads_ahead_in_vain() -> None:
    files = _CountingProbes()
    await upload(on(files), "f", patterned(3 * PIECE_BYTES))
    reader = await on(files).open("f")
    await download(reader)
    assert files.probed == [4096]
    await reader.close()


async def test_a_page_cache_that_had_nothing_is_not_asked_again_for_a_while() -> None:
    files = _CountingProbes()
    size = 3 * PIECE_BYTES
    await upload(on(files), "f", patterned(size))
    reader = await on(files).open("f")
    for offset in range(0, size, PIECE_BYTES // 4):
        await download(reader, offset, PIECE_BYTES // 4)
    assert files.probed == [4096]
    for _ in range(5 * BELIEVED_BYTES // (4 * size)):
        await download(reader)
    assert len(files.probed) == 2
    await reader.close()


async def test_uncached_bytes_are_seen_in_small_pieces_and_are_those_that_are_placed(cold: LocalBackend) -> None:
    reader = await cold.open("f")
    pieces: list[bytes] = []

    into = bytearray(3 * PIECE_BYTES + 7)
    await reader.read(100, [memoryview(into)], lambda run: pieces.append(bytes(run)))
    assert b"".join(pieces) == bytes(into)
    assert max(map(len, pieces)) == PIECE_BYTES
    await reader.close()


async def test_cached_bytes_are_read_straight_into_the_buffers() -> None:
    backend = on(SimulatedFiles())
    await upload(backend, "f", patterned(100_000))
    reader = await backend.open("f")
    into = memoryview(bytearray(100_000))
    seen: list[memoryview] = []
    await reader.read(0, [into], seen.append)
    assert all(run.obj is into.obj for run in seen)
    assert backend.statistics().cached_read_bytes == 100_000
    assert backend.statistics().bounce_bytes == 0
    await reader.close()


class _HalfCached(SimulatedFiles):
    """Only the first 2 MiB of each file are cached."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            if offset >= 2 * PIECE_BYTES:
                raise BlockingIOError(errno.EAGAIN, "not cached")
            left = 2 * PIECE_BYTES - offset
            buffers = [buffer[: max(0, left)] for buffer in buffers[:1]]
        return super().preadv(fd, buffers, offset, flags)


async def test_a_file_cached_in_part_is_read_both_ways() -> None:
    backend = on(_HalfCached())
    data = patterned(4 * PIECE_BYTES)
    await upload(backend, "f", data)
    reader = await backend.open("f")
    seen = bytearray()
    into = bytearray(data.nbytes)
    await reader.read(0, [memoryview(into)[:33], memoryview(into)[33:]], seen.extend)
    assert bytes(into) == bytes(seen) == bytes(data)
    assert backend.statistics().cached_read_bytes == 2 * PIECE_BYTES
    await reader.close()


class _NoDirectReads(SimulatedFiles):
    """A file system that takes O_DIRECT at open and refuses the transfer."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if self._open[fd].flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return super().preadv(fd, buffers, offset, flags)


async def test_a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache() -> None:
    backend = on(_NoDirectReads(page_cache="cold"))
    data = patterned(20_000)
    await upload(backend, "f", data)
    reader = await backend.open("f")
    assert await download(reader) == bytes(data)
    assert backend.statistics().direct is False
    await reader.close()


@pytest.mark.parametrize("direct", [None, False])
async def test_a_file_truncated_while_it_is_open_is_an_error_that_says_where(
    tmp_path: Path, direct: bool | None
) -> None:
    backend = LocalBackend(tmp_path, direct=direct)
    await upload(backend, "f", patterned(100_000))
    _forget_cached(tmp_path / "f")
    reader = await backend.open("f")
    os.truncate(tmp_path / "f", 50_000)
    await fails(download(reader), StorageError, "'f' ends at byte 50000")
    await reader.close()


async def test_nothing_is_read_of_an_object_known_to_be_too_short() -> None:
    backend = on(SimulatedFiles())
    await backend.put("k", b"0123456789")
    reader = await backend.open("k")
    seen: list[memoryview] = []
    await fails(reader.read(0, [memoryview(bytearray(11))], seen.append), StorageError, "ends at byte 10")
    assert seen == []
    await reader.close()


async def test_an_object_replaced_while_it_is_read_is_not_mixed() -> None:
    files = SimulatedFiles(page_cache="cold")
    backend = on(files)
    await backend.put("k", bytes(patterned(10_000)))
    reader = await backend.open("k")
    await backend.put("k", b"other" * 2000)
    await fails(download(reader), StorageError, "replaced while it was read")
    await reader.close()
    assert files.open_count == 0


async def test_real_uncached_files_are_read_right(tmp_path: Path) -> None:
    """Whichever way this file system takes: O_DIRECT where it can, the page cache else."""
    backend = LocalBackend(tmp_path)
    data = patterned(3 * PIECE_BYTES + 4321)
    await upload(backend, "f", data)
    _forget_cached(tmp_path / "f")
    reader = await backend.open("f")
    seen = bytearray()
    into = bytearray(data.nbytes - 77)
    await reader.read(77, [memoryview(into)], seen.extend)
    assert bytes(into) == bytes(seen) == bytes(data[77:])
    await reader.close()


def _forget_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


async def test_a_temporary_name_that_is_taken_is_not_a_taken_key() -> None:
    files = SimulatedFiles()
    files.mkdir("/r")
    first_name = simulated_world().token(8).hex()
    files.close(files.open(f"/r/.tmp-{first_name}", os.O_CREAT | os.O_WRONLY))
    await on(files).put_new("k", b"x")
    assert await on(files).get("k", 1) == b"x"


async def test_a_random_source_that_repeats_itself_is_an_error() -> None:
    files = SimulatedFiles()
    files.mkdir("/r")
    files.close(files.open("/r/.tmp-0000000000000000", os.O_CREAT | os.O_WRONLY))
    await fails(LocalBackend("/r", world=World(files, token=bytes)).put_new("k", b"x"), StorageError, "random names")


def test_buffers_are_taken_in_order_and_in_part() -> None:
    first, second = bytearray(3), bytearray(5)
    buffers = Buffers([memoryview(first), memoryview(b""), memoryview(second)])
    assert [run.nbytes for run in buffers.peek(4)] == [3, 1]
    for run in buffers.take(4):
        run[:] = b"x" * run.nbytes
    assert (bytes(first), bytes(second)) == (b"xxx", b"x\0\0\0\0")
    assert buffers.left_bytes == 4
    assert [run.nbytes for run in buffers.peek(100)] == [4]


def test_one_call_gets_no_more_buffers_than_the_system_takes() -> None:
    buffers = Buffers([memoryview(mmap.mmap(-1, 1)) for _ in range(1500)])
    assert len(buffers.peek(1 << 20)) == os.sysconf("SC_IOV_MAX") == 1024


# Descriptors and facts


async def test_a_handle_in_use_is_not_retired_until_it_is_free() -> None:
    handle = Tree(SimulatedFiles(), "/r").handle("k")
    with handle.use():
        retiring = asyncio.ensure_future(handle.retire())
        await asyncio.sleep(0)
        assert not retiring.done()
        with pytest.raises(UsageError), handle.use():
            pass
    assert await retiring
    assert not await handle.retire()


async def test_a_cancelled_retirement_leaves_the_handle_to_the_next() -> None:
    handle = Tree(SimulatedFiles(), "/r").handle("k")
    with handle.use():
        retiring = asyncio.ensure_future(handle.retire())
        await asyncio.sleep(0)
        retiring.cancel()
        await asyncio.wait([retiring])
    assert await handle.retire()


def test_closing_a_handle_closes_the_rest_when_one_fails() -> None:
    files = SimulatedFiles()
    files.mkdir("/r")
    handle = Tree(files, "/r").handle("k")
    fds = [handle.open(f"/r/{name}", os.O_WRONLY | os.O_CREAT) for name in "abc"]
    files.close(fds[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        handle.close()
    assert files.open_count == 0


async def test_the_url_leads_back_to_the_root(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "with space" / "ü%20")
    await backend.put("k", b"x")
    assert await open_backend(backend.url).get("k", 1) == b"x"


async def test_statistics_and_repr_tell_the_state(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, direct=False)
    assert backend.statistics().hard_links is None
    await backend.put_new("k", b"x")
    reader = await backend.open("k")
    statistics = backend.statistics()
    assert (statistics.direct, statistics.hard_links, statistics.open_readers) == (False, True, 1)
    assert {limiter.name for limiter in statistics.limiters} == {
        "local files",
        "local block writes",
        "local block reads",
    }
    assert repr(backend) == f"<LocalBackend {str(tmp_path)!r} direct=no, 1 readers open>"
    await reader.close()


async def test_files_get_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        backend = LocalBackend(tmp_path)
        await backend.put("k", b"x")
        await upload(backend, "f", memoryview(b"x"))
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("k", "f")] == [0o640, 0o640]
