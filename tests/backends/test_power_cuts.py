"""What the local backend acknowledged, after a power cut, and the need for every flush.

Each program runs once on recorded simulated files. Then every prefix of its calls is looked at in the states that a
power cut may leave; then again with each flush left out, which must show.
"""

import functools
import os
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.errors import ObjectNotFoundError
from aiockpt.runtime.world import Files, World
from aiockpt.testing.backend_suite import patterned, upload
from aiockpt.testing.recording import Call, RecordingFiles
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import SimulatedClock, power_cuts, run_inline

ROOT = "/data/run"
OLD = bytes(patterned(1500, seed=1))
NEW = bytes(patterned(3000, seed=2))


def backend_on(files: Files, *, direct: bool | None = None) -> LocalBackend:
    return LocalBackend(ROOT, world=World(files, SimulatedClock(), random.Random(0).randbytes), direct=direct)


class Told(NamedTuple):
    """A change of a key: made by the calls begun..ended; from then on it holds *data*, or is gone (None)."""

    begun: int
    ended: int
    key: str
    data: bytes | None


class Trial:
    """A program's calls, and what it was told when."""

    def __init__(self, files: SimulatedFiles | None = None) -> None:
        self.files = RecordingFiles(files or SimulatedFiles())
        self.backend = backend_on(self.files)
        self.told: list[Told] = []

    @property
    def calls(self) -> list[Call]:
        return self.files.calls

    @contextmanager
    def change(self, key: str, data: bytes | None) -> Iterator[None]:
        begun = len(self.calls)
        yield
        self.told.append(Told(begun, len(self.calls), key, data))

    def allowed(self, key: str, done: int) -> set[bytes | None]:
        """Return what *key* may hold after a power cut when *done* calls were made: as told, or as about to be."""
        allowed: set[bytes | None] = {None}
        for told in self.told:
            if told.key == key and told.ended <= done:
                allowed = {told.data}
            elif told.key == key and told.begun <= done:
                allowed.add(told.data)
        return allowed


async def put(trial: Trial, key: str, data: bytes) -> None:
    with trial.change(key, data):
        await trial.backend.put(key, data)


async def put_new(trial: Trial, key: str, data: bytes) -> None:
    with trial.change(key, data):
        await trial.backend.put_new(key, data)


async def delete(trial: Trial, key: str) -> None:
    with trial.change(key, None):
        await trial.backend.delete([key])


async def create_exclusively(trial: Trial) -> None:
    await put_new(trial, "s/a/r/r00000.json", NEW)
    await put_new(trial, "s/a/r/r00001.json", OLD)
    await put_new(trial, "s/MANIFEST-1.json", OLD)


async def replace(trial: Trial) -> None:
    await put(trial, "LATEST", OLD)
    await put(trial, "LATEST", NEW)
    await put(trial, "s/VERIFIED-1.json", NEW)


async def delete_some(trial: Trial) -> None:
    await put(trial, "s/a", OLD)
    await put(trial, "s/b", NEW)
    await delete(trial, "s/a")


async def write_a_folder_again(trial: Trial) -> None:
    await put_new(trial, "s/a/k", OLD)
    await delete(trial, "s/a/k")
    await put_new(trial, "s/a/k", NEW)


Program = Callable[[Trial], Awaitable[None]]


def run(program: Program, files: SimulatedFiles | None = None) -> Trial:
    trial = Trial(files)

    async def main() -> None:
        await program(trial)

    run_inline(main)
    return trial


def held(state: SimulatedFiles, *keys: str) -> list[bytes | None]:
    """Return what the objects of *keys* hold, None for those that are not there."""

    async def read(key: str) -> bytes | None:
        try:
            return await backend_on(state).get(key, 1 << 20)
        except ObjectNotFoundError:
            return None

    async def main() -> list[bytes | None]:
        return [await read(key) for key in keys]

    return run_inline(main)


def violations(trial: Trial, skip: Collection[int] = ()) -> Iterator[str]:
    """Yield what is not as it was told, for each state in which that is so."""
    keys = sorted({told.key for told in trial.told})
    for done, state in power_cuts(trial.calls, skip=skip, limit=48):
        for key, data in zip(keys, held(state, *keys), strict=True):
            if data not in trial.allowed(key, done):
                yield f"after {done} calls {key} holds {None if data is None else len(data)} bytes"


def flushes(trial: Trial) -> list[int]:
    return [index for index, call in enumerate(trial.calls) if call.is_flush]


PROGRAMS = [create_exclusively, replace, delete_some]


@pytest.mark.parametrize("program", [*PROGRAMS, write_a_folder_again])
def test_what_was_acknowledged_survives_every_power_cut(program: Program) -> None:
    assert list(violations(run(program))) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_flush_left_out_is_caught(program: Program) -> None:
    trial = run(program)
    needless = [str(trial.calls[index]) for index in flushes(trial) if next(violations(trial, {index}), None) is None]
    assert len(flushes(trial)) >= 7
    assert needless == []


def test_an_exclusive_object_survives_power_cuts_also_without_hard_links() -> None:
    """Only what was acknowledged: in between the object may be torn, which its digest tells."""
    trial = run(create_exclusively, SimulatedFiles(hard_links=False))
    for done, state in power_cuts(trial.calls, limit=48):
        for told in trial.told:
            if told.ended <= done:
                assert held(state, told.key) == [told.data]


async def write_data_files(trial: Trial) -> None:
    data = patterned(3 * 4096 + 700, seed=3)
    await upload(trial.backend, "s/a/d/f", data, block_bytes=8192)
    await upload(trial.backend, "s/a/d/empty", memoryview(b""))
    await put_new(trial, "s/a/r/vote", OLD)
    # From the moment on at which the record can be seen.
    seen = next(index for index, call in enumerate(trial.calls) if call.verb == "link")
    trial.told += [Told(0, seen, "s/a/d/f", bytes(data)), Told(0, seen, "s/a/d/empty", b"")]


def lost_files(trial: Trial, skip: Collection[int] = ()) -> Iterator[str]:
    """Yield each file that was finished and is not whole. Before that, anything may be there."""
    for done, state in power_cuts(trial.calls, skip=skip, limit=48):
        for told in trial.told:
            if told.ended <= done and held(state, told.key) != [told.data]:
                yield f"after {done} calls {told.key} is not whole"


def test_a_finished_file_survives_every_power_cut_from_the_record_beside_it_on() -> None:
    assert list(lost_files(run(write_data_files))) == []


def test_each_flush_of_a_file_left_out_is_caught() -> None:
    trial = run(write_data_files)
    assert [trial.calls[index].path for index in flushes(trial) if trial.calls[index].verb == "fsync"] == [
        *("/", "/data"),
        *(f"{ROOT}/s/a/d", ROOT, f"{ROOT}/s", f"{ROOT}/s/a"),
        f"{ROOT}/s/a/r",
    ]
    # The second file is empty: its bytes need no flush, its name does.
    needed = [index for index in flushes(trial) if (trial.calls[index].verb, trial.calls[index].path) != EMPTY_FLUSH]
    needless = [str(trial.calls[index]) for index in needed if next(lost_files(trial, {index}), None) is None]
    assert len(needed) == len(flushes(trial)) - 1
    assert needless == []


EMPTY_FLUSH = ("fdatasync", f"{ROOT}/s/a/d/empty")
DELETED = ["s/MANIFEST-1.json", "s/MANIFEST-2.json", "s/a/d/f", "t/k"]


def delete_in_order() -> tuple[SimulatedFiles, list[Call]]:
    """Return the file system before, and the calls of deleting DELETED while other objects stay in each folder."""
    files = SimulatedFiles()

    async def prepare() -> None:
        for key in [*DELETED, "s/a/d/stays", "s/stays", "t/stays"]:
            await backend_on(files).put(key, OLD)

    run_inline(prepare)
    recording = RecordingFiles(files)
    before = next(iter(power_cuts([], start=files)))[1]
    run_inline(lambda: backend_on(recording).delete(DELETED))
    return before, recording.calls


def disorder(before: SimulatedFiles, calls: list[Call], skip: Collection[int] = ()) -> Iterator[str]:
    """Yield each state in which a later key is gone and an earlier one is not, or one is left at the end."""
    for done, state in power_cuts(calls, start=before, skip=skip):
        found = [data is None for data in held(state, *DELETED)]
        if found != sorted(found, reverse=True) or (done == len(calls) and not all(found)):
            yield f"after {done} calls gone: {found}"


def test_objects_are_deleted_in_order_whenever_the_power_fails() -> None:
    before, calls = delete_in_order()
    assert list(disorder(before, calls)) == []


def test_each_flush_of_a_deletion_left_out_is_caught() -> None:
    before, calls = delete_in_order()
    indices = [index for index, call in enumerate(calls) if call.is_flush]
    assert len(indices) == len(DELETED)
    assert [str(calls[index]) for index in indices if next(disorder(before, calls, {index}), None) is None] == []


def folders_left(skip_last: bool) -> set[tuple[str, ...]]:
    """Return which top folders a power cut may leave after the last object of one was deleted."""

    async def program(trial: Trial) -> None:
        await put(trial, "s/a/k", OLD)
        await delete(trial, "s/a/k")

    trial = run(program)
    skip = {flushes(trial)[-1]} if skip_last else set()
    left: set[tuple[str, ...]] = set()
    for done, state in power_cuts(trial.calls, skip=skip):
        if done == len(trial.calls):
            left.add(run_inline(functools.partial(backend_on(state).list, "")).folders)
    return left


def test_an_emptied_folder_is_durably_gone() -> None:
    assert folders_left(skip_last=False) == {()}
    assert folders_left(skip_last=True) == {(), ("s",)}


class Meddling(RecordingFiles):
    """Removes the folder of the first file to be made, just before that, and makes it again without a flush."""

    def __init__(self, inner: Files) -> None:
        super().__init__(inner)
        self.backend: LocalBackend | None = None

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_CREAT and self.backend is not None:
            backend, self.backend = self.backend, None
            backend._tree.prune("s")
            self.mkdir(f"{ROOT}/s")
        return super().open(path, flags, mode)


async def put_new_object(backend: LocalBackend) -> None:
    await backend.put_new("s/k", NEW)


async def put_data_file(backend: LocalBackend) -> None:
    await upload(backend, "s/k", memoryview(NEW))


@pytest.mark.parametrize("write", [put_new_object, put_data_file])
def test_a_folder_removed_and_made_again_under_a_writer_is_flushed_again(
    write: Callable[[LocalBackend], Coroutine[object, object, None]],
) -> None:
    files = Meddling(SimulatedFiles())
    backend = backend_on(files)
    backend._tree.make("s")
    backend._tree.persist("s")
    files.backend = backend
    run_inline(lambda: write(backend))
    at_end = [state for done, state in power_cuts(files.calls) if done == len(files.calls)]
    assert at_end
    assert all(held(state, "s/k") == [NEW] for state in at_end)


class Pruned(RecordingFiles):
    """A folder is removed by another writer while the root is flushed."""

    backend: LocalBackend | None = None

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if self.calls[-1].path == ROOT and self.backend is not None:
            self.backend._tree.invalidate()


def test_a_name_that_is_flushed_while_a_folder_is_removed_is_flushed_again() -> None:
    files = Pruned(SimulatedFiles())
    files.backend = backend_on(files)
    for key in ("s/a", "s/b"):
        run_inline(functools.partial(files.backend.put, key, OLD))
    assert [call.path for call in files.calls if call.verb == "fsync"].count(ROOT) == 2


def test_the_names_above_an_existing_root_are_flushed_once() -> None:
    files = RecordingFiles(SimulatedFiles())
    files.inner.mkdir("/data")
    files.inner.mkdir(ROOT)
    backend = backend_on(files)
    run_inline(functools.partial(backend.put, "a", OLD))
    assert [call.path for call in files.calls if call.verb == "fsync"] == ["/data", "/", ROOT]
    backend._tree.invalidate()
    run_inline(functools.partial(backend.put, "b", OLD))
    assert [call.path for call in files.calls if call.verb == "fsync"] == ["/data", "/", ROOT, ROOT]
