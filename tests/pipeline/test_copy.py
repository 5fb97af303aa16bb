"""A committed step is copied to another place: whole, verified, taken up again after a crash, by any number of copiers."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CorruptionError, StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.copy import copied_files, copy_files
from aiockpt.pipeline.discover import list_step
from aiockpt.runtime.limits import Pace, open_tasks
from aiockpt.runtime.world import OsClock, World
from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.storage.transfer import walk
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.pipeline.copies import FREE, STEP, copy, copy_of, open_source, windows
from tests.run_python import run_python
from tests.small_run import small_checkpointer

STATE: dict[str, Any] = {f"w{index}": torch.arange(3000) * (index + 1) for index in range(4)}


async def save(place: Any) -> None:
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384, file_bytes=32768)
    async with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=io)) as ckpt:
        await ckpt.save(1, STATE)


async def load(place: Any) -> None:
    like = {name: torch.zeros_like(value) for name, value in STATE.items()}
    async with small_checkpointer(place) as ckpt:
        assert await ckpt.load(like) is not None
    assert all(torch.equal(like[name], STATE[name]) for name in STATE)


async def saved_in(folder: Path) -> tuple[LocalBackend, LocalBackend]:
    """Save the step; return its place, and the one it is to be copied to."""
    await save(folder / "a")
    return LocalBackend(str(folder / "a")), LocalBackend(str(folder / "b"))


async def keys(place: Backend) -> set[str]:
    return {stat.key async for stat in walk(place, "") if STEP in stat.key}


async def test_a_copy_is_the_same_checkpoint_and_leaves_nothing_else(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    moved: list[int] = []
    there = await copy([source], target, on_copied=moved.append)
    here = (await copy_of(source)).manifest
    assert len(here.files) > 1
    assert (there.attempt, there.sequence, there.tensors) == (here.attempt, here.sequence, here.tensors)
    assert [file.sums for file in there.files] == [file.sums for file in here.files]
    assert sum(moved) == sum(file.size for file in here.files)
    assert {key for key in await keys(source) if "/r/" not in key} == await keys(target)
    await load(tmp_path / "b")


async def test_a_step_that_is_there_already_is_left_as_it_is(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    first = await copy([source], target)
    assert await copy([source], target) == first
    assert (await list_step(target, STEP)).generations == (1,)


async def test_another_save_of_the_step_is_followed_by_the_next_generation(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    await save(tmp_path / "b")
    there = await copy([source], target)
    assert there.generation == 2


async def test_a_copy_that_died_is_taken_up_where_it_was(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    manifest = (await copy_of(source)).manifest
    what = await open_source(source)
    await copy_files(what, target, World(), windows=windows(), pace=FREE, only=lambda file: "-0001" in file.p)
    half = await target.create(f"{STEP}/{manifest.files[0].p}", manifest.files[0].size)  # a killed copier's
    assert set(await copied_files(target, what)) == {1}
    recorder = FaultyBackend(source, [Fault(do="fail", verb="open", match="*-0001.safetensors", times=None)])
    there = await copy([recorder], target)
    assert there.files[1].p == manifest.files[1].p
    assert there.files[0].p != manifest.files[0].p
    await half.abort()
    await load(tmp_path / "b")


async def test_a_mark_that_lies_is_not_believed(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    manifest = (await copy_of(source)).manifest
    folder = f"{STEP}/a-{manifest.attempt}/c"
    file = manifest.files[3]
    lies = [
        msgspec.json.encode(msgspec.structs.replace(file, p="../../etc/passwd")),
        msgspec.json.encode(msgspec.structs.replace(file, p=f"a-{manifest.attempt}/d/none")),
        b"\xff",
        msgspec.json.encode(manifest.files[0]),
    ]
    await copy_files(await open_source(source), target, World(), windows=windows(), pace=FREE)
    for index, mark in enumerate(lies):
        await target.put(f"{folder}/f{index:06d}.json", mark)
    assert await copied_files(target, await open_source(source)) == {}
    await copy([source], target)
    await load(tmp_path / "b")


async def test_a_block_that_one_copy_has_lost_comes_from_the_next(tmp_path: Path) -> None:
    await save(tmp_path / "a")
    a, b, c = (LocalBackend(str(tmp_path / name)) for name in "abc")
    await copy([a], b)
    damaged = tmp_path / "a" / STEP / (await copy_of(a)).manifest.files[0].p
    data = bytearray(damaged.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"block 1 \(bytes 4096–8192\) is not what was saved; it holds w0"):
        await copy([a], c)
    assert not (await list_step(c, STEP)).committed
    await copy([a, b], c)
    await load(tmp_path / "c")


async def test_two_copiers_of_one_step_end_with_one_checkpoint(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    done: list[Manifest] = []

    async def once() -> None:
        done.append(await copy([source], target))

    async with open_tasks() as tasks:
        for _ in range(3):
            tasks.start_soon(once)
    assert len(done) == 3
    assert len({manifest.write_id for manifest in done}) == 1
    assert (await list_step(target, STEP)).generations == (1,)
    await load(tmp_path / "b")


class Between(Forwarding):
    """A place that sets *done* after the first call of *verb*, and then waits for *until*."""

    def __init__(self, inner: Backend, verb: str, done: anyio.Event, until: anyio.Event) -> None:
        super().__init__(inner)
        self._verb, self._done, self._until = verb, done, until

    async def forward(self, call: BackendCall) -> Any:
        answer = await call()
        if call.verb == self._verb and not self._done.is_set() and ("MANIFEST" in call.key or self._verb == "put"):
            self._done.set()
            await self._until.wait()
        return answer


async def test_a_copier_that_commits_before_another_one_has_cleaned_up_leaves_its_files(tmp_path: Path) -> None:
    source, target = await saved_in(tmp_path)
    committed, noted, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def second() -> None:
        await copy([source], Between(target, "put", noted, committed))
        ended.set()

    async with open_tasks() as tasks:
        tasks.start_soon(second)
        await noted.wait()
        await copy([source], Between(target, "put_new", committed, ended))
    assert (await list_step(target, STEP)).generations == (1,)
    assert len([key for key in await keys(target) if key.endswith(".safetensors")]) == len(
        (await copy_of(target)).manifest.files
    )
    await load(tmp_path / "b")


@pytest.mark.parametrize("verb", ["create", "upload.write", "upload.finish", "put", "put_new"])
async def test_a_failed_copy_shows_nothing_and_the_next_one_succeeds(verb: str, tmp_path: Path) -> None:
    source, inner = await saved_in(tmp_path)
    target = FaultyBackend(inner, [Fault(do="fail", verb=verb, match="*", times=1)])
    with pytest.raises(StorageError):
        await copy([source], target)
    assert not (await list_step(inner, STEP)).committed
    await copy([source], target)
    await load(tmp_path / "b")


async def test_it_goes_no_faster_than_it_is_told() -> None:
    class Clock(OsClock):
        """Stands still: every wait is as long as it was computed."""

        @staticmethod
        def monotonic_ns() -> int:
            return 0

    pace = Pace(1e9, Clock())
    await pace.throttle(10_000_000)
    assert pace._free_at_ns == 10_000_000
    await save("memory://copy-source")
    target = MemoryBackend()
    await copy([MemoryBackend("copy-source")], target, pace=pace)
    assert pace._free_at_ns > 10_000_000 + 90_000


def test_what_a_dead_copier_has_decided_to_commit_is_garbage(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "from") as ckpt:
        ckpt.save(1, {"x": 1}).result()
        dying = [Fault(do="fail", verb="put_new", match="*/MANIFEST-*", times=None)]
        with pytest.raises(StorageError):
            ckpt.copy(1, FaultyBackend(LocalBackend(str(tmp_path / "to")), dying)).result()
    assert list((tmp_path / "to").glob("*/a-*/DECISION.json"))
    with small_checkpointer(tmp_path / "to") as ckpt:
        assert ckpt.prune(aiockpt.Retention()).result().garbage == ()  # its copier may be at work
        assert len(ckpt.prune(aiockpt.Retention(grace_s=0)).result().garbage) == 1
    assert list((tmp_path / "to").iterdir()) == []


def test_a_copy_under_way_of_a_dead_saver_is_no_garbage(tmp_path: Path) -> None:
    code = "import sys, aiockpt\nwith aiockpt.Checkpointer(sys.argv[1]) as ckpt: ckpt.save(1, {'x': 1}).result()"
    run_python("-c", code, tmp_path / "from")
    half = FaultyBackend(LocalBackend(str(tmp_path / "to")), [Fault(do="fail", verb="put_new", times=None)])
    with small_checkpointer(tmp_path / "from") as ckpt, pytest.raises(StorageError):
        ckpt.copy(1, half).result()
    with small_checkpointer(tmp_path / "to") as ckpt:
        assert ckpt.prune(aiockpt.Retention()).result().garbage == ()
