"""States that a power cut may leave, and simulated programs that run the same way each time."""

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiockpt.testing.recording import Call, RecordingFiles
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import (
    InlineExecutor,
    SimulatedClock,
    crash_states,
    power_cuts,
    replay,
    run_inline,
    simulated_world,
    snapshot,
)

CREATE = os.O_RDWR | os.O_CREAT


def contents(files: SimulatedFiles, path: str = "/") -> dict[str, bytes]:
    """Return each file below *path* and what it holds."""
    found: dict[str, bytes] = {}
    for name in files.listdir(path):
        child = f"{path.rstrip('/')}/{name}"
        try:
            fd = files.open(child, os.O_RDONLY)
            buffer = bytearray(files.fstat(fd).st_size)
            files.preadv(fd, [memoryview(buffer)], 0)
            files.close(fd)
            found[child] = bytes(buffer)
        except IsADirectoryError:
            found.update(contents(files, child))
    return found


def outcomes(files: SimulatedFiles, limit: int = 64) -> list[dict[str, bytes]]:
    return [contents(state) for state in crash_states(files, limit=limit)]


def flush_folder(files: SimulatedFiles, path: str = "/") -> None:
    fd = files.open(path, os.O_RDONLY | os.O_DIRECTORY)
    files.fsync(fd)
    files.close(fd)


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


def test_an_unflushed_file_may_be_there_empty_whole_or_not_at_all(files: SimulatedFiles) -> None:
    files.pwrite(files.open("/f", CREATE), memoryview(b"data"), 0)
    found = outcomes(files)
    assert {frozenset(state.items()) for state in found} == {
        frozenset(),
        frozenset({("/f", b"")}),
        frozenset({("/f", b"data")}),
    }


def test_a_flushed_file_without_a_flushed_name_may_be_gone(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    files.fdatasync(fd)
    assert {} in outcomes(files)
    assert {"/f": b""} not in outcomes(files)


def test_what_is_flushed_with_its_name_is_there_in_every_state(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    files.fsync(fd)
    flush_folder(files)
    assert outcomes(files) == [{"/f": b"data"}]


def test_a_flushed_name_without_its_folders_name_may_be_gone(files: SimulatedFiles) -> None:
    files.mkdir("/a")
    files.open("/a/f", CREATE)
    flush_folder(files, "/a")
    assert {} in outcomes(files)
    flush_folder(files)
    assert outcomes(files) == [{"/a/f": b""}]


def test_a_long_write_tears_at_sectors(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    flush_folder(files)
    files.pwrite(fd, memoryview(b"x" * 2048), 100)
    found = {state["/f"] for state in outcomes(files)}
    assert found == {
        b"",
        bytes(100) + b"x" * 2048,
        bytes(100) + b"x" * (1024 - 100),
        bytes(1024) + b"x" * (2148 - 1024),
    }


def test_torn_writes_are_drawn_by_sector_where_not_all_states_fit(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    flush_folder(files)
    for at in range(6):
        files.pwrite(fd, memoryview(bytes([at + 1]) * 4096), at * 4096)
    drawn = [state["/f"] for state in outcomes(files, limit=200)]
    sectors = {tuple(data[start] for start in range(0, len(data), 512)) for data in drawn}
    assert len(sectors) > 150
    assert any(0 < len(set(some[:8])) == 2 for some in sectors)


def test_overwrites_may_be_lost_one_by_one(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"11"), 0)
    files.fsync(fd)
    flush_folder(files)
    files.pwrite(fd, memoryview(b"2"), 0)
    files.pwrite(fd, memoryview(b"3"), 1)
    assert sorted(state["/f"] for state in outcomes(files)) == [b"11", b"13", b"21", b"23"]


def test_a_rename_is_old_or_new_and_never_neither(files: SimulatedFiles) -> None:
    for name, data in (("/key", b"old"), ("/tmp", b"new")):
        fd = files.open(name, CREATE)
        files.pwrite(fd, memoryview(data), 0)
        files.fsync(fd)
    flush_folder(files)
    files.rename("/tmp", "/key")
    assert outcomes(files) == [{"/key": b"old", "/tmp": b"new"}, {"/key": b"new"}]


def test_of_a_rename_to_another_folder_each_name_is_kept_or_lost_alone(files: SimulatedFiles) -> None:
    files.mkdir("/a")
    files.fsync(files.open("/f", CREATE))
    flush_folder(files)
    files.rename("/f", "/a/g")
    expected: list[dict[str, bytes]] = [{}, {"/f": b""}, {"/a/g": b""}, {"/a/g": b"", "/f": b""}]
    assert sorted(map(str, map(sorted, outcomes(files)))) == sorted(map(str, map(sorted, expected)))


def test_an_unflushed_removal_may_be_undone(files: SimulatedFiles) -> None:
    files.open("/f", CREATE)
    flush_folder(files)
    files.unlink("/f")
    assert outcomes(files) == [{"/f": b""}, {}]
    flush_folder(files)
    assert outcomes(files) == [{}]


def test_two_names_of_a_file_are_one_file_after_the_power_cut(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    files.link("/f", "/g")
    flush_folder(files)
    files.pwrite(fd, memoryview(b"x"), 0)
    assert outcomes(files) == [{"/f": b"", "/g": b""}, {"/f": b"x", "/g": b"x"}]
    assert all(state.lstat("/g").st_nlink == 2 for state in crash_states(files))


def test_a_flush_that_is_ignored_makes_nothing_durable(files: SimulatedFiles) -> None:
    seen: list[str] = []

    def ignore(label: str) -> bool:
        seen.append(label)
        return label.startswith("fsync_dir:")

    files.ignore = ignore
    fd = files.open("/f", CREATE)
    files.fdatasync(fd)
    files.fsync(fd)
    flush_folder(files)
    assert {} in outcomes(files)
    assert seen == ["fdatasync:/f", "fsync:/f", "fsync_dir:/"]


def test_what_a_failed_flush_lost_never_becomes_durable(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    flush_folder(files)
    files.pwrite(fd, memoryview(b"lost"), 0)
    files.mark_clean(fd)
    files.pwrite(fd, memoryview(b"kept"), 4)
    files.fsync(fd)
    assert contents(files) == {"/f": b"lostkept"}
    assert outcomes(files) == [{"/f": b"\0\0\0\0kept"}]


def test_crash_states_leave_the_file_system_alone_and_start_without_descriptors(files: SimulatedFiles) -> None:
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    for state in crash_states(files):
        assert state.open_count == 0
        state.close(state.open("/other", CREATE))
    assert contents(files) == {"/f": b"data"}
    assert files.open_count == 1


def test_each_change_is_lost_alone_and_kept_alone_before_any_draw(files: SimulatedFiles) -> None:
    for number in range(10):
        files.open(f"/f{number}", CREATE)
    found = [len(state) for state in outcomes(files, limit=22)]
    assert found[:2] == [0, 10]
    assert sorted(found[2:]) == [1] * 10 + [9] * 10


def test_the_same_seed_draws_the_same_states(files: SimulatedFiles) -> None:
    for number in range(10):
        files.open(f"/f{number}", CREATE)
    first, again, other = (
        [contents(state) for state in crash_states(files, seed=seed, limit=100)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_snapshot_keeps_both_parts_and_goes_its_own_way(files: SimulatedFiles) -> None:
    files.mkdir("/a")
    fd = files.open("/a/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    copy = snapshot(files)
    before = outcomes(files)
    files.pwrite(fd, memoryview(b"more"), 0)
    files.unlink("/a/f")
    assert contents(copy) == {"/a/f": b"data"}
    assert outcomes(copy) == before


def recorded() -> list[Call]:
    """Return the calls of writing a file with a flush of its data and one of its name."""
    files = RecordingFiles(SimulatedFiles())
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    files.fdatasync(fd)
    files.close(fd)
    with pytest.raises(FileNotFoundError):
        files.unlink("/absent")
    fd = files.open("/", os.O_RDONLY | os.O_DIRECTORY)
    files.fsync(fd)
    files.close(fd)
    return files.calls


def test_a_replay_does_the_same_again_step_by_step() -> None:
    calls = recorded()
    seen = [(done, contents(files)) for done, files in replay(calls)]
    assert [done for done, _ in seen] == list(range(len(calls) + 1))
    assert [found for _, found in seen][:3] == [{}, {"/f": b""}, {"/f": b"data"}]
    assert [outcomes(snapshot(files)) for _, files in replay(calls)][-1] == [{"/f": b"data"}]


def test_a_replay_starts_where_it_is_told_and_leaves_that_alone(files: SimulatedFiles) -> None:
    files.open("/old", CREATE)
    found = [contents(after) for _, after in replay(recorded(), start=files)]
    assert found[-1] == {"/f": b"data", "/old": b""}
    assert contents(files) == {"/old": b""}


def test_a_flush_left_out_of_a_replay_shows_at_the_end() -> None:
    calls = recorded()
    flushes = [index for index, call in enumerate(calls) if call.is_flush]
    assert [str(calls[index]) for index in flushes] == ["fdatasync /f", "fsync /"]
    for skip in ([], *([index] for index in flushes)):
        at_end = [contents(state) for done, state in power_cuts(calls, skip=skip) if done == len(calls)]
        assert (at_end == [{"/f": b"data"}]) == (not skip)


def test_power_cuts_look_before_each_change_and_at_the_end() -> None:
    calls = recorded()
    looked = {done for done, _ in power_cuts(calls)}
    assert looked == {index for index, call in enumerate(calls) if call.changes} | {len(calls)}


def test_a_clock_moves_only_when_it_is_told_to() -> None:
    clock = SimulatedClock(now_ns=100)
    assert (clock.monotonic_ns(), clock.time_ns()) == (100, 100)
    clock.advance(1.5)
    assert clock.monotonic_ns() == 1_500_000_100


def test_worlds_of_one_seed_draw_the_same_bytes() -> None:
    assert simulated_world(3).token(16) == simulated_world(3).token(16) != simulated_world(4).token(16)
    world = simulated_world()
    assert world.files.clock is world.clock


def test_inline_work_runs_at_once_on_the_calling_thread() -> None:
    with InlineExecutor() as executor:
        ran: list[int] = []
        future = executor.submit(ran.append, 1)
        assert ran == [1]
        assert future.result() is None
        failed = executor.submit(int, "x")
        assert isinstance(failed.exception(), ValueError)


def test_a_program_run_inline_takes_the_same_steps_each_time() -> None:
    """Where worker threads run, the order of these appends is anybody's guess."""

    async def main() -> list[int]:
        order: list[int] = []

        async def work(number: int) -> None:
            for turn in range(3):
                await asyncio.get_running_loop().run_in_executor(None, order.append, 10 * turn + number)

        await asyncio.gather(*(work(number) for number in range(4)))
        return order

    assert run_inline(main) == run_inline(main)


def test_racing_threads_of_a_simulated_file_system_have_one_winner(files: SimulatedFiles) -> None:
    files.close(files.open("/source", CREATE))

    def race(number: int) -> bool:
        try:
            files.link("/source", "/target")
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(race, range(200))) == 1
    assert files.lstat("/source").st_nlink == 2


def test_random_programs_never_lose_what_they_flushed() -> None:
    """The model against a plain statement of it: flushed bytes under a flushed name are in every crash state."""
    for seed in range(30):
        dice = random.Random(seed)
        files = SimulatedFiles()
        fds = {f"/f{number}": files.open(f"/f{number}", CREATE) for number in range(3)}
        flush_folder(files)
        durable: dict[str, bytes] = dict.fromkeys(fds, b"")
        pending: set[str] = set()
        for _ in range(20):
            path = dice.choice(sorted(fds))
            if dice.random() < 0.6:
                files.pwrite(fds[path], memoryview(dice.randbytes(dice.randrange(1, 2000))), dice.randrange(2000))
                pending.add(path)
            else:
                files.fdatasync(fds[path])
                pending.discard(path)
                durable[path] = contents(files)[path]
        for state in crash_states(files, seed=seed, limit=30):
            found = contents(state)
            assert all(found[path] == durable[path] for path in fds if path not in pending)
