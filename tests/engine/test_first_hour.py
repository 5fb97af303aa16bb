"""What a newcomer meets in the first hour: a line in the log, a notebook, another tool's option, a small disk."""

import asyncio
import copy
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.backend import Space
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.small_run import Run, small_checkpointer
from tests.watch import until


def infos(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_a_save_and_a_load_that_work_are_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    run = Run(1)
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.load(run.state).result() is None
        ckpt.save(7, run.state).result()
        ckpt.save(7, run.state).result()
        ckpt.load(run.state).result()
    nothing, first, again, loaded = infos(caplog)
    assert nothing == f"nothing to load: there is no checkpoint yet in file://{tmp_path}"
    assert first.startswith("saved step 7: ")
    assert first.endswith(f" s, to file://{tmp_path}")
    assert "KiB in " in first
    assert again.startswith("saved step 7 (generation 2): ")
    assert loaded.startswith("loaded step 7: ")
    assert loaded.endswith(f" s, from file://{tmp_path}")


def test_a_save_that_left_a_step_as_it_was_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    with small_checkpointer(tmp_path, on_exists="skip") as ckpt:
        ckpt.save(7, {"w": torch.ones(3)}).result()
        ckpt.save(7, {"w": torch.ones(3)}).result()
    assert infos(caplog)[1] == f"step 7 is committed already, and left as it is, in file://{tmp_path}"


def test_a_save_through_a_writer_process_is_one_line_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    with small_checkpointer(tmp_path, worker="process") as ckpt:
        ckpt.save(7, {"w": torch.ones(3)}).result()
    (line,) = infos(caplog)
    assert line.startswith("saved step 7: ")
    assert line.endswith(f"to file://{tmp_path}")


def test_a_save_that_fails_is_no_line_of_success(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    with small_checkpointer(tmp_path, on_error=lambda future: None) as ckpt:
        (tmp_path / "step-00000007").write_text("in the way")
        assert ckpt.save(7, {"w": torch.ones(3)}).exception() is not None
    assert infos(caplog) == []


def test_the_line_told_to_a_notebook_works(tmp_path: Path) -> None:
    saved, fresh = Run(1), Run(2)
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(7, saved.state).result()

    async def notebook() -> int:
        async with small_checkpointer(tmp_path) as ckpt:
            with pytest.raises(aiockpt.BlockingCallError, match="await"):
                ckpt.load(fresh.state).result()
            loaded = await ckpt.load(fresh.state)
            assert loaded is not None
            return loaded.step

    assert asyncio.run(notebook()) == 7
    assert fresh.digest() == saved.digest()


def test_a_load_that_was_forgotten_is_still_told(tmp_path: Path) -> None:
    async def notebook() -> None:
        async with small_checkpointer(tmp_path) as ckpt:
            await ckpt.save(7, {"w": torch.ones(3)})
            load = ckpt.load({"w": torch.zeros(3)})
            with pytest.raises(aiockpt.UsageError, match="never waited for"):
                ckpt.load({"w": torch.zeros(3)})
            await load

    asyncio.run(notebook())


def hanging(place: Path) -> FaultyBackend:
    """Return a place with a step whose first read of data hangs."""
    with small_checkpointer(place) as ckpt:
        ckpt.save(7, {"w": torch.ones(3)}).result()
    return FaultyBackend(LocalBackend(str(place)), [Fault(do="hang", verb="read", match="*.safetensors")])


def test_after_a_cancelled_load_the_next_one_takes_its_place(tmp_path: Path) -> None:
    into = {"w": torch.zeros(3)}
    with small_checkpointer(hanging(tmp_path)) as ckpt:
        assert ckpt.load({"w": torch.zeros(3)}).cancel()
        assert ckpt.load(into).result() is not None
        ckpt.save(8, into).result()
    assert into["w"].eq(1).all()


def test_a_load_waits_for_threads_of_a_cancelled_one(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    reads: list[int] = []

    class Slow(OsFiles):
        """Files whose first read of step 1 takes long, in a thread that nothing can cancel."""

        def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0, /) -> int:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if "step-00000001" in name and name.endswith(".safetensors"):
                reads.append(offset)
                if len(reads) == 1:
                    begun.set()
                    assert go_on.wait(250)
            return OsFiles.preadv(fd, buffers, offset, flags)

    with small_checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((3,), float(step))}).result()
    place, into = LocalBackend(tmp_path, world=World(files=Slow()), direct=False), {"w": torch.zeros(3)}
    with small_checkpointer(place) as ckpt:
        first = ckpt.load(into, 1)
        assert begun.wait(250)
        assert first.cancel()
        second = ckpt.load(into, 2)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert not first.done()
        go_on.set()
        second.result()
        assert first.cancelled()
    assert into["w"].eq(2).all()


def test_a_state_torn_by_a_cancelled_load_is_told(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    with small_checkpointer(hanging(tmp_path)) as ckpt:
        load = ckpt.load(state)
        assert load.cancel()
        until(load.done, "the end of the load")
        with pytest.raises(aiockpt.UsageError, match="load again before you use it"):
            ckpt.save(8, state)
        ckpt.save(8, state).result()


def test_a_load_whose_failure_was_looked_at_is_not_forgotten(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(7, {"w": torch.ones(3)}).result()
        assert isinstance(ckpt.load({"v": torch.zeros(3)}).exception(), aiockpt.StateMismatchError)
        into = {"w": torch.zeros(3)}
        ckpt.load(into).result()
    assert into["w"].eq(1).all()


def test_a_second_load_waits_for_the_first(tmp_path: Path) -> None:
    reads: list[str] = []

    class Slow(FaultyBackend):
        async def get(self, key: str, max_bytes: int) -> bytes:
            reads.append(key)
            await asyncio.sleep(0.01)
            return await super().get(key, max_bytes)

    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.full((3,), 1.0)}).result()
        ckpt.save(2, {"w": torch.full((3,), 2.0)}).result()
    into = {"w": torch.zeros(3)}

    async def notebook() -> None:
        async with small_checkpointer(Slow(LocalBackend(str(tmp_path)), [])) as ckpt:
            with pytest.raises(aiockpt.BlockingCallError):
                ckpt.load(into, 2).result()
            await ckpt.load(into, 1)

    asyncio.run(notebook())
    steps = [key.split("/")[0] for key in reads if "MANIFEST" in key]
    assert steps.index("step-00000001") > max(i for i, step in enumerate(steps) if step == "step-00000002")
    assert into["w"].eq(1).all()


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_checkpointer_that_is_pickled_or_copied_says_what_to_do(tmp_path: Path, way: object) -> None:
    assert callable(way)
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(TypeError, match="pass on its URL"):
        way(ckpt)


def test_a_small_state_keeps_a_small_reserve(tmp_path: Path) -> None:
    free = 3 << 20

    class Small(FaultyBackend):
        async def space(self) -> Space:
            return Space(total_bytes=free, free_bytes=free)

    inner = LocalBackend(str(tmp_path))
    with small_checkpointer(Small(inner, []), on_error=lambda future: None) as ckpt:
        ckpt.save(1, {"w": torch.ones(1 << 18)}).result()
        refused = ckpt.save(2, {"w": torch.ones(1 << 20)}).exception()
    assert isinstance(refused, aiockpt.StorageFullError)
    assert "in reserve" in str(refused)


def test_a_state_dict_of_an_optimizer_is_told_once(tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    run.train()
    optimizer = run.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    objects = {"model": run.model, "optimizer": optimizer, "schedules": [schedule], "losses": [0.5] * 20}
    dicts = {**objects, "optimizer": optimizer.state_dict(), "schedules": [schedule.state_dict()]}
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, objects).result()
        assert ckpt.resume(objects) == 2
        assert not warnings()
    with small_checkpointer(tmp_path / "dicts") as ckpt:
        ckpt.save(2, dicts).result()
        ckpt.save(3, dicts).result()
        assert [one.partition(":")[0] for one in warnings()] == ["optimizer", "schedules"]
        assert 'put the object itself into the state: {"optimizer": optimizer}' in warnings()[0]
        caplog.clear()
        fresh = torch.optim.AdamW(run.model.parameters())
        state = {"optimizer": fresh.state_dict()}
        ckpt.load(state, only=["optimizer"]).result()
    (told,) = warnings()
    line = told.partition("call ")[2].partition(" now")[0]
    exec(line, {"optimizer": fresh, "state": state})
    assert len(fresh.state) == len(optimizer.state) > 0
