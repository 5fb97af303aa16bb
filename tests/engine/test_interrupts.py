"""Ctrl-C anywhere: what is under way is finished; pressed again, it is given up, and nothing hangs or leaks."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.engine.job import SaveJob
from aiockpt.engine.submit import Submitter
from aiockpt.events import SaveFailed
from aiockpt.options import Snapshot
from aiockpt.runtime.loop import LoopThread
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.worker import process
from tests.small_run import Run, small_checkpointer
from tests.watch import Watch, until

SOON_S = 250


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Have SIGINT mean what it means in a program, and have no interrupt reach the next test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


Threads = Callable[[], list[str]]


@pytest.fixture
def threads_of_ours() -> Threads:
    """Return what names the threads that this test started: those of a checkpointer that an earlier one dropped end late."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("aiockpt")]


def interrupt_once(work: Callable[..., Any], after: bool) -> Callable[..., Any]:
    """Return *work* with a Ctrl-C before or *after* its first call on this thread, the only one that Python interrupts."""
    here = threading.get_ident()
    calls: list[Callable[..., Any]] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        if threading.get_ident() != here or calls:
            return work(*args, **options)
        calls.append(work)
        if after:
            work(*args, **options)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("verb", ["create", "upload.write"])
def test_a_close_that_is_interrupted_gives_up_what_hangs(tmp_path: Path, threads_of_ours: Threads, verb: str) -> None:
    run, hanging = Run(1), Fault(do="hang", verb=verb, match="step-00000002/*", times=None)
    ckpt = small_checkpointer(FaultyBackend(LocalBackend(str(tmp_path)), [hanging]))
    ckpt.save(1, run.state).result(SOON_S)
    save = ckpt.save(2, run.state)
    save.snapshotted().result(SOON_S)
    close_interrupted(ckpt, 0.5)
    assert isinstance(save.exception(0), aiockpt.SaveCancelledError)
    assert not threads_of_ours()
    ckpt.close()
    with small_checkpointer(tmp_path) as again:
        loaded = again.load(run.state).result(SOON_S)
    assert loaded is not None
    assert loaded.step == 1


def close_interrupted(ckpt: aiockpt.Checkpointer, after_s: float) -> None:
    """Close, with a Ctrl-C after *after_s* seconds."""
    pressing = threading.Timer(after_s, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    pressing.join()


def test_a_close_that_is_interrupted_waits_for_no_load_that_hangs(tmp_path: Path, threads_of_ours: Threads) -> None:
    run = Run(1)
    hanging = [Fault(do="hang", verb="reader.read", times=None), Fault(do="hang", verb="upload.write", times=None)]
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, run.state).result(SOON_S)
    ckpt = small_checkpointer(FaultyBackend(LocalBackend(str(tmp_path)), hanging))
    ckpt.save(2, run.state)  # what the close waits for
    load = ckpt.load(Run(2).state)
    close_interrupted(ckpt, 0.5)
    assert not threads_of_ours()
    assert load.exception(0) is not None


def test_an_interrupted_close_ends_waits_for_far_tiers(tmp_path: Path) -> None:
    far = FaultyBackend(LocalBackend(tmp_path / "far"), [Fault(do="hang", verb="create", times=None)])
    ckpt = small_checkpointer([aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(far)])
    save = ckpt.save(1, Run(1).state)
    save.result(SOON_S)
    close_interrupted(ckpt, 0.5)
    assert isinstance(save.committed(far).exception(SOON_S), aiockpt.SaveCancelledError)


def test_a_writer_process_commits_though_the_close_is_interrupted(tmp_path: Path, threads_of_ours: Threads) -> None:
    state = {"weight": torch.arange(2 << 20)}
    ckpt = aiockpt.Checkpointer(
        tmp_path, worker="process", limits=aiockpt.Limits(io=aiockpt.IO(bandwidth=8 << 20))
    )  # 16 MiB: two seconds
    save = ckpt.save(1, state)
    save.snapshotted().result(SOON_S)
    close_interrupted(ckpt, 0.2)
    assert not threads_of_ours()
    until(lambda: all(writer.poll() is not None for writer in process._left), "the end of the writer", SOON_S)
    with aiockpt.Checkpointer(tmp_path) as again:
        assert again.latest().result(SOON_S) is not None


WHERE = [
    (Submitter, "_enter"),
    (PendingCopies, "add"),
    (LoopThread, "in_worker"),
    (SaveJob, "prepare"),
    (LoopThread, "submit"),
    (LoopThread, "call_soon"),
    (SaveJob, "copy"),
    (SaveJob, "stop"),
]


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), WHERE, ids=[name for _, name in WHERE])
def test_a_save_that_is_interrupted_anywhere_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads_of_ours: Threads,
    owner: type,
    name: str,
    after: bool,
    snapshot: Snapshot,
) -> None:
    run, watch = Run(1), Watch()
    with small_checkpointer(tmp_path, observers=[watch], on_error=lambda future: None) as ckpt:
        ckpt.save(1, run.state).result(SOON_S)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_once(getattr(owner, name), after))
            with suppress(KeyboardInterrupt):
                ckpt.save(2, run.state, snapshot=snapshot)
        run.train()  # no optimizer is held
        ckpt.save(3, run.state).result(SOON_S)
        with suppress(aiockpt.BackgroundSaveError):
            ckpt.wait()
        lost = name == "call_soon" and not after  # a slab on its way to the loop, at worst
        assert ckpt.statistics().pool.used_slabs <= lost
        loaded = ckpt.load(Run(2).state).result(SOON_S)
        assert loaded is not None
        assert loaded.step == 3
    assert not threads_of_ours()
    assert len(watch.of(SaveFailed)) <= 1, "told once"
