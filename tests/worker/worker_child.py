"""A trainer with a writer process that saves step 1, and dies by SIGKILL in or after the save of step 2.

Run as ``python -m tests.worker.worker_child HOW PLACE``. It prints the digest of the state of each step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import aiockpt
from aiockpt.pipeline import snapshot as copying
from tests.small_run import Run, small_checkpointer

PACKAGES = "AIOCKPT_TESTS_PACKAGES"
"""Names a folder of the module path, of the writer's too."""


def die(*_: object) -> None:
    """End as the out-of-memory killer would end it."""
    os.kill(os.getpid(), signal.SIGKILL)


def before_window(number: int, act: Callable[[], object]) -> None:
    """Have the copy *act* before it fills that window."""
    seen: list[int] = []

    def acting(real: Callable[..., None]) -> Callable[..., None]:
        def copy(*arguments: Any) -> None:
            if len(seen) == number:
                act()
            seen.append(number)
            real(*arguments)

        return copy

    for way in ("_copy_fast", "_copy_together"):
        setattr(copying, way, acting(getattr(copying, way)))


def hold_the_loop(ckpt: aiockpt.Checkpointer) -> None:
    """Have the engine's loop do nothing for a minute, from now on."""
    asleep = threading.Event()
    ckpt._loop.call_soon(asleep.set)
    ckpt._loop.call_soon(time.sleep, 60)
    asleep.wait()


def main(how: str, place: str) -> None:
    """Save step 1, then step 2 in the way that *how* says."""
    sys.path.append(os.environ[PACKAGES])
    run = Run(1)
    if how == "hangs up":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    ckpt = small_checkpointer(place, worker="process", retention=aiockpt.Retention(last=5))
    run.train()
    ckpt.save(1, run.state).result()
    ckpt.wait()
    tell(run.digest())
    sys.stdin.readline()  # until the test has made its preparations
    run.train()
    tell(run.digest())
    if how == "half":
        before_window(1, die)
    if how == "busy loop":
        before_window(0, lambda: hold_the_loop(ckpt))
    if how == "unread":  # the writer takes nothing until this process is dead
        os.kill(ckpt._destination._connection.process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    if how == "forked" and not os.fork():
        time.sleep(300)
        os._exit(0)
    save = ckpt.save(2, run.state, snapshot="lazy" if how == "lazy" else "eager")
    save.snapshotted().result()
    if how == "ends":
        return
    if how == "hangs up":
        tell("snapshotted")
        time.sleep(300)
    die()


def tell(line: str) -> None:
    """Print one line now."""
    print(line, flush=True)  # noqa: T201  what the test compares with


if __name__ == "__main__":
    main(*sys.argv[1:])
