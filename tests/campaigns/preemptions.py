"""A real run is told to end by a real signal at a random moment, alone or on some of three ranks: nothing is lost.

A case forks a run that saves now and then, and computes in C for a while in some of its steps. The signal comes at a random
moment: while it makes its checkpointer ready, loads, trains, saves or cleans up. What `aiockpt.Preempted` promises must be
what a fresh process loads, bit for bit: on all ranks the same step, and none that is older than what was reached when the
signal came. In some cases the run is killed a moment after the signal, as where the grace is none: then what it promised
until then, if it did, is there, and else an older step, whole.
"""

import hashlib
import mmap
import os
import random
import signal
import struct
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import aiockpt
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.campaigns.sigkill import NEVER_SAVED, RAISED, fork, in_child
from tests.campaigns.sigkill_ranks import load, state_of
from tests.inline_process import TINY

WORLD_SIZE = 3
STEPS = 250
DONE = 3
"""What a run returns that was not told before its end."""
_PROGRESS = struct.Struct("q")


class Plan:
    """What one seed says.

    Attributes:
        every: steps between two saves of the run's own.
        told: which ranks get the signal, and how many seconds after all are ready.
        killed_after_s: when all are killed, from the last signal; None where they are left their grace.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        dice = random.Random(seed)
        self.every = dice.choice((7, 40, 1000))
        self.number = dice.choice((signal.SIGTERM, signal.SIGUSR1))
        self.recent_s = dice.choice((0.0, 60.0))
        self.worker = "process" if world_size == 1 and dice.random() < 0.1 else "thread"
        ranks = sorted(dice.sample(range(world_size), dice.randint(1, world_size)))
        self.told = sorted((dice.random() * 0.4, rank) for rank in ranks)
        self.killed_after_s = dice.random() * 0.1 if dice.random() < 0.2 and self.worker == "thread" else None


def run(place: Path, plan: Plan, rank: int, world_size: int, ready: int, progress: mmap.mmap) -> int:
    """Train until told to end; leave what was promised in a file, and return its status."""
    ranks = None
    if world_size > 1:
        meeting = torch.distributed.FileStore(str(place / "store"), world_size)  # type: ignore[attr-defined]
        ranks = aiockpt.Ranks(rank, world_size, meeting)
    preemption = aiockpt.Preemption(recent_s=plan.recent_s)
    options: dict[str, Any] = {
        "every": plan.every,
        "worker": plan.worker,
        "limits": aiockpt.Limits(io=TINY),
        "ranks": ranks,
    }
    state = state_of(rank, -1)
    pace = random.Random(rank)
    try:
        with aiockpt.Checkpointer(place / "run", on_preempt=preemption, **options) as ckpt:
            os.write(ready, b"r")
            for step in range(ckpt.resume(state), STEPS):
                if step % 5 == 0:
                    hashlib.pbkdf2_hmac("sha256", b"long", b"call", pace.randrange(1, 60_000))  # some 10 ms, deaf
                else:
                    time.sleep(pace.random() * 0.003)
                for name, item in state_of(rank, step).items():
                    if isinstance(item, torch.Tensor):
                        state[name].copy_(item)
                state["value"] = step
                _PROGRESS.pack_into(progress, rank * _PROGRESS.size, step)
                ckpt.step(step, state)
    except aiockpt.Preempted as ended:
        (place / f"promised-{rank}").write_text(f"{ended.step} {ended.code}")
        return int(ended.code or 0)
    return DONE


def load_next(root: Path, world_size: int) -> int:
    """Return the number after the newest step, all of which was compared; 0 when there is none."""
    value = load(root, world_size)
    return 0 if value is None else value if value == NEVER_SAVED else value + 1


def fork_all(place: Path, plan: Plan, world_size: int, progress: mmap.mmap) -> list[int]:
    """Start all ranks; return their process ids when all are ready."""
    listening, ready = os.pipe()
    children = [fork(partial(run, place, plan, rank, world_size, ready, progress)) for rank in range(world_size)]
    os.close(ready)
    said = b""
    while len(said) < world_size and (more := os.read(listening, world_size)):
        said += more
    os.close(listening)
    assert len(said) == world_size, "a rank ended before it was ready"
    return children


def tell(children: list[int], plan: Plan, progress: mmap.mmap) -> int:
    """Send the signals; return the least step that any rank had reached when the first of them came."""
    began_s, reached = time.monotonic(), None
    for at_s, rank in plan.told:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if reached is None:
            reached = min(_PROGRESS.unpack_from(progress, n * _PROGRESS.size)[0] for n in range(len(children)))
        os.kill(children[rank], plan.number)
    if plan.killed_after_s is not None:
        time.sleep(plan.killed_after_s)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    return reached or 0


def end_all(children: list[int]) -> list[int]:
    """Return how each ended: its status, or less than 0 for the signal that ended it."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def tell_and_look(place: Path, plan: Plan, world_size: int) -> str:
    """Run one case; return what came of it."""
    progress = mmap.mmap(-1, mmap.PAGESIZE)
    for rank in range(world_size):
        _PROGRESS.pack_into(progress, rank * _PROGRESS.size, -1)
    children = fork_all(place, plan, world_size, progress)
    reached = tell(children, plan, progress)
    ends = end_all(children)
    promises = {path.read_text() for path in place.glob("promised-*")}
    crashed, found = in_child(partial(load_next, place / "run", world_size))
    assert not crashed
    assert found not in (RAISED, NEVER_SAVED), f"{ends}, then the load returned {found}"
    assert len(promises) <= 1, f"{ends}: {promises}"
    for promise in promises:
        step, code = promise.split()
        assert code in ("75", "76"), f"{ends}: {promises}"
        assert found == int(step) + 1, f"{ends}: {promises}, then loaded {found - 1}"
    if plan.killed_after_s is not None:
        return f"killed {'after' if promises else 'before'} it ended"
    if set(ends) == {DONE}:
        return "done before it was told"
    codes = {int(promise.split()[1]) for promise in promises}
    assert set(ends) == codes, f"{ends}: {promises}"
    if plan.recent_s == 0.0:
        assert found - 1 >= reached, f"{promises}, and {reached} was reached"
    return f"{'saved anew' if found - 1 >= reached else 'flushed'}, status {ends[0]}"


def prepare(world_size: int) -> Case:
    """Return the cases of a run of so many ranks."""

    def look(seed: int, place: Path) -> Outcomes:
        plan = Plan(seed, world_size)
        with noted(lambda: f"{vars(plan)}"):
            return Counter({tell_and_look(place, plan, world_size): 1})

    return in_folders(look)


CAMPAIGN = Campaign(name="preemptions", counts="signals", prepare=partial(prepare, 1), smoke_count=4, apart=True)
RANKS = Campaign(
    name="preemptions-ranks", counts="jobs told", prepare=partial(prepare, WORLD_SIZE), smoke_count=4, apart=True
)
