"""A program that saves in forked children and kills each with SIGKILL at another file-system call.

Prints one line of JSON for each: the call, whether the child was killed, the value that a fresh process then loads, and
whether saving on from there works. It has no threads of its own, so that forking it is safe.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.inline_engine import TINY, states_equal, tiny_state


def in_child(work: Callable[[], int]) -> tuple[bool, int]:
    """Run *work* in a forked child; return whether it was killed, and what it returned."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True, 0
    return False, os.WEXITSTATUS(status)


def save(root: Path, step: int, kill_at: int | None) -> int:
    """Save a step, dying at a call; return 0."""
    faults = [] if kill_at is None else [Fault(do="kill", at=kill_at)]
    backend = LocalBackend(root, world=World(files=FaultyFiles(OsFiles(), faults)))
    with aiockpt.Checkpointer(backend, io=TINY) as ckpt:
        ckpt.save(step, tiny_state(step)).result(60)
    return 0


def load(root: Path) -> int:
    """Load the newest step and return its value; 90 when it is not what was saved."""
    with aiockpt.Checkpointer(root, io=TINY) as ckpt:
        state = tiny_state(-1)
        loaded = ckpt.load(state).result(60)
        if loaded is None:
            return 0
        return int(state["value"]) if states_equal(state, tiny_state(state["value"])) else 90


def main(folder: Path, stride: int) -> None:
    """Try every *stride*-th call until the save survives."""
    base = folder / "base"
    assert in_child(lambda: save(base, 1, None)) == (False, 0)
    killed, at = True, 1
    while killed:
        root = folder / "run"
        shutil.copytree(base, root)
        killed, _ = in_child(lambda: save(root, 2, at))  # noqa: B023  it runs at once
        _, value = in_child(lambda: load(root))  # noqa: B023
        _, on = in_child(lambda: save(root, 3, None) or load(root))  # noqa: B023
        sys.stdout.write(json.dumps({"at": at, "killed": killed, "loaded": value, "on": on}) + "\n")
        shutil.rmtree(root)
        at += stride


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
