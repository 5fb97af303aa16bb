"""A training of one or more ranks, for the tests of the launcher, with faults that the command line names.

``python trainer.py URL STEPS PLACE:RANK:STEP:START,…``: the fault comes in that start of the rank (0: in each); each start
leaves a mark in the folder ``starts`` of the current one. ``PLACE`` is ``none`` for a run without.
"""

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.runtime.progress import read_figures

FOREVER_S = 10_000
HERE = Path(os.environ.get("HERE", "."))


class Faults:
    """What goes wrong, by place, on this rank in this start."""

    def __init__(self, text: str, rank: int) -> None:
        marks = HERE / "starts"
        marks.mkdir(exist_ok=True)
        with (marks / str(rank)).open("a") as file:
            file.write("x")
        self.start = (marks / str(rank)).stat().st_size
        rows = [row.split(":") for row in text.split(",") if row != "none"]
        drift = self.start if os.environ.get("DRIFT") else 0
        self.steps = {
            place: int(step) + drift
            for place, at_rank, step, start in rows
            if int(at_rank) == rank and int(start) in (0, self.start)
        }
        self.step = -1

    def at(self, place: str, action: Callable[[], object] = lambda: time.sleep(FOREVER_S)) -> None:
        """Do it here, where *place* has a fault in this step."""
        if self.steps.get(place) == self.step:
            action()


class Slow(torch.autograd.Function):
    """The identity, whose backward is a place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, faults: Faults) -> torch.Tensor:
        ctx.faults = faults
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.faults.at("backward")
        return grad_outputs[0], None


class Counter:
    """A part of the state that may stall while it is saved."""

    def __init__(self, faults: Faults) -> None:
        self.count, self.faults = 0, faults

    def state_dict(self) -> dict[str, int]:
        self.faults.at("save")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def batches(faults: Faults, start: int, steps: int) -> Iterator[tuple[int, torch.Tensor]]:
    for step in range(start, steps):
        faults.step = step
        faults.at("loader")
        torch.manual_seed(step)
        yield step, torch.randn(8, 16)


def evaluate() -> None:
    """Work for some seconds: the thread moves."""
    until_s = time.monotonic() + float(os.environ.get("EVALUATION_S", "8"))
    while time.monotonic() < until_s:
        visit_tree(random.randrange(50))


def visit_tree(depth: int) -> None:
    if depth:
        visit_tree(depth - 1)
    else:
        time.sleep(0.01)


def lock_twice() -> None:
    """Hang in C, with the interpreter held, in a call that no signal ends."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)


def wait_in_c() -> None:
    """Hang in C as a collective of a device does: the interpreter is free, and no signal ends the call."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


def crash() -> None:
    raise ArithmeticError("the loss is not a number")


def end_late() -> None:
    """Be killed when the others have ended."""
    time.sleep(4)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, steps, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    faults = Faults(text, rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "counter": Counter(faults)}
    every, on_preempt = int(os.environ.get("EVERY", "1")), "save" if os.environ.get("PREEMPT") else None
    with aiockpt.Checkpointer([aiockpt.Tier(url, keep=2)], every=every, on_preempt=on_preempt) as ckpt:  # type: ignore[arg-type]
        start = ckpt.resume(state)
        with (HERE / f"log-{rank}").open("a", buffering=1) as log:
            log.write(f"start {start} {time.monotonic()}\n")
            for step, batch in batches(faults, start, steps):
                time.sleep(float(os.environ.get("STEP_S", "0.05")))
                loss = wrapped(Slow.apply(batch.requires_grad_(), faults)).square().mean()  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                faults.at("collective")
                dist.all_reduce(loss.detach().clone())
                faults.at("gil", lock_twice)
                faults.at("device", wait_in_c)
                faults.at("stop", lambda: os.kill(os.getpid(), signal.SIGSTOP))
                faults.at("evaluation", evaluate)
                faults.at("crash", crash)
                faults.at("kill", lambda: os.kill(os.getpid(), signal.SIGKILL))
                save = ckpt.step(step, state)
                if save is not None and os.environ.get("WAIT"):
                    save.result()
                log.write(f"step {step} {time.monotonic()}\n")
    (HERE / f"figures-{rank}").write_text(repr(read_figures()))
    faults.at("end", end_late)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
