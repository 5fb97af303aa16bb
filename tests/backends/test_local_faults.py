"""Failing system calls of the local backend: every call of every verb, with every errno and more."""

import errno
import functools
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_tree import LEFTOVER_PREFIX
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError
from aiockpt.runtime.world import Files, World
from aiockpt.testing.backend_suite import download, patterned, upload
from aiockpt.testing.faults import Fault, FaultyFiles
from aiockpt.testing.recording import Call, RecordingFiles
from tests.fails import fails
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulated_nodes import Folder, walk
from tests.simulated.simulation import SimulatedClock, crash_states, run_inline
from tests.simulated.virtual_time import run_virtually

DATA = patterned(3 * 4096 + 77)
OLD = b"old" * 100


seeds = itertools.count()


def on(files: Files) -> LocalBackend:
    return LocalBackend("/data/r", world=World(files, SimulatedClock(), random.Random(next(seeds)).randbytes))


async def put(backend: LocalBackend) -> None:
    await backend.put("s/k", bytes(DATA))


async def put_new(backend: LocalBackend) -> None:
    await backend.put_new("s/new", bytes(DATA))


async def write_file(backend: LocalBackend) -> None:
    file = await backend.create("s/d/f", DATA.nbytes)
    try:
        await file.write(4096, [DATA[4096:]])
        await file.write(0, [DATA[:4096]])
        await file.finish()
    except BaseException:
        await file.abort()
        raise


async def read_all(backend: LocalBackend) -> None:
    reader = await backend.open("s/old")
    try:
        seen = bytearray()
        into = bytearray(reader.size)
        await reader.read(0, [memoryview(into)], seen.extend)
        assert bytes(into) == bytes(seen) == bytes(DATA)
    finally:
        with suppress(StorageError):
            await reader.close()
    assert await backend.get("s/old", 1 << 20) == bytes(DATA)


async def look(backend: LocalBackend) -> None:
    assert (await backend.stat("s/old")).size == DATA.nbytes
    listing = await backend.list("s")
    assert "s/old" in (*(stat.key for stat in listing.objects), *listing.others)
    await backend.space()


async def delete(backend: LocalBackend) -> None:
    await backend.delete(["s/k", "t/k"])


Program = Callable[[LocalBackend], Awaitable[None]]
ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.EAGAIN, errno.ENOMEM]
PROGRAMS: list[Program] = [put, put_new, write_file, read_all, look, delete]


def prepared(page_cache: str) -> SimulatedFiles:
    files = SimulatedFiles(page_cache="cold" if page_cache == "cold" else "warm")

    async def main() -> None:
        await on(files).put("s/k", OLD)
        await on(files).put("t/k", OLD)
        await upload(on(files), "s/old", DATA)

    run_inline(main)
    return files


async def check(files: SimulatedFiles) -> None:
    """Nothing is open, the old objects are old or gone, the new are whole or absent, and all works again."""
    assert files.open_count == 0
    backend = on(files)
    assert await backend.get("s/old", 1 << 20) == bytes(DATA)
    for key in ("s/k", "s/new", "t/k"):
        with suppress(ObjectNotFoundError):
            assert await backend.get(key, 1 << 20) in (OLD, bytes(DATA))
    await put(backend)
    with suppress(ObjectExistsError):
        await put_new(backend)
    assert await backend.get("s/new", 1 << 20) == bytes(DATA)
    await backend.delete(["s/d/f"])
    await write_file(backend)
    assert await backend.get("s/d/f", 1 << 20) == bytes(DATA)


def leftovers(files: Files) -> list[str]:
    assert isinstance(files, SimulatedFiles)
    folders = [node for node in walk(files.root) if isinstance(node, Folder)]
    return [name for folder in folders for name in folder.names if name.startswith(LEFTOVER_PREFIX)]


def run_with(program: Program, faults: list[Fault], page_cache: str = "warm") -> tuple[bool, FaultyFiles]:
    """Run *program* with *faults* and check what is left; return whether it succeeded."""
    files = prepared(page_cache)
    faulty = FaultyFiles(files, faults)

    async def main() -> bool:
        try:
            await program(on(faulty))
        except StorageError:
            return False
        return True

    succeeded = run_inline(main)
    run_inline(lambda: check(files))
    return succeeded, faulty


@pytest.mark.parametrize("page_cache", ["warm", "cold"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_errno_at_every_call_is_our_error_or_no_harm(program: Program, page_cache: str) -> None:
    count = run_with(program, [], page_cache)[1].call_count
    failures = 0
    for at in range(1, count + 1):
        for number in ERRNOS if program is look else [*ERRNOS, errno.ENOENT]:  # ENOENT while looking is no error
            succeeded, faulty = run_with(program, [Fault(do="fail", at=at, error=number)], page_cache)
            [fired] = faulty.schedule.fired
            assert "unlink" in fired or not leftovers(faulty.inner)
            failures += not succeeded
    assert failures >= count  # most calls matter


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_disk_that_fails_for_good_never_hangs_a_verb(program: Program) -> None:
    for verb in ("*", "open", "pwrite", "preadv", "fsync", "fdatasync", "lstat", "mkdir", "unlink"):
        run_with(program, [Fault(do="fail", verb=verb, times=None)])


@pytest.mark.parametrize("program", [put, put_new, write_file, read_all])
@pytest.mark.parametrize("page_cache", ["warm", "cold"])
def test_short_transfers_are_continued(program: Program, page_cache: str) -> None:
    faults = [Fault(do="short", verb="pwrite", times=None), Fault(do="short", verb="preadv", times=None)]
    succeeded, faulty = run_with(program, faults, page_cache)
    assert succeeded
    assert faulty.schedule.fired


class _TakesNothing(SimulatedFiles):
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return 0


@pytest.mark.parametrize("program", [put, put_new, write_file])
async def test_a_file_system_that_takes_no_bytes_is_an_error_and_no_endless_loop(program: Program) -> None:
    files = _TakesNothing()
    await fails(program(on(files)), StorageError, "accepted none")
    assert files.open_count == 0


@pytest.mark.parametrize("program", [put, put_new, write_file])
@pytest.mark.parametrize("verb", ["fsync", "fdatasync"])
def test_a_flush_that_fails_is_never_success_whatever_is_flushed_later(program: Program, verb: str) -> None:
    count = sum(call.verb == verb for call in calls_of(program))
    assert count
    for at in range(1, count + 1):
        assert not run_with(program, [Fault(do="fail", verb=verb, at=at)])[0]


def calls_of(program: Program) -> list[Call]:
    recording = RecordingFiles(prepared("warm"))

    async def main() -> None:
        await program(on(recording))

    run_inline(main)
    return recording.calls


def test_a_deletion_whose_flush_failed_is_made_durable_by_the_next() -> None:
    files = prepared("warm")
    faulty = FaultyFiles(files, [Fault(do="fail", verb="fsync", match="/data/r/s")])
    with pytest.raises(StorageError):
        run_inline(lambda: on(faulty).delete(["s/k"]))
    files.mkdir("/data/r/other")  # something that the next flush of the folder does not depend on
    recording = RecordingFiles(files)
    run_inline(lambda: on(recording).delete(["s/k"]))
    assert [str(call) for call in recording.calls if call.is_flush] == ["fsync /data/r/s"]


def test_a_link_whose_answer_was_lost_counts() -> None:
    """NFS repeats a request whose answer was lost, and the second one finds the name taken: by our own file."""
    fault = Fault(do="lose_answer", verb="link", error=errno.EEXIST)
    assert run_with(put_new, [fault])[0]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
async def test_without_hard_links_objects_are_created_exclusively(number: int) -> None:
    files = FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="link", error=number, times=None)])
    backend = on(files)
    await backend.put_new("k", b"first")
    assert backend.statistics().hard_links is False
    await fails(backend.put_new("k", b"second"), ObjectExistsError)
    assert await backend.get("k", 10) == b"first"
    assert len([fired for fired in files.schedule.fired if "link" in fired]) == 1


async def test_failing_to_create_exclusively_never_removes_the_winner() -> None:
    files = SimulatedFiles(hard_links=False)
    backend = on(FaultyFiles(files, [Fault(do="fail", verb="open", match="*/k", at=2, error=errno.EMFILE)]))
    await backend.put_new("k", b"first")
    await fails(backend.put_new("k", b"second"))
    assert await on(files).get("k", 10) == b"first"


async def test_running_out_of_descriptors_is_not_taken_for_a_disk_without_o_direct() -> None:
    files = SimulatedFiles()
    backend = on(FaultyFiles(files, [Fault(do="fail", verb="open", match="*/f", at=2, error=errno.EMFILE)]))
    await fails(write_file(backend), StorageError, "Too many open files")
    assert files.open_count == 0
    await write_file(backend)
    assert backend.statistics().direct is True


async def test_a_file_that_could_not_be_created_exclusively_is_not_removed() -> None:
    files = SimulatedFiles()
    backend = on(files)
    await backend.put("f", b"first")
    await fails(backend.create("f", 10), ObjectExistsError)
    assert await backend.get("f", 10) == b"first"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
async def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(number: int) -> None:
    backend = on(FaultyFiles(SimulatedFiles(), [Fault(do="fail", verb="fallocate", error=number)]))
    await write_file(backend)
    assert await backend.get("s/d/f", 1 << 20) == bytes(DATA)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
async def test_a_parent_of_the_root_that_may_not_be_flushed_is_no_error(number: int) -> None:
    files = SimulatedFiles()
    files.mkdir("/data")
    files.mkdir("/data/r")
    backend = on(FaultyFiles(files, [Fault(do="fail", verb="open", match="/", error=number)]))
    await backend.put("k", b"x")
    assert await backend.get("k", 1) == b"x"


async def test_a_disk_error_above_the_root_is_an_error() -> None:
    files = SimulatedFiles()
    files.mkdir("/data")
    await fails(on(FaultyFiles(files, [Fault(do="fail", verb="fsync", match="/")])).put("k", b"x"))


async def test_a_close_that_fails_fails_the_file() -> None:
    files = SimulatedFiles()
    backend = on(FaultyFiles(files, [Fault(do="fail", verb="close", match="*/d/f")]))
    await fails(write_file(backend))
    assert files.open_count == 0
    await fails(on(files).stat("s/d/f"), ObjectNotFoundError)


async def test_an_aborted_file_is_removed_also_when_closing_it_fails() -> None:
    files = SimulatedFiles()
    file = await on(FaultyFiles(files, [Fault(do="fail", verb="close", match="*/f")])).create("f", 1)
    await file.abort()
    assert (await on(files).list("")).objects == ()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EIO])
async def test_a_failing_disk_is_never_taken_for_an_empty_page_cache(number: int) -> None:
    """EAGAIN means "not cached" only when that was asked; and no other error leads to a second try."""
    files = SimulatedFiles()
    await upload(on(files), "f", DATA)
    for direct, faults in (
        (False, [Fault(do="fail", verb="preadv", error=number, times=None)]),
        (None, [Fault(do="fail", verb="preadv", error=errno.EIO)]),
    ):
        reader = await LocalBackend("/data/r", world=World(FaultyFiles(files, faults)), direct=direct).open("f")
        await fails(download(reader))
        await reader.close()


async def test_a_bit_flipped_on_the_way_is_in_what_is_seen() -> None:
    files = SimulatedFiles()
    await upload(on(files), "f", DATA)
    backend = on(FaultyFiles(files, [Fault(do="flip", verb="preadv", match="*/f", at=2, bit=13)]))
    reader = await backend.open("f")
    seen = bytearray()
    into = bytearray(reader.size)
    await reader.read(0, [memoryview(into)], seen.extend)
    assert bytes(seen) == bytes(into) != bytes(DATA)
    assert await download(reader) == bytes(DATA)
    await reader.close()


def test_after_a_failed_flush_nothing_that_was_acknowledged_is_lost() -> None:
    """Each flush fails once (and loses its bytes); then the program is run again, to its end: all must be durable."""
    count = sum(call.is_flush for call in calls_of(put_new))
    for at in range(1, count + 1):
        files = prepared("warm")
        faulty = FaultyFiles(files, [Fault(do="fail", verb="f*sync", at=at)])
        backend = on(faulty)

        async def main(backend: LocalBackend = backend) -> None:
            for key in ("s/first", "s/second"):
                try:
                    await backend.put_new(key, bytes(DATA))
                except StorageError:
                    await backend.put(key, bytes(DATA))

        run_inline(main)
        for state in crash_states(files):
            for key in ("s/first", "s/second"):
                assert run_inline(functools.partial(on(state).get, key, 1 << 20)) == bytes(DATA)


@pytest.mark.parametrize(("error", "is_bad"), [(errno.EIO, True), (errno.ESTALE, False), (errno.EACCES, False)])
def test_a_name_whose_inode_is_bad_is_listed_and_an_outage_is_not_taken_for_that(error: int, is_bad: bool) -> None:
    files = SimulatedFiles()
    run_inline(lambda: put(on(files)))
    backend = on(FaultyFiles(files, [Fault(do="fail", verb="lstat", match="*/s/k", error=error, times=None)]))
    if is_bad:
        assert run_inline(lambda: backend.list("s")).others == ("s/k",)
        return
    with pytest.raises(StorageError) as caught:
        run_virtually(lambda: backend.list("s"))
    assert not caught.value.damaged
