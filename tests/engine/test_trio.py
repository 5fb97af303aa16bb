"""Programs of trio, with all that one of asyncio has. They wait for the futures on their own loop; ours is asyncio's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import trio

import aiockpt


def state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "t": torch.full((3,), value), "n": [value]}


def one_place(tmp_path: Path) -> Any:
    return tmp_path / "run"


def tiers(tmp_path: Path) -> Any:
    return [aiockpt.Tier(f"memory://{tmp_path}"), tmp_path / "near", aiockpt.Tier(str(tmp_path / "far"))]


@pytest.mark.parametrize(("places", "worker"), [(one_place, "thread"), (tiers, "thread"), (one_place, "process")])
def test_all_of_a_checkpointer_can_be_awaited_on_trio(
    places: Callable[[Path], Any], worker: Any, tmp_path: Path
) -> None:
    async def train() -> None:
        async with aiockpt.Checkpointer(
            places(tmp_path), every=1, worker=worker, retention=aiockpt.Retention(last=4), on_preempt="save"
        ) as ckpt:
            await ckpt.save(1, state(1.0))
            save = ckpt.save(2, state(2.0), snapshot="lazy")
            await save.snapshotted()
            await save
            stepped = ckpt.step(3, state(3.0))
            assert stepped is not None
            await stepped
            found = state(0.0)
            loaded = await ckpt.load(found)
            assert loaded is not None
            assert (loaded.step, found["t"].tolist(), found["n"]) == (3, [3.0] * 3, [3.0])
            async with ckpt.hold(2), ckpt.mutating():
                assert (await ckpt.verify(2)).step == 2
            assert [seen.step async for seen in ckpt.watch("reader", follow=False)] == [1, 2, 3]
            await ckpt.copy(3, tmp_path / "copy")
            await ckpt.delete(1)
            assert (await ckpt.read(2, "t")).tolist() == [2.0] * 3
            assert await ckpt.latest() == 3

    trio.run(train)
    with aiockpt.Checkpointer("memory://restores", on_preempt="save"):
        pass  # signals are put back on the main thread only, and an async block ends on another one


def test_one_that_was_made_on_one_loop_serves_another() -> None:
    made: list[aiockpt.Checkpointer] = []

    async def make() -> None:
        made.append(aiockpt.Checkpointer("memory://made-on-trio"))
        await made[0].save(1, state(1.0))

    async def use() -> None:
        await made[0].save(2, state(2.0))
        await made[0].load(state(0.0))

    trio.run(make)
    anyio.run(use)
    made[0].save(3, state(3.0)).result()
    trio.run(use)
    made[0].close()
