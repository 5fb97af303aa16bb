"""Failures surface on the future, on the next call and on close, and never take anything else with them."""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import Event, Opened, SaveFailed, StageEnded
from aiockpt.options import Worker
from aiockpt.runtime.promise import SavePromise
from aiockpt.storage.backend import Backend
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.run_python import run_python
from tests.small_run import SMALL, Run, small_checkpointer, steps
from tests.watch import Watch


def broken(*faults: Fault, name: str = "x") -> FaultyBackend:
    return FaultyBackend(MemoryBackend(f"{name}-{os.getpid()}-{id(faults)}"), list(faults))


WRITE_FAILS = Fault(do="fail", verb="upload.write", error=errno.EIO)


def test_the_next_save_tells_of_a_failed_one(run: Run) -> None:
    ckpt = small_checkpointer(broken(WRITE_FAILS))
    failed = ckpt.save(1, run.state)
    _until_done(failed)
    with pytest.raises(aiockpt.BackgroundSaveError, match="step 1") as caught:
        ckpt.save(2, run.state)
    assert caught.value.failures == (failed,)
    assert caught.value.future is not None
    assert caught.value.future.result().step == 2
    ckpt.save(3, run.state).result()
    ckpt.close()
    ckpt.close()


def test_a_failure_taken_by_another_thread_is_raised_there() -> None:
    class TakenMeanwhile(deque[aiockpt.SaveFuture]):
        def popleft(self) -> aiockpt.SaveFuture:
            first = super().popleft()
            self.clear()  # by the other thread
            return first

    ckpt = aiockpt.Checkpointer("memory://taken")
    failures = ckpt._engine.failures
    failures._untold = TakenMeanwhile()
    for step in (1, 2):
        promise = SavePromise(step)
        promise.fail(OSError())
        failures.add(aiockpt.SaveFuture(promise))
    with pytest.raises(aiockpt.BackgroundSaveError) as raised:
        failures.report()
    assert [failed.step for failed in raised.value.failures] == [1]
    ckpt.close()


def _until_done(future: aiockpt.SaveFuture) -> None:
    """Wait without taking the error from the future."""
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(250)


def test_close_raises_what_nobody_was_told(run: Run) -> None:
    ckpt = small_checkpointer(broken(WRITE_FAILS))
    ckpt.save(1, run.state)
    with pytest.raises(aiockpt.BackgroundSaveError, match="step 1"):
        ckpt.close()


def test_an_error_taken_from_its_future_is_not_raised_again(run: Run) -> None:
    with small_checkpointer(broken(WRITE_FAILS)) as ckpt:
        with pytest.raises(aiockpt.StorageError):
            ckpt.save(1, run.state).result()
        ckpt.save(2, run.state).result()


def test_the_error_of_the_body_notes_the_save_error(run: Run) -> None:
    def trainer() -> None:
        with small_checkpointer(broken(WRITE_FAILS)) as ckpt:
            ckpt.save(1, run.state)
            raise KeyError("the trainer's own bug")

    with pytest.raises(KeyError) as caught:
        trainer()
    assert any("step 1" in note for note in caught.value.__notes__)


def test_failures_can_be_warned_of_or_handed_to_a_callable(run: Run) -> None:
    told: list[aiockpt.SaveFuture] = []
    ckpt = small_checkpointer(broken(WRITE_FAILS), on_error=told.append)
    failed = ckpt.save(1, run.state)
    _until_done(failed)
    ckpt.save(2, run.state).result()
    assert told == [failed]
    ckpt.close()

    ckpt = small_checkpointer(broken(WRITE_FAILS, name="y"), on_error="warn")
    _until_done(ckpt.save(1, run.state))
    with pytest.warns(RuntimeWarning, match="save of step 1") as warned:
        ckpt.save(2, run.state)
    assert str(warned[0].message).count("StorageError(") == 1
    ckpt.close()


def test_a_cancelled_save_leaves_nothing_behind_and_is_no_failure(run: Run) -> None:
    backend = broken(Fault(do="hang", verb="upload.finish", match="step-00000001*", times=None))
    with small_checkpointer(backend) as ckpt:
        save = ckpt.save(1, run.state)
        assert save.cancel()
        with pytest.raises(aiockpt.SaveCancelledError, match="step 1"):
            save.result()
        assert save.cancelled()
        assert ckpt.steps().result() == ()
        assert ckpt.statistics().pool.used_slabs == 0
        ckpt.save(2, run.state).result()


def test_stages_of_a_save_that_never_began_are_reported(tmp_path: Path) -> None:
    watch, gate = Watch(), Gate(LocalBackend(str(tmp_path)), "put_new", "*")
    limits = aiockpt.Limits(io=SMALL, max_in_flight=1)
    with aiockpt.Checkpointer(gate, limits=limits, observers=[watch], snapshot="lazy") as ckpt:
        ckpt.save(0, {"x": torch.zeros(9)})
        assert gate.reached.wait(250)
        waits = ckpt.save(1, {"x": torch.zeros(9)})
        waits.cancel()
        gate.open_up()
        assert isinstance(waits.exception(), aiockpt.SaveCancelledError)
    *stages, last = (event for event in watch.events if event.step == 1)
    assert "walk" in [event.stage for event in stages if isinstance(event, StageEnded)]
    assert isinstance(last, SaveFailed)


async def test_a_cancelled_wait_does_not_cancel_the_save(run: Run) -> None:
    async with small_checkpointer(MemoryBackend("cancelled-wait")) as ckpt:
        save = ckpt.save(1, run.state)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await save
        assert (await save).step == 1


def test_too_many_saves_are_skipped_when_the_policy_says_so(run: Run) -> None:
    backend = broken(Fault(do="hang", verb="upload.finish", times=1))
    with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=SMALL, max_in_flight=1, when_full="skip")) as ckpt:
        first = ckpt.save(1, run.state)
        skipped = ckpt.save(2, run.state)
        with pytest.raises(aiockpt.SaveSkippedError, match="in flight"):
            skipped.result()
        first.cancel()


def test_an_unsavable_state_is_refused_by_its_path(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(aiockpt.UnsupportedStateError, match=r"extra\.thing"):
            ckpt.save(1, {"model": torch.nn.Linear(2, 2), "extra": {"thing": object()}})
        assert ckpt.steps().result() == ()
    assert not list(tmp_path.glob("run/step-*"))


@pytest.mark.parametrize("step", [-1, 1.0, "3", True])
def test_a_step_that_is_no_number_is_refused(step: object, run: Run) -> None:
    with aiockpt.Checkpointer(MemoryBackend("steps")) as ckpt, pytest.raises(aiockpt.UsageError, match="step="):
        ckpt.save(step, run.state)  # type: ignore[arg-type]


def test_a_state_in_place_of_the_step_is_refused(run: Run) -> None:
    with aiockpt.Checkpointer(MemoryBackend("swapped")) as ckpt:
        with pytest.raises(aiockpt.UsageError, match=r"^step=a dict: give an int of 0 or more, below 2\*\*63$"):
            ckpt.save(run.state, 1)  # type: ignore[arg-type]
        newest: Any = "newest"
        calls: list[Callable[[], object]] = [
            lambda: ckpt.load(run.state, newest),
            lambda: ckpt.describe(newest),
            lambda: ckpt.verify(newest),
            lambda: ckpt.delete(newest),
            lambda: ckpt.read(newest, "x"),
        ]
        for call in calls:
            with pytest.raises(aiockpt.UsageError, match="step='newest': give an int"):
                call()


def test_a_step_may_be_an_integer_of_numpy(run: Run) -> None:
    with small_checkpointer(MemoryBackend("numpy")) as ckpt:
        ckpt.save(3, run.state).result()
        assert ckpt.describe(np.int64(3)).result().info.step == 3  # type: ignore[arg-type]
        assert ckpt.load(run.state, np.int64(3)).result() is not None  # type: ignore[arg-type]


def test_options_that_cannot_work_are_refused_with_their_names() -> None:
    for make in (
        lambda: aiockpt.IO(block_bytes=5000),
        lambda: aiockpt.IO(slab_bytes=12345678),
        lambda: aiockpt.IO(pool_bytes=1),
        lambda: aiockpt.Retention(last=0),
        lambda: aiockpt.Checkpointer("memory://x", limits=aiockpt.Limits(max_in_flight=0)),
        lambda: aiockpt.Checkpointer("memory://x", every=0),
        lambda: aiockpt.Checkpointer("nowhere://x"),
    ):
        with pytest.raises(aiockpt.UsageError, match=r"give|install"):
            make()


def test_a_metric_may_be_a_loss_that_was_not_detached(run: Run) -> None:
    loss = run.model(torch.ones(8, run.width)).sum()
    assert loss.requires_grad
    with small_checkpointer(MemoryBackend("metrics")) as ckpt:
        ckpt.save(1, run.state, metrics={"loss": loss}).result()  # warnings are errors here
        assert ckpt.describe(1).result().info.metrics == {"loss": pytest.approx(loss.item())}


def test_metrics_and_user_data_that_json_cannot_hold_are_refused(run: Run) -> None:
    with aiockpt.Checkpointer(MemoryBackend("json")) as ckpt:
        with pytest.raises(aiockpt.UsageError, match="metrics"):
            ckpt.save(1, run.state, metrics={"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(aiockpt.UsageError, match="metrics"):
            ckpt.save(1, run.state, metrics={"loss": torch.ones(2)})
        with pytest.raises(aiockpt.UsageError, match="metrics"):
            ckpt.save(1, run.state, metrics=[0.5])  # type: ignore[arg-type]
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        for user in (object(), "x" * (17 << 20), [0] * 1_000_001, deep):
            with pytest.raises(aiockpt.UsageError, match="user"):
                ckpt.save(1, run.state, user=user)
        assert not ckpt.statistics().saves_in_flight


def test_a_forgotten_load_fails_the_next_call(backend: Backend, run: Run) -> None:
    with small_checkpointer(backend) as ckpt:
        ckpt.save(1, run.state).result()
        load = ckpt.load(run.state)
        with pytest.raises(aiockpt.UsageError, match="never waited for"):
            ckpt.save(2, run.state)
        load.result()


def test_a_disk_that_is_too_small_is_noticed(run: Run) -> None:
    class Small(MemoryBackend):
        async def space(self):  # type: ignore[no-untyped-def]
            return (await super().space()).__class__(free_bytes=1000, total_bytes=2000)

    with small_checkpointer(Small("small")) as ckpt:
        with pytest.raises(aiockpt.StorageFullError, match="1,000 free"):
            ckpt.save(1, run.state).result()
        assert ckpt.steps().result() == ()


def test_a_snapshot_without_a_slab_names_the_remedy(run: Run) -> None:
    io = aiockpt.IO(pool_bytes=4096, slab_bytes=4096, block_bytes=4096, read_bytes=4096)
    backend = broken(Fault(do="hang", verb="upload.write", times=None))
    ckpt = aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=io, deadlines=aiockpt.Deadlines(slab_s=0.05)))
    save = ckpt.save(1, run.state)
    with pytest.raises(aiockpt.StorageTimeoutError, match="pool_bytes"):
        save.result()
    ckpt.close()


def test_a_hanging_commit_ends_with_an_unknown_outcome(run: Run) -> None:
    backend = broken(Fault(do="hang", verb="put_new", match="*MANIFEST*"))
    with aiockpt.Checkpointer(
        backend, limits=aiockpt.Limits(io=SMALL, deadlines=aiockpt.Deadlines(commit_s=0.1))
    ) as ckpt:
        with pytest.raises(aiockpt.CommitTimeoutError, match="unknown"):
            ckpt.save(1, run.state).result()
        assert [info.step for info in ckpt.finish_commits().result()] == [1]
        assert ckpt.latest().result() == 1


def test_a_lost_answer_is_no_conflict(run: Run) -> None:
    for match in ("*MANIFEST*", "*r00000.json", "*DECISION*"):
        backend = broken(Fault(do="lose_answer", verb="put_new", match=match), name=match)
        with small_checkpointer(backend) as ckpt:
            save = ckpt.save(1, run.state)
            error = save.exception()
            assert error is None or isinstance(error, aiockpt.StorageError)
            assert ckpt.latest().result() == (1 if error is None or match != "*r00000.json" else None)


def test_an_existing_step_is_not_reported_against_its_own_call(backend: Backend, run: Run) -> None:
    with small_checkpointer(backend, on_exists="raise") as ckpt:
        ckpt.save(1, run.state).result()
        again = ckpt.save(1, run.state)
        with pytest.raises(aiockpt.StepExistsError):
            again.result()


def test_a_closed_checkpointer_says_so(run: Run) -> None:
    ckpt = aiockpt.Checkpointer(MemoryBackend("closed"))
    ckpt.close()
    with pytest.raises(aiockpt.ClosedError, match="make a new one"):
        ckpt.save(1, run.state)


async def test_blocking_forms_are_refused_inside_an_event_loop(run: Run) -> None:
    async with small_checkpointer(MemoryBackend("blocking")) as ckpt:
        with pytest.raises(aiockpt.BlockingCallError, match="await the futures"):
            ckpt.wait()
        with pytest.raises(aiockpt.BlockingCallError, match=r"write `await ckpt.aclose\(\)`"):
            ckpt.close()
        with pytest.raises(aiockpt.BlockingCallError, match="write `async with`"), ckpt:
            pass
        with pytest.raises(aiockpt.BlockingCallError, match=r"write `async with ckpt\.mutating"), ckpt.mutating():
            pass
        with pytest.raises(aiockpt.BlockingCallError, match=r"write `await ckpt.wait_mutable\(\)`"):
            ckpt.barrier()
        assert await ckpt.load(run.state) is None


async def test_resume_is_refused_inside_an_event_loop(run: Run) -> None:
    async with small_checkpointer(MemoryBackend("resume")) as ckpt:
        for _ in range(3):  # however fast the load would have been
            with pytest.raises(aiockpt.BlockingCallError, match=r"write `await ckpt.aresume\(state\)`"):
                ckpt.resume(run.state)
        await ckpt.save(1, run.state)
        assert await ckpt.load(run.state) is not None


async def test_a_load_whose_wait_was_cancelled_is_made_again(run: Run) -> None:
    place = MemoryBackend("cancelled-load")
    async with small_checkpointer(place) as ckpt:
        await ckpt.save(1, run.state)
    gate = Gate(place, "get")
    async with small_checkpointer(gate) as ckpt:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ckpt.aresume, run.state)
            await anyio.to_thread.run_sync(gate.reached.wait)
            tasks.cancel_scope.cancel()
        gate.open_up()
        with pytest.raises(aiockpt.UsageError, match="never waited for, so the state is not complete"):
            ckpt.save(2, run.state)
        assert await ckpt.aresume(run.state) == 2
        await ckpt.save(2, run.state)


async def test_a_load_forgotten_in_a_loop_must_be_awaited(run: Run) -> None:
    async with small_checkpointer(MemoryBackend("forgotten")) as ckpt:
        await ckpt.save(1, run.state)
        load = ckpt.load(run.state)
        with pytest.raises(
            aiockpt.UsageError, match=r"load of the newest step.*write `await ckpt.load\(…\)`"
        ) as caught:
            ckpt.save(2, run.state)
        assert ".result()" not in str(caught.value)
        await load


def test_people_can_look_at_a_checkpointer_and_its_saves(run: Run) -> None:
    ckpt = small_checkpointer(MemoryBackend("seen"))
    save = ckpt.save(1, run.state)
    save.result()
    ckpt.wait()
    assert repr(save) == "<SaveFuture save of step 1: committed>"
    assert repr(ckpt) == f"<Checkpointer {ckpt._destination.places[0].backend.url}, 0 saves in flight, running>"
    ckpt.close()
    assert repr(ckpt).endswith("closed>")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_with_a_clear_message(run: Run) -> None:
    ckpt = small_checkpointer(MemoryBackend("fork"))
    pid = os.fork()
    if not pid:
        try:
            ckpt.save(1, {"x": 1})
        except aiockpt.ForkedProcessError:
            ckpt.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ckpt.save(1, run.state).result()
    ckpt.close()


def test_a_program_that_ends_without_waiting_loses_nothing(tmp_path: Path) -> None:
    script = f"""
import torch, aiockpt
ckpt = aiockpt.Checkpointer({str(tmp_path / "run")!r})
state = {{"x": torch.arange(100_000)}}
for step in range(3):
    ckpt.save(step, state)
print("the end", flush=True)
"""
    run = run_python("-c", script)
    assert (run.stdout, run.stderr) == ("the end\n", "")
    assert steps(tmp_path / "run") == [2, 1, 0]


def test_a_failure_at_exit_is_told(tmp_path: Path) -> None:
    script = f"""
import torch, aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.testing.faults import Fault, FaultyBackend
backend = FaultyBackend(LocalBackend({str(tmp_path / "run")!r}), [Fault(do="fail", verb="upload.finish")])
aiockpt.Checkpointer(backend).save(1, {{"x": torch.arange(10)}})
"""
    assert "save of step 1" in run_python("-c", script, status=None).stderr


def test_many_saves_leak_neither_memory_nor_descriptors(tmp_path: Path) -> None:
    state = {"x": torch.arange(50_000)}
    with small_checkpointer(tmp_path / "run", retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(10):
            ckpt.save(step, state).result()
        ckpt.wait()
        descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
        for step in range(10, 60):
            ckpt.save(step, state).result()
        ckpt.wait()
        assert set(os.listdir("/proc/self/fd")) <= descriptors  # what earlier tests left may go meanwhile
        more = set(threading.enumerate()) - threads
        assert all(thread.name.startswith("aiockpt-worker") for thread in more)  # of which there are twelve at most
        assert ckpt.statistics().pool.used_slabs == 0
    assert len(list((tmp_path / "run").glob("step-*"))) == 2


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_a_checkpointer_that_is_refused_leaves_no_thread_and_no_process(tmp_path: Path, worker: Worker) -> None:
    cadence = aiockpt.Cadence()
    async with aiockpt.Checkpointer(tmp_path / "run", every=cadence):
        threads, children = set(threading.enumerate()), psutil.Process().children()
        with pytest.raises(aiockpt.UsageError, match="serves a Checkpointer already") as refused:
            aiockpt.Checkpointer(tmp_path / "run", every=cadence, worker=worker)
        assert refused.tb  # what was made is still referred to: nobody has collected it
        assert set(threading.enumerate()) <= threads
        _, alive = psutil.wait_procs([child for child in psutil.Process().children() if child not in children], 20)
        assert not alive


class LocalBoxes:
    """Holds the engine's loop at the first event of a save until it is let go on."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def on_event(self, event: Event) -> None:
        assert isinstance(event, Opened) or self.let_go.wait(250)


def test_an_error_is_told_though_the_snapshot_was_waited_for(run: Run) -> None:
    holding = LocalBoxes()
    ckpt = aiockpt.Checkpointer(broken(WRITE_FAILS), observers=[holding])  # its pool has room for all of the state
    failed = ckpt.save(1, run.state)
    failed.snapshotted().result()
    holding.let_go.set()
    _until_done(failed)
    with pytest.raises(aiockpt.BackgroundSaveError, match="step 1"):
        ckpt.close()


def test_an_observer_that_raises_is_logged_and_gets_no_more_events(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Raises:
        calls = 0

        def on_event(self, event: Event) -> None:
            self.calls += 1
            raise ValueError("no")

    observer, watch = Raises(), Watch()
    with small_checkpointer(broken(), observers=[observer, watch]) as ckpt:
        ckpt.save(1, run.state).result()
    assert observer.calls == 1
    assert len(watch.events) > 5
    assert [record.message for record in caplog.records if "is not called again" in record.message] != []


def test_an_observer_that_cannot_be_told_anything_is_refused() -> None:
    with pytest.raises(aiockpt.UsageError, match="on_event"):
        aiockpt.Checkpointer("memory://", observers=[print])  # type: ignore[list-item]


def test_a_load_that_another_thread_waits_for_is_no_error_here(backend: Backend, run: Run) -> None:
    with small_checkpointer(backend) as ckpt:
        ckpt.save(1, run.state).result()
        asked, may_wait, found = threading.Event(), threading.Event(), []

        def load() -> None:
            future = ckpt.load({"model": torch.nn.Linear(2, 2)}, strict=False)
            asked.set()
            may_wait.wait(250)
            found.append(future.result())

        thread = threading.Thread(target=load)
        thread.start()
        assert asked.wait(250)
        ckpt.save(2, run.state).result()
        may_wait.set()
        thread.join(250)
        assert found[0] is not None


def test_a_load_of_an_ended_thread_is_an_error(backend: Backend, run: Run) -> None:
    with small_checkpointer(backend) as ckpt:
        ckpt.save(1, run.state).result()
        loads: list[aiockpt.LoadFuture[Any]] = []
        thread = threading.Thread(target=lambda: loads.append(ckpt.load(run.state)))
        thread.start()
        thread.join(250)
        with pytest.raises(aiockpt.UsageError, match="never waited for"):
            ckpt.save(2, run.state)


def test_a_close_that_may_take_for_ever_ends_with_its_saves(run: Run) -> None:
    deadlines = aiockpt.Deadlines(**dict.fromkeys(aiockpt.Deadlines.__struct_fields__, float("inf")))
    limits = aiockpt.Limits(io=SMALL, deadlines=deadlines, max_in_flight=1)
    with aiockpt.Checkpointer(MemoryBackend(), limits=limits) as ckpt:
        saves = [ckpt.save(step, run.state) for step in (1, 2, 3)]
    assert [save.result().step for save in saves] == [1, 2, 3]


@pytest.mark.parametrize(("file", "overwritten"), [("a-*/d/*.safetensors", True), ("MANIFEST-1.json", False)])
def test_a_damaged_step_says_whether_it_was_read_into_the_state(tmp_path: Path, file: str, overwritten: bool) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.ones(5000)}).result()
    (path,) = tmp_path.glob(f"step-00000001/{file}")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with small_checkpointer(tmp_path) as ckpt, pytest.raises(aiockpt.CorruptionError) as damaged:
        ckpt.load({"w": torch.zeros(5000)}, 1).result()
    notes = "\n".join(getattr(damaged.value, "__notes__", []))
    assert ("partly overwritten" in notes) == overwritten
