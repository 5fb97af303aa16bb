"""What a copy may consist of: a step with its pieces in columns, or the weights of one, saved by many ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CorruptionError, UsageError
from aiockpt.format import merge
from aiockpt.format.manifest import decode_manifest
from aiockpt.pipeline.copy import copied_files, copy_files, copy_step, open_copy_source
from aiockpt.pipeline.discover import list_step
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.planning.weights import has_weights_only, weights_attempt
from aiockpt.runtime.world import World
from aiockpt.storage.transfer import walk
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.pipeline.copies import FREE, STEP, copy, copy_of, open_source, windows
from tests.ranks.crew import Crew
from tests.small_run import small_checkpointer


def model(value: float) -> torch.nn.Module:
    made = torch.nn.Sequential(*(torch.nn.Linear(33, 35) for _ in range(6)))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.fill_(value + number)
    return made


def save(root: Path, ranks: int = 3) -> None:
    def state() -> dict[str, Any]:
        return {"model": model(1), "moments": {str(n): torch.full((35, 33), float(n)) for n in range(12)}, "step": 4}

    with Crew(ranks, root) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, state()).result())


def columns_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*/a-*/p/*")}


async def check_model(place: Any) -> None:
    bare = model(0)
    async with small_checkpointer(place) as ckpt:
        assert await ckpt.load({"model": bare}, only=["model"]) is not None
        assert (await ckpt.verify(1)).step == 1
    assert all(torch.equal(mine, other) for mine, other in zip(bare.parameters(), model(1).parameters(), strict=True))


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_PIECES", 3)


@pytest.mark.usefixtures("columns")
async def test_a_step_with_its_pieces_in_columns_is_copied_with_them(tmp_path: Path) -> None:
    save(tmp_path / "a")
    target = LocalBackend(str(tmp_path / "b"))
    there = await copy([LocalBackend(str(tmp_path / "a"))], target, "full")
    assert there == await read_manifest(target, STEP, 1)
    written = decode_manifest((tmp_path / "b" / STEP / "MANIFEST-1.json").read_bytes())
    assert written.requires == ("parts",)
    assert columns_in(tmp_path / "a")
    assert columns_in(tmp_path / "b") == columns_in(tmp_path / "a")
    await check_model(tmp_path / "b")


@pytest.mark.usefixtures("columns")
async def test_weights_of_a_step_with_columns_have_columns_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "a")
    there = await copy([LocalBackend(str(tmp_path / "a"))], LocalBackend(str(tmp_path / "b")), "weights")
    assert there.requires == ("parts",)
    await check_model(tmp_path / "b")


async def test_weights_are_a_checkpoint_of_their_own_that_says_so(tmp_path: Path) -> None:
    save(tmp_path / "a")
    source, target = LocalBackend(str(tmp_path / "a")), MemoryBackend()
    there = await copy([source], target, "weights")
    whole = (await copy_of(source)).manifest
    assert has_weights_only(there)
    assert not has_weights_only(whole)
    assert there.attempt == weights_attempt(whole.attempt) != whole.attempt
    assert (there.sequence, there.run, there.world_size) == (whole.sequence, whole.run, whole.world_size)
    assert {file.rank for file in there.files} == {file.rank for file in whole.files if file.kind == "weights"}
    assert there.tensors.keys() == {name for name in whole.tensors if name.startswith("model.")}
    named = {f"{STEP}/{file.p}" for file in there.files}
    assert {stat.key async for stat in walk(target, STEP) if "/d/" in stat.key or "/c/" in stat.key} == named
    assert sum(file.size for file in there.files) < sum(file.size for file in whole.files) / 2
    await check_model(target)
    assert await copy([source], target, "weights") == there
    with pytest.raises(UsageError, match="weights alone itself"):
        await copy([target], MemoryBackend(), "weights")


async def test_a_block_that_one_copy_has_lost_comes_from_the_next(tmp_path: Path) -> None:
    save(tmp_path / "a")
    whole, target = LocalBackend(str(tmp_path / "a")), MemoryBackend()
    flipping = [Fault(do="flip", verb="reader.read", match="*", times=None)]
    with pytest.raises(CorruptionError, match="is not what was saved"):
        await copy([FaultyBackend(whole, flipping)], target, "weights")
    assert not (await list_step(target, STEP)).committed
    await copy([FaultyBackend(whole, flipping), whole], target, "weights")
    await check_model(target)


async def test_files_of_weights_that_are_there_are_not_made_again_unless_their_marks_lie(tmp_path: Path) -> None:
    save(tmp_path / "a")
    source, target = LocalBackend(str(tmp_path / "a")), MemoryBackend()
    what = await open_source(source, content="weights")
    await copy_files(what, target, World(), windows=windows(), pace=FREE)
    assert set(await copied_files(target, what)) == {0, 1}
    mark = f"{STEP}/a-{what.attempt}/c/f000001.json"
    told = await target.get(mark, 10_000)
    at = told.index(b'"sums":"') + 9
    await target.put(mark, told[:at] + (b"A" if told[at : at + 1] != b"A" else b"B") + told[at + 1 :])
    assert set(await copied_files(target, what)) == {0}
    recorder = FaultyBackend(target, [])
    await copy_step(what, recorder, World(), windows=windows(), pace=FREE)
    await check_model(target)


async def test_blocks_larger_than_a_window_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a")
    copies = [await copy_of(LocalBackend(str(tmp_path / "a")))]
    for content in ("full", "weights"):
        with pytest.raises(UsageError, match=r"IO\(read_bytes=4096\)"):
            await open_copy_source(copies, content, window_bytes=2048, file_bytes=1 << 20)
