"""What is saved of a run that is told to end and makes no further call. Real processes, real signals, real workers."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.runtime.loop import LoopThread
from tests.preemption.programs import WAIT_S, Program, run_and_end, start, start_ranks
from tests.preemption.test_alone import newest, tell
from tests.small_run import small_checkpointer

BEGIN = """
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        if index == 300: say("go")
        time.sleep(0.0002)
        return index
"""
PLAIN = (
    BEGIN
    + """
with aiockpt.Checkpointer(root, limits=small, on_preempt=aiockpt.Preemption(recent_s=0)) as ckpt:
    start = ckpt.resume(state)
    for step, batch in enumerate(DataLoader(Data(), 8, num_workers=2), start):
        train(step)
        ckpt.step(step, state)
"""
)


def survivors(pids: list[int]) -> list[int]:
    """Return those of *pids* that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in status(pid)]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def children(program: Program) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
    ]


def test_a_signal_that_ends_the_workers_first_saves_the_step_of_the_last_call(tmp_path: Path) -> None:
    program = start(tmp_path, PLAIN)
    program.wait_said("go")
    program.send_group()
    assert program.end() == aiockpt.Preempted.VERIFIED, program.log
    saved = newest(tmp_path / "run")
    assert saved is not None
    assert f"step {saved} is saved and committed, read back and compared" in program.log


LOADED = (
    BEGIN
    + """
sampler = aiockpt.ShardedSampler(1_000_000, 8, shuffle=False)
state["loader"] = loader = aiockpt.Loader(DataLoader(Data(), batch_sampler=sampler, num_workers=2, **options))
with aiockpt.Checkpointer(root, limits=small, every=1000, on_preempt="save") as ckpt:
    for step, batch in enumerate(loader, ckpt.resume(state)):
        train(step)
        die_here(step)
        ckpt.step(step, state)
"""
)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_signal_to_the_group_saves_the_last_step(tmp_path: Path, persistent: bool) -> None:
    options = f"options = dict(persistent_workers={persistent})\ndef die_here(step): pass\n"
    program = start(tmp_path, options + LOADED)
    program.wait_said("go")
    program.send_group()
    assert program.end() == aiockpt.Preempted.VERIFIED, program.log
    assert f"step {newest(tmp_path / 'run')} is saved and committed" in program.log


def test_a_worker_that_ends_before_the_signal_comes_interrupts_no_step(tmp_path: Path) -> None:
    dies = """
options = {}
def die_here(step):
    if step == 20:
        worker, other = (int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split())
        os.kill(worker, signal.SIGTERM)
        while "State:\tZ" not in open(f"/proc/{worker}/status").read():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        state["value"] = step
"""
    program = start(tmp_path, dies + LOADED)
    assert program.end() == aiockpt.Preempted.VERIFIED, program.log
    assert (newest(tmp_path / "run") or 0) >= 20, program.log


ENDED_BY_ANOTHER_HANDLER = """
def go():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    train(7)
    ckpt.step(7, state)
    say("go")
    time.sleep(60)
ckpt = aiockpt.Checkpointer(root, limits=small, on_preempt="save")
"""


@pytest.mark.parametrize("block", ["with ckpt: go()", "go()"])
def test_a_handler_of_another_library_that_ends_the_program_keeps_its_status_and_the_last_step(
    tmp_path: Path, block: str
) -> None:
    run_and_end(tmp_path, ENDED_BY_ANOTHER_HANDLER + block, status=3)
    assert newest(tmp_path / "run") == 7


class Own:
    """An object that says what is to be saved of it, which is asked of it in saves alone."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return self.seen

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state


class Slotted(Own):
    """The same, whose values are in slots."""

    __slots__ = ("average", "count")

    def __init__(self) -> None:
        super().__init__()
        self.count, self.average = 0, torch.zeros(3)

    def __call__(self) -> None:
        """Count, as averages of weights that are called with a model do."""
        self.count += 1


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda state: None,
    "a tensor in place": lambda state: state["weight"][3, 4].fill_(5.0),
    "another tensor in its place": lambda state: setattr(state["net"].weight, "data", torch.ones(2, 2)),
    "a plain value": lambda state: state.update(value=8),
    "a random generator": lambda state: torch.rand(1),
    "an optimizer's step": lambda state: state["optimizer"].step(),
    "a rate": lambda state: state["optimizer"].param_groups[0].update(lr=0.5),
    "the rate of the last of many groups": lambda state: state["groups"].param_groups[-1].update(lr=0.5),
    "a schedule": lambda state: setattr(state["schedule"], "last_epoch", 4),
    "a batch": lambda state: next(state["batches"].value),
    "an own object": lambda state: state["own"].seen.update(count=1),
    "a tensor past torch's counter": lambda state: state["weight"].data.fill_(5.0),
    "weights past torch's counter": lambda state: state["net"].weight.data.copy_(torch.ones(2, 2)),
    "a strided tensor past torch's counter": lambda state: state["turned"].data.fill_(5.0),
    "a slot of an own object that is called": lambda state: state["slotted"](),
    "a tensor in a slot": lambda state: state["slotted"].average.fill_(1.0),
    "an array": lambda state: state["array"].fill(1),
    "too many values": lambda state: state["own"].seen.update({str(number): number for number in range(9999)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_state_that_has_not_moved_since_the_last_call_is_saved_as_its_step(tmp_path: Path, change: str) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()  # so that its next step changes nothing that torch counts
    loader = aiockpt.Loader(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=aiockpt.ShardedSampler(8, 2)))
    state: dict[str, Any] = {
        "weight": torch.full((200, 100), 7.0),
        "value": 7,
        "net": net,
        "optimizer": optimizer,
        "groups": torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(5)], 0.0),
        "loader": loader,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "rng": aiockpt.RNG(),
        "own": Own(),
        "slotted": Slotted(),
        "turned": torch.zeros(3, 2).t(),
        "array": np.zeros(3),
    }
    batches = iter(loader)

    def fail() -> None:
        with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
            ckpt.step(7, state)
            CHANGES[change]({**state, "batches": aiockpt.per_rank(batches)} if change != "a plain value" else state)
            os.kill(os.getpid(), signal.SIGUSR1)
            raise KeyError("what a loader raises")

    with pytest.raises(aiockpt.Preempted if change == "nothing" else KeyError):
        fail()
    assert newest(tmp_path) == (7 if change == "nothing" else None)


def test_the_end_of_a_worker_does_not_interrupt_the_last_save(tmp_path: Path) -> None:
    class Ends(Own):
        def state_dict(self) -> dict[str, int]:
            signal.raise_signal(signal.SIGCHLD)
            return {}

    def fail(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated. ")

    earlier = signal.signal(signal.SIGCHLD, fail)
    try:
        with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
            tell()
            with pytest.raises(aiockpt.Preempted) as ended:
                ckpt.step(7, {"own": Ends()})
        assert signal.getsignal(signal.SIGCHLD) is fail
    finally:
        signal.signal(signal.SIGCHLD, earlier)
    assert (ended.value.step, ended.value.code) == (7, aiockpt.Preempted.VERIFIED)


def test_the_end_of_a_worker_is_told_though_it_comes_while_a_signal_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated. ")

    def call_soon(loop: LoopThread, *work: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGCHLD)
        really(loop, *work)

    really = LoopThread.call_soon
    earlier = signal.signal(signal.SIGCHLD, fail), signal.signal(signal.SIGUSR1, lambda *_: chained.append(1))
    chained: list[int] = []
    try:
        with aiockpt.Checkpointer(tmp_path, on_preempt="save") as ckpt:
            ckpt.step(7, {"own": Own()})
            monkeypatch.setattr(LoopThread, "call_soon", call_soon)
            with pytest.raises(RuntimeError, match="killed by signal"):
                tell()
            monkeypatch.undo()
            assert chained == [1]
            with pytest.raises(aiockpt.Preempted) as ended:
                deque(ckpt.step(step, {"own": Own()}) for step in range(8, 10**6))  # the loop thread may not know yet
    finally:
        signal.signal(signal.SIGCHLD, earlier[0])
        signal.signal(signal.SIGUSR1, earlier[1])
    assert ended.value.code == aiockpt.Preempted.VERIFIED


def test_workers_of_our_loader_outlive_a_signal_to_the_group_and_end_with_their_parent(tmp_path: Path) -> None:
    sampler = "aiockpt.ShardedSampler(1_000_000, 8, shuffle=False)"
    ours = f"aiockpt.Loader(DataLoader(Data(), batch_sampler={sampler}, num_workers=2))"
    script = PLAIN.replace("DataLoader(Data(), 8, num_workers=2)", ours)
    program = start(
        tmp_path, script.replace("ckpt.step(step, state)", "ckpt.step(step, state) if step < 300 else say('x')")
    )
    program.wait_said("x")
    workers = children(program)
    assert len(workers) == 2
    program.send_group()
    program.wait_logged("the run ends in the next step")
    assert survivors(workers) == workers
    program.process.kill()
    until_s = time.monotonic() + WAIT_S
    while survivors(workers) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not survivors(workers)
    assert program.end() == -signal.SIGKILL


def test_ranks_whose_workers_die_of_the_signal_save_the_same_step(tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
with aiockpt.Checkpointer(root, limits=small, on_preempt=aiockpt.Preemption(recent_s=0)) as ckpt:
    for step, batch in enumerate(DataLoader(Data(), 8, num_workers=1)):
        torch.distributed.barrier()
        train(step)
        ckpt.step(step, state)
        if step == 50:
            say("ready")
            ckpt.barrier()
            torch.distributed.barrier()
            time.sleep(250)
"""
    )
    programs = start_ranks(tmp_path, script, 2)
    for program in programs:
        program.wait_said("ready")
    for program in programs:
        program.send_group()
    assert [program.end() for program in programs] == [aiockpt.Preempted.VERIFIED] * 2, (
        programs[0].log + programs[1].log
    )
    assert newest(tmp_path / "run") == 50


def test_a_loop_that_is_over_saves_its_last_step_and_ends_well(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
        state = {"weight": torch.full((200, 100), 4.0), "value": 4}
        ckpt.step(4, state)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert newest(tmp_path) == 4
