"""Ctrl-C anywhere: what is under way is finished; pressed again, it is given up, and nothing hangs or leaks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.engine.launch import Launcher
from aiockpt.engine.ticket import Ticket
from aiockpt.errors import SaveCancelledError
from aiockpt.options import Snapshot
from aiockpt.runtime.loop import LoopThread
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.small_run import SMALL, Run

pytestmark = pytest.mark.timeout(60)
SOON_S = 30.0


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Have SIGINT mean what it means in a program, and have no interrupt reach the next test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


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
def test_a_close_that_is_interrupted_gives_up_what_hangs(tmp_path: Path, verb: str) -> None:
    run, hanging = Run(1), Fault(do="hang", verb=verb, match="step-00000002/*", times=None)
    ckpt = aiockpt.Checkpointer(FaultyBackend(LocalBackend(str(tmp_path)), [hanging]), io=SMALL)
    ckpt.save(1, run.state).result(SOON_S)
    save = ckpt.save(2, run.state)
    save.snapshotted().result(SOON_S)
    pressing = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    pressing.start()
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert time.monotonic() - begun_s < SOON_S
    assert isinstance(save.exception(0), SaveCancelledError)
    assert not threads_of_ours()
    ckpt.close()
    with aiockpt.Checkpointer(tmp_path, io=SMALL) as again:
        loaded = again.load(run.state).result(SOON_S)
    assert loaded is not None
    assert loaded.step == 1


WHERE = [
    (Launcher, "_begin"),
    (Ticket, "prepare"),
    (LoopThread, "submit"),
    (LoopThread, "call_soon"),
    (Ticket, "copy"),
    (Ticket, "stop"),
]


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), WHERE, ids=[name for _, name in WHERE])
def test_a_save_that_is_interrupted_anywhere_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool, snapshot: Snapshot
) -> None:
    run = Run(1)
    with aiockpt.Checkpointer(tmp_path, io=SMALL, on_error=lambda future: None) as ckpt:
        ckpt.save(1, run.state).result(SOON_S)
        begun_s = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_once(getattr(owner, name), after))
            with suppress(KeyboardInterrupt):
                ckpt.save(2, run.state, snapshot=snapshot)
        run.train()  # no optimizer is held
        ckpt.save(3, run.state).result(SOON_S)
        with suppress(aiockpt.BackgroundSaveError):
            ckpt.wait()
        assert time.monotonic() - begun_s < SOON_S
        lost = name == "call_soon" and not after  # a slab on its way to the loop, at worst
        assert ckpt.statistics().pool.used_slabs <= lost
        loaded = ckpt.load(Run(2).state).result(SOON_S)
        assert loaded is not None
        assert loaded.step == 3
    assert not threads_of_ours()
