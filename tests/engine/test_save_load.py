"""What is saved is what is loaded, on every backend, from sync loops and async trainers."""

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend, LocalUpload
from aiockpt.backends.memory import MemoryBackend
from aiockpt.engine.save import OneAtATime
from aiockpt.events import Event, SaveStarted, SnapshotTaken
from aiockpt.pipeline.snapshot import CopyProgram
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, Listing
from tests.gates import Gate
from tests.small_run import SMALL, Run, small_checkpointer
from tests.watch import Watch


def test_a_run_resumes_bit_exactly(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    run.train(3)
    ckpt.save(3, run.state).result()
    expected, at_save = run.train(2), run.digest()

    other = Run(seed=1)
    loaded = ckpt.load(other.state).result()
    assert loaded is not None
    assert (loaded.step, loaded.id, loaded.generation, loaded.skipped) == (3, "step-00000003", 1, ())
    assert other.train(2) == expected
    assert other.digest() == at_save


async def test_saves_of_one_step_run_in_turn() -> None:
    steps, running = OneAtATime(), list[str]()
    ends = {name: anyio.Event() for name in "abc"}
    begun = {name: anyio.Event() for name in "abc"}

    async def save(name: str) -> None:
        async with steps.saving(1):
            running.append(name)
            begun[name].set()
            await ends[name].wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save, "a")
        await begun["a"].wait()
        tasks.start_soon(save, "b")
        await anyio.lowlevel.checkpoint()
        ends["a"].set()
        await begun["b"].wait()
        tasks.start_soon(save, "c")
        for _ in range(9):
            await anyio.lowlevel.checkpoint()
        assert running == ["a", "b"]
        ends["b"].set()
        ends["c"].set()
    assert running == ["a", "b", "c"]


def test_a_fresh_root_loads_none(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    before = run.digest()
    assert ckpt.load(run.state).result() is None
    assert ckpt.latest().result() is None
    assert ckpt.steps().result() == ()
    assert run.digest() == before


def test_the_newest_step_is_taken_and_an_explicit_one_on_request(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    digests = {}
    for step in (1, 2, 3):
        run.train()
        ckpt.save(step, run.state)
        digests[step] = run.digest()
    ckpt.wait()
    assert [info.step for info in ckpt.steps().result()] == [3, 2, 1]
    assert ckpt.latest().result() == 3
    for wanted in (None, 2, 1):
        other = Run(seed=9)
        loaded = ckpt.load(other.state, wanted).result()
        assert loaded is not None
        assert other.digest() == digests[loaded.step]
        assert loaded.step == (wanted or 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_change_after_the_save_changes_no_checkpoint(backend: Backend, fused: bool) -> None:
    run = Run(fused=fused)
    run.train(2)
    with small_checkpointer(backend) as ckpt:
        at_save = run.digest()
        future = ckpt.save(2, run.state)
        assert future.snapshotted().done()
        run.train(3)
        for parameter in run.model.parameters():
            parameter.data.fill_(float("nan"))
        future.result()
        other = Run(seed=4, fused=fused)
        ckpt.load(other.state).result()
    assert other.digest() == at_save


def test_several_saves_are_in_flight_and_all_are_committed(backend: Backend, run: Run) -> None:
    with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=SMALL, max_in_flight=3)) as ckpt:
        futures = []
        for step in range(8):
            run.train()
            futures.append(ckpt.save(step, run.state))
        assert [future.result().step for future in futures] == list(range(8))


def test_a_tensor_larger_than_the_pool_works(backend: Backend) -> None:
    io = aiockpt.IO(pool_bytes=8192, slab_bytes=4096, block_bytes=4096, read_bytes=4096)
    state = {"big": torch.randn(100_003), "small": torch.arange(3)}
    with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(0, state).result()
        target = {"big": torch.zeros(100_003), "small": torch.zeros(3, dtype=torch.int64)}
        ckpt.load(target).result()
    assert torch.equal(state["big"], target["big"])
    assert torch.equal(state["small"], target["small"])


async def test_an_async_trainer_awaits_every_stage(backend: Backend, run: Run) -> None:
    async with small_checkpointer(backend) as ckpt:
        assert await ckpt.load(run.state) is None
        run.train(2)
        at_save = run.digest()
        save = ckpt.save(2, run.state)
        await save.snapshotted()
        run.train()
        await save.written()
        committed = await save
        assert committed.step == 2
        assert await save.committed() == committed
        other = Run(seed=5)
        loaded = await ckpt.load(other.state)
    assert loaded is not None
    assert other.digest() == at_save


async def test_inside_a_loop_a_large_copy_runs_elsewhere(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("aiockpt.lazy.snapshotter.INLINE_COPY_BYTES", 0)
    copied_on: list[str] = []
    go = threading.Event()
    real = CopyProgram.run

    def slow_copy(*args: Any, **kwargs: Any) -> None:
        copied_on.append(threading.current_thread().name)
        assert go.wait(250)
        real(*args, **kwargs)

    monkeypatch.setattr(CopyProgram, "run", slow_copy)
    run.train(2)
    async with small_checkpointer(MemoryBackend("held")) as ckpt:
        at_save = run.digest()
        save = ckpt.save(2, run.state)
        assert not save.snapshotted().done()
        timer = threading.Timer(0.05, go.set)  # the optimizer step below waits for the copy, and this ends the wait
        timer.start()
        run.train()
        assert save.snapshotted().done()
        await save
        other = Run(seed=5)
        await ckpt.load(other.state)
    assert other.digest() == at_save
    assert copied_on[0] != threading.current_thread().name


def test_part_of_a_state_is_loaded_with_only_map_and_strict(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    run.train()
    ckpt.save(1, run.state).result()
    other = Run(seed=3)
    optimizer_before = other.optimizer.state_dict()
    ckpt.load(other.state, only=["model"]).result()
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(other.model.state_dict().values(), run.model.state_dict().values(), strict=True)
    )
    assert other.optimizer.state_dict() == optimizer_before

    net = torch.nn.Sequential(*Run(seed=6).model)
    renamed = {"net": net}
    ckpt.load(renamed, map=lambda name: name.replace("net.", "model.", 1), strict=False).result()
    assert torch.equal(net.state_dict()["0.weight"], run.model.state_dict()["0.weight"])

    stranger = torch.ones(2)
    partial = {"model": Run(seed=7).model, "stranger": stranger}
    loaded = ckpt.load(partial, strict=False).result()
    assert loaded is not None
    assert "stranger" in loaded.missing
    assert any(name.startswith("optimizer") for name in loaded.unexpected)
    assert torch.equal(stranger, torch.ones(2))


def test_all_differences_are_named_and_nothing_is_overwritten(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    ckpt.save(1, run.state).result()
    other = Run(seed=3, width=20)
    other.state["extra"]["ema"] = torch.randn(5, 3, dtype=torch.float64)
    before = other.digest()
    with pytest.raises(aiockpt.StateMismatchError) as caught:
        ckpt.load(other.state).result()
    message = str(caught.value)
    assert "model.0.weight" in message
    assert "extra.ema" in message
    assert other.digest() == before


def test_one_tensor_or_some_of_its_rows_are_read(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    run.train()
    ckpt.save(1, run.state).result()
    weight = run.model.state_dict()["0.weight"]
    assert torch.equal(ckpt.read(1, "model.0.weight").result(), weight)
    assert torch.equal(ckpt.read(None, "model.0.weight", rows=slice(5, 9)).result(), weight[5:9])
    assert ckpt.read(1, "model.0.weight", rows=slice(4, 2)).result().shape == (0, 33)
    with pytest.raises(aiockpt.StateMismatchError, match=r"model\.0\.weight"):
        ckpt.read(1, "model.0.weigth").result()
    with pytest.raises(aiockpt.UsageError, match=r"give a slice, such as slice\(0, 10\)"):
        ckpt.read(1, "model.0.weight", rows=3).result()  # type: ignore[arg-type]
    with pytest.raises(aiockpt.UsageError, match="slice of integers"):
        ckpt.read(1, "model.0.weight", rows=slice(1.5, 2)).result()
    with pytest.raises(aiockpt.UsageError, match="no rows"):
        ckpt.read(1, "optimizer.state.model.0.weight.step", rows=slice(1)).result()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("step", r"step: a plain value.*\n.*values = {'step': None}; ckpt.load\(values, 1\).result\(\)"),
        ("extra.note", r"extra.note: a plain value.*\n.*values = {'extra': None}"),
        ("model.0", r"model.0: not one tensor but 2 \(model.0.weight, model.0.bias\)"),
        ("scheduler.last_epoch", r"no such tensor.*\n.*aiockpt inspect"),
        ("a..b", "no such tensor"),
    ],
)
def test_reading_what_is_no_tensor_says_what_it_is(ckpt: aiockpt.Checkpointer, run: Run, name: str, told: str) -> None:
    ckpt.save(1, run.state).result()
    with pytest.raises(aiockpt.StateMismatchError, match=told):
        ckpt.read(1, name).result()


def test_a_plain_value_is_loaded_alone_as_the_message_says(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    run.train(3)
    ckpt.save(1, run.state).result()
    values: dict[str, Any] = {"step": None, "extra": None}
    ckpt.load(values, 1).result()
    assert values["step"] == 3
    assert values["extra"]["note"] == "a"


def test_a_step_is_described_without_reading_data(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    ckpt.save(1, run.state, metrics={"loss": 0.5}, user={"commit": "abc"}).result()
    seen = ckpt.describe().result()
    named = {tensor.name: tensor for tensor in seen.tensors}
    assert named["model.0.weight"].shape == (64, 33)
    assert named["model.0.weight"].dtype == "F32"
    assert named["model.0.weight"].bytes == 64 * 33 * 4
    assert (seen.info.step, seen.info.metrics, seen.user) == (1, {"loss": 0.5}, {"commit": "abc"})


def test_verifying_a_step_marks_it(ckpt: aiockpt.Checkpointer, run: Run) -> None:
    ckpt.save(1, run.state).result()
    assert not ckpt.steps().result()[0].verified
    read: list[int] = []
    verified = ckpt.verify(1, on_read=read.append).result()
    assert verified.bytes == sum(read) == ckpt.steps().result()[0].bytes
    assert ckpt.steps().result()[0].verified


def test_saving_a_step_again_adds_a_generation_skips_or_raises(backend: Backend, run: Run) -> None:
    with small_checkpointer(backend) as ckpt:
        assert ckpt.save(1, run.state).result().generation == 1
        run.train()
        again = run.digest()
        assert ckpt.save(1, run.state).result().generation == 2
    with small_checkpointer(backend, on_exists="skip") as ckpt:
        skipped = ckpt.save(1, Run(seed=8).state).result()
        assert (skipped.existed, skipped.generation) == (True, 2)
        other = Run(seed=5)
        ckpt.load(other.state).result()
        assert other.digest() == again
    with (
        pytest.raises(aiockpt.UsageError, match="committed already"),
        small_checkpointer(backend, on_exists="raise") as ckpt,
    ):
        ckpt.save(1, run.state).result()


def test_the_policy_form_is_five_lines(backend: Backend) -> None:
    run = Run()
    for _ in range(2):
        with small_checkpointer(backend, every=3, retention=aiockpt.Retention(last=2)) as ckpt:
            start = ckpt.resume(run.state)
            for step in range(start, start + 5):
                loss = run.train()
                ckpt.step(step, run.state, metrics={"loss": loss})
            assert start in (0, 5)
    with small_checkpointer(backend) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [9, 6]
        with pytest.raises(aiockpt.UsageError, match="every=N"):
            ckpt.step(1, run.state)


def test_events_tell_the_story_of_a_save(backend: Backend, run: Run) -> None:
    watch = Watch()
    with small_checkpointer(backend, observers=[watch]) as ckpt:
        ckpt.save(1, run.state).result()
        ckpt.load(run.state).result()
    names = [type(event).__name__ for event in watch.events]
    story = ["SaveStarted", "BytesWritten", "DataWritten", "Committed", "Loaded"]
    assert [names.index(name) for name in story] == sorted(names.index(name) for name in story)
    assert "SnapshotTaken" in names


def test_a_save_is_started_before_its_snapshot_is_reported(backend: Backend, run: Run) -> None:
    gate, watch = Gate(backend, times=1), Watch()
    with small_checkpointer(gate, observers=[watch]) as ckpt:
        saves = [ckpt.save(1, run.state) for _ in range(2)]  # of one step: one at a time
        saves[1].snapshotted().result()
        gate.open_up()
        for save in saves:
            save.result()
    told = [type(event) for event in watch.events if isinstance(event, SaveStarted | SnapshotTaken)]
    assert told == [SaveStarted, SnapshotTaken] * 2


def test_an_observer_that_raises_harms_nothing(backend: Backend, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_event(self, event: Event) -> None:
            raise ValueError("my bug")

    with small_checkpointer(backend, observers=[Broken()]) as ckpt:
        assert ckpt.save(1, run.state).result().step == 1
    assert "not called again" in caplog.text


def test_warming_up_makes_room_and_changes_nothing(backend: Backend, run: Run) -> None:
    with aiockpt.Checkpointer(
        backend, limits=aiockpt.Limits(io=aiockpt.IO(slab_bytes=16384, block_bytes=4096, read_bytes=16384))
    ) as ckpt:
        ckpt.warm_up(run.state).result()
        allocated = ckpt.statistics().pool.allocated_bytes
        assert allocated > 0
        ckpt.save(1, run.state).result()
        assert ckpt.statistics().pool.allocated_bytes == allocated


def test_after_a_save_the_pool_holds_the_next(run: Run) -> None:
    io = aiockpt.IO(slab_bytes=16384, block_bytes=4096, read_bytes=16384)
    with aiockpt.Checkpointer(MemoryBackend("pool"), limits=aiockpt.Limits(io=io)) as ckpt:
        held = ckpt.save(1, run.state).result().bytes
        ckpt.wait()
        while ckpt.statistics().pool.allocated_bytes < held:
            ckpt.steps().result()  # each is a turn for the task that fills the pool


def test_an_empty_state_can_be_saved(ckpt: aiockpt.Checkpointer) -> None:
    ckpt.save(0, {"step": 4}).result()
    state = {"step": 0}
    ckpt.load(state).result()
    assert state == {"step": 4}


def test_of_saves_at_once_the_last_is_newest(tmp_path: Path) -> None:
    later_began = anyio.Event()

    class Slow(LocalBackend):
        async def list(self, prefix: str) -> Listing:
            if prefix == "step-00000001":
                await later_began.wait()
            return await super().list(prefix)

        async def create(self, key: str, size: int) -> LocalUpload:
            later_began.set()  # step 2 has begun its attempt
            return await super().create(key, size)

    with small_checkpointer(Slow(str(tmp_path), world=World())) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((3,), float(step))})
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [2, 1]


def test_a_long_list_is_no_tensor_to_read(tmp_path: Path) -> None:
    """It is stored as a tensor that is longer than the list, and so must not be given out as one."""
    losses = [float(number) for number in range(100_000)]
    held = {"losses": losses, "log": {"ids": list(range(100_000)), "at": torch.ones(3)}, "ranks": torch.arange(9)}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, held).result()
        with pytest.raises(aiockpt.StateMismatchError, match="losses: 100,000 plain numbers") as told:
            ckpt.read(1, "losses").result()
        assert "values = {'losses': None}; ckpt.load(values, 1).result()" in str(told.value)
        values: dict[str, Any] = {"losses": None}
        ckpt.load(values, 1).result()
        assert values["losses"] == losses
        with pytest.raises(aiockpt.StateMismatchError, match=r"log\.ids: 100,000 plain numbers"):
            ckpt.read(1, "log.ids").result()
        assert torch.equal(ckpt.read(1, "ranks").result(), torch.arange(9))
        assert torch.equal(ckpt.read(1, "log.at").result(), torch.ones(3))
