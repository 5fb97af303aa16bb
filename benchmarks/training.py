"""How much of the training's time does a save take? A loop of many small operations, with and without saves.

Small operations make the loop depend on the interpreter and its lock, not on the arithmetic: the hardest kind of
training to stay out of the way of. The loop's own model is tiny; the state that is saved is the big one, untouched.
Torch is held to one thread here: with more, steps this small measure the thread barrier and not the save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import torch

from benchmarks.contenders import Pending

QUIET_STEPS = 1000
SAVING_STEPS = 200


class Slowdown(msgspec.Struct, frozen=True):
    """One save beside the quiet steps that ran just before it; seconds. ``lost_s`` counts the call itself too."""

    lost_s: float
    quiet_p50_s: float
    quiet_p99_s: float
    saving_p50_s: float
    saving_p99_s: float


def small_step(*, optimizes: bool = True) -> Callable[[], None]:
    """Return a training step of well under a millisecond: forward, backward, and an optimizer step on a tiny model.

    Args:
        optimizes: whether the optimizer steps, which would end a lazy snapshot's leisure in the first millisecond.
    """
    torch.set_num_threads(1)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(48, 48), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(16, 48)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if optimizes:
            optimizer.step()

    return step


def percentile(samples: list[float], fraction: float) -> float:
    """Return the sample below which *fraction* of them lie (nearest rank)."""
    return sorted(samples)[min(len(samples) - 1, int(fraction * len(samples)))]


def measure_save(
    step: Callable[[], None], save: Callable[[], Pending], clock: Callable[[], float] = time.perf_counter
) -> Slowdown:
    """Run quiet steps, then *save* and steps until the checkpoint is durable, and compare the two."""
    os.sync()
    quiet = _run(step, lambda count: count >= QUIET_STEPS, clock)
    start = clock()
    pending = save()
    if pending.done():  # a blocking save: what is left to be durable is the training thread's own work
        pending.wait()
    saving = _run(step, lambda count: count >= SAVING_STEPS and pending.done(), clock)
    pending.wait()
    wall_s = clock() - start
    return Slowdown(
        lost_s=wall_s - len(saving) * sum(quiet) / len(quiet),
        quiet_p50_s=percentile(quiet, 0.5),
        quiet_p99_s=percentile(quiet, 0.99),
        saving_p50_s=percentile(saving, 0.5),
        saving_p99_s=percentile(saving, 0.99),
    )


def _run(step: Callable[[], None], enough: Callable[[int], bool], clock: Callable[[], float]) -> list[float]:
    """Run steps until *enough* says so of their count; return the seconds that each took."""
    seconds: list[float] = []
    before = clock()
    while not enough(len(seconds)):
        step()
        now = clock()
        seconds.append(now - before)
        before = now
    return seconds
