"""Saves through a writer process: the same saves, with the same options, events, failures and places."""

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil  # type: ignore[import-untyped]
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import Event, Promoted, PromotionFailed, StepDeleted
from aiockpt.pipeline import snapshot as copying
from aiockpt.runtime.world import World
from tests.engine import test_maintenance, test_save_load
from tests.lazy import test_lazy
from tests.small_run import SMALL, Run, small_checkpointer
from tests.watch import Watch, until
from tests.worker.test_worker_killed import orders as orders
from tests.worker.test_worker_killed import process_of, until_gone
from tests.worker.worker_places import Orders


@pytest.fixture
def run() -> Run:
    return Run()


# ------------------------------------------------------------------ tests of every save, told once more

SHARED_TESTS: list[Callable[..., Any]] = [
    test_save_load.test_a_change_after_the_save_changes_no_checkpoint,
    test_save_load.test_several_saves_are_in_flight_and_all_are_committed,
    test_save_load.test_a_tensor_larger_than_the_pool_works,
    test_save_load.test_an_async_trainer_awaits_every_stage,
    test_save_load.test_saving_a_step_again_adds_a_generation_skips_or_raises,
    test_save_load.test_events_tell_the_story_of_a_save,
    test_save_load.test_the_policy_form_is_five_lines,
    test_save_load.test_warming_up_makes_room_and_changes_nothing,
    test_maintenance.test_the_last_every_and_best_steps_are_kept,
    test_maintenance.test_after_going_back_both_branches_are_kept,
    test_maintenance.test_going_back_within_one_checkpointer_begins_a_new_branch_too,
    test_lazy.test_a_slow_copy_is_the_state_at_the_call,
    test_lazy.test_the_digests_find_nothing_in_an_honest_save,
    test_lazy.test_a_pool_of_one_slab_drains_every_ticket_in_order,
    test_lazy.test_more_saves_than_workers_may_wait_without_an_optimizer_step,
    test_lazy.test_full_means_skip_where_that_was_asked_for,
    test_lazy.test_full_means_eager_where_that_was_asked_for,
    test_lazy.test_a_cancelled_save_lets_the_optimizer_go,
    test_lazy.test_a_storage_that_is_resized_meanwhile_is_noticed,
    test_lazy.test_a_lazy_save_of_an_ended_program_is_still_committed,
]


@pytest.mark.parametrize("test", SHARED_TESTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_it_is_the_same_with_a_writer_process(
    test: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiockpt, "Checkpointer", partial(aiockpt.Checkpointer, worker="process"))
    given: dict[str, Any] = {"backend": str(tmp_path / "run"), "tmp_path": tmp_path, "fused": False}
    if test.__module__ == test_lazy.__name__:
        given["run"] = test_lazy.Run()
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    needed = {
        name: given.get(name) or request.getfixturevalue(name) for name in names if name not in ("fused", "optimizer")
    }
    needed |= {name: default for name, default in (("fused", False), ("optimizer", "adamw-foreach")) if name in names}
    if test.__code__.co_flags & 0x80:  # a coroutine function
        anyio.run(partial(test, **needed))
    else:
        test(**needed)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("place", "options", "says"),
    [
        ("memory://here", {}, "memory of this process"),
        (LocalBackend("/tmp/nowhere"), {}, "LocalBackend is an object"),
        (["/tmp/nowhere", "memory://there"], {}, "memory of this process"),
        ("/tmp/nowhere", {"world": World()}, "world="),
    ],
    ids=["memory", "an instance", "a tier in memory", "a world"],
)
def test_what_a_process_cannot_have_is_refused(place: Any, options: dict[str, Any], says: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(aiockpt.UsageError, match=says) as refused:
        aiockpt.Checkpointer(place, worker="process", **options)
    assert "worker='thread'" in str(refused.value)
    assert set(threading.enumerate()) <= threads  # those of earlier tests may end meanwhile


def test_choices_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match="worker='fork'"):
        aiockpt.Checkpointer(tmp_path, worker="fork")  # type: ignore[arg-type]
    with pytest.raises(aiockpt.UsageError, match="nice=20"):
        aiockpt.IO(nice=20)
    with pytest.raises(aiockpt.UsageError, match="for a writer process"):
        aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=aiockpt.IO(nice=5)))


# ------------------------------------------------------------------ the process


def test_a_writer_gives_way_loads_no_torch_and_has_a_session_of_its_own(tmp_path: Path, run: Run) -> None:
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384, nice=7)
    gives_way = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)  # the tests may run at a niceness of their own
    with aiockpt.Checkpointer(tmp_path, worker="process", limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(1, run.state).result()
        pid = process_of(ckpt).pid
        assert psutil.Process(pid).nice() == gives_way
        assert all(os.getpriority(os.PRIO_PROCESS, thread.id) == gives_way for thread in psutil.Process(pid).threads())
        assert os.getsid(pid) == pid
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_relative_path_means_the_same_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    with small_checkpointer("runs/a", worker="process") as ckpt:
        monkeypatch.chdir(tmp_path / "else")
        os.kill(process_of(ckpt).pid, 9)  # the next one is started from here
        until_gone(process_of(ckpt).pid)
        ckpt.save(1, run.state).result()
    assert (tmp_path / "runs/a/step-00000001").is_dir()


def test_a_place_that_only_this_process_can_open_fails_the_saves_with_its_error(
    orders: Orders, tmp_path: Path, run: Run
) -> None:
    ckpt = small_checkpointer(orders.url, worker="process")
    try:
        os.kill(process_of(ckpt).pid, 9)
        until_gone(process_of(ckpt).pid)
        (tmp_path / "packages/tried_places-1.dist-info/entry_points.txt").write_text("")
        save = ckpt.save(1, run.state, snapshot="lazy")
        error = save.exception()
        assert isinstance(error, aiockpt.UsageError)
        assert "no backend for tried://" in str(error)
        assert any("in the writer process" in note for note in error.__notes__)
    finally:
        ckpt.close()


# ------------------------------------------------------------------ huge pages

GROWING = aiockpt.IO(slab_bytes=16384, block_bytes=4096, read_bytes=16384)
STATES = [{"x": torch.zeros(20_000)}, {"x": torch.zeros(60_000)}]


def made_bytes(ckpt: aiockpt.Checkpointer) -> int:
    return ckpt.statistics().pool.allocated_bytes


def test_when_it_has_warmed_up_no_new_slab_waits_for_huge_pages(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, worker="process", limits=aiockpt.Limits(io=GROWING)) as ckpt:
        assert made_bytes(ckpt) == 0
        ckpt.warm_up(STATES[0]).result()
        assert made_bytes(ckpt) >= STATES[0]["x"].nbytes
        assert ckpt._engine.pool.is_huge


def test_after_each_save_the_slabs_that_it_made_get_huge_pages(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, worker="process", limits=aiockpt.Limits(io=GROWING)) as ckpt:
        for step, state in enumerate(STATES):
            assert made_bytes(ckpt) < state["x"].nbytes
            ckpt.save(step, state).result()
            until(partial(lambda size: made_bytes(ckpt) >= size, state["x"].nbytes), "slabs for all of the state")
            until(lambda: ckpt._engine.pool.is_huge, "their huge pages", timeout_s=10)


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, aiockpt.StorageFullError), (errno.EACCES, aiockpt.StorageAccessError)],
    ids=["full", "forbidden"],
)
def test_an_error_of_the_storage_is_raised_as_what_it_is(
    number: int, kind: type[aiockpt.StorageError], orders: Orders, run: Run
) -> None:
    with small_checkpointer(orders.url, worker="process") as ckpt:
        orders.fail("create", number)
        error = ckpt.save(1, run.state).exception()
        assert isinstance(error, kind)
        assert type(error) is kind
        assert error.key.startswith("step-00000001/a-")
        assert not error.retryable
        assert "in the writer process:\nTraceback" in error.__notes__[-1]
        orders.fail("create", None)
        assert ckpt.save(2, run.state).result().step == 2
        assert ckpt.statistics().pool.used_slabs == 0


def test_a_failure_that_nobody_took_is_raised_by_the_next_call(orders: Orders, run: Run) -> None:
    with small_checkpointer(orders.url, worker="process") as ckpt:
        orders.fail("create", errno.ENOSPC)
        failed = ckpt.save(1, run.state)
        until(failed.done, "the end of the save")
        orders.fail("create", None)
        with pytest.raises(aiockpt.BackgroundSaveError, match="step 1") as told:
            ckpt.save(2, run.state)
        assert told.value.failures == (failed,)
        assert told.value.future is not None
        assert told.value.future.result().step == 2


def test_a_torn_snapshot_is_given_up_in_the_writer(orders: Orders, run: Run) -> None:
    """Here the digests find the change when all windows but the last are with the writer."""
    real = copying._copy_beside
    reached, changed = threading.Event(), threading.Event()

    def copy(*arguments: Any) -> None:
        reached.set()
        assert changed.wait(250)
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_copy_beside", copy)
        with small_checkpointer(orders.url, worker="process", lazy=aiockpt.Lazy(debug="digest")) as ckpt:
            save = ckpt.save(1, run.state, snapshot="lazy")
            assert reached.wait(250)
            with torch.no_grad():
                next(run.model.parameters()).add_(1.0)
            changed.set()
            assert isinstance(save.exception(), aiockpt.TornSnapshotError)
            ckpt.save(2, run.state).result()
            assert [info.step for info in ckpt.steps().result()] == [2]
    assert not list(orders.path.glob("step-00000001/a-*/d/*"))


def test_what_the_trainer_prunes_leaves_what_the_writer_writes_alone(orders: Orders, run: Run) -> None:
    with small_checkpointer(orders.url, worker="process") as ckpt:
        ckpt.save(1, run.state).result()
        ckpt.wait()
        orders.has_reached("put_new")
        orders.hold("put_new")
        again = ckpt.save(1, run.state)
        until(lambda: orders.has_reached("put_new"), "the vote")
        with small_checkpointer(orders.path) as stranger:
            (stray,) = stranger.prune(aiockpt.Retention(grace_s=0.0), dry_run=True).result().garbage
        assert ckpt._engine.busy_attempts == {stray.attempt}
        orders.let_go("put_new")
        assert again.result().generation == 2
        until(lambda: not ckpt._engine.busy_attempts, "the end of the attempt")


def test_waiting_for_all_waits_for_what_follows_a_save_too(orders: Orders, run: Run) -> None:
    with small_checkpointer(orders.url, worker="process", retention=aiockpt.Retention(last=1)) as ckpt:
        ckpt.save(1, run.state).result()
        ckpt.wait()
        orders.has_reached("put")
        orders.hold("put")  # of the hint, which comes before retention
        ckpt.save(2, run.state).result()
        waiting = threading.Thread(target=ckpt.wait)
        waiting.start()
        until(lambda: orders.has_reached("put"), "the hint")
        waiting.join(0.3)
        assert waiting.is_alive()
        orders.let_go("put")
        waiting.join(250)
        assert [folder.name for folder in orders.path.glob("step-*")] == ["step-00000002"]


def test_structures_may_alternate(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [{"a": torch.arange(9000.0)}, {"b": torch.arange(5), "n": 3}, {"only": "values"}]
    with small_checkpointer(tmp_path, worker="process") as ckpt:
        for step in range(9):
            ckpt.save(step, states[step % 3])
        ckpt.wait()
        for step in range(3):
            like: dict[str, Any] = {
                key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                for key, value in states[step].items()
            }
            ckpt.load(like, step + 3).result()
            assert all(
                torch.equal(like[key], value) if isinstance(value, torch.Tensor) else like[key] == value
                for key, value in states[step].items()
            )


def test_two_saves_in_flight_are_both_written_and_told_apart(orders: Orders, run: Run) -> None:
    with aiockpt.Checkpointer(orders.url, worker="process", limits=aiockpt.Limits(io=SMALL, max_in_flight=2)) as ckpt:
        ckpt.save(0, run.state).result()
        orders.has_reached("create")
        orders.hold("create")
        digests, saves = [], []
        for step in (1, 2):
            run.train()
            digests.append(run.digest())
            saves.append(ckpt.save(step, run.state))
            until(lambda: orders.has_reached("create"), "the data file")
        orders.let_go("create")
        assert [save.result().step for save in saves] == [1, 2]
        for step, digest in zip((1, 2), digests, strict=True):
            other = Run(8)
            ckpt.load(other.state, step).result()
            assert other.digest() == digest
        assert ckpt.latest().result() == 2


# ------------------------------------------------------------------ tiers and events


class ThreadWatch(Watch):
    """Refuses an event that comes on a thread of the program's."""

    def on_event(self, event: Event) -> None:
        assert threading.current_thread().name.startswith("aiockpt")
        super().on_event(event)


def test_every_tier_gets_its_steps_and_its_stages(tmp_path: Path, run: Run) -> None:
    watch = ThreadWatch()
    far = aiockpt.Tier(str(tmp_path / "far"), every=2, keep=1)
    with small_checkpointer(
        [str(tmp_path / "near"), far],
        worker="process",
        observers=[watch],
        retention=aiockpt.Retention(last=3),
    ) as ckpt:
        saves = []
        for steps in (range(3), range(3, 5)):  # retention deletes no step that is on its way to another tier
            saves += [ckpt.save(step, run.state) for step in steps]
            for save in saves:
                assert save.result().url == f"file://{tmp_path}/near"
                save.in_memory().result()
            for save in saves[::2]:
                assert save.committed(far.url).result().url == f"file://{tmp_path}/far"
        assert isinstance(saves[1].committed(far.url).exception(), aiockpt.SaveSkippedError)
    for folder, there in (("near", [4, 3, 2]), ("far", [4])):
        with aiockpt.Checkpointer(tmp_path / folder) as ckpt:
            assert [info.step for info in ckpt.steps().result()] == there
    assert [event.step for event in watch.of(Promoted)] == [0, 2, 4]
    assert {event.step for event in watch.of(StepDeleted)} == {0, 1, 2}


@pytest.mark.parametrize("policy", ["raise", "call"])
def test_a_tier_that_gives_up_is_told_the_way_it_was_asked_for(
    policy: str, orders: Orders, tmp_path: Path, run: Run
) -> None:
    watch = ThreadWatch()
    errors: list[BaseException] = []
    orders.fail("create", errno.ENOSPC)
    on_error: Any = errors.append if policy == "call" else "raise"
    far = aiockpt.Tier(orders.url, deadline=0.2, on_error=on_error)
    ckpt = small_checkpointer([str(tmp_path / "near"), far], worker="process", observers=[watch])
    save = ckpt.save(7, run.state)
    assert save.result().step == 7
    until(lambda: any(event.final for event in watch.of(PromotionFailed)), "the end of the tier's patience")
    assert isinstance(save.committed(far.url).exception(), aiockpt.StorageFullError)
    if policy == "raise":
        with pytest.raises(aiockpt.BackgroundSaveError, match="step 7"):
            ckpt.close()
    else:
        ckpt.close()
        assert [type(error) for error in errors] == [aiockpt.StorageFullError]


def test_a_writer_that_dies_leaves_no_tier_waiting(orders: Orders, tmp_path: Path, run: Run) -> None:
    orders.hold("create")
    with small_checkpointer([str(tmp_path / "near"), orders.url], worker="process") as ckpt:
        save = ckpt.save(1, run.state)
        save.result()
        until(lambda: orders.has_reached("create"), "the promotion")
        os.kill(process_of(ckpt).pid, 9)
        assert isinstance(save.committed(orders.url).exception(), aiockpt.WriterLostError)
        orders.let_go("create")
        assert ckpt.save(2, run.state).committed(orders.url).result().step == 2
