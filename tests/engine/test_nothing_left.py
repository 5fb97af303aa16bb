"""Threads after the end of a checkpointer: none of its own is left, in Python or below it."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import aiockpt
from aiockpt.monitor import Endpoint, Heartbeat, TraceFile
from tests.run_python import run_python
from tests.small_run import small_checkpointer
from tests.watch import until


def tasks() -> set[str]:
    """Return the threads of this process, those of C and C++ among them."""
    return set(os.listdir("/proc/self/task"))


def options(name: str, folder: Path) -> dict[str, Any]:
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "lazy": lambda: {"snapshot": "lazy"},
        "process": lambda: {"worker": "process"},
        "signals": lambda: {"on_preempt": "save"},
        "observers": lambda: {"observers": [TraceFile(folder / "trace"), Heartbeat(), Endpoint(port=0)]},
        "cadence": lambda: {"every": "30min"},
        "ranks": lambda: {"ranks": aiockpt.Ranks(0, 1, HashStore())},
    }
    return made[name]()


NAMES = ["plain", "lazy", "process", "signals", "observers", "cadence", "ranks"]


def use(ckpt: aiockpt.Checkpointer, step: int) -> None:
    ckpt.save(step, {"weight": torch.full((200, 100), float(step))})


def named(start: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(start)}


COPIES = """
import gc, os, sys
import torch
import aiockpt

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

gc.disable()  # it would free what a cycle holds, some time
for turn in range(6):
    before = before if turn > 1 else resident_bytes()  # what is made once is made
    with aiockpt.Checkpointer(["memory://left", sys.argv[1]]) as ckpt:
        ckpt.save(turn, {"weight": torch.zeros(100)}).result()
print(resident_bytes() - before)
"""


def test_no_memory_of_copies_between_tiers_is_left_after_close(tmp_path: Path) -> None:
    ended = run_python("-c", COPIES, tmp_path / "run")
    assert int(ended.stdout) < 32 << 20  # a window has 16 MiB, and five checkpointers were closed


@pytest.mark.parametrize("name", NAMES)
def test_no_thread_is_left_after_close(tmp_path: Path, name: str) -> None:
    before, threads = tasks(), named("aiockpt")
    for turn in range(3):  # torch and the interpreter start some of their own once
        if turn == 2:
            gc.collect()
            before = tasks()
        with small_checkpointer(tmp_path / "run", **options(name, tmp_path)) as ckpt:
            use(ckpt, 10 * turn)
            ckpt.load({"weight": torch.zeros(200, 100)}).result()
    assert named("aiockpt") <= threads
    if name == "observers":
        until(lambda: tasks() <= before, "the end of anyio's threads, which end by themselves", 60)
    assert tasks() <= before


@pytest.mark.parametrize("name", NAMES)
async def test_no_thread_is_left_after_aclose(tmp_path: Path, name: str) -> None:
    before = named("")  # a worker of the event loop of an earlier test may end late
    async with small_checkpointer(tmp_path / "run", **options(name, tmp_path)) as ckpt:
        use(ckpt, 10)
        await ckpt.load({"weight": torch.zeros(200, 100)})
    assert named("aiockpt") <= before
    until(lambda: named("AnyIO") <= before, "the end of anyio's threads, which end by themselves", 60)


NESTED = """
import asyncio, sys
import nest_asyncio
import torch, aiockpt
from aiockpt.monitor import Heartbeat, TraceFile

nest_asyncio.apply()

async def train(folder):
    state = {"weight": torch.ones(10)}
    for step in (1, 2):
        async with aiockpt.Checkpointer(folder + "/run", observers=[TraceFile(folder + "/trace"), Heartbeat()]) as ckpt:
            await ckpt.load(state)
            await ckpt.save(step, state)

asyncio.run(train(sys.argv[1]))
print("the last line")
"""


def test_a_program_whose_loop_is_patched_for_notebooks_ends(tmp_path: Path) -> None:
    assert run_python("-c", NESTED, tmp_path).stdout == "the last line\n"
